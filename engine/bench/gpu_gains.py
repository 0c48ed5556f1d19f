"""What each optimisation gains on this GPU: the same work with it and without it, everything else being equal.

What it should gain, and where it should lose, stands in docs/cuda.md; a value below 1 is a loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from engine.bench.gpu_bench import Bench, median_step, run_load
from engine.bench.gpu_report import NotHere, Reading
from engine.bench.gpu_shapes import LLAMA_3_2_1B, QWEN3_0_6B, SMOLLM2_135M, Load, Shape, Sizes, even_load
from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import Backend, choose_backend

Switch = Callable[[Backend], tuple[Backend, Backend]]
"""From what is in use to the two sides: with the optimisation, without it."""


@dataclass(frozen=True)
class Gain:
    """An optimisation and the work to judge it by."""

    shape: Shape
    switch: Switch
    phase: Literal["prefill", "decode"]
    load: Callable[[Sizes, int], Load]
    """From the sizes and the vocabulary."""


def graphs(chosen: Backend) -> tuple[Backend, Backend]:
    """Decode steps as graphs; call by call."""
    if chosen.graphs is None:
        raise NotHere(f"CUDA graphs are not in use: {chosen.reason or 'there is no GPU'}")
    return chosen, replace(chosen, graphs=None)


def fused(chosen: Backend) -> tuple[Backend, Backend]:
    """Elementwise work in fused kernels; in torch's."""
    if not chosen.fused:
        raise NotHere(f"fused kernels are not in use: {chosen.reason or 'there is no GPU'}")
    return chosen, replace(chosen, fused=False)


def attention(chosen: Backend) -> tuple[Backend, Backend]:
    """Attention in one Triton kernel; in torch's SDPA over gathered blocks. Both call by call, without fused kernels."""
    plain = replace(_triton(chosen), fused=False, graphs=None)
    return plain, Backend(SdpaAttention, SdpaAttention.name)


def split(chosen: Backend) -> tuple[Backend, Backend]:
    """Keys of a sequence split over many processors; all read by one."""
    made = _triton(chosen).make_attention
    return chosen, replace(chosen, make_attention=partial(made, processors=1))


def _triton(chosen: Backend) -> Backend:
    if chosen.make_attention is SdpaAttention:
        raise NotHere(f"Triton attention is not in use: {chosen.reason or 'there is no GPU'}")
    return chosen


def measure(bench: Bench, gain: Gain) -> Reading:
    """How many times as fast it is with the optimisation as without.

    Raises:
        NotHere: it is not in use on this machine.
    """
    sides = gain.switch(choose_backend(bench.model(gain.shape)))
    load = gain.load(bench.sizes, bench.shape(gain.shape).spec.vocab_size)
    with_it, without_it = (_seconds(bench, gain, load, backend) for backend in sides)
    reading = Reading([slow / quick for quick, slow in zip(with_it[0], without_it[0], strict=False)])
    reading.notes = [
        f"{len(load.prompts)} × {len(load.prompts[0]):,} tokens, {gain.phase}.",
        f"With it {1000 * statistics.median(with_it[0]):.3f} ms a step ({with_it[1]}).",
        f"Without it {1000 * statistics.median(without_it[0]):.3f} ms ({without_it[1]}).",
    ]
    return reading


def _seconds(bench: Bench, gain: Gain, load: Load, backend: Backend) -> tuple[list[float], str]:
    """Seconds of a step in each repeat, and what computed."""
    rows = len(load.prompts)
    blocks = bench.pool_blocks(gain.shape, load.blocks(16) + rows)
    budget = sum(map(len, load.prompts))  # all prompts in one step, so that all decodes are of the same length
    with bench.engine(
        gain.shape,
        backend=backend,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=load.longest,
        num_kv_blocks=blocks,
    ) as engine:

        def one() -> float:
            steps = run_load(engine, load).steps
            return median_step(steps, rows) if gain.phase == "decode" else steps[0].end - steps[0].start

        one()
        return bench.repeat(one), bench.backend


def _short(sizes: Sizes, vocabulary: int) -> Load:
    return even_load(1, sizes.decode_prompt, sizes.decode_tokens, vocabulary)


def _batch(sizes: Sizes, vocabulary: int) -> Load:
    return even_load(sizes.gain_batch, sizes.gain_context, sizes.slope_tokens, vocabulary)


def _prompt(sizes: Sizes, vocabulary: int) -> Load:
    return even_load(1, sizes.prefill_tokens, 1, vocabulary)


def _long(sizes: Sizes, vocabulary: int) -> Load:
    return even_load(1, sizes.long_context, sizes.slope_tokens, vocabulary)


GAINS = {
    "gain_graphs": Gain(SMOLLM2_135M, graphs, "decode", _short),
    "gain_fused": Gain(SMOLLM2_135M, fused, "decode", _short),
    "gain_split": Gain(LLAMA_3_2_1B, split, "decode", _long),
    "gain_attention_prefill": Gain(LLAMA_3_2_1B, attention, "prefill", _prompt),
    "gain_attention_decode": Gain(QWEN3_0_6B, attention, "decode", _batch),
}
TITLES = {
    "gain_graphs": "gain: CUDA graphs, batch 1",
    "gain_fused": "gain: fused kernels inside graphs, batch 1",
    "gain_split": "gain: split KV, batch 1 over 4,000 tokens",
    "gain_attention_prefill": "gain: Triton attention, prefill of 8,192 tokens",
    "gain_attention_decode": "gain: Triton attention, batch 16 over 4,096 tokens",
}
