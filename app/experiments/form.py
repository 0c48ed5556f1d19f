"""The form of an experiment: one setting that differs, what is common, the workload. Its values stand in the address."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
import streamlit as st

from engine.workload.arrivals import Arrivals, Process, Unit
from engine.workload.experiment import Experiment, Targets, Variant
from engine.workload.lengths import Lengths
from engine.workload.spec import ListedRequest, Prefix, Stop, WorkloadSpec
from engine.workload.traces import TraceRef, TraceRow, parse_trace, scaled, statistics, trace_names


class Knob(msgspec.Struct, frozen=True):
    """One setting of the engine that variants can differ in: label, values to start from, and choices or a range."""

    label: str
    first: Any
    second: Any
    choices: tuple[Any, ...] = ()
    least: int = 1
    most: int = 100_000


KNOBS: dict[str, Knob] = {
    "max_num_seqs": Knob("Seats (max_num_seqs)", 1, 8, most=256),
    "max_num_batched_tokens": Knob("Token budget (max_num_batched_tokens)", 64, 512, least=8),
    "enable_chunked_prefill": Knob("Chunked prefill", "off", "on", ("off", "on")),
    "enable_prefix_caching": Knob("Prefix cache", "off", "on", ("off", "on")),
    "batching": Knob("Batching", "static", "continuous", ("static", "continuous")),
    "kv_layout": Knob("KV layout", "contiguous", "paged", ("contiguous", "paged")),
    "use_kv_cache": Knob("KV cache", "off", "on", ("off", "on")),
    "async_scheduling": Knob("Asynchronous scheduling", "off", "on", ("off", "on")),
    "scheduling_policy": Knob("Who goes first", "fcfs", "priority", ("fcfs", "priority")),
    "long_prefill_token_threshold": Knob("Long-prompt threshold", 0, 64, least=0),
    "block_size": Knob("Block size", 8, 32, most=256),
    "num_kv_blocks": Knob("KV blocks", 32, 256),
}
COMMON = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, "block_size": 16, "num_kv_blocks": 256}
LINK: Literal["query-params"] = "query-params"
PREFIX = "x_"


def form() -> tuple[Experiment | None, str]:
    """Draw the form; returns the experiment, or None and what is wrong with it."""
    left, right = st.columns(2, gap="large")
    with left:
        st.subheader("What differs")
        knob = _choose("Setting", list(KNOBS), "knob", format_func=lambda name: KNOBS[name].label)
        values = _values(knob)
        st.subheader("What is the same")
        common = {
            name: _number(name, default, f"common_{name}", 1, 1_000_000) for name, default in COMMON.items() if name != knob
        }
        st.subheader("How it is measured")
        repetitions = _number(
            "Repetitions",
            5,
            "repetitions",
            1,
            100,
            "At least 5 are needed to tell a difference from noise; more tell smaller ones.",
        )
        ttft = _number("Objective: TTFT at most (ms, 0: none)", 0, "ttft", 0, 1_000_000)
        tpot = _number("Objective: TPOT at most (ms, 0: none)", 0, "tpot", 0, 1_000_000)
    with right:
        st.subheader("Workload")
        try:
            spec = _workload(knob)
        except ValueError as error:
            return None, str(error)
    try:
        return (
            Experiment(
                id="your-own",
                title=f"{KNOBS[knob].label}: {' against '.join(_said(v) for v in values)}",
                variants=tuple(Variant(name=_said(value), config=_config(common, knob, value)) for value in values),
                workload=spec,
                objectives=Targets(ttft=ttft / 1000 or None, tpot=tpot / 1000 or None),
                repetitions=repetitions,
            ),
            "",
        )
    except ValueError as error:
        return None, str(error)


def _values(name: str) -> list[Any]:
    knob = KNOBS[name]
    if knob.choices:
        st.caption(f"Compares {' with '.join(map(str, knob.choices))}.")
        return list(knob.choices)
    columns = st.columns(3)
    found = []
    for place, (letter, default) in enumerate((("A", knob.first), ("B", knob.second))):
        with columns[place]:
            found.append(_number(letter, default, f"{name}_{letter.lower()}", knob.least, knob.most))
    with columns[2]:
        third = st.number_input(
            "C (optional)", knob.least, knob.most, None, key=f"{PREFIX}{name}_c", bind=LINK, placeholder="none"
        )
    return [*found, *([int(third)] if third is not None else [])]


def _config(common: dict[str, int], knob: str, value: Any) -> dict[str, Any]:
    """The settings of one variant; what a choice needs to work is set with it."""
    config: dict[str, Any] = {**common, knob: {"on": True, "off": False}.get(value, value)}
    whole = (knob, value) in (("enable_chunked_prefill", "off"), ("batching", "static"), ("use_kv_cache", "off"))
    if whole and config["max_num_batched_tokens"] < config["max_model_len"]:
        config["max_num_batched_tokens"] = config["max_model_len"]
    if knob in ("batching", "kv_layout", "use_kv_cache"):
        config["enable_prefix_caching"] = False if value in ("continuous", "paged", "on") else None
        config = {name: item for name, item in config.items() if item is not None}
    return config


def _workload(knob: str) -> WorkloadSpec:
    kind = st.segmented_control(
        "Where requests come from",
        ["generated", "a trace"],
        default="generated",
        required=True,
        key=f"{PREFIX}kind",
        bind=LINK,
    )
    return _trace() if kind == "a trace" else _generated(knob)


def _generated(knob: str) -> WorkloadSpec:
    process = _choose(
        "Arrivals", ["poisson", "constant", "bursty", "closed"], "process",
        help="poisson: at random; constant: evenly; bursty: in clumps; closed: a fixed number of users who each wait.",
    )  # fmt: skip
    unit = _choose("Counted in", ["steps", "seconds"], "unit", help="In steps every repetition is the same, on any machine.")
    one, two = st.columns(2)
    with one:
        count = _number("Requests", 16, "requests", 1, 2000)
    with two:
        if process == "closed":
            arrivals = Arrivals(
                process="closed", unit=cast("Unit", unit), in_flight=_number("Users at once", 4, "in_flight", 1, 256)
            )
        else:
            rate = st.number_input(f"Requests a {unit[:-1]}", 0.001, 1000.0, 1.0, key=f"{PREFIX}rate", bind=LINK)
            arrivals = Arrivals(process=cast("Process", process), unit=cast("Unit", unit), rate=float(rate))
    prompt = _lengths("Prompt tokens", "prompt", 32, 128)
    output = _lengths("Output tokens", "output", 8, 32)
    one, two, three = st.columns(3)
    with one:
        shared = _number("Common prefix (tokens)", 0, "prefix", 0, 100_000)
    with two:
        share = _number("Requests with it (%)", 100, "share", 0, 100)
    with three:
        seed = _number("Seed", 0, "seed", 0, 2**31)
    priorities = (0, 10, 10, 10) if knob == "scheduling_policy" else (0,)
    return WorkloadSpec(
        arrivals=arrivals, prompt=prompt, output=output, prefix=Prefix(tokens=shared, share=share / 100), seed=seed,
        stop=Stop(requests=count), priorities=priorities,
    )  # fmt: skip


def _lengths(label: str, key: str, low: int, high: int) -> Lengths:
    one, two = st.columns(2)
    with one:
        least = _number(f"{label}, from", low, f"{key}_from", 1, 100_000)
    with two:
        most = _number("to", high, f"{key}_to", 1, 100_000)
    return Lengths(tokens=least) if least == most else Lengths(distribution="uniform", low=least, high=most)


def _trace() -> WorkloadSpec:
    """A recorded pattern, scaled: one that comes with the lab by name, an uploaded one written out request by request."""
    uploaded = st.file_uploader(
        "A trace (CSV or JSONL) with TIMESTAMP, ContextTokens, GeneratedTokens, or another known form; not part of the link",
        ["csv", "jsonl"],
        key="x_upload",
    )
    name = _choose("Or one that comes with the lab", trace_names(), "trace")
    one, two, three = st.columns(3)
    with one:
        start = _number("From row", 0, "start", 0, 500_000)
        count = _number("Rows", 30, "count", 1, 2000)
    with two:
        time = st.number_input("Time ×", 0.0001, 1000.0, 0.05, format="%.4f", key=f"{PREFIX}time", bind=LINK)
        length = st.number_input("Lengths ×", 0.0001, 100.0, 0.06, format="%.4f", key=f"{PREFIX}length", bind=LINK)
    with three:
        prompt = _number("Prompts cut at", 96, "max_prompt", 1, 100_000)
        output = _number("Outputs cut at", 24, "max_output", 1, 100_000)
    settings: dict[str, Any] = {
        "start": start, "count": count, "time": float(time), "length": float(length),
        "max_prompt_tokens": prompt, "max_output_tokens": output,
    }  # fmt: skip
    if uploaded is None:
        return WorkloadSpec(trace=TraceRef(name=name, **settings))
    rows = parse_trace(_text(uploaded.getvalue(), uploaded.name), uploaded.name)
    _describe(rows, uploaded.name)
    return WorkloadSpec(requests=listed_requests(scaled(rows, **settings)))


def listed_requests(rows: list[TraceRow]) -> tuple[ListedRequest, ...]:
    """The rows of a scaled trace as a list of requests, which an experiment file carries by itself."""
    return tuple(
        ListedRequest(at=round(row.arrival, 6), prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
        for row in rows
    )


def _describe(rows: list[TraceRow], name: str) -> None:
    found = statistics(rows)
    cv = "n/a" if found.cv is None else f"{found.cv:.2f}"
    st.caption(
        f"{name}: {found.count:,} requests over {found.duration:,.0f} s, inter-arrival CV {cv}; prompts p50 "
        f"{found.prompt_p50:,.0f}, p90 {found.prompt_p90:,.0f}; outputs p50 {found.output_p50:,.0f}, p90 "
        f"{found.output_p90:,.0f} tokens."
    )


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no UTF-8 text (byte {error.start}): save it as UTF-8") from None


def _said(value: Any) -> str:
    return str(value)


def _number(label: str, default: int, key: str, least: int, most: int, help: str | None = None) -> int:
    return int(st.number_input(label, least, most, default, step=1, key=PREFIX + key, bind=LINK, help=help))


def _choose(label: str, options: list[str], key: str, **more: Any) -> str:
    return str(st.selectbox(label, options, key=PREFIX + key, bind=LINK, **more))
