"""A result as a Jupyter notebook (nbformat 4) that loads the result's file and draws its charts again.

Its cells need this project and plotly, nothing else. Each ends in an expression, so that a notebook shows the figure and a
plain Python process just computes it.
"""

from __future__ import annotations

import json
from typing import Any

from engine.workload.results import ExperimentResult


def notebook(result: ExperimentResult, file_name: str) -> str:
    """The notebook's text. ``file_name``: the result's own file, to lie beside the notebook."""
    experiment = result.experiment
    cells = [
        _markdown(
            f"# {_line(experiment.title)}\n\n{_line(experiment.about)}\n\n"
            f"Put `{file_name}` beside this notebook. It holds the experiment, every measured run, and all records of "
            f"repetition {result.shown_repetition + 1}."
        ),
        _code(
            "import plotly.graph_objects as go\n\n"
            "from app.experiments.charts import charts\n"
            "from app.figures.palette import theme\n"
            "from engine.workload.report import made_by\n"
            "from engine.workload.results import NUMBERS, differences, read_result, spread_text, spreads\n\n"
            f"result = read_result({file_name!r})\n"
            "variants = [variant.name for variant in result.experiment.variants]\n"
            "made_by(result)"
        ),
        _markdown("## Median and range of every number"),
        _code(
            "found = [spreads(result, variant) for variant in variants]\n"
            "table = [[NUMBERS[name].label, *(spread_text(each[name], name) for each in found)] for name in NUMBERS]\n"
            "go.Figure(go.Table(header={'values': ['number', *variants]}, cells={'values': list(zip(*table))}))"
        ),
        _markdown("## What differs, in words"),
        _code("sentences = [f'{NUMBERS[d.name].label}: {d.words}' for d in differences(result)]\nsentences"),
        _markdown("## The charts"),
        _code(
            "drawn = [(chart.title, go.Figure(chart.figure)) for chart in charts(result, theme('light'))]\n"
            "[title for title, _ in drawn]"
        ),
        *(_code(f"drawn[{number}][1]") for number in range(_charts(result))),
        _markdown(
            "## Run it again\n\nThis takes a while: it loads the model and repeats the experiment on this machine. "
            "Remove the # to do so."
        ),
        _code(
            "from engine.serve.experiments import run_file\n\n"
            f"# again = run_file(result.experiment, model={experiment.model!r})\n"
            "run_file.__doc__"
        ),
    ]
    made = {
        "cells": [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _charts(result: ExperimentResult) -> int:
    """Charts that ``app.experiments.charts`` makes: timelines, four distributions, ratios where something is compared."""
    return (1 if result.shown else 0) + 4 + (1 if len(result.experiment.variants) > 1 else 0)


def code_cells(text: str) -> list[str]:
    """The code of a notebook, cell by cell."""
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def _line(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }
