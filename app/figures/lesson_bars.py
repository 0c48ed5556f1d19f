"""Bars and lines of lessons: tokens computed in each step, time of each step, and shares of a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.figures.palette import Theme, mix
from app.figures.template import Figure, axis, layout
from engine.core.trace import StepTrace


def per_step_figure(runs: Mapping[str, Sequence[StepTrace]], what: str, theme: Theme, cursor: int | None = None) -> Figure:
    """One line for each run over its steps. ``what``: "tokens" computed, or "ms" from the step's start to its tokens."""
    data = []
    for place, (name, steps) in enumerate(runs.items()):
        worked = [step for step in steps if step.scheduled]
        values = [_value(step, what) for step in worked]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "x": [step.index for step in worked], "y": values,
                "line": {"color": theme.hue(place), "width": 2, "dash": "solid" if place == 0 else "4px,2px"},
                "marker": {"symbol": "circle" if place == 0 else "diamond", "size": 5, "color": theme.hue(place)},
                "hovertemplate": f"{name}<br>step %{{x}}: %{{y:,.4~g}} {what}<extra></extra>",
            }
        )  # fmt: skip
    shapes = [] if cursor is None else [_cursor(theme, cursor)]
    return {
        "data": data,
        "layout": layout(
            theme,
            height=250,
            margin={"l": 56, "r": 12, "t": 8, "b": 64},
            showlegend=True,
            legend={"orientation": "h", "x": 0, "y": -0.24, "font": {"color": theme.ink, "size": 12}},
            xaxis=axis(theme, title="step"),
            yaxis=axis(theme, title="tokens computed" if what == "tokens" else "ms a step", rangemode="tozero"),
            shapes=shapes,
        ),
    }  # fmt: skip


def per_step_alt(runs: Mapping[str, Sequence[StepTrace]], what: str) -> str:
    """First and last value of each run."""
    parts = []
    for name, steps in runs.items():
        worked = [step for step in steps if step.scheduled]
        if worked:
            first, last = _value(worked[0], what), _value(worked[-1], what)
            parts.append(f"{name}: from {first:,.4g} to {last:,.4g} {what} over {len(worked)} steps")
    return f"{'Tokens computed in each step' if what == 'tokens' else 'Milliseconds of each step'}. {'; '.join(parts)}."


def _value(step: StepTrace, what: str) -> float:
    return step.num_tokens if what == "tokens" else round(1000 * step.duration, 4)


def _cursor(theme: Theme, step: int) -> dict[str, Any]:
    return {
        "type": "line", "name": "cursor", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1,
        "line": {"color": theme.ink, "width": 1.5},
    }  # fmt: skip


def sizes_figure(parts: Mapping[str, float], theme: Theme, unit: str) -> Figure:
    """A waterfall: what each named part adds to (or takes from) the sum before it; a name that ends in '=' is the sum."""
    names, lows, lengths, colours, texts = [], [], [], [], []
    total = 0.0
    for name, value in parts.items():
        whole = name.endswith("=")
        begin, end = (0.0, value) if whole else (total, total + value)
        total = end
        names.append(name.rstrip("= "))
        lows.append(min(begin, end))
        lengths.append(abs(end - begin))
        colours.append(theme.hue(0) if whole else theme.hue(2) if value >= 0 else theme.hue(1))
        texts.append(f"{value:,.0f}" if whole else f"{value:+,.0f}")
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": names, "x": lengths, "base": lows, "text": texts,
                "textposition": "outside", "cliponaxis": False, "textfont": {"color": theme.ink, "size": 12},
                "marker": {"color": [mix(c, theme.paper, 0.75) for c in colours], "line": {"color": colours, "width": 1}},
                "hovertemplate": f"%{{y}}: %{{text}} {unit}<extra></extra>",
            }
        ],
        "layout": layout(
            theme,
            height=40 * len(names) + 56,
            margin={"l": 190, "r": 56, "t": 6, "b": 40},
            xaxis=axis(theme, title=unit, rangemode="tozero"),
            yaxis=axis(theme, autorange="reversed", showgrid=False, tickfont={"color": theme.ink, "size": 12}),
        ),
    }  # fmt: skip


def sizes_alt(parts: Mapping[str, float], unit: str) -> str:
    """The same in a sentence."""
    return "Sizes: " + "; ".join(f"{name.rstrip('= ')} {value:,.0f} {unit}" for name, value in parts.items()) + "."
