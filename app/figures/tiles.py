"""Latency, throughput and load as plain numbers with their names, units and one-line definitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from engine.core.outputs import EngineStats
from engine.core.trace import RequestTrace, StepTrace
from engine.observe.metrics import DEFINITIONS, PERCENTILE_METHOD, Window, latencies, latency_values, ratio, tokens_in

NEWEST = 200
"""Requests that the percentiles look at: the newest ones."""
SPARK = 32
"""Values of a sparkline."""
RATE_WINDOW = 5.0
"""Seconds of engine time over which the live throughput is taken."""
SHOWN = ("ttft", "itl", "tpot", "e2e")


def latency_rows(requests: Sequence[RequestTrace]) -> list[dict[str, Any]]:
    """TTFT, ITL, TPOT and E2E of the newest requests, milliseconds; None where undefined."""
    newest = list(requests)[-NEWEST:]
    summaries = latencies(newest)
    sparks = _sparks(newest)
    rows = []
    for name in SHOWN:
        summary, definition = summaries[name], DEFINITIONS[name]
        rows.append(
            {
                "name": name,
                "label": definition.label,
                "text": f"{definition.text} {definition.formula}. Percentiles by {PERCENTILE_METHOD}.",
                "p50": _ms(summary.p50),
                "p95": _ms(summary.p95),
                "p99": _ms(summary.p99),
                "count": summary.count,
                "few": summary.p99_flagged,
                "spark": sparks[name],
            }
        )
    return rows


def gauges(
    stats: EngineStats, requests: Sequence[RequestTrace], now: float, steps: Sequence[StepTrace]
) -> list[dict[str, Any]]:
    """Output tokens a second, running, waiting, KV use, hit rate, preemptions."""
    begin = max(0.0, now - RATE_WINDOW)
    _, generated = tokens_in(requests, Window(begin, now))
    rate = ratio(generated, now - begin) if generated and not any(s.slow for s in steps[-3:]) else None
    speed = DEFINITIONS["output_throughput"].text
    return [
        _gauge("output", "Output", rate, "tokens/s", f"{speed} Over the last {RATE_WINDOW:g} s."),
        _gauge("running", "Running", stats.running, "", "Requests in the running batch."),
        _gauge("waiting", "Waiting", stats.waiting, "", "Requests in the queue."),
        _gauge("kv", "KV use", 100 * stats.kv_usage, "%", "Share of the pool's blocks held by requests."),
        _gauge(
            "hits", "Hit rate", None if stats.hit_rate is None else 100 * stats.hit_rate, "%",
            "Prompt tokens taken from the prefix cache, of those looked up.",
        ),
        _gauge(
            "preemptions", "Preemptions", stats.preemptions, "",
            f"Times a request gave up its blocks. {stats.tokens_recomputed:,} tokens were computed again.",
        ),
    ]  # fmt: skip


def _gauge(name: str, label: str, value: float | None, unit: str, text: str) -> dict[str, Any]:
    return {"name": name, "label": label, "value": None if value is None else round(value, 1), "unit": unit, "text": text}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _sparks(requests: Sequence[RequestTrace]) -> dict[str, list[float]]:
    """The newest values of each latency, milliseconds, oldest first."""
    counted = [request for request in requests if not request.slow]
    gaps: list[tuple[float, float]] = []
    for request in counted[-16:]:
        times = request.token_times[-SPARK - 1 :]
        gaps += [(b, b - a) for a, b in pairwise(times)]
    found: dict[str, list[float]] = {"itl": [gap for _, gap in sorted(gaps)[-SPARK:]]}
    values = [latency_values(request) for request in counted[-SPARK:]]
    for name in ("ttft", "tpot", "e2e"):
        found[name] = [value for row in values if (value := row[name]) is not None]
    return {name: [round(v * 1000, 1) for v in series] for name, series in found.items()}
