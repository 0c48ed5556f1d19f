"""The frame every picture shares: a compact layout of our own instead of Plotly's default template (6.5 kB a figure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from app.figures.palette import Theme

Figure = dict[str, Any]
FONT = '"Source Sans", "Source Sans 3", system-ui, sans-serif'


def layout(theme: Theme, **changes: Any) -> dict[str, Any]:
    """A bare layout in the theme's colours: no animation, no zoom, hover labels that read on both themes."""
    base: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.ink},
        "margin": {"l": 44, "r": 10, "t": 6, "b": 34},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": theme.panel, "bordercolor": theme.line, "font": {"color": theme.ink, "size": 12}},
        "template": {"layout": {}},
    }
    return {**base, **changes}


def axis(theme: Theme, **changes: Any) -> dict[str, Any]:
    """A quiet axis with a fixed range, drawn in the theme's colours."""
    base: dict[str, Any] = {
        "fixedrange": True,
        "zeroline": False,
        "gridcolor": theme.grid,
        "linecolor": theme.line,
        "tickfont": {"color": theme.muted, "size": 11},
        # These two, and a title without a standoff, spare Plotly measuring every label: a third of the time a picture takes.
        "tickangle": 0,
        "ticklabeloverflow": "allow",
        "title": {"font": {"color": theme.muted, "size": 11}},
    }
    merged = {**base, **changes}
    if isinstance(changes.get("title"), str):
        merged["title"] = {**base["title"], "text": changes["title"]}
    return merged


def hidden_axis(**changes: Any) -> dict[str, Any]:
    """An axis that only holds a range."""
    return {"fixedrange": True, "visible": False, **changes}


def vertical_line(theme: Theme, x: float) -> dict[str, Any]:
    """The cursor in time."""
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "layer": "above",
        "line": {"color": theme.ink, "width": 1.5}, "name": "cursor",
    }  # fmt: skip


def note(theme: Theme, text: str, x: float = 1.0, y: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A small text in the frame, placed in paper coordinates."""
    base: dict[str, Any] = {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False, "xanchor": "right",
        "yanchor": "top", "font": {"color": theme.muted, "size": 11}, "bgcolor": theme.paper, "borderpad": 1,
    }  # fmt: skip
    return {**base, **changes}


def root_ticks(top: int) -> dict[str, Any]:
    """Ticks of a square-root axis from 0 to ``top``, none nearer to the one before than a tenth of the axis."""
    values = [0]
    for value in (1, 4, 16, 64, 256, 1024, 4096, 16384):
        if value <= top and math.sqrt(value) - math.sqrt(values[-1]) >= 0.1 * math.sqrt(top):
            values.append(value)
    return {"tickvals": [math.sqrt(value) for value in values], "ticktext": [f"{value:,}" for value in values]}


def many(number: int, noun: str) -> str:
    """1 token, 2 tokens, 1,024 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def boxes(cells: Sequence[tuple[float, float]], inset: float = 0.08) -> str:
    """One SVG path of many unit squares around the cell centres: a single shape however many cells."""
    low, high = inset - 0.5, 0.5 - inset
    return "".join(f"M{x + low:g},{y + low:g}H{x + high:g}V{y + high:g}H{x + low:g}Z" for x, y in cells)
