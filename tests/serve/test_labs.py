"""Labs share a model: quotas, turns, pauses, restarts. In this process, with the scripted model."""

import time

import pytest

from engine.core.config import EngineConfig
from engine.core.runner import Runner
from engine.core.trace import DeviceSample
from engine.serve.gpu_figures import GpuName
from engine.serve.labs import LabSet, RefusalError
from engine.serve.protocol import LabUpdate, Send
from engine.serve.scripted import FAILS, ScriptedModel

pytestmark = pytest.mark.timeout(30)


class Bench:
    """A set of labs and what it posted."""

    def __init__(self, model: str = "scripted", max_labs: int = 32, quota_bytes: int = 2**40) -> None:
        self.posted: list[LabUpdate] = []
        self.model = ScriptedModel(model, lambda stage, fraction: None)
        self.labs = LabSet(self.model, self.posted.append, max_labs=max_labs, quota_bytes=quota_bytes)

    def open(self, name: str = "a", *, paused: bool = False, **config):
        return self.labs.open(name, config, paused=paused, generation=1)

    def send(self, name: str = "a", prompt: str | list[int] = "hello", max_tokens: int = 5, **fields) -> list[str]:
        command = Send(seq=1, lab=name, prompt=prompt, params={"max_tokens": max_tokens}, **fields)
        return self.labs.get(name).send(command, time.perf_counter())

    def run(self, steps: int = 10_000) -> int:
        for taken in range(steps):
            lab, _ = self.labs.next()
            if lab is None:
                return taken
            self.labs.step(lab)
        return steps

    def steps(self, name: str = "a"):
        return [step for update in self.posted if update.lab == name for step in update.steps]

    def closed(self, name: str = "a"):
        return [closed for update in self.posted if update.lab == name for closed in update.closed]


def test_a_lab_runs_its_requests_and_then_has_nothing_to_do() -> None:
    bench = Bench()
    bench.open()
    assert bench.send(copies=3) == ["0", "1", "2"]
    assert bench.run() == 5
    assert bench.labs.next() == (None, None)
    assert [closed.text for closed in bench.closed()] == ["abcde"] * 3
    assert bench.posted[-1].stats.running == 0


def test_a_paused_lab_takes_as_many_steps_as_asked_and_its_clock_stands_still_between() -> None:
    bench = Bench("scripted:seconds=0.01")
    bench.open(paused=True)
    lab = bench.labs.get("a")
    bench.send(max_tokens=20)
    assert bench.run() == 0
    time.sleep(0.2)
    assert lab.clock.now() < 0.15
    lab.control("step", 3, None)
    assert bench.run() == 3
    time.sleep(0.5)
    lab.control("step", 2, None)
    assert bench.run() == 2
    assert all(step.slow for step in bench.steps())
    assert lab.clock.now() < 0.35, "pauses of 0.2 s and 0.5 s are not in it, five steps of 0.01 s are"
    assert lab.clock.now() >= 0.05
    lab.control("run", 1, None)
    assert bench.run() == 15
    assert [step.slow for step in bench.steps()] == [True] * 5 + [False] * 15
    assert bench.closed()[0].trace.slow


def test_a_paused_lab_that_schedules_ahead_has_nothing_in_flight_once_everything_is_stopped() -> None:
    bench = Bench()
    bench.open(paused=True, async_scheduling=True)
    lab = bench.labs.get("a")
    bench.send(max_tokens=20)
    lab.control("step", 2, None)
    assert bench.run() == 2
    assert lab.abort(None) == 1
    assert bench.labs.next() == (None, None)
    assert [step.index for step in bench.steps()] == [0, 1, 2]
    assert bench.steps()[-1].events_after[-1].op == "finish"
    bench.send(max_tokens=4)
    lab.control("run", 1, None)
    assert bench.run() == 4
    assert [closed.text for closed in bench.closed()] == ["ab", "abcd"]


def test_stepping_with_nothing_to_do_is_refused_and_left_over_steps_are_forgotten() -> None:
    bench = Bench()
    bench.open()
    lab = bench.labs.get("a")
    with pytest.raises(RefusalError, match="nothing to step through"):
        lab.control("step", 1, None)
    assert lab.mode == "running"
    bench.send(max_tokens=3)
    lab.control("step", 100, None)
    assert bench.run() == 3
    bench.send(max_tokens=3)
    assert bench.run() == 0, "the 97 steps left over belong to the past"
    for steps in (0, -1, 10**9):
        with pytest.raises(RefusalError, match=f"steps={steps} must be from 1"):
            lab.control("step", steps, None)


