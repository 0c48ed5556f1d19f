"""The live numbers equal the definitions, count at the moment things become known, and are cheap to read."""

from __future__ import annotations

import json
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.outputs import ClosedRequest, OpenedRequest
from engine.core.trace import Scheduled, StepTrace
from engine.observe import metrics as m
from engine.observe.rolling import RollingMetrics, Samples
from engine.serve.protocol import LabUpdate
from tests.observe.runs import Run, random_run, trace


def feed(run: Run) -> RollingMetrics:
    rolling = RollingMetrics()
    for event in run.log:
        if isinstance(event, OpenedRequest):
            rolling.opened(event.trace)
        elif isinstance(event, ClosedRequest):
            rolling.closed(event.trace)
        else:
            rolling.stepped(event)
    return rolling


@given(st.integers(0, 10_000))
def test_over_a_whole_run_live_and_final_numbers_agree(seed: int) -> None:
    run = random_run(seed)
    window = m.whole_run(run.traces, run.steps)
    assert window is not None
    live = feed(run).latest(now=window.end, seconds=window.length + 100)
    final = m.measure(run.traces, run.steps)
    assert live.window.start <= window.start + 1  # it starts with the first arrival that was announced
    factor = live.window.length / window.length if window.length else 1.0
    for name in ("request_throughput", "input_throughput", "output_throughput", "total_throughput"):
        mine, theirs = getattr(live, name), getattr(final, name)
        assert (mine is None and theirs is None) or mine * factor == pytest.approx(theirs), name
    assert live.device.steps == final.device.steps
    assert live.device.gflops == pytest.approx(final.device.gflops)
    if not any(r.slow for r in run.traces):
        for name, summary in live.latency.items():
            assert msgspec.structs.asdict(summary) == pytest.approx(msgspec.structs.asdict(final.latency[name])), name


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_updates_of_any_size_give_the_same_numbers(seed: int, size: int) -> None:
    """An update lists openings, steps and closings apart, so that a closing may come long after its step."""
    run = random_run(seed)
    rolling = RollingMetrics()
    for begin in range(0, len(run.log), size):
        events = run.log[begin : begin + size]
        rolling.apply(
            LabUpdate(
                lab="x",
                generation=1,
                opened=[e for e in events if isinstance(e, OpenedRequest)],
                steps=[e for e in events if isinstance(e, StepTrace)],
                closed=[e for e in events if isinstance(e, ClosedRequest)],
            )
        )
    whole = feed(run)
    assert rolling.latest(1e6, 2e6) == whole.latest(1e6, 2e6)
    assert rolling.last(100) == whole.last(100)
    assert not rolling._open  # nothing is kept of a request that ended


def test_samples_count_when_they_become_known() -> None:
    """Due 0; tokens at 1, 2, 40. At 41 the last 30 s hold the third token: one gap of 38 s, and its end."""
    rolling = RollingMetrics()
    request = trace("a", 0.0, [1.0, 2.0, 40.0])
    rolling.opened(trace("a", 0.0, [], reason=None))
    for i, at in enumerate(request.token_times):
        rolling.stepped(StepTrace(index=i, start=at - 0.5, end=at, scheduled=(Scheduled("a", "decode", 1, i, sampled=7),)))
        if i == 0:
            first = rolling.latest(1.0)
            assert (first.latency["ttft"].mean, first.latency["itl"].count, first.latency["e2e"].count) == (1.0, 0, 0)
    rolling.closed(request)
    live = rolling.latest(41.0, seconds=30)
    assert live.window == m.Window(11.0, 41.0)
    assert (live.latency["ttft"].count, live.latency["itl"].mean, live.latency["e2e"].mean) == (0, 38.0, 40.0)
    assert live.output_throughput == pytest.approx(1 / 30)
    assert rolling.series("itl") == [(2.0, 1.0), (40.0, 38.0)]
    assert rolling.series("e2e") == [(40.0, 40.0)]
    assert rolling.series("no such metric") == []
    assert rolling.token_rate(41.0, seconds=30, bins=3) == [(21.0, 0.0), (31.0, 0.0), (41.0, 0.1)]


