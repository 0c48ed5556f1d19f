"""What the host has to say and has not sent yet. Bounded: when the client is slow, news of a lab merge and old steps go.

::

    main loop ── post ──▶ [ update of lab 1 │ reply 7 │ host state │ update of lab 2 ] ── take ──▶ writer thread
                              ▲ later news of lab 1 join the update that already waits

A reply never overtakes news posted before it, so a client that got its reply has also seen what the command brought about.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.trace import StepTrace
from engine.observe.log import step_units
from engine.serve.protocol import GpuNews, HostState, LabUpdate, Message, Reply

T = TypeVar("T")

MAX_REPLIES = 256
"""Unsent replies above which no further command is read."""
MAX_NOTICE = 2_000
"""Characters of a merged notice."""


def token_units(token: TokenEvent) -> int:
    """The payload of a token event in numbers (see ``step_units``)."""
    units = 10 + len(token.text) // 2
    return units + sum(4 + len(text) // 2 for _, text, _ in token.top) if token.top else units


def opened_units(opened: OpenedRequest) -> int:
    """The payload of an opening in numbers."""
    return 96 + len(opened.prompt) // 2 + len(opened.prompt_token_ids)


def closed_units(closed: ClosedRequest) -> int:
    """The payload of a closing in numbers."""
    return 96 + len(closed.text) // 2 + 2 * len(closed.trace.token_times)


class _Pending:
    """The unsent news of one generation of one lab."""

    __slots__ = (
        "closed",
        "ends_left_out",
        "info",
        "lab_generation",
        "left_out",
        "notices",
        "now",
        "opened",
        "stats",
        "steps",
        "tokens",
        "traffic",
        "units",
    )

    def __init__(self, update: LabUpdate) -> None:
        self.lab_generation = (update.lab, update.generation)
        self.opened: deque[OpenedRequest] = deque()
        self.steps: deque[StepTrace] = deque()
        self.tokens: deque[TokenEvent] = deque()
        self.closed: deque[ClosedRequest] = deque()
        self.units = 0
        self.left_out = 0
        self.ends_left_out = 0
        self.notices: list[str] = []
        self.info, self.stats, self.now = update.info, update.stats, update.now
        self.traffic = update.traffic

    def add(self, update: LabUpdate, limit: int) -> None:
        """Take in later news; let the oldest payload go where ``limit`` units are exceeded."""
        self.info = update.info or self.info
        self.stats = update.stats or self.stats
        self.traffic = update.traffic or self.traffic
        self.now = max(self.now, update.now)
        if update.notice:
            self.notices.append(update.notice[:MAX_NOTICE])
            del self.notices[:-8]
        self._extend(self.steps, update.steps, step_units)
        self._extend(self.tokens, update.tokens, token_units)
        self._extend(self.opened, update.opened, opened_units)
        self._extend(self.closed, update.closed, closed_units)
        if self.units > limit:
            self._shrink(limit)

    def _extend(self, mine: deque[T], more: list[T], weigh: Callable[[T], int]) -> None:
        mine.extend(more)
        self.units += sum(weigh(item) for item in more)

    def _shrink(self, limit: int) -> None:
        """Oldest steps go first, with their tokens; then long prompts; then the oldest requests that are finished.

        Leaves some air below the limit, so that it costs O(1) an update on average.
        """
        target = limit * 4 // 5
        while self.units > target and (self.steps or self.tokens):
            if self.steps:
                self.units -= step_units(self.steps.popleft())
                self.left_out += 1
            while self.tokens and (not self.steps or self.tokens[0].step < self.steps[0].index):
                self.units -= token_units(self.tokens.popleft())
        if self.units > target:
            self.units -= sum(map(opened_units, self.opened))
            self.opened = deque(_without_prompt(opened) for opened in self.opened)
            self.units += sum(map(opened_units, self.opened))
        if self.units > target:
            self._leave_requests_out(target)

    def _leave_requests_out(self, target: int) -> None:
        """Finished requests go whole: one whose opening still waits here was never heard of."""
        openings = {opened.trace.request_id: opened_units(opened) for opened in self.opened}
        gone: set[str] = set()
        while self.closed and self.units > target:
            closed = self.closed.popleft()
            self.units -= closed_units(closed) + openings.pop(closed.trace.request_id, 0)
            gone.add(closed.trace.request_id)
        self.ends_left_out += len(gone)
        self.opened = deque(opened for opened in self.opened if opened.trace.request_id not in gone)

    def message(self) -> LabUpdate:
        """The update to send."""
        notices = list(dict.fromkeys(self.notices))
        if self.left_out:
            notices.append(f"{self.left_out:,} older steps were left out: they came faster than they could be read")
        if self.ends_left_out:
            notices.append(
                f"{self.ends_left_out:,} finished requests were left out: they came faster than they could be read"
            )
        lab, generation = self.lab_generation
        return LabUpdate(
            lab=lab,
            generation=generation,
            info=self.info,
            opened=list(self.opened),
            steps=list(self.steps),
            tokens=list(self.tokens),
            closed=list(self.closed),
            stats=self.stats,
            traffic=self.traffic,
            now=self.now,
            notice=" · ".join(notices)[-MAX_NOTICE:],
        )


def _without_prompt(opened: OpenedRequest) -> OpenedRequest:
    return OpenedRequest(opened.trace, opened.prompt[:80], ())


class Outbox:
    """The queue between the threads that speak and the one that writes. Thread-safe.

    Args:
        backlog_units: payload that the unsent news of one lab may hold; see ``HostOptions.backlog_units``.
    """

    def __init__(self, backlog_units: int) -> None:
        self._limit = backlog_units
        self._ready = threading.Condition()
        self._queue: deque[Reply | HostState | GpuNews | _Pending] = deque()
        self._pending: dict[str, list[_Pending]] = {}
        self._replies = 0
        self._writing = False

    def post(self, message: Reply | HostState | GpuNews) -> None:
        """Queue a reply, or news of the host or the GPU (which take the place of unsent ones)."""
        with self._ready:
            if isinstance(message, Reply):
                self._replies += 1
            else:
                for place, other in enumerate(self._queue):
                    if type(other) is type(message):
                        self._queue[place] = message
                        return
            self._queue.append(message)
            self._ready.notify_all()

    def post_update(self, update: LabUpdate) -> None:
        """Queue news of a lab, or merge them into its unsent ones of the same generation."""
        with self._ready:
            mine = self._pending.setdefault(update.lab, [])
            if mine and mine[-1].lab_generation == (update.lab, update.generation):
                mine[-1].add(update, self._limit)
                return
            pending = _Pending(update)
            pending.add(update, self._limit)
            mine.append(pending)
            self._queue.append(pending)
            if len(mine) > 3:
                self._queue.remove(mine.pop(0))
            self._ready.notify_all()

    def take(self) -> Message:
        """Wait for the next message and remove it; the writer calls ``done`` once it is sent."""
        with self._ready:
            self._ready.wait_for(lambda: self._queue)
            item = self._queue.popleft()
            self._writing = True
            if isinstance(item, _Pending):
                mine = self._pending[item.lab_generation[0]]
                mine.remove(item)
                if not mine:
                    del self._pending[item.lab_generation[0]]
            elif isinstance(item, Reply):
                self._replies -= 1
            self._ready.notify_all()
        return item.message() if isinstance(item, _Pending) else item

    def done(self) -> None:
        """The message taken last is sent."""
        with self._ready:
            self._writing = False
            self._ready.notify_all()

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until fewer than ``MAX_REPLIES`` replies are unsent; False after ``timeout`` seconds."""
        with self._ready:
            return self._ready.wait_for(lambda: self._replies < MAX_REPLIES, timeout)

    def drain(self, timeout: float) -> bool:
        """Wait until everything is sent; False after ``timeout`` seconds."""
        with self._ready:
            return self._ready.wait_for(lambda: not self._queue and not self._writing, timeout)
