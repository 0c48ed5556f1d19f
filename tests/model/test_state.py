"""The requests' state on the device: whatever happens to requests, a step's inputs are those that the host would send."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.runner import PENDING, Work
from engine.model.errors import ModelError
from engine.model.state import RequestState
from tests.model.kit import make_request
from tests.model.state_lives import BLOCK_SIZE, LONGEST, live, upload

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_inputs_are_those_that_the_host_would_send(seed):
    live(seed)


def test_random_lives_meet_what_they_are_for():
    met = Counter()
    for seed in range(12):
        met.update(live(seed))
    assert all(met[what] > 30 for what in ("decodes", "chunks", "nothing sent", "pending")), met


def state_of(seats=2):
    return RequestState(seats, LONGEST, BLOCK_SIZE, CPU, upload)


def decode(request, table):
    return Work(request, [request.token_ids[-1]], request.num_tokens - 1, table, (request,))


def test_a_long_decode_sends_a_block_when_one_begins_and_nothing_else():
    state, request = state_of(), make_request("a", [1] * 4, temperature=0.5)
    table, sent = [9], []
    for step in range(16):
        table = [*table, 10 + step] if request.num_tokens % BLOCK_SIZE == 1 else table
        changes = state.plan([decode(request, table)], resident_tokens=True)
        sent.append((len(changes.counters), len(changes.numbers), len(changes.entries[0]), len(changes.tokens[0])))
        state.learn(state.turn, changes.sampling, [7])
        request.token_ids.append(7)
    new_block = (0, 0, 1, 0)
    assert sent == [(1, 1, 1, 1), new_block, *[(0, 0, 0, 0)] * 3, new_block, *[(0, 0, 0, 0)] * 3, new_block,
                    *[(0, 0, 0, 0)] * 3, new_block, (0, 0, 0, 0), (0, 0, 0, 0)]  # fmt: skip


def test_a_table_that_changed_is_sent_whole_and_once():
    state, request = state_of(), make_request("a", [1] * 6)
    tables, sent = ([3, 4], [3, 5], [3, 5], [3], [3, 5]), []
    for table in tables:
        changes = state.plan([Work(request, [1], 2, table, ())], resident_tokens=False)
        sent.append(changes.entries)
    start = changes.seats[0] * state.width
    whole = [start, start + 1]
    assert sent == [(whole, [3, 4]), (whole, [3, 5]), ([], []), ([start], [3]), ([start + 1], [5])]


def test_a_fork_goes_on_with_nothing_sent_but_its_table():
    state, parent, fork = state_of(), make_request("a", [1, 2]), make_request("b", [1, 2], sample_index=1, temperature=1)
    first = state.plan([Work(parent, [1, 2], 0, [3], (parent, fork))], resident_tokens=False)
    assert len(first.counters) == len(first.numbers) == 2
    fork.token_ids.append(PENDING)
    second = state.plan([decode(fork, [4])], resident_tokens=True)
    assert (second.counters, second.numbers, second.tokens) == ([], [], ([], [])) and second.entries[1] == [4]


def test_a_token_that_the_host_changed_is_sent():
    state, request = state_of(), make_request("a", [1, 2])
    changes = state.plan([decode(request, [3])], resident_tokens=True)
    state.learn(state.turn, changes.sampling, [7])
    request.token_ids.append(8)
    assert state.plan([decode(request, [3])], resident_tokens=True).tokens == ([changes.seats[0]], [8])


def test_tokens_learned_late_are_not_taken_for_newer_ones():
    state, request = state_of(), make_request("a", [1, 2])
    first = state.plan([decode(request, [3])], resident_tokens=True)
    turn = state.turn
    request.token_ids.append(PENDING)
    state.plan([decode(request, [3])], resident_tokens=True)
    state.learn(turn, first.sampling, [7])
    request.token_ids[-1:] = [7, PENDING]
    later = state.plan([decode(request, [3, 4])], resident_tokens=True)
    assert later.tokens == ([], [])
    state.learn(turn, first.sampling, [9])
    request.token_ids[-1:] = [8, 9]
    assert state.plan([decode(request, [3, 4])], resident_tokens=True).tokens == (first.seats, [9])


def test_more_requests_than_seats_are_refused():
    works = [decode(make_request(str(i)), [1]) for i in range(3)]
    state = state_of()
    for before in ([], works[:1], works[1:]):
        state.plan(before, resident_tokens=True)
        with pytest.raises(ModelError, match="a step of 3 requests, but max_num_seqs is 2"):
            state.plan(works, resident_tokens=True)


def test_a_table_that_is_too_wide_is_refused():
    with pytest.raises(ValueError, match="11 blocks, but the buffers hold 10: raise max_model_len"):
        state_of().plan([decode(make_request(), list(range(11)))], resident_tokens=True)


@pytest.mark.parametrize("sampled_before", [False, True])
def test_a_token_that_nobody_sampled_is_refused(sampled_before):
    state, request = state_of(), make_request("a", [1, 2])
    if sampled_before:
        state.plan([decode(request, [3])], resident_tokens=True)
        request.token_ids.append(5)
    request.token_ids.append(PENDING)
    with pytest.raises(KeyError, match=r"Request\('a'.* is pending, but the step submitted before doesn't sample for it"):
        state.plan([decode(request, [3])], resident_tokens=True)


def test_a_token_of_a_step_that_failed_is_refused():
    state, request = state_of(), make_request("a", [1, 2])
    state.plan([decode(request, [3])], resident_tokens=True)
    state.distrust()
    request.token_ids.append(PENDING)
    with pytest.raises(KeyError, match="is pending"):
        state.plan([decode(request, [3])], resident_tokens=True)


def test_the_bytes_are_those_of_the_tensors():
    state = RequestState(3, 100, 8, CPU, upload)
    assert state.num_bytes == 4 * (8 + 4 * 8 + 7 * 8 + 13 * 4)
