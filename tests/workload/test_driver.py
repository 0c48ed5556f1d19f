import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.clock import PausableClock
from engine.core.config import EngineConfig
from engine.core.engine import Engine
from engine.core.runner import ScriptedRunner
from engine.workload.arrivals import Arrivals
from engine.workload.check import WorkloadError
from engine.workload.driver import Driver, run_offline
from engine.workload.lengths import Lengths
from engine.workload.spec import ListedRequest, Prefix, Stop, WorkloadSpec, plan
from tests.workload.kit import encode, make, run


def listed(*dues, unit="seconds", **fields):
    requests = tuple(ListedRequest(at=due, prompt_tokens=8, output_tokens=fields.get("output", 4)) for due in dues)
    return WorkloadSpec(arrivals=Arrivals(unit=unit), requests=requests)


def generated(count=20, **fields):
    return WorkloadSpec(
        prompt=Lengths(tokens=8), output=Lengths(tokens=4), arrivals=Arrivals(**fields), stop=Stop(requests=count)
    )


def test_latency_counts_from_when_a_request_was_due_not_from_when_the_server_had_time():
    """A server that takes one request at a time, 1 s each; five are due within 0.4 s."""
    spec = WorkloadSpec(
        requests=tuple(ListedRequest(at=at / 10, prompt_tokens=8, output_tokens=1) for at in range(5)),
    )
    engine = make(cost=lambda batch: 1.0, max_num_seqs=1)
    result = run_offline(engine, spec, encode)
    latencies = [request.e2e_latency for request in result.requests]
    assert latencies == pytest.approx([1.0, 1.9, 2.8, 3.7, 4.6])
    assert sum(latencies) / 5 == pytest.approx(2.8)
    assert result.report.offered_rate == pytest.approx(10.0)
    assert result.report.achieved_rate == pytest.approx(1.0)


@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=12),
    st.floats(0.05, 2.0),
    st.integers(1, 3),
)
def test_no_slowness_of_the_server_hides_a_due_time(dues, cost, seats):
    engine = make(cost=lambda batch: cost, max_num_seqs=seats)
    start = engine.clock.now()
    result = run_offline(engine, listed(*dues), encode)
    assert [request.arrival - start for request in result.requests] == pytest.approx(sorted(dues), abs=1e-6)
    assert all(request.token_times[0] - request.arrival >= cost - 1e-6 for request in result.requests)


def test_arrivals_of_a_run_are_those_of_the_plan():
    spec = generated(process="poisson", rate=5.0)
    engine = make()
    start = engine.clock.now()
    result = run_offline(engine, spec, encode)
    assert [r.arrival - start for r in result.requests] == pytest.approx([item.due for item in plan(spec)], abs=1e-6)
    assert [r.request_id for r in result.requests] == [item.name for item in plan(spec)]
    assert [r.arrival for r in result.requests] == [r.arrival for r in run_offline(make(), spec, encode).requests]


def test_the_offered_rate_is_that_of_the_process_and_does_not_depend_on_the_server():
    spec = generated(100, process="constant", rate=20.0)
    fast, slow = (run_offline(make(cost=lambda batch, c=c: c), spec, encode).report for c in (0.001, 0.5))
    assert fast.offered_rate == pytest.approx(20.0)
    assert slow.offered_rate == pytest.approx(20.0)
    assert fast.achieved_rate > 15
    assert slow.achieved_rate < 10


@given(st.lists(st.integers(0, 40), min_size=1, max_size=10), st.integers(1, 4))
def test_arrivals_in_steps_come_before_exactly_their_step(dues, seats):
    result = run(listed(*dues, unit="steps"), max_num_seqs=seats)
    position = {}
    skipped = 0
    for index, step in enumerate(result.steps):
        for event in step.events:
            if event.op == "queue":
                position[event.request_id] = index
    for request, due in zip(result.requests, sorted(dues), strict=True):
        # idle steps are skipped: a request comes at its step, or earlier by what was skipped before it
        skipped = max(skipped, due - position[request.request_id])
        assert position[request.request_id] == due - skipped


def test_waiting_steps_are_skipped_when_the_engine_is_idle():
    result = run(listed(0, 1000, unit="steps"))
    assert len(result.steps) == 8
    assert [r.token_steps for r in result.requests] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("in_flight", "count"), [(1, 5), (3, 10), (8, 8)])
