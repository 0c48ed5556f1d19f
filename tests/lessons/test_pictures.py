"""Every picture of a lesson: a valid figure at every step spoken of, in both themes, with words for those who hear it."""

from __future__ import annotations

import re

import plotly.graph_objects as go
import pytest

from app.course.pictures import Wanted, draw, pool_view
from app.figures.lesson_bars import sizes_figure
from app.figures.lesson_schedule import seating
from app.figures.palette import THEMES
from lessons.catalogue import module_of
from lessons.model import Explain, Explore, RunBlock
from lessons.runs import measured


def wanted_of(lesson, runs, run: str, step: int | None, request: str, theme: str) -> Wanted:
    module = module_of(lesson.folder)
    sizes = {name: function(runs) for name, function in getattr(module, "SIZES", {}).items()}
    return Wanted(runs, run, step, request, THEMES[theme], sizes, getattr(module, "PAIRS", {}))


@pytest.mark.parametrize("theme", list(THEMES))
def test_every_picture_of_a_lesson_can_be_drawn(lesson, runs_of, theme: str):
    runs, values = runs_of(lesson.id), module_of(lesson.folder).VALUES
    drawn = 0
    for block in lesson.blocks:
        shots: list[tuple[str, str, int | None, str]] = []
        if isinstance(block, Explain):
            steps = [measured(values, f.step, runs) if isinstance(f.step, str) else f.step for f in block.frames]
            shots = [(kind, block.run, int(step), block.request) for kind in block.pictures for step in steps]
        elif isinstance(block, RunBlock):
            shots = [(block.picture, block.experiments[-1], None, block.request)]
        elif isinstance(block, Explore):
            shots = [(block.picture, block.experiment, None, "")]
        for kind, run, step, request in shots:
            picture = draw(kind, wanted_of(lesson, runs, run, step, request, theme))
            assert len(picture.alt) > 15
            assert picture.title
            if picture.figure:
                go.Figure(picture.figure)
                drawn += 1
            else:
                assert picture.markup.count("<div") == picture.markup.count("</div>")
                assert not re.search(r"<script|onerror", picture.markup)
    assert drawn >= 5


def test_a_missing_run_is_a_key_error(lesson):
    with pytest.raises(KeyError):
        draw("timeline", wanted_of(lesson, {}, "late", 0, "", "light"))


def test_seats_of_the_textbook(runs_of):
    run = runs_of("continuous-batching")["late"]
    found = seating(run.steps, 3)
    names = {request.trace.request_id: request.name for request in run.requests}
    rows = [[names.get(found.cells.get((step, seat), ("", ""))[0], "_") for seat in range(3)] for step in range(5)]
    assert rows == [["A", "B", "C"], ["A", "B", "C"], ["A", "_", "C"], ["A", "D", "C"], ["_", "D", "C"]]
    assert all(not waits for waits in found.waiting.values())
    queued = seating(runs_of("continuous-batching")["queued"].steps, 3)
    assert [len(queued.waiting[step]) for step in range(5)] == [1, 1, 0, 0, 0]


def test_static_rows_stay_in_their_seats(runs_of):
    found = seating(runs_of("continuous-batching")["static"].steps, 3)
    kinds = [[found.cells.get((step, seat), ("", "-"))[1] for seat in range(3)] for step in range(7)]
    assert kinds[2] == ["decode", "padding", "decode"]
    assert kinds[4] == ["padding", "padding", "decode"]
    assert kinds[5] == ["prefill", "-", "-"]


def test_the_pool_of_lesson_nine(runs_of):
    run = runs_of("paged-attention")["used"]
    view = pool_view(run, 11)
    assert [use.number for use in view.uses[7]] == [0]
    assert [use.number for use in view.uses[2]] == [1]
    assert view.uses[9][0].tokens == 1
    assert view.allocated == {9}


def test_a_waterfall_ends_where_it_should():
    figure = sizes_figure({"a": 10.0, "b": 5.0, "c": -3.0, "sum =": 12.0}, THEMES["light"], "bytes")
    bars = figure["data"][0]
    assert bars["base"] == [0, 10, 12, 0]
    assert bars["x"] == [10, 5, 3, 12]
    assert bars["text"] == ["+10", "+5", "-3", "12"]
