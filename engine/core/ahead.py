"""Scheduling one step ahead: the device computes a step while the host schedules the next one.

Waiting for the tokens of a step before deciding the next leaves the device idle in between::

    async_scheduling=False
      host    │ schedule 0 │                │ tokens 0, schedule 1 │                │ tokens 1, schedule 2 │
      device               │▓▓▓▓ step 0 ▓▓▓▓│         idle         │▓▓▓▓ step 1 ▓▓▓▓│         idle

    async_scheduling=True                   ┌─ call of Engine.step(): returns the record of step 0
      host    │ schedule 0 │ schedule 1 │ ·· │ tokens 0 │ schedule 2 │ ·· │ tokens 1 │ schedule 3 │ ··
      device               │▓▓▓▓ step 0 ▓▓▓▓│▓▓▓▓ step 1 ▓▓▓▓▓▓│▓▓▓▓ step 2 ▓▓▓▓▓▓│▓▓▓▓ step 3 ▓▓

Which requests take part in a step and how many tokens each gets does not depend on *which* tokens the step before samples.
So a request that samples in a step in flight gets a placeholder, ``PENDING``, as its newest token; the next step computes
that position, and the device puts the token in by itself::

    token_ids   12 7 31 P      step 0 samples P, step 1 is asked to compute P's position and to sample the next
    token_ids   12 7 31 4 P    step 0 is collected: 4; step 1 samples the new P

What the host learns one step late:

* **An end-of-sequence token, a stop token or a stop string.** The next step already computes a row for the request: work in
  vain (``EngineStats.tokens_wasted``). Its token is thrown away. Ends by ``max_tokens`` or ``max_model_len`` are known
  beforehand, and no row is scheduled beyond them.
* **NaN.** Blocks that steps in flight write are zeroed before their reuse, and only what collected steps computed is offered
  to others by the prefix cache, so never a block that holds a placeholder.

The order of what happens is: schedule 0 │ schedule 1 │ tokens 0, schedule 2 │ tokens 1, schedule 3 │ … The trace keeps it:
what the tokens of step 0 bring about is among the ``events`` of step 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from engine.core.request import Request, Status
from engine.core.runner import PENDING, AsyncRunner, Runner, StepBatch, StepResult, Work
from engine.core.scheduler import Plan, Scheduler
from engine.core.trace import Event, Keyframe


@dataclass(slots=True)
class Flight:
    """A step from its scheduling until its tokens are known, with what its record will say."""

    index: int
    plan: Plan
    start: float
    keyframe: Keyframe | None
    kv_used: int
    kv_cached: int
    running: int
    waiting: int
    seats: int
    wait_time: float
    slow: bool
    scheduled: float = 0.0
    """When the schedule was made."""
    events: list[Event] = field(default_factory=list)
    handle: object = None
    """What ``submit`` returned."""
    failure: str = ""
    """Why the step failed as a whole, if it did."""


class AheadScheduler(Scheduler):
    """Continuous batching where the newest token of a request may be a placeholder."""

    def _wanted(self, request: Request, budget: int) -> int:
        """0 for a request that ends with its pending token.

        ``max_tokens`` is the limit to look at: no request is accepted whose ``max_tokens`` exceeds ``max_model_len``.
        """
        if request.token_ids[-1] == PENDING and request.num_output_tokens >= request.max_tokens:
            return 0
        return super()._wanted(request, budget)


def concerned(work: Work) -> tuple[Request, ...]:
    """Those for whom a row is computed: the requests that sample from it, else the one whose prompt it is part of."""
    return work.samples or ((work.request,) if work.request else ())


def take_off(flight: Flight) -> None:
    """The step is on its way: note what it computes, and a placeholder for each token that it samples."""
    for work in flight.plan.work:
        for request in concerned(work):
            request.in_flight += len(work.token_ids)
        if not flight.failure:
            for request in work.samples:
                request.token_ids.append(PENDING)


def in_vain(plan: Plan) -> int:
    """Tokens that the step computed for requests which had ended by the time it was collected."""
    ended = [work for work in plan.work if work.request and work.request.status is Status.FINISHED]
    return sum(len(work.token_ids) for work in ended if all(r.status is Status.FINISHED for r in concerned(work)))


class OneByOne:
    """Drives a runner that has nothing but ``execute`` as if it could be asked for steps ahead.

    A step is computed when it is collected, so nothing overlaps and each token comes as early as without
    ``async_scheduling``. That is right where host and device are the same processor. The runner sees each request as it was
    when the step was submitted, with all tokens known.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampled: dict[Request, int] = {}
        """Tokens of the step computed last."""
        self._scrub: list[int] = []
        """Blocks that a failed step may not have zeroed."""

    def submit(self, batch: StepBatch) -> StepBatch:
        """Keep the step, with the block tables as they are now."""
        for work in batch.work:
            work.block_table = list(work.block_table)
        return batch

    def collect(self, batch: StepBatch) -> StepResult:
        """Compute the step now."""
        batch.scrub[:0] = self._scrub
        later = [put for work in batch.work for put in self._as_submitted(work)]
        try:
            result = self._runner.execute(batch)
            requests = [request for work in batch.work for request in work.samples]
            self._sampled, self._scrub = dict(zip(requests, result.tokens, strict=True)), []
            return result
        except Exception:
            self._sampled, self._scrub = {}, batch.scrub
            raise
        finally:
            for request, place, tokens in later:
                request.token_ids[place:] = tokens

    def _as_submitted(self, work: Work) -> list[tuple[Request, int, list[int]]]:
        """Put in the pending token, and take away what came after it; returns (request, place, tokens) to put back."""
        pending = work.token_ids[-1:] == [PENDING]
        known = [self._sampled.get(work.request, 0)] if work.request and pending else []
        work.token_ids[len(work.token_ids) - len(known) :] = known
        later = []
        for request in concerned(work):
            if work.samples:
                place = work.context + len(work.token_ids) - len(known)
            else:  # a part of a prompt, whose last part may be submitted by now
                place = request.num_tokens - (request.token_ids[-1] == PENDING)
            later.append((request, place, request.token_ids[place:]))
            request.token_ids[place:] = known
        return later


def async_runner(runner: Runner) -> AsyncRunner:
    """The runner itself if it can be asked for steps ahead, else driven one by one.

    A runner whose ``asynchronous`` is False computes in ``submit`` (a CPU): asking ahead would only make each token wait
    for the next step.
    """
    if getattr(runner, "asynchronous", True) and hasattr(runner, "submit") and hasattr(runner, "collect"):
        return cast(AsyncRunner, runner)
    return OneByOne(runner)
