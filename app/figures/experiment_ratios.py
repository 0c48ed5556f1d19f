"""How many times as much each number is as in the first variant, with its interval, and what of it is clear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from app.figures.experiment_timelines import SYMBOLS
from app.figures.palette import Theme
from app.figures.template import Figure, axis, layout
from engine.workload.results import NUMBERS, Difference
from engine.workload.statistics import MIN_EFFECT

FARTHEST = 100.0
"""An interval that reaches farther runs out of the picture: few repetitions on a busy machine make it of any length."""
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def experiment_ratios(found: Sequence[Difference], theme: Theme) -> Figure:
    """One row a timed number, one mark a variant; a logarithmic axis, so that twice and half are as far from 1."""
    timed = [d for d in found if d.ratio is not None and d.ratio > 0 and not NUMBERS[d.name].counted]
    names = [name for name in NUMBERS if any(d.name == name for d in timed)]
    variants = list(dict.fromkeys(d.variant for d in timed))
    data: list[dict[str, Any]] = []
    far = 1.3
    for place, variant in enumerate(variants):
        shift = (place - (len(variants) - 1) / 2) * 0.24
        chosen = [d for d in timed if d.variant == variant]
        ratios = [float(d.ratio or 1) for d in chosen]
        lows = [d.interval[0] if d.interval else ratio for d, ratio in zip(chosen, ratios, strict=True)]
        highs = [d.interval[1] if d.interval else ratio for d, ratio in zip(chosen, ratios, strict=True)]
        far = max([far, *(abs_ratio(x) for x in (*lows, *highs) if x > 0)])
        filled = [theme.hue(place + 1) if d.kind == "clear" else theme.paper for d in chosen]
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": variant, "x": [round(r, 4) for r in ratios],
                "y": [names.index(d.name) + shift for d in chosen],
                "error_x": {
                    "type": "data", "symmetric": False, "color": theme.hue(place + 1), "thickness": 1.5, "width": 4,
                    "array": [round(high - r, 4) for high, r in zip(highs, ratios, strict=True)],
                    "arrayminus": [round(r - low, 4) for low, r in zip(lows, ratios, strict=True)],
                },
                "marker": {
                    "size": 9, "symbol": SYMBOLS[(place + 1) % len(SYMBOLS)], "color": filled,
                    "line": {"color": theme.hue(place + 1), "width": 2},
                },
                "hovertext": [f"{NUMBERS[d.name].label}: {d.words}" for d in chosen],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )  # fmt: skip
    base = found[0].base if found else "the first variant"
    reach = math.log10(min(far, FARTHEST)) * 1.08
    return {
        "data": data or [{"type": "scatter", "x": [], "y": []}],
        "layout": layout(
            theme,
            height=30 * max(1, len(names)) + 96,
            margin={"l": 178, "r": 14, "t": 8, "b": 84},
            showlegend=len(variants) > 1,
            legend={
                "orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"color": theme.ink},
            },
            xaxis=axis(
                theme, type="log", range=[-reach, reach], title=f"times as much as with “{base}” (filled: clear)",
                tickvals=list(TICKS), ticktext=[f"{tick:g}" for tick in TICKS],
            ),
            yaxis=axis(
                theme, range=[len(names) - 0.4, -0.6], tickvals=list(range(len(names))),
                ticktext=[NUMBERS[name].label for name in names], showgrid=False, tickfont={"color": theme.ink, "size": 12},
            ),
            shapes=[
                {
                    "type": "rect", "xref": "x", "yref": "paper", "x0": 1 / (1 + MIN_EFFECT), "x1": 1 + MIN_EFFECT,
                    "y0": 0, "y1": 1, "layer": "below", "fillcolor": theme.grid, "line": {"width": 0},
                },
                {
                    "type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "layer": "below",
                    "line": {"color": theme.ink, "width": 1.5},
                },
            ],
        ),
    }  # fmt: skip


def abs_ratio(value: float) -> float:
    """How far from 1, as a factor of at least 1."""
    return max(value, 1 / value)


def experiment_ratios_alt(found: Sequence[Difference]) -> str:
    """The clear ones in words."""
    clear = [f"{NUMBERS[d.name].label}: {d.words}" for d in found if d.kind == "clear"]
    return "Ratios to the first variant. " + (" ".join(clear) or "No timed difference is clear.")
