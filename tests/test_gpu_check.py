"""The GPU check without a GPU: shapes, loads, arithmetic, the page, workers that fail, and a run on tiny shapes."""

import itertools
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine.bench import gpu_bench, gpu_check, gpu_gains, gpu_measures, gpu_peers, gpu_report, gpu_worker
from engine.bench.gpu_report import Document, Goal, NotHere, Reading, Result, Suite
from engine.bench.gpu_shapes import QUICK, SHAPES, Load, Sizes, even_load, nano_vllm_load
from engine.core.trace import Scheduled, StepTrace
from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import Backend
from engine.model.random_weights import random_model, random_weights

PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
}
CPU, META = torch.device("cpu"), torch.device("meta")


# ---------------------------------------------------------------------- shapes and loads


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_as_many_as_published(shape):
    weights = random_weights(shape.spec, META, torch.bfloat16)
    assert weights.num_parameters == shape.parameters == PUBLISHED[shape.name]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_transformers_makes_the_same_model_of_the_shape(shape):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(shape.config)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with META:
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    weights = random_weights(shape.spec, META, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights.num_parameters
    layer, ours = model.model.layers[0], weights.layers[0]
    assert layer.self_attn.o_proj.weight.shape == ours.out.shape
    assert layer.mlp.down_proj.weight.shape == ours.down.shape
    assert (ours.q_norm is not None) == hasattr(layer.self_attn, "q_norm")
    from engine.model.rope import inverse_frequencies

    theirs = type(model.model.rotary_emb)(config=made).inv_freq
    assert torch.allclose(theirs, inverse_frequencies(shape.spec.rope, shape.spec.head_dim), rtol=1e-5)


def test_tiny_twins_keep_what_kernels_care_about():
    for shape in SHAPES:
        twin = shape.tiny().spec
        for field in ("head_dim", "group_size", "tied", "qk_norm", "rope"):
            assert getattr(twin, field) == getattr(shape.spec, field)


def test_random_weights_keep_activations_of_size_one():
    spec = SHAPES[0].tiny().spec
    one, same, other = (random_weights(spec, CPU, torch.float32, seed) for seed in (3, 3, 4))
    assert torch.equal(one.layers[1].down, same.layers[1].down)
    assert not torch.equal(one.layers[1].down, other.layers[1].down)
    assert one.head is not one.embedding
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, spec.hidden_size, generator=generator)
    assert 0.8 < (x @ one.layers[0].gate_up.T).std() < 1.2
    model = random_model(SHAPES[1].tiny().spec, CPU, torch.float32)
    assert model.weights.tied
    assert 0.5 < model.logits(torch.randn(64, model.spec.hidden_size, generator=generator)).std() < 2


def test_the_load_is_nano_vllms_own():
    load = nano_vllm_load(256, (100, 1024), 151_936)
    assert load.total == 133_966
    assert sum(map(len, load.prompts)) == 142_827
    assert all(100 <= len(prompt) <= 1024 for prompt in load.prompts)
    assert all(100 <= tokens <= 1024 for tokens in load.output_tokens)
    assert load.longest <= 2048
    assert max(map(max, load.prompts)) <= 10_000


def test_a_loads_sizes():
    load = Load([[1] * 15, [2] * 16], [1, 1])
    assert (load.total, load.longest, load.blocks(16)) == (2, 17, 1 + 2)
    assert load.first(1) == Load([[1] * 15], [1])
    assert Load([[1], [2]], [3, 9]).cut(4) == Load([[1], [2]], [3, 4])
    assert all(token < 50 for prompt in nano_vllm_load(3, (4, 8), 50).prompts for token in prompt)
    assert even_load(2, 3, 4, 10) == even_load(2, 3, 4, 10) != even_load(2, 3, 4, 10, seed=1)


# ---------------------------------------------------------------------- arithmetic of steps


def step(end: float, rows: int = 1, kind: str = "decode", **more: float) -> StepTrace:
    scheduled = tuple(Scheduled(str(row), kind, 1, 5, sampled=1) for row in range(rows))
    return StepTrace(index=0, start=end - 0.5, end=end, scheduled=scheduled, **more)


