"""The parts of the Experiments page: cards, progress, a result, saved results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import streamlit as st

from app.downloads import offer
from app.experiments import exports, running
from app.experiments.charts import RATIOS, TIMELINES, charts, overlaid
from app.experiments.store import MOST_OVERLAID, ResultStore
from app.figures.batch import batch_alt, batch_figure, window
from app.figures.experiment_ecdf import experiment_ecdf, experiment_ecdf_alt
from app.figures.experiment_ratios import experiment_ratios_alt
from app.figures.experiment_timelines import experiment_timelines_alt
from app.figures.palette import Theme
from app.figures.timeline import choose, timeline_alt, timeline_figure
from engine.observe.metrics import DEFINITIONS
from engine.observe.runs import RunLibrary
from engine.serve.client import EngineClient
from engine.workload.datafile import DataFileError, to_yaml
from engine.workload.experiment import MAX_REPETITIONS, Experiment, Experiments, parse_experiment
from engine.workload.notebook import notebook
from engine.workload.report import HOW_SURE, made_by, warnings
from engine.workload.results import (
    DISTRIBUTIONS,
    NUMBERS,
    SUFFIX,
    Compared,
    Difference,
    ExperimentResult,
    cautions,
    differences,
    differences_csv,
    repetitions_text,
    spread_text,
    spreads,
    with_repetitions,
    write_result,
)
from engine.workload.statistics import MIN_PAIRS

MAX_SHOWN_STEPS = 40
Run = Callable[[Experiment], None]


def chart(figure: dict[str, Any], alt: str, key: str) -> None:
    """One picture with its sentence."""
    st.plotly_chart(figure, key=key, theme=None, config={"displayModeBar": False}, alt=alt)


@st.fragment(run_every=1.0)
def until_ready(client: EngineClient, what: str) -> None:
    """Say that the model is still loading; the whole page runs again when it is there."""
    state = client.state
    if state.state == "ready":
        st.rerun()
    if state.error:
        st.error(state.error)
    else:
        st.info(f"{what} when the model is loaded ({state.stage or state.state}).")


# What can be run ----------------------------------------------------------------------------------------------------------


def cards(ready: Experiments, run: Run, edit: Callable[[Experiment], None], disabled: bool) -> None:
    """The ready-made experiments, each with the question that it answers."""
    for problem in ready.problems:
        st.error(problem)
    for row in range(0, len(ready.experiments), 3):
        for column, experiment in zip(st.columns(3), ready.experiments[row : row + 3], strict=False):
            with column.container(border=True, height="stretch"):
                st.markdown(f"**{experiment.title}**")
                st.markdown(experiment.about)
                st.caption(" · ".join(variant.name for variant in experiment.variants))
                with st.container(horizontal=True):
                    if st.button("Run", key=f"run {experiment.id}", type="primary", disabled=disabled):
                        run(experiment)
                    if st.button("Change it", key=f"edit {experiment.id}"):
                        edit(experiment)


def file_view(run: Run, disabled: bool) -> None:
    """An experiment as text: written by hand, changed, or brought in from a file."""
    uploaded = st.file_uploader("An experiment file (YAML or JSON)", ["yaml", "yml", "json"], key="experiment_file")
    if uploaded is not None and st.session_state.get("experiment_seen") != uploaded.file_id:
        st.session_state["experiment_seen"] = uploaded.file_id
        st.session_state["experiment_text"] = uploaded.getvalue().decode("utf-8", errors="replace")
    text = st.text_area("Experiment", height=380, key="experiment_text", help="Every ready-made experiment is such a file.")
    if not text.strip():
        st.caption("Choose “Change it” on a ready-made experiment, upload a file, or write one here.")
        return
    try:
        experiment = parse_experiment(text, "experiment.yaml")
    except DataFileError as error:
        st.error(str(error))
        return
    st.caption(f"It reads well: {len(experiment.variants)} variants, {experiment.repetitions} repetitions.")
    with st.container(horizontal=True):
        if st.button("Run", key="run file", type="primary", disabled=disabled):
            run(experiment)
        offer("Save the file", to_yaml(experiment), file_name=f"{experiment.id}.yaml", mime="application/yaml")


# While it runs ------------------------------------------------------------------------------------------------------------


@st.fragment(run_every=1.0)
def progress_view(lab: str) -> None:
    """How far it is; ends in a rerun of the whole page."""
    found = running.of(lab)
    if found is None or found.runner.over:
        st.rerun()
    found.see()
    progress = found.runner.progress
    with st.container(border=True):
        st.markdown(f"**{found.runner.experiment.title}**")
        left = "" if progress.seconds_left is None else f", about {duration(progress.seconds_left)} left"
        words = f"{progress.done} of {progress.total} runs: {progress.text}{left}" if progress.total else "It begins."
        st.progress(progress.share, text=words)
        st.caption(
            "The engine works for this experiment alone; other labs wait, and their viewers hear of it when it is done."
            + (f" Found on this machine: {progress.others}." if progress.others else "")
        )
        if st.button("Cancel", key="cancel experiment"):
            found.runner.cancel("cancelled: nothing of it is kept")
            found.runner.wait(5.0)
            st.rerun()


def duration(seconds: float) -> str:
    """'40 s', '3 min'."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# A result -----------------------------------------------------------------------------------------------------------------


