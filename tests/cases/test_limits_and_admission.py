"""What can never run is refused at once with the numbers; what can run, runs to its end; who waits, waits for a reason."""

import time

import pytest

from engine import SamplingParams
from tests.cases.kit import (
    Model,
    assert_alive,
    assert_idle,
    assert_oracle,
    checked_step,
    drain,
    greedy,
    outputs_of,
    prompt_of,
    steps_of,
)
from tests.fixtures import make_rand

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("limit", [2, 15, 16, 17, 64])
@pytest.mark.parametrize("budget", [None, 7])
def test_a_sequence_may_fill_the_context_and_not_one_token_more(rand, limit, budget):
    llm = rand.llm(max_model_len=limit, max_num_seqs=4, max_num_batched_tokens=budget)
    outputs = []
    sweep = [
        (limit - 1, 1),
        (limit, 1),
        (limit - 1, 2),
        (limit + 1, 1),
        (1, limit - 1),
        (1, limit),
        (limit // 2, limit // 2),
    ]
    for length, count in sweep:
        begin = time.monotonic()
        if 1 <= length < limit and length + count <= limit:
            (output,) = llm.generate([prompt_of(length, 3)], greedy(count))
            assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (count, "length")
            outputs.append(output)
        else:
            with pytest.raises(ValueError, match=rf"(?s)prompt has {length} tokens.*max_model_len={limit}"):
                llm.add_request(prompt_of(length, 3), greedy(count))
            assert not llm.has_unfinished()
            assert time.monotonic() - begin < 2
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        greedy(0)
    assert_oracle(rand, outputs)
    assert_idle(llm)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory):
    return Model.load(make_rand(tmp_path_factory.mktemp("long"), max_position_embeddings=2048))


def test_a_refusal_names_the_limit_the_prompt_and_what_was_asked(long_context):
    llm = long_context.llm(max_model_len=2048, num_kv_blocks=200)
    with pytest.raises(ValueError) as refusal:
        llm.add_request(prompt_of(8), greedy(2045))
    assert all(number in str(refusal.value) for number in ("2048", " 8 ", "2045", "2040"))
    with pytest.raises(ValueError, match=r"2049 tokens.*2048.*2047"):
        llm.add_request(prompt_of(2049), greedy(1))
    for count in (2040, None):
        name = llm.add_request(prompt_of(8), greedy(count))
        assert llm.request(name).max_tokens == 2040
        assert llm.abort(name)
    assert llm.stats().refused == 2
    assert_alive(llm, long_context)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6, 7])
def test_a_request_that_outgrows_the_pool_is_refused_or_ends_truthfully(rand, blocks):
    llm = rand.llm(num_kv_blocks=blocks, max_model_len=128)
    if blocks < 7:
        with pytest.raises(
            ValueError, match=rf"need 7 KV blocks \(60 prompt tokens \+ max_tokens=40.*num_kv_blocks={blocks}"
        ):
            llm.add_request(prompt_of(60, 1), greedy(40))
    length = 16 * blocks - 4
    (output,) = llm.generate([prompt_of(length, 1)], greedy(None))
    room = min(5, 128 - length)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (room, "length")
    assert llm.stats().preemptions == 0
    assert_oracle(rand, [output], count=room)
    assert_alive(llm, rand)


def test_exactly_the_pool_is_enough(rand):
    for blocks in range(1, 6):
        for count in (1, 2, 9, 15):
            llm = rand.llm(num_kv_blocks=blocks, max_model_len=128)
            length = 16 * blocks + 1 - count
            (output,) = llm.generate([prompt_of(length, 2)], greedy(count))
            assert len(output.outputs[0].token_ids) == count
            with pytest.raises(ValueError, match=rf"need {blocks + 1} KV blocks"):
                llm.add_request(prompt_of(length, 2), greedy(count + 1))
            assert_oracle(rand, [output], count=count)


