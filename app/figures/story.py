"""What happened, in words: sentences made from the trace, each tied to its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.figures.template import many
from engine.core.trace import Blocked, StepTrace, letter

WORDS = {
    "queue": "Arrival: the request joins the waiting queue.",
    "admit": "Admission: the request leaves the queue, takes a seat, and its first tokens enter the batch.",
    "hit": "Prefix cache hit: full blocks of an earlier prompt with the same beginning are shared instead of computed.",
    "evict": "Eviction: the content of a cached block that nobody holds is given up, because its place is needed.",
    "preempt": "Preemption: a request gives up its KV blocks so that another can go on. Its tokens are computed again.",
    "fork": "Fork: another sample of the same prompt shares all its blocks.",
    "cow": "Copy-on-write: a shared block is copied before one of its owners writes to it.",
    "padding": "Padding: in a static batch, rows that are shorter or done are computed at full length, and thrown away.",
    "finish": "Finish: the request leaves the engine and its blocks return to the pool.",
    "seats": "Waiting for a seat: max_num_seqs requests run at once, the next one waits until one of them leaves.",
    "tokens": "Waiting for budget: a step computes at most max_num_batched_tokens tokens, and running requests come first.",
    "blocks": "Waiting for blocks: a request is admitted only when the pool can hold all of its tokens so far.",
    "batch": "Waiting for the batch: static batching forms the next batch only when the last member of this one is done.",
    "preemption": "Waiting after a preemption: in a step that took blocks from a request, nobody new is admitted.",
}
_TOLD = frozenset({"queue", "admit", "hit", "evict", "finish", "fork", "cow"})
ENDS = {
    "stop": "ends by itself",
    "length": "reaches its token limit",
    "abort": "is stopped",
    "error": "ends with an error",
}


def story(steps: Sequence[StepTrace], numbers: Mapping[str, int], limit: int = 60) -> list[dict[str, Any]]:
    """The newest ``limit`` sentences, newest first. The same reason for waiting is told once, not at every step."""
    begin = _begin(steps, limit)
    told = _blocked(steps[begin - 1]) if begin else None
    padded = bool(begin) and _padding(steps[begin - 1]) > 0
    entries: list[dict[str, Any]] = []
    for step in steps[begin:]:
        entries += _happened(step, numbers)
        blocked = _blocked(step)
        if step.blocked is not None and told != blocked:
            text = f"{_name(step.blocked.request_id, numbers)} waits: {reason_words(step.blocked)}."
            entries.append(_entry(step.index, "block", text, numbers.get(step.blocked.request_id), step.blocked.reason))
        told = blocked if blocked or step.scheduled else told
        padding = _padding(step)
        if padding and not padded:
            text = f"{padding} padding tokens are computed beside {step.num_tokens - padding} real ones."
            entries.append(_entry(step.index, "padding", text, None))
        padded = padding > 0 if step.scheduled else padded
    return entries[-limit:][::-1]


def _begin(steps: Sequence[StepTrace], limit: int) -> int:
    """Place in ``steps`` from which on at least ``limit`` sentences are told, or 0."""
    found = 0
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        found += sum(event.op in _TOLD for event in (*step.events, *step.events_after)) + len(step.preemptions)
        if found >= limit:
            return place
    return 0


def _happened(step: StepTrace, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """The events and preemptions of one step."""
    entries = []
    for event in (*step.events, *step.events_after):
        text = _sentence(event.op, event, numbers)
        if text:
            entries.append(_entry(step.index, event.op, text, numbers.get(event.request_id)))
    for preemption in step.preemptions:
        victim, winner = _name(preemption.request_id, numbers), _name(preemption.in_favour_of, numbers)
        reason = f"no free block for {winner}, so " if winner != victim else "no free block, so "
        text = f"{reason}{victim} is preempted: {many(preemption.tokens_lost, 'token')} will be computed again."
        entries.append(_entry(step.index, "preempt", text[0].upper() + text[1:], numbers.get(preemption.request_id)))
    return entries


def _blocked(step: StepTrace) -> tuple[str, str] | None:
    return None if step.blocked is None else (step.blocked.request_id, step.blocked.reason)


def _padding(step: StepTrace) -> int:
    return sum(row.num_tokens for row in step.scheduled if row.kind == "padding")


def reason_words(blocked: Blocked) -> str:
    """Why the head of the queue was not admitted, with the numbers."""
    need, have = blocked.needed, blocked.available
    return {
        "seats": "every seat is taken (max_num_seqs)",
        "tokens": f"it needs {many(need, 'token')} of budget and {have:,} {'is' if have == 1 else 'are'} left",
        "blocks": f"it needs {many(need, 'KV block')} and {have:,} {'is' if have == 1 else 'are'} free",
        "batch": "the static batch before it is still running",
        "preemption": "a request was preempted in this step, so nobody is admitted",
    }[blocked.reason]


def jumps(steps: Sequence[StepTrace]) -> dict[str, list[int]]:
    """Steps at which something of note happened, by kind: what the transport bar jumps to."""
    found: dict[str, list[int]] = {"preempt": [], "admit": [], "finish": [], "evict": []}
    for step in steps:
        for op in {event.op for event in (*step.events, *step.events_after)} & found.keys():
            found[op].append(step.index)
    return found


def _entry(index: int, kind: str, text: str, number: int | None, word: str = "") -> dict[str, Any]:
    """``word``: what is defined, where it is not the kind itself."""
    return {"step": index, "kind": kind, "text": text, "number": number, "definition": WORDS.get(word or kind, "")}


def _name(request_id: str, numbers: Mapping[str, int]) -> str:
    return letter(numbers[request_id]) if request_id in numbers else "a request"


def _sentence(op: str, event: Any, numbers: Mapping[str, int]) -> str:
    name = _name(event.request_id, numbers)
    if op == "queue":
        return f"{name} arrives with {many(event.value, 'prompt token')}."
    if op == "admit":
        return f"{name} is admitted."
    if op == "hit":
        count = len(event.blocks)
        return f"{name} finds {count} cached block{'s' * (count > 1)} of its prompt: their tokens need no computing."
    if op == "evict":
        return f"{len(event.blocks)} cached block{'s' * (len(event.blocks) > 1)} evicted for new tokens."
    if op == "finish":
        return f"{name} {ENDS.get(event.other, 'finishes')}."
    if op == "fork":
        return f"{name} starts as a second sample of {_name(event.other, numbers)} and shares its blocks."
    if op == "cow" and len(event.blocks) == 2:
        return f"{name} writes to a shared block: block {event.blocks[0]} is copied to {event.blocks[1]}."
    return ""