def test_rates_fall_to_zero_when_all_requests_are_cancelled_and_nothing_runs() -> None:
    rolling = RollingMetrics()
    for i in range(16):
        rolling.opened(trace(str(i), 0.0, [], reason=None))
    for i in range(10):
        rows = tuple(Scheduled(str(r), "decode", 1, i, sampled=7) for r in range(8))
        rolling.stepped(StepTrace(index=i, start=i / 10, forward_time=0.1, end=(i + 1) / 10, scheduled=rows))
    assert rolling.latest(1.0, seconds=2).output_throughput == pytest.approx(80.0)
    for i in range(16):
        rolling.closed(trace(str(i), 0.0, [], finished=1.0, reason="abort"))
    later = rolling.latest(3.5, seconds=2)
    assert (later.output_throughput, later.request_throughput, later.device.busy_share) == (0.0, 0.0, 0.0)
    assert later.latency["e2e"] == m.Summary()


def test_slow_motion_is_left_out_and_counted() -> None:
    rolling = RollingMetrics()
    rolling.opened(trace("a", 0.0, [], reason=None))
    for i in range(3):
        row = Scheduled("a", "decode", 1, i, sampled=7)
        rolling.stepped(StepTrace(index=i, start=float(i), end=i + 1.0, scheduled=(row,), slow=i == 1))
    rolling.closed(trace("a", 0.0, [1.0, 2.0, 3.0], slow=True))
    live = rolling.latest(3.0)
    assert (live.latency["ttft"].count, live.latency["itl"].count, live.latency["e2e"].count) == (1, 0, 0)
    assert live.slow_left_out == 3  # two tokens and the end
    assert live.device.slow_steps == 1


def test_an_empty_lab_and_a_restarted_one_have_no_data() -> None:
    rolling = RollingMetrics()
    empty = rolling.latest(0.0)
    json.dumps(msgspec.to_builtins(empty), allow_nan=False)
    assert (empty.output_throughput, empty.latency["ttft"].count) == (None, 0)
    assert rolling.last().window is None
    rolling.apply(LabUpdate(lab="x", generation=1, opened=[OpenedRequest(trace("a", 0.0, [], reason=None), "", ())]))
    rolling.apply(LabUpdate(lab="x", generation=1, closed=[ClosedRequest(trace("a", 0.0, [1.0]), "")]))
    assert rolling.last().counts.completed == 1
    rolling.apply(LabUpdate(lab="x", generation=2))
    assert rolling.last().counts.arrived == 0


def test_last_takes_the_newest_finished_requests() -> None:
    rolling = RollingMetrics(last_requests=5)
    for i in range(8):
        rolling.closed(trace(str(i), float(i), [i + 1.0 + i]))
    assert rolling.last(2).latency["ttft"].mean == pytest.approx(7.5)  # requests 6 and 7: 7 and 8 s
    assert rolling.last(100).counts.arrived == 5
    assert rolling.last(0).counts.arrived == 0


@given(st.lists(st.floats(0, 1e3), max_size=200), st.integers(1, 20))
def test_samples_keep_the_newest_in_order(moments: list[float], capacity: int) -> None:
    samples = Samples(capacity)
    for i, moment in enumerate(moments):
        samples.add(moment, float(i))
    rows = samples.rows()
    assert rows[:, 1].tolist() == [float(i) for i in range(len(moments))][-capacity:]
    assert np.all(np.diff(rows[:, 0]) >= 0)
    middle = 500.0
    assert samples.since(middle).tolist() == [row for row in rows.tolist() if row[0] >= middle]


def test_reading_is_cheap_enough_for_four_times_a_second() -> None:
    """Full buffers: 20,000 gaps, 1,000 finished requests. A tenth of a 250 ms refresh is the loose bound."""
    rolling = RollingMetrics()
    for r in range(64):
        rolling.opened(trace(str(r), 0.0, [], reason=None))
    for i in range(500):
        rows = tuple(Scheduled(str(r), "decode", 1, i, sampled=7) for r in range(64))
        rolling.stepped(StepTrace(index=i, start=i / 20, end=(i + 1) / 20, forward_time=0.04, scheduled=rows))
        rolling.closed(trace(f"done{i}", 0.0, [i / 20 + j / 1000 for j in range(50)]))
    begin = time.process_time()
    for _ in range(20):
        assert rolling.latest(25.0).latency["itl"].count == 20_000
        rolling.last(100)
        rolling.token_rate(25.0)
    assert (time.process_time() - begin) / 20 < 0.025
