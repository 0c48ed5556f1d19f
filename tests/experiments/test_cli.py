"""`inference-lab run` as a person and as a program meet it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.workload.datafile import to_yaml
from engine.workload.results import parse_result
from tests.experiments.conftest import small

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", "run", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False, env=dict(os.environ),
    )  # fmt: skip


def test_a_file_runs_and_answers_in_json_with_progress_on_stderr(tmp_path):
    path, report = tmp_path / "mine.yaml", tmp_path / "r.html"
    path.write_text(to_yaml(small("kv-cache")))
    done = run(str(path), "--model", "scripted", "--json", "--report", str(report))
    assert done.returncode == 0, done.stderr
    result = parse_result(done.stdout, "stdout.json")
    assert result.experiment.id == "kv-cache" and result.repetitions == 1
    assert "1 of 4 runs" in done.stderr and "about" in done.stderr
    assert report.read_text().startswith("<!doctype html>")


def test_a_ready_made_one_by_name_as_a_table():
    done = run("kv-cache", "--model", "scripted", "--repetitions", "2")
    assert done.returncode == 0, done.stderr
    assert "KV cache off and on" in done.stdout
    assert "Expected, by counting:" in done.stdout and "FAILS" not in done.stdout


def test_mistakes_are_one_line_with_the_place(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(to_yaml(small("kv-cache")).replace("max_model_len", "max_len"))
    for arguments, words in (
        ([str(path)], "bad.yaml, line"),
        (["nothing-like-it"], "there is no experiment"),
        ([str(tmp_path / "gone.yaml")], "can't be read"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert words in done.stderr and "Traceback" not in done.stderr


def test_what_is_expected_and_fails_gives_exit_code_1(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(
        to_yaml(small("kv-cache")).replace("at_most: 174", "at_most: 100").replace("at_least: 174", "at_least: 1")
    )
    done = run(str(path), "--model", "scripted")
    assert done.returncode == 1, done.stderr
    assert "FAILS" in done.stdout
