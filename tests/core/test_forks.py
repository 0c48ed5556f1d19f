"""n > 1: one prompt, shared blocks, copy-on-write of the last partial block."""

from __future__ import annotations

import pytest

from engine.core.engine import RequestRefused
from tests.core.kit import add, assert_oracle, drain, make


def ops(step, *names):
    return [event for event in (*step.events, *step.events_after) if event.op in names]


def test_samples_share_the_prompt_and_copy_its_partial_block_when_they_write():
    engine = make(block_size=16, num_kv_blocks=16)
    add(engine, 20, 3, request_id="A", n=3)
    first = engine.step()
    assert [(r.request_id, r.kind, r.num_tokens) for r in first.scheduled] == [
        ("A", "prefill", 20),
        ("A#1", "fork", 0),
        ("A#2", "fork", 0),
    ]
    assert [(e.request_id, e.other) for e in ops(first, "fork")] == [("A#1", "A"), ("A#2", "A")]
    assert (first.kv_used, first.seats, first.num_running, first.num_tokens) == (2, 3, 3, 20)
    state = engine.snapshot()
    assert state.tables == {"A": (1, 2), "A#1": (1, 2), "A#2": (1, 2)}
    assert state.computed == {"A": 20, "A#1": 20, "A#2": 20}
    stats = engine.stats()
    assert (stats.blocks_referenced, stats.kv_reserved_tokens, stats.kv_stored_tokens) == (2, 32, 20)
    assert engine.runner.batches[0].copies == []

    second = engine.step()
    assert [(e.request_id, e.blocks, e.value) for e in ops(second, "cow")] == [("A", (2, 3), 1), ("A#1", (2, 4), 1)]
    assert engine.runner.batches[1].copies == [(2, 3), (2, 4)]  # the last owner writes in place
    assert engine.snapshot().tables == {"A": (1, 3), "A#1": (1, 4), "A#2": (1, 2)}
    assert second.kv_used == 4
    assert ops(second, "alloc") == []
    third = engine.step()
    assert ops(third, "cow", "alloc") == []
    assert not engine.has_unfinished()
    assert_oracle(engine, "A")


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("samples", [2, 3, 5])
def test_copies_and_blocks_for_every_length_around_a_block(length, samples):
    engine = make(block_size=16, num_kv_blocks=32)
    add(engine, length, 4, request_id="A", n=samples)
    first, second = engine.step(), engine.step()
    full, partial = divmod(length, 16)
    assert first.kv_used == full + bool(partial)
    assert second.kv_used == full + samples
    assert len(engine.runner.batches[1].copies) == (samples - 1 if partial else 0)
    drain(engine)
    assert_oracle(engine, "A")


def test_a_sample_that_is_alone_again_writes_in_place():
    engine = make(block_size=16, num_kv_blocks=8)
    add(engine, 20, 4, request_id="A", n=2)
    engine.step()
    engine.abort("A#1")
    engine.step()
    assert engine.runner.batches[1].copies == []
    assert engine.snapshot().tables == {"A": (1, 2)}
    drain(engine)


def test_samples_take_seats_before_they_exist():
    engine = make(max_num_seqs=4, num_kv_blocks=64, max_num_batched_tokens=8)
    add(engine, 4, 20, request_id="A")
    engine.step()
    add(engine, 20, 3, request_id="B", n=3, start=2)
    add(engine, 4, 3, request_id="C", start=3)
    for _ in range(2):
        step = engine.step()
        assert (step.seats, step.num_running) == (4, 2)
        assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed, step.blocked.available) == (
            "C",
            "seats",
            1,
            0,
        )
    drain(engine)
    for name in "ABC":
        assert_oracle(engine, name)


def test_a_request_waits_until_all_its_samples_have_seats():
    engine = make(max_num_seqs=4, num_kv_blocks=64)
    add(engine, 4, 3, request_id="A", n=2)
    add(engine, 4, 3, request_id="B", n=3, start=2)
    step = engine.step()
    assert (step.blocked.request_id, step.blocked.needed, step.blocked.available) == ("B", 3, 2)
    drain(engine)
    assert_oracle(engine, "B")


@pytest.mark.parametrize("blocks", [4, 5, 6, 7])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_survive_preemption_in_a_pool_too_small_for_all(blocks, policy, caching):
    engine = make(block_size=4, num_kv_blocks=blocks, scheduling_policy=policy, enable_prefix_caching=caching)
    add(engine, 6, 11, request_id="A", n=4)  # each sample needs 4 blocks to its end
    add(engine, 6, 5, request_id="B", n=2, start=2, priority=-1)
    drain(engine)
    assert engine.stats().preemptions > 0
    assert_oracle(engine, "A")
    assert_oracle(engine, "B")


@pytest.mark.parametrize("budget", [1, 3, 5, 64])
def test_samples_with_a_budget_that_splits_everything(budget):
    engine = make(block_size=4, num_kv_blocks=16, max_num_batched_tokens=budget, max_num_seqs=4)
    add(engine, 9, 4, request_id="A", n=3)
    drain(engine)
    assert_oracle(engine, "A")


def test_a_fork_from_cached_blocks():
    engine = make(block_size=4, num_kv_blocks=16)
    add(engine, 10, 1, request_id="A")
    drain(engine)
    add(engine, 10, 4, request_id="B", n=2)
    drain(engine)
    assert engine.request("B").cached_tokens == 8
    assert engine.request("B#1").cached_tokens == 0
    assert engine.stats().tokens_cached == 8
    assert_oracle(engine, "B")


def test_samples_that_end_with_their_first_token():
    engine = make(block_size=4, num_kv_blocks=4)
    add(engine, 10, 1, request_id="A", n=3)
    drain(engine)
    assert_oracle(engine, "A")
    assert engine.stats().finished == 3
    assert engine.stats().blocks_cached == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_layout": "contiguous"}, "kv_layout='contiguous'"),
        ({"use_kv_cache": False}, "use_kv_cache=False"),
        ({"batching": "static"}, "batching='static'"),
        ({"max_num_seqs": 2}, "max_num_seqs=2"),
    ],
)
def test_samples_are_refused_where_blocks_cannot_be_shared(fields, words):
    engine = make(**fields)
    with pytest.raises(RequestRefused, match="n=3") as refused:
        add(engine, 4, 2, n=3)
    assert words in str(refused.value)
    assert not engine.has_unfinished()


def test_each_sample_has_a_life_of_its_own():
    engine = make(num_kv_blocks=16)
    add(engine, 4, 3, request_id="A", n=2)
    drain(engine)
    parent, child = engine.request("A"), engine.request("A#1")
    assert parent.samples == child.samples == ("A", "A#1")
    assert (parent.parent_id, child.parent_id) == ("", "A")
    assert parent.number != child.number
    assert parent.token_steps == child.token_steps == [0, 1, 2]
    assert engine.output("A#1").request_id == "A"
    assert [output.index for output in engine.output("A").outputs] == [0, 1]
