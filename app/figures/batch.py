"""The batch of each step: tokens a request contributed, stacked, against the token budget.

Colour says who, texture says what: prefill solid, decode a light fill with a solid edge, recompute hatched, tokens from the
prefix cache dotted (above the bar: they are not computed and don't count against the budget), padding a grey cross-hatch.
A strip above the bars counts who waits in each step; why the first of them waits is in its hover and in ``moment_words``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from app.figures.palette import Theme, mix
from app.figures.story import reason_words
from app.figures.template import Figure, axis, layout, many, note, root_ticks, vertical_line
from engine.core.trace import Scheduled, StepTrace, letter

WINDOW = 40
"""Steps that a picture shows."""
PAGE = 10
"""The window moves on by this many steps at once, so that it stands still while one steps."""
HIGH = 0.87
"""Share of the picture's height that the bars take; the strip of those who wait is above."""
NOTE_WIDTH = 0.4
"""Share of the picture's width that its note can take."""
MOST_LEVELS = 12
"""Steps with more rows than this are drawn by kind instead of by request, but for the selected one."""
KINDS = ("prefill", "decode", "recompute", "padding", "cached")
PATTERNS = {"prefill": "", "decode": "", "recompute": "/", "padding": "x", "cached": "."}
KIND_WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "recompute": "recompute",
    "padding": "padding (computed, thrown away)",
    "cached": "from the prefix cache (not computed)",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of one bar. ``number`` is the request's arrival number."""

    number: int
    kind: str
    tokens: int
    request_id: str
    context: int = 0


def heights(tokens: Sequence[int], *, root: bool) -> list[float]:
    """Heights of stacked pieces. ``root``: on a square-root axis, the top of each piece stands at the root of the sum."""
    if not root:
        return list(tokens)
    tops = [math.sqrt(total) for total in accumulate(tokens, initial=0)]
    return [high - low for low, high in pairwise(tops)]


