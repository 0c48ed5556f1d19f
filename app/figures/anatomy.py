"""Where each step's time went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from app.figures.palette import Theme, mix
from app.figures.template import Figure, axis, layout
from engine.core.trace import StepTrace
from engine.observe.metrics import anatomy

PARTS = {
    "forward": "forward pass: the model computes",
    "sample": "sample: choose the tokens",
    "prepare": "prepare: build the inputs",
    "schedule": "schedule: who computes what",
    "postprocess": "postprocess: text, blocks, records",
    "other_labs": "steps of other labs on this machine",
    "outside": "outside: idle, or handing over results",
}
MOST_BARS = 120


def anatomy_figure(steps: Sequence[StepTrace], theme: Theme) -> Figure:
    """Milliseconds of each part, stacked, over the newest ``MOST_BARS`` steps that computed something."""
    shown = [step for step in steps if step.scheduled][-MOST_BARS:]
    before = {step.index: previous for previous, step in pairwise(steps)}
    split = [anatomy(step, before.get(step.index)) for step in shown]
    colours = _colours(theme)
    data = []
    for name, words in PARTS.items():
        values = [round(getattr(one, name) * 1000, 4) for one in split]
        data.append(
            {
                "type": "bar", "name": words, "x": [step.index for step in shown], "y": values,
                "marker": {
                    "color": colours[name][0],
                    "pattern": {"shape": colours[name][1], "fgcolor": theme.ink, "size": 5},
                },
                "hovertemplate": f"step %{{x}} · {name.replace('_', ' ')} %{{y:,.2f}} ms<extra></extra>",
            }
        )  # fmt: skip
    return {"data": data, "layout": _stacked(theme, height=320, bottom=108, legend=-0.24)}


def _stacked(theme: Theme, height: int, bottom: int, legend: float) -> dict[str, Any]:
    """The layout of bars in parts: its height and bottom margin in pixels, and where below the bars the legend lies."""
    return layout(
        theme,
        barmode="stack",
        bargap=0.15,
        height=height,
        margin={"l": 52, "r": 10, "t": 8, "b": bottom},
        showlegend=True,
        legend={"orientation": "h", "y": legend, "x": 0, "font": {"size": 11, "color": theme.ink}},
        xaxis=axis(theme, title="step"),
        yaxis=axis(theme, title="ms", rangemode="tozero"),
    )


def _colours(theme: Theme) -> dict[str, tuple[str, str]]:
    hue = theme.hue
    return {
        "forward": (hue(0), ""),
        "sample": (hue(3), ""),
        "prepare": (hue(6), "/"),
        "schedule": (hue(2), ""),
        "postprocess": (hue(7), "\\"),
        "other_labs": (theme.muted, "x"),
        "outside": (mix(theme.muted, theme.paper, 0.3), "."),
    }


def anatomy_alt(steps: Sequence[StepTrace]) -> str:
    """The shares over all given steps, in a sentence."""
    computed = [step for step in steps if step.scheduled]
    if not computed:
        return "No step was computed yet."
    split = [anatomy(step) for step in computed]
    total = sum(one.total for one in split) or 1.0
    shares = {name: sum(getattr(one, name) for one in split) / total for name in PARTS if name != "outside"}
    best = sorted(shares.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, share in best)
    words = f"{len(computed)} steps; of their time: {named}."
    if any(step.overlap for step in computed):
        words += (
            " Steps overlap (async_scheduling): the host works on one while another is computed, so the parts of a bar "
            "can be more than the time that passed."
        )
    return words


def timed_by_gpu(steps: Sequence[StepTrace]) -> list[StepTrace]:
    """The steps that a GPU timed: none on a CPU."""
    return [step for step in steps if step.gpu_time > 0]


def gpu_figure(steps: Sequence[StepTrace], theme: Theme) -> Figure:
    """Milliseconds that the GPU idled before and worked on each step, stacked; beside it what its host spent asking."""
    shown = timed_by_gpu(steps)[-MOST_BARS:]
    x = [step.index for step in shown]
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "name": words, "x": x, "y": [round(1000 * getattr(step, name), 4) for step in shown],
            "marker": {"color": colour, "pattern": {"shape": shape, "fgcolor": theme.ink, "size": 5}},
            "hovertemplate": f"step %{{x}} · {words} %{{y:,.2f}} ms<extra></extra>",
        }
        for name, words, colour, shape in (
            ("gpu_idle_time", "GPU idle before it", mix(theme.muted, theme.paper, 0.3), "."),
            ("gpu_time", "GPU works", theme.hue(0), ""),
        )
    ]  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "launch: the host asks for the work", "x": x,
            "y": [round(1000 * step.launch_time, 4) for step in shown],
            "marker": {"color": theme.hue(3), "symbol": "diamond", "size": 6, "line": {"color": theme.ink, "width": 1}},
            "hovertemplate": "step %{x} · launch %{y:,.2f} ms<extra></extra>",
        }
    )  # fmt: skip
    return {"data": data, "layout": _stacked(theme, height=280, bottom=80, legend=-0.26)}


def gpu_alt(steps: Sequence[StepTrace]) -> str:
    """How long the GPU worked and idled over all given steps, in a sentence."""
    timed = timed_by_gpu(steps)
    work, idle = (sum(getattr(step, name) for step in timed) for name in ("gpu_time", "gpu_idle_time"))
    launch = sum(step.launch_time for step in timed)
    if not timed:
        return "No step was timed by a GPU."
    each = 1000 / len(timed)
    return (
        f"{len(timed)} steps timed by the GPU itself: it worked {work * each:,.2f} ms a step and idled "
        f"{idle * each:,.2f} ms before it ({100 * idle / (work + idle):.0f} % of its time); "
        f"its host spent {launch * each:,.2f} ms asking."
    )
