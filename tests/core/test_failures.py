"""A request that produces NaN ends alone; a runner that raises ends its step; the engine goes on."""

from __future__ import annotations

import pytest

from tests.core.kit import NAN, add, assert_idle, assert_oracle, drain, make, prompt_of


def fail_alone(engine, victim):
    """The victim ended with an error that says why."""
    trace = engine.request(victim)
    assert trace.finish_reason == "error"
    assert "NaN" in trace.error


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("moment", range(7))
def test_nan_in_a_chunk_of_the_prompt_or_in_decode_ends_that_request_alone(moment, caching):
    engine = make(block_size=4, num_kv_blocks=16, max_num_batched_tokens=12, enable_prefix_caching=caching, max_num_seqs=4)
    add(engine, 6, 12, request_id="A", start=1)
    engine.step()
    add(engine, 22, 6, request_id="V", start=2)
    for _ in range(moment):
        engine.step()
    generated = engine.request("V").output_tokens
    engine.runner.poison.add("V")
    cached_before = set(engine.snapshot().cached)
    step = engine.step()
    fail_alone(engine, "V")
    row = next(row for row in step.scheduled if row.request_id == "V")
    assert row.sampled == -1
    assert engine.request("V").output_tokens == generated  # the meaningless token is not part of the output
    assert "V" not in engine.snapshot().tables
    poisoned = {block for block, slots in engine.runner.blocks.items() if NAN in slots}
    assert poisoned
    assert not poisoned & set(engine.snapshot().cached)
    assert set(engine.snapshot().cached) >= cached_before - poisoned
    scrubbed = {block for event in step.events_after if event.op == "scrub" for block in event.blocks}
    assert poisoned <= scrubbed
    again = add(engine, 22, 6, start=2)  # the same prompt right away, over the same blocks
    drain(engine)
    assert_oracle(engine, "A")
    assert_oracle(engine, again)
    assert engine.stats().failed == 1


@pytest.mark.parametrize("layout", ["contiguous", "static", "no cache"])
def test_nan_under_the_baselines(layout):
    fields = {
        "contiguous": {"kv_layout": "contiguous", "reserve": "request"},
        "static": {"batching": "static"},
        "no cache": {"use_kv_cache": False},
    }[layout]
    engine = make(num_kv_blocks=8, **fields)
    names = [add(engine, 10, 6, start=start) for start in range(3)]
    engine.step()
    engine.runner.poison.add(names[1])
    engine.step()
    fail_alone(engine, names[1])
    later = add(engine, 10, 6, start=9)
    drain(engine)
    for name in (names[0], names[2], later):
        assert_oracle(engine, name)


@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_nan_in_a_prompt_ends_all_samples_and_in_a_decode_only_that_one(moment):
    engine = make(block_size=4, num_kv_blocks=16)
    add(engine, 6, 8, request_id="A", n=3)
    for _ in range(moment):
        engine.step()
    engine.runner.poison.add("A#1" if moment else "A")
    engine.step()
    reasons = [sample.finish_reason for sample in engine.output("A").outputs]
    assert reasons == ([None, "error", None] if moment else ["error"] * 3)
    drain(engine)
    assert [s.finish_reason for s in engine.output("A").outputs] == (
        ["length", "error", "length"] if moment else ["error"] * 3
    )


def test_nan_before_the_fork_ends_the_samples_that_wait():
    engine = make(block_size=4, num_kv_blocks=16, max_num_batched_tokens=8)
    add(engine, 20, 8, request_id="A", n=3)
    engine.step()
    engine.runner.poison.add("A")
    engine.step()
    for name in ("A", "A#1", "A#2"):
        fail_alone(engine, name)
    assert_idle(engine)


def test_a_runner_that_flags_a_forked_sample_ends_that_sample():
    engine = make(block_size=4, num_kv_blocks=16)
    add(engine, 6, 3, request_id="A", n=2)
    real = engine.runner.execute

    def flagged(batch):
        result = real(batch)
        result.nonfinite = frozenset({"A#1"}) if batch.index == 0 else frozenset()
        return result

    engine.runner.execute = flagged
    engine.step()
    fail_alone(engine, "A#1")
    drain(engine)
    assert engine.output("A").outputs[0].finish_reason == "length"


