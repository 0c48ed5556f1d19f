"""Asynchronous scheduling: a step is scheduled and submitted while the one before it is computed.

Every test runs on two devices: one that computes at submission, in order, and tells later (``QueueRunner``), and a runner
that only has ``execute`` behind the engine's own adapter (``MemoryRunner``).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

import engine.core.engine
from engine.core.ahead import OneByOne, async_runner
from engine.core.block_pool import sha256_block_hash
from engine.core.config import ConfigError, build_config
from engine.core.runner import PENDING, ScriptedRunner, StepBatch
from engine.core.sampling_params import SamplingParams
from engine.observe.replay import state_at
from tests.core.kit import (
    MemoryRunner,
    QueueRunner,
    add,
    assert_idle,
    assert_oracle,
    drain,
    make,
    note_schedules,
    oracle,
    prompt_of,
    tokens_of,
)  # fmt: skip


@pytest.fixture(params=[QueueRunner, MemoryRunner])
def ahead(request):
    """Makes engines that schedule ahead."""

    def build(**fields):
        fields = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 4, **fields}
        return make(request.param, async_scheduling=True, **fields)

    return build


def rows_of(steps, name):
    return [(step.index, row) for step in steps for row in step.scheduled if row.request_id == name]


def test_the_next_step_is_submitted_before_the_tokens_of_this_one_are_known():
    engine = make(QueueRunner, async_scheduling=True, num_kv_blocks=8)
    add(engine, 4, 3, request_id="A")
    first = engine.step()
    assert [batch.work[0].context for batch in engine.runner.batches] == [0, 4]
    assert engine.runner.in_flight == [1]
    assert (first.index, first.scheduled[0].sampled) == (0, oracle(prompt_of(4), 1)[0])
    assert tokens_of(engine, "A") == oracle(prompt_of(4), 1)  # what is pending is not shown
    assert engine.stats().steps == 1
    assert [step.index for step in drain(engine)] == [1, 2]
    assert_oracle(engine, "A")


@pytest.mark.parametrize("fields", [{"batching": "static"}, {"use_kv_cache": False}])
def test_baselines_that_need_the_tokens_first_are_refused(fields):
    (name, value), *_ = fields.items()
    with pytest.raises(
        ConfigError, match=f"async_scheduling=True can't work with {name}={value!r}.*set async_scheduling=False"
    ):
        build_config({"async_scheduling": True, **fields})
    assert not build_config({"async_scheduling": False, **fields}).async_scheduling
    with pytest.raises(ConfigError, match="async_scheduling=1 must be True or False"):
        build_config({"async_scheduling": 1})


@pytest.mark.parametrize("last", range(6))
def test_an_end_that_only_the_token_tells_costs_one_row(ahead, last):
    expected = oracle(prompt_of(6), 8)[: last + 1]
    engine = ahead(eos=[expected[-1]])
    add(engine, 6, 8, request_id="A")
    add(engine, 5, 12, request_id="B", start=2, ignore_eos=True)
    steps = drain(engine)
    assert tokens_of(engine, "A") == expected[: expected.index(expected[-1]) + 1]
    assert engine.request("A").finish_reason == "stop"
    ended = engine.request("A").token_steps[-1]
    index, row = rows_of(steps, "A")[-1]
    assert (index, row.kind, row.num_tokens, row.sampled) == (ended + 1, "decode", 1, -1)
    assert engine.stats().tokens_wasted == 1
    assert engine.stats().tokens_generated == sum(row.sampled >= 0 for step in steps for row in step.scheduled)
    assert_oracle(engine, "B")


@pytest.mark.parametrize(("max_tokens", "limit"), [(1, 64), (2, 64), (5, 64), (None, 12)])
def test_no_row_is_scheduled_beyond_an_end_that_is_known(ahead, max_tokens, limit):
    engine = ahead(max_model_len=limit)
    engine.add_request(prompt_of(8), SamplingParams(max_tokens=max_tokens), request_id="A")
    steps = drain(engine)
    expected = oracle(prompt_of(8), max_tokens or limit - 8)
    assert tokens_of(engine, "A") == expected
    assert sum(step.num_tokens for step in steps) == 8 + len(expected) - 1
    assert (engine.stats().tokens_wasted, len(steps)) == (0, len(expected))


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}])
def test_requests_with_penalties_go_on_while_their_token_is_pending(ahead, penalty):
    engine = ahead()
    add(engine, 6, 5, request_id="A", **penalty)
    add(engine, 5, 9, request_id="B", start=2)
    steps = drain(engine)
    assert [index for index, _ in rows_of(steps, "A")] == list(range(5))
    assert [index for index, _ in rows_of(steps, "B")] == list(range(9))
    assert_oracle(engine, "A")
    assert_oracle(engine, "B")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_preempted_while_its_token_is_in_flight_keeps_the_token(ahead, policy):
    engine = ahead(num_kv_blocks=6, scheduling_policy=policy, enable_prefix_caching=False)
    for name in "ABC":
        add(engine, 6, 9, request_id=name, start=ord(name), priority=ord(name))
    steps = drain(engine)
    in_flight = [
        preemption.request_id
        for before, step in pairwise(steps)
        for preemption in step.preemptions
        if any(row.request_id == preemption.request_id and row.sampled >= 0 for row in before.scheduled)
    ]
    assert in_flight
    for name in "ABC":
        assert_oracle(engine, name)


def test_a_request_preempted_in_flight_may_end_with_that_token(ahead):
    """C is preempted for the blocks of A and B in the step after the one that samples its stop token."""
    tokens = {name: oracle(prompt_of(6, ord(name)), 9) for name in "ABC"}
    for last in range(9):
        engine = ahead(num_kv_blocks=6, enable_prefix_caching=False)
        for name in "ABC":
            stop = tokens["C"][last] if name == "C" else None
            add(engine, 6, 9, request_id=name, start=ord(name), stop_token_ids=() if stop is None else (stop,))
        steps = drain(engine)
        ended = engine.request("C").token_steps[-1]
        if any(p.request_id == "C" for step in steps if step.index == ended + 1 for p in step.preemptions):
            assert engine.request("C").finish_reason == "stop"
            assert tokens_of(engine, "C") == tokens["C"][: tokens["C"].index(tokens["C"][last]) + 1]
            return
    pytest.fail("no stop token was in flight when C was preempted")


@pytest.mark.parametrize("moment", range(1, 6))
def test_abort_while_a_token_is_in_flight(ahead, moment):
    engine = ahead(max_num_batched_tokens=5)
    add(engine, 6, 8, request_id="A")
    add(engine, 4, 8, request_id="B", start=2)
    for _ in range(moment):
        engine.step()
    known = tokens_of(engine, "A")
    held = engine.snapshot().tables["A"]
    assert engine.abort("A")
    engine.check()
    assert tokens_of(engine, "A") == known
    assert PENDING not in known
    assert set(held) <= set(engine.snapshot().free)
    assert engine.abort("A") is False
    drain(engine)
    assert tokens_of(engine, "A") == known == oracle(prompt_of(6), len(known))
    assert engine.stats().tokens_wasted > 0
    assert_oracle(engine, "B")


def test_a_step_that_nobody_needs_is_collected_by_the_flush(ahead):
    engine = ahead()
    add(engine, 6, 8, request_id="A")
    engine.step()
    assert engine.flush_events() is None  # the next record tells
    assert engine.abort_all() == 1
    assert (engine.stats().running, engine.has_unfinished()) == (0, True)
    step = engine.flush_events()
    assert (step.index, step.scheduled[0].sampled, step.events) == (1, -1, ())
    assert [event.op for event in step.events_after] == ["cache", "free", "scrub", "finish"]
    assert engine.flush_events() is None
    assert_idle(engine)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("where", ["submit", "collect"])
@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("budget", [4, 512])
def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(where, moment, budget):
    engine = make(
        QueueRunner,
        async_scheduling=True,
        block_size=4,
        num_kv_blocks=24,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
    )
    names = [add(engine, 6, 5 + start, start=start) for start in range(5)]
    steps = [engine.step() for _ in range(moment)]
    at = len(engine.runner.batches)
    if where == "submit":
        engine.runner.fail_next = RuntimeError("out of memory: 3 GB wanted")
    else:
        engine.runner.fail_collect = True
    steps += drain(engine)
    assert [step.index for step in steps] == list(range(len(steps)))
    failed = [name for name in names if engine.request(name).finish_reason == "error"]
    broken = steps[at]
    assert set(failed) == {row.request_id for row in broken.scheduled}
    error = "RuntimeError: " + ("out of memory: 3 GB wanted" if where == "submit" else "lost on the device")
    for name in names:
        if name in failed:
            assert engine.request(name).error == error
            assert tokens_of(engine, name) == oracle(prompt_of(6, names.index(name)), engine.request(name).output_tokens)
        else:
            assert_oracle(engine, name)
    assert failed
    assert len(failed) < len(names)
    if where == "submit":
        assert not any(row.request_id in failed for step in steps[broken.index + 1 :] for row in step.scheduled)


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("fails", ["submit", "collect", "NaN"])
def test_samples_forked_ahead_of_a_prompt_that_fails_end_with_it(ahead, moment, fails):
    engine = ahead(max_num_batched_tokens=5)
    add(engine, 16, 6, request_id="A", n=3)
    for _ in range(moment):
        engine.step()
    if fails == "NaN":
        engine.runner.poison.add("A")
    elif fails == "collect" and isinstance(engine.runner, QueueRunner):
        engine.runner.fail_collect = True
    else:
        engine.runner.fail_next = RuntimeError("now")
    drain(engine)
    reasons = [sample.finish_reason for sample in engine.output("A").outputs]
    assert reasons[0] == "error"
    assert reasons == ["error"] * 3 or (fails == "NaN" and reasons[1:] == ["length", "length"])
    for sample in engine.output("A").outputs:
        assert sample.token_ids == oracle(prompt_of(16), len(sample.token_ids), sample.index)
    again = add(engine, 16, 6, n=3)
    drain(engine)
    assert_oracle(engine, again)


def test_a_submission_that_fails_does_not_forget_the_scrub_it_was_asked_for(ahead):
    engine = ahead(num_kv_blocks=8, enable_prefix_caching=False)
    add(engine, 14, 2, request_id="V")
    engine.runner.poison.add("V")
    engine.step()
    add(engine, 3, 2, request_id="X", start=2)
    engine.runner.fail_next = RuntimeError("device lost")
    engine.step()
    add(engine, 5, 2, request_id="A", start=3)  # its second block is only partly written: what it held before matters
    drain(engine)
    assert engine.request("V").finish_reason == "error"
    assert_oracle(engine, "A")


def test_an_abort_scrubs_all_that_the_step_in_flight_writes():
    engine = make(QueueRunner, async_scheduling=True, block_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    add(engine, 30, 2, request_id="V")
    engine.step()
    engine.runner.poison.add("V")
    engine.step()  # tokens 16 to 23 are in flight: two blocks of NaN
    held = engine.snapshot().tables["V"]
    assert engine.abort("V")
    add(engine, 17, 2, request_id="A", start=3)  # its fifth block is only partly written
    drain(engine)
    assert_oracle(engine, "A")
    assert {block for batch in engine.runner.batches for block in batch.scrub} == set(held[4:6])


def test_an_adapter_scrubs_again_what_a_failed_step_may_not_have_scrubbed():
    runner = MemoryRunner(build_config({"num_kv_blocks": 4, "async_scheduling": True}))
    adapter = OneByOne(runner)
    first, second = (adapter.submit(StepBatch(index, [], [], scrub)) for index, scrub in enumerate(([2, 3], [1])))
    runner.fail_next = RuntimeError("before anything was done")
    with pytest.raises(RuntimeError, match="before anything"):
        adapter.collect(first)
    adapter.collect(second)
    assert runner.batches[-1].scrub == [2, 3, 1]
    third = adapter.submit(StepBatch(2, []))
    adapter.collect(third)
    assert third.scrub == []


def test_a_preemption_that_leaves_nothing_to_schedule_is_told_by_the_step_in_flight(ahead):
    """A waits for its last token and B finds no block for itself: B gives up its place, and no step is scheduled ahead."""
    engine = ahead(block_size=1, num_kv_blocks=6, enable_prefix_caching=False)
    add(engine, 2, 2, request_id="A")
    add(engine, 2, 4, request_id="B", start=2)
    steps = drain(engine)
    told = [step for step in steps if any(event.op == "preempt" for event in step.events_after)]
    assert [[p.request_id for p in step.preemptions] for step in told] == [["B"]]
    assert sum(len(step.preemptions) for step in steps) == engine.stats().preemptions
    assert_oracle(engine, "A")
    assert_oracle(engine, "B")


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_row_in_vain_that_is_nan_harms_nobody(ahead, moment):
    """V ends with a stop token; the row computed in vain may write NaN; X takes V's blocks in the next step."""
    stop = oracle(prompt_of(5), 3)[-1]
    engine = ahead(num_kv_blocks=3, enable_prefix_caching=False)
    add(engine, 5, 6, request_id="V", stop_token_ids=[stop])
    add(engine, 5, 3, request_id="X", start=2)
    for _ in range(moment):
        engine.step()
    engine.runner.poison.add("V")
    drain(engine)
    assert engine.request("V").finish_reason in ("stop", "error")
    assert_oracle(engine, "X")


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 6}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("seats", [3, 6])
def test_samples_of_one_prompt(ahead, fields, seats):
    engine = ahead(max_num_seqs=seats, **fields)
    add(engine, 10, 7, request_id="A", n=3)
    add(engine, 5, 7, request_id="B", start=2)
    drain(engine)
    assert_oracle(engine, "A")
    assert_oracle(engine, "B")