def test_a_closed_loop_keeps_its_number_in_flight(in_flight, count, ahead):
    result = run(generated(count, process="closed", in_flight=in_flight), max_num_seqs=16, async_scheduling=ahead)
    assert len(result.requests) == count
    assert max(step.num_running for step in result.steps) == min(in_flight, count)
    assert result.report.closed
    assert result.report.offered_rate is None
    assert result.report.completed == count


@pytest.mark.parametrize("ahead", [False, True])
def test_a_closed_loop_thinks_between_answers(ahead):
    spec = generated(4, process="closed", in_flight=1, think=2.5)
    result = run(spec, async_scheduling=ahead)
    for earlier, later in zip(result.requests, result.requests[1:], strict=False):
        assert later.arrival - earlier.finished == pytest.approx(2.5)
    in_steps = run(generated(3, process="closed", in_flight=2, think=3.0, unit="steps"), async_scheduling=ahead)
    assert [r.token_steps[0] for r in in_steps.requests] == [0, 0, 4]  # idle steps of thinking are skipped


def test_a_driver_sends_each_request_once_and_asks_nothing_of_strangers():
    driver = Driver(generated(3, process="constant", rate=1.0), id_prefix="t1-")
    first = driver.due(10.0, 5)
    assert [item.request_id for item in first] == ["t1-r0"]
    assert first[0].arrival == 10.0
    assert driver.due(10.5, 6) == []
    assert driver.next_due() == pytest.approx(11.0)
    late = driver.due(14.0, 7, ["t1-r0", "somebody else", "t1-r0"])
    assert [(item.request_id, item.arrival) for item in late] == [("t1-r1", 11.0), ("t1-r2", 12.0)]
    assert driver.ended
    assert driver.next_due() is None
    report = driver.report()
    assert (report.due, report.completed, report.in_flight) == (3, 1, 2)


def test_the_rate_changes_live_and_stops_and_goes_on():
    driver = Driver(generated(1000, process="constant", rate=1.0), start=0.0)
    assert len(driver.due(4.5, 0)) == 5
    driver.set_rate(10.0, 4.5, 1)
    assert len(driver.due(5.5, 2)) == 10
    driver.set_rate(0.0, 5.5, 3)
    assert driver.due(100.0, 4) == []
    assert driver.next_due() is None
    assert not driver.ended
    driver.set_rate(1.0, 100.0, 5)
    assert 1 <= len(driver.due(102.0, 6)) <= 3
    driver.stop()
    assert driver.ended
    assert driver.due(1e6, 7) == []


def test_a_long_standstill_is_made_up_for_in_bounded_portions():
    driver = Driver(generated(3000, process="constant", rate=1000.0), start=0.0)
    portions = [driver.due(60.0, step) for step in range(4)]
    assert [len(portion) for portion in portions] == [1024, 1024, 952, 0]
    assert [item.arrival for portion in portions for item in portion] == pytest.approx([i / 1000 for i in range(3000)])
    assert driver.ended


def test_what_was_due_before_a_change_of_rate_still_comes():
    driver = Driver(generated(100, process="constant", rate=1.0), start=0.0)
    driver.set_rate(0.0, 3.5, 0)
    assert [item.arrival for item in driver.due(9.0, 1)] == [0, 1, 2, 3]


@pytest.mark.parametrize("spec", [listed(0.0), generated(2, process="closed")])
def test_what_has_no_rate_says_so(spec):
    with pytest.raises(WorkloadError, match="has no rate to change"):
        Driver(spec).set_rate(2.0, 0.0, 0)


@pytest.mark.parametrize(
    ("stop", "unit", "count"),
    [
        (Stop(seconds=2.0), "seconds", 20),
        (Stop(steps=5), "steps", 50),
        (Stop(requests=7, seconds=2.0), "seconds", 7),
    ],
)
def test_traffic_stops_by_itself(stop, unit, count):
    spec = WorkloadSpec(
        arrivals=Arrivals(process="constant", rate=10.0, unit=unit),
        prompt=Lengths(tokens=4),
        output=Lengths(tokens=2),
        stop=stop,
    )
    result = run(spec)
    assert len(result.requests) == count
    assert result.report.ended
    assert result.report.in_flight == 0


