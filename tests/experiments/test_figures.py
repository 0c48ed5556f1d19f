"""The figures of experiments and of the calculator: valid, on one scale, honest about what is left out."""

from __future__ import annotations

import msgspec
import plotly.graph_objects as go
import pytest

from app.experiments.charts import charts
from app.experiments.page import meaning
from app.figures.calculator_memory import contexts, memory_alt, memory_figure
from app.figures.experiment_ecdf import experiment_ecdf, experiment_ecdf_alt
from app.figures.experiment_ratios import experiment_ratios, experiment_ratios_alt
from app.figures.experiment_timelines import FRAMES, MOST_STEPS, Track, experiment_timelines, experiment_timelines_alt
from app.figures.palette import DARK, LIGHT
from engine.workload.results import Difference, RunRecords, differences
from engine.workload.statistics import spread


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_all_charts_are_valid_figures(result, theme):
    for chart in charts(result, theme):
        go.Figure(chart.figure)


def test_both_batches_share_time_axis_and_scale(result):
    figure = experiment_timelines(result.shown, LIGHT)
    layout = figure["layout"]
    assert layout["yaxis"]["range"] == layout["yaxis2"]["range"]
    assert layout["yaxis"]["domain"][0] > layout["yaxis2"]["domain"][1]
    assert {trace.get("xaxis", "x") for trace in figure["data"]} == {"x"}
    longest = max(records.length for records in result.shown)
    shown = layout["xaxis"]["range"][1] / (1000 if longest < 2 else 1)
    assert longest <= shown <= 1.02 * longest
    for place, records in enumerate(result.shown):
        axis = "y" + ("" if place == 0 else str(place + 1))
        bars = [trace for trace in figure["data"] if trace["type"] == "bar" and trace["yaxis"] == axis]
        drawn = {x for trace in bars for x in trace["x"]}
        assert len(drawn) == sum(1 for step in records.steps if step.scheduled)


def test_one_slider_moves_every_cursor_and_both_states(result):
    figure = experiment_timelines(result.shown, LIGHT)
    assert len(figure["frames"]) == FRAMES + 1 == len(figure["layout"]["sliders"][0]["steps"])
    last = figure["frames"][-1]["layout"]
    assert len({shape["x0"] for shape in last["shapes"]}) == 1
    assert len(last["shapes"]) == 3
    texts = [note["text"] for note in last["annotations"]]
    assert texts[0].startswith("<b>static</b>") and texts[1].startswith("<b>continuous</b>")
    assert all("done: " in text for text in texts)
    middle = figure["frames"][FRAMES // 4]["layout"]["annotations"]
    assert any("running" in note["text"] for note in middle)


def test_the_state_at_a_moment_is_that_of_the_step_under_way(result):
    track = Track(result.shown[0])
    step = track.steps[3]
    moment = (track.starts[3] + track.ends[3]) / 2
    now = track.at(moment)
    assert (now.step, now.state, now.running, now.blocks) == (step.index, "step", step.num_running, step.kv_used)
    assert track.at(-1.0).state == "before"
    assert track.at(track.length + 1).state == "done"
    assert track.at(track.length + 1).tokens == sum(t.output_tokens for t in result.shown[0].requests)


def test_a_long_run_is_binned_and_says_so(result):
    records = result.shown[0]
    copies = -(-(2 * MOST_STEPS) // len(records.steps))
    length = records.length + 0.001
    steps = tuple(
        msgspec.structs.replace(s, index=i * len(records.steps) + n, start=s.start + i * length, end=s.end + i * length)
        for i in range(copies)
        for n, s in enumerate(records.steps)
    )
    figure = experiment_timelines([msgspec.structs.replace(records, steps=steps)], LIGHT)
    go.Figure(figure)
    assert "a bar is the mean of" in figure["layout"]["annotations"][0]["text"]
    assert max(len(trace["x"]) for trace in figure["data"]) <= MOST_STEPS


def test_empty_records_draw_an_empty_frame():
    nothing = [RunRecords(variant="a"), RunRecords(variant="b")]
    go.Figure(experiment_timelines(nothing, LIGHT))
    assert "0 steps" in experiment_timelines_alt(nothing)
    go.Figure(experiment_ecdf({}, "ttft", LIGHT))
    go.Figure(experiment_ratios([], LIGHT))


def test_curves_rise_to_all_and_medians_are_named():
    samples = {"a": [0.001, 0.002, 0.003, 0.004], "b": []}
    figure = experiment_ecdf(samples, "ttft", DARK)
    (curve,) = figure["data"]
    assert curve["y"] == [0.0, 25.0, 50.0, 75.0, 100.0]
    assert curve["x"] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert "a: median 2.5 ms of 4; b: no sample" in experiment_ecdf_alt(samples, "ttft")


def test_ratios_are_symmetric_around_one_and_filled_only_where_clear(result):
    found = differences(result)
    assert all(d.interval is None for d in found if d.kind == "too few repetitions")
    figure = experiment_ratios(found, LIGHT)
    low, high = figure["layout"]["xaxis"]["range"]
    assert low == -high
    (trace,) = figure["data"]
    assert set(trace["marker"]["color"]) == {LIGHT.paper}, "three repetitions are too few to be clear"
    assert experiment_ratios_alt(found).endswith("No timed difference is clear.")


def test_the_line_of_memory_lies_where_the_last_request_fits():
    figure = memory_figure(1024.0, 16, 1024, 1024.0 * 1024 * 7, LIGHT, (1024, 7))
    go.Figure(figure)
    assert contexts(1024) == [128, 256, 512, 1024]
    heat, line, mark = figure["data"]
    # 7 × 1,024 tokens fit: 8 (row 3) does not, 4 (row 2) does, so the line runs between them.
    assert 2.0 < line["y"][-1] < 3.0
    assert [bool(text) for text in [row[-1] for row in heat["text"]]] == [True, True, True] + [False] * 7
    assert mark["x"] == [3.0]
    assert "7 of 1,024 tokens" in memory_alt(1024.0, 16, 1024, 1024.0 * 1024 * 7)
    nothing = memory_figure(1024.0, 16, 1024, -1.0, DARK)
    go.Figure(nothing)
    assert set(nothing["data"][1]["y"]) == {-0.5}


@pytest.mark.parametrize("fit", [1, 2, 3, 7, 8, 9, 128, 130, 238, 255, 256, 511, 512, 5000])
def test_every_cell_below_the_line_of_memory_fits_and_none_above(fit: int):
    figure = memory_figure(1024.0, 16, 1024, 1024.0 * 1024 * fit, LIGHT, (1024, fit))
    heat, line, *mark = figure["data"]
    texts = [row[-1] for row in heat["text"]]
    for row, text in enumerate(texts):
        assert (row < line["y"][-1]) == bool(text)
    if mark:
        assert mark[0]["y"] == [line["y"][-1]], "as many as fit are marked on the line, not beyond it"


def test_what_is_said_of_several_variants_names_each():
    seen = spread([1.0])
    said = {
        "small": "Not clear: it may be 8 % less, or 9 % more.",
        "large": "With large, it is faster: 20 % less than with off.",
    }
    about = [Difference(name="duration", variant=v, base="off", kind="", a=seen, b=seen, words=w) for v, w in said.items()]
    assert meaning(about) == f"small: not clear: it may be 8 % less, or 9 % more. {said['large']}"
    assert meaning(about[:1]) == said["small"]