def test_no_placeholder_is_ever_hashed(ahead):
    seen = []

    def spying(parent, tokens, salt):
        seen.append(tuple(tokens))
        return sha256_block_hash(parent, tokens, salt)

    engine = ahead(block_hash=spying, block_size=1, num_kv_blocks=14)
    shared = prompt_of(3)
    for start in range(5):
        add(engine, [*shared, start], 6, request_id=str(start))
    drain(engine)
    again = add(engine, [*shared, 0, *tokens_of(engine, "0")], 2)
    drain(engine)
    assert seen
    assert min(token for tokens in seen for token in tokens) >= 0
    assert engine.request(again).cached_tokens > 0
    assert_oracle(engine, again)
    for start in range(5):
        assert_oracle(engine, str(start))


def test_a_block_that_is_freed_in_flight_is_only_written_by_a_later_submission():
    engine = make(
        QueueRunner, async_scheduling=True, block_size=2, num_kv_blocks=12, max_num_seqs=3, enable_prefix_caching=False
    )
    runner, kv = engine.runner, engine._kv
    users = defaultdict(list)  # block → (submission, request) that reads or writes it
    freed = []  # (block, submissions so far, request)
    submit, release = runner.submit, kv.release

    def noting_submit(batch):
        count = runner._count
        for work in batch.work:
            for block in work.block_table:
                users[block].append((count, work.request.request_id))
        return submit(batch)

    def noting_release(request, **options):
        freed.extend((block, runner._count, request.request_id) for block in request.block_table if request.in_flight)
        release(request, **options)

    runner.submit, kv.release = noting_submit, noting_release
    stop = tuple(range(0, 53, 4))
    names = [add(engine, 5, 9, start=start, stop_token_ids=stop) for start in range(9)]
    drain(engine)
    assert all(engine.request(name).finish_reason in ("stop", "length") for name in names)
    reused = 0
    for block, count, owner in freed:
        last = max(submission for submission, user in users[block] if user == owner and submission < count)
        others = [submission for submission, user in users[block] if user != owner and submission >= count - 1]
        reused += any(submission == last + 1 for submission in others)
        assert all(submission > last for submission in others)
    assert reused, "no block went to the very next step: nothing was at stake"


