"""The schedule as textbooks draw it: one column a step, one row a seat, a letter in each cell.

The engine only counts seats. Which row a request is drawn in is this picture's choice: a newcomer takes the first empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.figures.batch import row_kind
from app.figures.palette import Theme, mix
from app.figures.pool import steps as flat_steps
from app.figures.template import Figure, axis, layout
from engine.core.trace import StepTrace, letter

CELL = 46
"""Height of a row, pixels."""
LETTERS_UP_TO = 20
"""Steps up to which every cell bears its letter; beyond, only the first of each request."""


@dataclass(frozen=True, slots=True)
class Seating:
    """Who sits where. ``cells``: (step index, row) → (request_id, kind); ``waiting``: step index → ids in the queue."""

    steps: tuple[int, ...]
    rows: int
    cells: dict[tuple[int, int], tuple[str, str]]
    waiting: dict[int, tuple[str, ...]]


def seating(steps: Sequence[StepTrace], seats: int) -> Seating:
    """Give every request of each step a row."""
    place: dict[str, int] = {}
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    waiting: dict[int, tuple[str, ...]] = {}
    queue: list[str] = []
    worked = [step for step in steps if step.scheduled]
    for step in steps:
        for event in step.events:
            if event.op in ("queue", "preempt"):
                queue.append(event.request_id)
            elif event.op in ("admit", "finish") and event.request_id in queue:
                queue.remove(event.request_id)
        if not step.scheduled:
            continue
        kinds: dict[str, str] = {}
        for row in step.scheduled:
            if row.kind != "padding" or row.request_id not in kinds:
                kinds[row.request_id] = row_kind(row)
        place = {request: row for request, row in place.items() if request in kinds}
        for request in kinds:
            if request not in place:
                place[request] = next(row for row in range(seats) if row not in place.values())
            cells[step.index, place[request]] = (request, kinds[request])
        waiting[step.index] = tuple(queue)
    return Seating(tuple(step.index for step in worked), seats, cells, waiting)


def schedule_figure(
    steps: Sequence[StepTrace], numbers: Mapping[str, int], seats: int, theme: Theme, cursor: int | None = None
) -> Figure:
    """The seats over all ``steps``; ``cursor`` frames one column."""
    found = seating(steps, seats)
    last = max(found.steps, default=0)
    columns = list(range(max(last + 1, 6)))
    hues = len(theme.hues)
    z = [[_level(found, x, row, numbers, hues) for x in columns] for row in range(seats)]
    hover = [[_hover(found, x, row, numbers) for x in columns] for row in range(seats)]
    levels = [
        mix(theme.muted, theme.paper, 0.07),
        *theme.hues,
        *(mix(hue, theme.paper, 0.38) for hue in theme.hues),
        mix(theme.muted, theme.paper, 0.3),
    ]
    any_waits = any(found.waiting.values())
    names = [f"seat {row + 1}" for row in range(seats)] + (["waiting"] if any_waits else [])
    height = len(names)
    data = [
        {
            "type": "heatmap", "name": "seats", "x": columns, "y": list(range(seats)), "z": z, "zmin": -0.5,
            "zmax": len(levels) - 0.5, "colorscale": flat_steps(levels), "showscale": False, "xgap": 3, "ygap": 3,
            "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>", "hoverongaps": False,
        },
        _letters(found, numbers, theme),
    ]  # fmt: skip
    if any_waits:
        data.append(_waiting(found, numbers, seats, theme))
    shapes = [] if cursor is None else [_cursor(theme, cursor, height)]
    return {
        "data": data,
        "layout": layout(
            theme,
            height=CELL * min(height, 9) + 44,
            margin={"l": 62, "r": 8, "t": 6, "b": 38},
            xaxis=axis(
                theme, range=[-0.6, len(columns) - 0.4], title="step", showgrid=False, tick0=0,
                dtick=1 if len(columns) <= 24 else 5,
            ),
            yaxis=axis(
                theme, range=[height - 0.45, -0.55], tickvals=list(range(height)), ticktext=names, showgrid=False,
                tickfont={"color": theme.ink, "size": 12},
            ),
            shapes=shapes,
        ),
    }  # fmt: skip


def schedule_alt(steps: Sequence[StepTrace], numbers: Mapping[str, int], seats: int, cursor: int | None = None) -> str:
    """The schedule in words: who works in each step."""
    found = seating(steps, seats)
    shown = [cursor] if cursor is not None and cursor in found.steps else list(found.steps)[:12]
    parts = []
    for step in shown:
        row = [found.cells.get((step, seat)) for seat in range(seats)]
        words = " ".join(_word(cell, numbers) for cell in row)
        waits = ", ".join(letter(numbers[r]) for r in found.waiting.get(step, ()) if r in numbers)
        parts.append(f"step {step}: {words}{f'; {waits} waiting' if waits else ''}")
    return f"Seats of {len(found.steps)} steps. " + ". ".join(parts) + "."


def _word(cell: tuple[str, str] | None, numbers: Mapping[str, int]) -> str:
    if cell is None:
        return "empty"
    name = letter(numbers.get(cell[0], 0))
    return f"{name} (padding)" if cell[1] == "padding" else name


def _level(found: Seating, step: int, row: int, numbers: Mapping[str, int], hues: int) -> int | None:
    if step not in found.steps:
        return None
    cell = found.cells.get((step, row))
    if cell is None:
        return 0
    if cell[1] == "padding":
        return 1 + 2 * hues
    hue = 1 + numbers.get(cell[0], 0) % hues
    return hue if cell[1] == "prefill" else hue + hues


def _hover(found: Seating, step: int, row: int, numbers: Mapping[str, int]) -> str:
    cell = found.cells.get((step, row))
    if cell is None:
        return f"step {step}: seat {row + 1} is empty" if step in found.steps else ""
    return f"step {step}: {letter(numbers.get(cell[0], 0))} {cell[1]}"


def _letters(found: Seating, numbers: Mapping[str, int], theme: Theme) -> dict[str, Any]:
    shown = found.cells
    if len(found.steps) > LETTERS_UP_TO:
        shown = {place: cell for place, cell in shown.items() if _begins(found, place)}
    return {
        "type": "scatter", "name": "letters", "mode": "text", "hoverinfo": "skip",
        "x": [x for x, _ in shown], "y": [y for _, y in shown],
        "text": ["×" if kind == "padding" else letter(numbers.get(request, 0)) for request, kind in shown.values()],
        "textfont": {
            "size": 15 if len(found.steps) <= 16 else 11,
            "color": [theme.paper if kind == "prefill" else theme.ink for _, kind in shown.values()],
        },
    }  # fmt: skip


def _begins(found: Seating, place: tuple[int, int]) -> bool:
    """Whether a request, or its padding, begins in this cell."""
    step, row = place
    before = found.cells.get((step - 1, row))
    request, kind = found.cells[place]
    return before is None or before[0] != request or (before[1] == "padding") != (kind == "padding")


def _waiting(found: Seating, numbers: Mapping[str, int], seats: int, theme: Theme) -> dict[str, Any]:
    wide = len(found.steps) > 16
    texts: dict[int, str] = {}
    told = ""
    for step, ids in found.waiting.items():
        names = [letter(numbers[request]) for request in ids if request in numbers]
        text = "" if not names else str(len(names)) if wide or len(names) > 4 else " ".join(names)
        if text and not (wide and text == told):
            texts[step] = text
        told = text
    return {
        "type": "scatter", "name": "waiting", "mode": "text", "x": list(texts), "y": [seats] * len(texts),
        "text": list(texts.values()), "textfont": {"size": 11 if wide else 13, "color": theme.muted}, "hoverinfo": "skip",
    }  # fmt: skip


def _cursor(theme: Theme, step: int, height: int) -> dict[str, Any]:
    return {
        "type": "rect", "name": "cursor", "xref": "x", "yref": "y", "x0": step - 0.5, "x1": step + 0.5,
        "y0": -0.52, "y1": height - 0.48, "line": {"color": theme.ink, "width": 2.5}, "layer": "above",
    }  # fmt: skip
