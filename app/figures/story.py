"""What happened, in words: sentences made from the trace, each tied to its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.trace import Blocked, StepTrace, letter

KINDS = ("queue", "admit", "prefill", "preempt", "block", "evict", "finish")
WORDS = {
    "queue": "Arrival: the request joins the end of the waiting queue.",
    "admit": "Admission: the request leaves the queue, takes a seat, and its first tokens enter the batch.",
    "preempt": "Preemption: a request gives up its KV blocks so that another can go on. Its tokens are computed again.",
    "block": "Waiting: the head of the queue does not fit yet, and all others wait behind it.",
    "evict": "Eviction: the content of a cached block is given up because the block is needed for new tokens.",
    "finish": "Finish: the request leaves the engine and its blocks return to the pool.",
    "fork": "Fork: a second sample of the same prompt shares all its blocks.",
    "cow": "Copy-on-write: a shared block is copied before one of its owners writes to it.",
    "hit": "Cache hit: blocks of an earlier prompt with the same beginning are shared instead of computed.",
}
ENDS = {
    "stop": "ends by itself",
    "length": "reaches its token limit",
    "abort": "is stopped",
    "error": "ends with an error",
}


def story(steps: Sequence[StepTrace], numbers: Mapping[str, int], limit: int = 60) -> list[dict[str, Any]]:
    """The newest ``limit`` sentences, newest first. The same reason for waiting is told once, not at every step."""
    entries: list[dict[str, Any]] = []
    told: tuple[str, str] | None = None
    for step in steps:
        for event in (*step.events, *step.events_after):
            text = _sentence(event.op, event, numbers)
            if text:
                entries.append(_entry(step.index, event.op, text, numbers.get(event.request_id)))
        for preemption in step.preemptions:
            victim, winner = _name(preemption.request_id, numbers), _name(preemption.in_favour_of, numbers)
            reason = f"no free block for {winner}, so " if winner != victim else "no free block, so "
            text = f"{reason}{victim} is preempted: {preemption.tokens_lost} tokens will be computed again."
            entries.append(_entry(step.index, "preempt", text, numbers.get(preemption.request_id)))
        if step.blocked is None:
            told = None if step.scheduled else told
        elif told != (step.blocked.request_id, step.blocked.reason):
            told = (step.blocked.request_id, step.blocked.reason)
            text = f"{_name(step.blocked.request_id, numbers)} waits: {reason_words(step.blocked)}."
            entries.append(_entry(step.index, "block", text, numbers.get(step.blocked.request_id)))
    return entries[-limit:][::-1]


def reason_words(blocked: Blocked) -> str:
    """Why the head of the queue was not admitted, with the numbers."""
    need, have = blocked.needed, blocked.available
    return {
        "seats": "every seat is taken (max_num_seqs)",
        "tokens": f"it needs {need} tokens of budget and {have} are left",
        "blocks": f"it needs {need} KV blocks and {have} are free",
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


def _entry(index: int, kind: str, text: str, number: int | None) -> dict[str, Any]:
    return {"step": index, "kind": kind, "text": text, "number": number, "definition": WORDS.get(kind, "")}


def _name(request_id: str, numbers: Mapping[str, int]) -> str:
    return letter(numbers[request_id]) if request_id in numbers else "a request"


def _sentence(op: str, event: Any, numbers: Mapping[str, int]) -> str:
    name = _name(event.request_id, numbers)
    if op == "queue":
        return f"{name} arrives with {event.value} prompt tokens."
    if op == "admit":
        cached = f", {event.value} tokens from the prefix cache" if event.value else ""
        return f"{name} is admitted{cached}."
    if op == "evict":
        return f"{len(event.blocks)} cached block{'s' * (len(event.blocks) > 1)} evicted for new tokens."
    if op == "finish":
        return f"{name} {ENDS.get(event.other, 'finishes')}."
    if op == "fork":
        return f"{name} starts as a second sample of {_name(event.other, numbers)} and shares its blocks."
    if op == "cow" and len(event.blocks) == 2:
        return f"{name} writes to a shared block: block {event.blocks[0]} is copied to {event.blocks[1]}."
    return ""
