"""Tables of the metrics page as plain rows: names with units, "n/a" where a number is not defined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.observe.metrics import DEFINITIONS, LATENCIES, RunMetrics, Summary
from engine.observe.other_tools import Stat, ToolReport

NA = "n/a"


def number(value: float | None, digits: int = 1, flag: bool = False) -> str:
    """A number with thousands separators, or n/a; ``flag`` marks one that rests on few samples."""
    return NA if value is None else f"{value:,.{digits}f}{'*' if flag else ''}"


def _ms(value: float | None, flag: bool = False) -> str:
    return number(None if value is None else value * 1000, 1, flag)


def latency_table(run: RunMetrics) -> list[dict[str, Any]]:
    """One row a latency: mean and percentiles in milliseconds (tokens/s for one user's speed), and samples."""
    return [_latency_row(name, run.latency[name]) for name in LATENCIES if name in run.latency]


def _latency_row(name: str, summary: Summary) -> dict[str, Any]:
    definition = DEFINITIONS[name]
    show = _ms if definition.unit == "s" else number
    values = {field: show(getattr(summary, field)) for field in ("mean", "p50", "p90", "p95")}
    return {
        "metric": definition.label,
        "unit": "ms" if definition.unit == "s" else definition.unit,
        **values,
        "p99": show(summary.p99, flag=summary.p99_flagged),
        "samples": summary.count,
        "meaning": definition.text,
    }


def throughput_rows(run: RunMetrics, refused: int = 0) -> list[dict[str, Any]]:
    """Rates, concurrency, goodput and what the device did."""
    good, device, counts = run.goodput, run.device, run.counts
    values: list[tuple[str, float | None, int]] = [
        ("offered_rate", run.offered_rate, 2),
        ("request_throughput", run.request_throughput, 2),
        ("input_throughput", run.input_throughput, 1),
        ("output_throughput", run.output_throughput, 1),
        ("total_throughput", run.total_throughput, 1),
        ("concurrency_mean", run.concurrency.mean, 2),
        ("concurrency_little", run.concurrency.little, 2),
        ("concurrency_peak", run.concurrency.peak, 0),
        ("goodput", good.rate if good else None, 2),
        ("attainment", good.attainment if good else None, 3),
        ("busy_share", device.busy_share, 3),
        *([("gpu_idle_share", device.gpu_idle_share, 3)] if device.gpu_idle_share is not None else []),
        ("gflops", device.gflops, 1),
        ("gbytes", device.gbytes, 2),
    ]
    rows = [
        {
            "metric": DEFINITIONS[name].label,
            "value": number(value, digits),
            "unit": DEFINITIONS[name].unit,
            "formula": DEFINITIONS[name].formula,
            "meaning": DEFINITIONS[name].text,
        }
        for name, value, digits in values
    ]
    ended = f"{counts.completed} completed, {counts.aborted} aborted, {counts.failed} failed, {counts.unfinished} unfinished"
    rows.append(
        {
            "metric": "Requests",
            "value": str(counts.arrived),
            "unit": "",
            "formula": ended + (f", {refused} refused" if refused else ""),
            "meaning": "Requests that were due in the window, and how they ended.",
        }
    )
    return rows


def tool_rows(reports: Sequence[ToolReport]) -> list[dict[str, Any]]:
    """One row a tool: its own TTFT, TPOT, ITL, E2E (mean and p99, ms) and rates."""
    return [
        {
            "tool": report.tool,
            "version": report.version,
            "TTFT mean, ms": _stat(report.ttft, "mean"),
            "TTFT p99, ms": _stat(report.ttft, "p99"),
            "TPOT mean, ms": _stat(report.tpot, "mean"),
            "“ITL” mean, ms": _stat(report.itl, "mean"),
            "“ITL” p99, ms": _stat(report.itl, "p99"),
            "“ITL” samples": NA if report.itl is None else number(report.itl.count, 0),
            "E2E mean, ms": _stat(report.e2e, "mean"),
            "requests/s": number(report.request_throughput, 2),
            "output tokens/s": number(report.output_throughput, 1),
            "goodput, requests/s": number(report.goodput, 2),
        }
        for report in reports
    ]


def _stat(stat: Stat | None, field: str) -> str:
    return NA if stat is None else _ms(getattr(stat, field))


def definition_rows() -> list[dict[str, Any]]:
    """Every number on the screens: unit, formula and one line."""
    return [
        {"metric": d.label, "unit": d.unit or "–", "formula": d.formula, "meaning": d.text} for d in DEFINITIONS.values()
    ]
