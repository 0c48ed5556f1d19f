"""How other tools of the field would report the same run.

Benchmarks use the same words for different numbers. Each function here computes, from one neutral record of what a streaming
client saw, what one tool would print; the rules were read from the tools' own code (versions in the reports) and are tested
against values that this code produced. Where a tool samples, rounds on the screen or estimates quantiles from a sketch, the
exact value is given here.

::

    request_records(traces, delivery)  →  StreamRecord  →  vllm_bench_serve, sglang_native, …  →  ToolReport
    server_records(traces)             →  StreamRecord  →  vllm_prometheus                     →  histograms

Times are seconds on one clock, durations seconds, rates a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from engine.core.trace import RequestTrace, StepTrace
from engine.observe.metrics import Objectives, outcome, ratio


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a streaming client saw of one request."""

    request_id: str
    prompt_tokens: int
    sent: float
    chunks: tuple[tuple[float, int], ...]
    """(arrival, tokens in it) of each message; 0 tokens: a message without text, such as an empty role message."""
    done: float
    """End of the stream."""
    success: bool = True
    queued: float | None = None
    """Seen only by the server: when it entered the queue."""
    scheduled: float | None = None
    """Seen only by the server: when a step first computed it."""
    preemptions: int = 0
    """Seen only by the server."""

    @cached_property
    def content(self) -> tuple[tuple[float, int], ...]:
        """The messages that carry tokens."""
        return tuple(chunk for chunk in self.chunks if chunk[1] > 0)

    @cached_property
    def output_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(tokens for _, tokens in self.chunks)


