"""Sends a workload's requests when they are due, beside any engine loop; and runs one offline to its end.

The driver never waits for the engine before it decides that a request is due, and hands the moment at which it *was* due
to the engine as its arrival. So a slow engine shows as long latencies and a growing queue, never as fewer samples
(coordinated omission)::

    due      │0    │0.1  │0.2                 offered:  what was asked for
    engine   ├── step of 1 s ──┼── step …     achieved: what was answered
    arrival   0     0.1   0.2                 latency of the third: from 0.2 on

Only a closed loop follows the answers, by its definition: it has no offered rate, and says so.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from engine.core.clock import Clock, VirtualClock
from engine.core.engine import Engine, RequestRefused
from engine.core.trace import RequestTrace, StepTrace
from engine.workload.arrivals import ArrivalStream
from engine.workload.check import WorkloadError
from engine.workload.prompts import Encode, PromptMaker
from engine.workload.spec import (
    MAX_REQUESTS,
    PlannedRequest,
    RequestSource,
    WorkloadSpec,
    arrival_stream,
    listed,
    whole_step,
)
from engine.workload.traffic import TrafficReport

MAX_AT_ONCE = 1024
"""Most requests of one ``due``. The rest comes with the next call, its due times unchanged."""
MAX_SLEEP = 0.02
"""Longest sleep of an idle offline run, seconds: how soon it hears of a cancel."""
_ROUNDING = 1e-9
"""A request counts as due this share of the time before its moment: sums of floating-point times are not exact."""


class DueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to hand to the engine now."""

    request_id: str
    arrival: float
    """When it was due, seconds of the engine's clock: the engine's ``arrival``."""
    request: PlannedRequest