@pytest.mark.parametrize("stop", [(), tuple(range(0, 53, 4))])
def test_the_trace_replays_exactly_from_every_keyframe(ahead, monkeypatch, stop):
    monkeypatch.setattr(engine.core.engine, "KEYFRAME_EVERY", 3)
    lab = ahead(num_kv_blocks=9, max_num_batched_tokens=7)
    states = note_schedules(lab)
    for start in range(6):
        add(lab, 6, 8, start=start % 3, n=1 + (start == 2), stop_token_ids=stop)
    steps = [lab.step() for _ in range(4)]
    lab.abort("1")
    steps += drain(lab)
    assert [step.index for step in steps] == list(range(len(steps)))
    assert [step.index for step in steps if step.keyframe] == [step.index for step in steps if step.index % 3 == 0]
    for step in steps:
        assert state_at(steps, step.index, 9, "during").keyframe == states[step.index]
    assert state_at(steps, steps[-1].index, 9).keyframe == lab.snapshot()
    assert all(step.events_after == () for step in steps[:3])
    assert steps[-1].events_after


def test_times_where_the_host_computes_itself_are_those_without_scheduling_ahead():
    def run(**fields):
        lab = make(block_size=4, num_kv_blocks=24, **fields)
        names = [add(lab, 6, 4 + start, start=start) for start in range(3)]
        steps = drain(lab)
        return [lab.request(name) for name in names], steps

    (plain, steps), (late, overlapping) = run(), run(async_scheduling=True)
    assert [trace.token_times for trace in late] == [trace.token_times for trace in plain]
    assert [step.end for step in overlapping] == [step.end for step in steps]
    assert [step.overlap for step in overlapping] == [0.0, *[1.0] * (len(steps) - 1)]
    assert sum(step.duration for step in overlapping) == sum(step.duration for step in steps) == len(steps)
    assert {step.overlap for step in steps} == {0.0}