def test_pausing_cancels_steps_that_were_asked_for() -> None:
    bench = Bench()
    bench.open(paused=True)
    bench.send()
    lab = bench.labs.get("a")
    lab.control("step", 4, None)
    assert bench.run(1) == 1
    lab.control("pause", 1, None)
    assert bench.run() == 0


def test_slow_motion_keeps_its_rate_and_marks_its_steps() -> None:
    bench = Bench()
    bench.open()
    lab = bench.labs.get("a")
    lab.control("run", 1, 50.0)
    bench.send(max_tokens=6)
    start = time.monotonic()
    while lab.engine.has_unfinished():
        ready, due = bench.labs.next()
        if ready is None:
            time.sleep(max(0.0, due - time.monotonic()))
        else:
            bench.labs.step(ready)
    assert 5 / 50 <= time.monotonic() - start < 1.0
    assert all(step.slow for step in bench.steps())
    assert lab.clock.now() < 0.08, "time stands still between the steps"
    for rate in (0.0, -1.0, 1e9):
        with pytest.raises(RefusalError, match=r"must be from 0\.01 to 1000"):
            lab.control("run", 1, rate)


def test_labs_take_turns_and_a_step_records_how_long_it_waited() -> None:
    bench = Bench("scripted:seconds=0.01")
    for name in "abc":
        bench.open(name)
        bench.send(name, max_tokens=6)
    order = []
    while (lab := bench.labs.next()[0]) is not None:
        order.append(lab.name)
        bench.labs.step(lab)
    assert order == list("abc") * 6
    for name in "abc":
        waits = [step.wait_time for step in bench.steps(name)]
        assert all(0.018 < wait < 1.0 for wait in waits[1:]), waits
    assert [step.wait_time < 0.005 for step in bench.steps("a")[:1]] == [True]


def test_time_before_a_lab_had_work_is_not_waiting() -> None:
    bench = Bench("scripted:seconds=0.01")
    bench.open("busy")
    bench.open("late")
    bench.send("busy", max_tokens=20)
    bench.run(10)
    bench.send("late", max_tokens=2)
    bench.run()
    assert bench.steps("late")[0].wait_time < 0.03
    assert 0.009 < bench.steps("late")[1].wait_time < 0.5


def test_stopping_everything_brings_fresh_gauges_without_a_step() -> None:
    bench = Bench()
    bench.open(max_num_seqs=8)
    bench.send(copies=16, max_tokens=500)
    bench.run(20)
    assert (bench.posted[-1].stats.running, bench.posted[-1].stats.waiting) == (8, 8)
    assert bench.labs.get("a").abort(None) == 16
    stats = bench.posted[-1].stats
    assert (stats.running, stats.waiting, stats.kv_usage, stats.aborted) == (0, 0, 0.0, 16)
    assert bench.run() <= 1, "one record without rows tells what was freed"
    assert bench.steps()[-1].scheduled == () and bench.steps()[-1].events
    assert bench.labs.next() == (None, None)


def test_copies_enter_all_or_none() -> None:
    bench = Bench()
    bench.open(max_num_queued_requests=4, paused=True)
    bench.send(copies=2)
    with pytest.raises(RefusalError, match=r"3 more would make 5.*max_num_queued_requests=4"):
        bench.send(copies=3)
    with pytest.raises(ValueError, match="together 5000"):
        bench.send(prompt="x" * 500, copies=2, max_tokens=4500)
    for copies in (0, -1, 65):
        with pytest.raises(RefusalError, match=f"copies={copies} must be from 1 to 64"):
            bench.send(copies=copies)
    assert bench.labs.get("a").engine.stats().waiting == 2


def test_a_text_far_too_long_is_refused_at_once_with_the_numbers() -> None:
    bench = Bench()
    bench.open()
    start = time.perf_counter()
    with pytest.raises(RefusalError, match=r"1,000,000 characters and more than .* max_model_len=2,048"):
        bench.send(prompt="x" * 1_000_000)
    assert time.perf_counter() - start < 2.0
    with pytest.raises(ValueError, match="the prompt has 2048 tokens, but max_model_len=2048"):
        bench.send(prompt="x" * 2048)
    with pytest.raises(ValueError, match="no tokens"):
        bench.send(prompt="")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_token": 3}, "unknown sampling setting 'max_token'.*max_tokens"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": -1}, "temperature=-1 must be from 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
    ],
)
def test_wrong_sampling_settings_are_refused_by_name(params: dict, message: str) -> None:
    bench = Bench()
    bench.open()
    with pytest.raises(ValueError, match=message):
        bench.labs.get("a").send(Send(seq=1, lab="a", prompt="x", params=params), 0.0)


