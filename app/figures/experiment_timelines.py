"""The batches of several variants, one above the other on one time axis and one scale, and a slider that plays them all.

::

    static       ▆▆▂▂▂▂▂▂   ▆▆▂▂▂▂▂▂        a bar is a step: as wide as it took, as high as the tokens it computed
    continuous   ▆▃▂▂▃▂▂▃▂▂▂                 the same scale, and empty where it is done
    tokens       ／￣￣                       tokens generated so far, all variants
                 ├────●────────────┤          one cursor through all of them

The slider's frames are part of the figure, so it plays in the browser, in a notebook and in a file without a server.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from app.figures.batch import KIND_WORDS, KINDS, batch_figure, heights, parts
from app.figures.palette import Theme, mix
from app.figures.template import Figure, axis, layout, root_ticks
from engine.core.trace import StepTrace
from engine.workload.results import RunRecords

MOST_STEPS = 900
"""Longer runs are drawn with several steps a bar, and the picture says so."""
THIN = 60
"""Bars of longer runs have no edges: they would hide the bars."""
FRAMES = 60
"""Places of the slider."""
PANEL, PROGRESS, GAP, TOP, BOTTOM = 132, 118, 44, 34, 128
"""Pixels: a variant's batch, the tokens so far, between panels, above and below all."""
DASHES = ("solid", "6px,3px", "2px,2px", "8px,3px,2px,3px")
SYMBOLS = ("circle", "diamond", "square", "triangle-up")


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of one variant at one time."""

    step: int
    running: int
    waiting: int
    blocks: int
    tokens: int
    state: str
    """"before", "idle", "step" or "done"."""


class Track:
    """One variant's steps on the shared time axis (seconds from its first arrival)."""

    def __init__(self, records: RunRecords) -> None:
        self.name = records.variant
        self.steps: list[StepTrace] = [step for step in records.steps if step.scheduled]
        self.begin = records.begin
        self.numbers = {trace.request_id: trace.number for trace in records.requests}
        self.starts = [step.start + step.overlap - self.begin for step in self.steps]
        self.ends = [step.end - self.begin for step in self.steps]
        self.tokens = list(accumulate(sum(row.sampled >= 0 for row in step.scheduled) for step in self.steps))
        self.length = max(self.ends, default=0.0)

    def at(self, moment: float) -> Moment:
        """What it does then."""
        place = bisect_right(self.starts, moment) - 1
        if place < 0:
            return Moment(-1, 0, 0, 0, 0, "before")
        step = self.steps[place]
        over = moment >= self.ends[place]
        tokens = self.tokens[place] if over else (self.tokens[place - 1] if place else 0)
        if over and place == len(self.steps) - 1:
            return Moment(step.index, 0, 0, 0, tokens, "done")
        return Moment(step.index, step.num_running, step.num_waiting, step.kv_used, tokens, "idle" if over else "step")

    def words(self, moment: float) -> str:
        """The same for the picture."""
        now = self.at(moment)
        total = self.tokens[-1] if self.tokens else 0
        if now.state == "before":
            return "not begun"
        if now.state == "done":
            return f"done: {total:,} tokens in {len(self.steps):,} steps"
        return (
            f"step {now.step} · {now.running} running · {now.waiting} waiting · {now.blocks} KV blocks · "
            f"{now.tokens:,} of {total:,} tokens"
        )


