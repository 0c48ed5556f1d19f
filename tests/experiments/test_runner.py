"""Running an experiment: order, warm-up, exclusiveness, cancel; and every ready-made one, by counting."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from engine.core.outputs import ClosedRequest, OpenedRequest
from engine.core.trace import RequestTrace, Scheduled, StepTrace
from engine.observe.metrics import measure
from engine.serve.client import HostError, HostGone
from engine.serve.experiments import Cancelled, ExperimentRunner, HostPlace, run_values
from engine.workload.check import WorkloadError
from engine.workload.claims import MEASURES, Run
from engine.workload.results import RunRecords, differences, text_report
from engine.workload.spec import Stop
from tests.experiments.conftest import READY, small


def made(variant: str, seconds: float) -> RunRecords:
    """One request of two tokens, the second one ``seconds`` after the first."""
    trace = RequestTrace(
        request_id="r0", arrival=1.0, tokenised=1.0, queued=1.0, first_scheduled=1.0, finished=2.0 + seconds,
        token_times=[2.0, 2.0 + seconds], token_steps=[0, 1], prompt_tokens=4, max_tokens=2, finish_reason="length",
    )  # fmt: skip
    steps = (
        StepTrace(index=0, start=1.0, end=2.0, scheduled=(Scheduled("r0", "prefill", 4, 0, sampled=1),)),
        StepTrace(index=1, start=2.0, end=2.0 + seconds, scheduled=(Scheduled("r0", "decode", 1, 4, sampled=1),)),
    )
    opened = OpenedRequest(trace, "", (1, 2, 3, 4))
    return RunRecords(variant=variant, opened=(opened,), closed=(ClosedRequest(trace, "ab"),), steps=steps)


class FakePlace:
    """A place that takes no time and notes what it is asked."""

    def __init__(self, fails_at: int = -1, seconds=lambda place: 1.0):
        self.ran: list[str] = []
        self.closed = 0
        self.model = {"name": "fake"}
        self._fails_at, self._seconds = fails_at, seconds

    def open(self):
        return "another lab had work to do and waited"

    def run(self, variant, spec, going):
        going()
        if len(self.ran) == self._fails_at:
            raise HostError("it broke")
        self.ran.append(variant.name)
        return made(variant.name, self._seconds(self))

    def close(self):
        self.closed += 1


def test_a_warm_up_comes_first_and_both_orders_are_run():
    place, heard = FakePlace(), []
    found = ExperimentRunner(small("static-continuous", repetitions=3), place, on_progress=heard.append).run()
    a, b = "static", "continuous"
    assert place.ran == [a, b, a, b, b, a, a, b]
    assert len(found.runs) == 6, "the warm-up is left out"
    assert [run.repetition for run in found.of(b)] == [0, 1, 2]
    assert found.others == "another lab had work to do and waited"
    assert place.closed == 1
    assert [p.done for p in heard] == sorted(p.done for p in heard)
    assert (heard[-1].state, heard[-1].done, heard[-1].total, heard[-1].seconds_left) == ("done", 8, 8, 0.0)
    assert "warm-up with static" in heard[2].text


def test_the_records_of_the_repetition_of_median_length_are_kept():
    times = [9, 9, 5, 5, 1, 1, 3, 3, 2, 2, 4, 4, 8, 8, 7, 7]  # the warm-up, then seven repetitions
    place = FakePlace(seconds=lambda place: float(times[len(place.ran) - 1]))
    found = ExperimentRunner(small("static-continuous", repetitions=7), place).run()
    assert {records.variant: records.length for records in found.shown} == {"static": 5.0, "continuous": 5.0}
    assert found.shown_repetition == 4


def test_numbers_of_a_run_are_those_of_the_metrics():
    experiment = small("static-continuous")
    records = made("static", 0.5)
    values = run_values(records, experiment, 0).values
    metrics = measure(records.requests, records.steps)
    assert values["duration"] == 1.5
    assert values["ttft_p50"] == metrics.latency["ttft"].p50 == 1.0
    assert values["tpot_p50"] == values["itl_max"] == 0.5
    assert values["user_speed"] == 2.0
    assert values["output_throughput"] == 2 / 1.5
    assert values["attainment"] is None
    assert values["gpu_idle_share"] is None
    assert (values["steps"], values["computed_tokens"], values["padding_tokens"]) == (2, 5, 0)


def test_the_share_that_a_gpu_idled_is_compared_where_there_is_one():
    """The ready-made experiment on asynchronous scheduling says that this number shows its gain."""
    place = FakePlace()

    def timed(variant, spec, going):
        idle = {"off": 0.3, "on": 0.02}[variant.name]
        found = made(variant.name, 1.0)
        steps = [msgspec.structs.replace(step, gpu_time=1 - idle, gpu_idle_time=idle) for step in found.steps]
        return msgspec.structs.replace(found, steps=tuple(steps))

    place.run = timed
    result = ExperimentRunner(small("async-scheduling", repetitions=5), place).run()
    (found,) = [difference for difference in differences(result) if difference.name == "gpu_idle_share"]
    assert (found.kind, found.good) == ("clear", True)
    assert found.words == "With on, the GPU waits less for its host: 93 % less than with off."
    assert "GPU idle share, %" in text_report(result)
    on_cpu = ExperimentRunner(small("async-scheduling", repetitions=5), FakePlace()).run()
    assert "GPU idle share" not in text_report(on_cpu)


def test_a_failure_is_told_and_everything_given_back():
    place = FakePlace(fails_at=3)
    runner = ExperimentRunner(small("static-continuous"), place)
    with pytest.raises(HostError, match="it broke"):
        runner.run()
    assert (runner.progress.state, runner.progress.text, place.closed) == ("failed", "it broke", 1)
    assert runner.result is None


def test_too_many_requests_are_refused_with_the_limit():
    many = msgspec.structs.replace(READY.find("prefix-cache").workload, stop=Stop(requests=2001))
    with pytest.raises(WorkloadError, match=r"2,001 requests.*2,000"):
        ExperimentRunner(small("prefix-cache", workload=many), FakePlace())


def test_a_page_that_is_gone_ends_its_experiment():
    place = FakePlace()
    runner = ExperimentRunner(small("static-continuous"), place, alive=lambda: False, grace=-1.0)
    with pytest.raises(Cancelled, match="the page that asked for it was closed"):
        runner.run()
    assert (runner.progress.state, place.closed) == ("cancelled", 1)


def test_a_page_that_reloads_keeps_it():
    answers = iter([False, True] * 50)
    runner = ExperimentRunner(small("static-continuous"), FakePlace(), alive=lambda: next(answers), grace=5.0)
    assert runner.run().repetitions == 1


# On a host ----------------------------------------------------------------------------------------------------------------


def shrunk(experiment):
    """A replayed trace takes its own time: eight requests of it, ten times as fast."""
    trace = experiment.workload.trace
    if trace is None:
        return experiment
    workload = msgspec.structs.replace(experiment.workload, trace=msgspec.structs.replace(trace, count=8, time=0.005))
    expect = tuple(e for e in experiment.expect if e.measure != "requests_completed")
    return msgspec.structs.replace(experiment, workload=workload, expect=expect)


@pytest.mark.parametrize("experiment", READY.experiments, ids=lambda experiment: experiment.id)
def test_every_ready_made_experiment_gives_on_the_host_what_it_expects(experiment, engine):
    asked = shrunk(small(experiment.id))
    found = ExperimentRunner(asked, HostPlace(engine), warm_up=False).run()
    assert found.trouble == []
    outcomes = found.outcomes()
    assert outcomes
    assert [outcome.text for outcome in outcomes if not outcome.holds] == []
    for variant in asked.variants:
        (run,) = found.of(variant.name)
        records = found.records(variant.name)
        again = Run(records.requests, records.steps)
        for name in ("steps", "padding_tokens", "cached_tokens", "preemptions", "peak_blocks"):
            assert run.values[name] == MEASURES[name].count(again, "")
        assert run.requests == len(records.requests)


def test_every_run_starts_on_a_fresh_engine(engine):
    found = ExperimentRunner(small("prefix-cache", repetitions=2), HostPlace(engine)).run()
    assert found.values("on", "cached_tokens") == [1024.0, 1024.0]
    assert found.values("off", "cached_tokens") == [0.0, 0.0]
    by_name = {d.name: d for d in differences(found)}
    assert by_name["cached_tokens"].kind == "counted" and by_name["cached_tokens"].good
    assert by_name["preemptions"].kind == "equal"
    assert by_name["duration"].kind == "too few repetitions"
    assert found.model["title"] == "Scripted model"


def test_settings_of_one_variant_do_not_leak_into_the_next(engine):
    found = ExperimentRunner(small("batch-size", repetitions=2), HostPlace(engine)).run()
    assert found.values("one", "peak_running") == [1.0, 1.0]
    assert found.values("sixteen", "peak_running") == [16.0, 16.0]


def wait(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_cancel_gives_the_host_back_at_once(engine):
    place = HostPlace(engine)
    runner = ExperimentRunner(small("batch-size", repetitions=100), place)
    runner.start()
    wait(lambda: runner.progress.done >= 1)
    begin = time.monotonic()
    runner.cancel()
    assert runner.wait(5.0).state == "cancelled"
    assert time.monotonic() - begin < 3.0
    assert runner.result is None
    with pytest.raises(HostError, match="not open"):
        engine.abort(place.lab)
    again = ExperimentRunner(small("kv-cache"), HostPlace(engine)).run()
    assert again.repetitions == 1, "the lease is free"


def test_a_second_experiment_is_refused_and_other_labs_wait(engine):
    engine.open_lab("bystander", {"max_model_len": 2048, "num_kv_blocks": 128})
    engine.send("bystander", "hello", params={"max_tokens": 1500, "ignore_eos": True})
    runner = ExperimentRunner(small("batch-size", repetitions=100), HostPlace(engine))
    runner.start()
    try:
        wait(lambda: runner.progress.done >= 1)
        assert "another lab had work to do and waited" in runner.progress.others
        before = engine.log("bystander").next_index
        with pytest.raises(HostError, match="another experiment is being measured"):
            ExperimentRunner(small("kv-cache"), HostPlace(engine)).run()
        assert engine.log("bystander").next_index == before
    finally:
        runner.cancel()
        runner.wait(5.0)
    wait(lambda: engine.log("bystander").next_index > before)
    engine.close_lab("bystander")


def test_a_host_that_dies_ends_the_experiment(tmp_path):
    from engine.serve.client import EngineClient

    with EngineClient("scripted:seconds=0.01") as client:
        client.wait_ready(60)
        runner = ExperimentRunner(small("batch-size", repetitions=100), HostPlace(client))
        runner.start()
        wait(lambda: runner.progress.done >= 1)
        threading.Thread(target=client.close).start()
        assert runner.wait(20.0).state == "failed"


def test_without_a_model_it_says_what_to_wait_for():
    from engine.serve.client import EngineClient

    with pytest.raises((HostError, HostGone), match="no model is ready"):
        ExperimentRunner(small("kv-cache"), HostPlace(EngineClient("scripted"))).run()