def result_view(result: ExperimentResult, name: str, theme: Theme, library: RunLibrary, run: Run, *, disabled: bool) -> None:
    """Everything of one result: what differs, the charts, its steps, and the ways to take it elsewhere."""
    st.header(result.experiment.title, divider="gray")
    if result.experiment.about:
        st.markdown(result.experiment.about)
    st.caption(made_by(result))
    for text in warnings(result):
        st.warning(text)
    found = differences(result)
    table(result, found)
    sure_view(result, found, run, disabled)
    alts = {TIMELINES: experiment_timelines_alt(result.shown), RATIOS: experiment_ratios_alt(found)}
    drawn = charts(result, theme)
    small = []
    for number, item in enumerate(drawn):
        if item.title not in alts:
            small.append((number, item))
            continue
        st.subheader(item.title)
        st.caption(item.text)
        chart(item.figure, alts[item.title], f"chart{number}")
    st.subheader("Distributions")
    for start in range(0, len(small), 2):
        for column, (number, item) in zip(st.columns(2), small[start : start + 2], strict=False):
            with column:
                st.caption(f"**{item.title}.** {item.text}")
                metric = DISTRIBUTIONS[small.index((number, item))]
                samples = {v.name: result.samples(v.name, metric) for v in result.experiment.variants}
                chart(item.figure, experiment_ecdf_alt(samples, metric), f"chart{number}")
    if result.shown:
        steps_view(result, theme, library)
    travel(result, name)


def table(result: ExperimentResult, found: Sequence[Difference]) -> None:
    """Medians and ranges side by side with the meaning of each difference; what is equal in all is named below."""
    variants = [variant.name for variant in result.experiment.variants]
    of = {variant: spreads(result, variant) for variant in variants}
    rows, equal = [], []
    for name, number in NUMBERS.items():
        about = [difference for difference in found if difference.name == name]
        if not any(of[variant][name].count for variant in variants):
            continue
        if about and all(difference.kind == "equal" for difference in about):
            equal.append(f"{number.label} {spread_text(of[variants[0]][name], name)}")
            continue
        label = f"{number.label}, {number.unit}" if number.unit else number.label
        medians = {variant: spread_text(of[variant][name], name) for variant in variants}
        rows.append({"number": label, **medians, **({"meaning": meaning(about)} if about else {})})
    st.subheader("What differs")
    st.caption(
        f"Median of {repetitions_text(result.repetitions)} (lowest to highest). Counted numbers are exact; a timed one "
        f"differs only where repeating confirms it. How much it differs is judged inside each repetition, so it need not be "
        f"the ratio of the two medians."
    )
    st.table(rows, border="horizontal", hide_index=True)
    if equal:
        st.caption(f"The same in all: {'; '.join(equal)}.")
    outcomes = result.outcomes()
    if outcomes:
        held = sum(outcome.holds for outcome in outcomes)
        with st.expander(f"Expected by counting: {held} of {len(outcomes)} hold", expanded=held < len(outcomes)):
            for outcome in outcomes:
                st.markdown(f"{'✓' if outcome.holds else '✗'} {outcome.text}")


