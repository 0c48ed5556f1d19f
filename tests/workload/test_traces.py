from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.workload.check import WorkloadError
from engine.workload.traces import (
    TraceFileError,
    TraceRef,
    TraceRow,
    parse_trace,
    read_trace,
    replayed,
    scaled,
    statistics,
    to_csv,
    trace_names,
)

REAL = Path(__file__).parents[3] / "shared" / "traces"
ROW = st.builds(TraceRow, st.floats(0, 1e6), st.integers(0, 10**6), st.integers(0, 10**6))


@pytest.mark.parametrize(
    ("name", "count", "cv", "prompt", "output"),
    [("code", 8819, 13.2, (1469, 5186), (13, 55)), ("conv", 19_366, 1.09, (1020, 2734), (129, 424))],
)
def test_the_public_traces_import_whole_and_give_their_published_statistics(name, count, cv, prompt, output):
    path = REAL / f"azure_llm_2023_{name}.csv"
    if not path.is_file():
        pytest.skip(f"the public trace {path.name} is not beside the checkout")
    found = statistics(read_trace(path))
    assert found.count == count
    assert found.cv == pytest.approx(cv, abs=0.05 if cv > 10 else 0.005)
    assert (found.prompt_p50, found.output_p50) == (prompt[0], output[0])
    assert found.prompt_p90 == pytest.approx(prompt[1], abs=2)
    assert found.output_p90 == pytest.approx(output[1], abs=1)


def test_the_known_forms_are_read():
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,10,2\n2023-11-16 18:17:05.4799600,20,3\n"
    with_zone = azure.replace("9600,", "9600+00:00,")
    burst = "Timestamp,Session ID,Request tokens,Response tokens,Total tokens\n5,a,10,2,12\n6.5,b,20,3,23\n"
    mooncake = """{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}
        {"timestamp": 1500, "input_length": 20, "output_length": 3}
    """
    own = "\ufeffarrival,prompt_tokens,output_tokens\n0,10,2\n\n1.5,20,3\n".lstrip("\ufeff")
    for text, name in ((azure, "a.csv"), (with_zone, "z.csv"), (burst, "b.csv"), (mooncake, "m.jsonl"), (own, "o.csv")):
        rows = parse_trace(text, name)
        assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(10, 2), (20, 3)]
        assert [row.arrival for row in rows] == pytest.approx([0, 1.5], abs=1e-6), name


def test_rows_are_sorted_and_counted_from_the_earliest():
    rows = parse_trace("arrival,prompt_tokens,output_tokens\n7,1,1\n5,2,2\n", "t.csv")
    assert rows == [TraceRow(0.0, 2, 2), TraceRow(2.0, 1, 1)]