class Driver:
    """Says which requests of a workload are due now. Cheap to ask at every step: O(requests due).

    Not thread-safe: the thread that steps the engine asks it.

    Args:
        spec: the workload.
        start: engine time at which it begins, seconds; None: at the first ``due``.
        start_step: number of the step that counts as step 0; None: the one of the first ``due``.
        id_prefix: put before each request's name to make ids that are new to the engine (it may not end a name: use '-').
    """

    def __init__(
        self, spec: WorkloadSpec, *, start: float | None = None, start_step: int | None = None, id_prefix: str = ""
    ) -> None:
        self.spec = spec
        self._start = start
        self._start_step = start_step
        self._id_prefix = id_prefix
        self._steps = spec.arrivals.unit == "steps"
        self._skipped = 0
        self._ended = False
        self._ready: list[PlannedRequest] = []
        self._list: list[PlannedRequest] | None = None
        self._place = 0
        self._stream: ArrivalStream | None = None
        self._source: RequestSource | None = None
        self._users: list[float] = []
        if spec.kind != "generated":
            self._list = listed(spec)
        else:
            self._source = RequestSource(spec)
            if spec.closed:
                self._users = [0.0] * spec.arrivals.in_flight
            else:
                self._stream = arrival_stream(spec)
        self._in_flight: set[str] = set()
        self._sent = self._completed = self._failed = 0
        self._first_due = self._last_due = self._last_completion = math.nan

    # -- asking -------------------------------------------------------------------------------------------------------------

    def due(self, now: float, step: int, finished: Iterable[str] = (), *, idle: bool = False) -> list[DueRequest]:
        """The requests to send before the next step, each of them once.

        Args:
            now: engine time, seconds.
            step: number of the next step.
            finished: ids that finished since the last call and were not reported to ``finished``.
            idle: the engine has nothing to do. With arrivals in steps the wait is then skipped, for no step would pass it.
        """
        if self._start is None:
            self._start = now
        if self._start_step is None:
            self._start_step = step
        for request_id in finished:
            self.finished(request_id, now, step)
        self._check_stop(now, step)
        moment = self._moment(now, step)
        if idle and self._steps and not self._ready and moment < self._next() < math.inf:
            self._skipped += int(self._next() - moment)
            self._check_stop(now, step)
            moment = self._moment(now, step)
        self._take(moment, MAX_AT_ONCE)
        taken, self._ready = self._ready[:MAX_AT_ONCE], self._ready[MAX_AT_ONCE:]
        return [self._send(request, now) for request in taken]

    def next_due(self) -> float | None:
        """Engine time of the next arrival; None with arrivals in steps, before the start, or when none is known.

        A host that has nothing else to do sleeps until then.
        """
        following = self._next()
        if self._steps or self._start is None or following == math.inf:
            return None
        return self._start + following

    @property
    def ended(self) -> bool:
        """Whether no more requests come (those under way may still run)."""
        return self._ended or (not self._ready and self._next() == math.inf and not self._may_follow())

    # -- telling ------------------------------------------------------------------------------------------------------------

    def finished(self, request_id: str, now: float, step: int, *, completed: bool = True) -> None:
        """A request ended: its time, and the number of the step after it. Ids of others are ignored.

        Args:
            request_id: the id that ``due`` gave.
            now: engine time of its last token, seconds.
            step: number of the next step.
            completed: False when it was aborted or failed.
        """
        if request_id not in self._in_flight:
            return
        self._in_flight.discard(request_id)
        moment = self._moment(now, step)
        if completed:
            self._completed += 1
            self._last_completion = moment
        else:
            self._failed += 1
        if self.spec.closed:
            heapq.heappush(self._users, moment + self.spec.arrivals.think)

    def refused(self, request_id: str) -> None:
        """The engine refused a request. In a closed loop its user gives up, as it would be refused for ever."""
        if request_id in self._in_flight:
            self._in_flight.discard(request_id)
            self._failed += 1

    def set_rate(self, rate: float, now: float, step: int) -> None:
        """Go on at another rate, from now; 0 switches arrivals off until the rate is raised again.

        Raises:
            WorkloadError: a closed loop or a list has no rate, or the rate is out of range.
        """
        if self._stream is None:
            kind = "a closed loop" if self.spec.closed else f"a {self.spec.kind} workload"
            raise WorkloadError(f"{kind} has no rate to change: use process='poisson', 'constant' or 'bursty'")
        if self._start is not None:
            self._check_stop(now, step)
            self._take(self._moment(now, step), MAX_REQUESTS)
        self._stream.set_rate(rate, self._moment(now, step) if self._start is not None else 0.0)

    def stop(self) -> None:
        """No more requests; those under way run on."""
        self._ended = True
        self._ready = []

    def report(self) -> TrafficReport:
        """What was due and what came of it so far."""
        span = self._last_due - self._first_due
        took = self._last_completion - self._first_due
        return TrafficReport(
            unit="steps" if self._steps else "seconds",
            closed=self.spec.closed,
            due=self._sent,
            completed=self._completed,
            failed=self._failed,
            in_flight=len(self._in_flight),
            offered_rate=(self._sent - 1) / span if span > 0 and not self.spec.closed else None,
            achieved_rate=self._completed / took if took > 0 else None,
            ended=self.ended,
        )

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _moment(self, now: float, step: int) -> float:
        """Now, in the unit of the arrivals, from the start."""
        if self._steps:
            return float(step - (self._start_step or 0) + self._skipped)
        return now - (self._start or 0.0)

    def _check_stop(self, now: float, step: int) -> None:
        """Apply the stop that is not in the arrivals' own unit."""
        stop = self.spec.stop
        if self._steps and stop.seconds is not None and now - (self._start or 0.0) >= stop.seconds:
            self._ended = True
        if not self._steps and stop.steps is not None and step - (self._start_step or 0) >= stop.steps:
            self._ended = True

    def _next(self) -> float:
        """When the next request is due, from the start; infinite when none is known."""
        if self._ended:
            return math.inf
        if self._list is not None:
            return self._list[self._place].due if self._place < len(self._list) else math.inf
        assert self._source is not None
        stop = self.spec.stop
        if stop.requests is not None and self._source.count >= stop.requests:
            return math.inf
        if self._stream is not None:
            following = self._stream.next
        else:
            following = self._users[0] if self._users else math.inf
        limit = stop.steps if self._steps else stop.seconds
        if limit is not None and following >= limit:
            return math.inf
        return whole_step(following) if self._steps else following

    def _may_follow(self) -> bool:
        """Whether something may still come although nothing is due at a known time."""
        assert self._source is not None or self._list is not None
        if self._list is not None or self._source is None:
            return False
        if self.spec.stop.requests is not None and self._source.count >= self.spec.stop.requests:
            return False
        if self.spec.closed:
            return bool(self._in_flight)
        return self._stream is not None and self._stream.rate == 0.0

    def _take(self, moment: float, most: int) -> None:
        """Collect what is due until ``moment``, until ``most`` are ready."""
        moment += _ROUNDING * max(1.0, abs(moment))
        while len(self._ready) < most and self._next() <= moment:
            if self._list is not None:
                self._ready.append(self._list[self._place])
                self._place += 1
                continue
            assert self._source is not None
            due = self._stream.pop() if self._stream is not None else heapq.heappop(self._users)
            self._ready.append(self._source.next(due))

    def _send(self, request: PlannedRequest, now: float) -> DueRequest:
        request_id = f"{self._id_prefix}{request.name}"
        self._in_flight.add(request_id)
        self._sent += 1
        if self._sent == 1:
            self._first_due = request.due
        self._last_due = request.due
        arrival = now if self._steps else min(now, (self._start or 0.0) + request.due)
        return DueRequest(request_id=request_id, arrival=arrival, request=request)