def test_a_decode_step_lasts_from_end_to_end_and_prefills_do_not_count():
    steps = [
        step(1.0, kind="prefill"),
        step(2.0, bytes=8.0),
        step(2.5, bytes=10.0),
        step(3.1, bytes=20.0),
        step(9.0, rows=2),
    ]
    assert [round(seconds, 6) for _, seconds in gpu_bench.full_decodes(steps, 1)] == [0.5, 0.6]
    assert gpu_bench.median_step(steps, 1) == pytest.approx(0.55)
    assert gpu_bench.mean_bytes(steps, 1) == pytest.approx(15.0)
    with pytest.raises(RuntimeError, match="no two decode steps of 3 requests"):
        gpu_bench.full_decodes(steps, 3)


def test_idle_share_is_of_busy_and_idle():
    steps = [step(1.0, gpu_time=0.9, gpu_idle_time=0.1), step(2.0, gpu_time=0.7, gpu_idle_time=0.3)]
    assert gpu_bench.idle_share(steps) == pytest.approx(0.2)
    assert gpu_bench.idle_share([step(1.0)]) is None


def test_each_step_is_bound_by_bytes_or_by_operations():
    bench = gpu_bench.Bench(CPU, QUICK)
    assert bench.least_seconds([step(1.0)]) is None
    limits = {"copy_bandwidth": 100.0, "matmul_rate": 1000.0}
    known = Result(name="ceilings", title="", unit="B/s", status="measured", reading=Reading([1.0], details=limits))
    bench = gpu_bench.Bench(CPU, QUICK, known=[known])
    steps = [step(1.0, bytes=100.0, flops=500.0), step(2.0, bytes=10.0, flops=3000.0)]
    assert bench.least_seconds(steps) == pytest.approx(1.0 + 3.0)


def test_the_slope_is_that_of_a_line():
    assert gpu_bench.slope([(1.0, 12.0), (2.0, 14.0), (4.0, 18.0)]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="two different places"):
        gpu_bench.slope([(1.0, 12.0), (1.0, 14.0)])


def test_kernels_copies_and_launches_are_counted_apart():
    events = [
        ("cudaGraphLaunch", "DeviceType.CPU", 9.0),
        ("cudaLaunchKernel", "DeviceType.CPU", 5.0),
        ("aten::mm", "DeviceType.CPU", 50.0),
        ("gemm", "DeviceType.CUDA", 30.0),
        ("gemm", "DeviceType.CUDA", 50.0),
        ("norm", "DeviceType.CUDA", 4.0),
        ("Memcpy HtoD (Pinned -> Device)", "DeviceType.CUDA", 1.0),
    ]
    counted = gpu_bench.count_kernels(events, steps=2)
    assert (counted.kernels, counted.copies, counted.launches) == (1.5, 0.5, 1.0)
    assert counted.gpu_seconds == pytest.approx(42e-6)
    assert counted.top[0] == {"kernel": "gemm", "calls": 1.0, "us": 40.0}
    assert "2 kernels and 0 copies a step" in counted.sentence()
    with pytest.raises(NotHere, match="saw no kernels"):
        gpu_bench.count_kernels(events[:3], 1)


def test_repeats_stop_before_the_deadline():
    bench = gpu_bench.Bench(CPU, Sizes(repeats=5))
    assert bench.repeat(lambda: 1.0) == [1.0] * 5
    assert bench.repeat(lambda: 1.0, 2) == [1.0] * 2
    bench.deadline = 0.0
    assert bench.repeat(lambda: 2.0) == [2.0]


def test_a_wrong_number_of_tokens_is_no_speed():
    class Lazy:
        def add_request(self, prompt, params):
            pass

        def has_unfinished(self):
            return False

    with pytest.raises(RuntimeError, match="sampled 0 tokens where 8 were asked for"):
        gpu_bench.run_load(Lazy(), even_load(2, 3, 4, 10))


def test_an_unknown_setting_is_not_a_failure_of_the_engine():
    bench = gpu_bench.Bench(CPU, QUICK, tiny=True)
    with pytest.raises(NotHere, match="no setting warp_drive"), bench.engine(SHAPES[2], warp_drive=9):
        pass


