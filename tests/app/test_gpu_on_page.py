"""What a GPU measured is on the page where there is one, and nothing more is there where there is none."""

from __future__ import annotations

from typing import Any

import msgspec
import plotly.graph_objects as go
import pytest

from app.figures.anatomy import anatomy_alt, gpu_alt, gpu_figure, timed_by_gpu
from app.figures.palette import DARK, LIGHT, Theme
from app.figures.tiles import gauges, gpu_words
from app.session import Lab
from app.tables import throughput_rows
from engine.core.config import EngineConfig
from engine.core.outputs import EngineStats
from engine.core.runner import ScriptedRunner
from engine.core.trace import DeviceSample, Scheduled, StepTrace
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.observe.metrics import DEFINITIONS, Window, measure
from engine.serve.client import EngineClient
from engine.serve.labs import backend_facts
from engine.serve.protocol import BackendFacts, HostState, LabInfo, LabUpdate
from engine.serve.scripted import ScriptedModel

SAMPLE = DeviceSample(time=1e9, utilisation=0.43, memory_used=13 * 2**30, memory_total=140 * 2**30, power=312.4)


def step(index: int, **fields: Any) -> StepTrace:
    row = Scheduled("a", "decode", 1, 3, sampled=9)
    return StepTrace(index=index, start=float(index), end=index + 0.5, scheduled=(row,), **fields)


TIMED = [
    step(0, launch_time=0.002, gpu_time=0.006, gpu_idle_time=0.0, device=SAMPLE),
    step(1, launch_time=0.004, gpu_time=0.012, gpu_idle_time=0.002),
]
PLAIN = [step(0), step(1)]


def shown(steps: list[StepTrace]) -> dict[str, dict[str, Any]]:
    return {gauge["name"]: gauge for gauge in gauges(EngineStats(), 2.0, steps)}


def test_the_chosen_steps_launch_gpu_and_idle_time_are_told_apart():
    found = shown(TIMED)
    assert [found[name]["value"] for name in ("launch_time", "gpu_time", "gpu_idle_time")] == [4.0, 12.0, 2.0]
    for name in ("launch_time", "gpu_time", "gpu_idle_time"):
        assert found[name]["unit"] == "ms" and found[name]["text"].startswith("Step 1. ")
        assert DEFINITIONS[name].text in found[name]["text"]
    assert found["gpu_time"]["text"].endswith("At step 0 the GPU said of itself: 43 % busy, 13.0 of 140.0 GiB, 312 W.")
    assert not {"launch_time", "gpu_time", "gpu_idle_time"} & set(shown(PLAIN))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (SAMPLE, "43 % busy, 13.0 of 140.0 GiB, 312 W"),
        (DeviceSample(time=0.0, memory_used=2**30), "1.0 GiB"),
        (DeviceSample(time=0.0), ""),
    ],
)
def test_what_the_gpu_did_not_say_is_left_out(sample: DeviceSample, words: str):
    assert gpu_words(sample) == words


def test_the_header_shows_what_the_gpu_says_and_changes_with_it():
    client = EngineClient("scripted")
    lab = Lab("t", client)
    before = lab.version
    assert lab.head(None)["gpu"] == ""
    client.gpu = SAMPLE
    assert lab.head(None)["gpu"] == gpu_words(SAMPLE)
    assert lab.version != before


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_picture_of_gpu_time_is_valid_and_says_what_was_measured(theme: Theme):
    figure = gpu_figure([*PLAIN, *TIMED], theme)
    go.Figure(data=figure["data"], layout=figure["layout"])
    values = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert list(values.values()) == [[0.0, 2.0], [6.0, 12.0], [2.0, 4.0]]
    assert "worked 9.00 ms a step and idled 1.00 ms before it (10 % of its time)" in gpu_alt(TIMED)
    assert "spent 3.00 ms asking" in gpu_alt(TIMED)
    assert timed_by_gpu(PLAIN) == [] and "No step" in gpu_alt(PLAIN)


def test_bars_of_steps_that_overlap_are_not_called_the_time_that_passed():
    assert "overlap" not in anatomy_alt(TIMED)
    ahead = [TIMED[0], msgspec.structs.replace(TIMED[1], overlap=0.1)]
    assert anatomy_alt(ahead).endswith("so the parts of a bar can be more than the time that passed.")


def test_the_share_idled_is_a_row_only_where_a_gpu_computed():
    def metrics(steps: list[StepTrace]) -> dict[str, str]:
        return {row["metric"]: row["value"] for row in throughput_rows(measure([], steps, window=Window(0.0, 5.0)))}

    assert metrics(TIMED)[DEFINITIONS["gpu_idle_share"].label] == "0.100"
    assert DEFINITIONS["gpu_idle_share"].label not in metrics(PLAIN)


def test_what_computes_and_why_not_faster_is_on_the_page():
    """A fallback on a GPU is said aloud; on a CPU, where nobody expects more, it is in the settings only."""
    reason = "Triton attention differs from torch on this GPU, so torch computes attention."
    more = "Answers are right all the same, only slower: inference-lab doctor tells more."
    facts = BackendFacts(name="torch SDPA", reason=reason, checks=("attention: WRONG",))
    client = EngineClient("scripted")
    lab = Lab("t", client)
    info = LabInfo(lab="t", config=EngineConfig(), mode="running", rate=None, generation=1, kv_pool_bytes=0, backend=facts)
    lab.log.apply(LabUpdate(lab="t", generation=1, info=info))
    assert lab.head(info)["backend"] == {"words": "torch SDPA", "reason": reason, "checks": ("attention: WRONG",)}
    assert lab.head(None)["backend"] is None
    model = ScriptedModel("scripted", lambda stage, fraction: None).info
    for device, said in (("cpu", ()), ("cuda:0 NVIDIA H200", (f"{reason} {more}",))):
        client.state = HostState(state="ready", model=msgspec.structs.replace(model, device=device))
        assert lab.room()["problems"] == said
    fast = BackendFacts(name="Triton paged attention", fused=True, graphs=True, graph_bytes=2**29)
    assert fast.words() == "Triton paged attention, fused kernels, CUDA graphs (0.50 GiB)"


def test_a_labs_runner_tells_what_it_computes_with():
    runner = ModelRunner(load_model("tiny", "cpu").transformer, EngineConfig(max_model_len=64, num_kv_blocks=8))
    facts = backend_facts(runner)
    assert facts is not None
    assert (facts.name, facts.graphs, facts.graph_bytes) == (runner.attention_name, False, 0)
    assert "GPU" in facts.reason
    assert backend_facts(ScriptedRunner()) is None
