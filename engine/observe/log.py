"""The client's mirror of one lab: everything a viewer can look at, within bounds, safe to read from any thread.

::

    engine ── steps, tokens, opened, closed, stats ──▶ TraceLog ──▶ snapshots ──▶ figures, tables, lessons

A log holds plain records and does no I/O, so that a live lab and a saved run look the same to a reader. Applying an update
costs O(what is new), never O(history). What is older than the bounds is let go, oldest first, and the log says so.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.core.outputs import ClosedRequest, EngineStats, OpenedRequest, TokenEvent
from engine.core.trace import RequestTrace, Scheduled, StepTrace

MAX_STEPS = 20_000
"""Newest steps that a log keeps."""
MAX_UNITS = 6_000_000
"""Payload that the kept steps may hold together, in units of one number (about 10 to 20 bytes of memory each)."""
MAX_FINISHED = 2_000
"""Newest finished requests that a log keeps."""
MAX_TOKENS = 200_000
"""Newest token events (text and candidates) that a log keeps, all requests together."""
MAX_TIMES = 1_000_000
"""Token times in the traces of finished requests that a log keeps."""
MAX_NOTICES = 50
"""Newest notices that a log keeps."""
_SLACK = 256


def step_units(step: StepTrace) -> int:
    """The payload of a step in numbers, an upper bound on a ninth of its bytes as msgpack."""
    units = 64 + 10 * len(step.scheduled) + 16 * len(step.preemptions)
    for event in (*step.events, *step.events_after):
        units += 12 + len(event.blocks)
    if step.keyframe is not None:
        frame = step.keyframe
        units += (
            16 + len(frame.free) + len(frame.cached) + 8 * (len(frame.waiting) + len(frame.running) + len(frame.computed))
        )
        units += sum(8 + len(table) for table in frame.tables.values())
    return units + (12 if step.device is not None else 0)


class LabFacts(Protocol):
    """What a log needs to know of a lab's settings."""

    @property
    def config(self) -> Any:
        """An ``EngineConfig``."""
        ...


class Update(Protocol):
    """What a log is fed with: news of a lab, oldest first in each list."""

    @property
    def generation(self) -> int:
        """Counts engine restarts; a new number empties the log."""
        ...

    @property
    def info(self) -> Any:
        """Settings (``LabFacts``), when they changed."""
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
    def tokens(self) -> Sequence[TokenEvent]:
        """Tokens sampled."""
        ...

    @property
    def closed(self) -> Sequence[ClosedRequest]:
        """Requests that ended."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """Counters and gauges now."""
        ...

    @property
    def now(self) -> float:
        """The engine's clock, seconds."""
        ...

    @property
    def notice(self) -> str:
        """A sentence for people, or ''."""
        ...


class Archive(Protocol):
    """Where a log's older steps can still be found (``engine.observe.archive``)."""

    def apply(self, update: Any) -> None:
        """Record news of the lab."""
        ...

    def steps(self, first: int, last: int) -> list[StepTrace]:
        """Recorded steps with ``first <= index <= last``, oldest first."""
        ...

    @property
    def first_index(self) -> int | None:
        """Index of the oldest recorded step, or None."""
        ...


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request (one sample) as it stood at one moment; nothing in it changes any more."""

    trace: RequestTrace
    prompt: str
    """The text as typed (shortened when very long)."""
    prompt_token_ids: tuple[int, ...]
    text: str
    """Output text so far."""
    tokens: tuple[TokenEvent, ...]
    """Token events still kept: all of them, or the newest."""
    tokens_left_out: int = 0
    """Older token events that were let go."""
    closed: bool = False


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A sentence for people and the log's version that brought it."""

    version: int
    text: str


class LogSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A log at one moment, consistent in itself."""

    version: int
    generation: int
    info: Any
    stats: EngineStats
    now: float
    first_index: int
    """Index of the oldest step still kept (equals ``next_index`` when there is none)."""
    next_index: int
    """Index after the newest step."""
    steps: tuple[StepTrace, ...]
    """The newest steps, oldest first."""
    requests: tuple[RequestView, ...]
    """All live requests and the newest finished ones, in order of arrival."""
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    notices: tuple[Notice, ...]


class _Entry:
    """A request as the log keeps it."""

    __slots__ = ("first_token", "opened", "parts", "tokens", "trace", "view")

    def __init__(self, opened: OpenedRequest) -> None:
        self.opened = opened
        self.trace = _copy(opened.trace)
        self.parts: list[str] = []
        self.tokens: list[TokenEvent] = []
        self.first_token = 0
        self.view: RequestView | None = None
        """Set once it is closed."""

    def look(self) -> RequestView:
        """What a reader may keep."""
        if self.view is not None:
            return self.view
        self.parts = ["".join(self.parts)]
        return self._view(_copy(self.trace), self.parts[0], closed=False)

    def close(self, trace: RequestTrace, text: str) -> None:
        """The request ended: ``trace`` and ``text`` are final."""
        self.trace, self.parts = trace, [text]
        self.view = self._view(trace, text, closed=True)

    def forget_tokens(self, count: int) -> None:
        """Let the oldest ``count`` token events go."""
        del self.tokens[:count]
        self.first_token += count
        if self.view is not None:
            self.view = self._view(self.view.trace, self.view.text, closed=True)

    def _view(self, trace: RequestTrace, text: str, *, closed: bool) -> RequestView:
        return RequestView(
            trace=trace,
            prompt=self.opened.prompt,
            prompt_token_ids=self.opened.prompt_token_ids,
            text=text,
            tokens=tuple(self.tokens),
            tokens_left_out=self.first_token,
            closed=closed,
        )


class TraceLog:
    """The mirror of one lab, fed by ``apply`` and read through ``snapshot`` and its finer-grained companions.

    All methods are thread-safe. ``version`` grows with every change and never falls back, not even when an engine restart
    (a new ``generation``) empties the log.

    Args:
        max_steps, max_units, max_finished, max_tokens, max_times: bounds, see the constants of this module.
        archive: records everything and gives older steps back; None: what is let go is gone.
    """

    def __init__(
        self,
        *,
        max_steps: int = MAX_STEPS,
        max_units: int = MAX_UNITS,
        max_finished: int = MAX_FINISHED,
        max_tokens: int = MAX_TOKENS,
        max_times: int = MAX_TIMES,
        archive: Archive | None = None,
    ) -> None:
        self.archive = archive
        self.max_steps, self.max_units = max_steps, max_units
        self.max_finished, self.max_tokens, self.max_times = max_finished, max_tokens, max_times
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = 0
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self._info: Any = None
        self._empty(generation=0)

    def _empty(self, generation: int) -> None:
        self._generation = generation
        self._steps: list[StepTrace] = []
        self._gone = 0
        """Entries at the start of ``_steps`` that are let go already and await deletion."""
        self._units = 0
        self._steps_let_go = 0
        self._entries: dict[str, _Entry] = {}
        self._live: dict[str, _Entry] = {}
        self._finished: deque[str] = deque()
        self._with_tokens: deque[str] = deque()
        self._num_tokens = 0
        self._num_times = 0
        self._finished_let_go = 0
        self._waiting: list[str] = []
        self._running: list[str] = []
        self._stats = EngineStats()
        self._traffic: Any = None
        self._now = 0.0

    # -- writing -------------------------------------------------------------------------------------------------------

    def apply(self, update: Update) -> int:
        """Take in news of the lab; wake those who wait for it. Returns the new version.

        News of an older generation than the log's are ignored: the engine they speak of is gone.
        """
        with self._lock:
            if update.generation < self._generation:
                return self._version
            if update.generation > self._generation:
                self._empty(update.generation)
            if update.info is not None:
                self._info = update.info
            if self.archive is not None:
                self.archive.apply(update)
            for opened in update.opened:
                self._open(opened)
            for step in update.steps:
                self._step(step)
            for token in update.tokens:
                self._token(token)
            for closed in update.closed:
                self._close(closed)
            traffic = getattr(update, "traffic", None)
            if traffic is not None:
                self._traffic = traffic
            if update.stats is not None:
                self._stats = update.stats
                self._reconcile()
            self._now = max(self._now, update.now)
            self._let_go()
            return self._bump(update.notice)

    def end_all(self, error: str) -> int:
        """The engine is gone: live requests end with reason "error", gauges fall to zero. Returns the version."""
        with self._lock:
            self._end_live("error", error)
            self._stats = msgspec.structs.replace(
                self._stats, running=0, waiting=0, blocks_referenced=0, kv_reserved_tokens=0, kv_stored_tokens=0
            )
            return self._bump(error)

    def _bump(self, notice: str = "") -> int:
        self._version += 1
        if notice:
            self._notices.append(Notice(self._version, notice))
        self._changed.notify_all()
        return self._version

    def _open(self, opened: OpenedRequest) -> None:
        request_id = opened.trace.request_id
        if request_id in self._entries:
            return
        self._entries[request_id] = self._live[request_id] = _Entry(opened)
        if not opened.trace.parent_id:
            self._enqueue(request_id)

    def _step(self, step: StepTrace) -> None:
        if self._steps and step.index <= self._steps[-1].index:
            return
        if step.keyframe is not None:
            self._resync(step.keyframe.waiting, step.keyframe.running)
        for event in step.events:
            self._move(event.op, event.request_id, event.other)
        for row in step.scheduled:
            entry = self._live.get(row.request_id)
            if entry is not None:
                self._row(entry.trace, row, step)
        for preemption in step.preemptions:
            entry = self._live.get(preemption.request_id)
            if entry is not None:
                entry.trace.preemptions += 1
        for event in step.events_after:
            self._move(event.op, event.request_id, event.other)
        self._steps.append(step)
        self._units += step_units(step)

    @staticmethod
    def _row(trace: RequestTrace, row: Scheduled, step: StepTrace) -> None:
        """What the step did for one live request."""
        if trace.first_scheduled < 0:
            trace.first_scheduled = step.start
            trace.cached_tokens = row.cached
        trace.recomputed_tokens += row.recomputed
        trace.slow = trace.slow or step.slow
        if row.sampled >= 0:
            trace.token_times.append(step.end)
            trace.token_steps.append(step.index)

    def _token(self, token: TokenEvent) -> None:
        entry = self._live.get(token.request_id)
        if entry is None:
            return
        if not entry.tokens:
            self._with_tokens.append(token.request_id)
        entry.parts.append(token.text)
        entry.tokens.append(token)
        self._num_tokens += 1

    def _close(self, closed: ClosedRequest) -> None:
        request_id = closed.trace.request_id
        entry = self._live.pop(request_id, None)
        if entry is None:
            return
        self._dequeue(request_id)
        entry.close(closed.trace, closed.text)
        self._finished.append(request_id)
        self._num_times += len(closed.trace.token_times)

    def _end_live(self, reason: Any, error: str) -> None:
        for entry in list(self._live.values()):
            trace = msgspec.structs.replace(_copy(entry.trace), finish_reason=reason, error=error, finished=self._now)
            self._close(ClosedRequest(trace, "".join(entry.parts)))

    def _reconcile(self) -> None:
        """An idle engine has no live request: the end of one that we still hold was left out on the way."""
        if self._live and self._stats.running == 0 and self._stats.waiting == 0:
            self._end_live("error", "how this request ended was left out: the viewer was too slow to read everything")

    # -- queues --------------------------------------------------------------------------------------------------------

    def _urgency(self, request_id: str) -> tuple[int, int]:
        """What the engine's waiting queue is sorted by: a preempted request therefore stands before later arrivals."""
        trace = self._entries[request_id].trace
        by_priority = self._info is not None and self._info.config.scheduling_policy == "priority"
        return (trace.priority if by_priority else 0, trace.number)

    def _enqueue(self, request_id: str) -> None:
        insort(self._waiting, request_id, key=self._urgency)

    def _dequeue(self, request_id: str) -> None:
        for queue in (self._waiting, self._running):
            if request_id in queue:
                queue.remove(request_id)

    def _move(self, op: str, request_id: str, other: str) -> None:
        """One queue event; whatever concerns requests that are gone changes nothing."""
        if request_id not in self._live or op not in ("admit", "fork", "preempt", "finish"):
            return
        self._dequeue(request_id)
        if op == "admit":
            self._running.append(request_id)
        elif op == "fork":
            self._running.insert(self._place_of_fork(other), request_id)
        elif op == "preempt":
            self._enqueue(request_id)

    def _place_of_fork(self, parent: str) -> int:
        """Behind its parent and the samples forked before it."""
        if parent not in self._running:
            return len(self._running)
        place = self._running.index(parent) + 1
        while place < len(self._running) and self._entries[self._running[place]].trace.parent_id == parent:
            place += 1
        return place

    def _resync(self, waiting: Sequence[str], running: Sequence[str]) -> None:
        """Take the queues of a keyframe; requests that came after it keep their place."""
        known = {*waiting, *running}
        later = [request_id for request_id in self._waiting if request_id not in known]
        self._running = [request_id for request_id in running if request_id in self._live]
        self._waiting = [request_id for request_id in waiting if request_id in self._live]
        for request_id in later:
            self._enqueue(request_id)

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        self._let_steps_go()
        while self._finished and (len(self._finished) > self.max_finished or self._num_times > self.max_times):
            entry = self._entries.pop(self._finished.popleft())
            self._num_times -= len(entry.trace.token_times)
            self._num_tokens -= len(entry.tokens)
            self._finished_let_go += 1
        while self._num_tokens > self.max_tokens and self._with_tokens:
            self._let_tokens_go()

    def _let_steps_go(self) -> None:
        steps = self._steps
        while len(steps) - self._gone > self.max_steps or (self._units > self.max_units and len(steps) - self._gone > 1):
            self._units -= step_units(steps[self._gone])
            self._gone += 1
            self._steps_let_go += 1
        if self._gone > _SLACK + len(steps) // 8:
            del steps[: self._gone]
            self._gone = 0

    def _let_tokens_go(self) -> None:
        """Let the token events of the oldest request go; of a live one only its older half."""
        request_id = self._with_tokens.popleft()
        entry = self._entries.get(request_id)
        if entry is None or not entry.tokens:
            return
        count = len(entry.tokens) if entry.view is not None else max(1, len(entry.tokens) // 2)
        entry.forget_tokens(count)
        self._num_tokens -= count
        if entry.tokens:
            self._with_tokens.append(request_id)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._version

    @property
    def generation(self) -> int:
        """The engine restart that the log speaks of."""
        return self._generation

    @property
    def info(self) -> Any:
        """The lab's settings as last heard, or None."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges as last heard."""
        return self._stats

    @property
    def traffic(self) -> Any:
        """How the newest workload of this generation stands (``TrafficReport``), or None."""
        return self._traffic

    @property
    def now(self) -> float:
        """The engine's clock as last heard, seconds."""
        return self._now

    @property
    def first_index(self) -> int:
        """Index of the oldest step that can be shown; equals ``next_index`` when there is none."""
        with self._lock:
            kept = self._first_kept()
            if self.archive is not None and self._steps_let_go:
                recorded = self.archive.first_index
                return kept if recorded is None else min(kept, recorded)
            return kept

    def _first_kept(self) -> int:
        return self._steps[self._gone].index if len(self._steps) > self._gone else 0

    @property
    def next_index(self) -> int:
        """Index after the newest step."""
        with self._lock:
            return self._steps[-1].index + 1 if self._steps else 0

    @property
    def steps_let_go(self) -> int:
        """Steps of this generation that were kept once and are too old now."""
        return self._steps_let_go

    @property
    def finished_let_go(self) -> int:
        """Finished requests of this generation that were kept once and are too old now."""
        return self._finished_let_go

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    def step(self, index: int) -> StepTrace | None:
        """The step of this index, or None when it is not kept (too old, left out, or yet to come)."""
        with self._lock:
            found = self.steps(index, index)
            return found[0] if found else None

    def steps(self, first: int | None = None, last: int | None = None) -> list[StepTrace]:
        """The steps with ``first <= index <= last`` that can be shown, oldest first; ``last`` None: up to the newest.

        What is no longer in memory comes from the archive; ``first`` None: only what is in memory.
        """
        with self._lock:
            first = self._first_kept() if first is None else first
            end = len(self._steps) if last is None else self._place(last + 1)
            kept = self._steps[self._place(first) : end]
            before = self._first_kept() - 1 if last is None else min(last, self._first_kept() - 1)
            if self.archive is not None and self._steps_let_go and first <= before:
                return [*self.archive.steps(first, before), *kept]
            return kept

    def _place(self, index: int) -> int:
        return bisect_left(self._steps, index, lo=self._gone, key=lambda step: step.index)

    def request(self, request_id: str) -> RequestView | None:
        """One request, or None when the log doesn't know it (any more)."""
        with self._lock:
            entry = self._entries.get(request_id)
            return entry.look() if entry is not None else None

    def traces(self, *, live: bool = True) -> list[RequestTrace]:
        """Request traces in order of arrival: the finished ones and, if wanted, the live ones as they stand now."""
        with self._lock:
            found = [
                _copy(e.trace) if e.view is None else e.trace for e in self._entries.values() if live or e.view is not None
            ]
            return sorted(found, key=lambda trace: trace.number)

    def snapshot(self, last_steps: int = 64, max_finished: int = 64, upto: int | None = None) -> LogSnapshot:
        """Everything at one moment: the newest ``last_steps`` steps, all live and the newest ``max_finished`` requests.

        With ``upto`` the finished requests are those that a look back to that step needs (``present_at``); they are still
        shown as they are now (``engine.observe.runlog.view_at`` shows one as it was).
        """
        with self._lock:
            recent = self._finished_near(upto, max_finished)
            entries = [*recent, *self._live.values()]
            views = sorted((entry.look() for entry in entries), key=lambda view: view.trace.number)
            start = max(self._gone, len(self._steps) - last_steps) if last_steps > 0 else len(self._steps)
            return LogSnapshot(
                version=self._version,
                generation=self._generation,
                info=self._info,
                stats=self._stats,
                now=self._now,
                first_index=self.first_index,
                next_index=self.next_index,
                steps=tuple(self._steps[start:]),
                requests=tuple(views),
                waiting=tuple(self._waiting),
                running=tuple(self._running),
                notices=tuple(self._notices),
            )

    def _finished_near(self, upto: int | None, most: int) -> list[_Entry]:
        step = self.step(upto) if upto is not None else None
        if step is None:
            return [self._entries[self._finished[-i]] for i in range(min(most, len(self._finished)), 0, -1)]
        finished = {request_id: self._entries[request_id] for request_id in self._finished}
        chosen = present_at({name: entry.trace for name, entry in finished.items()}, step.end, most)
        return [finished[request_id] for request_id in chosen]

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Block until the log is newer than ``version`` or ``timeout`` seconds have passed; returns its version."""
        with self._lock:
            self._changed.wait_for(lambda: self._version > version, timeout)
            return self._version

    def wait_until(self, condition: Callable[[TraceLog], bool], timeout: float | None = None) -> bool:
        """Block until ``condition(log)`` holds, looking at every change; False after ``timeout`` seconds without."""
        with self._lock:
            return self._changed.wait_for(lambda: condition(self), timeout)


def present_at(finished: Mapping[str, RequestTrace], moment: float, most: int) -> list[str]:
    """Which finished requests a look back to engine time ``moment`` needs: those under way then, and the last ended before.

    Args:
        finished: traces by id, in the order in which they ended.
        moment: seconds of the engine's clock.
        most: how many at most.
    """
    arrived = [(name, trace) for name, trace in finished.items() if trace.queued <= moment]
    under_way = [name for name, trace in arrived if trace.finished > moment]
    ended = [name for name, trace in arrived if trace.finished <= moment]
    room = max(0, most - len(under_way))
    return [*(ended[-room:] if room else []), *under_way[:most]]


def _copy(trace: RequestTrace) -> RequestTrace:
    """A trace whose lists nobody else writes to."""
    return msgspec.structs.replace(trace, token_times=list(trace.token_times), token_steps=list(trace.token_steps))