def test_empty_prompts_harm_nobody(rand):
    llm = rand.llm()
    running = llm.add_request(prompt_of(9, 1), greedy(12))
    steps_of(llm, 2)
    for attempt in (
        lambda: llm.generate(""),
        lambda: llm.generate([""]),
        lambda: llm.generate([[]]),
        lambda: llm.add_request([]),
        lambda: llm.add_request(""),
        lambda: llm.generate(["ok", ""]),
        lambda: llm.generate(["ok", []]),
        lambda: llm.chat([]),
        lambda: llm.chat([[]]),
    ):
        begin = time.monotonic()
        with pytest.raises(ValueError, match="empty"):
            attempt()
        assert time.monotonic() - begin < 2
        llm.check()
        assert llm.stats().waiting == 0 and llm.has_unfinished(), "the neighbour stays, the refused batch goes"
    (space,) = llm.generate(" ", greedy(4))
    assert space.prompt_token_ids == [32]
    drain(llm)
    assert_oracle(rand, [space], count=4)
    assert_oracle(rand, [llm.output(running)], count=12)
    assert_alive(llm, rand)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16, 17, 79, 80, 81])
def test_a_chunked_prompt_advances_by_the_budget_in_every_step(rand, budget, caching):
    llm = rand.llm(max_num_batched_tokens=budget, max_num_seqs=1, enable_prefix_caching=caching)
    name = llm.add_request(prompt_of(80, 2), greedy(6))
    steps = drain(llm)
    chunks = [step.scheduled[0].num_tokens for step in steps if step.scheduled[0].kind == "prefill"]
    assert chunks == [budget] * (80 // budget) + [80 % budget] * bool(80 % budget)
    assert max(step.kv_used for step in steps) == 6
    assert max(step.kv_used for step in steps[: len(chunks)]) == 5
    assert_oracle(rand, [llm.output(name)], count=6)


def test_small_requests_wait_behind_a_large_one_that_is_named(rand):
    llm = rand.llm(num_kv_blocks=10, max_model_len=200)
    runner = llm.add_request(prompt_of(85, 1), greedy(12))
    steps_of(llm, 1)
    large = llm.add_request(prompt_of(120, 2), greedy(3))
    small = [llm.add_request(prompt_of(6, 3 + i), greedy(3)) for i in range(20)]
    admitted: list[str] = []
    while llm.has_unfinished():
        waits = llm.request(runner).finish_reason is None
        step = checked_step(llm)
        admitted += [event.request_id for event in step.events if event.op == "admit"]
        if waits:
            assert step.blocked is not None
            assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed) == (large, "blocks", 8)
            assert step.blocked.available == 10 - step.kv_used
    assert admitted == [large, *small], "strict order: the large one first, as soon as its blocks are free"
    assert_oracle(rand, outputs_of(llm, [runner, large, *small]))
    assert_idle(llm)


def test_a_full_queue_refuses_with_its_numbers_and_recovers(rand):
    llm = rand.llm(max_num_queued_requests=3, max_num_seqs=1)
    names = [llm.add_request(prompt_of(5, i), greedy(3)) for i in range(3)]
    with pytest.raises(ValueError, match=r"3 requests wait already and max_num_queued_requests=3"):
        llm.add_request(prompt_of(5, 9), greedy(3))
    steps_of(llm, 1)
    names.append(llm.add_request(prompt_of(5, 9), greedy(3)))
    drain(llm)
    assert_oracle(rand, outputs_of(llm, names), count=3)


@pytest.mark.parametrize("bad", [[320], [-1], [1, 2, 10**30], ["a"], [1.5], [True], [None]])
def test_a_prompt_of_anything_but_token_ids_is_refused(rand, bad):
    llm = rand.llm()
    with pytest.raises(ValueError):
        llm.add_request(bad, greedy(2))
    assert_idle(llm)
    assert_alive(llm, rand)


def test_what_a_request_asks_for_in_vain_is_refused_by_name(rand):
    llm = rand.llm(max_num_seqs=4)
    for params, name in (
        ({"n": 5}, "n=5"),
        ({"max_tokens": None, "min_tokens": 300}, "min_tokens=300"),
    ):
        with pytest.raises(ValueError, match=name):
            llm.add_request(prompt_of(5), SamplingParams(temperature=0, **params))
    with pytest.raises(ValueError, match="priority='high'"):
        llm.add_request(prompt_of(5), greedy(2), priority="high")
    with pytest.raises(ValueError, match="cache_salt=5"):
        llm.add_request(prompt_of(5), greedy(2), cache_salt=5)
    assert_alive(llm, rand)
