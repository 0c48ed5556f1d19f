"""KV memory over context length and requests at once, with the line where the memory ends."""

from __future__ import annotations

import math
from typing import Any

from app.figures.palette import Theme, mix
from app.figures.template import Figure, axis, layout, note
from engine.observe.formulas import paged_kv, sequences_that_fit

MOST_REQUESTS = 512


def contexts(longest: int) -> list[int]:
    """128, 256 … up to the model's own limit."""
    found = [2**power for power in range(7, 21) if 2**power < longest]
    return [*found, longest]


def memory_figure(
    bytes_per_token: float, block_size: int, longest: int, memory: float, theme: Theme, chosen: tuple[int, int] | None = None
) -> Figure:
    """A heat map; both axes double from cell to cell.

    ``longest``: the longest context shown, tokens. ``memory``: bytes for KV; 0 or less: nothing fits. ``chosen``: a
    (context, requests) to mark.
    """
    columns = contexts(longest)
    rows = [2**power for power in range(int(math.log2(MOST_REQUESTS)) + 1)]
    sizes = [[paged_kv(context, block_size, bytes_per_token, count).bytes for context in columns] for count in rows]
    fits = [sequences_that_fit(memory, c, block_size, bytes_per_token) if memory > 0 else 0 for c in columns]
    low, high = math.log2(sizes[0][0]), math.log2(sizes[-1][-1])
    fill = [mix(theme.hue(0), theme.paper, share) for share in (0.06, 0.25, 0.5, 0.8)]
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap", "name": "memory", "x": list(range(len(columns))), "y": list(range(len(rows))),
            "z": [[round(math.log2(value), 3) for value in row] for row in sizes], "zmin": low, "zmax": high,
            "colorscale": [[place / 3, colour] for place, colour in enumerate(fill)], "showscale": False,
            "xgap": 1, "ygap": 1,
            "hovertext": [
                [
                    f"{count:,} × {context:,} tokens: {_size(value)}<br>{'fits' if count <= fit else 'does not fit'} "
                    f"({fit:,} of this length fit)"
                    for context, value, fit in zip(columns, row, fits, strict=True)
                ]
                for count, row in zip(rows, sizes, strict=True)
            ],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "text": [
                [_size(value) if count <= fit else "" for value, fit in zip(row, fits, strict=True)]
                for count, row in zip(rows, sizes, strict=True)
            ],
            "texttemplate": "%{text}" if len(columns) <= 12 else "", "textfont": {"size": 10},
        },
        _line(fits, len(rows), theme),
    ]  # fmt: skip
    marked = chosen is not None and 1 <= chosen[1] <= MOST_REQUESTS
    if chosen is not None and marked:
        data.append(_mark(chosen, columns, theme))
    words = _ends(fits) + ("; the circle is your context" if marked else "")
    return {
        "data": data,
        "layout": layout(
            theme,
            height=430,
            margin={"l": 54, "r": 12, "t": 26, "b": 42},
            xaxis=axis(
                theme, title="context of each request, tokens", tickvals=list(range(len(columns))),
                ticktext=[_count(c) for c in columns], range=[-0.5, len(columns) - 0.5], showgrid=False,
            ),
            yaxis=axis(
                theme, title="requests at once", tickvals=list(range(len(rows))), ticktext=[f"{r:,}" for r in rows],
                range=[-0.5, len(rows) - 0.5], showgrid=False,
            ),
            annotations=[
                note(theme, words, 1, 1.07, font={"color": theme.ink, "size": 12})
            ],
        ),
    }  # fmt: skip


def memory_alt(bytes_per_token: float, block_size: int, longest: int, memory: float) -> str:
    """How many fit, in words."""
    parts = [
        f"{sequences_that_fit(memory, c, block_size, bytes_per_token) if memory > 0 else 0:,} of {c:,} tokens"
        for c in contexts(longest)
    ]
    return f"KV memory over context and requests, an estimate. {_size(max(0.0, memory))} hold {', '.join(parts)}."


def _ends(fits: list[int]) -> str:
    if min(fits) >= MOST_REQUESTS:
        return "everything shown fits (estimate)"
    return "above the red line the memory ends (estimate)" if max(fits) else "nothing fits (estimate)"


def _line(fits: list[int], rows: int, theme: Theme) -> dict[str, Any]:
    """A staircase along the cells' edges: every cell below it fits, every cell above it does not."""
    heights = [min(rows - 0.5, _edge(fit)) for fit in fits]
    xs = [x for place in range(len(fits)) for x in (place - 0.5, place + 0.5)]
    return {
        "type": "scatter", "mode": "lines", "name": "memory ends", "x": xs, "y": [h for h in heights for _ in range(2)],
        "line": {"color": theme.alert, "width": 3}, "hoverinfo": "skip",
    }  # fmt: skip


def _edge(fit: int) -> float:
    """The upper edge of the last row that fits: 238 fit lies between the rows of 128 and of 256."""
    return fit.bit_length() - 0.5


def _mark(chosen: tuple[int, int], columns: list[int], theme: Theme) -> dict[str, Any]:
    context, count = chosen
    place = next((p for p, c in enumerate(columns) if c >= context), len(columns) - 1)
    before = columns[place - 1] if place else context
    share = math.log2(context / before) / math.log2(columns[place] / before) if place and columns[place] != before else 1.0
    return {
        "type": "scatter", "mode": "markers", "name": "chosen", "x": [max(-0.4, place - 1 + share) if place else 0],
        "y": [_edge(count)],
        "marker": {"symbol": "circle-open", "size": 16, "color": theme.ink, "line": {"color": theme.ink, "width": 3}},
        "hovertemplate": f"{context:,} tokens: {count:,} requests fit (estimate)<extra></extra>",
    }  # fmt: skip


def _count(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _size(count: float) -> str:
    for unit, step in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= step:
            return f"{count / step:,.3g} {unit}iB"
    return f"{count:,.0f} B"
