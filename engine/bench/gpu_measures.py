"""The measures of a GPU check: what each runs, what it is to reach, and what could be reached at best.

A measure is a function of a ``Bench`` that returns a ``Reading``. It warms up first (kernels compile, graphs are captured,
clocks rise), then repeats, and asks nothing of the machine but time until its deadline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.bench import gpu_gains, gpu_peers
from engine.bench.ceilings import measure_ceilings
from engine.bench.gpu_bench import (
    Bench,
    Run,
    breakdown,
    full_decodes,
    idle_share,
    mean_bytes,
    median_step,
    profile_decode,
    run_load,
    slope,
)
from engine.bench.gpu_report import Goal, NotHere, Reading, Result, Unit, show
from engine.bench.gpu_shapes import (
    LLAMA_3_1_8B,
    LLAMA_3_2_1B,
    QWEN3_0_6B,
    SMOLLM2_135M,
    Load,
    Shape,
    Sizes,
    even_load,
    nano_vllm_load,
)
from engine.core.engine import Engine

TINY_KERNELS = 1000
"""Kernels in the graph that tells how long a kernel takes at least."""
DATASHEET_BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory by its datasheet; for comparison, never as a measured ceiling."""


@dataclass(frozen=True)
class Measure:
    """One line of the table."""

    name: str
    title: str
    unit: Unit
    run: Callable[[Bench], Reading]
    seconds: float
    """Time it is expected to take on an H200; it plans its repeats by it, and is stopped when it takes much more."""
    goal: Goal | None = None


# ---------------------------------------------------------------------- ceilings


def ceilings(bench: Bench) -> Reading:
    """Copy bandwidth, matrix rate, and the shortest time of a kernel inside a graph."""
    measured = measure_ceilings(bench.device, bench.dtype, bench.sizes.ceilings_seconds)
    kernel = kernel_seconds(bench)
    return Reading(
        [measured.copy_bandwidth],
        notes=[
            f"Copy: {show(measured.copy_bandwidth, 'B/s')}, bytes read plus bytes written.",
            f"Matrix product in {measured.dtype}, random numbers: {show(measured.matmul_rate, 'FLOP/s')}.",
            f"A kernel that does next to nothing takes {1e6 * kernel:.2f} µs when {TINY_KERNELS:,} of them follow each other"
            + (" in a CUDA graph." if bench.device.type == "cuda" else "; without a GPU these are plain calls."),
        ],
        details={
            "copy_bandwidth": measured.copy_bandwidth,
            "matmul_rate": measured.matmul_rate,
            "kernel_seconds": kernel,
            "dtype": measured.dtype,
        },
    )


def kernel_seconds(bench: Bench) -> float:
    """Seconds from one dependent kernel to the next: in a replayed graph on a GPU, called one by one elsewhere."""
    counter = torch.zeros(32, device=bench.device)

    def work() -> None:
        for _ in range(TINY_KERNELS):
            counter.add_(1.0)

    replay = work
    if bench.device.type == "cuda":
        work()
        bench.synchronise()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay
    best = float("inf")
    for _ in range(5):
        bench.synchronise()
        start = time.perf_counter()
        replay()
        bench.synchronise()
        best = min(best, time.perf_counter() - start)
    return best / TINY_KERNELS


# ---------------------------------------------------------------------- batch 1


def decode(bench: Bench, shape: Shape) -> Reading:
    """Tokens a second of one sequence, the quicker way of driving the engine; ceilings by bytes and by kernels."""
    sizes, spec = bench.sizes, bench.shape(shape).spec
    load = short_load(sizes, spec.vocab_size)
    pool = {"max_num_seqs": 1, "num_kv_blocks": load.blocks(16), "max_model_len": load.longest}
    readings = []
    for label, fields in bench.variants():
        with bench.engine(shape, **pool, **fields) as engine:
            runs = [run_load(engine, load)]

            def one(engine: Engine = engine, runs: list[Run] = runs) -> float:
                runs.append(run_load(engine, load))
                return 1.0 / median_step(runs[-1].steps, 1)

            reading = Reading(bench.repeat(one))
        steps = runs[-1].steps
        reading.details = {"driven": label, "steps": breakdown([step for step, _ in full_decodes(steps, 1)])}
        reading.details["step_seconds"] = 1.0 / reading.value
        reading.notes = [f"{label}: {show(reading.value, 'tokens/s')}."]
        _add_decode_ceilings(bench, reading, mean_bytes(steps, 1), spec.num_layers)
        readings.append(reading)
    return best_of(readings, max)


