"""Latency, throughput and load as plain numbers with their names, units and one-line definitions.

The words and quantiles are those of the dashboard that vLLM ships: TTFT, ITL and E2E at p50, p90, p95, p99 and their mean,
prompt and generation throughput apart, the scheduler's state (running, waiting), KV cache usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from app.figures.template import many
from engine.core.outputs import EngineStats
from engine.core.trace import DeviceSample, RequestTrace, StepTrace
from engine.observe.metrics import DEFINITIONS, PERCENTILE_METHOD, latencies, latency_values, ratio

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
                **{field: _ms(getattr(summary, field)) for field in ("mean", "p50", "p90", "p95", "p99")},
                "count": summary.count,
                "few": summary.p99_flagged,
                "spark": sparks[name],
            }
        )
    return rows


def gauges(stats: EngineStats, now: float, steps: Sequence[StepTrace]) -> list[dict[str, Any]]:
    """Prompt and generation throughput, running, waiting, KV cache usage, hit rate, preemptions, step time.

    Where the GPU timed the chosen step, also what its host asked, what it worked, and what it idled.
    """
    prompt, generated, seconds = throughput(steps, now)
    over = f"Over the last {seconds:,.1f} s of engine time."
    return [
        _gauge("prompt", "Prompt", prompt, "tokens/s", f"Prompt tokens computed a second, cached ones left out. {over}"),
        _gauge("generation", "Generation", generated, "tokens/s", f"Output tokens sampled a second. {over}"),
        _gauge("step", "Step time", *_step_time(steps)),
        _gauge("running", "Running", stats.running, "", "Scheduler state: requests in the running batch."),
        _gauge("waiting", "Waiting", stats.waiting, "", "Scheduler state: requests in the queue."),
        _gauge("kv", "KV cache usage", 100 * stats.kv_usage, "%", "Share of the pool's blocks held by requests."),
        _gauge(
            "hits", "Prefix hit rate", None if stats.hit_rate is None else 100 * stats.hit_rate, "%",
            "Prompt tokens taken from the prefix cache, of those looked up.",
        ),
        _gauge(
            "preemptions", "Preemptions", stats.preemptions, "",
            f"Times a request gave up its blocks. Computed again: {many(stats.tokens_recomputed, 'token')}.",
        ),
        _gauge(
            "finished", "Finished", stats.finished, "",
            f"Ended by themselves or at their limit; {stats.aborted} more were stopped, {stats.failed} failed."
            + (f" In vain, an end being unknown yet: {many(stats.tokens_wasted, 'token')}." if stats.tokens_wasted else ""),
        ),
        *_gpu_times(steps),
    ]  # fmt: skip


def _computed(steps: Sequence[StepTrace]) -> StepTrace | None:
    """The newest step that computed something."""
    return next((step for step in reversed(steps) if step.scheduled), None)


def _gpu_times(steps: Sequence[StepTrace]) -> list[dict[str, Any]]:
    """Launch, GPU and idle time of the newest step that computed something, and what the GPU last said of itself."""
    step = _computed(steps)
    if step is None or step.gpu_time <= 0:
        return []
    found = []
    for name in ("launch_time", "gpu_time", "gpu_idle_time"):
        definition = DEFINITIONS[name]
        text = f"Step {step.index}. {definition.text}"
        found.append(_gauge(name, definition.label, 1000 * getattr(step, name), "ms", text))
    said = next((one for one in reversed(steps) if one.device is not None), None)
    if said is not None and said.device is not None:
        found[1]["text"] += f" At step {said.index} the GPU said of itself: {gpu_words(said.device)}."
    return found


def gpu_words(sample: DeviceSample) -> str:
    """What a GPU said of itself, with units: '43 % busy, 12.4 of 139.8 GiB, 310 W'; what it did not say is left out."""
    words = [f"{100 * sample.utilisation:.0f} % busy"] if sample.utilisation is not None else []
    if sample.memory_used is not None:
        whole = f" of {sample.memory_total / 2**30:,.1f}" if sample.memory_total else ""
        words.append(f"{sample.memory_used / 2**30:,.1f}{whole} GiB")
    if sample.power is not None:
        words.append(f"{sample.power:.0f} W")
    return ", ".join(words)


def _step_time(steps: Sequence[StepTrace]) -> tuple[float | None, str, str]:
    """(milliseconds, unit, where they went) of the newest step that computed something."""
    step = _computed(steps)
    if step is None:
        return None, "ms", "How long the chosen step took."
    parts = [("schedule", step.schedule_time), ("prepare", step.prepare_time), ("forward", step.forward_time)]
    parts += [("sample", step.sample_time), ("postprocess", step.postprocess_time)]
    split = ", ".join(f"{name} {1000 * seconds:,.1f}" for name, seconds in parts)
    ahead = " It was scheduled while the step before was computed; counted from that one's end." if step.overlap else ""
    return 1000 * step.duration, "ms", f"Step {step.index}, start to end: {split} ms.{ahead}"


def throughput(steps: Sequence[StepTrace], now: float) -> tuple[float | None, float | None, float]:
    """(prompt tokens computed a second, output tokens sampled a second, seconds looked at) up to ``now``.

    Counted from ``steps``, the newest ones, oldest first: the last ``RATE_WINDOW`` seconds, or less where they reach less
    far back. Undefined (None) while nothing ran, and while the newest steps are single steps or slow motion.
    """
    begin = max(0.0, now - RATE_WINDOW)
    if steps and steps[0].index > 0:
        begin = max(begin, min(steps[0].start, now))
    inside = [step for step in steps if begin < step.end <= now]
    if not inside or any(step.slow for step in steps[-3:]):
        return None, None, now - begin
    rows = [row for step in inside for row in step.scheduled]
    prompt = sum(row.num_tokens - min(row.recomputed, row.num_tokens) for row in rows if row.kind == "prefill")
    generated = sum(row.sampled >= 0 for row in rows)
    return ratio(prompt, now - begin), ratio(generated, now - begin), now - begin


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
