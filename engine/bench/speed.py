"""Speed of the engine on this machine, each figure beside its ceiling: ``python -m engine.bench.speed``.

The work is fixed (random token ids, greedy, end-of-sequence ignored), so two runs can be compared. Operations and bytes are
counted from shapes by the runner; ceilings are measured on the spot. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engine.core.trace import StepTrace

if TYPE_CHECKING:
    from engine.bench.ceilings import Ceilings
    from engine.llm import LLM


@dataclass(frozen=True)
class Case:
    """``sequences`` prompts of ``prompt_tokens`` each, ``output_tokens`` generated for each."""

    name: str
    sequences: int
    prompt_tokens: int
    output_tokens: int
    phase: str
    """Whose steps are counted: 'prefill' (those that compute prompts) or 'decode' (those that compute none)."""


CASES = (
    Case("prefill, 512 tokens", 1, 512, 1, "prefill"),
    Case("decode, 1 sequence", 1, 32, 64, "decode"),
    Case("decode, 16 sequences", 16, 32, 64, "decode"),
)


@dataclass(frozen=True)
class Speed:
    """What a case reached."""

    name: str
    steps: int
    tokens: int
    """Positions computed in the counted steps; in a decode step, one a sequence."""
    tokens_per_second: float
    step_ms: float
    """Mean duration of a step, schedule to sampled tokens."""
    bandwidth: float
    """Bytes that the forward pass must move at least, per second of forward time."""
    rate: float
    """Operations per second of forward time."""
    bound: str
    """Which ceiling the step would meet first: 'bandwidth' or 'arithmetic'."""
    share: float
    """Of that ceiling, 0 to 1."""


def summarise(name: str, steps: Sequence[StepTrace], bandwidth: float, matmul_rate: float) -> Speed:
    """Speeds of ``steps`` against ceilings in bytes/s and FLOP/s.

    Raises:
        ValueError: when there is no step to count.
    """
    if not steps:
        raise ValueError(f"{name}: no step to count")
    tokens = sum(step.num_tokens for step in steps)
    seconds = sum(step.duration for step in steps)
    forward = sum(step.forward_time for step in steps)
    moved, operations = sum(step.bytes for step in steps), sum(step.flops for step in steps)
    # The time each ceiling alone would allow; the longer one binds.
    by_bandwidth, by_arithmetic = moved / bandwidth, operations / matmul_rate
    return Speed(
        name=name,
        steps=len(steps),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        step_ms=1000 * seconds / len(steps),
        bandwidth=moved / forward if forward else 0.0,
        rate=operations / forward if forward else 0.0,
        bound="bandwidth" if by_bandwidth >= by_arithmetic else "arithmetic",
        share=max(by_bandwidth, by_arithmetic) / forward if forward else 0.0,
    )


def counted(case: Case, steps: Iterable[StepTrace]) -> list[StepTrace]:
    """The steps of the case's phase."""
    busy = [step for step in steps if step.scheduled]
    wants_prompts = case.phase == "prefill"
    return [step for step in busy if any(row.kind == "prefill" for row in step.scheduled) == wants_prompts]


def run_case(llm: LLM, case: Case, vocab_size: int, seed: int = 0) -> list[StepTrace]:
    """Run a case to its end; returns its steps."""
    from engine import SamplingParams

    ids = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=case.output_tokens, ignore_eos=True)
    for _ in range(case.sequences):
        llm.add_request([ids.randrange(3, vocab_size) for _ in range(case.prompt_tokens)], params)
    steps = []
    while llm.has_unfinished():
        steps.append(llm.step())
    return steps


def measure(llm: LLM, ceilings: Ceilings, vocab_size: int, repeats: int = 2) -> list[Speed]:
    """Run every case: once to warm up, then ``repeats`` times; the fastest repeat counts, as for the ceilings."""
    speeds = []
    for case in CASES:
        run_case(llm, case, vocab_size)
        tries = [
            summarise(
                case.name,
                counted(case, run_case(llm, case, vocab_size, seed)),
                ceilings.copy_bandwidth,
                ceilings.matmul_rate,
            )
            for seed in range(1, repeats + 1)
        ]
        speeds.append(max(tries, key=lambda speed: speed.tokens_per_second))
    return speeds


def table(speeds: Sequence[Speed], ceilings: Ceilings) -> str:
    """A Markdown table of speeds beside their ceilings."""
    lines = [
        f"Ceilings measured on {ceilings.device}, {ceilings.dtype}: copy {ceilings.copy_bandwidth / 1e9:.1f} GB/s, "
        f"matmul {ceilings.matmul_rate / 1e9:.0f} GFLOP/s" + (f", {ceilings.threads} threads." if ceilings.threads else "."),
        "",
        "| case | tokens/s | step, ms | GB/s | GFLOP/s | bound by | share of that ceiling |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    lines += [
        f"| {s.name} | {s.tokens_per_second:.1f} | {s.step_ms:.1f} | {s.bandwidth / 1e9:.1f} | {s.rate / 1e9:.0f} | "
        f"{s.bound} | {100 * s.share:.0f} % |"
        for s in speeds
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.speed", description="Speed beside its measured ceilings.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    arguments = parser.parse_args(argv)
    from engine.serve.client import host_environment

    os.environ.update(host_environment(dict(os.environ), arguments.threads))
    try:
        document = benchmark(arguments.model, arguments.device, arguments.dtype)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(document))
    return 0


def benchmark(model: str, device: str, dtype: str) -> dict[str, object]:
    """Measure one model on one device, print the table, and return everything as plain data."""
    import torch

    from engine import LLM
    from engine.bench.ceilings import measure_ceilings

    llm = LLM(model, device=device, dtype=dtype, enable_prefix_caching=False, max_num_seqs=16, max_model_len=1024)
    info = llm.model.info
    ceilings = measure_ceilings(torch.device(info.device.split()[0]), getattr(torch, info.dtype), seconds=2.0)
    speeds = measure(llm, ceilings, info.vocab_size)
    print(
        f"{info.title} ({info.weights}) on {info.device}, {info.dtype}, "
        f"attention: {info.attention}, waiting: {info.omp_wait}\n"
    )
    print(table(speeds, ceilings), flush=True)
    return {
        "model": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "threads": info.threads,
        "omp_wait": info.omp_wait,
        "versions": dict(info.versions),
        "ceilings": asdict(ceilings),
        "speeds": [asdict(speed) for speed in speeds],
    }


if __name__ == "__main__":
    raise SystemExit(main())
