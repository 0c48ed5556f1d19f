"""The batch of each step: tokens a request contributed, stacked, against the token budget.

Colour says who, texture says what: prefill solid, decode a light fill with a solid edge, recompute hatched, tokens from the
prefix cache dotted (above the bar: they are not computed and don't count against the budget), padding a grey cross-hatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from app.figures.palette import Theme, mix
from app.figures.template import Figure, axis, layout, note, vertical_line
from engine.core.trace import Scheduled, StepTrace, letter

WINDOW = 40
"""Steps that a picture shows."""
PAGE = 10
"""The window moves on by this many steps at once, so that it stands still while one steps."""
MOST_LEVELS = 12
"""Steps with more rows than this are drawn by kind instead of by request."""
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
    bars = {step.index: parts(step, numbers) for step in shown if step.scheduled}
    deepest = max((len(bar) for bar in bars.values()), default=0)
    by_kind = deepest > MOST_LEVELS
    data = _by_kind(bars, theme, root) if by_kind else _by_level(bars, deepest, theme, selected, root)
    if not data:
        data = [{"type": "bar", "name": "empty", "x": [], "y": []}]
    peak = max((sum(part.tokens for part in bar) for bar in bars.values()), default=0)
    top = max(peak, round(budget * 1.08)) if root else scale(peak, budget)
    place = math.sqrt if root else float
    shapes: list[dict[str, Any]] = [] if cursor is None else [vertical_line(theme, cursor)]
    notes = []
    if budget <= top:
        line = {"color": theme.alert, "width": 1.5, "dash": "6px,3px"}
        ends = {"x0": 0, "x1": 1, "y0": place(budget), "y1": place(budget)}
        shapes.append({"type": "line", "name": "budget", "xref": "paper", "yref": "y", **ends, "line": line})
        notes.append(
            note(theme, f"token budget {budget:,}", 1, place(budget), yref="y", yanchor="top", bgcolor="rgba(0,0,0,0)")
        )
    else:
        notes.append(note(theme, f"scale 0–{top:,} tokens; the budget, {budget:,}, lies above it"))
    if by_kind:
        notes.append(note(theme, f"more than {MOST_LEVELS} pieces a step: stacked by kind", 0, 1, xanchor="left"))
    return {
        "data": data,
        "layout": layout(
            theme,
            barmode="stack",
            bargap=0.12,
            xaxis=axis(theme, range=[frame[0] - 0.5, frame[1] + 0.5], title="step", showgrid=False, dtick=5, tick0=0),
            yaxis=axis(theme, range=[0, place(top)], **_ticks(top, root)),
            shapes=shapes,
            annotations=notes,
        ),
    }


def batch_alt(shown: Sequence[StepTrace], numbers: Mapping[str, int], budget: int) -> str:
    """The newest bar in words."""
    last = next((step for step in reversed(shown) if step.scheduled), None)
    if last is None:
        return "Batch composition: no step yet."
    pieces = ", ".join(f"{letter(p.number)} {p.kind} {p.tokens}" for p in parts(last, numbers)[:12])
    return f"Batch composition: step {last.index} computes {last.num_tokens} of {budget} tokens: {pieces}."


def _ticks(top: int, root: bool) -> dict[str, Any]:
    if not root:
        return {"title": "tokens", "nticks": 5}
    values = [0, *(value for value in (1, 4, 16, 64, 256, 1024, 4096, 16384) if value <= top)]
    return {"title": "tokens (√ scale)", "tickvals": [math.sqrt(v) for v in values], "ticktext": [f"{v:,}" for v in values]}


def _by_level(
    bars: Mapping[int, list[Part]], deepest: int, theme: Theme, selected: int | None, root: bool
) -> list[dict[str, Any]]:
    tall = {x: heights([part.tokens for part in bar], root=root) for x, bar in bars.items()}
    return [
        _level({x: (bar[level], tall[x][level]) for x, bar in bars.items() if level < len(bar)}, level, theme, selected)
        for level in range(deepest)
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
            f"step {x}: {letter(part.number)} {KIND_WORDS[part.kind]}<br>{part.tokens} tokens after {part.context} computed"
            for x, part in pieces.items()
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _texture(shapes: list[str], fronts: list[str], backs: list[str]) -> dict[str, Any]:
    """Patterns cost drawing time, so a trace without any gets none."""
    if not any(shapes):
        return {}
    return {"pattern": {"shape": shapes, "fgcolor": fronts, "bgcolor": backs, "size": 5, "solidity": 0.35}}


def _by_kind(bars: Mapping[int, list[Part]], theme: Theme, root: bool) -> list[dict[str, Any]]:
    sums = {x: [sum(p.tokens for p in bar if p.kind == kind) for kind in KINDS] for x, bar in bars.items()}
    tall = {x: heights(row, root=root) for x, row in sums.items()}
    data = []
    for place, kind in enumerate(KINDS):
        counts = {x: len({p.number for p in bar if p.kind == kind}) for x, bar in bars.items()}
        xs = [x for x, row in sums.items() if row[place]]
        if not xs:
            continue
        hue = theme.muted if kind == "padding" else theme.ink
        fill = mix(hue, theme.paper, 0.75 if kind == "prefill" else 0.22)
        words = KIND_WORDS[kind]
        trace: dict[str, Any] = {
            "type": "bar",
            "name": kind,
            "x": xs,
            "y": [tall[x][place] for x in xs],
            "marker": {
                "color": fill,
                "line": {"color": hue, "width": 1},
                **_texture([PATTERNS[kind]] * len(xs), [hue] * len(xs), [fill] * len(xs)),
            },
            "customdata": [[-1, kind, "", sums[x][place]] for x in xs],
            "hovertext": [f"step {x}: {words}<br>{sums[x][place]} tokens of {counts[x]} requests" for x in xs],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
        data.append(trace)
    return data


def row_kind(row: Scheduled) -> str:
    """What a row of a step mostly is, for pictures that show one mark a step."""
    if row.kind == "padding":
        return "padding"
    if row.kind == "recompute" or (row.num_tokens and row.recomputed >= row.num_tokens):
        return "recompute"
    return "decode" if row.kind in ("decode", "fork") else "prefill"