def test_a_byte_order_mark_and_windows_line_ends_are_no_obstacle(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03,10,2\r\n")
    assert read_trace(path) == [TraceRow(0.0, 10, 2)]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:17:03.97,10,2\n"


@pytest.mark.parametrize(
    ("text", "name", "line", "words"),
    [
        ("", "t.csv", None, "is empty"),
        (HEAD, "t.csv", None, "has no rows"),
        (HEAD + GOOD + "2023-11-16 18:17:04,ten,2\n", "t.csv", 3, "contexttokens 'ten' must be a whole number from 0"),
        (HEAD + GOOD + "2023-11-16 18:17:04,-1,2\n", "t.csv", 3, "'-1'"),
        (HEAD + GOOD + "2023-11-16 18:17:04,1,2000001\n", "t.csv", 3, "1,000,000"),
        (HEAD + GOOD + "yesterday,1,2\n", "t.csv", 3, "'yesterday' is neither a number"),
        (HEAD + GOOD + "2023-13-16 18:17:04,1,2\n", "t.csv", 3, "no possible date"),
        (HEAD + GOOD + "nan,1,2\n", "t.csv", 3, "'nan'"),
        (HEAD + GOOD + "2023-11-16 18:17:04,1\n", "t.csv", 3, "has 2 values, but the first line names 3"),
        (HEAD + '"2023-11-16 18:17:04,1,2\n', "t.csv", 2, "no valid CSV"),
        ("time,in,out\n1,2,3\n", "t.csv", 1, "no column for arrival and prompt and output; found time, in, out"),
        ("timestamp,prompt_tokens\n1,2\n", "t.csv", 1, "no column for output"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1,\n', "t.jsonl", 2, "no valid JSON"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n', "t.jsonl", 2, "has no input_length"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}\n', "t.jsonl", 1, "'True'"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 3}\n', "t.jsonl", 1, "'2.5'"),
        ("[1, 2]\n", "t.jsonl", 1, "must be an object"),
        ("[" * 100_000 + "\n", "t.jsonl", 1, "no valid JSON"),
    ],
)
def test_bad_traces_name_the_line_and_what_is_wrong(text, name, line, words):
    with pytest.raises(TraceFileError) as caught:
        parse_trace(text, name)
    assert caught.value.line == line
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_size_is_bounded(tmp_path):
    with pytest.raises(TraceFileError, match="more than 1 rows"):
        parse_trace(HEAD + GOOD + GOOD, "t.csv", max_rows=1)
    with pytest.raises(TraceFileError, match="can't be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceFileError, match="no UTF-8"):
        read_trace(tmp_path / "bytes.csv")


@given(st.lists(ROW, min_size=1, max_size=30))
def test_a_trace_survives_writing_and_reading(rows):
    rows.sort(key=lambda row: row.arrival)
    again = parse_trace(to_csv(rows), "t.csv")
    first = rows[0].arrival
    assert again == [TraceRow(row.arrival - first, row.prompt_tokens, row.output_tokens) for row in rows]
    assert parse_trace(to_csv(again), "t.csv") == again


@given(st.lists(ROW, min_size=1, max_size=30), st.floats(0.01, 10), st.floats(0.001, 10), st.integers(1, 500))
def test_scaling_keeps_the_order_and_the_limits(rows, time, length, limit):
    rows.sort(key=lambda row: row.arrival)
    out = scaled(rows, time=time, length=length, max_prompt_tokens=limit, max_output_tokens=limit)
    assert len(out) == len(rows)
    assert out[0].arrival == 0
    assert all(a.arrival <= b.arrival for a, b in pairwise(out))
    assert all(1 <= row.prompt_tokens <= limit and 1 <= row.output_tokens <= limit for row in out)


def test_a_part_of_a_trace_begins_at_0():
    rows = [TraceRow(float(i), 100 * i, i) for i in range(10)]
    assert scaled(rows, start=4, count=2, time=0.5, length=0.1) == [TraceRow(0.0, 40, 1), TraceRow(0.5, 50, 1)]
    with pytest.raises(WorkloadError, match="start=10 leaves nothing of a trace of 10 rows"):
        scaled(rows, start=10)


def test_statistics_of_known_rows():
    found = statistics([TraceRow(0, 10, 1), TraceRow(1, 20, 2), TraceRow(4, 30, 3)])
    assert (found.count, found.duration, found.rate, found.cv) == (3, 4.0, 0.5, 0.5)
    assert (found.prompt_p50, found.output_max) == (20, 3)
    one = statistics([TraceRow(0, 10, 1)])
    assert (one.rate, one.cv) == (None, None)


def test_the_synthetic_trace_is_what_its_script_makes():
    import importlib.util

    folder = Path(__file__).parents[2] / "assets" / "traces"
    spec = importlib.util.spec_from_file_location("make_synthetic", folder / "make_synthetic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = (folder / "synthetic-chat.csv").read_text().splitlines()[1:]
    assert lines == [",".join(map(str, row)) for row in module.make()]
    assert trace_names() == ["synthetic-chat"]
    assert statistics(replayed(TraceRef(name="synthetic-chat"))).count == 500


@pytest.mark.parametrize("name", ["../secrets", "a/b", "", "A", "x" * 80, ".hidden"])
def test_a_trace_is_named_not_reached_by_a_path(name):
    with pytest.raises(WorkloadError, match="name="):
        TraceRef(name=name)


def test_an_unknown_trace_says_which_there_are():
    with pytest.raises(WorkloadError, match="no trace 'none'; there are synthetic-chat"):
        replayed(TraceRef(name="none"))