def test_waits_and_slow_motion_are_told_by_the_step_that_they_concern():
    lab = make(QueueRunner, async_scheduling=True)
    add(lab, 4, 5, request_id="A")
    waits = [lab.step(wait_time=float(number), slow=number == 2) for number in range(1, 6)]
    assert [step.wait_time for step in waits] == [1.0, 0.0, 2.0, 3.0, 4.0 + 5.0]
    assert [step.slow for step in waits] == [False, True, True, False, False]
    assert lab.request("A").slow


def test_a_listener_hears_tokens_in_order_and_may_abort(ahead):
    class Impatient:
        def opened(self, event): ...
        def closed(self, event):
            self.heard.append(event.trace.request_id)

        def stepped(self, step):
            self.heard.append(step.index)

        def token(self, event):
            self.heard.append((event.request_id, event.index, event.step))
            if event.request_id == "A" and event.index == 1:
                lab.abort("B")
                lab.abort("A")

    listener = Impatient()
    listener.heard = []
    lab = ahead(listener=listener)
    add(lab, 4, 5, request_id="A")
    add(lab, 4, 5, request_id="B", start=2)
    drain(lab)
    assert listener.heard == [("A", 0, 0), ("B", 0, 0), 0, ("A", 1, 1), "B", "A", 1, 2]


def test_a_runner_that_computes_in_submit_is_driven_one_by_one():
    """On a CPU asking ahead would only make each token wait for the step behind it."""
    runner = QueueRunner(build_config({}))
    assert async_runner(runner) is runner
    runner.asynchronous = False
    assert isinstance(async_runner(runner), OneByOne)


def test_a_scripted_runner_counts_what_is_pending():
    lab = make(ScriptedRunner(), async_scheduling=True)
    name = add(lab, 3, 5)
    drain(lab)
    assert tokens_of(lab, name) == [0, 1, 2, 3, 4]