GOALS = {
    "decode_8b": "≥ 75.0 % of bandwidth (stretch 85.0 %)",
    "decode_1b": "≥ 60.0 % of bandwidth",
    "decode_smollm2": "≥ 1,200 tokens/s (stretch 1,500 tokens/s)",
    "prefill_8b": "≥ 60.0 % of matmul",
    "nano_vllm_sync": "≥ 12,000 tokens/s",
    "nano_vllm_async": "≥ 20,000 tokens/s",
    "generate_batch": "≥ 5.00×",
    "itl_slope_8b": "≥ 80.0 % of bandwidth",
    "idle_256": "≤ 5.0 %",
}


def test_every_speed_that_is_promised_is_measured_against_its_goal():
    shown = {m.name: gpu_report.show_goal(gpu_worker.blank(m, "skipped")) for m in gpu_measures.MEASURES}
    assert {name: goal for name, goal in shown.items() if goal} == GOALS


def test_the_best_reading_tells_the_others_values():
    readings = [Reading([2.0], notes=["slow"]), Reading([3.0], notes=["quick"], details={"a": 1})]
    best = gpu_measures.best_of(readings, max)
    assert (best.value, best.notes, best.details) == (3.0, ["quick", "slow"], {"a": 1, "others": [{}]})


# ---------------------------------------------------------------------- what only a GPU has, with stand-ins


def test_idle_time_is_that_of_the_variant_that_idles_least(monkeypatch):
    shares = iter([0.3, 0.2, 0.25, 0.1, 0.1, 0.1])
    monkeypatch.setattr(gpu_measures, "idle_share", lambda steps: next(shares))
    bench = gpu_bench.Bench(CPU, replace(QUICK, repeats=3), tiny=True)
    reading = gpu_measures.idle(bench, SHAPES[3])
    assert reading.repeats == [0.1, 0.1, 0.1]
    assert reading.details["driven"] == "async_scheduling"
    assert reading.details["step_seconds"] > 0
    assert any(note.startswith("synchronous: idle for 25.0 %") for note in reading.notes)


def test_kernels_bind_where_bytes_do_not():
    limits = {"copy_bandwidth": 1e9, "kernel_seconds": 1e-6}
    known = Result(name="ceilings", title="", unit="B/s", status="measured", reading=Reading([1.0], details=limits))
    reading = Reading([100.0])
    bench = gpu_bench.Bench(CPU, QUICK, known=[known])
    gpu_measures._add_decode_ceilings(bench, reading, 1e4, 50)
    assert reading.ceilings == {"bandwidth": pytest.approx(1e5)} and reading.binding == "bandwidth"
    bench.layer_kernels = 10
    gpu_measures._add_decode_ceilings(bench, reading, 1e4, 50)
    assert reading.ceilings == {"bandwidth": pytest.approx(1e5), "kernels": pytest.approx(2000.0)}
    assert reading.binding == "kernels"
    assert "By the code a layer takes 10 kernels, 50 layers 500;" in reading.notes[-1]


def test_what_the_profiler_counts_stands_beside_the_speed(monkeypatch):
    found = gpu_bench.StepKernels(200.0, 1.0, 2.0, 1e-3, [{"kernel": "gemm", "calls": 1.0, "us": 9.0}])
    monkeypatch.setattr(gpu_measures, "profile_decode", lambda *arguments: found)
    bench = gpu_bench.Bench(CPU, QUICK, tiny=True)
    counted = gpu_measures.kernels(bench, SHAPES[2], gpu_measures.short_load)
    assert counted.value == 200 and counted.details["top"][0]["kernel"] == "gemm"
    speed = Reading([400.0], {"bandwidth": 9e9, "kernels": 1e9}, details={"step_seconds": 2.5e-3})
    idle = Reading([0.1], details={"step_seconds": 2e-3})
    readings = {
        "ceilings": Reading([1.0], details={"kernel_seconds": 1e-6}),
        "decode_smollm2": speed,
        "idle_256": idle,
        "kernels_smollm2": counted,
        "kernels_256": counted,
        "kernels_8b": None,
    }
    gpu_measures.with_kernels(
        [Result(name=name, title="", unit="share", status="measured", reading=r) for name, r in readings.items()]
    )
    assert "200 kernels and 2 copies a step" in speed.notes[0]
    assert speed.ceilings["kernels"] == pytest.approx(5000.0)
    assert speed.notes[1] == "By the profiler's own durations no kernel runs for 60.0 % of a step."
    assert "kernels" not in idle.ceilings and "50.0 % of a step" in idle.notes[1]
    names = [measure.name for measure in gpu_measures.MEASURES]
    assert set(names[-len(gpu_measures.PROFILED) :]) == set(gpu_measures.PROFILED), "nothing is timed after the profiler"


def test_everything_fits_into_the_time():
    expected = gpu_check.START_SECONDS + gpu_check.TEST_SECONDS + sum(m.seconds for m in gpu_measures.MEASURES)
    assert expected <= gpu_check.SECONDS
    assert gpu_check.SECONDS + gpu_worker.GRACE < 8 * 60


def test_measures_of_a_shape_follow_each_other():
    def group(measure):
        gain = measure.run.keywords.get("gain")
        return (gain.shape if gain else measure.run.keywords["shape"]).name

    before_peers = [m for m in gpu_measures.MEASURES if not m.name.startswith(("ceil", "generate", "kernels"))]
    groups = [name for name, _ in itertools.groupby(map(group, before_peers))]
    assert len(groups) == len(set(groups)) == len(SHAPES)


def test_a_gain_is_time_without_over_time_with(monkeypatch):
    seconds = {"with": ([0.1, 0.2], "fast"), "without": ([0.3, 0.4], "plain")}
    monkeypatch.setattr(gpu_gains, "_seconds", lambda bench, gain, load, backend: seconds[backend])
    gain = replace(gpu_gains.GAINS["gain_split"], switch=lambda chosen: ("with", "without"))
    reading = gpu_gains.measure(gpu_bench.Bench(CPU, QUICK, tiny=True), gain)
    assert reading.repeats == [pytest.approx(3.0), pytest.approx(2.0)]
    assert "With it 150.000 ms a step (fast)." in reading.notes


@pytest.mark.parametrize("name", gpu_gains.GAINS)
def test_both_sides_of_a_gain_run(name):
    gain = replace(gpu_gains.GAINS[name], switch=lambda chosen: (chosen, chosen))
    reading = gpu_gains.measure(gpu_bench.Bench(CPU, QUICK, tiny=True), gain)
    assert reading.value > 0
    assert "torch SDPA" in reading.notes[1]


def test_each_gain_changes_one_thing():
    def kernels(**settings):
        return settings

    chosen = Backend(kernels, "Triton", fused=True, graphs=lambda: None)
    assert gpu_gains.graphs(chosen) == (chosen, replace(chosen, graphs=None))
    assert gpu_gains.fused(chosen) == (chosen, replace(chosen, fused=False))
    with_it, without_it = gpu_gains.split(chosen)
    assert with_it is chosen
    assert without_it.make_attention(a=1) == {"a": 1, "processors": 1}
    with_it, without_it = gpu_gains.attention(chosen)
    assert (with_it.fused, with_it.graphs, with_it.make_attention) == (False, None, kernels)
    assert (without_it.fused, without_it.graphs, without_it.make_attention) == (False, None, SdpaAttention)
    for switch in (gpu_gains.graphs, gpu_gains.fused, gpu_gains.split, gpu_gains.attention):
        with pytest.raises(NotHere, match="not in use: too old"):
            switch(Backend(SdpaAttention, "SDPA", reason="too old"))


def test_a_gpu_is_described(monkeypatch):
    facts = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 10**9, L2_cache_size=60 * 2**20
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    machine = gpu_report.describe_machine("cuda:0")
    assert (machine["gpu"], machine["compute_capability"], gpu_report.slug(machine)) == ("NVIDIA H200", "9.0", "nvidia-h200")
    page = gpu_report.page(Document(machine=machine, tests=Suite("skipped"), results=[]))
    assert "132 multiprocessors, 140 GiB" in page


# ---------------------------------------------------------------------- results and their page


def result(value: float | None = None, *, goal: Goal | None = None, unit: str = "tokens/s", **more) -> Result:
    ceilings = more.pop("ceilings", {})
    reading = None if value is None else Reading([value], ceilings=ceilings)
    more = {"name": "x", "title": "decode", "status": "measured"} | more
    return Result(unit=unit, goal=goal, reading=reading, **more)


@pytest.mark.parametrize(
    ("value", "goal", "ceilings", "met", "words"),
    [
        (80.0, Goal(0.75, of="bandwidth", stretch=0.85), {"bandwidth": 100.0}, True, "met"),
        (90.0, Goal(0.75, of="bandwidth", stretch=0.85), {"bandwidth": 100.0}, True, "met, stretch too"),
        (70.0, Goal(0.75, of="bandwidth", stretch=0.85), {"bandwidth": 100.0, "kernels": 71.0}, False, "not met"),
        (70.0, Goal(0.75, of="bandwidth"), {}, None, "no ceiling measured"),
        (1500.0, Goal(1200, stretch=1500), {}, True, "met, stretch too"),
        (0.04, Goal(0.05, lower=True), {}, True, "met"),
        (0.06, Goal(0.05, lower=True), {}, False, "not met"),
        (1.0, None, {}, None, ""),
    ],
)
def test_goals_are_judged_by_value_or_share(value, goal, ceilings, met, words):
    judged = result(value, goal=goal, ceilings=ceilings)
    assert judged.met is met
    assert gpu_report.verdict(judged) == words


def test_a_reading_is_the_median_of_its_repeats():
    reading = Reading([1.0, 5.0, 2.0], ceilings={"bandwidth": 10.0, "kernels": 4.0})
    assert (reading.value, reading.spread, reading.binding) == (2.0, 2.0, "kernels")
    assert Reading([1.0]).binding == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.312e12, "B/s", "4.31 TB/s"),
        (788.4e12, "FLOP/s", "788 TFLOP/s"),
        (11.6e9, "B/s", "11.6 GB/s"),
        (12.0, "B/s", "12 B/s"),
        (12_345.6, "tokens/s", "12,346 tokens/s"),
        (34.56, "tokens/s", "34.6 tokens/s"),
        (0.0312, "share", "3.1 %"),
        (5.678, "times", "5.68×"),
        (322.0, "kernels", "322 kernels"),
    ],
)
def test_numbers_have_units(value, unit, text):
    assert gpu_report.show(value, unit) == text


def document(results: list[Result], tests: Suite | None = None) -> Document:
    machine = {
        "device": "cuda:0", "date": "2026-01-02T03:04:05+00:00", "cpu": "A processor", "cpu_cores": 16,
        "system": "Linux x86_64", "python": "3.12.3", "versions": {"torch": "2.13.0"}, "cuda": "13.0", "revision": "abc1234",
        "gpu": "NVIDIA H200",
        "compute_capability": "9.0", "multiprocessors": 132, "memory_bytes": 140 * 2**30, "l2_bytes": 60 * 2**20,
        "nvidia_smi": gpu_report.parse_gpu("NVIDIA H200, 580.1, 143771, 345, 3201, 1980, 75.1, [N/A], 30"),
    }  # fmt: skip
    return Document(machine=machine, tests=tests or Suite("passed", "9 passed, 0 failed, 0 skipped."), results=results)


def test_the_page_tells_what_was_measured_failed_and_skipped(tmp_path):
    results = [
        result(80.0, goal=Goal(0.75, of="bandwidth", stretch=0.85), ceilings={"bandwidth": 100.0, "kernels": 400.0}),
        result(title="prefill", status="failed", reason="RuntimeError: out of memory", traceback="Traceback: somewhere"),
        result(
            title="slope", status="skipped", reason="it may take 45 s, and 3 s were left", goal=Goal(0.8, of="bandwidth")
        ),
    ]
    results[0].reading.details["backend"] = "Triton paged attention, CUDA graphs"
    results[0].gpu = {"sm_mhz": 1980.0, "power_w": 640.2}
    made = document(results, Suite("failed", "8 passed, 1 failed, 0 skipped.", ["test_graph: wrong"], output="the end"))
    paths = gpu_report.write(made, tmp_path, gpu_report.slug(made.machine))
    assert [path.name for path in paths] == ["nvidia-h200.json", "nvidia-h200.md"]
    text = paths[1].read_text()
    assert "# GPU check: NVIDIA H200" in text
    assert "driver 580.1" in text
    assert (
        "| decode | 80.0 tokens/s | 100 tokens/s (bandwidth) | 80 % | ≥ 75.0 % of bandwidth (stretch 85.0 %) | met |" in text
    )
    assert "- Ceilings: bandwidth 100 tokens/s, kernels 400 tokens/s." in text
    assert "- Computed with Triton paged attention, CUDA graphs: x" in text
    assert "- The GPU right after it: 1980 MHz, 640 W." in text
    assert "| prefill | failed | | |  | |" in text
    assert "- Failed: RuntimeError: out of memory" in text
    assert "Traceback: somewhere" in text
    assert "| slope | skipped | | | ≥ 80.0 % of bandwidth | |" in text
    assert "- Skipped: it may take 45 s" in text
    assert "- test_graph: wrong" in text
    assert "the end" in text
    again = msgspec.json.decode(paths[0].read_bytes(), type=Document)
    assert again == made
    assert again.failed


def test_a_missed_goal_is_no_failure():
    missed = document([result(1.0, goal=Goal(2.0)), result(status="skipped", reason="no time")])
    assert missed.results[0].met is False
    assert not missed.failed


def test_what_a_gpu_does_not_say_is_left_out():
    assert gpu_report.parse_gpu("H200, 580.1, 1, 2, 3, 4, 5.5, [N/A], [Not Supported]") == {
        "name": "H200", "driver": "580.1", "memory_mib": 1.0, "sm_mhz": 2.0, "memory_mhz": 3.0, "most_sm_mhz": 4.0,
        "power_w": 5.5,
    }  # fmt: skip
    assert gpu_report.parse_gpu("No devices were found") == {}


# ---------------------------------------------------------------------- workers


WORKER = """
import json, os, sys, time
job, results = json.load(open(sys.argv[1])), open(sys.argv[2], "a", buffering=1)
print("hello from the worker", flush=True)
for name in job["measures"]:
    if name == "decode_8b" and not job["known"]:
        raise SystemExit("nothing was known")
    print(json.dumps({"type": "started", "name": name}), file=results)
    if name == "nano_vllm_sync":
        print("Segmentation fault", flush=True)
        os._exit(139)
    if name == "idle_256":
        time.sleep(60)
    print(json.dumps({"type": "result", "name": name, "title": name, "unit": "share", "status": "measured"}), file=results)
"""


def test_a_worker_that_crashes_or_hangs_costs_one_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_worker, "HANGS", -gpu_worker.BY_NAME["idle_256"].seconds + 0.3)
    names = ["ceilings", "nano_vllm_sync", "nano_vllm_async", "idle_256", "decode_8b"]
    told = []
    command = [sys.executable, "-c", WORKER]
    results = gpu_worker.supervise(gpu_worker.Job(measures=names, device="cpu"), tmp_path, told.append, command)
    assert told == results
    assert [(r.name, r.status) for r in results] == [
        ("ceilings", "measured"), ("nano_vllm_sync", "failed"), ("nano_vllm_async", "measured"), ("idle_256", "failed"),
        ("decode_8b", "measured"),
    ]  # fmt: skip
    assert results[1].reason == "the process that measured ended with code 139"
    assert "Segmentation fault" in results[1].traceback
    assert results[3].reason.startswith("stopped after")
    assert results[1].title == gpu_worker.BY_NAME["nano_vllm_sync"].title


