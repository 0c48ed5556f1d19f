"""Exports parse back to what went in, in every state of a run, and hold nothing that a reader could trip over."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.trace import Event, Preemption, RequestTrace, Scheduled, StepTrace
from engine.observe import export
from engine.observe.export import RecordsError, chrome_trace, read_records, records_jsonl, requests_csv
from engine.observe.metrics import latency_values, parts
from tests.observe.recorded import record
from tests.observe.runs import random_run, trace
from tests.observe.test_metrics import STATES

SEEDS = st.integers(0, 10_000)


def no_constants(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def loads(text: str) -> Any:
    return json.loads(text, parse_constant=no_constants)


def table(requests: list[RequestTrace]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("".join(requests_csv(requests)), newline="")))


# CSV ----------------------------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_csv_parses_back(seed: int) -> None:
    requests = random_run(seed, drain=False).traces
    rows = table(requests)
    assert len(rows) == len(requests)
    for request, row in zip(requests, rows, strict=True):
        assert row["request_id"] == request.request_id
        assert int(row["output_tokens"]) == request.output_tokens
        values = latency_values(request)
        for column, name in (("ttft_s", "ttft"), ("tpot_s", "tpot"), ("e2e_latency_s", "e2e"), ("queue_time_s", "queue")):
            assert (float(row[column]) if row[column] else None) == values[name]
        for column, moment in (("arrival_s", request.arrival), ("finished_s", request.finished)):
            assert (float(row[column]) if row[column] else -1.0) == moment


def test_csv_names_its_units_and_leaves_the_undefined_empty() -> None:
    (row,) = table([trace("a", 0.0, [], finished=1.5, reason="abort")])
    assert row["time_to_finish_s"] == "1.5"
    for name, cell in row.items():
        if name.endswith("_s") and name not in ("arrival_s", "tokenised_s", "queued_s", "first_scheduled_s", "finished_s"):
            assert cell == "" or name == "time_to_finish_s", name
        assert cell.lower() not in ("nan", "inf", "-inf", "none", "-1", "-1.0")
    assert row["user_speed_tokens_per_s"] == ""


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1", "＝1", "=cmd|' /C calc'!A0", "\0=1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    request = trace(text, 0.0, [1.0], stop_reason=text, error=text, parent_id=text)
    (row,) = table([request])
    for column in ("request_id", "stop_reason", "error", "parent_id"):
        assert row[column].startswith("'"), column
        assert text.replace("\0", "") in row[column]


@given(st.text(max_size=40))
def test_any_text_stays_one_cell(text: str) -> None:
    line = "".join(requests_csv([trace("a", 0.0, [1.0], error=text)]))
    rows = list(csv.reader(io.StringIO(line.encode("utf-8").decode("utf-8"), newline="")))
    assert [len(row) for row in rows] == [len(export.CSV_COLUMNS)] * 2
    cell = rows[1][export.CSV_COLUMNS.index("error")]
    assert cell.removeprefix("'") == export.safe_cell(text).removeprefix("'")
    assert not cell.lstrip().startswith(("=", "+", "-", "@"))


def test_text_that_is_no_unicode_is_still_written() -> None:
    assert table([trace("a", 0.0, [1.0], error="half \ud83d")])[0]["error"] == "half ?"


def test_a_token_id_as_stop_reason_is_a_number() -> None:
    assert table([trace("a", 0.0, [1.0], stop_reason=2)])[0]["stop_reason"] == "2"


# JSONL --------------------------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_jsonl_parses_back(seed: int) -> None:
    run = random_run(seed, drain=False)
    lines = list(records_jsonl(run.traces, run.steps, {"model": "tiny", "threads": 2}))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    header, *records = read_records(lines)
    assert isinstance(header, export.Header) and header.about == {"model": "tiny", "threads": 2}
    assert [r.request for r in records if isinstance(r, export.RequestLine)] == run.traces
    assert [r.step for r in records if isinstance(r, export.StepLine)] == run.steps
    kinds = [loads(line)["type"] for line in lines]
    assert kinds == ["header"] + ["request"] * len(run.traces) + ["step"] * len(run.steps)


def test_a_reader_without_our_code_can_name_the_fields_of_arrays() -> None:
    step = StepTrace(index=0, start=0.0, scheduled=(Scheduled("a", "prefill", 5, 0),), events=(Event("admit", "a"),))
    header, line = (loads(text) for text in records_jsonl([], [step]))
    assert (header["format"], header["version"]) == ("inference-lab.records", 1)
    row = dict(zip(header["arrays"]["Scheduled"], line["step"]["scheduled"][0], strict=True))
    assert (row["request_id"], row["kind"], row["num_tokens"]) == ("a", "prefill", 5)
    assert dict(zip(header["arrays"]["Event"], line["step"]["events"][0], strict=True))["op"] == "admit"


def test_numbers_that_are_not_finite_and_half_characters_give_valid_json() -> None:
    bad = trace("a", 0.0, [float("inf"), float("nan")], error="half \ud83d")
    for line in records_jsonl([bad], [], {"about": "half \ud83d"}):
        assert "half ?" in line
        line.encode("utf-8")
        loads(line)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        (["\n", "  \n"], "empty"),
        (['{"type":"step"}'], "line 1 is not the header"),
        (["PK\x03\x04"], "line 1 is not the header"),
        ([b"\xff\xfe"], "line 1 is not the header"),
        (['{"type":"header","format":"other","version":1}'], "says format 'other'"),
        (['{"type":"header","version":99}'], "says version 99"),
        (['{"type":"header","version":0}'], "says version 0"),
        (['{"type":"header"}', '{"type":"step","step":{"index":0}}'], "line 2 is not a record"),
        (['{"type":"header"}', "", '{"type":"wild"}'], "line 3 is not a record"),
        (['{"type":"header"}', '{"type":"header"}'], "line 2 is a second header"),
        (['{"type":"header"}', "[" * 100_000], "line 2 is not a record"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_with_its_line(lines: list[Any], message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        list(read_records(lines))


def test_a_file_of_a_later_minor_schema_opens() -> None:
    """Fields that this version does not know are passed over."""
    header, record = read_records(
        [
            '{"type":"header","version":1,"colour":"blue"}',
            '{"type":"request","request":{"request_id":"a","mood":"calm"}}',
        ]
    )
    assert isinstance(header, export.Header)
    assert isinstance(record, export.RequestLine) and record.request.request_id == "a"


# Chrome trace -------------------------------------------------------------------------------------------------------------


def events_of(requests: list[RequestTrace], steps: list[StepTrace]) -> list[dict[str, Any]]:
    document = loads("".join(chrome_trace(requests, steps, {"device": "cpu"})))
    assert document["otherData"] == {"device": "cpu"}
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in "XiCM" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    return list(events)


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            tracks[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    return tracks


def assert_nested(track: list[tuple[int, int, str]]) -> None:
    """Slices of one track contain each other or stand apart, as a viewer requires."""
    stack: list[tuple[int, int, str]] = []
    for item in sorted(track, key=lambda s: (s[0], -s[1])):
        while stack and stack[-1][1] <= item[0]:
            stack.pop()
        assert not stack or item[1] <= stack[-1][1], (stack[-1], item)
        stack.append(item)


@given(SEEDS)
@settings(max_examples=40)
def test_chrome_trace_holds_the_whole_run(seed: int) -> None:
    run = random_run(seed)
    events = events_of(run.traces, run.steps)
    names = {
        e["args"]["name"].split()[-1]: e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == export.REQUESTS_PID
    }
    assert set(names) == set(run.requests)
    tracks = slices(events)
    for track in tracks.values():
        assert_nested(track)
    rows = [(row, step) for step in run.steps for row in step.scheduled]
    for request_id, tid in names.items():
        request, mine = run.requests[request_id], tracks.get((export.REQUESTS_PID, tid), [])
        kinds = [name for _, _, name in mine if name not in ("tokenise", "queued", "preempted")]
        assert kinds == [row.kind for row, _ in rows if row.request_id == request_id]
        queued = sum(end - start for start, end, name in mine if name == "queued")
        split = parts(request)
        if split.queue is not None:
            assert queued == round(split.queue * 1e9)
        if request.preemptions and request.finish_reason in ("stop", "length"):
            assert sum(name == "preempted" for _, _, name in mine) == request.preemptions
        assert (
            sum(e["name"].startswith("finished") and e["ph"] == "i" for e in events if e["tid"] == tid and e["pid"] == 1)
            == 1
        )
    steps = [name for _, _, name in tracks[export.ENGINE_PID, 1] if name.startswith("step ")]
    assert steps == [f"step {s.index}" for s in run.steps if s.scheduled]
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"KV blocks", "running", "waiting"}


@given(SEEDS, st.integers(1, 30))
@settings(max_examples=40)
def test_chrome_trace_of_a_run_whose_older_steps_are_gone(seed: int, gone: int) -> None:
    run = random_run(seed)
    for steps in (run.steps[gone:], []):
        for track in slices(events_of(run.traces, steps)).values():
            assert_nested(track)


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_were_scheduled_ahead_stay_apart(seed: int) -> None:
    _, run = record(seed, 60, batching="continuous", use_kv_cache=True, async_scheduling=True)
    assert any(step.overlap for step in run.steps)
    events = events_of([closed.trace for closed in run.closed_events], run.steps)
    for track in slices(events).values():
        assert_nested(track)
    ahead = {f"step {step.index}" for step in run.steps if step.overlap}
    told = {e["name"] for e in events if "scheduled_ahead_s" in e.get("args", {})}
    assert told == ahead


def test_parts_of_a_step_lie_inside_it_in_order() -> None:
    step = StepTrace(
        index=3,
        start=1.0,
        schedule_time=0.1,
        prepare_time=0.1,
        forward_time=0.5,
        sample_time=0.1,
        end=1.9,
        postprocess_time=0.2,
        wait_time=0.25,
        scheduled=(Scheduled("a", "decode", 1, 3, sampled=9),),
        kv_used=5,
        num_waiting=2,
    )
    track = slices(events_of([], [step]))[export.ENGINE_PID, 1]
    ms = 1_000_000
    assert track == [
        (750 * ms, 1000 * ms, "other labs"),
        (1000 * ms, 2100 * ms, "step 3"),
        (1000 * ms, 1100 * ms, "schedule"),
        (1100 * ms, 1200 * ms, "prepare"),
        (1200 * ms, 1700 * ms, "forward"),
        (1700 * ms, 1800 * ms, "sample"),
        (1900 * ms, 2100 * ms, "postprocess"),
    ]


def test_a_preempted_request_shows_its_wait() -> None:
    """Prefill in step 0, thrown out in step 1 (at 1 s), back in step 3 (at 3 s)."""
    rows = [("a", "prefill"), ("b", "decode"), ("b", "decode"), ("a", "recompute")]
    steps = [
        StepTrace(
            index=i,
            start=float(i),
            end=i + 1.0,
            scheduled=(Scheduled(who, kind, 4, 0, recomputed=4 * (kind == "recompute")),),  # type: ignore[arg-type]
            preemptions=(Preemption("a", 4, "b"),) if i == 1 else (),
        )
        for i, (who, kind) in enumerate(rows)
    ]
    events = events_of([trace("a", 0.0, [4.0])], steps)
    mine = slices(events)[export.REQUESTS_PID, 1]
    second = 1_000_000_000
    assert mine == [(0, second, "prefill"), (second, 3 * second, "preempted"), (3 * second, 4 * second, "recompute")]
    (mark,) = (e for e in events if e["name"] == "preempted" and e["ph"] == "i")
    assert mark["args"] == {"tokens_lost": 4, "in_favour_of": "b"}


# Every state --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_every_export_works_in_every_state(state: str) -> None:
    requests = STATES[state]
    assert len(table(requests)) == len(requests)
    assert len(list(read_records(records_jsonl(requests)))) == len(requests) + 1
    for steps in (
        [],
        [StepTrace(index=0, start=0.0)],
        [StepTrace(index=0, start=5.0, scheduled=(Scheduled("i", "decode", 1, 0),))],
    ):
        for track in slices(events_of(requests, steps)).values():
            assert_nested(track)


def test_times_that_are_no_times_do_not_reach_a_file() -> None:
    step = StepTrace(index=0, start=float("nan"), end=float("inf"), forward_time=float("inf"))
    bad = trace("a", float("nan"), [float("inf")], finished=float("inf"))
    events_of([bad], [step])
    (row,) = table([bad])
    assert not {"nan", "inf"} & set(row.values())


def test_writers_do_not_hold_the_run_in_memory() -> None:
    """The records are pulled one by one: the first line is out before the second record is asked for."""
    asked = []

    def source() -> Iterator[Any]:
        for i in range(3):
            asked.append(i)
            yield trace(str(i), 0.0, [1.0])

    lines = requests_csv(source())
    next(lines)
    next(lines)
    assert asked == [0]

    def steps() -> Iterator[StepTrace]:
        for i in range(1000):
            asked.append(i)
            yield StepTrace(index=i, start=float(i), end=float(i))

    asked.clear()
    pieces = chrome_trace([], steps())
    for _ in range(12):
        next(pieces)
    assert len(asked) < 10


def test_records_of_the_trace_are_all_described() -> None:
    """A new array-like record must get its field names into the header."""
    import engine.core.trace as module

    arrays = {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_config__.array_like
    }
    assert arrays == set(export._ARRAYS)
