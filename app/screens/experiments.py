"""Experiments: change one thing, run both, see what it cost."""

from __future__ import annotations

import streamlit as st

from app.experiments import running
from app.experiments.form import form
from app.experiments.page import cards, file_view, on_this_model, progress_view, result_view, saved_view, until_ready
from app.experiments.store import ResultStore
from app.figures.palette import theme as theme_named
from app.reading import current_lab
from app.saved import library
from engine.workload.datafile import DataFileError, to_yaml
from engine.workload.experiment import Experiment, load_experiments
from engine.workload.report import threads_text

VIEWS = {"ready": "Ready-made", "own": "Your own", "file": "As a file", "saved": "Saved results"}

lab = current_lab()
store = ResultStore()
theme = theme_named("dark" if st.context.theme.type == "dark" else "light")
model = lab.client.state.model


def run(experiment: Experiment) -> None:
    """Start it, and look at its progress."""
    try:
        running.start(lab.token, on_this_model(experiment, model.name if model else ""), lab.client, store)
    except ValueError as error:
        st.error(f"Not started: {error}")
        return
    st.query_params.pop("result", None)
    st.rerun()


def edit(experiment: Experiment) -> None:
    """Show it as a file."""
    st.session_state["experiment_next"] = to_yaml(experiment)
    st.session_state["view_next"] = "file"
    st.rerun()


def open_result(name: str) -> None:
    """Show a saved result."""
    st.query_params["result"] = name
    st.rerun()


for waiting, target in (("experiment_next", "experiment_text"), ("view_next", "view")):
    if waiting in st.session_state:
        st.session_state[target] = st.session_state.pop(waiting)

st.title("Experiments")
st.markdown(
    "Change one thing, send the same requests to both, see what it costs. Every run starts on a fresh engine, the order is "
    "shuffled, and a difference counts only when repeating confirms it."
)
own = running.of(lab.token)
if own is not None and not own.runner.over:
    progress_view(lab.token)
    st.stop()
if own is not None and not own.told:
    own.told = True
    if own.saved:
        st.query_params["result"] = own.saved
    elif own.runner.progress.state == "cancelled":
        st.info(f"The experiment was {own.runner.progress.text}.")
    else:
        st.error(f"The experiment failed: {own.runner.progress.text}")

name = st.query_params.get("result")
if name:
    if st.button("All experiments"):
        st.query_params.pop("result", None)
        st.rerun()
    try:
        result_view(store.read(name), name, theme, library(), run, disabled=model is None)
    except (DataFileError, ValueError, OSError) as error:
        st.error(f"This result can't be shown: {error}")
    st.stop()

if model is None:
    until_ready(lab.client, "Experiments can start")
else:
    st.caption(
        f"They run on {model.title} ({model.weights}) · {model.device} · {model.dtype} · {threads_text(model.threads)}."
    )
view = st.segmented_control(
    "What to run", list(VIEWS), default="ready", required=True, format_func=VIEWS.__getitem__, key="view",
    bind="query-params", label_visibility="collapsed",
)  # fmt: skip
if view == "own":
    experiment, problem = form()
    if experiment is None:
        st.error(problem)
    else:
        st.markdown(f"**{experiment.title}** · {len(experiment.variants)} variants × {experiment.repetitions} repetitions")
        with st.container(horizontal=True):
            if st.button("Run", key="run own", type="primary", disabled=model is None):
                run(experiment)
            if st.button("Show as a file", key="edit own"):
                edit(experiment)
        st.caption(
            "The address holds everything that differs from the form's defaults: pass it on, or keep it as a bookmark."
        )
elif view == "file":
    file_view(run, disabled=model is None)
elif view == "saved":
    saved_view(store, theme, open_result)
else:
    cards(load_experiments(), run, edit, disabled=model is None)
