"""Recorded patterns of arrivals and lengths: files of (arrival, prompt tokens, output tokens), read, scaled and described.

Known forms, by their column names (upper or lower case, any order, more columns are ignored):

=================== ================================================ ==============================
Origin              Columns                                          Arrival
=================== ================================================ ==============================
Azure LLM inference TIMESTAMP, ContextTokens, GeneratedTokens        date and time, UTC
BurstGPT            Timestamp, Request tokens, Response tokens       seconds
Mooncake            timestamp, input_length, output_length (JSONL)   milliseconds
this project        arrival, prompt_tokens, output_tokens            seconds
=================== ================================================ ==============================

Arrivals are counted from the earliest one. No prompt is in such a file: prompts are made to the recorded lengths.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.workload.check import WorkloadError, assets, number, whole
from engine.workload.lengths import MAX_TOKENS

MAX_BYTES = 64 * 1024 * 1024
MAX_ROWS = 500_000
MAX_LINE = 100_000
"""Longest line, characters."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?")
_ARRIVAL = {"timestamp": "timestamp", "arrival": "arrival"}
_PROMPT = {"contexttokens": "azure", "request tokens": "burstgpt", "input_length": "mooncake", "prompt_tokens": "own"}
_OUTPUT = {"generatedtokens": "azure", "response tokens": "burstgpt", "output_length": "mooncake", "output_tokens": "own"}


