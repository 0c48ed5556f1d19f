"""Runs of all experiments on the scripted engine, once for all tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lessons.catalogue import catalogue, module_of
from lessons.model import Lesson
from lessons.runs import RunRecord, run_scripted

LESSONS = list(catalogue())


@pytest.fixture(scope="session")
def runs_of() -> Callable[[str], dict[str, RunRecord]]:
    """Lesson id → experiment → run, each experiment with its defaults."""
    kept: dict[str, dict[str, RunRecord]] = {}

    def find(lesson_id: str) -> dict[str, RunRecord]:
        if lesson_id not in kept:
            module = module_of(catalogue()[lesson_id].folder)
            kept[lesson_id] = {name: run_scripted(make()) for name, make in module.EXPERIMENTS.items()}
        return kept[lesson_id]

    return find


@pytest.fixture(params=LESSONS)
def lesson(request: pytest.FixtureRequest) -> Lesson:
    """Each lesson in turn."""
    return catalogue()[request.param]