def meaning(about: Sequence[Difference]) -> str:
    """What a number's differences mean; where several variants are told of, each sentence names its own."""
    if len(about) == 1:
        return about[0].words
    return " ".join(
        d.words if d.words.startswith(f"With {d.variant},") else f"{d.variant}: {d.words[:1].lower()}{d.words[1:]}"
        for d in about
    )


def sure_view(result: ExperimentResult, found: Sequence[Difference], run: Run, disabled: bool) -> None:
    """How far the table can be trusted, and the way to know more where it says that it can't tell."""
    if not found:
        return
    with st.expander("How sure is this?"):
        for text in HOW_SURE:
            st.markdown(text)
    unclear = {difference.name for difference in found if difference.kind in ("not clear", "too few repetitions")}
    more = min(max(2 * result.repetitions, 2 * MIN_PAIRS), MAX_REPETITIONS)
    if not unclear or more <= result.repetitions:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        numbers = "1 number is" if len(unclear) == 1 else f"{len(unclear)} numbers are"
        st.markdown(f"{numbers} not clear. More repetitions, or a quieter machine, tell more.", width="content")
        if st.button(f"Run it with {more} repetitions", key="run more", disabled=disabled):
            run(with_repetitions(result.experiment, more))


@st.fragment
def steps_view(result: ExperimentResult, theme: Theme, library: RunLibrary) -> None:
    """One step of one variant, and the way into the lab where every step of that run can be looked at."""
    st.subheader("Look at a step")
    st.caption(f"All records of repetition {result.shown_repetition + 1}, the one of median length, are kept.")
    names = [records.variant for records in result.shown]
    left, right, button = st.columns([2, 2, 1], vertical_alignment="bottom")
    variant = left.selectbox("Variant", names, key="step_variant")
    records = result.records(variant or names[0])
    if records is None or not records.steps:
        return
    last = records.steps[-1].index
    step = int(right.number_input(f"Step, 0 to {last}", 0, last, min(10, last), key="step_index"))
    if button.button("Open in the lab", key="open run", width="stretch"):
        st.switch_page("screens/lab.py", query_params={"run": exports.save_run(result, records.variant, library)})
    frame = window(last, step, MAX_SHOWN_STEPS)
    shown = [s for s in records.steps if frame[0] <= s.index <= frame[1]]
    numbers = {trace.request_id: trace.number for trace in records.requests}
    config = result.experiment.variant(records.variant).engine_config()
    alive = choose(records.requests, shown)
    chart(
        _high(batch_figure(shown, numbers, config.token_budget, frame, theme, step, root=True), 240),
        batch_alt(shown, numbers, config.token_budget),
        "step_batch",
    )
    chart(_high(timeline_figure(shown, alive, frame, theme, step), 280), timeline_alt(shown, alive), "step_life")


def _high(figure: dict[str, Any], height: int) -> dict[str, Any]:
    return {**figure, "layout": {**figure["layout"], "height": height}}


