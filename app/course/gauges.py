"""What the reader's own lab shows right now for each subject of the course map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.model_info import ModelInfo
from engine.core.outputs import EngineStats
from engine.observe.log import TraceLog
from engine.observe.metrics import Summary, latencies, measure, whole_run

RECENT = 400
"""Newest steps that a figure looks at."""


class Reading:
    """The lab's records, looked at once for all figures.

    Args:
        log: the lab's mirror.
        model: what is loaded, or None.
        config: the lab's settings.
    """

    def __init__(self, log: TraceLog, model: ModelInfo | None, config: Any) -> None:
        self.stats: EngineStats = log.stats
        self.model, self.config = model, config
        self.traces = log.traces()
        self.steps = log.steps(max(0, log.next_index - RECENT))
        self._latencies: dict[str, Summary] | None = None
        self._log = log

    def latency(self, name: str, samples: str = "request") -> str:
        """Median of a latency in milliseconds, and how many samples of which kind it rests on."""
        if self._latencies is None:
            self._latencies = dict(latencies(self.traces))
        found = self._latencies[name]
        return f"median {1000 * found.p50:,.0f} ms, {_many(found.count, samples)}" if found.p50 is not None else ""

    def rows(self, kind: str) -> int:
        """Tokens of that kind in the newest steps."""
        return sum(row.num_tokens for step in self.steps for row in step.scheduled if row.kind == kind)

    def throughput(self) -> str:
        """Output tokens a second over the whole run of the lab."""
        if not self.traces:
            return ""
        found = measure(self.traces, self.steps, window=whole_run(self.traces)).output_throughput
        return f"{found:,.0f} output tokens/s" if found else ""


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _tokens(reading: Reading, kind: str) -> str:
    count = reading.rows(kind)
    return f"{_many(count, 'token')} in the newest {_many(len(reading.steps), 'step')}" if count else ""


def _weights(reading: Reading) -> str:
    model = reading.model
    return f"{model.weight_bytes / 2**20:,.0f} MiB for {model.title}" if model and model.weight_bytes else ""


def _kv(reading: Reading) -> str:
    model, stats = reading.model, reading.stats
    if not model:
        return ""
    held = f"{stats.blocks_referenced} of {reading.config.num_kv_blocks} blocks held"
    return f"{model.kv_bytes_per_token:,} bytes a token; {held}"


def _blocks(reading: Reading) -> str:
    stats = reading.stats
    if not stats.blocks_total:
        return ""
    shares = f"{stats.blocks_referenced} held, {stats.blocks_cached} cached, {stats.blocks_free} free"
    return f"{shares} of {stats.blocks_total} blocks"


def _batching(reading: Reading) -> str:
    worked = [step for step in reading.steps if step.scheduled]
    if not worked:
        return ""
    return f"{sum(len(step.scheduled) for step in worked) / len(worked):.1f} requests a step on average"


def _chunks(reading: Reading) -> str:
    on = "on" if reading.config.chunked_prefill else "off"
    return f"{on}, budget {reading.config.token_budget:,} tokens a step"


FIGURES: dict[str, Callable[[Reading], str]] = {
    "prefill": lambda reading: _tokens(reading, "prefill"),
    "decode": lambda reading: _tokens(reading, "decode"),
    "kv": _kv,
    "batching": _batching,
    "running": lambda reading: (
        f"{reading.stats.running} running, {reading.stats.waiting} waiting, "
        f"{_many(reading.config.max_num_seqs, 'seat')} ({reading.config.batching})"
    ),
    "chunks": _chunks,
    "weights": _weights,
    "blocks": _blocks,
    "ttft": lambda reading: reading.latency("ttft"),
    "tpot": lambda reading: reading.latency("itl", "gap"),
    "latency": lambda reading: reading.latency("e2e"),
    "throughput": lambda reading: reading.throughput(),
}
"""Figure name in ``lessons/course.yaml`` → words; '' while the lab has nothing to show."""
