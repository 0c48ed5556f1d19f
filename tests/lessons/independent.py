"""The lessons' right answers, worked out without the engine: by counting, closed forms, and small models of the rules."""

from __future__ import annotations

from typing import Any

from lessons.catalogue import module_of

PROMPT = module_of("01_one_request").PROMPT


def continuous(outputs: dict[str, int], arrivals: dict[str, int], seats: int) -> dict[str, list[int]]:
    """Steps in which each request works, when a free seat goes to the first in the queue before every step."""
    left, works = dict(outputs), {name: [] for name in outputs}
    running: list[str] = []
    step = 0
    while any(left.values()):
        waiting = [n for n in outputs if left[n] == outputs[n] and n not in running and arrivals[n] <= step]
        while waiting and len(running) < seats:
            running.append(waiting.pop(0))
        for name in running:
            works[name].append(step)
            left[name] -= 1
        running = [name for name in running if left[name]]
        step += 1
    return works


def static(outputs: dict[str, int], arrivals: dict[str, int], seats: int) -> tuple[dict[str, list[int]], int, int]:
    """(steps of each request, rows of padding, steps in all), when a group runs until its longest member is done."""
    works: dict[str, list[int]] = {}
    todo, step, padding = list(outputs), 0, 0
    while todo:
        group = [name for name in todo if arrivals[name] <= step][:seats]
        longest = max(outputs[name] for name in group)
        for name in group:
            works[name] = list(range(step, step + outputs[name]))
            padding += longest - outputs[name]
            todo.remove(name)
        step += longest
    return works, padding, step


def ceil(a: int, b: int) -> int:
    return -(-a // b)


OUT = {"A": 4, "B": 2, "C": 5, "D": 2}
LATE = continuous(OUT, {"A": 0, "B": 0, "C": 0, "D": 3}, 3)
QUEUED = continuous(OUT, dict.fromkeys("ABCD", 0), 3)
STATIC, PADDING, STATIC_STEPS = static(OUT, {"A": 0, "B": 0, "C": 0, "D": 3}, 3)


def free_line(endings: list[int], never_used: list[int]) -> list[int]:
    """The line of free blocks after single blocks came back one after the other, each to the front."""
    line = list(never_used)
    for block in endings:
        line.insert(0, block)
    return line


LINE = free_line([9, 5, 2, 3, 7], [10])
A_TABLE = [LINE[0], LINE[1], LINE[4]]
HOLE_BLOCKS = {name: ceil(p + o, 16) for name, (p, o) in
               {"A": (128, 20), "B": (90, 4), "C": (128, 24), "D": (90, 4), "E": (118, 6)}.items()}  # fmt: skip


def e_starts_in_pieces() -> int:
    """The step in which E finds one hole of its size: A B C D lie side by side; B and D end after 4 steps, A after 20."""
    for step in range(25):
        cells = []
        for name, length in (("A", 20), ("B", 4), ("C", 24), ("D", 4)):
            cells += [step < length] * HOLE_BLOCKS[name]
        run = longest = 0
        for taken in cells:
            run = 0 if taken else run + 1
            longest = max(longest, run)
        if longest >= HOLE_BLOCKS["E"]:
            return step
    raise AssertionError


ANSWERS: dict[str, dict[str, Any]] = {
    "one-request": {
        "steps": 24,
        "order": ["tokenise", "queue", "prefill", "first", "decode"],
        "largest": "prefill",
        "behind-step": 16,
        "behind-part": "queue",
        # A scripted step takes 10 ms and 1 ms a token, and a character is a token: the prompt, then 23 steps of one token.
        "latency": 10 + len(PROMPT) + 23 * (10 + 1),
        "check/example": 0.8 + 40 * 0.05,
        "check/single": "undefined",
        "check/slow-first": "room",
        "check/stream": "wait",
    },
    "kv-cache": {
        "work-without": sum(range(1, 65)),
        "work-cached": 64,
        # A scripted step takes 10 ms and 1 ms a token: the medians of the last eight steps (57 … 64 tokens against 1).
        "time-ratio": (10 + 60.5) / (10 + 1),
        "example": 2 * 32 * 8 * 128 * 4096 * 1 * 2 / 2**20,
        "blocks": ceil(50, 16) + ceil(49, 16) - 32 // 16,
        "check/double": 4,
        "check/mha": 512 * 32 / 8,
        "check/mqa": 512 / 8,
        "check/users": "cache",
    },
    "continuous-batching": {
        "who-works": {"AC": "gap", "ABC": "full"}["".join(n for n in "ABCD" if 2 in LATE[n])],
        "join-late": LATE["D"][0],
        "join-queued": QUEUED["D"][0],
        "steps-queued": 1 + max(steps[-1] for steps in QUEUED.values()),
        "join-static": STATIC["D"][0],
        "padding-static": PADDING,
        "check/when": "step",
        "check/four-seats": continuous(OUT, dict.fromkeys("ABCD", 0), 4)["D"][0],
        "check/equal": static(dict.fromkeys("ABC", 7), dict.fromkeys("ABC", 0), 3)[1],
        "check/pays": "others",
    },
    "paged-attention": {
        "together-max": 512 // 128,
        "holes": "no" if e_starts_in_pieces() > 4 else "yes",
        "together-paged": min(16, 32 // ceil(20 + 12 - 1, 16)),
        "e-paged": 4,  # B and D work in steps 0 to 3, and then 32 - 9 - 9 = 14 blocks are free, enough for 8
        "first-block": LINE[0],
        "third-block": A_TABLE[2],
        "empty": 16 - 1,
        "copies": 2 - 1,
        "blocks-fork": 20 // 16 + 2 * (ceil(27, 16) - 20 // 16),
        "check/bound": 32 - 1,
        "check/table": [4, 9, 1][20 // 16],
        "check/both": "pair",
        "check/small": "cost",
    },
}
"""Lesson → prediction, or ``check/question`` → the right answer. An option that stands for a number is named by it."""