def window(last: int, cursor: int | None = None, width: int = WINDOW, page: int = PAGE) -> tuple[int, int]:
    """First and last step index of the frame that holds ``cursor`` (or the last step); it moves in pages."""
    focus = last if cursor is None else min(cursor, max(last, 0))
    first = max(0, (max(focus, 0) // page + 1) * page - width)
    return first, first + width - 1


def scale(peak: int, budget: int) -> int:
    """The smallest of 8, 16, 32 … that holds ``peak`` tokens; the budget with some air once it is near."""
    top = 8
    while top < peak:
        top *= 2
    return max(peak, round(budget * 1.08)) if top >= budget > 0 else top


def parts(step: StepTrace, numbers: Mapping[str, int]) -> list[Part]:
    """The pieces of one step's bar, in order of arrival, tokens from the cache last."""
    computed: list[Part] = []
    cached: list[Part] = []
    for row in step.scheduled:
        number = numbers.get(row.request_id, 0)
        again = row.num_tokens if row.kind == "recompute" else min(row.recomputed, row.num_tokens)
        if again and row.kind != "padding":
            computed.append(Part(number, "recompute", again, row.request_id, row.context))
        fresh = row.num_tokens - again
        if row.num_tokens and (fresh or row.kind == "padding"):
            kind = row.kind if row.kind in ("decode", "padding") else "prefill"
            computed.append(Part(number, kind, fresh or row.num_tokens, row.request_id, row.context + again))
        if row.cached:
            cached.append(Part(number, "cached", row.cached, row.request_id))
    return sorted(computed, key=lambda p: p.number) + sorted(cached, key=lambda p: p.number)


def batch_figure(
    shown: Sequence[StepTrace],
    numbers: Mapping[str, int],
    budget: int,
    frame: tuple[int, int],
    theme: Theme,
    cursor: int | None = None,
    selected: int | None = None,
    *,
    root: bool = False,
) -> Figure:
    """Stacked bars of ``shown`` (the steps inside ``frame``), a trace for each level of the stack, and the budget line.

    ``root``: a square-root axis up to the budget, on which decodes stay visible beside a long prompt.
    """
    working = [step for step in shown if step.scheduled]
    if selected not in {numbers.get(row.request_id, 0) for step in working for row in step.scheduled}:
        selected = None  # nothing of it is in the picture, so nobody steps back
    by_kind = any(len(step.scheduled) > MOST_LEVELS for step in working)
    if by_kind:
        data = _by_kind(working, numbers, theme, selected, root)
    else:
        data = _by_level({step.index: parts(step, numbers) for step in working}, theme, selected, root)
    if not data:
        data = [{"type": "bar", "name": "empty", "x": [], "y": []}]
    peak = max((sum(row.num_tokens + row.cached for row in step.scheduled) for step in working), default=0)
    top = max(peak, round(budget * 1.08)) if root else scale(peak, budget)
    place = math.sqrt if root else float
    shapes: list[dict[str, Any]] = [] if cursor is None else [vertical_line(theme, cursor)]
    words = ["stacked by kind"] if by_kind else []
    notes = []
    if budget <= top:
        line = {"color": theme.alert, "width": 1.5, "dash": "6px,3px"}
        ends = {"x0": 0, "x1": 1, "y0": place(budget), "y1": place(budget)}
        shapes.append({"type": "line", "name": "budget", "xref": "paper", "yref": "y", **ends, "line": line})
        label = {"yref": "y", "yanchor": "top", "xanchor": "left", "bgcolor": "rgba(0,0,0,0)"}
        notes.append(note(theme, f"token budget {budget:,}", 0, place(budget), **label))
    else:
        words.append(f"scale 0–{top:,} tokens; the budget, {budget:,}, is above")
    if words:
        x, side = _note_place(working, frame, cursor, left=0.25 if notes else 0.0)
        notes.append(note(theme, "; ".join(words), x, HIGH, xanchor=side))
    return {
        "data": [*data, _waiting(shown, numbers, theme)],
        "layout": layout(
            theme,
            barmode="stack",
            bargap=0.12,
            xaxis=axis(theme, range=[frame[0] - 0.5, frame[1] + 0.5], title="step", showgrid=False, dtick=5, tick0=0),
            yaxis=axis(theme, range=[0, place(top)], domain=[0, HIGH], **_ticks(top, root)),
            yaxis2=axis(
                theme,
                range=[0, 1],
                domain=[HIGH + 0.06, 1],
                tickvals=[0.5],
                ticktext=["waiting"],
                showgrid=False,
                ticks="",
                tickfont={"color": theme.muted, "size": 10},
            ),
            shapes=shapes,
            annotations=notes,
        ),
    }


def _note_place(working: Sequence[StepTrace], frame: tuple[int, int], cursor: int | None, left: float) -> tuple[float, str]:
    """Where the note covers least: away from the cursor's line, then above the lower bars; (x, the side it grows from).

    ``left``: where a note on the left begins, as a share of the width.
    """
    first, width = frame[0], frame[1] - frame[0] + 1

    def covered(begin: float, end: float) -> tuple[bool, int]:
        steps = [step for step in working if begin <= (step.index - first + 0.5) / width <= end]
        tallest = max((sum(row.num_tokens + row.cached for row in step.scheduled) for step in steps), default=0)
        return cursor is not None and begin <= (cursor - first + 0.5) / width <= end, tallest

    right_first = [((1.0, "right"), covered(1 - NOTE_WIDTH, 1.0)), ((left, "left"), covered(left, left + NOTE_WIDTH))]
    return min(right_first, key=lambda place: place[1])[0]


def _waiting(shown: Sequence[StepTrace], numbers: Mapping[str, int], theme: Theme) -> dict[str, Any]:
    """How many requests wait in each step, as numbers in the strip above the bars; a dot: as many as in the step before."""
    steps = [step for step in shown if step.scheduled and step.num_waiting]
    before = [None, *(step for step in steps)]
    same = [
        b is not None and (b.index, b.num_waiting) == (s.index - 1, s.num_waiting)
        for b, s in zip(before, steps, strict=False)
    ]
    return {
        "type": "scatter",
        "name": "waiting",
        "mode": "text",
        "yaxis": "y2",
        "x": [step.index for step in steps],
        "y": [0.5] * len(steps),
        "text": ["·" if again else str(step.num_waiting) for step, again in zip(steps, same, strict=True)],
        "textfont": {"size": 10, "color": theme.ink},
        "customdata": [[-1, "waiting", "", 0] for _ in steps],
        "hovertext": [f"step {step.index}: {waiting_words(step, numbers)}" for step in steps],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "cliponaxis": False,
    }


def waiting_words(step: StepTrace, numbers: Mapping[str, int]) -> str:
    """Who waits in a step and why, in a few words."""
    if not step.num_waiting:
        return "nobody waits"
    if step.blocked is None:
        return f"{step.num_waiting} wait"
    name = letter(numbers[step.blocked.request_id]) if step.blocked.request_id in numbers else "the first"
    behind = f", {step.num_waiting - 1} behind it" if step.num_waiting > 1 else ""
    return f"{name} waits{behind}: {reason_words(step.blocked)}"


def moment_words(step: StepTrace | None, numbers: Mapping[str, int], budget: int) -> str:
    """One line on the batch of the chosen step: what is computed, and who waits for what."""
    if step is None:
        return ""
    if not step.scheduled:
        return f"Step {step.index}: nothing was computed."
    return f"Step {step.index}: {step.num_tokens:,} of {budget:,} tokens; {waiting_words(step, numbers)}."


def batch_alt(shown: Sequence[StepTrace], numbers: Mapping[str, int], budget: int) -> str:
    """The newest bar in words."""
    last = next((step for step in reversed(shown) if step.scheduled), None)
    if last is None:
        return "Batch composition: no step yet."
    pieces = ", ".join(f"{letter(p.number)} {p.kind} {p.tokens}" for p in parts(last, numbers)[:12])
    waits = f" In the queue: {waiting_words(last, numbers)}." if last.num_waiting else ""
    return f"Batch composition: step {last.index} computes {last.num_tokens} of {budget} tokens: {pieces}.{waits}"


def _ticks(top: int, root: bool) -> dict[str, Any]:
    if not root:
        return {"title": "tokens", "nticks": 5}
    return {"title": "tokens (√ scale)", **root_ticks(top)}


def _by_level(bars: Mapping[int, list[Part]], theme: Theme, selected: int | None, root: bool) -> list[dict[str, Any]]:
    tall = {x: heights([part.tokens for part in bar], root=root) for x, bar in bars.items()}
    return [
        _level({x: (bar[level], tall[x][level]) for x, bar in bars.items() if level < len(bar)}, level, theme, selected)
        for level in range(max(map(len, bars.values()), default=0))
    ]


def _level(placed: Mapping[int, tuple[Part, float]], level: int, theme: Theme, selected: int | None) -> dict[str, Any]:
    """One level of the stack: each bar with the colour of its request and the texture of its kind."""
    pieces = {x: part for x, (part, _) in placed.items()}
    fills, edges = [], []
    for part in pieces.values():
        hue = theme.muted if part.kind == "padding" else theme.hue(part.number)
        if selected is not None and part.number != selected:
            hue = mix(hue, theme.paper, 0.5)
        light = mix(hue, theme.paper, 0.38)
        fills.append(hue if part.kind == "prefill" else light)
        edges.append(hue)
    return {
        "type": "bar",
        "name": f"level {level}",
        "x": list(pieces),
        "y": [height for _, height in placed.values()],
        "marker": {
            "color": fills,
            "line": {"color": edges, "width": 1},
            **_texture([PATTERNS[part.kind] for part in pieces.values()], edges, fills),
        },
        "customdata": [[part.number, part.kind, part.request_id, part.tokens] for part in pieces.values()],
        "hovertext": [
            f"step {x}: {letter(part.number)} {KIND_WORDS[part.kind]}"
            f"<br>{many(part.tokens, 'token')} after {part.context:,} computed"
            for x, part in pieces.items()
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _texture(shapes: list[str], fronts: list[str], backs: list[str]) -> dict[str, Any]:
    """Patterns cost drawing time, so a trace without any gets none."""
    if not any(shapes):
        return {}
    return {"pattern": {"shape": shapes, "fgcolor": fronts, "bgcolor": backs, "size": 5, "solidity": 0.35}}


def kind_sums(rows: Iterable[Scheduled]) -> tuple[list[int], list[int]]:
    """Tokens, and how many requests, of each of ``KINDS``: the sums of ``parts``."""
    tokens, counts = [0] * len(KINDS), [0] * len(KINDS)
    prefill, decode, recompute, padding, cached = range(len(KINDS))
    for row in rows:
        again = (
            0
            if row.kind == "padding"
            else row.num_tokens
            if row.kind == "recompute"
            else min(row.recomputed, row.num_tokens)
        )
        own = padding if row.kind == "padding" else decode if row.kind == "decode" else prefill
        for place, count in ((recompute, again), (own, row.num_tokens - again), (cached, row.cached)):
            tokens[place] += count
            counts[place] += count > 0
    return tokens, counts


def _by_kind(
    working: Sequence[StepTrace], numbers: Mapping[str, int], theme: Theme, selected: int | None, root: bool
) -> list[dict[str, Any]]:
    """The selected request's pieces at the bottom, then all others by kind."""
    own: dict[int, list[Part]] = {}
    sums: dict[int, tuple[list[int], list[int]]] = {}
    for step in working:
        mine = [r for r in step.scheduled if numbers.get(r.request_id, 0) == selected] if selected is not None else []
        own[step.index] = parts(StepTrace(index=step.index, start=step.start, scheduled=tuple(mine)), numbers)
        sums[step.index] = kind_sums(row for row in step.scheduled if row not in mine)
    tall = {x: heights([*(part.tokens for part in own[x]), *sums[x][0]], root=root) for x in own}
    data = [
        _level({x: (bar[level], tall[x][level]) for x, bar in own.items() if level < len(bar)}, level, theme, selected)
        for level in range(max(map(len, own.values()), default=0))
    ]
    for place, kind in enumerate(KINDS):
        xs = [x for x, (tokens, _) in sums.items() if tokens[place]]
        if xs:
            heights_of = [tall[x][len(own[x]) + place] for x in xs]
            data.append(_kind(kind, xs, heights_of, [(sums[x][0][place], sums[x][1][place]) for x in xs], theme))
    return data


def _kind(kind: str, xs: list[int], ys: list[float], told: list[tuple[int, int]], theme: Theme) -> dict[str, Any]:
    """All of one kind. ``told``: (tokens, requests) of each bar."""
    hue = theme.muted if kind == "padding" else theme.ink
    fill = mix(hue, theme.paper, 0.75 if kind == "prefill" else 0.22)
    words = KIND_WORDS[kind]
    return {
        "type": "bar",
        "name": kind,
        "x": xs,
        "y": ys,
        "marker": {
            "color": fill,
            "line": {"color": hue, "width": 1},
            **_texture([PATTERNS[kind]] * len(xs), [hue] * len(xs), [fill] * len(xs)),
        },
        "customdata": [[-1, kind, "", tokens] for tokens, _ in told],
        "hovertext": [
            f"step {x}: {words}<br>{many(tokens, 'token')} of {many(count, 'request')}"
            for x, (tokens, count) in zip(xs, told, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def row_kind(row: Scheduled) -> str:
    """What a row of a step mostly is, for pictures that show one mark a step."""
    if row.kind == "padding":
        return "padding"
    if row.kind == "recompute" or (row.num_tokens and row.recomputed >= row.num_tokens):
        return "recompute"
    return "decode" if row.kind in ("decode", "fork") else "prefill"