def test_a_lab_too_many_and_a_pool_too_large_are_refused_with_the_numbers() -> None:
    bench = Bench("scripted:kv_bytes=1024", max_labs=2, quota_bytes=30 * 2**20)
    bench.open("a", num_kv_blocks=1023)  # 16 MiB with the null block
    with pytest.raises(RefusalError, match=r"take 16\.0 MiB.*30\.0 MiB, of which other labs hold 16\.0 MiB and 14\.0 MiB"):
        bench.open("b", num_kv_blocks=1023)
    with pytest.raises(RefusalError, match="at most 895"):
        bench.open("b", num_kv_blocks=896)
    bench.open("b", num_kv_blocks=895)
    bench.labs.close("b")
    bench.open("b", num_kv_blocks=800)
    with pytest.raises(RefusalError, match="max_labs=2"):
        bench.open("c", num_kv_blocks=1)
    assert bench.open("b").generation == 1, "a lab that is open is found again"


def test_new_settings_start_a_new_engine_and_refused_ones_touch_nothing() -> None:
    bench = Bench("scripted:kv_bytes=1024", quota_bytes=30 * 2**20)
    bench.open(num_kv_blocks=1023, max_num_seqs=3)
    bench.send(max_tokens=900)
    bench.run(10)
    for wrong, message in [
        ({"block_size": 0}, "block_size=0"),
        ({"block_sise": 8}, "unknown engine setting 'block_sise'"),
        ({"num_kv_blocks": 5000}, "num_kv_blocks=5,000"),
        ({"max_model_len": 2**21}, "max_model_len=2,097,152 is more than the 1,048,576"),
    ]:
        with pytest.raises(ValueError, match=message):
            bench.labs.reconfigure("a", wrong)
    assert bench.labs.get("a").engine.stats().running == 1
    assert bench.run(5) == 5
    info = bench.labs.reconfigure("a", {"num_kv_blocks": 1024})
    assert (info.generation, info.config.num_kv_blocks, info.config.max_num_seqs) == (2, 1024, 3)
    assert bench.closed()[-1].trace.finish_reason == "abort"
    last_of_first = [update for update in bench.posted if update.generation == 1][-1]
    assert last_of_first.stats.running == 0
    bench.send(max_tokens=3)
    assert bench.run() == 3
    assert bench.closed()[-1].text == "abc"


def test_a_pool_that_cannot_be_had_leaves_the_lab_with_its_old_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota in (17 * 2**20, 2**40):  # there is room for one pool only, or for both
        bench = Bench("scripted:kv_bytes=1024", quota_bytes=quota)
        bench.open(num_kv_blocks=1000)
        old = bench.labs.get("a").engine
        make = bench.model.runner

        def runner(config, make=make):
            if config.num_kv_blocks == 1001:
                raise MemoryError("no memory for the pool")
            return make(config)

        monkeypatch.setattr(bench.model, "runner", runner)
        with pytest.raises(MemoryError):
            bench.labs.reconfigure("a", {"num_kv_blocks": 1001})
        lab = bench.labs.get("a")
        assert lab.config.num_kv_blocks == 1000
        assert (lab.engine is old) == (quota == 2**40)
        bench.send(max_tokens=3)
        bench.run()
        assert bench.closed()[-1].text == "abc"


def test_switching_the_batching_works_out_the_switches_that_follow() -> None:
    bench = Bench()
    bench.open()
    config = bench.labs.reconfigure("a", {"batching": "static", "max_num_batched_tokens": 4096}).config
    assert (config.chunked_prefill, config.prefix_caching) == (False, False)
    config = bench.labs.reconfigure("a", {"batching": "continuous"}).config
    assert (config.chunked_prefill, config.prefix_caching) == (True, True)


def test_a_step_that_fails_ends_its_requests_and_nothing_else() -> None:
    bench = Bench()
    bench.open("a")
    bench.open("b")
    bench.send("a", prompt=[1, FAILS, 2])
    bench.send("b")
    bench.run()
    failed = bench.closed("a")[0].trace
    assert failed.finish_reason == "error" and "MemoryError" in failed.error
    assert bench.closed("b")[0].text == "abcde"
    bench.send("a")
    bench.run()
    assert bench.closed("a")[-1].text == "abcde"


def test_an_engine_that_breaks_down_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.open()
    bench.send()
    lab = bench.labs.get("a")

    def broken(**_):
        raise RuntimeError("an invariant is violated")

    monkeypatch.setattr(lab.engine, "step", broken)
    bench.run(1)
    assert lab.generation == 2
    assert "RuntimeError: an invariant is violated" in bench.posted[-1].notice
    assert bench.closed()[0].trace.finish_reason == "abort"
    bench.send()
    bench.run()
    assert bench.closed()[-1].text == "abcde"


