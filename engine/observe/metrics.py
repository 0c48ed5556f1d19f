"""Latency, throughput, concurrency and goodput: what each number means, and how it is computed from trace records.

Where each part sits on a request's timeline::

    arrival    tokenised      first scheduled        first token             last token
       │ tokenise  │    queue       │      prefill        │        decode         │
       ├───────────┴────────────────┴─────────────────────┤                       │
       │                     TTFT                         │ ITL │ ITL │ … │ ITL   │
       ├──────────────────────────────────────────────────┴───────────────────────┤
       │                                 E2E                                      │

The parts share their borders, so they add up to E2E. All times are seconds of the engine's clock: delivery to a client is
not in them (``engine.observe.other_tools`` adds it).

Which records count, given a window [start, end], both borders included:

* **Latencies** come from the requests that were *due* inside the window, followed to their end even where that lies beyond
  it. So requests of the warm-up are left out, and slow requests near the end are not.
* **Rates** count what *happens* inside the window: tokens that become known, prompts that get their first token, requests
  that complete, whoever they belong to.
* A request that was aborted or failed counts with what really happened: its queue, prefill, TTFT and gaps between tokens. It
  has no E2E, decode time or TPOT in the summaries, since being cut short is not being fast, and it never meets an objective.
  One that ends without a first token has a time to finish and nothing else.
* Requests that ran single-stepped or in slow motion are left out of the summaries, and counted.

Undefined is ``None`` ("n/a" on a screen), never 0, NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from engine.core.trace import RequestTrace, StepTrace

PERCENTILE_METHOD = "linear interpolation, numpy's default"
"""Named on every screen that shows a percentile."""

MIN_SAMPLES_P99 = 100
"""Below this many samples the 99th percentile is hardly more than the maximum: it is flagged."""

Outcome = Literal["completed", "aborted", "failed", "refused", "unfinished"]


class Definition(msgspec.Struct, frozen=True):
    """What the screens say about a metric: its name, unit ('' for a plain number), one line for a hover, and formula."""

    label: str
    unit: str
    text: str
    formula: str


DEFINITIONS: dict[str, Definition] = {
    "ttft": Definition(
        "TTFT",
        "s",
        "Time to first token: from when the request was due to its first token.",
        "first token − arrival",
    ),
    "tokenise": Definition(
        "Tokenise", "s", "From when the request was due until its prompt is tokens.", "tokenised − arrival"
    ),
    "queue": Definition("Queue", "s", "Waiting until the first step that computes it.", "first scheduled − tokenised"),
    "prefill": Definition(
        "Prefill",
        "s",
        "From the first step that computes it to its first token; a preemption in between counts.",
        "first token − first scheduled",
    ),
    "decode": Definition("Decode", "s", "From its first to its last token.", "last token − first token"),
    "e2e": Definition(
        "E2E latency",
        "s",
        "From when the request was due to its last token; only requests that completed.",
        "last token − arrival = tokenise + queue + prefill + decode",
    ),
    "itl": Definition(
        "ITL",
        "s",
        "Inter-token latency: the gap between consecutive tokens of a request; all gaps of all requests are one pool.",
        "token i − token i−1",
    ),
    "tpot": Definition(
        "TPOT",
        "s",
        "Time per output token after the first, one value a completed request; undefined for a single token.",
        "(last token − first token) / (n − 1)",
    ),
    "time_to_finish": Definition(
        "Time to finish",
        "s",
        "Of requests that ended without a token: from when the request was due to its end.",
        "finished − arrival",
    ),
    "time_to_first_text": Definition(
        "Time to first text",
        "s",
        "What a reader sees: from when the request was due to the first token that shows text. "
        "Later than TTFT while a character is incomplete.",
        "first token with text − arrival",
    ),
    "user_tokens_per_second": Definition(
        "One user's speed",
        "tokens/s",
        "How fast one request's tokens come after the first, one value a completed request.",
        "1 / TPOT",
    ),
    "request_throughput": Definition(
        "Request throughput", "requests/s", "Requests that complete inside the window.", "completed in window / window"
    ),
    "offered_rate": Definition(
        "Offered rate",
        "requests/s",
        "How fast requests were due, whether or not the engine kept up.",
        "(arrivals − 1) / (last arrival − first arrival)",
    ),
    "input_throughput": Definition(
        "Input throughput",
        "tokens/s",
        "Prompt tokens, counted when their request gets its first token; cached ones too, samples of one prompt once.",
        "prompt tokens answered in window / window",
    ),
    "output_throughput": Definition(
        "Output throughput",
        "tokens/s",
        "The server's speed: tokens generated inside the window for all requests together, aborted ones included.",
        "tokens generated in window / window",
    ),
    "total_throughput": Definition(
        "Total throughput", "tokens/s", "Input and output throughput together.", "input throughput + output throughput"
    ),
    "concurrency_mean": Definition(
        "Mean concurrency",
        "requests",
        "Requests between arrival and end, averaged over the time of the window.",
        "Σ time in the window of each request / window",
    ),
    "concurrency_little": Definition(
        "Concurrency by Little's law",
        "requests",
        "What the completed requests alone would give: equal to the mean when nothing is cut off by the window.",
        "request throughput × mean E2E",
    ),
    "concurrency_peak": Definition("Peak concurrency", "requests", "Most requests at one moment.", "max over the window"),
    "goodput": Definition(
        "Goodput",
        "requests/s",
        "Requests that complete inside the window and meet every objective.",
        "good requests in window / window",
    ),
    "attainment": Definition(
        "Attainment",
        "",
        "Share of the ended requests that met every objective; aborted, failed and refused ones did not. "
        "A single-token answer can't miss a TPOT objective.",
        "good / (completed + aborted + failed + refused)",
    ),
    "busy_share": Definition(
        "Busy share", "", "Share of the window in which the device computed forward passes.", "Σ forward time / window"
    ),
    "launch_time": Definition(
        "Launch time",
        "s",
        "Spent by the host (the CPU) in a step asking the GPU for work: with small batches this can set the pace.",
        "host time in calls that start GPU work",
    ),
    "gpu_time": Definition(
        "GPU time",
        "s",
        "Spent by the GPU on a step, by the GPU's own clock.",
        "GPU event at its end − GPU event at its start",
    ),
    "gpu_idle_time": Definition(
        "GPU idle time",
        "s",
        "The GPU's pause before a step's work, while it waited for the host; after a pause of the engine it is not counted.",
        "GPU event at this step's start − GPU event at the end of the step before",
    ),
    "gpu_idle_share": Definition(
        "GPU idle share",
        "",
        "Of the time between the first and the last work of steps that follow each other: the part that the GPU idled.",
        "Σ GPU idle time / Σ (GPU time + GPU idle time)",
    ),
    "gflops": Definition(
        "Achieved GFLOP/s",
        "GFLOP/s",
        "Operations of the forward pass, counted from shapes, over the time it took.",
        "counted operations / forward time / 10⁹",
    ),
    "gbytes": Definition(
        "Achieved GB/s",
        "GB/s",
        "Bytes of weights and KV that the forward pass must at least move, counted from shapes, over the time it took.",
        "counted bytes / forward time / 10⁹",
    ),
}
"""Metric name → what it is. Latencies are in seconds here; a screen may show milliseconds."""

LATENCIES = (
    "ttft", "tokenise", "queue", "prefill", "decode", "e2e", "itl", "tpot", "user_tokens_per_second", "time_to_finish",
)  # fmt: skip
"""The metrics that have one value a request (``itl``: a gap) and are therefore summarised."""


# Summaries ----------------------------------------------------------------------------------------------------------------


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in nine numbers, in the unit of its samples; all but ``count`` are None without samples.

    ``std`` is that of the population (ddof 0). Percentiles: ``PERCENTILE_METHOD``.
    """

    count: int = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @property
    def p99_flagged(self) -> bool:
        """Whether there is a p99 that rests on too few samples to be trusted."""
        return 0 < self.count < MIN_SAMPLES_P99