def test_scrub_comes_before_the_block_is_used_again_and_once():
    engine = make(block_size=4, num_kv_blocks=4, enable_prefix_caching=False)
    add(engine, 14, 2, request_id="V")
    engine.runner.poison.add("V")
    engine.step()
    assert engine.runner.batches[-1].scrub == []
    add(engine, 14, 2, request_id="A", start=2)
    engine.step()
    assert sorted(engine.runner.batches[-1].scrub) == [1, 2, 3, 4]
    engine.step()
    assert engine.runner.batches[-1].scrub == []
    assert_oracle(engine, "A")


def test_blocks_that_others_hold_or_know_are_not_scrubbed():
    engine = make(block_size=4, num_kv_blocks=16)
    shared = prompt_of(8)
    add(engine, [*shared, 1], 6, request_id="A")
    engine.step()
    add(engine, [*shared, 2], 6, request_id="V")
    engine.step()
    held = engine.snapshot().tables
    engine.runner.poison.add("V")
    step = engine.step()
    scrubbed = [block for event in step.events_after if event.op == "scrub" for block in event.blocks]
    assert scrubbed == [held["V"][2]]
    later = add(engine, [*shared, 3], 2)
    drain(engine)
    assert engine.request(later).cached_tokens == 8
    assert_oracle(engine, later)
    assert_oracle(engine, "A")


CONFIGURATIONS = {
    "paged": {},
    "chunked": {"max_num_batched_tokens": 5},
    "contiguous": {"kv_layout": "contiguous", "reserve": "request"},
    "static": {"batching": "static"},
    "no cache": {"use_kv_cache": False},
}


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
@pytest.mark.parametrize("moment", range(5))
def test_a_runner_that_raises_ends_its_step_and_the_engine_goes_on(fields, moment):
    engine = make(block_size=4, num_kv_blocks=24, max_num_seqs=4, max_model_len=64, **fields)
    for start in range(3):
        add(engine, 6, 5, request_id=f"R{start}", start=start)
    for _ in range(moment):
        engine.step()
    engine.runner.fail_next = RuntimeError("out of memory: 3 GB wanted")
    step = engine.step()
    engine.check()
    failed = {row.request_id for row in step.scheduled if row.kind != "padding"}
    assert failed
    for name in failed:
        trace = engine.request(name)
        assert trace.finish_reason == "error"
        assert trace.error == "RuntimeError: out of memory: 3 GB wanted"
    assert all(row.sampled == -1 for row in step.scheduled)
    later = add(engine, 6, 5, start=7)
    drain(engine)
    for start in range(3):
        if f"R{start}" not in failed:
            assert_oracle(engine, f"R{start}")
    assert_oracle(engine, later)
    assert engine.stats().failed == len(failed)


def test_a_failing_step_does_not_forget_the_scrub_it_was_asked_for():
    engine = make(block_size=4, num_kv_blocks=8, enable_prefix_caching=False)
    add(engine, 14, 2, request_id="V")
    engine.runner.poison.add("V")
    engine.step()
    add(engine, 3, 2, request_id="X", start=2)
    engine.runner.fail_next = RuntimeError("device lost")
    engine.step()  # asked to scrub four blocks, used one, and raised before it did anything
    add(engine, 5, 2, request_id="A", start=3)  # its second block is only partly written: what it held before matters
    drain(engine)
    assert_oracle(engine, "A")


def test_a_failing_step_ends_all_samples():
    engine = make(block_size=4, num_kv_blocks=16)
    add(engine, 6, 8, request_id="A", n=3)
    engine.runner.fail_next = ValueError("bad")
    engine.step()
    assert [s.error for s in engine.output("A").outputs] == ["ValueError: bad"] * 3
    assert_idle(engine)
