"""The charts of a result, the same on the page, in the report and in the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.figures.experiment_ecdf import experiment_ecdf
from app.figures.experiment_ratios import experiment_ratios
from app.figures.experiment_timelines import experiment_timelines
from app.figures.palette import Theme
from engine.observe.metrics import DEFINITIONS
from engine.workload.report import Chart
from engine.workload.results import DISTRIBUTIONS, Compared, ExperimentResult, differences
from engine.workload.statistics import MIN_EFFECT

TIMELINES = "Batches side by side"
TIMELINES_TEXT = (
    "A bar is a step: as wide as it took, as high as the tokens it computed. One time axis and one scale for all. "
    "Play moves one cursor through all of them."
)
RATIOS = "What is clear and what is not"
RATIOS_TEXT = (
    "How many times as much as with the first variant, and the range in which the true factor lies. A filled mark is clear. "
    f"The band around 1 is too small to matter: less than {100 * MIN_EFFECT:.0f} %."
)


def samples_of(result: ExperimentResult, metric: str) -> dict[str, list[float]]:
    """Latencies of every variant, seconds."""
    return {variant.name: result.samples(variant.name, metric) for variant in result.experiment.variants}


def overlaid(items: Sequence[Compared], metric: str) -> Mapping[str, Sequence[float]]:
    """The same for chosen variants of several results."""
    return {item.label: item.result.samples(item.variant, metric) for item in items}


def charts(result: ExperimentResult, theme: Theme) -> list[Chart]:
    """All charts of one result, in their order."""
    found = []
    if result.shown:
        figure = experiment_timelines(result.shown, theme)
        found.append(Chart(title=TIMELINES, text=TIMELINES_TEXT, figure=figure))
    if len(result.experiment.variants) > 1:
        found.append(Chart(title=RATIOS, text=RATIOS_TEXT, figure=experiment_ratios(differences(result), theme)))
    for metric in DISTRIBUTIONS:
        definition = DEFINITIONS[metric]
        figure = experiment_ecdf(samples_of(result, metric), metric, theme)
        found.append(Chart(title=f"Distribution of {definition.label}", text=definition.text, figure=figure))
    return found