def test_a_hang_at_the_end_does_not_outlast_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_worker, "GRACE", 0.5)
    job = gpu_worker.Job(measures=["idle_256", "decode_8b", "prefill_8b"], device="cpu", seconds=0.2)
    told = []
    start = time.perf_counter()
    results = gpu_worker.supervise(job, tmp_path, told.append, [sys.executable, "-c", WORKER])
    assert time.perf_counter() - start < 20, "idle_256 alone may take 20 s, and hang for 40 s"
    assert told == results
    assert [(r.name, r.status) for r in results] == [
        ("idle_256", "failed"), ("decode_8b", "skipped"), ("prefill_8b", "skipped"),
    ]  # fmt: skip
    assert results[1].reason == "it may take 19 s, and 0 s were left"


def test_a_worker_that_cannot_start_fails_everything_once(tmp_path):
    job = gpu_worker.Job(measures=["ceilings", "idle_256"], device="cpu")
    results = gpu_worker.supervise(job, tmp_path, lambda result: None, [sys.executable, "-c", "import no_such_module"])
    assert [result.status for result in results] == ["failed", "failed"]
    assert "no_such_module" in results[0].traceback


def test_a_measure_that_raises_does_not_stop_the_next(monkeypatch):
    def broken(bench):
        raise ValueError("a kernel is missing")

    def absent(bench):
        raise NotHere("there is no GPU")

    measures = [
        gpu_measures.Measure("a", "A", "share", broken, 1),
        gpu_measures.Measure("b", "B", "share", absent, 1),
        gpu_measures.Measure("c", "C", "share", lambda bench: Reading([0.5]), 1),
        gpu_measures.Measure("d", "D", "share", lambda bench: Reading([0.5]), 1000),
    ]
    monkeypatch.setattr(gpu_worker, "BY_NAME", {measure.name: measure for measure in measures})
    messages = []
    job = gpu_worker.Job(measures=["a", "b", "c", "d"], device="cpu", quick=True, seconds=100.5)
    assert gpu_worker.work(job, messages.append)
    results = [message for message in messages if isinstance(message, Result)]
    assert [(r.status, r.reason) for r in results] == [
        ("failed", "ValueError: a kernel is missing"),
        ("skipped", "there is no GPU"),
        ("measured", ""),
        ("skipped", "it may take 1000 s, and 100 s were left"),
    ]
    assert "broken" in results[0].traceback
    assert [message.name for message in messages if isinstance(message, gpu_worker.Started)] == ["a", "b", "c"]


# ---------------------------------------------------------------------- tests of tests


def test_pytests_report_becomes_a_summary(tmp_path):
    folder = tmp_path / "some_tests"
    folder.mkdir()
    (folder / "test_it.py").write_text(
        textwrap.dedent("""
            import pytest
            pytestmark = pytest.mark.cuda
            def test_right(): pass
            def test_wrong(): assert 1 == 2, "not equal"
            @pytest.mark.skip
            def test_left_out(): pass
        """)
    )
    found = gpu_check.run_tests(tmp_path / "out", 60, str(folder))
    assert (found.status, found.summary) == ("failed", "1 passed, 1 failed, 1 skipped.")
    assert found.failures[0].startswith("test_wrong: AssertionError: not equal")
    assert "test_wrong" in found.output


def test_tests_that_hang_or_leave_no_report_are_failed(tmp_path):
    assert gpu_check.read_report(tmp_path / "none.xml", None, 9).summary == "Stopped after 9 s."
    case = '<testcase name="a"><error message=""/></testcase>'
    (tmp_path / "some.xml").write_text(f'<all><testsuite tests="1" errors="1">{case}</testsuite></all>')
    assert gpu_check.read_report(tmp_path / "some.xml", 1, 9).failures == ["a: no message"]
    assert gpu_check.read_report(tmp_path / "none.xml", -11, 9).summary == "pytest ended with code -11 and left no report."