def summarise(samples: Iterable[float | None] | np.ndarray) -> Summary:
    """Summarise samples; ``None`` entries are undefined and skipped.

    Raises:
        ValueError: for NaN or infinite samples: a clock never yields them, so they mean an error upstream.
    """
    if not isinstance(samples, np.ndarray):
        samples = np.array([s for s in samples if s is not None], dtype=np.float64)
    if samples.size == 0:
        return Summary()
    if not np.isfinite(samples).all():
        raise ValueError(f"{int((~np.isfinite(samples)).sum())} of {samples.size} samples are NaN or infinite: none may be")
    p50, p90, p95, p99 = (float(p) for p in np.percentile(samples, (50, 90, 95, 99)))
    return Summary(
        count=int(samples.size),
        mean=float(samples.mean()),
        std=float(samples.std()),
        min=float(samples.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(samples.max()),
    )


def ratio(value: float | None, by: float | None) -> float | None:
    """``value / by``; None where either is undefined, ``by`` is not above 0, or the result is too large for a number."""
    if value is None or by is None or by <= 0:
        return None
    result = value / by
    return result if math.isfinite(result) else None


# One request --------------------------------------------------------------------------------------------------------------


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The borders between the parts of a request's time, seconds of the engine's clock; None where not reached.

    A border that the engine did not record although a later one was (no tokenising: the prompt came as tokens) lies where
    the one before it does: that part took no time.
    """

    arrival: float | None = None
    tokenised: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    """Set once the request has ended."""

    @property
    def tokenise(self) -> float | None:
        """Arrival → tokenised."""
        return _difference(self.tokenised, self.arrival)

    @property
    def queue(self) -> float | None:
        """Tokenised → first scheduled."""
        return _difference(self.first_scheduled, self.tokenised)

    @property
    def prefill(self) -> float | None:
        """First scheduled → first token."""
        return _difference(self.first_token, self.first_scheduled)

    @property
    def decode(self) -> float | None:
        """First token → last token."""
        return _difference(self.last_token, self.first_token)

    @property
    def ttft(self) -> float | None:
        """Arrival → first token: tokenise + queue + prefill."""
        return _difference(self.first_token, self.arrival)

    @property
    def e2e(self) -> float | None:
        """Arrival → last token: ttft + decode."""
        return _difference(self.last_token, self.arrival)


def parts(request: RequestTrace) -> Parts:
    """The parts of one request's time, as far as it got. A request that ended without a token has none."""
    ended = request.finished >= 0
    if request.arrival < 0 or (ended and not request.token_times):
        return Parts()
    first = request.token_times[0] if request.token_times else None
    scheduled = _happened(request.first_scheduled)
    tokenised = _happened(request.tokenised)
    if tokenised is None and (scheduled is not None or first is not None):
        tokenised = request.arrival
    if scheduled is None and first is not None:
        scheduled = tokenised
    return Parts(
        arrival=request.arrival,
        tokenised=tokenised,
        first_scheduled=scheduled,
        first_token=first,
        last_token=request.token_times[-1] if ended and request.token_times else None,
    )


def outcome(request: RequestTrace) -> Outcome:
    """How a request ended. Refused: it ended with an error before it entered the queue."""
    if request.finish_reason is None or request.finished < 0:
        return "unfinished"
    if request.finish_reason == "abort":
        return "aborted"
    if request.finish_reason == "error":
        return "refused" if request.queued < 0 and request.first_scheduled < 0 and not request.token_times else "failed"
    return "completed"


def time_to_finish(request: RequestTrace) -> float | None:
    """Arrival → end, seconds, however it ended; None while it lasts."""
    return request.finished - request.arrival if request.finished >= 0 and request.arrival >= 0 else None


def user_tokens_per_second(request: RequestTrace) -> float | None:
    """Tokens a second after the first, as one reader sees them: 1 / TPOT; None for fewer than two tokens or no time."""
    return ratio(1.0, request.tpot)


def time_to_first_text(request: RequestTrace, texts: Sequence[str]) -> float | None:
    """Arrival → first token that shows text, seconds; None if none did.

    Args:
        request: its trace.
        texts: the text that became certain with each output token ('' while a character is incomplete).
    """
    for moment, text in zip(request.token_times, texts, strict=False):
        if text:
            return moment - request.arrival
    return None


def identity(request: RequestTrace) -> tuple[float, float] | None:
    """Both sides of E2E = TTFT + (n − 1) × TPOT for a request, seconds; None where a side is undefined.

    Exact for the engine's own times; a client that measures E2E to the end of the stream sees a little more.
    """
    if request.e2e_latency is None or request.ttft is None or request.tpot is None:
        return None
    return request.e2e_latency, request.ttft + (request.output_tokens - 1) * request.tpot


def latency_values(request: RequestTrace) -> dict[str, float | None]:
    """Every per-request metric of one request, as the summaries take it; None where undefined.

    The decode part, E2E and TPOT of a request that did not complete are None here (see the module's rules).
    """
    split = parts(request)
    completed = outcome(request) == "completed"
    unserved = request.finished >= 0 and not request.token_times
    return {
        "ttft": split.ttft,
        "tokenise": split.tokenise,
        "queue": split.queue,
        "prefill": split.prefill,
        "decode": split.decode if completed else None,
        "e2e": split.e2e if completed else None,
        "tpot": request.tpot if completed else None,
        "user_tokens_per_second": user_tokens_per_second(request) if completed else None,
        "time_to_finish": time_to_finish(request) if unserved else None,
    }


# A run --------------------------------------------------------------------------------------------------------------------


class Window(msgspec.Struct, frozen=True):
    """The measured part of a run, [start, end], seconds of the engine's clock."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start

    def holds(self, moment: float) -> bool:
        """Whether something that happened at ``moment`` counts (borders included)."""
        return self.start <= moment <= self.end


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must reach to be good: upper limits in seconds, None: not asked for."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < float("inf"):
                raise ValueError(f"objective {name}={limit} must be a number of seconds of at least 0")


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests that were due inside the window ended. ``arrived`` is the sum of the five others."""

    arrived: int = 0
    completed: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    unfinished: int = 0
    slow: int = 0
    """Of ``arrived``: ran single-stepped or in slow motion, left out of the summaries and of goodput."""


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at once between arrival and end; None where the window has no length."""

    mean: float | None = None
    little: float | None = None
    peak: int = 0


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every objective.

    ``good`` of ``judged`` ended requests that were due in the window met them; ``rate`` counts those that completed in it.
    """

    good: int = 0
    judged: int = 0
    attainment: float | None = None
    rate: float | None = None


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the device did inside the window, from its step records; None without any."""

    steps: int = 0
    slow_steps: int = 0
    busy_share: float | None = None
    gpu_idle_share: float | None = None
    """None on a CPU, and while nothing was timed by the GPU itself."""
    gflops: float | None = None
    gbytes: float | None = None


class RunMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of one run or window. Names and formulas: ``DEFINITIONS``."""

    window: Window | None
    counts: Counts
    latency: dict[str, Summary]
    """One entry for each of ``LATENCIES``."""
    offered_rate: float | None = None
    request_throughput: float | None = None
    input_throughput: float | None = None
    output_throughput: float | None = None
    total_throughput: float | None = None
    input_tokens: int = 0
    """Prompt tokens answered inside the window."""
    output_tokens: int = 0
    """Tokens generated inside the window."""
    concurrency: Concurrency = Concurrency()
    goodput: Goodput | None = None
    """None when no objectives were given."""
    device: DeviceUse = DeviceUse()
    percentile_method: str = PERCENTILE_METHOD


def measure(
    requests: Iterable[RequestTrace],
    steps: Iterable[StepTrace] = (),
    *,
    window: Window | None = None,
    objectives: Objectives | None = None,
    refused: int = 0,
) -> RunMetrics:
    """Compute every number of a run.

    Args:
        requests: all requests of the run, those outside the window too (their tokens may fall inside).
        steps: step records, for the device's figures; may be left out.
        window: the measured part; None: from the first arrival to the last thing that happened.
        objectives: for goodput.
        refused: refusals inside the window that left no request record behind.
    """
    requests, steps = list(requests), list(steps)
    window = window or whole_run(requests, steps)
    if window is None:
        return RunMetrics(
            window=None,
            counts=Counts(arrived=refused, refused=refused),
            latency={name: Summary() for name in LATENCIES},
            goodput=None if objectives is None else goodput([], window, objectives, refused=refused),
        )
    cohort = [r for r in requests if window.holds(r.arrival)]
    input_tokens, output_tokens = tokens_in(requests, window)
    completed = [r for r in requests if outcome(r) == "completed" and window.holds(r.finished)]
    return RunMetrics(
        window=window,
        counts=count(cohort, refused),
        latency=latencies(cohort),
        offered_rate=offered_rate(cohort),
        request_throughput=ratio(len(completed), window.length),
        input_throughput=ratio(input_tokens, window.length),
        output_throughput=ratio(output_tokens, window.length),
        total_throughput=ratio(input_tokens + output_tokens, window.length),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        concurrency=concurrency(requests, window),
        goodput=None if objectives is None else goodput(requests, window, objectives, refused=refused),
        device=device_use(steps, window),
    )


def whole_run(requests: Sequence[RequestTrace], steps: Sequence[StepTrace] = ()) -> Window | None:
    """From the first arrival to the last token, end of a request or end of a step; None if nothing arrived."""
    arrivals = [r.arrival for r in requests if r.arrival >= 0]
    if not arrivals:
        return None
    moments = [max(r.finished, r.arrival, r.token_times[-1] if r.token_times else -1.0) for r in requests]
    moments += [s.end for s in steps]
    return Window(min(arrivals), max(moments))


def latencies(requests: Iterable[RequestTrace]) -> dict[str, Summary]:
    """Summaries of every latency of ``LATENCIES``, requests in slow motion left out."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    gaps = [np.empty(0)]
    for request in requests:
        if request.slow:
            continue
        for name, value in latency_values(request).items():
            if value is not None:
                values[name].append(value)
        if len(request.token_times) > 1:
            gaps.append(np.diff(request.token_times))
    return {name: summarise(np.concatenate(gaps) if name == "itl" else np.array(values[name])) for name in LATENCIES}


def count(requests: Iterable[RequestTrace], refused: int = 0) -> Counts:
    """Count requests by how they ended; ``refused`` more left no record."""
    requests = list(requests)
    ends = [outcome(request) for request in requests]
    return Counts(
        arrived=len(ends) + refused,
        completed=ends.count("completed"),
        aborted=ends.count("aborted"),
        failed=ends.count("failed"),
        refused=ends.count("refused") + refused,
        unfinished=ends.count("unfinished"),
        slow=sum(request.slow for request in requests),
    )


def tokens_in(requests: Iterable[RequestTrace], window: Window) -> tuple[int, int]:
    """(prompt tokens, generated tokens) inside the window.

    A prompt counts as a whole when its first token comes (as vLLM's counter does); samples forked from it do not count it
    again.
    """
    prompt = generated = 0
    for request in requests:
        times = request.token_times
        if not times:
            continue
        if not request.parent_id and window.holds(times[0]):
            prompt += request.prompt_tokens
        if times[0] >= window.start and times[-1] <= window.end:
            generated += len(times)
        else:
            generated += sum(window.holds(moment) for moment in times)
    return prompt, generated


def offered_rate(requests: Iterable[RequestTrace]) -> float | None:
    """Arrivals a second between the first and the last arrival; None for fewer than two, or all at once."""
    arrivals = [r.arrival for r in requests if r.arrival >= 0 and not r.parent_id]
    return ratio(len(arrivals) - 1, max(arrivals) - min(arrivals)) if len(arrivals) > 1 else None


def concurrency(requests: Iterable[RequestTrace], window: Window) -> Concurrency:
    """Mean over time, Little's law, and peak of the requests between arrival and end (unfinished: to the window's end)."""
    changes: list[tuple[float, int]] = []
    present = completed_time = 0.0
    for request in requests:
        if request.arrival < 0:
            continue
        start = max(request.arrival, window.start)
        end = min(request.finished if request.finished >= 0 else window.end, window.end)
        if end > start:
            present += end - start
            changes += [(start, 1), (end, -1)]
        if outcome(request) == "completed" and window.holds(request.finished):
            completed_time += request.e2e_latency or 0.0
    now = peak = 0
    for _, change in sorted(changes):  # an end sorts before a start at the same moment: they do not overlap
        now += change
        peak = max(peak, now)
    return Concurrency(mean=ratio(present, window.length), little=ratio(completed_time, window.length), peak=peak)


def meets(request: RequestTrace, objectives: Objectives) -> bool | None:
    """Whether a request met every objective; None while it can't be told.

    A request that did not complete met none. A completed answer of one token has no gap that could be too long, so it meets
    any TPOT objective; one without a single token meets no objective of time.
    """
    end = outcome(request)
    if end == "unfinished":
        return None
    if end != "completed" or request.ttft is None or request.e2e_latency is None:
        return False
    for limit, value in (
        (objectives.ttft, request.ttft),
        (objectives.tpot, request.tpot if request.tpot is not None else 0.0),
        (objectives.e2e, request.e2e_latency),
    ):
        if limit is not None and value > limit:
            return False
    return True


def goodput(requests: Iterable[RequestTrace], window: Window | None, objectives: Objectives, *, refused: int = 0) -> Goodput:
    """Good requests a second and the share of ended requests that were good; slow motion left out."""
    good = judged = good_inside = 0
    for request in requests:
        verdict = None if request.slow or window is None else meets(request, objectives)
        if verdict is None or window is None:
            continue
        if window.holds(request.arrival):
            judged += 1
            good += verdict
        good_inside += verdict and window.holds(request.finished)
    judged += refused
    rate = ratio(good_inside, window.length) if window is not None else None
    return Goodput(good=good, judged=judged, attainment=ratio(good, judged), rate=rate)


# Steps --------------------------------------------------------------------------------------------------------------------


class Anatomy(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time from the end of the previous step to the end of this one went, seconds.

    With ``async_scheduling`` on a GPU the host's parts run beside the forward pass of another step, and the sum can be more
    than the time that passed.
    """

    schedule: float
    prepare: float
    forward: float
    sample: float
    postprocess: float
    other_labs: float
    outside: float
    """Not accounted for: between steps with nothing to do, handing over results, and gaps inside the step."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return math.fsum(getattr(self, name) for name in self.__struct_fields__)


def step_close(step: StepTrace) -> float:
    """Engine time at which a step was done with, its postprocessing included."""
    inside = step.schedule_time + step.prepare_time + step.forward_time + step.sample_time
    return max(step.end, step.start + inside) + step.postprocess_time


def anatomy(step: StepTrace, previous: StepTrace | None = None) -> Anatomy:
    """Split one step's time; without ``previous`` the time before the step is only the wait for other labs."""
    inside = step.schedule_time + step.prepare_time + step.forward_time + step.sample_time
    before = step.start - step_close(previous) - step.wait_time if previous is not None else 0.0
    return Anatomy(
        schedule=step.schedule_time,
        prepare=step.prepare_time,
        forward=step.forward_time,
        sample=step.sample_time,
        postprocess=step.postprocess_time,
        other_labs=step.wait_time,
        outside=max(0.0, before) + max(0.0, step.duration - inside),
    )


def step_rates(step: StepTrace) -> tuple[float | None, float | None]:
    """(GFLOP/s, GB/s) achieved by one step's forward pass, from counted work; None where nothing was counted or timed."""
    gflops = ratio(step.flops / 1e9, step.forward_time) if step.flops > 0 else None
    gbytes = ratio(step.bytes / 1e9, step.forward_time) if step.bytes > 0 else None
    return gflops, gbytes


def device_use(steps: Iterable[StepTrace], window: Window) -> DeviceUse:
    """Busy share and achieved rates inside the window; a forward pass that crosses a border counts with its part inside."""
    steps = [s for s in steps if s.scheduled]
    busy = timed = operations = moved = on_gpu = idle = 0.0
    inside = slow = 0
    for step in steps:
        begin = step.start + max(step.schedule_time, step.overlap) + step.prepare_time
        overlap = min(begin + step.forward_time, window.end) - max(begin, window.start)
        busy += max(0.0, overlap)
        if window.holds(step.end):
            inside += 1
            slow += step.slow
            timed += step.forward_time
            on_gpu += step.gpu_time
            idle += step.gpu_idle_time
            operations += step.flops
            moved += step.bytes
    return DeviceUse(
        steps=inside,
        slow_steps=slow,
        busy_share=ratio(busy, window.length) if steps else None,
        gpu_idle_share=ratio(idle, on_gpu + idle) if on_gpu > 0 else None,
        gflops=ratio(operations / 1e9, timed) if operations > 0 else None,
        gbytes=ratio(moved / 1e9, timed) if moved > 0 else None,
    )


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that must agree between the requests and the steps of a whole run, aborted and failed requests included."""

    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


def totals_of_requests(requests: Iterable[RequestTrace]) -> Totals:
    """The totals as the requests tell them."""
    requests = list(requests)
    return Totals(
        output_tokens=sum(r.output_tokens for r in requests),
        recomputed_tokens=sum(r.recomputed_tokens for r in requests),
        preemptions=sum(r.preemptions for r in requests),
    )


def totals_of_steps(steps: Iterable[StepTrace]) -> Totals:
    """The totals as the steps tell them."""
    output = recomputed = preemptions = 0
    for step in steps:
        preemptions += len(step.preemptions)
        for row in step.scheduled:
            output += row.sampled >= 0
            recomputed += row.recomputed
    return Totals(output_tokens=output, recomputed_tokens=recomputed, preemptions=preemptions)


def _happened(moment: float) -> float | None:
    return moment if moment >= 0 else None


def _difference(later: float | None, earlier: float | None) -> float | None:
    return later - earlier if later is not None and earlier is not None else None
