"""The life of each request over steps: queued, prefill, decode, preempted, finished. Shares its step axis with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.figures.batch import row_kind
from app.figures.palette import Theme, mix
from app.figures.pool import steps as flat_steps
from app.figures.template import Figure, axis, layout, many, vertical_line
from engine.core.trace import RequestTrace, StepTrace, letter

ROWS = (8, 12)
"""Rows of the frame: the first number, or the second once more requests are alive."""
THROWN_AWAY = "<br>in vain: the request ended before this token was known, so it is thrown away"
ENDS = {"stop": "ends by itself", "length": "reaches its token limit", "abort": "is stopped", "error": "fails"}


def choose(
    requests: Sequence[RequestTrace], shown: Sequence[StepTrace], rows: int = ROWS[1], selected: str | None = None
) -> list[RequestTrace]:
    """At most ``rows`` requests to draw, by arrival: the selected one, then the newest that work in the shown steps, then
    the first of those that wait.
    """
    begin = shown[0].start if shown else 0.0
    alive = [r for r in requests if r.finished < 0 or r.finished >= begin] or list(requests)
    working = {row.request_id for step in shown for row in step.scheduled}
    ranked = sorted(
        alive,
        key=lambda r: (
            r.request_id != selected,
            r.request_id not in working,
            -r.number if r.request_id in working else r.number,
        ),
    )
    return sorted(ranked[:rows], key=lambda r: r.number)


def timeline_figure(
    shown: Sequence[StepTrace],
    requests: Sequence[RequestTrace],
    frame: tuple[int, int],
    theme: Theme,
    cursor: int | None = None,
    selected: int | None = None,
    rows: int | None = None,
) -> Figure:
    """A heatmap with one row a request and one column a step, and a few marker traces on top."""
    if selected not in {request.number for request in requests}:
        selected = None  # nothing of it is in the picture, so nobody steps back
    rows = rows or next((n for n in ROWS if len(requests) <= n), len(requests))
    row_of = {request.request_id: row for row, request in enumerate(requests)}
    hues = len(theme.hues)
    levels = _levels(theme)
    z: list[list[int | None]] = [[None] * (frame[1] - frame[0] + 1) for _ in range(rows)]
    hover = [[""] * (frame[1] - frame[0] + 1) for _ in range(rows)]
    marks: dict[str, list[tuple[int, int, str]]] = {"decode": [], "recompute": [], "preempt": [], "finish": [], "cached": []}
    vain: set[tuple[int, int]] = set()
    for step in shown:
        column = step.index - frame[0]
        if not 0 <= column < len(z[0]):
            continue
        working = {row.request_id: row for row in step.scheduled}
        for request in requests:
            row = row_of[request.request_id]
            if row >= rows:
                continue
            name = letter(request.number)
            work = working.get(request.request_id)
            if work is None:
                if request.arrival <= step.end and (request.finished < 0 or request.finished > step.end) and step.scheduled:
                    z[row][column] = 0
                    hover[row][column] = f"step {step.index}: {name} waits"
                continue
            kind = row_kind(work)
            back = selected is not None and request.number != selected
            full = 1 + request.number % hues + (2 * hues if back else 0)
            z[row][column] = len(levels) - 1 if kind == "padding" else full if kind == "prefill" else full + hues
            hover[row][column] = f"step {step.index}: {name} {kind}, {many(work.num_tokens, 'token')}"
            if kind == "decode" and work.sampled < 0:
                hover[row][column] += THROWN_AWAY
                vain.add((step.index, row))
            elif kind in marks:
                marks[kind].append((step.index, row, hover[row][column]))
            if work.cached:
                marks["cached"].append(
                    (step.index, row, f"step {step.index}: {name} takes {many(work.cached, 'token')} from the cache")
                )
        _note_events(step, row_of, rows, requests, marks, frame[0])
    marks["finish"] = [(x, y, text + THROWN_AWAY if (x, y) in vain else text) for x, y, text in marks["finish"]]
    names = [letter(request.number) for request in requests]
    return {
        "data": [_heatmap(z, hover, frame, rows, levels), *_markers(marks, theme)],
        "layout": layout(
            theme,
            xaxis=axis(theme, range=[frame[0] - 0.5, frame[1] + 0.5], title="step", showgrid=False, dtick=5, tick0=0),
            yaxis=axis(
                theme, range=[rows - 0.5, -0.5], tickvals=list(range(len(names))), ticktext=names, showgrid=False,
                tickfont={"color": theme.ink, "size": 11},
            ),
            shapes=[*_ticks(marks["decode"], theme), *([] if cursor is None else [vertical_line(theme, cursor)])],
        ),
    }  # fmt: skip


def timeline_alt(shown: Sequence[StepTrace], requests: Sequence[RequestTrace]) -> str:
    """Who is in the picture."""
    if not requests:
        return "Request timelines: no request yet."
    done = sum(request.finished >= 0 for request in requests)
    return f"Request timelines: {len(requests)} requests, {done} finished, over {len(shown)} steps."


def _levels(theme: Theme) -> list[str]:
    """Waiting, full hues, light hues, both stepped back, padding."""
    back = [mix(hue, theme.paper, 0.45) for hue in theme.hues]
    return [
        mix(theme.muted, theme.paper, 0.22),
        *theme.hues,
        *(mix(hue, theme.paper, 0.4) for hue in theme.hues),
        *back,
        *(mix(hue, theme.paper, 0.15) for hue in theme.hues),
        theme.muted,
    ]


def _note_events(
    step: StepTrace,
    row_of: Mapping[str, int],
    rows: int,
    requests: Sequence[RequestTrace],
    marks: dict[str, list[tuple[int, int, str]]],
    first: int,
) -> None:
    """Marks of one step. What ended before it (``events``) is marked where the request was last: in the step before."""
    for place, event in enumerate((*step.events, *step.events_after)):
        row = row_of.get(event.request_id, rows)
        before = place < len(step.events)
        if row >= rows:
            continue
        name = letter(requests[row].number)
        if event.op == "preempt":
            marks["preempt"].append(
                (step.index, row, f"step {step.index}: {name} is preempted, {many(event.value, 'token')} lost")
            )
        elif event.op == "finish" and step.index - before >= first:
            moment = f"{'before ' if before else ''}step {step.index}"
            marks["finish"].append((step.index - before, row, f"{moment}: {name} {ENDS.get(event.other, 'finishes')}"))


def _heatmap(
    z: list[list[int | None]], hover: list[list[str]], frame: tuple[int, int], rows: int, levels: list[str]
) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "name": "life",
        "x": list(range(frame[0], frame[1] + 1)),
        "y": list(range(rows)),
        "z": z,
        "zmin": -0.5,
        "zmax": len(levels) - 0.5,
        "colorscale": flat_steps(levels),
        "showscale": False,
        "xgap": 2,
        "ygap": 3,
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": False,
    }


def _ticks(marks: Sequence[tuple[int, int, str]], theme: Theme) -> list[dict[str, Any]]:
    """A tick for each decode step, all in one shape: markers, or lines with gaps, draw far slower."""
    path = "".join(f"M{x},{y - 0.2:g}V{y + 0.2:g}" for x, y, _ in marks)
    return [{"type": "path", "name": "decode", "path": path, "line": {"width": 1.5, "color": theme.ink}}] if path else []


def _markers(marks: Mapping[str, list[tuple[int, int, str]]], theme: Theme) -> list[dict[str, Any]]:
    looks: dict[str, dict[str, Any]] = {
        "recompute": {"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": theme.ink}},
        "cached": {"symbol": "circle-dot", "size": 6, "color": theme.paper, "line": {"width": 1, "color": theme.ink}},
        "preempt": {"symbol": "x", "size": 9, "color": theme.alert, "line": {"width": 1, "color": theme.paper}},
        "finish": {"symbol": "square", "size": 7, "color": theme.ink, "line": {"width": 1, "color": theme.paper}},
    }
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [x for x, _, _ in marks[name]],
            "y": [y for _, y, _ in marks[name]],
            "hovertext": [text for _, _, text in marks[name]],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": look,
            "cliponaxis": True,
        }
        for name, look in looks.items()
        if marks[name]  # a trace costs time even when it is empty
    ]