class TraceFileError(ValueError):
    """A trace that can't be read.

    Attributes:
        line: the line, 1 is the first; None where the file as a whole is at fault.
    """

    def __init__(self, file: str, reason: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(f"{file}{f', line {line}' if line else ''}: {reason}")


class TraceRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One recorded request: seconds from the first arrival, and lengths in tokens."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in numbers. Seconds, requests a second, tokens; percentiles by linear interpolation.

    ``cv`` is the coefficient of variation of the gaps between arrivals (population standard deviation over mean): 1 for
    Poisson, more for bursts. None where too few rows leave it undefined.
    """

    count: int
    duration: float
    rate: float | None
    cv: float | None
    prompt_p50: float
    prompt_p90: float
    prompt_max: int
    output_p50: float
    output_p90: float
    output_max: int


class TraceRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace of ``assets/traces`` by name, and how to replay it: see ``scaled``.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    name: str
    start: int = 0
    count: int | None = None
    time: float = 1.0
    length: float = 1.0
    max_prompt_tokens: int = MAX_TOKENS
    max_output_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", self.name):
            raise WorkloadError(
                f"name={self.name!r} must be the name of a trace in assets/traces, without folder and ending"
            )
        _check_scaling(self.start, self.count, self.time, self.length, self.max_prompt_tokens, self.max_output_tokens)


def read_trace(path: Path, max_rows: int = MAX_ROWS) -> list[TraceRow]:
    """Read a trace file (CSV, or JSONL where the name ends in .jsonl or .json).

    Raises:
        TraceFileError: too large, unknown columns, or a wrong value, with its line.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TraceFileError(path.name, f"the file has {size:,} bytes; at most {MAX_BYTES:,} are read. Cut it first")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceFileError(path.name, f"can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceFileError(path.name, f"is no UTF-8 text (byte {error.start})") from None
    return parse_trace(text, path.name, max_rows)


def parse_trace(text: str, name: str, max_rows: int = MAX_ROWS) -> list[TraceRow]:
    """Read a trace from text; ``name`` is what errors call it, and its ending tells JSONL from CSV.

    Rows come back by arrival, counted from the earliest. A row of 0 tokens stays as it is recorded.

    Raises:
        TraceFileError: too large, unknown columns, or a wrong value, with its line.
    """
    if len(text) > MAX_BYTES:
        raise TraceFileError(name, f"the text has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    as_json = name.endswith((".jsonl", ".json")) or text.lstrip()[:1] == "{"
    records = _json_records(text, name) if as_json else _csv_records(text, name)
    rows: list[TraceRow] = []
    columns: tuple[str, str, str] | None = None
    origin = ""
    for line, record in records:
        if columns is None:
            columns, origin = _columns(record, name, line)
        if len(rows) >= max_rows:
            raise TraceFileError(name, f"has more than {max_rows:,} rows: cut the file, or raise max_rows", line)
        rows.append(_row(record, columns, origin, name, line))
    if not rows:
        raise TraceFileError(name, "has no rows" if text.strip() else "is empty")
    rows.sort(key=lambda row: row.arrival)
    first = rows[0].arrival
    return [TraceRow(row.arrival - first, row.prompt_tokens, row.output_tokens) for row in rows]


def _csv_records(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        names = [column.strip().lower() for column in header]
        for cells in reader:
            if not cells or not any(cell.strip() for cell in cells):
                continue
            if len(cells) < len(names):
                reason = f"has {len(cells)} values, but the first line names {len(names)} columns"
                raise TraceFileError(name, reason, reader.line_num)
            yield reader.line_num, dict(zip(names, cells, strict=False))
        if len(names) < 3:
            _columns(dict.fromkeys(names, ""), name, 1)
    except csv.Error as error:
        raise TraceFileError(name, f"no valid CSV: {error}", reader.line_num) from None


def _json_records(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        if len(content) > MAX_LINE:
            raise TraceFileError(name, f"the line has {len(content):,} characters; at most {MAX_LINE:,} are read", line)
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TraceFileError(name, f"no valid JSON: {error}", line) from None
        if not isinstance(record, dict):
            raise TraceFileError(name, "must be an object, one a line", line)
        yield line, {str(key).strip().lower(): value for key, value in record.items()}


def _columns(record: dict[str, Any], name: str, line: int) -> tuple[tuple[str, str, str], str]:
    arrival = next((column for column in record if column in _ARRIVAL), "")
    prompt = next((column for column in record if column in _PROMPT), "")
    output = next((column for column in record if column in _OUTPUT), "")
    if not (arrival and prompt and output):
        missing = [kind for kind, column in (("arrival", arrival), ("prompt", prompt), ("output", output)) if not column]
        raise TraceFileError(
            name,
            f"no column for {' and '.join(missing)}; found {', '.join(list(record)[:10]) or 'none'}. "
            f"The columns must be TIMESTAMP, ContextTokens, GeneratedTokens, or those of another known form",
            1 if line == 2 else line,
        )
    return (arrival, prompt, output), _PROMPT[prompt]


def _row(record: dict[str, Any], columns: tuple[str, str, str], origin: str, name: str, line: int) -> TraceRow:
    try:
        arrival, prompt, output = (record[column] for column in columns)
    except KeyError as error:
        raise TraceFileError(name, f"has no {error.args[0]}", line) from None
    try:
        moment = _moment(arrival) / (1000.0 if origin == "mooncake" else 1.0)
        return TraceRow(moment, _tokens(columns[1], prompt), _tokens(columns[2], output))
    except ValueError as error:
        raise TraceFileError(name, str(error), line) from None


def _moment(value: object) -> float:
    """Seconds, from a number or from date and time (UTC unless it says otherwise), to a microsecond."""
    if isinstance(value, str):
        stamp = _STAMP.fullmatch(value.strip())
        if stamp:
            day, clock, fraction, zone = stamp.groups()
            try:
                moment = datetime.fromisoformat(f"{day}T{clock}{(zone or '').replace('Z', '+00:00')}")
            except ValueError as error:
                raise ValueError(f"arrival {value[:40]!r} is no possible date and time: {error}") from None
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return moment.timestamp() + float(fraction or 0)
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= 1e12:
        raise ValueError(
            f"arrival {str(value)[:40]!r} is neither a number of at least 0 nor a date and time "
            f"such as 2023-11-16 18:17:03.9799600"
        )
    return seconds


def _tokens(column: str, value: object) -> int:
    count: object = value
    if isinstance(value, str):
        count = int(value) if re.fullmatch(r"\s*\d{1,9}\s*", value) else None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_TOKENS:
        raise ValueError(f"{column} {str(value)[:40]!r} must be a whole number from 0 to {MAX_TOKENS:,}")
    return count


def _check_scaling(start: int, count: int | None, time: float, length: float, max_prompt: int, max_output: int) -> None:
    whole("start", start, 0, MAX_ROWS)
    if count is not None:
        whole("count", count, 1, MAX_ROWS)
    number("time", time, 0.0, 1e6, above=True)
    number("length", length, 0.0, 1000.0, above=True)
    whole("max_prompt_tokens", max_prompt, 1, MAX_TOKENS)
    whole("max_output_tokens", max_output, 1, MAX_TOKENS)


def scaled(
    rows: Sequence[TraceRow],
    *,
    start: int = 0,
    count: int | None = None,
    time: float = 1.0,
    length: float = 1.0,
    max_prompt_tokens: int = MAX_TOKENS,
    max_output_tokens: int = MAX_TOKENS,
) -> list[TraceRow]:
    """A part of a trace, stretched and shortened so that a machine can replay it.

    Args:
        rows: by arrival.
        start: the first row taken; it is due at 0.
        count: how many; None: all that follow.
        time: factor of the arrivals; 0.1 makes ten times the rate.
        length: factor of both lengths, rounded, at least 1 token each.
        max_prompt_tokens: longer prompts are cut to this.
        max_output_tokens: longer outputs are cut to this.

    Raises:
        WorkloadError: a factor or limit is out of range, or no row is left.
    """
    _check_scaling(start, count, time, length, max_prompt_tokens, max_output_tokens)
    part = rows[start : None if count is None else start + count]
    if not part:
        raise WorkloadError(f"start={start:,} leaves nothing of a trace of {len(rows):,} rows: begin earlier")
    first = part[0].arrival
    return [
        TraceRow(
            (row.arrival - first) * time,
            min(max(1, round(row.prompt_tokens * length)), max_prompt_tokens),
            min(max(1, round(row.output_tokens * length)), max_output_tokens),
        )
        for row in part
    ]


def statistics(rows: Sequence[TraceRow]) -> TraceStatistics:
    """Describe a trace (at least one row, by arrival)."""
    if not rows:
        raise WorkloadError("the trace has no rows, so it has no statistics")
    arrivals = np.array([row.arrival for row in rows])
    prompts = np.array([row.prompt_tokens for row in rows])
    outputs = np.array([row.output_tokens for row in rows])
    gaps = np.diff(arrivals)
    duration = float(arrivals[-1] - arrivals[0])
    mean = float(gaps.mean()) if gaps.size else 0.0
    return TraceStatistics(
        count=len(rows),
        duration=duration,
        rate=(len(rows) - 1) / duration if duration > 0 else None,
        cv=float(gaps.std()) / mean if mean > 0 and gaps.size > 1 else None,
        prompt_p50=float(np.percentile(prompts, 50)),
        prompt_p90=float(np.percentile(prompts, 90)),
        prompt_max=int(prompts.max()),
        output_p50=float(np.percentile(outputs, 50)),
        output_p90=float(np.percentile(outputs, 90)),
        output_max=int(outputs.max()),
    )


def to_csv(rows: Iterable[TraceRow]) -> str:
    """A trace as CSV in this project's columns; ``parse_trace`` reads it back unchanged."""
    lines = [f"{row.arrival!r},{row.prompt_tokens},{row.output_tokens}" for row in rows]
    return "\n".join(["arrival,prompt_tokens,output_tokens", *lines]) + "\n"


def trace_names() -> list[str]:
    """The traces that come with the project."""
    return sorted(path.stem for path in assets("traces").glob("*.csv"))


@lru_cache(maxsize=4)
def _shipped(name: str) -> tuple[TraceRow, ...]:
    path = assets("traces") / f"{name}.csv"
    if not path.is_file():
        raise WorkloadError(f"there is no trace {name!r}; there are {', '.join(trace_names()) or 'none'}")
    return tuple(read_trace(path))


def replayed(ref: TraceRef) -> list[TraceRow]:
    """The rows that a reference stands for.

    Raises:
        WorkloadError: no such trace, or nothing left of it.
    """
    return scaled(
        _shipped(ref.name),
        start=ref.start,
        count=ref.count,
        time=ref.time,
        length=ref.length,
        max_prompt_tokens=ref.max_prompt_tokens,
        max_output_tokens=ref.max_output_tokens,
    )
