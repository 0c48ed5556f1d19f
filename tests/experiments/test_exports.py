"""What leaves the lab: report, notebook, archive, run files; each is used as its receiver would."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from app.experiments import exports
from app.experiments.charts import charts
from app.experiments.store import ResultStore
from app.figures.palette import LIGHT
from engine.observe.runfile import RunReader
from engine.observe.runlog import RunLog
from engine.observe.runs import RunLibrary
from engine.workload.datafile import DataFileError
from engine.workload.experiment import parse_experiment
from engine.workload.notebook import code_cells, notebook
from engine.workload.results import write_result
from tests.experiments.conftest import small

ROOT = Path(__file__).resolve().parents[2]


def test_the_notebook_runs_in_a_process_of_its_own_and_draws_the_same_figures(result, tmp_path):
    (tmp_path / "r.experiment.json").write_bytes(write_result(result))
    text = notebook(result, "r.experiment.json")
    (tmp_path / "cells.json").write_text(json.dumps(code_cells(text)))
    program = (
        "import json\nspace = {}\n"
        "for cell in json.load(open('cells.json')): exec(compile(cell, 'cell', 'exec'), space)\n"
        "drawn = [[title, figure.layout.height, len(figure.frames)] for title, figure in space['drawn']]\n"
        "print(json.dumps(drawn))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = json.loads(done.stdout.splitlines()[-1])
    expected = [[c.title, c.figure["layout"].get("height"), len(c.figure.get("frames", []))] for c in charts(result, LIGHT)]
    assert drawn == expected
    assert len([cell for cell in code_cells(text) if cell.startswith("drawn[")]) == len(drawn)


def test_the_notebook_is_valid_nbformat_4(result):
    made = json.loads(notebook(result, "r.experiment.json"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= set(cell)
        assert ("outputs" in cell and "execution_count" in cell) == (cell["cell_type"] == "code")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href") and value]


def test_the_report_stands_alone_and_no_text_can_end_its_scripts(result):
    evil = "</script><script>document.title='owned'</script>"
    variants = result.experiment.variants
    experiment = msgspec.structs.replace(result.experiment, title=evil[:80], about=evil)
    text = exports.report(msgspec.structs.replace(result, experiment=experiment))
    assert evil not in text
    tags = Tags()
    tags.feed(text[: text.index("<script type='application/json'")])
    assert tags.loads == []
    assert all(variant.name in text for variant in variants)
    assert "The experiment" in text and "Plotly.newPlot" in text


def test_the_experiment_in_the_report_and_the_archive_runs_again(result):
    with zipfile.ZipFile(io.BytesIO(exports.bundle(result, "mine"))) as archive:
        names = set(archive.namelist())
        assert {"mine.yaml", "mine.experiment.json", "mine.ipynb", "mine.html", "mine.csv"} <= names
        assert "mine requests static.csv" in names
        assert parse_experiment(archive.read("mine.yaml").decode(), "mine.yaml") == result.experiment


def test_a_run_of_a_result_opens_as_a_saved_run_with_the_same_steps(result, tmp_path):
    library = RunLibrary(tmp_path / "runs")
    name = exports.save_run(result, "static", library)
    assert exports.save_run(result, "static", library) == name, "opened twice, saved once"
    records = result.records("static")
    with RunReader(library.path(name)) as reader:
        log = RunLog(reader)
        assert tuple(log.steps()) == records.steps
        assert [trace.request_id for trace in log.traces()] == [trace.request_id for trace in records.requests]
        view = log.request(records.requests[0].request_id)
        assert len(view.tokens) == records.requests[0].output_tokens and view.text
        assert log.info.config.batching == "static"
    with pytest.raises(ValueError, match="no records of 'gone'"):
        exports.save_run(result, "gone", library)


def test_the_store_keeps_names_apart_and_refuses_what_is_no_result(result, tmp_path):
    store = ResultStore(tmp_path / "experiments")
    first, second = store.save(result), store.save(result)
    assert first != second and {s.name for s in store.list()} == {first, second}
    assert store.read(first) == result
    brought = store.bring_in(write_result(result).decode(), "../elsewhere.experiment.json")
    assert "/" not in brought and store.read(brought) == result
    with pytest.raises(DataFileError, match="line 1"):
        store.bring_in("{}", "x.json")
    with pytest.raises(ValueError, match="no saved result"):
        store.read("../../etc/passwd")
    for name in (first, second, brought):
        store.delete(name)
    assert store.list() == []


def test_one_variant_alone_can_be_exported_too(result):
    experiment = small("static-continuous", expect=())
    alone = msgspec.structs.replace(experiment, variants=experiment.variants[:1])
    runs = tuple(run for run in result.runs if run.variant == "static")
    one = msgspec.structs.replace(result, experiment=alone, runs=runs, shown=result.shown[:1])
    assert len(charts(one, LIGHT)) == 5
    assert "What differs from" not in exports.report(one)
    assert len([c for c in code_cells(notebook(one, "r.json")) if c.startswith("drawn[")]) == 5