def experiment_timelines(shown: Sequence[RunRecords], theme: Theme) -> Figure:
    """All variants' batches, tokens so far, and the slider. Time: seconds since the first arrival of each run."""
    tracks = [Track(records) for records in shown]
    end = max((track.length for track in tracks), default=0.0) or 1.0
    unit, factor = ("ms", 1000.0) if end < 2.0 else ("s", 1.0)
    top = max((step.num_tokens for track in tracks for step in track.steps), default=1)
    data: list[dict[str, Any]] = []
    made = layout(theme, barmode="stack", bargap=0, showlegend=True)
    height = TOP + len(tracks) * (PANEL + GAP) + PROGRESS + BOTTOM
    plot = height - TOP - BOTTOM
    thin = any(len(track.steps) > THIN for track in tracks)
    for place, track in enumerate(tracks):
        high = 1 - place * (PANEL + GAP) / plot
        name = _axis_name(place)
        data += _batch(track, theme, factor, place, thin)
        made["yaxis" + name] = axis(
            theme, domain=[high - PANEL / plot, high], range=[0, 1.05 * math.sqrt(top)], anchor="x", **_ticks(top)
        )
    most = max((track.tokens[-1] for track in tracks if track.tokens), default=1)
    made["yaxis" + _axis_name(len(tracks))] = axis(
        theme, domain=[0, PROGRESS / plot], range=[0, most * 1.05], title="tokens so far", nticks=4, anchor="x"
    )
    data += [_progress(track, theme, factor, unit, place, len(tracks)) for place, track in enumerate(tracks)]
    made.update(
        height=height,
        margin={"l": 58, "r": 12, "t": TOP, "b": BOTTOM},
        xaxis=axis(
            theme, range=[-0.005 * end * factor, 1.01 * end * factor], title=f"{unit} since the first arrival",
            showgrid=False, anchor="y" + _axis_name(len(tracks)),
        ),
        shapes=_cursors(theme, 0.0, len(tracks) + 1),
        annotations=_titles(tracks, 0.0, plot, theme),
        legend={
            "orientation": "h", "x": 1, "xanchor": "right", "y": PROGRESS / plot, "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)", "traceorder": "normal", "font": {"color": theme.ink, "size": 12},
        },
        sliders=[_slider(end, factor, unit, theme)],
        updatemenus=[_buttons(theme)],
    )  # fmt: skip
    moments = [end * number / FRAMES for number in range(FRAMES + 1)]
    frames = [
        {
            "name": str(number),
            "data": [],
            "traces": [],
            "layout": {
                "shapes": _cursors(theme, moment * factor, len(tracks) + 1),
                "annotations": _titles(tracks, moment, plot, theme),
            },
        }
        for number, moment in enumerate(moments)
    ]
    return {"data": data, "layout": made, "frames": frames}


def experiment_timelines_alt(shown: Sequence[RunRecords]) -> str:
    """The same in words."""
    texts = []
    for records in shown:
        track = Track(records)
        total = track.tokens[-1] if track.tokens else 0
        texts.append(f"{track.name}: {len(track.steps)} steps, {total} tokens, {track.length:.3g} seconds")
    return "Batches of all variants on one time axis. " + "; ".join(texts) + "."


def _axis_name(place: int) -> str:
    return "" if place == 0 else str(place + 1)


def _batch(track: Track, theme: Theme, factor: float, place: int, thin: bool) -> list[dict[str, Any]]:
    """The bars of one variant: as the lab draws them, but on the time axis."""
    if len(track.steps) > MOST_STEPS:
        traces = _binned(track, theme, factor)
    else:
        drawn = batch_figure(track.steps, track.numbers, 1, (0, 1), theme, root=True)["data"]
        index = {step.index: number for number, step in enumerate(track.steps)}
        traces = []
        for trace in (trace for trace in drawn if trace["type"] == "bar"):
            places = [index[x] for x in trace["x"]]
            marker = {**trace.get("marker", {})}
            if thin and "line" in marker:
                marker["line"] = {**marker["line"], "width": 0}
            changed = {
                "x": [_round(factor * (track.starts[p] + track.ends[p]) / 2) for p in places],
                "width": [_round(factor * (track.ends[p] - track.starts[p])) for p in places],
                "y": [round(height, 3) for height in trace["y"]],
                "marker": marker,
            }
            traces.append({**{key: value for key, value in trace.items() if key != "customdata"}, **changed})
    return [{**trace, "yaxis": "y" + _axis_name(place), "showlegend": False} for trace in traces]