@pytest.mark.parametrize("ignored", [False, True], ids=["", "in the background of a shell"])
def test_tests_are_stopped_in_time(tmp_path, monkeypatch, ignored):
    folder = tmp_path / "some_tests"
    folder.mkdir()
    (folder / "test_it.py").write_text("import time\ndef test_quick(): pass\ndef test_slow(): time.sleep(60)\n")
    begun = tmp_path / "out" / "gpu_tests.log"

    class Begins(subprocess.Popen):
        """Time runs from the moment at which the slow test does."""

        def wait(self, timeout=None):
            while timeout == 0.2 and self.poll() is None and "test_slow" not in begun.read_text():
                time.sleep(0.02)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Begins)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        found = gpu_check.run_tests(tmp_path / "out", 0.2, str(folder))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.status == "failed"
    assert found.summary == "Stopped after 0 s; by then 1 passed, 0 failed, 0 skipped."
    assert "test_quick PASSED" in found.output and "KeyboardInterrupt" in found.output
    assert found.seconds < 20


# ---------------------------------------------------------------------- transformers, beside


def test_generate_batch_is_given_up_when_its_time_is_over():
    bench = gpu_bench.Bench(CPU, QUICK, tiny=True)
    load = nano_vllm_load(4, (4, 10), 512)
    with pytest.raises(TimeoutError, match="0 of 2 requests were done"):
        gpu_peers.generate_batch(bench, SHAPES[3], load, until=0.0)


@pytest.mark.parametrize(
    ("until", "tried", "kept"),
    [
        (50.0, [2, 2, 4], (4, 8)),
        (0.001, [2, 2], (2, 4)),
        (50.0, [2, 2, "late"], (2, 4)),
    ],
)
def test_a_peer_gets_as_much_of_the_load_as_fits_the_time(monkeypatch, until, tried, kept):
    sizes = []

    def batch(bench, model, load, until):
        sizes.append(len(load.prompts))
        if len(sizes) == len(tried) and tried[-1] == "late":
            raise TimeoutError("3 of 4 requests were done when the time was over")
        return 1000.0, "sdpa"

    monkeypatch.setattr(gpu_peers, "peer_model", lambda bench, shape: nullcontext())
    monkeypatch.setattr(gpu_peers, "_batch", batch)
    monkeypatch.setattr(gpu_peers.time, "perf_counter", lambda: 0.0)
    bench = gpu_bench.Bench(CPU, QUICK, tiny=True)
    load = nano_vllm_load(4, (4, 10), 512)
    found = gpu_peers.generate_batch(bench, SHAPES[3], load, until)
    assert found.load == load.first(kept[0]).cut(kept[1])
    assert sizes[:2] == tried[:2]
    assert len(sizes) == len(tried)
    assert any("given up: 3 of 4" in note for note in found.notes) == (tried[-1] == "late")


# ---------------------------------------------------------------------- the whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run make gpu-check")
def test_without_a_gpu_the_check_says_so_and_succeeds():
    done = subprocess.run(
        [sys.executable, "-m", "engine.bench.gpu_check"], cwd=gpu_check.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: nothing was checked" in done.stdout


def test_real_shapes_are_refused_on_a_cpu_and_unknown_measures_named(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu"])
    assert "--device cpu needs --quick" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu", "--quick", "--only", "speed"])
    assert "no such measure; there are ceilings, nano_vllm_sync" in capsys.readouterr().err


def test_every_measure_runs_on_tiny_shapes_without_a_gpu(tmp_path, capsys):
    arguments = ["--device", "cpu", "--quick", "--here", "--out", str(tmp_path / "out"), "--keep", str(tmp_path / "kept")]
    assert gpu_check.main(arguments) == 0
    made = msgspec.json.decode((tmp_path / "out" / "gpu_check.json").read_bytes(), type=Document)
    assert [found.name for found in made.results] == [measure.name for measure in gpu_measures.MEASURES]
    by_name = {found.name: found for found in made.results}
    assert made.quick
    needs_gpu = {"idle_256", *gpu_gains.GAINS, *gpu_measures.PROFILED}
    assert {name for name, found in by_name.items() if found.status != "measured"} == needs_gpu
    assert by_name["decode_8b"].reading.ceilings["bandwidth"] > 0
    assert by_name["generate_batch"].reading.value > 0
    assert (tmp_path / "kept" / "cpu.md").read_text() == (tmp_path / "out" / "gpu_check.md").read_text()
    assert "says nothing about speed" in (tmp_path / "kept" / "cpu.md").read_text()
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert msgspec.json.decode(last)["tests"] == "skipped"
