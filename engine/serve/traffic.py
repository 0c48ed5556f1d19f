"""A workload running on a lab, inside the host: requests come when they are due, between two steps."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest
from engine.workload.datafile import plain
from engine.workload.driver import Driver, add
from engine.workload.prompts import Encode, PromptMaker
from engine.workload.spec import WorkloadSpec
from engine.workload.traffic import TrafficReport


class _Clock(Protocol):
    def now(self) -> float: ...


class Traffic:
    """The driver of one workload on one engine.

    Args:
        spec: the workload, as plain data.
        encode: text → token ids.
        number: how many workloads the lab ran before; part of the request ids, so that they stay unique.

    Raises:
        WorkloadError: the workload can't be understood or can't run.
    """

    def __init__(self, spec: dict[str, Any], encode: Encode, number: int) -> None:
        self.spec = read_spec(spec)
        self._driver = Driver(self.spec, id_prefix=f"w{number}-")
        self._maker = PromptMaker(encode, seed=self.spec.seed)
        self._steps = 0
        self._refusals = 0
        self.last_refusal = ""
        """Why the newest refused request was refused."""

    def feed(self, engine: Engine) -> int:
        """Send what is due before the engine's next step; returns how many were accepted."""
        accepted = 0
        idle = not engine.has_unfinished()
        for item in self._driver.due(engine.clock.now(), self._steps, idle=idle):
            refusal = add(engine, self._driver, self._maker, item)
            if refusal is None:
                accepted += 1
            else:
                self._refusals += 1
                self.last_refusal = refusal
        return accepted

    def stepped(self) -> None:
        """A step was taken."""
        self._steps += 1

    def closed(self, event: ClosedRequest, now: float) -> None:
        """A request of the lab ended."""
        completed = event.trace.finish_reason in ("stop", "length")
        self._driver.finished(event.trace.request_id, now, self._steps + 1, completed=completed)

    def set_rate(self, rate: float, engine: Engine) -> None:
        """Go on at another rate, requests a second or a step."""
        self._driver.set_rate(rate, engine.clock.now(), self._steps)

    def stop(self) -> None:
        """No more requests; those under way run on."""
        self._driver.stop()

    @property
    def ended(self) -> bool:
        """Whether no more requests come."""
        return self._driver.ended

    def due_at(self, clock: _Clock) -> float | None:
        """When an idle engine should be fed next, ``time.monotonic`` seconds (0: at once); None: never, as it stands."""
        if self._driver.ended:
            return None
        if self.spec.arrivals.unit == "steps":
            return 0.0
        due = self._driver.next_due()
        if due is None:
            # Before the first request, or a closed loop whose users all wait for answers.
            return 0.0 if self._driver.report().due == 0 else None
        ahead = due - clock.now()
        return time.monotonic() + ahead if ahead > 0 else 0.0

    def report(self) -> TrafficReport:
        """What was due and what came of it so far."""
        return self._driver.report()


def read_spec(spec: dict[str, Any]) -> WorkloadSpec:
    """A workload from plain data.

    Raises:
        ValueError: saying which field is wrong and what to change.
    """
    try:
        return msgspec.convert(plain(spec), WorkloadSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"the workload can't be understood: {error}") from None