class Delivery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stated model of what lies between the engine and a client; nothing of it is measured.

    The first token goes out at once, later ones ``stream_interval`` to a message, the rest with the end, as vLLM's option of
    that name does it. Every message takes ``delay`` seconds, the end of the stream ``close_delay`` more.
    """

    stream_interval: int = 1
    delay: float = 0.0
    close_delay: float = 0.0
    role_message: float | None = None
    """Seconds after sending at which a chat server's empty role message arrives; None: there is none."""

    def __post_init__(self) -> None:
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval={self.stream_interval} must be at least 1 token a message")
        for name in ("delay", "close_delay", "role_message"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be a number of seconds of at least 0")


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """One distribution as a tool reports it. ``count``: samples, or the sum of weights where the tool weights them."""

    count: float = 0
    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class ToolReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one tool would print for a run. None: the tool has no number of that name, or it is undefined for this run."""

    tool: str
    version: str
    duration: float | None
    """The window its rates divide by."""
    completed: int
    request_throughput: float | None
    output_throughput: float | None
    ttft: Stat
    e2e: Stat
    tpot: Stat | None = None
    itl: Stat | None = None
    input_throughput: float | None = None
    total_throughput: float | None = None
    peak_output_throughput: float | None = None
    peak_concurrency: int | None = None
    concurrency: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    determined: int | None = None
    """Requests for which it can tell whether the objectives were met, where the tool leaves some out."""
    more: dict[str, Stat] = {}
    """Distributions of its own names."""
    notes: tuple[str, ...] = ()
    """How its definitions differ from ours, a sentence each."""


# Records ------------------------------------------------------------------------------------------------------------------


def request_records(
    traces: Iterable[RequestTrace],
    delivery: Delivery | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> list[StreamRecord]:
    """What a client would have seen of the ended requests, under a stated delivery model.

    Args:
        traces: requests; those still running are left out, aborted and failed ones become unsuccessful records.
        delivery: the model of delivery; None: a message a token, no delay.
        texts: per request id, the text that became certain with each token. A token without text (half a character) makes a
            message without text, and its token arrives with the next text.
    """
    delivery = delivery or Delivery()
    records = []
    for trace in traces:
        end = outcome(trace)
        if end in ("unfinished", "refused") or trace.arrival < 0:
            continue
        shown = (texts or {}).get(trace.request_id)
        chunks = _messages(trace, delivery, shown)
        done = max(trace.finished + delivery.delay, chunks[-1][0] if chunks else trace.arrival) + delivery.close_delay
        records.append(
            StreamRecord(
                request_id=trace.request_id,
                prompt_tokens=trace.prompt_tokens,
                sent=trace.arrival,
                chunks=chunks,
                done=done,
                success=end == "completed",
            )
        )
    return records


def _messages(trace: RequestTrace, delivery: Delivery, texts: Sequence[str] | None) -> tuple[tuple[float, int], ...]:
    times = trace.token_times
    chunks: list[tuple[float, int]] = []
    if delivery.role_message is not None:
        chunks.append((trace.arrival + delivery.role_message, 0))
    begin = held = 0
    while begin < len(times):
        end = min(begin + (1 if begin == 0 else delivery.stream_interval), len(times))
        held += end - begin
        visible = texts is None or any(texts[begin:end]) or end == len(times)
        chunks.append((times[end - 1] + delivery.delay, held if visible else 0))
        held = 0 if visible else held
        begin = end
    return tuple(sorted(chunks, key=lambda chunk: chunk[0]))


def server_records(traces: Iterable[RequestTrace]) -> list[StreamRecord]:
    """The same requests as the server sees them: one output a step, no delivery, queueing and scheduling known."""
    kept = [t for t in traces if outcome(t) not in ("unfinished", "refused") and t.arrival >= 0]
    return [
        msgspec.structs.replace(
            record,
            queued=trace.queued if trace.queued >= 0 else None,
            scheduled=trace.first_scheduled if trace.first_scheduled >= 0 else None,
            preemptions=trace.preemptions,
        )
        for trace, record in zip(kept, request_records(kept), strict=True)
    ]


def run_span(records: Sequence[StreamRecord]) -> tuple[float, float]:
    """First send to last end of stream: the window of a benchmark without overheads. (0, 0) without records."""
    if not records:
        return 0.0, 0.0
    return min(r.sent for r in records), max(r.done for r in records)


# The tools ----------------------------------------------------------------------------------------------------------------

Span = tuple[float, float]
NO_OBJECTIVES = Objectives()


def vllm_bench_serve(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> ToolReport:
    """``vllm bench serve`` 0.32: any message counts as a token, even an empty one; E2E ends with the last message."""
    begin, end = span or run_span(records)
    ok = [r for r in records if r.success and r.chunks]
    ttft = [r.chunks[0][0] - r.sent for r in ok]
    e2e = [r.chunks[-1][0] - r.sent for r in ok]
    tpot = _per_token(e2e, ttft, ok)
    duration, output = end - begin, sum(r.output_tokens for r in ok)
    prompt = sum(r.prompt_tokens for r in ok)
    good = _count_good(objectives, ttft, [t or 0.0 for t in tpot], e2e)
    return ToolReport(
        tool="vLLM bench serve",
        version="0.32.0",
        duration=duration,
        completed=len(ok),
        request_throughput=ratio(len(ok), duration),
        output_throughput=ratio(output, duration),
        total_throughput=ratio(prompt + output, duration),
        ttft=linear(ttft),
        tpot=linear(tpot),
        itl=linear(gap for r in ok for gap in _gaps(r.chunks)),
        e2e=linear(e2e),
        peak_output_throughput=_peak_second(ok, [(moment, 1) for r in ok for moment, _ in r.chunks]),
        peak_concurrency=_peak_concurrency(ok),
        goodput=ratio(good, duration),
        notes=(
            "A message without text counts as first token.",
            "ITL is the gap between messages, however many tokens one carries.",
            "Peak counts messages in the fullest whole second.",
            "A one-token answer has a TPOT of 0 for goodput.",
        ),
    )


def sglang_native(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> ToolReport:
    """SGLang ``benchmark.serving`` 0.5.23 against its own ``/generate``: a message's gap is shared among its tokens."""
    return _sglang(records, span, objectives, native=True)


def sglang_openai(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> ToolReport:
    """SGLang ``benchmark.serving`` 0.5.23 against an OpenAI endpoint: a gap a message."""
    return _sglang(records, span, objectives, native=False)


def _sglang(records: Sequence[StreamRecord], span: Span | None, objectives: Objectives, *, native: bool) -> ToolReport:
    begin, end = span or run_span(records)
    ok = [r for r in records if r.success and r.content]
    ttft = [r.content[0][0] - r.sent for r in ok]
    e2e = [r.done - r.sent for r in ok]
    tpot = _per_token(e2e, ttft, ok)
    duration, output = end - begin, sum(r.output_tokens for r in ok)
    prompt = sum(r.prompt_tokens for r in ok)
    good = _count_good(objectives, ttft, [t or 0.0 for t in tpot], e2e)
    if native:
        itl = [g / n for r in ok for g, (_, n) in zip(_gaps(r.content), r.content[1:], strict=True) for _ in range(n)]
    else:
        itl = [gap for r in ok for gap in _gaps(r.content)]
    return ToolReport(
        tool="SGLang native" if native else "SGLang OpenAI",
        version="0.5.23",
        duration=duration,
        completed=len(ok),
        request_throughput=ratio(len(ok), duration),
        input_throughput=ratio(prompt, duration),
        output_throughput=ratio(output, duration),
        total_throughput=ratio(prompt + output, duration),
        ttft=linear(ttft),
        tpot=linear(tpot),
        itl=linear(itl),
        e2e=linear(e2e),
        peak_output_throughput=_peak_second(ok, [(m, n if native else 1) for r in ok for m, n in r.content]),
        peak_concurrency=_peak_concurrency(ok, to_end=True),
        concurrency=ratio(sum(e2e), duration),
        goodput=ratio(good, duration),
        attainment=ratio(good, len(records)),
        notes=(
            "E2E and TPOT reach to the end of the stream, past the last token.",
            "ITL shares a message's gap among its tokens." if native else "ITL is the gap between messages.",
            "Failed requests count against attainment.",
        ),
    )


def genai_perf(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> ToolReport:
    """GenAI-Perf 0.0.16: "inter token latency" is one value a request (a TPOT); the window ends with the last token.

    Its goodput pairs the lists of TTFT and ITL by position, so a request without ITL shifts the ones after it; kept here.
    """
    return _nvidia(records, objectives, aiperf=False)


def aiperf(records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES) -> ToolReport:
    """AIPerf 0.13: as GenAI-Perf, with gaps between messages apart; a request that lacks a metric is not good."""
    return _nvidia(records, objectives, aiperf=True)


def _nvidia(records: Sequence[StreamRecord], objectives: Objectives, *, aiperf: bool) -> ToolReport:
    ok = [r for r in records if r.success and r.content]
    ttft = [r.content[0][0] - r.sent for r in ok]
    e2e = [r.content[-1][0] - r.sent for r in ok]
    begin, end = (min(r.sent for r in ok), max(r.content[-1][0] for r in ok)) if ok else (0.0, 0.0)
    itl = _per_token(e2e, ttft, ok)
    if not aiperf:
        itl = [_whole_ns(v) if v is not None and len(r.content) > 1 else None for v, r in zip(itl, ok, strict=True)]
    duration, output = end - begin, sum(r.output_tokens for r in ok)
    second = [r.content[1][0] - r.content[0][0] for r in ok if len(r.content) > 1]
    more = {
        "time_to_second_token": linear(second),
        "output_token_throughput_per_user": linear(ratio(1.0, v) for v in itl),
    }
    if aiperf:
        more["inter_chunk_latency"] = linear(gap for r in ok for gap in _gaps(r.content))
        more["e2e_output_token_throughput"] = linear(ratio(r.output_tokens, t) for r, t in zip(ok, e2e, strict=True))
        more["decode_duration"] = linear(a - b for a, b in zip(e2e, ttft, strict=True))
        good = _count_good(objectives, ttft, itl, e2e)
    else:
        good = _count_good_by_position(objectives, ttft, [v for v in itl if v is not None], e2e)
    return ToolReport(
        tool="AIPerf" if aiperf else "GenAI-Perf",
        version="0.13.0" if aiperf else "0.0.16",
        duration=duration,
        completed=len(ok),
        request_throughput=ratio(len(ok), duration),
        output_throughput=ratio(output, duration),
        ttft=linear(ttft),
        itl=linear(itl),
        e2e=linear(e2e),
        goodput=ratio(good, duration),
        more=more,
        notes=(
            "ITL is one value a request, what others call TPOT.",
            "The window runs from the first send to the last token.",
            "A request without ITL is not good."
            if aiperf
            else "Goodput pairs metric lists by position, so one-token answers shift it.",
        ),
    )


def guidellm(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> ToolReport:
    """GuideLLM 0.8.1: TPOT includes the first token; ITL and TPOT are weighted by tokens; percentiles don't interpolate.

    Its objective for time per token is taken on its ITL; a request without one is undetermined and left out of attainment.
    """
    begin, end = span or run_span(records)
    ok = [r for r in records if r.success and r.content]
    duration = end - begin
    ttft = [r.content[0][0] - r.sent for r in ok]
    last = [r.content[-1][0] - r.sent for r in ok]
    e2e = [r.done - r.sent for r in ok]
    counts = [r.output_tokens for r in ok]
    itl = _per_token(last, ttft, ok)
    verdicts = [_verdict(objectives, *values) for values in zip(ttft, itl, e2e, strict=True)]
    failed = sum(not r.success for r in records)
    determined = sum(v is not None for v in verdicts) + failed
    inside = sum(n for r in ok for moment, n in r.content if begin <= moment <= end)
    return ToolReport(
        tool="GuideLLM",
        version="0.8.1",
        duration=duration,
        completed=len(ok),
        request_throughput=ratio(sum(begin <= r.done <= end for r in ok), duration),
        output_throughput=ratio(inside, duration),
        concurrency=ratio(sum(max(0.0, min(r.done, end) - max(r.sent, begin)) for r in ok), duration),
        ttft=stepped(ttft),
        itl=stepped([v or 0.0 for v in itl], [n - 1 for n in counts]),
        tpot=stepped([t / n for t, n in zip(last, counts, strict=True)], counts),
        e2e=stepped(e2e),
        goodput=ratio(sum(v is True and begin <= r.done <= end for v, r in zip(verdicts, ok, strict=True)), duration),
        attainment=ratio(sum(v is True for v in verdicts), determined),
        determined=determined,
        notes=(
            "TPOT divides the whole time by all tokens, so TTFT is inside.",
            "ITL and TPOT weight a request by its tokens.",
            "Percentiles take the smallest sample that reaches the share, without interpolation.",
        ),
    )


def llmperf(
    records: Sequence[StreamRecord],
    span: Span | None = None,
    objectives: Objectives = NO_OBJECTIVES,
    extra_tokens: int = 1,
) -> ToolReport:
    """LLMPerf f1d6bed: "inter token latency" is time to the last token over messages, TTFT inside; sample std (ddof 1).

    Args:
        records: what the client saw.
        span: start and end of the benchmark.
        objectives: not used, it has no goodput; taken so that all tools can be called alike.
        extra_tokens: what its tokenizer adds to each answer when it counts (1: a beginning-of-sequence token).
    """
    begin, end = span or run_span(records)
    ok = [r for r in records if r.success and r.content]
    duration = end - begin
    e2e = [r.done - r.sent for r in ok]
    counted = [r.output_tokens + extra_tokens for r in ok]
    return ToolReport(
        tool="LLMPerf",
        version="f1d6bed",
        duration=duration,
        completed=len(ok),
        request_throughput=ratio(len(ok), duration),
        output_throughput=ratio(sum(counted), duration),
        ttft=linear((r.content[0][0] - r.sent for r in ok), ddof=1),
        itl=linear(((r.content[-1][0] - r.sent) / len(r.chunks) for r in ok), ddof=1),
        e2e=linear(e2e, ddof=1),
        more={"request_output_throughput": linear((ratio(n, t) for n, t in zip(counted, e2e, strict=True)), ddof=1)},
        notes=(
            "ITL includes TTFT and divides by messages.",
            f"Answers are counted by its own tokenizer, {extra_tokens} more each.",
            "Standard deviation is that of a sample (ddof 1).",
            "On its screen requests are per minute.",
        ),
    )


TOOLS: tuple[Callable[..., ToolReport], ...] = (
    vllm_bench_serve,
    sglang_native,
    sglang_openai,
    genai_perf,
    aiperf,
    guidellm,
    llmperf,
)


def compare(
    records: Sequence[StreamRecord], span: Span | None = None, objectives: Objectives = NO_OBJECTIVES
) -> list[ToolReport]:
    """What each tool would report of the same run, in the order of ``TOOLS``."""
    return [tool(records, span, objectives) for tool in TOOLS]


# Distributions ------------------------------------------------------------------------------------------------------------


def linear(samples: Iterable[float | None], ddof: int = 0) -> Stat:
    """A distribution with linearly interpolated percentiles (numpy, pandas). ``None`` samples are skipped."""
    values = np.array([s for s in samples if s is not None], dtype=np.float64)
    if not values.size:
        return Stat()
    p50, p90, p95, p99 = (float(p) for p in np.percentile(values, (50, 90, 95, 99)))
    return Stat(
        count=int(values.size),
        mean=float(values.mean()),
        std=float(values.std(ddof=ddof)) if values.size > ddof else None,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
    )


def stepped(samples: Sequence[float], weights: Sequence[float] | None = None) -> Stat:
    """A weighted distribution whose percentile is the smallest sample at which the cumulated weight reaches the share."""
    values = np.array(samples, dtype=np.float64)
    weight = np.ones(values.size) if weights is None else np.array(weights, dtype=np.float64)
    values, weight = values[weight > 0], weight[weight > 0]
    if not values.size:
        return Stat()
    order = np.argsort(values, kind="stable")
    values, weight = values[order], weight[order]
    total = float(weight.sum())
    share = np.cumsum(weight) / total
    mean = float((values * weight).sum() / total)
    places = np.minimum(np.searchsorted(share, (0.5, 0.9, 0.95, 0.99)), values.size - 1)
    p50, p90, p95, p99 = (float(value) for value in values[places])
    return Stat(
        count=total,
        mean=mean,
        std=float(np.sqrt((weight * (values - mean) ** 2).sum() / total)),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values[-1]),
    )


def _gaps(chunks: Sequence[tuple[float, int]]) -> list[float]:
    return [later - earlier for (earlier, _), (later, _) in pairwise(chunks)]


def _per_token(e2e: Sequence[float], ttft: Sequence[float], records: Sequence[StreamRecord]) -> list[float | None]:
    """(E2E − TTFT)/(n − 1) by each tool's own E2E; None for fewer than two tokens."""
    return [
        (total - first) / (r.output_tokens - 1) if r.output_tokens > 1 else None
        for total, first, r in zip(e2e, ttft, records, strict=True)
    ]


def _whole_ns(seconds: float) -> float:
    return round(seconds * 1e9) / 1e9


def _verdict(objectives: Objectives, ttft: float, tpot: float | None, e2e: float) -> bool | None:
    """Whether one request met the objectives; None where one of them asks for a metric that it lacks."""
    pairs = ((objectives.ttft, ttft), (objectives.tpot, tpot), (objectives.e2e, e2e))
    asked = [(limit, value) for limit, value in pairs if limit is not None]
    if any(value is None for _, value in asked):
        return None
    return all(value is not None and value <= limit for limit, value in asked)


def _count_good(
    objectives: Objectives, ttft: Sequence[float], tpot: Sequence[float | None], e2e: Sequence[float]
) -> int | None:
    """Requests that met all objectives; None when there are none to meet."""
    if objectives == NO_OBJECTIVES:
        return None
    return sum(_verdict(objectives, *values) is True for values in zip(ttft, tpot, e2e, strict=True))


def _count_good_by_position(
    objectives: Objectives, ttft: Sequence[float], itl: Sequence[float], e2e: Sequence[float]
) -> int | None:
    pairs = ((objectives.ttft, ttft), (objectives.tpot, itl), (objectives.e2e, e2e))
    asked = [(limit, values) for limit, values in pairs if limit is not None]
    if not asked:
        return None
    rows = zip(*(values for _, values in asked), strict=False)
    return sum(all(value <= limit for value, (limit, _) in zip(row, asked, strict=True)) for row in rows)


def _peak_second(records: Sequence[StreamRecord], events: Sequence[tuple[float, int]]) -> float | None:
    """The largest sum of events in a whole second since the first send."""
    if not records or not events:
        return None
    start = min(r.sent for r in records)
    seconds = np.array([int(moment - start) for moment, _ in events])
    return float(np.bincount(seconds, weights=[n for _, n in events]).max())


def _peak_concurrency(records: Sequence[StreamRecord], *, to_end: bool = False) -> int | None:
    """Most requests that touch one whole second since the first send, as these tools count it."""
    if not records:
        return None
    start = min(r.sent for r in records)
    changes: dict[int, int] = {}
    for r in records:
        first, last = int(r.sent - start), int((r.done if to_end else r.chunks[-1][0]) - start)
        changes[first] = changes.get(first, 0) + 1
        changes[last + 1] = changes.get(last + 1, 0) - 1
    now = peak = 0
    for second in sorted(changes):
        now += changes[second]
        peak = max(peak, now)
    return peak


# vLLM's Prometheus histograms ---------------------------------------------------------------------------------------------

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
"""Upper edges of vLLM's TTFT histogram, seconds."""
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Upper edges of vLLM's histograms of time per token, seconds."""
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
"""Upper edges of vLLM's histograms of whole requests and their parts, seconds."""
ITERATION_BUCKETS = (1.0, 8.0, *(float(2**k) for k in range(4, 15)))
"""Upper edges of the tokens of one step."""
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """A Prometheus histogram: all that a dashboard knows of the samples is how many lie at or below each edge."""

    edges: tuple[float, ...]
    cumulative: tuple[int, ...]
    """Samples ≤ each edge; those above the last are only in ``count`` (the bucket +Inf)."""
    count: int
    sum: float

    def quantile(self, share: float) -> float | None:
        """What PromQL's ``histogram_quantile`` makes of it: linear within the bucket, from 0 in the first; None when empty.

        A quantile in the bucket +Inf is reported as the last edge.

        Raises:
            ValueError: unless ``share`` is between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} must be between 0 and 1")
        if not self.count:
            return None
        rank = share * self.count
        bucket = bisect_left(self.cumulative, rank)
        if bucket == len(self.edges):
            return self.edges[-1]
        below = self.cumulative[bucket - 1] if bucket else 0
        lower = self.edges[bucket - 1] if bucket else 0.0
        inside = self.cumulative[bucket] - below
        return lower + (self.edges[bucket] - lower) * ((rank - below) / inside if inside else 0.0)


class PrometheusReport(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM 0.32's counters and histograms for a run, by their names without the prefix ``vllm:``."""

    histograms: dict[str, Histogram]
    counters: dict[str, int]


def histogram(samples: Iterable[float], edges: Sequence[float]) -> Histogram:
    """Sort samples into buckets with the given upper edges (an edge belongs to the bucket below it)."""
    values = np.sort(np.array(list(samples), dtype=np.float64))
    cumulative = np.searchsorted(values, np.array(edges), side="right")
    return Histogram(
        edges=tuple(float(e) for e in edges),
        cumulative=tuple(int(c) for c in cumulative),
        count=int(values.size),
        sum=float(values.sum()),
    )


def token_edges(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to ``max_model_len``."""
    edges = []
    power = 1
    while power <= max_model_len:
        edges += [float(m * power) for m in (1, 2, 5) if m * power <= max_model_len]
        power *= 10
    return tuple(edges)


def vllm_prometheus(
    records: Sequence[StreamRecord], steps: Iterable[StepTrace] = (), max_model_len: int = 100_000
) -> PrometheusReport:
    """The histograms of vLLM 0.32 for records as the server sees them (``server_records``).

    First tokens and gaps are observed as they happen, all else when a request completes. A gap is one an engine output, not
    a token; time per output token is observed as 0 for a one-token answer.
    """
    started = [r for r in records if r.content]
    ok = [r for r in started if r.success]
    first, last = [r.content[0][0] for r in ok], [r.content[-1][0] for r in ok]
    known = [r for r in ok if r.scheduled is not None]
    scheduled = [r.scheduled or 0.0 for r in known]
    tokens = token_edges(max_model_len)
    itl = [gap for r in started for gap in _gaps(r.content)]
    tpot = [v or 0.0 for v in _per_token(last, first, ok)]
    observed: dict[str, tuple[Iterable[float], Sequence[float]]] = {
        "time_to_first_token_seconds": ((r.content[0][0] - r.sent for r in started), TTFT_BUCKETS),
        "inter_token_latency_seconds": (itl, ITL_BUCKETS),
        "request_time_per_output_token_seconds": (tpot, ITL_BUCKETS),
        "e2e_request_latency_seconds": ((t - r.sent for t, r in zip(last, ok, strict=True)), LATENCY_BUCKETS),
        "request_queue_time_seconds": (
            (s - (r.sent if r.queued is None else r.queued) for s, r in zip(scheduled, known, strict=True)),
            LATENCY_BUCKETS,
        ),
        "request_prefill_time_seconds": (
            (r.content[0][0] - s for s, r in zip(scheduled, known, strict=True)),
            LATENCY_BUCKETS,
        ),
        "request_decode_time_seconds": ((b - a for a, b in zip(first, last, strict=True)), LATENCY_BUCKETS),
        "request_inference_time_seconds": (
            (r.content[-1][0] - s for s, r in zip(scheduled, known, strict=True)),
            LATENCY_BUCKETS,
        ),
        "request_prompt_tokens": ((r.prompt_tokens for r in ok), tokens),
        "request_generation_tokens": ((r.output_tokens for r in ok), tokens),
        "request_num_preemptions": ((r.preemptions for r in ok), PREEMPTION_BUCKETS),
        "iteration_tokens_total": (_iteration_tokens(steps), ITERATION_BUCKETS),
    }
    return PrometheusReport(
        histograms={name: histogram(samples, edges) for name, (samples, edges) in observed.items()},
        counters={
            "prompt_tokens_total": sum(r.prompt_tokens for r in started),
            "generation_tokens_total": sum(r.output_tokens for r in started),
            "num_preemptions_total": sum(r.preemptions for r in records),
            "request_success_total": len(ok),
        },
    )


def _iteration_tokens(steps: Iterable[StepTrace]) -> list[int]:
    """Computed prompt tokens and generated tokens of each step that computed something."""
    totals = []
    for step in steps:
        if step.scheduled:
            prompt = sum(row.num_tokens for row in step.scheduled if row.kind in ("prefill", "recompute"))
            totals.append(prompt + sum(row.sampled >= 0 for row in step.scheduled))
    return totals
