"""Every number of the lab: what it means, where it sits on a request's timeline, and how other tools would report it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.figures.anatomy import anatomy_alt, anatomy_figure, gpu_alt, gpu_figure, timed_by_gpu
from app.figures.palette import theme as theme_named
from app.figures.request_life import request_life_alt, request_life_figure
from app.figures.template import many
from app.reading import chosen_source
from app.tables import definition_rows, latency_table, throughput_rows, tool_rows
from engine.core.trace import letter
from engine.observe.metrics import MIN_SAMPLES_P99, PERCENTILE_METHOD, Objectives, identity, measure, whole_run
from engine.observe.other_tools import Delivery, compare, request_records, server_records, vllm_prometheus

NEWEST_STEPS = 400
"""Steps in the picture of where time goes."""
MEASURED_STEPS = 20_000
"""Newest steps from which the device's figures are computed."""

source = chosen_source()
theme = theme_named("dark" if st.context.theme.type == "dark" else "light")
st.title("Metrics")
st.caption(f"Computed from the records of {source.name}. {source.made_by}")
traces = source.log.traces()
recent = source.log.steps(max(0, source.log.next_index - MEASURED_STEPS))
steps = recent[-NEWEST_STEPS:]
finished = [trace for trace in traces if trace.output_tokens]


def chart(figure: dict[str, Any], alt: str, key: str) -> None:
    """One picture with its sentence."""
    st.plotly_chart(figure, key=key, theme=None, config={"displayModeBar": False}, alt=alt)


if not finished:
    st.info("No request has produced a token yet. Open the lab, send a prompt, and come back.")
    st.page_link("screens/lab.py", label="Open the lab")

st.header("On one request", divider="gray")
if finished:
    names = {t.request_id: f"Request {letter(t.number)} · {many(t.output_tokens, 'token')}" for t in finished}
    order = [trace.request_id for trace in reversed(finished)]
    picked = st.selectbox("Request", order, format_func=names.__getitem__)
    trace = next(t for t in finished if t.request_id == picked)
    chart(request_life_figure(trace, theme), request_life_alt(trace), "life")
    both = identity(trace)
    if both is not None and trace.tpot is not None and trace.ttft is not None:
        latency, estimate = both
        n = trace.output_tokens
        st.markdown(
            f"**Latency ≈ TTFT + (N − 1) × TPOT** on this request: "
            f"{trace.ttft * 1000:,.1f} ms + {n - 1} × {trace.tpot * 1000:,.2f} ms = {estimate * 1000:,.1f} ms; "
            f"measured {latency * 1000:,.1f} ms. One user's speed is 1 / TPOT = {1 / trace.tpot:,.1f} tokens/s."
            if trace.tpot
            else "All tokens after the first came in the same step."
        )
    elif trace.tpot is None:
        st.markdown("This request has one output token, so it has no gap: ITL and TPOT are not defined (n/a).")
else:
    st.caption("TTFT, the gaps between tokens (ITL), their mean (TPOT) and E2E latency will be drawn on one time axis.")

st.header("All requests", divider="gray")
left, right = st.columns(2)
ttft_limit = left.number_input("Objective: TTFT at most (ms)", min_value=1.0, value=500.0, step=50.0)
tpot_limit = right.number_input("Objective: TPOT at most (ms)", min_value=1.0, value=100.0, step=10.0)
objectives = Objectives(ttft=ttft_limit / 1000, tpot=tpot_limit / 1000)
run = measure(traces, recent, window=whole_run(traces), objectives=objectives, refused=source.log.stats.refused)
st.dataframe(latency_table(run), hide_index=True, width="stretch")
st.caption(
    f"Milliseconds. Percentiles by {PERCENTILE_METHOD}. p99 from fewer than {MIN_SAMPLES_P99} samples is marked *: it is "
    f"hardly more than the maximum. n/a: not defined for these requests. Requests that ran single-stepped or in slow motion "
    f"are left out."
)
st.dataframe(throughput_rows(run, source.log.stats.refused), hide_index=True, width="stretch")

st.header("Where a step's time goes", divider="gray")
if any(step.scheduled for step in steps):
    chart(anatomy_figure(steps, theme), anatomy_alt(steps), "anatomy")
    st.caption(anatomy_alt(steps))
    if timed_by_gpu(steps):
        chart(gpu_figure(steps, theme), gpu_alt(steps), "gpu")
        st.caption(gpu_alt(steps))
else:
    st.caption("Each bar will be one step, split into schedule, prepare, forward, sample and postprocess.")

st.header("How other tools would report this run", divider="gray")
st.markdown(
    "Tools use the same words for different things. Each row applies one tool's own definitions to the same records. "
    "Delivery to a client is not measured here; it is the model that you set."
)
columns = st.columns(3)
interval = columns[0].number_input("Tokens a message (`stream_interval`)", 1, 64, 1)
delay = columns[1].number_input("Delay of each message (ms)", 0.0, 1000.0, 0.0)
role = columns[2].checkbox("Chat server sends an empty role message at once")
delivery = Delivery(stream_interval=int(interval), delay=delay / 1000, role_message=0.0 if role else None)
if finished:
    reports = compare(request_records(traces, delivery), objectives=objectives)
    st.dataframe(tool_rows(reports), hide_index=True, width="stretch")
    with st.expander("What differs, tool by tool"):
        for report in reports:
            st.markdown(f"**{report.tool} {report.version}**  \n" + "  \n".join(report.notes))
    with st.expander("vLLM's own server histograms (Prometheus)"):
        st.dataframe(
            [
                {
                    "histogram": name,
                    "observations": found.count,
                    "sum (s or tokens)": round(found.sum, 4),
                    "p50 by PromQL": found.quantile(0.5),
                    "p99 by PromQL": found.quantile(0.99),
                }
                for name, found in vllm_prometheus(server_records(traces), recent).histograms.items()
            ],
            hide_index=True,
            width="stretch",
        )
        st.caption(
            "A quantile of a histogram is interpolated inside a bucket: with wide buckets it can be far from the samples."
        )
else:
    st.caption("A table of seven tools appears when the lab has answered a request.")

st.header("Definitions", divider="gray")
st.dataframe(definition_rows(), hide_index=True, width="stretch")
