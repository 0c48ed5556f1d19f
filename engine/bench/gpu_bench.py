"""What the measures on a GPU share: models made on the spot, engines that give their memory back, runs, and what they cost.

A run is a list of the engine's own step records. Times of steps come from their ends, so everything the host does in
between counts. What the GPU does inside a step is asked of torch's profiler, after everything that is timed.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from engine.bench.gpu_report import NotHere, Result
from engine.bench.gpu_shapes import Load, Shape, Sizes
from engine.core.config import EngineConfig, build_config
from engine.core.engine import Engine
from engine.core.sampling_params import SamplingParams
from engine.core.trace import StepTrace
from engine.model.random_weights import random_model
from engine.model.runner import ModelRunner, available_bytes
from engine.model.transformer import Transformer

POOL_SHARE = 0.85
"""Of the free memory, for a KV pool: the rest is for activations and graphs."""
TIMES = (
    "schedule_time", "prepare_time", "launch_time", "forward_time", "sample_time", "postprocess_time", "gpu_time",
    "gpu_idle_time",
)  # fmt: skip


RUNNER_SETTINGS = frozenset(inspect.signature(ModelRunner).parameters) - {"model", "config", "codec"}


def describe(runner: ModelRunner) -> str:
    """Kernels and graphs that a runner uses, and why not faster ones."""
    tell = getattr(runner, "describe_backend", None)
    if tell is None:
        return runner.attention.name
    info = tell()
    return f"{info}. {info.reason}".rstrip(". ")


def layer_kernels(runner: ModelRunner) -> int | None:
    """Kernels that one layer of a decode step of one row launches, by the code; None where torch decides.

    Norm, qkv, rotate and store, attend, out, norm, gate-up, activation, down: 9. Norms of query and key heads are one more,
    and merging the parts of split keys one. tests/triton/interpreted/test_launches.py holds the code to it.
    """
    splits_for = getattr(runner.attention, "splits_for", None)
    if splits_for is None or not runner.backend.fused:
        return None
    return 9 + runner.model.spec.qk_norm + (splits_for(1, runner.config.max_model_len) > 1)


class Bench:
    """Device, sizes and what is known so far, for one measure after another.

    Args:
        device: where to run.
        sizes: how much of everything.
        tiny: take the shapes' tiny twins.
        known: results of earlier measures, the ceilings among them.
    """

    def __init__(self, device: torch.device, sizes: Sizes, *, tiny: bool = False, known: Sequence[Result] = ()) -> None:
        self.device, self.sizes, self.tiny = device, sizes, tiny
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.known = {result.name: result for result in known}
        self.deadline = float("inf")
        """On ``time.perf_counter``'s clock: no repeat starts that would end after it."""
        self.backend = ""
        """What the latest engine computes with, for people."""
        self.layer_kernels: int | None = None
        """Kernels of a layer in the latest engine's decode steps of one row, by the code."""
        self._model: tuple[str, Transformer] | None = None

    # ------------------------------------------------------------------ ceilings

    def ceiling(self, name: str) -> float | None:
        """A measured limit: "copy_bandwidth" (bytes/s), "matmul_rate" (FLOP/s) or "kernel_seconds"; None if not measured."""
        result = self.known.get("ceilings")
        value = result.reading.details.get(name) if result and result.reading else None
        return float(value) if value else None

    def least_seconds(self, steps: Sequence[StepTrace]) -> float | None:
        """Time that the ceilings allow for ``steps``, each bound by bytes or by operations; None without ceilings."""
        bandwidth, rate = self.ceiling("copy_bandwidth"), self.ceiling("matmul_rate")
        if not bandwidth or not rate:
            return None
        return sum(max(step.bytes / bandwidth, step.flops / rate) for step in steps)

    # ------------------------------------------------------------------ models and engines

    def shape(self, shape: Shape) -> Shape:
        """The shape itself, or its tiny twin."""
        return shape.tiny() if self.tiny else shape

    def model(self, shape: Shape) -> Transformer:
        """A model of that shape; the one before it is given up when it is another."""
        wanted = self.shape(shape)
        if self._model is None or self._model[0] != wanted.name:
            self.forget()
            self._model = wanted.name, random_model(wanted.spec, self.device, self.dtype)
        return self._model[1]

    def forget(self) -> None:
        """Give all memory back."""
        self._model = None
        self.sweep()

    def sweep(self) -> None:
        """Free what nothing refers to any more; without a GPU there is little to win, and it would take most of the time."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @contextmanager
    def engine(self, shape: Shape, **fields: Any) -> Iterator[Engine]:
        """An engine on that shape without a tokenizer (no text is made); its memory is free again afterwards.

        Args:
            shape: of the model.
            fields: settings of the engine and of its runner.

        Raises:
            NotHere: there is no such setting.
        """
        model = self.model(shape)
        for_runner = {name: fields.pop(name) for name in set(fields) & RUNNER_SETTINGS}
        unknown = sorted(set(fields) - set(EngineConfig.__struct_fields__))
        if unknown:
            raise NotHere(f"this engine has no setting {unknown[0]}")
        config = build_config({"enable_prefix_caching": False} | fields)
        runner = ModelRunner(model, config, **for_runner)
        engine = Engine(config, runner, vocab_size=model.spec.vocab_size)
        self.backend, self.layer_kernels = describe(runner), layer_kernels(runner)
        try:
            yield engine
        finally:
            runner.close()
            del runner, engine, model
            self.sweep()

    def pool_blocks(self, shape: Shape, wanted: int, block_size: int = 16) -> int:
        """``wanted`` blocks, or as many as the free memory holds."""
        free = available_bytes(self.device)
        block_bytes = block_size * self.model(shape).kv_bytes_per_token
        return wanted if free is None else max(1, min(wanted, int(POOL_SHARE * free) // block_bytes))

    def variants(self) -> list[tuple[str, dict[str, Any]]]:
        """How an engine can be driven: each step waited for, and, where the engine can, the next one scheduled ahead."""
        found: list[tuple[str, dict[str, Any]]] = [("synchronous", {})]
        if "async_scheduling" in EngineConfig.__struct_fields__:
            found.append(("async_scheduling", {"async_scheduling": True}))
        return found

    # ------------------------------------------------------------------ time

    def repeat(self, work: Callable[[], float], most: int | None = None) -> list[float]:
        """``work`` as often as wanted (``most``, or as the sizes say), at least once, and not beyond the deadline.

        What was there before is left out of garbage collections meanwhile, as in a server that has run for a while.
        """
        values = []
        self.sweep()
        gc.freeze()
        try:
            for _ in range(most or self.sizes.repeats):
                start = time.perf_counter()
                values.append(work())
                now = time.perf_counter()
                if now + (now - start) > self.deadline:
                    break
        finally:
            gc.unfreeze()
        return values

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def synchronise(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ---------------------------------------------------------------------- runs


@dataclass
class Run:
    """What an engine did with a load."""

    steps: list[StepTrace]
    """Those that computed something."""
    seconds: float
    """From adding the first request to the end of the last step."""


def run_load(engine: Engine, load: Load, temperature: float = 0.0) -> Run:
    """Give an engine a load, all at once, and step until it is done.

    Raises:
        RuntimeError: when it gave another number of tokens than asked for: then its speed means nothing.
    """
    steps = []
    start = time.perf_counter()
    add(engine, load, temperature)
    while engine.has_unfinished():
        steps.append(engine.step())
    seconds = time.perf_counter() - start
    steps = [step for step in steps if step.scheduled]
    sampled = sum(row.sampled >= 0 for step in steps for row in step.scheduled)
    if sampled != load.total:
        raise RuntimeError(f"the engine sampled {sampled} tokens where {load.total} were asked for")
    return Run(steps, seconds)


def add(engine: Engine, load: Load, temperature: float = 0.0) -> None:
    """Queue a load; ends of texts are ignored."""
    for prompt, tokens in zip(load.prompts, load.output_tokens, strict=True):
        engine.add_request(prompt, SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))


def full_decodes(steps: Sequence[StepTrace], rows: int) -> list[tuple[StepTrace, float]]:
    """Steps in which all of ``rows`` requests decode, each with the seconds since the end of the one before, which did too.

    Raises:
        RuntimeError: there are none.
    """

    def full(step: StepTrace) -> bool:
        return len(step.scheduled) == rows and all(row.kind == "decode" for row in step.scheduled)

    found = [(step, step.end - before.end) for before, step in pairwise(steps) if full(before) and full(step)]
    if not found:
        raise RuntimeError(f"no two decode steps of {rows} requests follow each other among {len(steps)} steps")
    return found


def median_step(steps: Sequence[StepTrace], rows: int) -> float:
    """Median seconds of a decode step of ``rows`` requests, everything in between included."""
    return statistics.median(seconds for _, seconds in full_decodes(steps, rows))


def mean_bytes(steps: Sequence[StepTrace], rows: int) -> float:
    """Bytes that a decode step of ``rows`` requests must move on average."""
    return statistics.fmean(step.bytes for step, _ in full_decodes(steps, rows))


def breakdown(steps: Sequence[StepTrace]) -> dict[str, float]:
    """Where a step's time goes: mean milliseconds of each part, and of the whole from end to end."""
    if not steps:
        return {}
    parts = {name: round(1000 * statistics.fmean(getattr(step, name) for step in steps), 4) for name in TIMES}
    ends = [b.end - a.end for a, b in pairwise(steps)]
    return {"steps": len(steps), "end_to_end": round(1000 * statistics.fmean(ends), 4) if ends else 0.0} | parts


