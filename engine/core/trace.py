"""The trace: immutable records of what the engine really did. Every picture, number, file and lesson reads only these.

A step has two moments::

        schedule                forward                 postprocess
    ───────┬──────────────────────┬──────────────────────────┬────▶ engine time
           │ events               │ (state "during" step i)  │ events_after
           │ admit, alloc, hit …  │                          │ sample, cache, finish, free

``events`` are what happened since the previous step ended, arrivals and aborts included, up to the forward pass;
``events_after`` is what the sampled tokens brought about. Replaying both from a keyframe rebuilds the pool, every block
table and the queues exactly (``engine.observe.replay``).

With ``async_scheduling`` a step is scheduled before the tokens of the one in front of it are known. The order of what
happens is then schedule 0 │ schedule 1 │ after 0, schedule 2 │ after 1, schedule 3 │ …: what the tokens of step 0 bring
about is told by the ``events`` of step 2, and ``events_after`` is empty unless nothing was scheduled behind a step.

Times are seconds of the engine's clock; durations are seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["prefill", "decode", "recompute", "padding", "fork"]
FinishReason = Literal["stop", "length", "abort", "error"]
Op = Literal["queue", "admit", "alloc", "hit", "fork", "cow", "evict", "cache", "free", "preempt", "finish", "scrub"]


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One change of the pool, a block table or a queue.

    ====== ========================= ====================== =========================================
    op     request_id                blocks                 value / other
    ====== ========================= ====================== =========================================
    queue  added to waiting                                 value: prompt tokens; other: place in the queue
    admit  waiting → running                                value: tokens taken from the prefix cache
    alloc  its table grows           new blocks, in order   (contiguous layout: the whole extent)
    hit    its table grows           cached blocks shared
    fork   child joins running       table shared           other: the parent's request_id
    cow    one table entry replaced  (source, copy)         value: index in the table
    evict                            blocks that lose hash
    cache  now offered to others     blocks that gain hash
    free   its table is released     in release order
    preempt running → waiting                               value: tokens thrown away; other: place in the queue
    finish leaves the engine                                other: finish reason
    scrub                            zeroed before reuse
    ====== ========================= ====================== =========================================
    """

    op: Op
    request_id: str = ""
    blocks: tuple[int, ...] = ()
    value: int = 0
    other: str = ""


class Scheduled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request did in one step.

    ``num_tokens`` positions from ``context`` on were computed. ``recomputed`` of them had been computed before (after a
    preemption, or without a KV cache). ``cached`` tokens came from the prefix cache when it was admitted in this step.
    A ``fork`` row computes nothing: the sample takes its first token from its parent's logits. ``sampled`` is -1 when the
    row did not sample, or when its token was thrown away because the request had ended or failed.
    """

    request_id: str
    kind: Kind
    num_tokens: int
    context: int
    cached: int = 0
    recomputed: int = 0
    sampled: int = -1


class Blocked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why the head of the waiting queue was not admitted; all others wait behind it.

    ``reason``: "seats" (needed/available requests), "tokens" (budget), "blocks" (KV blocks), "batch" (a static batch is
    still running) or "preemption" (something was preempted in this step, so nobody is admitted).
    """

    request_id: str
    reason: Literal["seats", "tokens", "blocks", "batch", "preemption"]
    needed: int = 0
    available: int = 0


