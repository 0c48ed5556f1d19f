"""Blocks of several owners, block boundaries, and cancelling at any moment: the others get the tokens they get alone."""

import random
import threading
import time

import pytest

from engine import SamplingParams
from tests.cases.kit import (
    Ear,
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

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("shared", [15, 16, 32, 47])
@pytest.mark.parametrize("victim", ["first", "second", "finished", "unknown"])
def test_cancelling_twice_leaves_the_request_that_shares_its_blocks_alone(rand, shared, victim):
    for moment in range(7):
        llm = rand.llm()
        prefix = prompt_of(shared, 5)
        first = llm.add_request([*prefix, 1, 2, 3], greedy(3 if victim == "finished" else 9))
        steps_of(llm, 1)
        second = llm.add_request([*prefix, 9, 8], greedy(10))
        steps_of(llm, moment)
        assert llm.request(second).cached_tokens == (shared // 16 * 16 if moment else 0)
        if victim == "finished":
            steps_of(llm, 8)
            assert llm.request(first).finish_reason == "length"
        chosen = {"first": first, "second": second, "finished": first, "unknown": "nobody"}[victim]
        before = llm.stats()
        assert llm.abort(chosen) is (victim in ("first", "second"))
        llm.check()
        assert not llm.abort(chosen), "the second time is a no-op"
        if victim in ("finished", "unknown"):
            assert llm.stats() == before
        drain(llm)
        survivor = first if victim == "second" else second
        assert_oracle(rand, [llm.output(survivor)], count=9 if victim == "second" else 10)
        assert llm.stats().aborted == (victim in ("first", "second"))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 20])
def test_cancelling_one_sample_leaves_the_samples_that_share_its_blocks_alone(rand, length):
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=12)
    prompt = prompt_of(length, 8)
    llm = rand.llm(block_size=8)
    (alone,) = llm.generate([prompt], params)
    for moment in range(4):
        for index in range(1, 4):
            name = llm.add_request(prompt, params)
            steps_of(llm, moment)
            assert llm.abort(f"{name}#{index}") and not llm.abort(f"{name}#{index}")
            drain(llm)
            for sample, before in zip(llm.output(name).outputs, alone.outputs, strict=True):
                whole = sample.index != index
                assert sample.finish_reason == ("length" if whole else "abort")
                assert sample.token_ids == (before.token_ids if whole else before.token_ids[:moment])
    assert_alive(llm, rand)


def test_greedy_samples_of_one_prompt_are_all_the_oracles(rand):
    llm = rand.llm(block_size=4)
    for length in range(1, 14):
        outputs = llm.generate([prompt_of(length, 21)], greedy(9, n=3))
        assert_oracle(rand, outputs, count=9)
    assert_idle(llm)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_no_token_is_lost_and_no_block_too_many_at_block_boundaries(rand, block_size, caching):
    sizes = [1, 2, 14, 15, 16, 17, 18, 31, 32, 33]
    outputs = []
    for length in sizes:
        for count in (1, 2, 3, 16, 17):
            llm = rand.llm(block_size=block_size, num_kv_blocks=64, enable_prefix_caching=caching)
            name = llm.add_request(prompt_of(length, 40), greedy(count))
            peak = max(step.kv_used for step in drain(llm))
            assert peak == -(-(length + count - 1) // block_size), f"P={length}, max_tokens={count}"
            assert len(llm.output(name).outputs[0].token_ids) == count
            outputs.append(llm.output(name))
    assert_oracle(rand, outputs)


def test_cancelling_from_another_thread_kills_nobody_else(rand):
    """One seat; A runs, B, C, D wait. C is cancelled by another thread at a random moment, B as A finishes."""
    ear = Ear()
    llm = rand.llm(max_num_seqs=1, listener=ear)
    names: dict[str, str] = {}
    closed = ear.closed

    def closed_and_cancel(event):
        closed(event)
        if event.trace.request_id == names.get("A") and "B" in names:
            assert llm.abort(names["B"])

    ear.closed = closed_and_cancel
    jobs: list = []
    work = threading.Semaphore(0)
    trouble: list[BaseException] = []

    def other_thread():
        while True:
            work.acquire()
            delay, name = jobs.pop()
            if name is None:
                return
            time.sleep(delay)
            try:
                llm.abort(name)
                llm.abort(name)
            except BaseException as error:
                trouble.append(error)

    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    source = random.Random(4)
    outcomes = {"abort": 0, "length": 0}
    outputs = []
    for repeat in range(200):
        names.clear()
        names["A"] = llm.add_request(prompt_of(5, 1), greedy(2 + repeat % 3))
        for letter in "BCD":
            names[letter] = llm.add_request(prompt_of(5, 2), greedy(3))
        jobs.append((source.random() * 0.012, names["C"]))
        work.release()
        while llm.has_unfinished():
            checked_step(llm)
        assert llm.request(names["B"]).finish_reason == "abort"
        assert llm.request(names["A"]).finish_reason == llm.request(names["D"]).finish_reason == "length"
        outcomes[llm.request(names["C"]).finish_reason] += 1
        outputs += outputs_of(llm, [names["A"], names["D"]])
        assert_idle(llm)
    jobs.append((0, None))
    work.release()
    thread.join(10)
    assert not thread.is_alive() and not trouble
    assert outcomes["abort"], "the other thread never came in time: this proves nothing"
    assert_oracle(rand, outputs)


@pytest.mark.parametrize("moment", range(6))
def test_cancelling_all_at_once_leaves_empty_gauges(rand, moment):
    llm = rand.llm(max_num_seqs=8, max_num_batched_tokens=40)
    names = [llm.add_request(prompt_of(20, i), greedy(30)) for i in range(16)]
    steps_of(llm, moment)
    assert all(llm.abort(name) for name in names)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.kv_usage, stats.aborted) == (0, 0, 0.0, 16)
    assert_idle(llm)
    assert not llm.step().scheduled
    assert_alive(llm, rand)


def test_cancelling_in_the_middle_of_a_chunked_prompt(rand):
    for moment in range(1, 8):
        llm = rand.llm(max_num_batched_tokens=16)
        long = llm.add_request(prompt_of(100, 3), greedy(5))
        short = llm.add_request(prompt_of(9, 4), greedy(5))
        steps_of(llm, moment)
        assert llm.abort(long)
        drain(llm)
        again = llm.add_request(prompt_of(100, 3), greedy(5))
        drain(llm)
        assert_oracle(rand, outputs_of(llm, [short, again]), count=5)
