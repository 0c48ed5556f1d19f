"""What a page reads: this session's live lab, or a saved run named in the address (``?run=NAME``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app.owner import page_is_owner
from app.saved import saved_run
from app.session import Lab, LabsFull, hub
from engine.observe.log import TraceLog
from engine.observe.runlog import RunLog
from engine.workload.report import threads_text


@dataclass(frozen=True, slots=True)
class Source:
    """Records to read, and what made them."""

    name: str
    log: TraceLog | RunLog
    made_by: str
    """Model, weights, device, dtype and threads, in words."""


def current_lab() -> Lab:
    """The session's own lab; its token goes into the address, so that a reload finds it."""
    asked = st.query_params.get("lab") or st.session_state.get("lab")
    context = get_script_run_ctx()
    try:
        lab = hub().enter(asked, context.session_id if context is not None else "")
    except LabsFull as error:
        st.warning(str(error))
        st.stop()
    st.session_state["lab"] = lab.token
    if st.query_params.get("lab") != lab.token:
        st.query_params["lab"] = lab.token
    return lab


def chosen_source() -> Source:
    """The saved run that the address names, or else this session's lab."""
    name = st.query_params.get("run")
    if name and page_is_owner(hub().owner):
        try:
            log = saved_run(name).log
            return Source(f"the saved run “{name}”", log, describe(log.info.model))
        except (ValueError, OSError) as error:
            st.error(f"The saved run “{name}” can't be opened: {error}. Showing the live lab instead.")
    lab = current_lab()
    model = lab.client.state.model
    facts = {field: getattr(model, field) for field in model.__struct_fields__} if model else {}
    return Source("this lab", lab.log, describe(facts))


def describe(model: dict[str, Any]) -> str:
    """Which model, weights, device, dtype and threads produced the numbers."""
    if not model:
        return "The model is not loaded yet."
    return (
        f"{model.get('title', 'unknown model')} ({model.get('weights', 'unknown weights')}) · {model.get('device', '?')} · "
        f"{model.get('dtype', '?')} · {threads_text(model.get('threads'))} ({model.get('omp_wait', '?')})."
    )
