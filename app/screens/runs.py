"""Saved runs: keep what the lab recorded, open it again later, take it elsewhere."""

from __future__ import annotations

import time

import streamlit as st

from app.downloads import offer
from app.reading import current_lab
from app.saved import library, saved_run
from engine.observe.archive import Archive
from engine.observe.export import chrome_trace, records_jsonl, requests_csv
from engine.observe.runfile import SUFFIX
from engine.observe.runs import RunInfo

MAX_EXPORT_STEPS = 200_000

runs = library()
lab = current_lab()
st.title("Runs")
st.markdown(
    "A run is everything that the lab recorded: settings, model, every step, every request. It stays on this machine, in "
    "your data folder, until you delete it."
)


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1024**2:.1f} MiB" if count >= 1024**2 else f"{count / 1024:.1f} KiB"


def tell(kind: str, text: str) -> None:
    """Say it after the rerun that follows."""
    st.session_state["runs_told"] = (kind, text)
    st.rerun()


told = st.session_state.pop("runs_told", None)
if told:
    (st.success if told[0] == "done" else st.error)(told[1])

st.header("Save what this lab recorded", divider="gray")
archive = lab.log.archive
recording = archive.file() if isinstance(archive, Archive) else None
if recording is None:
    st.caption("Nothing is recorded yet. Open the lab and send a prompt.")
else:
    with st.form("save", border=False):
        left, right = st.columns([4, 1], vertical_alignment="bottom")
        name = left.text_input("Name", value=time.strftime("run %Y-%m-%d %H-%M"), max_chars=80)
        st.caption(f"{lab.log.next_index:,} steps so far, {size(recording.stat().st_size)}.")
        if right.form_submit_button("Save run", type="primary", width="stretch"):
            try:
                tell("done", f"Saved as “{runs.save(recording, name)}”.")
            except (ValueError, OSError) as error:
                tell("error", f"Not saved: {error}")
    if isinstance(archive, Archive) and archive.problem:
        st.warning(archive.problem)

st.header("Saved runs", divider="gray")


@st.dialog("Rename a run")
def rename(info: RunInfo) -> None:
    """Ask for another name."""
    new = st.text_input("New name", value=info.name, max_chars=80)
    if st.button("Rename", type="primary"):
        try:
            tell("done", f"“{info.name}” is now “{runs.rename(info.name, new)}”.")
        except (ValueError, OSError) as error:
            st.error(str(error))


@st.dialog("Delete a run")
def delete(info: RunInfo) -> None:
    """Ask once more."""
    st.markdown(f"Delete **{info.name}** ({size(info.size)}) for good?")
    if st.button("Delete", type="primary"):
        try:
            runs.delete(info.name)
            tell("done", f"Deleted “{info.name}”.")
        except (ValueError, OSError) as error:
            tell("error", str(error))


@st.dialog("Take a run elsewhere", width="medium")
def export(info: RunInfo) -> None:
    """Offer the file itself and its exports."""
    st.markdown("The run file opens in any Inference Lab. The exports are for other tools.")
    offer("Run file", runs.path(info.name).read_bytes, file_name=f"{info.name}{SUFFIX}", width="stretch")
    log = saved_run(info.name).log
    offer(
        "Requests as CSV",
        lambda: "".join(requests_csv(log.traces())),
        file_name=f"{info.name} requests.csv",
        mime="text/csv",
        width="stretch",
    )
    offer(
        "Records as JSONL",
        lambda: "".join(records_jsonl(log.traces(), log.steps(0, MAX_EXPORT_STEPS))),
        file_name=f"{info.name}.jsonl",
        mime="application/jsonl",
        width="stretch",
    )
    offer(
        "Chrome trace (opens in Perfetto)",
        lambda: "".join(chrome_trace(log.traces(), log.steps(0, MAX_EXPORT_STEPS))),
        file_name=f"{info.name} trace.json",
        mime="application/json",
        width="stretch",
    )


found = runs.list()
if not found:
    st.caption("No saved runs. What you save appears here with its size and date.")
for info in found:
    with st.container(border=True):
        left, right = st.columns([3, 2], vertical_alignment="center")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created))
        left.markdown(f"**{info.name}**")
        left.caption(f"{when} · {info.steps:,} steps · {size(info.size)}" + (f" · {info.model}" if info.model else ""))
        if info.problem:
            left.warning(f"{info.problem}.")
        buttons = right.container(horizontal=True, horizontal_alignment="right")
        if info.steps:
            if buttons.button("Open", key=f"open {info.name}", type="primary"):
                st.switch_page("screens/lab.py", query_params={"run": info.name})
            if buttons.button("Metrics", key=f"metrics {info.name}"):
                st.switch_page("screens/metrics.py", query_params={"run": info.name})
            if buttons.button("Export", key=f"export {info.name}"):
                export(info)
        if buttons.button("Rename", key=f"rename {info.name}"):
            rename(info)
        if buttons.button("Delete", key=f"delete {info.name}"):
            delete(info)

st.header("Bring in a run", divider="gray")
uploaded = st.file_uploader(f"A run file (*{SUFFIX})", key="upload")
st.caption(f"Is it larger? Copy it to {runs.folder} on the lab's machine, and it is listed above.")
if uploaded is not None and st.session_state.get("uploaded") != uploaded.file_id:
    st.session_state["uploaded"] = uploaded.file_id
    read = uploaded.read
    try:
        tell("done", f"Added as “{runs.bring_in(iter(lambda: read(1 << 20), b''), uploaded.name)}”.")
    except (ValueError, OSError) as error:
        tell("error", f"Not added: {error}")
