"""One request's life on a time axis, with the latencies drawn where they sit."""

from __future__ import annotations

from typing import Any

from app.figures.palette import Theme
from app.figures.template import Figure, axis, hidden_axis, layout
from engine.core.trace import RequestTrace, letter
from engine.observe.metrics import parts

ROWS = {"latency": 2.0, "life": 1.0, "gaps": 0.0}
_SHARES = {"tokenise": 0.25, "queue": 0.12, "prefill": 1.0, "decode": 0.35}
_NAMES = {"tokenise": "tokenise", "queue": "queue", "prefill": "prefill", "decode": "decode"}


def request_life_figure(request: RequestTrace, theme: Theme) -> Figure:
    """Tokenise, queue, prefill and decode as bars, tokens as ticks, latencies as brackets. Axis: ms since arrival."""
    split = parts(request)
    begin = 0.0
    bars: list[dict[str, Any]] = []
    for name in ("tokenise", "queue", "prefill", "decode"):
        seconds = getattr(split, name)
        if seconds is None:
            continue
        length = seconds * 1000
        bars.append(_bar(name, begin, length, request.number, theme))
        begin += length
    ticks = [(moment - request.arrival) * 1000 for moment in request.token_times]
    end = max([begin, *ticks, 0.001])
    marks = {
        "type": "scatter", "mode": "markers", "x": ticks, "y": [ROWS["life"]] * len(ticks), "showlegend": False,
        "marker": {"symbol": "line-ns", "size": 22, "line": {"width": 1.5, "color": theme.ink}},
        "text": [f"token {index + 1} at {tick:,.1f} ms" for index, tick in enumerate(ticks)],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    shapes, notes = _brackets(ticks, end, theme)
    return {
        "data": [*bars, marks],
        "layout": layout(
            theme,
            barmode="overlay",
            height=230,
            margin={"l": 10, "r": 14, "t": 8, "b": 38},
            xaxis=axis(theme, title="ms since arrival (engine clock)", range=[-0.02 * end, 1.04 * end]),
            yaxis=hidden_axis(range=[-0.75, 2.75]),
            shapes=shapes,
            annotations=notes,
        ),
    }


def _bar(name: str, begin: float, length: float, number: int, theme: Theme) -> dict[str, Any]:
    """Solid prefill, light decode with a solid edge, and quiet shades for what comes before."""
    decode = name == "decode"
    return {
        "type": "bar", "orientation": "h", "x": [length], "base": [begin], "y": [ROWS["life"]], "width": 0.5, "name": name,
        "marker": {
            "color": theme.tint(number, _SHARES[name]) if name != "prefill" else theme.hue(number),
            "line": {"color": theme.hue(number), "width": 1.5 if decode else 0.5},
            "pattern": {"shape": "." if name == "queue" else "", "fgcolor": theme.muted, "size": 5},
        },
        "hovertemplate": f"{_NAMES[name]}: {length:,.2f} ms<extra></extra>", "showlegend": False,
    }  # fmt: skip


def _brackets(ticks: list[float], end: float, theme: Theme) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not ticks:
        return [], []
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    spans = [("TTFT", 0.0, ticks[0], 1.62)]
    if len(ticks) > 1:
        spans.append((f"{len(ticks) - 1} {'gap' if len(ticks) == 2 else 'gaps'}, an ITL each", ticks[0], ticks[-1], 0.38))
    spans.append(("E2E latency", 0.0, ticks[-1], 2.2))
    mean = f"<br>TPOT, their mean · {(ticks[-1] - ticks[0]) / max(1, len(ticks) - 1):,.1f} ms"
    for text, low, high, y in spans:
        line = {"color": theme.ink, "width": 1.2}
        shapes.append({"type": "line", "x0": low, "x1": high, "y0": y, "y1": y, "line": line})
        shapes += [{"type": "line", "x0": x, "x1": x, "y0": y - 0.1, "y1": y + 0.1, "line": line} for x in (low, high)]
        below = y < 1
        x, anchor = _label_place(low, high, end)
        notes.append(
            {
                "x": x, "y": y, "text": f"{text} · {high - low:,.1f} ms{mean if below else ''}", "showarrow": False,
                "xanchor": anchor, "yanchor": "top" if below else "bottom", "align": anchor,
                "font": {"color": theme.ink, "size": 12},
            }
        )  # fmt: skip
    return shapes, notes


def _label_place(low: float, high: float, end: float) -> tuple[float, str]:
    """Where a bracket's label fits: in its middle, or grown from its outer edge near an end of the axis."""
    middle = (low + high) / 2
    if middle < 0.3 * end:
        return low, "left"
    if middle > 0.7 * end:
        return high, "right"
    return middle, "center"


def request_life_alt(request: RequestTrace) -> str:
    """The same in a sentence."""
    split = parts(request)
    named = [(name, getattr(split, name)) for name in ("tokenise", "queue", "prefill", "decode")]
    pieces = ", ".join(f"{name} {seconds * 1000:,.1f} ms" for name, seconds in named if seconds is not None)
    return f"Request {letter(request.number)}: {pieces or 'no token yet'}; {request.output_tokens} output tokens."