class Refusal(msgspec.Struct, frozen=True):
    """A request that the engine did not take, and why."""

    request_id: str
    reason: str


class OfflineRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left: the records of its requests in the order in which they were due, and of its steps."""

    requests: tuple[RequestTrace, ...]
    steps: tuple[StepTrace, ...]
    refused: tuple[Refusal, ...]
    report: TrafficReport
    cancelled: bool = False


def add(engine: Engine, driver: Driver, maker: PromptMaker, item: DueRequest) -> str | None:
    """Hand a due request to the engine; returns why it was refused, or None.

    Without a tokenizer prompts can't be made: ``maker`` needs one.
    """
    request = item.request
    if request.prompt is not None:
        text, ids = request.prompt, maker.ids_of(request.prompt)
    else:
        made = maker.make(request.index, request.prompt_tokens, request.prefix_tokens, request.prefix_id)
        text, ids = made.text, made.token_ids
    if ids is None:
        raise WorkloadError("a workload needs a tokenizer to run on an engine: give PromptMaker its encode")
    try:
        engine.add_request(
            list(ids),
            driver.spec.params(request.output_tokens),
            request_id=item.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            arrival=item.arrival,
            prompt=text,
        )
    except RequestRefused as error:
        driver.refused(item.request_id)
        return str(error)
    return None


def run_offline(
    engine: Engine,
    spec: WorkloadSpec,
    encode: Encode,
    *,
    id_prefix: str = "",
    on_step: Callable[[StepTrace], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> OfflineRun:
    """Run a workload on an engine until every request has ended.

    While nothing is to be done it waits for the next arrival; a virtual clock is set forward instead.

    Args:
        engine: with nothing else to do.
        spec: the workload.
        encode: text → token ids.
        id_prefix: put before the names of requests, to run twice on one engine.
        on_step: hears of each step's record.
        cancelled: asked before each step; True aborts all requests and ends the run.

    Raises:
        WorkloadError: arrivals are switched off for good, so that the run would never end.
    """
    driver = Driver(spec, start=engine.clock.now(), start_step=0, id_prefix=id_prefix)
    maker = PromptMaker(encode, seed=spec.seed)
    records: dict[str, RequestTrace | None] = {}
    steps: list[StepTrace] = []
    refused: list[Refusal] = []

    def advance() -> None:
        record = engine.step()
        steps.append(record)
        ended = [event.request_id for event in (*record.events, *record.events_after) if event.op == "finish"]
        if engine.config.async_scheduling:  # the event comes two records later, too late for users who wait for answers
            ended += [row.request_id for row in record.scheduled if engine.is_finished(row.request_id)]
        for request_id in ended:
            if request_id in records and records[request_id] is None:
                trace = records[request_id] = engine.request(request_id)
                completed = trace.finish_reason in ("stop", "length")
                driver.finished(request_id, trace.finished, len(steps), completed=completed)
        if on_step:
            on_step(record)

    stopped = False
    while True:
        if cancelled and cancelled():
            stopped = True
            driver.stop()
            engine.abort_all()
        for item in driver.due(engine.clock.now(), len(steps), idle=not engine.has_unfinished()):
            records[item.request_id] = None
            reason = add(engine, driver, maker, item)
            if reason is not None:
                refused.append(Refusal(item.request_id, reason))
                del records[item.request_id]
        if engine.has_unfinished() or engine.has_pending_events():
            advance()
        elif driver.ended:
            break
        else:
            _wait(engine.clock, driver.next_due(), steps=spec.arrivals.unit == "steps")
    return OfflineRun(
        requests=tuple(trace for trace in records.values() if trace is not None),
        steps=tuple(steps),
        refused=tuple(refused),
        report=driver.report(),
        cancelled=stopped,
    )


def _wait(clock: Clock, due: float | None, *, steps: bool) -> None:
    """Let time pass until the next arrival; a virtual clock jumps to it."""
    if due is None:
        if steps:
            return  # what was refused took no step; the next request is asked for at once
        raise WorkloadError("no request is due any more, but the workload has not ended: set a rate above 0")
    ahead = due - clock.now()
    if isinstance(clock, VirtualClock):
        while clock.now() < due:
            clock.advance(max(due - clock.now(), math.ulp(due)))
    elif ahead > 0:
        time.sleep(min(ahead, MAX_SLEEP))