def idle_share(steps: Sequence[StepTrace]) -> float | None:
    """GPU idle / (GPU busy + idle) over ``steps``; None where the steps carry no GPU times."""
    busy, idle = sum(step.gpu_time for step in steps), sum(step.gpu_idle_time for step in steps)
    return idle / (busy + idle) if busy else None


# ---------------------------------------------------------------------- inside a step


@dataclass
class StepKernels:
    """What the GPU was asked to do in a decode step, on average over a few profiled ones."""

    kernels: float
    launches: float
    """Calls that ask for work, a graph's replay being one."""
    copies: float
    gpu_seconds: float
    """Sum of the durations of all kernels."""
    top: list[dict[str, Any]] = field(default_factory=list)
    """The kernels that took longest: name, calls a step, microseconds a step."""

    def sentence(self) -> str:
        """For the page."""
        return (
            f"{self.kernels:.0f} kernels and {self.copies:.0f} copies a step, asked for with {self.launches:.0f} launches; "
            f"the kernels take {1000 * self.gpu_seconds:.3f} ms in all (torch.profiler, after everything that is timed)."
        )


def profile_decode(bench: Bench, engine: Engine, load: Load, temperature: float = 0.0) -> StepKernels:
    """Profile a few steps in which all of ``load`` decodes.

    Once it ran, the driver may go on watching launches: nothing that is timed should follow in the same process.

    Raises:
        NotHere: there are no kernels to see.
    """
    try:
        add(engine, load, temperature)
        decoding = 0
        while decoding < 3 and engine.has_unfinished():
            step = engine.step()
            rows = step.scheduled
            decoding += len(rows) == len(load.prompts) and all(row.kind == "decode" for row in rows)
        return profile_steps(bench, lambda: engine.step(), bench.sizes.profile_steps)
    finally:
        engine.abort_all()
        while engine.has_unfinished():
            engine.step()


def profile_steps(bench: Bench, step: Callable[[], object], steps: int) -> StepKernels:
    """Kernels, copies and launches of ``steps`` calls of ``step``, a step.

    Raises:
        NotHere: there are no kernels to see.
    """
    from torch.profiler import ProfilerActivity, profile

    on_gpu = bench.device.type == "cuda"
    bench.synchronise()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        bench.synchronise()
    events = [(str(event.name), str(event.device_type), float(event.time_range.elapsed_us())) for event in profiler.events()]
    if not on_gpu:
        raise NotHere(f"{len(events) / steps:.0f} torch calls a step; without a GPU there are no kernels")
    return count_kernels(events, steps)


def count_kernels(events: Sequence[tuple[str, str, float]], steps: int) -> StepKernels:
    """Count ``events`` (name, device, microseconds) of ``steps`` steps, a step.

    Raises:
        NotHere: there are no kernels among them.
    """
    on_gpu = [(name, micros) for name, device, micros in events if device.endswith("CUDA")]
    copies = [name for name, _ in on_gpu if name.startswith(("Memcpy", "Memset"))]
    kernels = [(name, micros) for name, micros in on_gpu if not name.startswith(("Memcpy", "Memset"))]
    if not kernels:
        raise NotHere("the profiler saw no kernels")
    asked = sum("LaunchKernel" in name or "GraphLaunch" in name for name, device, _ in events if not device.endswith("CUDA"))
    calls = Counter(name for name, _ in kernels)
    micros_of: Counter[str] = Counter()
    for name, micros in kernels:
        micros_of[name] += micros  # type: ignore[assignment]
    top = [
        {"kernel": name[:100], "calls": calls[name] / steps, "us": round(micros / steps, 2)}
        for name, micros in micros_of.most_common(12)
    ]
    return StepKernels(
        len(kernels) / steps, asked / steps, len(copies) / steps, sum(micros for _, micros in kernels) / 1e6 / steps, top
    )


# ---------------------------------------------------------------------- fits


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope dy/dx of points (x, y).

    Raises:
        ValueError: fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a slope needs two different places, and got {points}")
    xs, ys = zip(*points, strict=True)
    return statistics.linear_regression(xs, ys).slope