def travel(result: ExperimentResult, name: str) -> None:
    """Downloads."""
    st.subheader("Take it elsewhere")
    experiment = result.experiment
    with st.container(horizontal=True):
        offer("Experiment file", to_yaml(experiment), file_name=f"{experiment.id}.yaml", mime="application/yaml")
        offer("Result", lambda: write_result(result), file_name=f"{name}{SUFFIX}", mime="application/json")
        offer("CSV", lambda: differences_csv(result), file_name=f"{name}.csv", mime="text/csv")
        offer("HTML report", lambda: exports.report(result), file_name=f"{name}.html", mime="text/html")
        offer(
            "Notebook",
            lambda: notebook(result, f"{name}{SUFFIX}"),
            file_name=f"{name}.ipynb",
            mime="application/x-ipynb+json",
        )
        offer("Everything (zip)", lambda: exports.bundle(result, name), file_name=f"{name}.zip")
    st.caption(
        "The experiment file runs again here, or with `inference-lab run FILE`. The notebook reads the result file "
        "beside it. The address of this page leads back to this result on this machine."
    )


# Saved results ------------------------------------------------------------------------------------------------------------


def saved_view(store: ResultStore, theme: Theme, open_result: Callable[[str], None]) -> None:
    """Saved results: open, delete, bring in, and lay up to four variants over each other."""
    uploaded = st.file_uploader(f"Bring in a result (*{SUFFIX})", ["json"], key="result_file")
    if uploaded is not None and st.session_state.get("result_seen") != uploaded.file_id:
        st.session_state["result_seen"] = uploaded.file_id
        try:
            name = store.bring_in(uploaded.getvalue().decode("utf-8", errors="replace"), uploaded.name)
            open_result(name)
        except (ValueError, OSError) as error:
            st.error(f"Not added: {error}")
    found = store.list()
    if not found:
        st.caption("No saved results. Every experiment that runs to its end is kept here.")
        return
    overlay_view(store, [saved.name for saved in found], theme)
    st.subheader("All")
    for saved in found:
        with st.container(border=True, horizontal=True, vertical_alignment="center"):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.made))
            st.markdown(f"**{saved.name}**  \n{when} · {saved.size / 1024:,.0f} KiB")
            if st.button("Open", key=f"open {saved.name}", type="primary"):
                open_result(saved.name)
            if st.button("Delete", key=f"delete {saved.name}"):
                store.delete(saved.name)
                st.rerun()


def overlay_view(store: ResultStore, names: Sequence[str], theme: Theme) -> None:
    """Distributions and medians of chosen variants, with a warning for everything that spoils the comparison."""
    st.subheader("Lay results over each other")
    picked = st.multiselect(
        f"Results (up to {MOST_OVERLAID} curves)", names, max_selections=MOST_OVERLAID, key="overlaid", placeholder="choose"
    )
    results = {}
    for name in picked:
        try:
            results[name] = store.read(name)
        except (ValueError, OSError) as error:
            st.error(f"{name} can't be read: {error}")
    options = {
        f"{name} · {v.name}": Compared(result, v.name)
        for name, result in results.items()
        for v in result.experiment.variants
    }
    if not options:
        return
    chosen = st.multiselect(
        "Variants", list(options), list(options)[:MOST_OVERLAID], max_selections=MOST_OVERLAID, key="overlaid_variants"
    )
    items = [options[label] for label in chosen]
    if not items:
        return
    for caution in cautions(items):
        st.warning(caution.text)
    metric = st.segmented_control(
        "Latency",
        list(DISTRIBUTIONS),
        default="ttft",
        required=True,
        format_func=lambda m: DEFINITIONS[m].label,
        key="overlaid_metric",
    )
    samples = overlaid(items, metric or "ttft")
    chart(experiment_ecdf(samples, metric or "ttft", theme), experiment_ecdf_alt(samples, metric or "ttft"), "overlay")
    rows = [
        {"result": item.label, **{NUMBERS[n].label: spread_text(spreads(item.result, item.variant)[n], n) for n in NUMBERS}}
        for item in items
    ]
    st.dataframe(rows, hide_index=True, width="stretch")


def on_this_model(experiment: Experiment, model: str) -> Experiment:
    """The experiment as it will really run: on the loaded model."""
    return msgspec.structs.replace(experiment, model=model) if model else experiment
