"""What a run shows, by counting: measures over its records, and claims about them.

No measure is a time, so a claim holds on a slow laptop and on a fast GPU alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from engine.core.trace import RequestTrace, Scheduled, StepTrace
from engine.workload.check import WorkloadError, choice, number


class Run(msgspec.Struct, frozen=True):
    """The records that measures count over, of one run on one engine."""

    requests: Sequence[RequestTrace]
    steps: Sequence[StepTrace]

    def named(self, name: str) -> RequestTrace:
        """The request of this name; an id prefix that ends in '-' is not part of the name.

        Raises:
            WorkloadError: there is none.
        """
        for request in self.requests:
            if request.request_id.rpartition("-")[2] == name:
                return request
        raise WorkloadError(f"request={name!r}: the run has no request of this name")

    def rows(self, name: str) -> list[tuple[StepTrace, Scheduled]]:
        """The steps of one request, with its row in each; padding is left out."""
        request_id = self.named(name).request_id
        found: list[tuple[StepTrace, Scheduled]] = []
        for step in self.steps:
            found.extend((step, row) for row in step.scheduled if row.request_id == request_id and row.kind != "padding")
        return found


def _steps(run: Run, name: str) -> float:
    if name:
        return len({step.index for step, _ in run.rows(name)})
    return sum(1 for step in run.steps if step.scheduled)


def _events(run: Run, op: str) -> Iterable[int]:
    for step in run.steps:
        for event in (*step.events, *step.events_after):
            if event.op == op:
                yield len(event.blocks)


def _preemptions(run: Run, name: str) -> float:
    return run.named(name).preemptions if name else sum(len(step.preemptions) for step in run.steps)


def _tokens_lost(run: Run, name: str) -> float:
    return sum(
        p.tokens_lost
        for step in run.steps
        for p in step.preemptions
        if not name or p.request_id == run.named(name).request_id
    )


def _cached_tokens(run: Run, name: str) -> float:
    return run.named(name).cached_tokens if name else sum(request.cached_tokens for request in run.requests)


def _cached_percent(run: Run, name: str) -> float:
    chosen = [run.named(name)] if name else run.requests
    prompts = sum(request.prompt_tokens for request in chosen)
    return 100.0 * sum(request.cached_tokens for request in chosen) / prompts if prompts else 0.0


def _padding(run: Run, name: str) -> Iterable[Scheduled]:
    wanted = run.named(name).request_id if name else None
    return (r for step in run.steps for r in step.scheduled if r.kind == "padding" and wanted in (None, r.request_id))


def _computed(run: Run, name: str) -> float:
    if name:
        return sum(row.num_tokens for _, row in run.rows(name))
    return sum(row.num_tokens for step in run.steps for row in step.scheduled if row.kind != "padding")


def _recomputed(run: Run, name: str) -> float:
    return sum(request.recomputed_tokens for request in ([run.named(name)] if name else run.requests))


def _for_token(which: int) -> Callable[[Run, str], float]:
    """Tokens computed between a request's previous output token (or its arrival) and this one; 0 is the first."""

    def measure(run: Run, name: str) -> float:
        steps = run.named(name).token_steps
        if len(steps) <= which:
            raise WorkloadError(f"request={name!r} has {len(steps)} output tokens, too few for this measure")
        after = steps[which - 1] if which else -1
        return sum(row.num_tokens for step, row in run.rows(name) if after < step.index <= steps[which])

    return measure


def _prompt_rows(run: Run, name: str) -> list[tuple[StepTrace, Scheduled]]:
    prompt = run.named(name).prompt_tokens
    return [(step, row) for step, row in run.rows(name) if row.context < prompt and row.kind != "fork"]


def _chunks(run: Run, name: str) -> float:
    return len(_prompt_rows(run, name))


def _beside(run: Run, name: str) -> float:
    """Steps that compute prompt tokens of the request and decode another one."""
    own = run.named(name).request_id
    return sum(
        1 for step, _ in _prompt_rows(run, name) if any(r.kind == "decode" and r.request_id != own for r in step.scheduled)
    )


def _largest_step(run: Run, name: str) -> float:
    steps = [step for step, _ in run.rows(name)] if name else run.steps
    return max((step.num_tokens for step in steps), default=0)


def _joins(run: Run, name: str) -> float:
    """Requests admitted into a batch in which another request was decoding."""
    wanted = run.named(name).request_id if name else None
    count = 0
    for step in run.steps:
        if any(row.kind in ("decode", "padding") and row.context > 0 for row in step.scheduled):
            count += sum(1 for event in step.events if event.op == "admit" and wanted in (None, event.request_id))
    return count


def _blocked(reason: str) -> Callable[[Run, str], float]:
    def measure(run: Run, name: str) -> float:
        wanted = run.named(name).request_id if name else None
        return sum(
            1 for step in run.steps
            if step.blocked and step.blocked.reason == reason and wanted in (None, step.blocked.request_id)
        )  # fmt: skip

    return measure


def _wait_steps(run: Run, name: str) -> float:
    """Steps between entering the queue and first being scheduled, the latter not included."""
    request_id = run.named(name).request_id
    queued = next(
        (i for i, s in enumerate(run.steps) if any(_is_queue(e, request_id) for e in (*s.events, *s.events_after))), None
    )
    first = next((i for i, s in enumerate(run.steps) if any(row.request_id == request_id for row in s.scheduled)), None)
    if queued is None or first is None:
        raise WorkloadError(f"request={name!r} was never scheduled, so its wait can't be counted")
    return first - queued