def test_an_arrival_counts_from_when_the_command_was_read_but_not_through_a_pause() -> None:
    bench = Bench()
    bench.open()
    lab = bench.labs.get("a")
    time.sleep(0.05)
    received = time.perf_counter()
    time.sleep(0.03)
    lab.send(Send(seq=1, lab="a", prompt="x"), received)
    trace = bench.posted[-1].opened[0].trace
    assert 0.029 < trace.queued - trace.arrival < 0.2
    assert trace.arrival <= trace.tokenised <= trace.queued
    lab.control("pause", 1, None)
    received = time.perf_counter()
    time.sleep(0.3)
    lab.control("run", 1, None)
    lab.send(Send(seq=1, lab="a", prompt="x"), received)
    trace = bench.posted[-1].opened[0].trace
    assert trace.queued - trace.arrival < 0.15


def test_each_word_of_the_gpu_goes_into_one_step_of_each_lab() -> None:
    bench = Bench()
    said = iter([None, DeviceSample(time=1.0), DeviceSample(time=1.0), DeviceSample(time=2.0), DeviceSample(time=2.0)])
    bench.labs = LabSet(bench.model, bench.posted.append, max_labs=2, quota_bytes=2**40, device_sample=lambda: next(said))
    bench.open()
    bench.send(max_tokens=5)
    bench.run(5)
    assert [step.device and step.device.time for step in bench.steps("a")] == [None, 1.0, None, 2.0, None]


class SizedModel(ScriptedModel):
    """A scripted model on a pretended GPU: the pool becomes 40 blocks, or nothing fits; told what happened in order."""

    def __init__(self) -> None:
        super().__init__("scripted:kv_bytes=64", lambda stage, fraction: None)
        self.gpu = GpuName("pretended")
        self.events: list[str] = []
        self.fits = True

    def fit(self, config: EngineConfig) -> EngineConfig:
        if config.gpu_memory_utilization is None:
            return config
        self.events.append("fit")
        if not self.fits:
            raise ValueError("too little memory, with numbers")
        return config.replace(num_kv_blocks=40)

    def runner(self, config: EngineConfig) -> Runner:
        self.events.append(f"runner {config.num_kv_blocks}")
        return super().runner(config)

    def release(self, runner: Runner) -> None:
        self.events.append("release")


def sized_bench(quota_bytes: int = 2**40) -> tuple[Bench, SizedModel]:
    bench, model = Bench(), SizedModel()
    bench.model = model
    bench.labs = LabSet(model, bench.posted.append, max_labs=4, quota_bytes=quota_bytes)
    return bench, model


def test_a_share_of_the_gpus_memory_sizes_the_pool() -> None:
    bench, model = sized_bench()
    info = bench.open(gpu_memory_utilization=0.9, num_kv_blocks=7)
    assert (info.config.num_kv_blocks, info.config.gpu_memory_utilization) == (40, 0.9)
    assert model.events == ["fit", "runner 40"]
    bench.send(max_tokens=3)
    bench.run()
    assert bench.labs.get("a").engine.stats().blocks_total == 40


def test_the_old_pool_goes_before_the_new_one_is_measured_and_comes_back_if_nothing_fits() -> None:
    bench, model = sized_bench()
    bench.open(num_kv_blocks=16)
    model.events.clear()
    assert bench.labs.reconfigure("a", {"gpu_memory_utilization": 0.9}).config.num_kv_blocks == 40
    assert model.events == ["release", "fit", "runner 40"]
    assert bench.labs.reconfigure("a", {"max_num_seqs": 4}).config.num_kv_blocks == 40, "measured again"
    model.events.clear()
    model.fits = False
    with pytest.raises(ValueError, match="too little memory"):
        bench.labs.reconfigure("a", {"max_num_seqs": 8})
    assert model.events == ["release", "fit", "runner 40"]
    assert bench.labs.get("a").config.max_num_seqs == 4
    model.events.clear()
    fixed = bench.labs.reconfigure("a", {"gpu_memory_utilization": None, "num_kv_blocks": 20}).config
    assert (fixed.num_kv_blocks, fixed.gpu_memory_utilization, model.events) == (20, None, ["runner 20", "release"])


def test_a_share_is_refused_before_anything_is_touched_where_there_is_no_gpu() -> None:
    bench = Bench()
    bench.open()
    before = bench.labs.get("a").engine
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.9 .*set num_kv_blocks"):
        bench.labs.reconfigure("a", {"gpu_memory_utilization": 0.9})
    assert bench.labs.get("a").engine is before


def test_a_sized_pool_keeps_to_the_quota_of_all_labs() -> None:
    bench, _ = sized_bench(quota_bytes=20 * 16 * 64)
    with pytest.raises(RefusalError, match="or lower gpu_memory_utilization"):
        bench.open(gpu_memory_utilization=0.9)