def short_load(sizes: Sizes, vocab_size: int) -> Load:
    """One sequence that is decoded."""
    return even_load(1, sizes.decode_prompt, sizes.decode_tokens, vocab_size)


def full_load(sizes: Sizes, vocab_size: int) -> Load:
    """As many sequences as a full batch has."""
    return even_load(sizes.full_batch, sizes.full_prompt, sizes.full_tokens, vocab_size)


def best_of(readings: list[Reading], choose: Callable[..., Reading]) -> Reading:
    """The reading with the best value (``max`` or ``min``); it takes over the first note and the details of the others."""
    best = choose(readings, key=lambda reading: reading.value)
    others = [reading for reading in readings if reading is not best]
    best.notes += [reading.notes[0] for reading in others]
    best.details["others"] = [reading.details for reading in others]
    return best


def _add_decode_ceilings(bench: Bench, reading: Reading, moved: float, layers: int) -> None:
    """By bytes, and by the kernels of all layers as the code launches them; ``with_kernels`` knows the others, too."""
    bandwidth, kernel = bench.ceiling("copy_bandwidth"), bench.ceiling("kernel_seconds")
    if bandwidth:
        reading.ceilings["bandwidth"] = bandwidth / moved
        reading.notes.append(f"A token moves {moved / 1e9:.3f} GB (weights and KV): {show(moved * reading.value, 'B/s')}.")
    if not bench.layer_kernels:
        return
    count = bench.layer_kernels * layers
    reading.notes.append(
        f"By the code a layer takes {bench.layer_kernels} kernels, {layers} layers {count}; inputs, head and choosing a "
        "token come on top."
    )
    if kernel:
        reading.ceilings["kernels"] = 1.0 / (count * kernel)


