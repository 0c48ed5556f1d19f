"""What a GPU says of itself travels with the steps: engine, files, exports, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig
from engine.core.engine import Engine
from engine.core.runner import ScriptedRunner, StepBatch, StepResult
from engine.core.sampling_params import SamplingParams
from engine.core.trace import DeviceSample, Scheduled, StepTrace
from engine.observe import export
from engine.observe import metrics as m
from engine.observe.log import step_units
from engine.observe.rolling import RollingMetrics
from engine.observe.runfile import RunReader, RunWriter, new_header

SAMPLE = DeviceSample(time=1e9, utilisation=0.5, memory_used=3 * 2**30, memory_total=80 * 2**30, power=312.5)
ROW = (Scheduled("a", "decode", 1, 3, sampled=9),)


def step(index: int, end: float, gpu: float, idle: float, **fields: Any) -> StepTrace:
    return StepTrace(
        index=index, start=end - 1, end=end, scheduled=ROW, launch_time=0.125, gpu_time=gpu, gpu_idle_time=idle, **fields
    )


STEPS = [step(0, 1.0, 0.75, 0.0), step(1, 2.0, 0.5, 0.25, device=SAMPLE), step(2, 3.0, 2.0, 5.0)]


class GpuRunner(ScriptedRunner):
    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        result.launch_time, result.gpu_time, result.gpu_idle_time = 0.125, 0.5, 0.25 * (batch.index > 0)
        return result


def test_the_engine_passes_a_runners_times_on() -> None:
    clock = VirtualClock()
    engine = Engine(EngineConfig(), GpuRunner(clock=clock), clock)
    engine.add_request([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    first, second = engine.step(), engine.step()
    assert (first.launch_time, first.gpu_time, first.gpu_idle_time) == (0.125, 0.5, 0.0)
    assert second.gpu_idle_time == 0.25


def test_files_keep_them(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a.inflab", new_header(EngineConfig()))
    writer.add(steps=STEPS)
    writer.close()
    with RunReader(tmp_path / "a.inflab") as reader:
        assert reader.steps() == STEPS
    records = list(export.read_records(export.records_jsonl([], STEPS)))
    assert [record.step for record in records if isinstance(record, export.StepLine)] == STEPS


def test_a_sample_costs_no_more_units_than_bytes_allow() -> None:
    plain, sampled = (msgspec.structs.replace(STEPS[1], device=device) for device in (None, SAMPLE))
    more = len(msgspec.msgpack.encode(sampled)) - len(msgspec.msgpack.encode(plain))
    assert more <= 9 * (step_units(sampled) - step_units(plain))


def gpu_events(steps: list[StepTrace]) -> list[dict[str, Any]]:
    events = json.loads("".join(export.chrome_trace([], steps)))["traceEvents"]
    return [event for event in events if event["pid"] == export.GPU_PID]


def test_a_timeline_has_a_track_of_the_gpu() -> None:
    """Work ends with its step; it never reaches back over what is drawn already, and its measured length is told."""
    events = gpu_events(STEPS)
    work = [(e["ts"] / 1e6, e["dur"] / 1e6, e["name"]) for e in events if e["ph"] == "X"]
    assert work == [(0.25, 0.75, "step 0"), (1.25, 0.25, "idle"), (1.5, 0.5, "step 1"), (2.0, 1.0, "step 2")]
    assert next(e for e in events if e["name"] == "step 2")["args"]["measured_s"] == 2.0
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert counters == {"GPU utilisation": {"%": 50}, "GPU memory": {"bytes in use": 3 * 2**30}, "GPU power": {"W": 312.5}}


def test_a_timeline_without_a_gpu_has_none() -> None:
    assert gpu_events([StepTrace(index=0, start=0.0, end=1.0, scheduled=ROW)]) == []
    silent = msgspec.structs.replace(STEPS[0], gpu_time=0.0, device=DeviceSample(time=0.0))
    assert [event for event in gpu_events([silent]) if event["ph"] != "M"] == []


def test_the_idle_share_is_of_the_gpus_own_time() -> None:
    """Inside 0 … 2.5: 1.25 s of work and 0.25 s of pause."""
    assert m.device_use(STEPS, m.Window(0.0, 2.5)).gpu_idle_share == pytest.approx(0.25 / 1.5)
    assert m.device_use([msgspec.structs.replace(STEPS[0], gpu_time=0.0)], m.Window(0.0, 2.5)).gpu_idle_share is None
    rolling = RollingMetrics()
    for one in STEPS:
        rolling.stepped(one)
    whole = m.device_use(STEPS, m.Window(0.0, 4.0)).gpu_idle_share
    assert rolling.latest(4.0).device.gpu_idle_share == pytest.approx(whole) == pytest.approx(5.25 / 8.5)
