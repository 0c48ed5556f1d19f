"""A result as one HTML file that needs nothing else: text, tables, charts, plotly.js and the experiment's own file.

Charts are plain plotly figures that the caller makes (``app.experiments.charts``), so this module knows no picture.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.workload.datafile import to_yaml
from engine.workload.results import (
    NUMBERS,
    Compared,
    ExperimentResult,
    cautions,
    differences,
    repetitions_text,
    spread_text,
)
from engine.workload.statistics import ERROR_RATE, MIN_EFFECT, spread


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of a report: a heading, a sentence, and a plotly figure as a dict (frames included)."""

    title: str
    text: str
    figure: dict[str, Any]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff }
body { margin: 0 auto; max-width: 1100px; padding: 24px }
h1 { font-size: 26px; margin: 0 0 4px }
h2 { font-size: 19px; margin: 32px 0 4px; border-top: 1px solid #e3e7ed; padding-top: 20px }
p.quiet, td.quiet { color: #5b6675 } p.warning { border-left: 4px solid #b3261e; padding-left: 10px }
div.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid #e3e7ed; vertical-align: top }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums }
pre { background: #f4f6f9; padding: 12px; overflow-x: auto; font-size: 13px }
"""
HOW_SURE = f"""\
Counted numbers (steps, padding, hits) are exact.
Timed numbers vary from run to run, even when nothing is changed. \
So every repetition runs all variants, and the repetitions must agree.
A timed difference is clear when it is at least {100 * MIN_EFFECT:.0f} % and the repetitions agree better than by chance. \
The range beside it holds the true difference, with at least 95 % confidence.
All timed numbers are judged together. Where nothing differs, at most about {100 * ERROR_RATE:.0f} of 100 experiments call \
anything clear.
“Not clear” does not mean equal. More repetitions, or a quieter machine, tell smaller differences.""".splitlines()
"""How far a table of differences can be trusted, a paragraph each."""
AGAIN = (
    "Save this as a .yaml file and it runs again: <code>inference-lab run FILE</code>, or open it on the Experiments page."
)
DRAW = """
const options = { displayModeBar: false, responsive: true };
JSON.parse(document.getElementById("figures").textContent).forEach((figure, number) => {
  Plotly.newPlot("chart" + number, { ...figure, config: options });
});
"""


def html_report(result: ExperimentResult, charts: Sequence[Chart]) -> str:
    """The whole file, about 5 MB: most of it is plotly.js, so that it opens without a network.

    Texts of the experiment are escaped; figures travel as JSON in a block that no text can end.
    """
    from plotly.offline import get_plotlyjs

    experiment = result.experiment
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(experiment.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(experiment.title)}</h1><p>{html.escape(experiment.about)}</p>",
        f"<p class='quiet'>{html.escape(made_by(result))}</p>",
        *(f"<p class='warning'>{html.escape(text)}</p>" for text in warnings(result)),
    ]
    if len(experiment.variants) > 1:
        parts += [f"<h2>What differs from {html.escape(experiment.variants[0].name)}</h2>", _differences(result)]
    parts += ["<h2>What was measured</h2>", _values(result)]
    for number, chart in enumerate(charts):
        parts += [
            f"<h2>{html.escape(chart.title)}</h2><p class='quiet'>{html.escape(chart.text)}</p>",
            f"<div class='chart' id='chart{number}'></div>",
        ]
    parts += [
        f"<h2>The experiment</h2><p class='quiet'>{AGAIN}</p>",
        f"<pre id='experiment'>{html.escape(to_yaml(experiment))}</pre>",
        f"<script type='application/json' id='figures'>{_json([chart.figure for chart in charts])}</script>",
        f"<script>{get_plotlyjs()}</script>",
        f"<script>{DRAW}</script>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def made_by(result: ExperimentResult) -> str:
    """Model, device, repetitions and date, in one line."""
    model = result.model
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(result.made)) if result.made else "date unknown"
    return (
        f"{model.get('title', 'unknown model')} ({model.get('weights', 'unknown weights')}) · {model.get('device', '?')} · "
        f"{model.get('dtype', '?')} · {threads_text(model.get('threads'))} · "
        f"{repetitions_text(result.repetitions)} in shuffled order, warm-up left out · {when}"
    )


def threads_text(threads: int | None) -> str:
    """'2 threads', '1 thread'."""
    return "threads unknown" if threads is None else f"{threads} thread{'' if threads == 1 else 's'}"


def warnings(result: ExperimentResult) -> list[str]:
    """What a reader must know before comparing: trouble, other programs, conditions that differ."""
    found = list(result.trouble)
    if result.others:
        found.append(f"While this was measured: {result.others}. Times may be longer than on a quiet machine.")
    items = [Compared(result, variant.name) for variant in result.experiment.variants]
    return found + [caution.text for caution in cautions(items)]


def _differences(result: ExperimentResult) -> str:
    rows = ["<tr><th>Number</th><th>Variant</th><th>Median (lowest to highest)</th><th>Meaning</th></tr>"]
    for found in differences(result):
        number = NUMBERS[found.name]
        unit = f" {number.unit}" if number.unit else ""
        rows.append(
            f"<tr><td title='{html.escape(number.text, quote=True)}'>{html.escape(number.label)}</td>"
            f"<td>{html.escape(found.variant)}</td>"
            f"<td class='number'>{spread_text(found.b, found.name)}{unit}<br><span class='quiet'>"
            f"{html.escape(found.base)}: {spread_text(found.a, found.name)}{unit}</span></td>"
            f"<td>{html.escape(found.words)}</td></tr>"
        )
    sure = "".join(f"<p class='quiet'>{html.escape(text)}</p>" for text in HOW_SURE)
    return f"<div class='wide'><table id='differences'>{''.join(rows)}</table></div><div id='sure'>{sure}</div>"


def _values(result: ExperimentResult) -> str:
    variants = [variant.name for variant in result.experiment.variants]
    rows = [
        "<tr><th>Number</th>" + "".join(f"<th>{html.escape(name)}</th>" for name in variants) + "<th>What it is</th></tr>"
    ]
    for name, number in NUMBERS.items():
        cells = [spread_text(spread(result.values(variant, name)), name) for variant in variants]
        unit = f" ({number.unit})" if number.unit else ""
        rows.append(
            f"<tr><td>{html.escape(number.label)}{unit}</td>"
            + "".join(f"<td class='number'>{cell}</td>" for cell in cells)
            + f"<td class='quiet'>{html.escape(number.text)}</td></tr>"
        )
    return f"<div class='wide'><table id='values'>{''.join(rows)}</table></div>"


def _json(value: Any) -> str:
    """JSON for a script element: nothing in it can end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