def _binned(track: Track, theme: Theme, factor: float) -> list[dict[str, Any]]:
    """Several steps a bar: the mean tokens of each kind."""
    size = -(-len(track.steps) // MOST_STEPS)
    groups = [range(begin, min(begin + size, len(track.steps))) for begin in range(0, len(track.steps), size)]
    sums = []
    for group in groups:
        pieces = [part for place in group for part in parts(track.steps[place], track.numbers)]
        sums.append([sum(p.tokens for p in pieces if p.kind == kind) / len(group) for kind in KINDS])
    tall = [heights(row, root=True) for row in sums]  # type: ignore[arg-type]
    traces = []
    for number, kind in enumerate(KINDS):
        chosen = [place for place, row in enumerate(sums) if row[number] > 0]
        hue = theme.muted if kind == "padding" else theme.ink
        spans = [(track.starts[groups[p][0]], track.ends[groups[p][-1]]) for p in chosen]
        traces.append(
            {
                "type": "bar", "name": kind,
                "x": [_round(factor * (low + high) / 2) for low, high in spans],
                "width": [_round(factor * (high - low)) for low, high in spans],
                "y": [round(tall[p][number], 3) for p in chosen],
                "marker": {"color": mix(hue, theme.paper, 0.75 if kind == "prefill" else 0.3), "line": {"width": 0}},
                "hovertext": [
                    f"steps {track.steps[groups[p][0]].index} to {track.steps[groups[p][-1]].index}: {KIND_WORDS[kind]}<br>"
                    f"{sums[p][number]:.1f} tokens a step"
                    for p in chosen
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )  # fmt: skip
    return traces


def _progress(track: Track, theme: Theme, factor: float, unit: str, place: int, panels: int) -> dict[str, Any]:
    """Tokens generated so far: a rising line."""
    step = max(1, len(track.ends) // 400)
    kept = sorted({*range(0, len(track.ends), step), len(track.ends) - 1} - {-1})
    return {
        "type": "scatter", "mode": "lines", "name": track.name, "yaxis": "y" + _axis_name(panels), "showlegend": True,
        "x": [0.0, *(_round(factor * track.ends[p]) for p in kept)], "y": [0, *(track.tokens[p] for p in kept)],
        "line": {"color": theme.hue(place), "width": 2, "dash": DASHES[place % len(DASHES)], "shape": "hv"},
        "hovertemplate": f"%{{y:,}} tokens after %{{x:,.4~g}} {unit}<extra>{track.name}</extra>",
    }  # fmt: skip


def _titles(tracks: Sequence[Track], moment: float, plot: int, theme: Theme) -> list[dict[str, Any]]:
    """Above each batch: whose it is, and its state at the cursor."""
    notes = []
    for place, track in enumerate(tracks):
        size = -(-len(track.steps) // MOST_STEPS)
        many = f" · a bar is the mean of {size} steps" if size > 1 else ""
        notes.append(
            {
                "text": f"<b>{track.name}</b>  {track.words(moment)}{many}", "xref": "paper", "yref": "paper", "x": 0,
                "y": 1 - place * (PANEL + GAP) / plot, "xanchor": "left", "yanchor": "bottom", "showarrow": False,
                "font": {"color": theme.ink, "size": 12}, "align": "left",
            }
        )  # fmt: skip
    return notes


def _cursors(theme: Theme, x: float, panels: int) -> list[dict[str, Any]]:
    """The cursor in time, in every panel."""
    return [
        {
            "type": "line", "xref": "x", "yref": f"y{_axis_name(place)} domain", "x0": _round(x), "x1": _round(x), "y0": 0,
            "y1": 1, "layer": "above", "line": {"color": theme.ink, "width": 1.5}, "name": "cursor",
        }
        for place in range(panels)
    ]  # fmt: skip


def _slider(end: float, factor: float, unit: str, theme: Theme) -> dict[str, Any]:
    go = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    digits = 0 if factor > 1 and end > 0.05 else 2
    return {
        "active": 0, "x": 0.0, "len": 1.0, "y": 0, "yanchor": "top", "pad": {"t": 62, "b": 0, "l": 118},
        "currentvalue": {
            "prefix": "all at ", "suffix": f" {unit}", "font": {"color": theme.ink, "size": 12}, "xanchor": "left",
        },
        "font": {"color": "rgba(0,0,0,0)", "size": 10}, "bgcolor": theme.panel, "activebgcolor": theme.line,
        "bordercolor": theme.line, "tickcolor": theme.line, "ticklen": 3, "minorticklen": 0,
        "steps": [
            {"method": "animate", "label": f"{end * factor * number / FRAMES:,.{digits}f}", "args": [[str(number)], go]}
            for number in range(FRAMES + 1)
        ],
    }  # fmt: skip


def _buttons(theme: Theme) -> dict[str, Any]:
    play = {
        "mode": "immediate",
        "fromcurrent": True,
        "frame": {"duration": 120, "redraw": True},
        "transition": {"duration": 0},
    }
    stop = {"mode": "immediate", "frame": {"duration": 0, "redraw": False}}
    return {
        "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 0, "yanchor": "top", "showactive": False,
        "pad": {"t": 74, "l": 0, "r": 8}, "bgcolor": theme.panel, "bordercolor": theme.line,
        "font": {"color": theme.ink, "size": 12},
        "buttons": [
            {"label": "Play", "method": "animate", "args": [None, play]},
            {"label": "Pause", "method": "animate", "args": [[None], stop]},
        ],
    }  # fmt: skip


def _ticks(top: int) -> dict[str, Any]:
    return {"title": "tokens (√)", **root_ticks(top)}


def _round(value: float) -> float:
    return float(f"{value:.6g}")
