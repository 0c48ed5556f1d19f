"""Workloads that run inside the host, and the lease under which experiments measure."""

import time
from itertools import pairwise

import pytest

from engine.serve.client import EngineClient, HostError
from engine.workload.arrivals import Arrivals
from engine.workload.lengths import Lengths
from engine.workload.spec import ListedRequest, Stop, WorkloadSpec

LIMIT = 20.0


@pytest.fixture
def client():
    with EngineClient(model="scripted:seconds=0.002") as engine:
        engine.start()
        engine.wait_ready(timeout=LIMIT)
        yield engine


def ended(log) -> bool:
    return log.traffic is not None and log.traffic.ended and log.traffic.in_flight == 0


def listed(*requests: ListedRequest) -> WorkloadSpec:
    return WorkloadSpec(arrivals=Arrivals(unit="steps"), requests=requests)


def test_arrivals_in_steps_join_at_their_step(client: EngineClient) -> None:
    """The textbook's schedule: A B C / A B C / A _ C / A D C, D due at the fourth step."""
    client.open_lab("a", {"max_num_seqs": 4, "num_kv_blocks": 64})
    spec = listed(
        ListedRequest(id="A", at=0, prompt_tokens=5, output_tokens=5),
        ListedRequest(id="B", at=0, prompt_tokens=5, output_tokens=2),
        ListedRequest(id="C", at=0, prompt_tokens=5, output_tokens=5),
        ListedRequest(id="D", at=3, prompt_tokens=5, output_tokens=3),
    )
    client.start_traffic("a", spec)
    assert client.log("a").wait_until(ended, LIMIT)
    steps = [step for step in client.log("a").steps() if step.scheduled]
    who = [[row.request_id[-1] for row in step.scheduled] for step in steps]
    assert who == [["A", "B", "C"], ["A", "B", "C"], ["A", "C"], ["A", "C", "D"], ["A", "C", "D"], ["D"]]
    assert client.log("a").traffic.completed == 4


def test_a_paused_lab_steps_through_a_workload(client: EngineClient) -> None:
    client.open_lab("a", {}, paused=True)
    client.start_traffic("a", listed(ListedRequest(id="A", at=0, prompt_tokens=5, output_tokens=3)))
    time.sleep(0.2)
    assert client.log("a").next_index == 0
    client.control("a", "step", steps=1)
    assert client.log("a").wait_until(lambda log: log.next_index >= 1, LIMIT)
    client.control("a", "run")
    assert client.log("a").wait_until(ended, LIMIT)


def test_open_loop_traffic_counts_from_when_a_request_was_due_and_ends_by_itself(client: EngineClient) -> None:
    client.open_lab("a", {"max_num_seqs": 1})
    spec = WorkloadSpec(
        arrivals=Arrivals(process="constant", rate=200.0),
        prompt=Lengths(tokens=8),
        output=Lengths(tokens=10),
        stop=Stop(requests=20),
    )
    client.start_traffic("a", spec)
    assert client.log("a").wait_until(ended, LIMIT)
    log = client.log("a")
    report, traces = log.traffic, log.traces()
    assert report.due == report.completed == 20
    assert report.offered_rate == pytest.approx(200.0, rel=0.01) and report.achieved_rate < 100
    arrivals = [trace.arrival for trace in traces]
    assert [b - a for a, b in pairwise(arrivals)] == pytest.approx([0.005] * 19, abs=1e-6)
    assert traces[-1].ttft > 0.15, "the last one waited for all before it"


def test_the_rate_can_be_changed_and_the_traffic_stopped(client: EngineClient) -> None:
    client.open_lab("a", {})
    spec = WorkloadSpec(
        arrivals=Arrivals(process="constant", rate=1.0),
        prompt=Lengths(tokens=4),
        output=Lengths(tokens=2),
        stop=Stop(seconds=60),
    )
    client.start_traffic("a", spec)
    client.change_traffic("a", 100.0)
    assert client.log("a").wait_until(lambda log: log.traffic is not None and log.traffic.due > 20, LIMIT)
    client.stop_traffic("a")
    assert client.log("a").wait_until(ended, LIMIT)
    due = client.log("a").traffic.due
    time.sleep(0.3)
    assert client.log("a").traffic.due == due


def test_slow_motion_lets_time_pass_while_nothing_runs(client: EngineClient) -> None:
    client.open_lab("a", {})
    client.control("a", "run", rate=100.0)
    spec = WorkloadSpec(
        arrivals=Arrivals(process="constant", rate=5.0),
        prompt=Lengths(tokens=4),
        output=Lengths(tokens=2),
        stop=Stop(requests=3),
    )
    client.start_traffic("a", spec)
    assert client.log("a").wait_until(ended, LIMIT)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "stop"),
        ({"stop": {"requests": 0}}, "requests"),
        ({"nonsense": 1}, "nonsense"),
        ({"arrivals": {"process": "poisson", "rate": -1}, "stop": {"requests": 1}}, "rate"),
    ],
)
def test_bad_workloads_are_refused_by_field(client: EngineClient, spec: dict, words: str) -> None:
    client.open_lab("a", {})
    with pytest.raises(HostError, match=words):
        client.start_traffic("a", spec)
    with pytest.raises(HostError, match="no workload"):
        client.stop_traffic("a")


def test_requests_that_can_never_run_are_counted_as_failed(client: EngineClient) -> None:
    client.open_lab("a", {"num_kv_blocks": 2, "max_model_len": 512})
    client.start_traffic(
        "a",
        listed(
            ListedRequest(at=0, prompt_tokens=100, output_tokens=5), ListedRequest(at=1, prompt_tokens=8, output_tokens=2)
        ),
    )
    assert client.log("a").wait_until(ended, LIMIT)
    assert client.log("a").traffic.failed == 1 and client.log("a").traffic.completed == 1


def test_under_a_lease_no_other_lab_steps(client: EngineClient) -> None:
    client.open_lab("a", {})
    client.open_lab("b", {})
    client.send("b", "hello", params={"max_tokens": 2000, "ignore_eos": True}, chat=False)
    assert client.lease("a", True) == ["b"]
    time.sleep(0.1)
    before = client.log("b").next_index
    client.start_traffic("a", listed(ListedRequest(at=0, prompt_tokens=8, output_tokens=200)))
    assert client.log("a").wait_until(ended, LIMIT)
    assert client.log("b").next_index == before
    with pytest.raises(HostError, match="another experiment"):
        client.lease("b", True)
    assert all(step.wait_time == 0 for step in client.log("a").steps() if step.index > 1)
    client.lease("a", False)
    assert client.log("b").wait_until(lambda log: log.next_index > before + 5, LIMIT)


def test_a_lease_ends_with_its_lab(client: EngineClient) -> None:
    client.open_lab("a", {})
    client.open_lab("b", {})
    client.lease("a", True)
    client.close_lab("a")
    client.send("b", "hello", params={"max_tokens": 5}, chat=False)
    assert client.log("b").wait_until(lambda log: log.stats.finished == 1, LIMIT)