class Preemption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``request_id`` gave up its blocks so that ``in_favour_of`` could go on; ``tokens_lost`` must be computed again."""

    request_id: str
    tokens_lost: int
    in_favour_of: str


class Keyframe(msgspec.Struct, frozen=True, array_like=True):
    """The whole state before a step's ``events``, so that replay need not start at the first step.

    ``free``: free queue, front (next to be taken) first. ``cached``: blocks with a hash. ``tables``: request_id → physical
    blocks. ``computed``: request_id → num_computed_tokens.
    """

    free: tuple[int, ...]
    cached: tuple[int, ...]
    tables: dict[str, tuple[int, ...]]
    computed: dict[str, int]
    waiting: tuple[str, ...]
    running: tuple[str, ...]


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the GPU's management library (NVML) said of the whole GPU, other programs included. None: it did not say."""

    time: float
    """When it was asked: seconds since 1970 (``time.time``), because it does not stop with the engine's clock."""
    utilisation: float | None = None
    """Share of the last sampling period (up to a second) in which some kernel ran on the GPU, 0 to 1."""
    memory_used: int | None = None
    """Bytes of the GPU's memory in use, by everybody."""
    memory_total: int | None = None
    """Bytes of memory that the GPU has."""
    power: float | None = None
    """Watts drawn."""


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step. A record without ``scheduled`` rows carries only events that happened while the engine was idle."""

    index: int
    start: float
    """Engine time at which scheduling began."""
    schedule_time: float = 0.0
    prepare_time: float = 0.0
    forward_time: float = 0.0
    sample_time: float = 0.0
    postprocess_time: float = 0.0
    launch_time: float = 0.0
    """Spent by the host asking the GPU for the step's work; 0 on a CPU."""
    gpu_time: float = 0.0
    """Spent by the GPU on the step, from the GPU's own events; 0 on a CPU."""
    gpu_idle_time: float = 0.0
    """The GPU's pause between the work of the step before and this step's; 0 on a CPU, and where the engine paused."""
    wait_time: float = 0.0
    """Spent before this step on steps of other labs on the same host."""
    overlap: float = 0.0
    """Of the time from ``start`` on, what passed until the step before ended: with ``async_scheduling`` steps overlap."""
    end: float = 0.0
    """Engine time at which the sampled tokens were known: every token of the step bears it."""
    scheduled: tuple[Scheduled, ...] = ()
    token_budget: int = 0
    seats: int = 0
    """Seats taken: running requests, samples still to be forked, and rows of a static batch that are done."""
    num_running: int = 0
    """Requests in the running batch during the step."""
    num_waiting: int = 0
    """Requests still waiting during the step."""
    blocked: Blocked | None = None
    preemptions: tuple[Preemption, ...] = ()
    events: tuple[Event, ...] = ()
    events_after: tuple[Event, ...] = ()
    keyframe: Keyframe | None = None
    kv_used: int = 0
    """Blocks referenced by a request during the step."""
    kv_cached: int = 0
    """Blocks not referenced whose content can still be reused."""
    flops: float = 0.0
    """Floating point operations of the forward pass, counted from shapes."""
    bytes: float = 0.0
    """Bytes of weights and KV that the forward pass must at least move, counted from shapes."""
    slow: bool = False
    """Taken while single-stepping or in slow motion: left out of percentiles."""
    device: DeviceSample | None = None
    """The GPU's own figures, where a new sample was there when the step ended: at most one a second."""

    @property
    def duration(self) -> float:
        """Seconds that the step took, or that it added where it overlaps with the step before."""
        return self.end - self.start - self.overlap

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included: the part of the budget that was used."""
        return sum(row.num_tokens for row in self.scheduled)


class RequestTrace(msgspec.Struct, kw_only=True):
    """The life of one request (one sample, where ``n`` > 1). Times: seconds of the engine's clock, -1 until they happen."""

    request_id: str
    number: int = 0
    """Arrival number: 0 is letter A on the pictures, 25 Z, 26 AA."""
    parent_id: str = ""
    """The request this sample was forked from, '' for a request's first sample."""
    samples: tuple[str, ...] = ()
    """Ids of all samples of the request, this one included, when ``n`` > 1."""
    arrival: float = -1.0
    """When the request was due, or handed over if nothing said when it was due."""
    tokenised: float = -1.0
    queued: float = -1.0
    first_scheduled: float = -1.0
    finished: float = -1.0
    token_times: list[float] = msgspec.field(default_factory=list)
    """When each output token was known."""
    token_steps: list[int] = msgspec.field(default_factory=list)
    """The step that sampled each output token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    cache_note: str = ""
    """Why the prefix cache gave no more than it did, in words."""
    recomputed_tokens: int = 0
    """Tokens computed again (after preemptions, or without a KV cache)."""
    preemptions: int = 0
    priority: int = 0
    max_tokens: int = 0
    seed: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, if one did."""
    error: str = ""
    slow: bool = False
    """Some of it ran single-stepped or in slow motion."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times)

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival → first token, seconds; None before it."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: (last − first token) / (n − 1), seconds; None for fewer than two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive tokens, seconds."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e_latency(self) -> float | None:
        """Arrival → last token, seconds; None unless it finished with a token."""
        return self.token_times[-1] - self.arrival if self.token_times and self.finished >= 0 else None


def letter(number: int) -> str:
    """The letter of the ``number``-th request (0 → A, 25 → Z, 26 → AA), as in a spreadsheet's columns."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(65 + rest) + text
    return text
