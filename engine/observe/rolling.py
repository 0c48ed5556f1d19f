"""The numbers of a live lab: fed with each update, cheap enough to be read several times a second.

A live window has no warm-up and no end to follow requests to, so here each sample belongs to the moment at which it became
known: a TTFT to the first token, a gap to its later token, E2E and TPOT to the end of the request. ``last`` takes the newest
finished requests instead, with exactly the rules of ``engine.observe.metrics``. Feeding costs O(what is new).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from engine.core.outputs import ClosedRequest, OpenedRequest
from engine.core.trace import RequestTrace, StepTrace
from engine.observe.metrics import (
    DeviceUse,
    RunMetrics,
    Summary,
    Window,
    latency_values,
    measure,
    outcome,
    ratio,
    summarise,
)

DEFAULT_SECONDS = 30.0
"""Length of the live window."""
_AT_END = ("queue", "prefill", "decode", "e2e", "tpot", "user_tokens_per_second", "time_to_finish")


class Samples:
    """The newest ``capacity`` rows of numbers, oldest first, each with the moment at which it became known."""

    def __init__(self, capacity: int, width: int = 1) -> None:
        self._rows = np.empty((2 * capacity, 1 + width))
        self._capacity = capacity
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def add(self, moment: float, *values: float) -> None:
        """Append one row. A moment before the last one counts as that one, so that rows stay in order."""
        if self._end == len(self._rows):
            self._rows[: self._capacity] = self._rows[self._end - self._capacity : self._end]
            self._begin, self._end = 0, self._capacity
        if len(self):
            moment = max(moment, float(self._rows[self._end - 1, 0]))
        self._rows[self._end] = (moment, *values)
        self._end += 1
        self._begin = max(self._begin, self._end - self._capacity)

    def rows(self) -> np.ndarray:
        """All rows kept, shape (rows, 1 + width): moment first. A view that the next ``add`` may change."""
        return self._rows[self._begin : self._end]

    def since(self, moment: float) -> np.ndarray:
        """The rows known at ``moment`` or later."""
        rows = self.rows()
        return rows[np.searchsorted(rows[:, 0], moment) :]


class LiveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a live page shows, for the last ``window.length`` seconds. Names and formulas: ``metrics.DEFINITIONS``."""

    window: Window
    latency: dict[str, Summary]
    """ttft, itl, and what is known at a request's end: queue, prefill, decode, e2e, tpot …"""
    request_throughput: float | None
    input_throughput: float | None
    output_throughput: float | None
    total_throughput: float | None
    device: DeviceUse
    slow_left_out: int
    """Tokens and endings inside the window whose times were left out because they ran single-stepped or in slow motion."""


class LabUpdateLike(Protocol):
    """The part of a lab's update that is read here."""

    @property
    def generation(self) -> int:
        """Counts engine restarts."""
        ...

    @property
    def opened(self) -> Sequence[OpenedRequest]:
        """Requests that entered."""
        ...

    @property
    def steps(self) -> Sequence[StepTrace]:
        """Steps taken."""
        ...

    @property
    def closed(self) -> Sequence[ClosedRequest]:
        """Requests that ended."""
        ...


class _Open:
    __slots__ = ("arrival", "last_token", "prompt_tokens", "slow")

    def __init__(self, trace: RequestTrace) -> None:
        self.arrival = trace.arrival
        self.prompt_tokens = 0 if trace.parent_id else trace.prompt_tokens
        self.last_token = trace.token_times[-1] if trace.token_times else -1.0
        self.slow = trace.slow


class RollingMetrics:
    """Accumulates a lab's records and summarises the newest of them. Not thread-safe: one reader, one feeder, one thread.

    Args:
        capacity: samples kept of each kind; a window that holds more shows the newest of them.
        last_requests: finished requests kept for ``last``.
    """

    def __init__(self, capacity: int = 20_000, last_requests: int = 1_000) -> None:
        self._capacity = capacity
        self._last_requests = last_requests
        self._reset(None)

    def _reset(self, generation: int | None) -> None:
        self._generation = generation
        self._open: dict[str, _Open] = {}
        self._leaving: dict[str, int] = {}
        self._closed: deque[RequestTrace] = deque(maxlen=self._last_requests)
        self._closings = 0
        self._cache: tuple[tuple[int, int], RunMetrics] | None = None
        self._ttft = Samples(self._capacity)
        self._itl = Samples(self._capacity)
        self._ended = Samples(self._capacity, 2 + len(_AT_END))
        self._steps = Samples(self._capacity, 8)
        self._prompts = Samples(self._capacity)
        self._slow_tokens = Samples(self._capacity)
        self._start: float | None = None
        self._last_index = -1

    def apply(self, update: LabUpdateLike) -> None:
        """Take one update of a lab; a new generation (the engine was restarted) starts from nothing."""
        if update.generation != self._generation:
            self._reset(update.generation)
        for opened in update.opened:
            self.opened(opened.trace)
        for step in update.steps:
            self.stepped(step)
        for closed in update.closed:
            self.closed(closed.trace)

    def opened(self, trace: RequestTrace) -> None:
        """A request entered the engine."""
        self._open[trace.request_id] = _Open(trace)
        if self._start is None and trace.arrival >= 0:
            self._start = trace.arrival

    def stepped(self, step: StepTrace) -> None:
        """A step is complete."""
        if self._start is None:
            self._start = step.start
        self._last_index = step.index
        tokens = 0
        for row in step.scheduled:
            if row.sampled >= 0:
                tokens += 1
                self._token(row.request_id, step)
        if step.scheduled:
            work = (step.forward_time, step.flops, step.bytes, step.slow, _forward_start(step))
            self._steps.add(step.end, tokens, *work, step.gpu_time, step.gpu_idle_time)
        for request_id in [r for r, last in self._leaving.items() if last <= step.index]:
            del self._leaving[request_id]
            self._open.pop(request_id, None)

    def _token(self, request_id: str, step: StepTrace) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        request.slow = request.slow or step.slow
        if request.last_token < 0 and request.prompt_tokens:
            self._prompts.add(step.end, request.prompt_tokens)
        if request.slow:
            self._slow_tokens.add(step.end, 1.0)
        elif request.last_token < 0:
            self._ttft.add(step.end, step.end - request.arrival)
        else:
            self._itl.add(step.end, step.end - request.last_token)
        request.last_token = step.end

    def closed(self, trace: RequestTrace) -> None:
        """A request ended; its last step may still be on its way."""
        if trace.token_steps and trace.token_steps[-1] > self._last_index:
            self._leaving[trace.request_id] = trace.token_steps[-1]
        else:
            self._open.pop(trace.request_id, None)
        self._closed.append(trace)
        self._closings += 1
        values = latency_values(trace)
        row = [np.nan if trace.slow or (value := values[name]) is None else value for name in _AT_END]
        self._ended.add(trace.finished, outcome(trace) == "completed", trace.slow, *row)

    def latest(self, now: float, seconds: float = DEFAULT_SECONDS) -> LiveMetrics:
        """Everything known in the last ``seconds`` before ``now`` on the engine's clock (less while the lab is younger)."""
        window = Window(max(now - seconds, min(self._start, now) if self._start is not None else now), now)
        ended = self._ended.since(window.start)
        steps = self._steps.since(window.start)
        completed, slow_ends = int(ended[:, 1].sum()), int(ended[:, 2].sum())
        latency = {
            "ttft": summarise(self._ttft.since(window.start)[:, 1]),
            "itl": summarise(self._itl.since(window.start)[:, 1]),
        }
        for column, name in enumerate(_AT_END, start=3):
            values = ended[:, column]
            latency[name] = summarise(values[~np.isnan(values)])
        prompt, generated = float(self._prompts.since(window.start)[:, 1].sum()), float(steps[:, 1].sum())
        return LiveMetrics(
            window=window,
            latency=latency,
            request_throughput=ratio(completed, window.length),
            input_throughput=ratio(prompt, window.length),
            output_throughput=ratio(generated, window.length),
            total_throughput=ratio(prompt + generated, window.length),
            device=_device(steps, window),
            slow_left_out=slow_ends + len(self._slow_tokens.since(window.start)),
        )

    def last(self, requests: int = 100) -> RunMetrics:
        """The newest finished ``requests`` as one run: rates between their first arrival and last end. Cached."""
        key = (self._closings, requests)
        if self._cache is None or self._cache[0] != key:
            kept = list(self._closed)[-requests:] if requests > 0 else []
            self._cache = (key, measure(kept))
        return self._cache[1]

    def series(self, name: str, points: int = 120) -> list[tuple[float, float]]:
        """The newest ``points`` samples of a latency as (moment, value), for a sparkline; [] for an unknown name."""
        if name in ("ttft", "itl"):
            rows = (self._ttft if name == "ttft" else self._itl).rows()[-points:]
            return [(float(moment), float(value)) for moment, value in rows]
        if name not in _AT_END:
            return []
        ended = self._ended.rows()
        column = ended[:, 3 + _AT_END.index(name)]
        kept = ~np.isnan(column)
        return [(float(m), float(v)) for m, v in zip(ended[kept, 0][-points:], column[kept][-points:], strict=True)]

    def token_rate(self, now: float, seconds: float = DEFAULT_SECONDS, bins: int = 30) -> list[tuple[float, float]]:
        """Output tokens a second in ``bins`` equal slices of the last ``seconds``: (end of slice, rate), oldest first."""
        edges = np.linspace(now - seconds, now, bins + 1)
        steps = self._steps.since(edges[0])
        tokens, _ = np.histogram(steps[:, 0], edges, weights=steps[:, 1])
        return [(float(edge), float(n) / (seconds / bins)) for edge, n in zip(edges[1:], tokens, strict=True)]


def _forward_start(step: StepTrace) -> float:
    return step.start + max(step.schedule_time, step.overlap) + step.prepare_time


def _device(steps: np.ndarray, window: Window) -> DeviceUse:
    if not len(steps):
        return DeviceUse(busy_share=ratio(0.0, window.length))
    forward, operations, moved = steps[:, 2], float(steps[:, 3].sum()), float(steps[:, 4].sum())
    inside = np.minimum(steps[:, 6] + forward, window.end) - np.maximum(steps[:, 6], window.start)
    timed, on_gpu, idle = float(forward.sum()), float(steps[:, 7].sum()), float(steps[:, 8].sum())
    return DeviceUse(
        steps=len(steps),
        slow_steps=int(steps[:, 5].sum()),
        busy_share=ratio(float(np.maximum(inside, 0.0).sum()), window.length),
        gpu_idle_share=ratio(idle, on_gpu + idle) if on_gpu > 0 else None,
        gflops=ratio(operations / 1e9, timed) if operations > 0 else None,
        gbytes=ratio(moved / 1e9, timed) if moved > 0 else None,
    )
