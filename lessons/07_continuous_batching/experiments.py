"""Continuous batching: the textbook's schedule, made by the engine, and the same requests in static batches."""

from __future__ import annotations

from typing import Any

from engine.core.trace import letter
from lessons.runs import Experiment, RunRecord, Value

SEATS = 3
OUTPUT = {"A": 4, "B": 2, "C": 5, "D": 2}
"""Output tokens of each request."""
D_ARRIVES = 3
"""Steps taken before D arrives: it is due just before the fourth."""
PROMPT = 8


def _config(**changes: Any) -> dict[str, Any]:
    base = {
        "max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": SEATS, "block_size": 16, "num_kv_blocks": 32,
        "enable_prefix_caching": False,
    }  # fmt: skip
    return {**base, **changes}


def _requests(d_arrives: int) -> dict[str, Any]:
    return {
        "arrivals": {"unit": "steps"},
        "requests": [
            {"id": name, "at": d_arrives if name == "D" else 0, "prompt_tokens": PROMPT, "output_tokens": tokens}
            for name, tokens in OUTPUT.items()
        ],
    }


def late() -> Experiment:
    """A, B and C at once; D before the fourth step."""
    return Experiment(config=_config(), workload=_requests(D_ARRIVES))


def queued() -> Experiment:
    """The same four requests, D waiting from the start."""
    return Experiment(config=_config(), workload=_requests(0))


def static() -> Experiment:
    """The requests of ``late`` in static batches."""
    return Experiment(config=_config(batching="static"), workload=_requests(D_ARRIVES))


LENGTHS = (3, 18, 6, 12, 4, 15, 8, 10)
"""Output tokens of the free run's eight requests."""


def free(batching: str = "continuous", max_num_seqs: int = 3, requests: int = 8) -> Experiment:
    """Up to eight requests of very different lengths."""
    listed = [{"prompt_tokens": PROMPT, "output_tokens": LENGTHS[index]} for index in range(requests)]
    return Experiment(
        config=_config(batching=batching, max_num_seqs=max_num_seqs),
        workload={"arrivals": {"unit": "steps"}, "requests": listed},
    )


EXPERIMENTS = {"late": late, "queued": queued, "static": static, "free": free}


def _first_step(run: RunRecord, name: str) -> int:
    return run.rows(name)[0][0].index


def _last_step(run: RunRecord, name: str) -> int:
    return run.rows(name)[-1][0].index


def _steps(run: RunRecord) -> int:
    return len(run.work)


def _padding(run: RunRecord) -> int:
    """Row-steps that computed padding."""
    return sum(row.kind == "padding" for step in run.work for row in step.scheduled)


def _useful(run: RunRecord) -> int:
    """Row-steps that produced something."""
    return sum(row.kind != "padding" for step in run.work for row in step.scheduled)


def _seat_steps(run: RunRecord) -> int:
    return _steps(run) * run.config.max_num_seqs


def _wait(run: RunRecord, name: str) -> int:
    """Steps that a request spends in the queue."""
    wanted = run.request(name).trace.request_id
    arrives = next(step.index for step in run.steps if any(e.op == "queue" and e.request_id == wanted for e in step.events))
    return _first_step(run, name) - arrives


def rows_of(run: RunRecord, step: int) -> str:
    """Who works in a step: letters in the order in which they were admitted."""
    found = next(s for s in run.work if s.index == step)
    numbers = run.numbers
    return " ".join(letter(numbers[row.request_id]) for row in found.scheduled if row.kind != "padding")


def _mean_wait(run: RunRecord) -> float:
    return sum(_wait(run, request.name) for request in run.requests) / len(run.requests)


VALUES: dict[str, Value] = {
    "d_joins_late": lambda runs: _first_step(runs["late"], "D"),
    "d_joins_queued": lambda runs: _first_step(runs["queued"], "D"),
    "d_joins_static": lambda runs: _first_step(runs["static"], "D"),
    "d_waits_queued": lambda runs: _wait(runs["queued"], "D"),
    "d_waits_static": lambda runs: _wait(runs["static"], "D"),
    "d_ends_late": lambda runs: _last_step(runs["late"], "D"),
    "d_ends_static": lambda runs: _last_step(runs["static"], "D"),
    "c_ends_queued": lambda runs: _last_step(runs["queued"], "C"),
    "b_ends": lambda runs: _last_step(runs["late"], "B"),
    "steps_late": lambda runs: _steps(runs["late"]),
    "steps_queued": lambda runs: _steps(runs["queued"]),
    "steps_static": lambda runs: _steps(runs["static"]),
    "padding_static": lambda runs: _padding(runs["static"]),
    "useful_static": lambda runs: _useful(runs["static"]),
    "seat_steps_late": lambda runs: _seat_steps(runs["late"]),
    "seat_steps_static": lambda runs: _seat_steps(runs["static"]),
    "idle_late": lambda runs: _seat_steps(runs["late"]) - _useful(runs["late"]),
    "wasted_static": lambda runs: _seat_steps(runs["static"]) - _useful(runs["static"]),
    "who_third": lambda runs: "gap" if rows_of(runs["late"], 2) == "A C" else "full",
    "free_steps": lambda runs: _steps(runs["free"]),
    "free_padding": lambda runs: _padding(runs["free"]),
    "free_used": lambda runs: 100 * _useful(runs["free"]) / _seat_steps(runs["free"]),
    "free_wait": lambda runs: _mean_wait(runs["free"]),
}
"""What the runs of this lesson measure."""