def _is_queue(event: object, request_id: str) -> bool:
    return getattr(event, "op", "") == "queue" and getattr(event, "request_id", "") == request_id


def _peak(run: Run, field: str) -> float:
    return max((getattr(step, field) for step in run.steps), default=0)


class Measure(msgspec.Struct, frozen=True):
    """Something to count. ``request``: is it about one request ('needed'), can it be ('optional'), or never ('no')."""

    text: str
    count: Callable[[Run, str], float]
    request: Literal["no", "optional", "needed"] = "optional"


MEASURES: dict[str, Measure] = {
    "steps": Measure("steps with work", _steps),
    "requests_completed": Measure(
        "requests that completed",
        lambda run, _: sum(1 for request in run.requests if request.finish_reason in ("stop", "length")),
        "no",
    ),
    "output_tokens": Measure(
        "tokens generated",
        lambda run, name: sum(request.output_tokens for request in ([run.named(name)] if name else run.requests)),
    ),
    "computed_tokens": Measure("tokens that went through the model, padding left out", _computed),
    "recomputed_tokens": Measure("tokens computed again", _recomputed),
    "padding_rows": Measure("rows of padding", lambda run, name: sum(1 for _ in _padding(run, name))),
    "padding_tokens": Measure("tokens of padding", lambda run, name: sum(row.num_tokens for row in _padding(run, name))),
    "preemptions": Measure("preemptions", _preemptions),
    "lost_tokens": Measure("computed tokens thrown away by preemptions", _tokens_lost),
    "cached_tokens": Measure("prompt tokens taken from the prefix cache", _cached_tokens),
    "cached_percent": Measure("percent of the prompt tokens taken from the prefix cache", _cached_percent),
    "evicted_blocks": Measure("cached blocks given up for new work", lambda run, _: sum(_events(run, "evict")), "no"),
    "tokens_for_first": Measure("tokens computed for the first output token", _for_token(0), "needed"),
    "tokens_for_second": Measure("tokens computed for the second output token", _for_token(1), "needed"),
    "chunks": Measure("steps that computed a part of the prompt", _chunks, "needed"),
    "decodes_beside_chunks": Measure("steps that compute a part of its prompt and decode others", _beside, "needed"),
    "largest_step": Measure("tokens of the largest step", _largest_step),
    "joins": Measure("requests that joined a batch in which others were decoding", _joins),
    "peak_running": Measure("most requests running at once", lambda run, _: _peak(run, "num_running"), "no"),
    "peak_waiting": Measure("most requests waiting at once", lambda run, _: _peak(run, "num_waiting"), "no"),
    "peak_blocks": Measure("most KV blocks held at once", lambda run, _: _peak(run, "kv_used"), "no"),
    "blocked_by_seats": Measure("steps in which the head of the queue lacks a seat", _blocked("seats")),
    "blocked_by_tokens": Measure("steps in which the head of the queue lacks token budget", _blocked("tokens")),
    "blocked_by_blocks": Measure("steps in which the head of the queue lacks KV blocks", _blocked("blocks")),
    "blocked_by_batch": Measure("steps in which the head of the queue waits for a static batch", _blocked("batch")),
    "wait_steps": Measure("steps that it waits in the queue", _wait_steps, "needed"),
}  # fmt: skip
"""Name in data files → what is counted."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that must hold for a run: a measure within limits.

    Raises:
        WorkloadError: unknown measure, no limit, or a request named where none fits (or the reverse).
    """

    measure: str
    at_least: float | None = None
    at_most: float | None = None
    request: str = ""

    def __post_init__(self) -> None:
        check_measure(self.measure, self.request)
        if self.at_least is None and self.at_most is None:
            raise WorkloadError(f"the claim about {self.measure} has no limit: give at_least, at_most or both")
        for name in ("at_least", "at_most"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), -1e12, 1e12)
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise WorkloadError(f"at_least={self.at_least:g} is more than at_most={self.at_most:g}: no number is both")


class Outcome(msgspec.Struct, frozen=True):
    """A claim put to a run: the sentence, what was counted, and whether it holds."""

    text: str
    value: float
    holds: bool


def check_measure(name: str, request: str) -> None:
    """Refuse an unknown measure, or one about a request without one.

    Raises:
        WorkloadError: saying which measures there are.
    """
    choice("measure", name, tuple(MEASURES))
    if MEASURES[name].request == "needed" and not request:
        raise WorkloadError(f"measure={name!r} is about one request: name it with request")
    if MEASURES[name].request == "no" and request:
        raise WorkloadError(f"measure={name!r} is about the whole run: remove request={request!r}")


def count(measure: str, run: Run, request: str = "") -> float:
    """What a measure counts in a run.

    Raises:
        WorkloadError: unknown measure, or no such request in the run.
    """
    check_measure(measure, request)
    return float(MEASURES[measure].count(run, request))


def judge(claim: Claim, run: Run) -> Outcome:
    """Count, and compare with the claim's limits.

    Raises:
        WorkloadError: the run lacks the request that the claim is about.
    """
    value = count(claim.measure, run, claim.request)
    holds = (claim.at_least is None or value >= claim.at_least) and (claim.at_most is None or value <= claim.at_most)
    limits = [f"at least {claim.at_least:g}"] if claim.at_least is not None else []
    if claim.at_most is not None:
        limits.append(f"at most {claim.at_most:g}")
    if claim.at_least == claim.at_most:
        limits = [f"exactly {claim.at_least:g}"]
    about = f" of {claim.request}" if claim.request else ""
    return Outcome(f"{MEASURES[claim.measure].text}{about}: {value:g} ({' and '.join(limits)})", value, holds)