def test_a_stop_in_the_other_unit_is_seen_while_running():
    arrivals = Arrivals(process="constant", rate=1.0, unit="steps")
    spec = WorkloadSpec(arrivals=arrivals, prompt=Lengths(tokens=4), output=Lengths(tokens=2), stop=Stop(seconds=1.0))
    engine = make(cost=lambda batch: 0.1)
    assert 9 <= len(run_offline(engine, spec, encode).requests) <= 11
    arrivals = Arrivals(process="constant", rate=10.0)
    spec = WorkloadSpec(arrivals=arrivals, prompt=Lengths(tokens=4), output=Lengths(tokens=2), stop=Stop(steps=10))
    result = run_offline(make(cost=lambda batch: 0.1), spec, encode)
    assert 9 <= len(result.requests) <= 11
    assert result.report.ended


def test_refused_requests_are_told_and_the_rest_goes_on():
    spec = WorkloadSpec(
        requests=(
            ListedRequest(prompt_tokens=600, id="big"),
            ListedRequest(at=0.1, prompt_tokens=8, output_tokens=2, id="small"),
        )
    )
    result = run(spec)
    assert [refusal.request_id for refusal in result.refused] == ["big"]
    assert "max_model_len=512" in result.refused[0].reason
    assert [request.request_id for request in result.requests] == ["small"]
    assert (result.report.completed, result.report.failed, result.report.due) == (1, 1, 2)


@pytest.mark.parametrize("unit", ["seconds", "steps"])
def test_a_closed_loop_of_refused_requests_ends(unit):
    spec = WorkloadSpec(
        arrivals=Arrivals(process="closed", in_flight=2, unit=unit), prompt=Lengths(tokens=600), stop=Stop(requests=50)
    )
    result = run(spec)
    assert len(result.refused) == 2
    assert result.requests == ()


def test_a_run_can_be_cancelled_and_leaves_an_idle_engine():
    engine, seen = make(), []
    result = run_offline(engine, generated(500, rate=50.0), encode, on_step=seen.append, cancelled=lambda: len(seen) >= 10)
    assert result.cancelled
    assert 10 <= len(seen) <= 12
    assert not engine.has_unfinished()
    assert {request.finish_reason for request in result.requests} <= {"length", "abort"}
    assert len(seen) == len(result.steps)


def test_two_runs_on_one_engine_need_two_prefixes():
    engine = make()
    first = run_offline(engine, generated(3), encode, id_prefix="a-")
    again = run_offline(engine, generated(3), encode, id_prefix="b-")
    assert [r.request_id for r in first.requests + again.requests] == ["a-r0", "a-r1", "a-r2", "b-r0", "b-r1", "b-r2"]
    clash = run_offline(engine, generated(3), encode, id_prefix="b-")
    assert len(clash.refused) == 3
    assert "used before" in clash.refused[0].reason


def test_a_run_on_a_real_clock_waits_for_its_arrivals():
    clock = PausableClock()
    engine = Engine(EngineConfig(), ScriptedRunner(), clock)
    result = run_offline(engine, listed(0.0, 0.15), encode)
    gap = result.requests[1].arrival - result.requests[0].arrival
    assert gap == pytest.approx(0.15, abs=1e-6)
    assert result.requests[1].queued >= result.requests[1].arrival


def test_a_shared_prefix_is_found_in_the_cache():
    spec = WorkloadSpec(
        arrivals=Arrivals(process="constant", rate=1.0),
        prompt=Lengths(tokens=80),
        output=Lengths(tokens=4),
        prefix=Prefix(tokens=64, share=0.5),
        stop=Stop(requests=8),
    )
    cached = [request.cached_tokens for request in run(spec).requests]
    assert cached == [0, 0, 0, 64, 0, 64, 0, 64]


@settings(max_examples=50)
@given(
    st.sampled_from(["poisson", "constant", "bursty", "closed"]),
    st.sampled_from(["seconds", "steps"]),
    st.floats(0.05, 50),
    st.integers(1, 15),
    st.integers(0, 1000),
    st.integers(1, 4),
)
def test_every_workload_runs_to_its_end_with_every_request_answered_once(process, unit, rate, count, seed, seats):
    spec = WorkloadSpec(
        arrivals=Arrivals(process=process, unit=unit, rate=rate, in_flight=3),
        prompt=Lengths(distribution="uniform", low=4, high=40),
        output=Lengths(distribution="uniform", low=1, high=6),
        stop=Stop(requests=count),
        seed=seed,
    )
    result = run(spec, max_num_seqs=seats)
    assert len(result.requests) == count == result.report.completed
    assert len({request.request_id for request in result.requests}) == count
    assert result.report.ended
    assert all(request.finish_reason == "length" for request in result.requests)
    assert all(request.output_tokens == request.max_tokens for request in result.requests)
    assert result.report.offered_rate is None or math.isfinite(result.report.offered_rate)
