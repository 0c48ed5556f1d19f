"""A result in the forms in which it leaves the lab."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path

from app.experiments.charts import charts
from app.figures.palette import LIGHT
from engine.core.trace import RequestTrace
from engine.observe.export import requests_csv
from engine.observe.runfile import RunHeader, RunWriter
from engine.observe.runs import RunLibrary
from engine.workload.datafile import to_yaml
from engine.workload.notebook import notebook
from engine.workload.report import html_report
from engine.workload.results import SUFFIX, ExperimentResult, differences_csv, write_result


def report(result: ExperimentResult) -> str:
    """The HTML report with all charts."""
    return html_report(result, charts(result, LIGHT))


def bundle(result: ExperimentResult, name: str) -> bytes:
    """Everything as one archive: experiment, result, notebook, report, tables."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.yaml", to_yaml(result.experiment))
        archive.writestr(f"{name}{SUFFIX}", write_result(result))
        archive.writestr(f"{name}.ipynb", notebook(result, f"{name}{SUFFIX}"))
        archive.writestr(f"{name}.html", report(result))
        archive.writestr(f"{name}.csv", differences_csv(result))
        for records in result.shown:
            archive.writestr(f"{name} requests {_file_part(records.variant)}.csv", requests_table(records.requests))
    return buffer.getvalue()


def requests_table(requests: list[RequestTrace]) -> str:
    """The requests of one run as CSV."""
    return "".join(requests_csv(requests))


def _file_part(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in " -_" else "-" for letter in text)


def save_run(result: ExperimentResult, variant: str, library: RunLibrary) -> str:
    """Put the kept run of one variant among the saved runs, where every step of it can be opened; returns its name.

    Raises:
        ValueError: the result holds no records of this variant.
    """
    records = result.records(variant)
    if records is None:
        raise ValueError(f"the result holds no records of {variant!r}: run the experiment again to look at its steps")
    name = f"{result.experiment.id} {_file_part(variant)} {int(result.made)}"
    if any(info.name == name for info in library.list()):
        return name
    config = result.experiment.variant(variant).engine_config()
    header = RunHeader(
        title=f"{result.experiment.title}: {variant}",
        created=result.made,
        config={field: getattr(config, field) for field in config.__struct_fields__},
        model=result.model,
        seed=config.seed,
        lab_version=result.lab_version,
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / "run", header)
        writer.add(opened=records.opened, steps=records.steps, tokens=records.tokens, closed=records.closed)
        writer.close()
        return library.save(writer.path, name)