def prefill(bench: Bench, shape: Shape) -> Reading:
    """Operations a second over one long prompt, computed in one step; from the step's start to the sampled token."""
    count, spec = bench.sizes.prefill_tokens, bench.shape(shape).spec
    loads = iter(even_load(1, count, 1, spec.vocab_size, seed) for seed in range(bench.sizes.repeats + 1))
    fields: dict[str, Any] = {"max_num_seqs": 1, "num_kv_blocks": -(-(count + 1) // 16), "max_model_len": count + 1}
    with bench.engine(shape, max_num_batched_tokens=count, **fields) as engine:
        steps = [run_load(engine, next(loads)).steps[0]]

        def one() -> float:
            steps.append(run_load(engine, next(loads)).steps[0])
            return steps[-1].flops / (steps[-1].end - steps[-1].start)

        reading = Reading(bench.repeat(one))
    last = steps[-1]
    reading.details = {"steps": breakdown([last]), "flops": last.flops, "bytes": last.bytes}
    tokens = count * reading.value / last.flops
    reading.notes = [
        f"{count:,} tokens in one step: {show(tokens, 'tokens/s')}.",
        f"{last.flops / 1e12:.4g} TFLOP are counted: 2 · parameters · tokens, and attention up to each token.",
    ]
    rate, bandwidth = bench.ceiling("matmul_rate"), bench.ceiling("copy_bandwidth")
    if rate and bandwidth:
        reading.ceilings = {"matmul": rate, "bandwidth": last.flops * bandwidth / last.bytes}
    return reading


def itl_slope(bench: Bench, shape: Shape) -> Reading:
    """Bytes a second that longer contexts add: slope of bytes over time, over decode steps at several contexts.

    Prompts grow by what the prefix cache does not hold yet, so the longest one is computed once, not the sum of all.
    """
    sizes, spec = bench.sizes, bench.shape(shape).spec
    whole = even_load(sizes.slope_batch, sizes.slope_contexts[-1], sizes.slope_tokens, spec.vocab_size)
    blocks = bench.pool_blocks(shape, whole.blocks(16) + 16 * sizes.slope_batch)
    fields: dict[str, Any] = {"max_num_seqs": sizes.slope_batch, "num_kv_blocks": blocks, "max_model_len": whole.longest}
    budget = max(sizes.prefill_tokens, sizes.slope_batch)
    points: list[dict[str, float]] = []
    with bench.engine(shape, enable_prefix_caching=True, max_num_batched_tokens=budget, **fields) as engine:
        for context in sizes.slope_contexts:
            cut = [prompt[:context] for prompt in whole.prompts]
            load = Load(cut, whole.output_tokens)
            run_load(engine, load)
            for repeat in range(sizes.repeats):
                steps = run_load(engine, load).steps
                seconds, moved = median_step(steps, sizes.slope_batch), mean_bytes(steps, sizes.slope_batch)
                points.append({"context": context, "repeat": repeat, "seconds": seconds, "bytes": moved})
    slopes = [
        slope([(p["seconds"], p["bytes"]) for p in points if p["repeat"] == repeat]) for repeat in range(sizes.repeats)
    ]
    reading = Reading(slopes, details={"points": points})
    correlation = statistics.correlation([p["seconds"] for p in points], [p["bytes"] for p in points])
    bandwidth = bench.ceiling("copy_bandwidth")
    if bandwidth:
        reading.ceilings["bandwidth"] = bandwidth
    medians = {
        context: statistics.median(p["seconds"] for p in points if p["context"] == context)
        for context in sizes.slope_contexts
    }
    reading.notes = [
        f"Batch {sizes.slope_batch}; ITL by context: "
        + ", ".join(f"{context:,} tokens {1000 * seconds:.2f} ms" for context, seconds in medians.items())
        + f"; correlation of bytes and time {correlation:.4f}."
    ]
    return reading


# ---------------------------------------------------------------------- a full batch


def throughput(bench: Bench, shape: Shape, driven: str) -> Reading:
    """Output tokens a second of nano-vllm's load, from the first request handed over to the last token.

    Raises:
        NotHere: the engine can't be driven that way.
    """
    sizes, spec = bench.sizes, bench.shape(shape).spec
    load = nano_vllm_load(sizes.load_requests, sizes.load_lengths, spec.vocab_size)
    with bench.engine(shape, **load_fields(bench, shape, load), **driving(bench, driven)) as engine:
        runs = [run_load(engine, load.cut(8), 0.6)]

        def one() -> float:
            runs.append(run_load(engine, load, 0.6))
            return load.total / runs[-1].seconds

        reading = Reading(bench.repeat(one, sizes.load_repeats))
        preempted = engine.stats().preemptions
    last = runs[-1]
    least = bench.least_seconds(last.steps)
    moved = sum(step.bytes for step in last.steps)
    if least:
        reading.ceilings["bandwidth and matmul"] = load.total / least
    reading.details = {"steps": breakdown(last.steps), "seconds": last.seconds, "bytes": moved, "preemptions": preempted}
    idle = idle_share(last.steps)
    reading.notes = [
        f"{len(load.prompts)} requests, temperature 0.6: {sum(map(len, load.prompts)):,} tokens in, {load.total:,} out.",
        f"{len(last.steps):,} steps, {preempted} preemptions; token ids only, no text is made.",
        "The ceiling is the sum of what each step's bytes and operations take at least.",
        f"{moved / 1e12:.2f} TB are to be moved: {moved / DATASHEET_BANDWIDTH:.2f} s at an H200's datasheet bandwidth.",
    ]
    if idle is not None:
        reading.notes.append(f"The GPU idled for {show(idle, 'share')} of the time.")
    before = bench.known.get("nano_vllm_sync")
    if driven != "synchronous" and before and before.reading:
        reading.notes.append(f"{show(reading.value / before.reading.value, 'times')} as fast as synchronous.")
    return reading


def load_fields(bench: Bench, shape: Shape, load: Load) -> dict[str, Any]:
    """Settings for nano-vllm's load: its seats and budget, and a pool that holds all of it where memory allows."""
    return {
        "max_num_seqs": len(load.prompts),
        "max_num_batched_tokens": max(bench.sizes.load_budget, len(load.prompts)),
        "max_model_len": max(load.longest, 16),
        "num_kv_blocks": bench.pool_blocks(shape, load.blocks(16) + len(load.prompts)),
    }


def driving(bench: Bench, label: str) -> dict[str, Any]:
    """The settings of that way of driving an engine.

    Raises:
        NotHere: this engine can't be driven that way.
    """
    found = dict(bench.variants())
    if label not in found:
        raise NotHere(f"this engine has no {label}")
    return found[label]


def idle(bench: Bench, shape: Shape) -> Reading:
    """Share of full-batch decode steps in which the GPU idles; the way of driving the engine that idles least.

    Raises:
        NotHere: the steps carry no GPU times.
    """
    sizes = bench.sizes
    load = full_load(sizes, bench.shape(shape).spec.vocab_size)
    readings = []
    for label, fields in bench.variants():
        with bench.engine(shape, **load_fields(bench, shape, load), **fields) as engine:
            runs = [run_load(engine, load, 0.6)]

            def one(engine: Engine = engine, runs: list[Run] = runs) -> float:
                runs.append(run_load(engine, load, 0.6))
                share = idle_share([step for step, _ in full_decodes(runs[-1].steps, sizes.full_batch)])
                if share is None:
                    raise NotHere("the steps carry no GPU times: there is no GPU, or the runner does not measure them")
                return share

            reading = Reading(bench.repeat(one))
        steps = full_decodes(runs[-1].steps, sizes.full_batch)
        reading.details = {"driven": label, "steps": breakdown([step for step, _ in steps])}
        reading.details["step_seconds"] = seconds = median_step(runs[-1].steps, sizes.full_batch)
        share = show(reading.value, "share")
        reading.notes = [f"{label}: idle for {share} of a step of {1000 * seconds:.2f} ms, {sizes.full_batch} requests."]
        readings.append(reading)
    return best_of(readings, min)


# ---------------------------------------------------------------------- inside a step


def kernels(bench: Bench, shape: Shape, load_of: Callable[[Sizes, int], Load], temperature: float = 0.0) -> Reading:
    """Kernels of a decode step, as torch's profiler sees them.

    Raises:
        NotHere: there is no GPU.
    """
    load = load_of(bench.sizes, bench.shape(shape).spec.vocab_size)
    with bench.engine(shape, **load_fields(bench, shape, load)) as engine:
        run_load(engine, load.cut(4), temperature)
        found = profile_decode(bench, engine, load, temperature)
    details = {"launches": found.launches, "copies": found.copies, "gpu_seconds": found.gpu_seconds, "top": found.top}
    return Reading([found.kernels], notes=[found.sentence()], details=details)


PROFILED = {"kernels_smollm2": "decode_smollm2", "kernels_256": "idle_256", "kernels_8b": "decode_8b"}
"""Measures that count kernels, and whose steps those are."""


def with_kernels(results: Sequence[Result]) -> None:
    """Write what the profiler counted, at the very end, beside the speeds that were measured before it ran."""
    found = {result.name: result.reading for result in results if result.reading is not None}
    ceilings = found.get("ceilings")
    shortest = ceilings.details.get("kernel_seconds") if ceilings else None
    for name, of in PROFILED.items():
        counted, row = found.get(name), found.get(of)
        if counted is None or row is None:
            continue
        rest = 1 - counted.details["gpu_seconds"] / row.details["step_seconds"]
        row.notes += counted.notes
        row.notes.append(f"By the profiler's own durations no kernel runs for {show(rest, 'share')} of a step.")
        if shortest and "bandwidth" in row.ceilings:
            row.ceilings["kernels"] = 1.0 / (counted.value * shortest)


# ---------------------------------------------------------------------- beside transformers


def against_generate_batch(bench: Bench, shape: Shape) -> Reading:
    """How many times as many output tokens a second as transformers' continuous batching, on the very same requests."""
    sizes, spec = bench.sizes, bench.shape(shape).spec
    load = nano_vllm_load(sizes.load_requests, sizes.load_lengths, spec.vocab_size)
    bench.forget()
    until = time.perf_counter() + 0.7 * bench.left() if bench.deadline != float("inf") else bench.deadline
    peer = gpu_peers.generate_batch(bench, shape, load, until)
    share = peer.load
    label, fields = bench.variants()[-1]
    with bench.engine(shape, **load_fields(bench, shape, share), **fields) as engine:
        run_load(engine, share.cut(8), 0.6)

        def one() -> float:
            return share.total / run_load(engine, share, 0.6).seconds / peer.tokens_per_second

        reading = Reading(bench.repeat(one))
    requests, longest = len(share.prompts), max(share.output_tokens)
    reading.details = {
        "peer": peer.details | {"tokens_per_second": peer.tokens_per_second, "requests": requests, "longest": longest}
    }
    part = "All" if requests == len(load.prompts) else f"The first {requests}"
    shortened = "" if share.total == load.first(requests).total else f", each with {longest} output tokens at most"
    ours = show(reading.value * peer.tokens_per_second, "tokens/s")
    reading.notes = [
        f"{part} of the {len(load.prompts)} requests on both sides{shortened}: {share.total:,} output tokens.",
        f"The engine, {label}: {ours}; generate_batch: {show(peer.tokens_per_second, 'tokens/s')}.",
        *peer.notes,
    ]
    return reading


def generate(bench: Bench, shape: Shape, beside: str) -> Reading:
    """Tokens a second of one sequence with transformers' ``generate``; the measure ``beside`` is ours."""
    bench.forget()
    reading = gpu_peers.generate(bench, shape)
    bandwidth = bench.ceiling("copy_bandwidth")
    if bandwidth:
        reading.ceilings["bandwidth"] = bandwidth / reading.details["bytes_a_token"]
    ours = bench.known.get(beside)
    if ours and ours.reading:
        ratio = ours.reading.value / reading.value
        reading.notes.append(f"The engine does {show(ours.reading.value, 'tokens/s')}: {show(ratio, 'times')}.")
    return reading


def _gain(name: str, seconds: float) -> Measure:
    return Measure(name, gpu_gains.TITLES[name], "times", partial(gpu_gains.measure, gain=gpu_gains.GAINS[name]), seconds)


# Comments give the seconds expected on an H200 that is near the goals. The shape: weights made, kernels checked (2) and
# compiled (6: 8 of attention at 0.4, a dozen small ones at 0.25). The engine: graphs and a first run, 1 at batch 1, 5 at 256
# rows (39 graphs of 300 kernels, asked for twice each).
MEASURES = (
    # 3 of measuring, 3 for the libraries' first use
    Measure("ceilings", "ceiling: copy bandwidth", "B/s", ceilings, 6),
    # 8 for the shape, 2 for more splits, 5 for the engine, 2 × 11 for the load
    Measure(
        "nano_vllm_sync", "nano-vllm's load, Qwen3-0.6B shape, synchronous", "tokens/s",
        partial(throughput, shape=QWEN3_0_6B, driven="synchronous"), 38, Goal(12_000),
    ),
    # 5 for the engine, 2 × 7 for the load
    Measure(
        "nano_vllm_async", "nano-vllm's load, Qwen3-0.6B shape, async_scheduling", "tokens/s",
        partial(throughput, shape=QWEN3_0_6B, driven="async_scheduling"), 20, Goal(20_000),
    ),
    # twice: 5 for the engine, 3 × 1.5 for 32,768 tokens in and 96 steps
    Measure(
        "idle_256", "GPU idle in a batch-256 decode step, Qwen3-0.6B shape", "share",
        partial(idle, shape=QWEN3_0_6B), 20, Goal(0.05, lower=True),
    ),
    # 4 runs of 65,536 tokens in and 32 steps: 2 × 1 for the engines, 4 × 1 with Triton, 4 × 1.5 without
    _gain("gain_attention_decode", 12),
    # 8 for the shape; twice: 1 for the engine, 4 × 200 steps of 4.7 ms
    Measure(
        "decode_8b", "batch-1 decode, Llama-3.1-8B shape", "tokens/s",
        partial(decode, shape=LLAMA_3_1_8B), 19, Goal(0.75, of="bandwidth", stretch=0.85),
    ),
    # 3 for more splits, 1 for the engine, 4 × 0.35
    Measure(
        "prefill_8b", "prefill of 8,192 tokens, Llama-3.1-8B shape", "FLOP/s",
        partial(prefill, shape=LLAMA_3_1_8B), 8, Goal(0.60, of="matmul"),
    ),
    # 6 for 98,304 tokens of prompts, 4 for 640 steps of 6 ms, 3 for the host's hashing and scheduling, 2 for the engine
    Measure(
        "itl_slope_8b", "decode ITL over context, Llama-3.1-8B shape", "B/s",
        partial(itl_slope, shape=LLAMA_3_1_8B), 17, Goal(0.80, of="bandwidth"),
    ),
    # 8 for the shape; twice: 1 for the engine, 4 × 200 steps of 0.9 ms
    Measure(
        "decode_1b", "batch-1 decode, Llama-3.2-1B shape", "tokens/s",
        partial(decode, shape=LLAMA_3_2_1B), 12, Goal(0.60, of="bandwidth"),
    ),
    # 2 for more splits; twice: 1 for the engine, 4 × 0.2
    _gain("gain_split", 6),
    # twice: 1 for the engine, 4 × 0.1; another number of splits
    _gain("gain_attention_prefill", 4),
    # 8 for the shape; twice: 1 for the engine, 4 × 200 steps of 0.8 ms
    Measure(
        "decode_smollm2", "batch-1 decode, SmolLM2-135M shape", "tokens/s",
        partial(decode, shape=SMOLLM2_135M), 12, Goal(1200, stretch=1500),
    ),
    # 2 × 1 for the engines, 4 × 200 steps of 0.8 ms, 4 × 200 of 5 ms
    _gain("gain_graphs", 7),
    # 2 × 1 for the engines, 4 × 200 steps of 0.8 ms and of 1.2 ms
    _gain("gain_fused", 4),
    # 8 for importing and making the peer, 25 for its probe and its share, 2 for the shape again, 5 for the engine, 3 × 1.5
    Measure(
        "generate_batch", "nano-vllm's load against transformers generate_batch, Qwen3-0.6B shape", "times",
        partial(against_generate_batch, shape=QWEN3_0_6B), 45, Goal(5.0),
    ),
    # 2 for the model, 200 tokens of 25 ms
    Measure(
        "generate_smollm2", "transformers generate, batch 1, SmolLM2-135M shape", "tokens/s",
        partial(generate, shape=SMOLLM2_135M, beside="decode_smollm2"), 7,
    ),
    # 2 for the model, 200 tokens of 15 ms
    Measure(
        "generate_1b", "transformers generate, batch 1, Llama-3.2-1B shape", "tokens/s",
        partial(generate, shape=LLAMA_3_2_1B, beside="decode_1b"), 6,
    ),
    # 5 for the model, 200 tokens of 27 ms
    Measure(
        "generate_8b", "transformers generate, batch 1, Llama-3.1-8B shape", "tokens/s",
        partial(generate, shape=LLAMA_3_1_8B, beside="decode_8b"), 11,
    ),
    # each: 2 for the shape again, an engine, 1 for the profiler; the first one 2 more, for the profiler's start
    Measure(
        "kernels_smollm2", "kernels of a batch-1 decode step, SmolLM2-135M shape", "kernels",
        partial(kernels, shape=SMOLLM2_135M, load_of=short_load), 6,
    ),
    Measure(
        "kernels_256", "kernels of a batch-256 decode step, Qwen3-0.6B shape", "kernels",
        partial(kernels, shape=QWEN3_0_6B, load_of=full_load, temperature=0.6), 9,
    ),
    Measure(
        "kernels_8b", "kernels of a batch-1 decode step, Llama-3.1-8B shape", "kernels",
        partial(kernels, shape=LLAMA_3_1_8B, load_of=short_load), 5,
    ),
)  # fmt: skip
"""In the order in which they run. A shape's measures follow each other, so that its weights are made, its kernels compiled
and checked once; transformers follows, which needs the memory; and the profiler comes last, since launches may take longer
once it ran. All of it fits into the time for everything, tests included (``gpu_check.SECONDS``).
"""
