"""Latency distributions of several runs as rising curves: at each latency, the share of requests that were as fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.figures.experiment_timelines import DASHES
from app.figures.palette import Theme
from app.figures.template import Figure, axis, layout
from engine.observe.metrics import DEFINITIONS
from engine.workload.statistics import ecdf, spread

MOST_POINTS = 300


def experiment_ecdf(samples: Mapping[str, Sequence[float]], metric: str, theme: Theme) -> Figure:
    """One curve a run; milliseconds. ``samples``: name → latencies in seconds. ``metric``: ttft, tpot, itl or e2e."""
    data: list[dict[str, Any]] = []
    for place, (name, values) in enumerate(samples.items()):
        points = ecdf(values, MOST_POINTS)
        if not points:
            continue
        first = points[0][0] * 1000
        xs = [first, *(1000 * x for x, _ in points)]
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": name, "x": [float(f"{x:.6g}") for x in xs],
                "y": [0.0, *(round(100 * y, 3) for _, y in points)],
                "line": {"color": theme.hue(place), "width": 2, "dash": DASHES[place % len(DASHES)], "shape": "hv"},
                "hovertemplate": f"%{{y:.0f}} % within %{{x:,.4~g}} ms<extra>{name}</extra>",
            }
        )  # fmt: skip
    if not data:
        data = [{"type": "scatter", "mode": "lines", "name": "empty", "x": [], "y": []}]
    return {
        "data": data,
        "layout": layout(
            theme,
            height=260,
            margin={"l": 46, "r": 10, "t": 8, "b": 78},
            showlegend=True,
            legend={"orientation": "h", "x": 0, "y": -0.3, "font": {"color": theme.ink, "size": 12}},
            xaxis=axis(theme, title=f"{DEFINITIONS[metric].label}, ms", rangemode="tozero"),
            yaxis=axis(theme, title="% as fast or faster", range=[0, 102], tickvals=[0, 25, 50, 75, 95], showgrid=True),
        ),
    }


def experiment_ecdf_alt(samples: Mapping[str, Sequence[float]], metric: str) -> str:
    """Medians in words."""
    texts = []
    for name, values in samples.items():
        median = spread(list(values)).median
        texts.append(f"{name}: {'no sample' if median is None else f'median {1000 * median:,.4g} ms of {len(values)}'}")
    return f"{DEFINITIONS[metric].label} as cumulative distributions. {'; '.join(texts)}."
