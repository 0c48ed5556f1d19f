"""Records as files for other programs: requests as CSV, records as JSONL, a timeline for Perfetto.

All writers are iterators of text, so that a long run is written, or sent, piece by piece::

    with open("requests.csv", "w", newline="", encoding="utf-8") as file:
        file.writelines(requests_csv(requests))

Every writer works in every state of a run (no requests, all failed, no time passed); no output ever holds NaN or infinity.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from engine.core.trace import Blocked, DeviceSample, Event, Keyframe, Preemption, RequestTrace, Scheduled, StepTrace, letter
from engine.observe.metrics import latency_values, outcome, parts, step_close

JSONL_FORMAT = "inference-lab.records"
JSONL_VERSION = 1

# CSV ----------------------------------------------------------------------------------------------------------------------

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def safe_cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula: one that starts like a formula gets an apostrophe in front.

    Characters that can't be written as UTF-8 become '?', NUL is dropped.
    """
    text = _clean(text).replace("\0", "")
    return "'" + text if text.startswith(_FORMULA_STARTS) or text.lstrip().startswith(_FORMULA_STARTS) else text


def _moment(value: float) -> float | None:
    return value if value >= 0 else None


_COLUMNS: dict[str, Callable[[RequestTrace, dict[str, float | None]], Any]] = {
    "request_id": lambda r, v: r.request_id,
    "letter": lambda r, v: letter(r.number),
    "parent_id": lambda r, v: r.parent_id,
    "outcome": lambda r, v: outcome(r),
    "finish_reason": lambda r, v: r.finish_reason,
    "stop_reason": lambda r, v: r.stop_reason,
    "error": lambda r, v: r.error,
    "prompt_tokens": lambda r, v: r.prompt_tokens,
    "cached_tokens": lambda r, v: r.cached_tokens,
    "output_tokens": lambda r, v: r.output_tokens,
    "max_tokens": lambda r, v: r.max_tokens,
    "recomputed_tokens": lambda r, v: r.recomputed_tokens,
    "preemptions": lambda r, v: r.preemptions,
    "priority": lambda r, v: r.priority,
    "seed": lambda r, v: r.seed,
    "slow_motion": lambda r, v: "yes" if r.slow else "no",
    "arrival_s": lambda r, v: _moment(r.arrival),
    "tokenised_s": lambda r, v: _moment(r.tokenised),
    "queued_s": lambda r, v: _moment(r.queued),
    "first_scheduled_s": lambda r, v: _moment(r.first_scheduled),
    "first_token_s": lambda r, v: r.token_times[0] if r.token_times else None,
    "last_token_s": lambda r, v: r.token_times[-1] if r.token_times else None,
    "finished_s": lambda r, v: _moment(r.finished),
    "tokenise_time_s": lambda r, v: v["tokenise"],
    "queue_time_s": lambda r, v: v["queue"],
    "prefill_time_s": lambda r, v: v["prefill"],
    "decode_time_s": lambda r, v: v["decode"],
    "ttft_s": lambda r, v: v["ttft"],
    "tpot_s": lambda r, v: v["tpot"],
    "itl_max_s": lambda r, v: max(r.itl, default=None),
    "e2e_latency_s": lambda r, v: v["e2e"],
    "time_to_finish_s": lambda r, v: v["time_to_finish"],
    "user_speed_tokens_per_s": lambda r, v: v["user_tokens_per_second"],
}

CSV_COLUMNS = tuple(_COLUMNS)
"""Names of the columns; times end in their unit. Definitions: ``metrics.DEFINITIONS``."""


def requests_csv(requests: Iterable[RequestTrace]) -> Iterator[str]:
    """One header line and one line a request (RFC 4180, CRLF); a cell without a value is empty, never 0 or NaN."""
    yield _csv_line(CSV_COLUMNS)
    for request in requests:
        values = latency_values(request)
        yield _csv_line([_cell(column(request, values)) for column in _COLUMNS.values()])


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return safe_cell(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ""
    return "" if value is None else value


def _csv_line(cells: Iterable[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer).writerow(cells)
    return buffer.getvalue()


# JSONL --------------------------------------------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="header"):
    """The first line: what the file is, what produced it, and the names of the fields of records written as arrays."""

    format: str = JSONL_FORMAT
    version: int = JSONL_VERSION
    arrays: dict[str, tuple[str, ...]] = {}
    about: dict[str, Any] = {}
    """Model, device, configuration, versions …: whatever the writer knows, as plain data."""


class RequestLine(msgspec.Struct, frozen=True, tag_field="type", tag="request"):
    """One request."""

    request: RequestTrace


class StepLine(msgspec.Struct, frozen=True, tag_field="type", tag="step"):
    """One step."""

    step: StepTrace


_ARRAYS = {t.__name__: t.__struct_fields__ for t in (Scheduled, Blocked, Preemption, Event, Keyframe)}
_LINES = msgspec.json.Decoder(Header | RequestLine | StepLine)
_HEADERS = msgspec.json.Decoder(Header)
_ENCODER = msgspec.json.Encoder()


def records_jsonl(
    requests: Iterable[RequestTrace], steps: Iterable[StepTrace] = (), about: dict[str, Any] | None = None
) -> Iterator[str]:
    """A header line, then a line a request, then a line a step; each line is one JSON object with its ``type``."""
    yield _line(Header(arrays=_ARRAYS, about=about or {}))
    for request in requests:
        yield _line(RequestLine(request))
    for step in steps:
        yield _line(StepLine(step))


def _line(record: Header | RequestLine | StepLine) -> str:
    try:
        return _ENCODER.encode(record).decode() + "\n"
    except UnicodeEncodeError:
        return _json(msgspec.to_builtins(record, str_keys=True)) + "\n"


class RecordsError(ValueError):
    """A file of records that can't be read; the message names the line."""


def read_records(lines: Iterable[str | bytes]) -> Iterator[Header | RequestLine | StepLine]:
    """Read back what ``records_jsonl`` wrote, line by line; empty lines are skipped.

    Raises:
        RecordsError: the file is not one of records, is of a newer version, or a line is damaged.
    """
    started = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _LINES.decode(line) if started else _HEADERS.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            expected = "a record" if started else f"the header of a {JSONL_FORMAT} file"
            raise RecordsError(f"line {number} is not {expected}: {error}") from None
        if isinstance(record, Header):
            _check_header(record, number, started)
            started = True
        yield record
    if not started:
        raise RecordsError(f"the file is empty: the header of a {JSONL_FORMAT} file is missing")


def _check_header(header: Header, number: int, started: bool) -> None:
    if started:
        raise RecordsError(f"line {number} is a second header: the file holds two runs, split it there")
    if header.format != JSONL_FORMAT:
        raise RecordsError(f"line {number} says format {header.format[:40]!r}: only {JSONL_FORMAT!r} can be read")
    if not 1 <= header.version <= JSONL_VERSION:
        raise RecordsError(
            f"line {number} says version {header.version}: this program reads versions 1 to {JSONL_VERSION}; use a newer one"
        )


# Chrome trace format ------------------------------------------------------------------------------------------------------

REQUESTS_PID, ENGINE_PID, GPU_PID = 1, 2, 3
Phase = Literal["X", "i", "C", "M"]


def chrome_trace(
    requests: Iterable[RequestTrace], steps: Iterable[StepTrace] = (), about: dict[str, Any] | None = None
) -> Iterator[str]:
    """A timeline in the Chrome trace format, which Perfetto and chrome://tracing open, as pieces of one JSON document.

    Process "Requests" has a track a request: tokenise, queued, each prefill chunk, each decode step, recompute, preempted,
    and marks for the first token and the end. Process "Engine" has a track of steps with their parts, waits for other
    labs, and counters of KV blocks and of running and waiting requests. Without step records a request's track shows its
    parts only.

    Where a GPU timed the steps there is a process "GPU" with a track of its work and pauses, and counters of what it said
    of itself. Its clock tells how long, not when: work is drawn such that it ends when the step's tokens were known.
    """
    timeline = _Timeline(list(requests))
    yield '{"displayTimeUnit":"ms","otherData":' + _json(about or {}) + ',"traceEvents":[\n'
    separator = ""
    for event in timeline.events(steps):
        yield separator + _json(event)
        separator = ",\n"
    yield "\n]}\n"


def _json(value: Any) -> str:
    """JSON without NaN or infinity: msgspec writes them as null, and what it can't write is made plain first."""
    try:
        return _ENCODER.encode(value).decode()
    except (UnicodeEncodeError, TypeError):
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """``value`` with numbers that JSON can't say replaced by null, and half characters by '?'."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_clean(str(key)): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, int) else _clean(str(value))


class _Track:
    """A request's track while it is written: slices follow each other and never overlap."""

    def __init__(self, number: int, trace: RequestTrace | None) -> None:
        self.number = number
        self.trace = trace
        self.cursor = 0
        """Nanoseconds up to which the track is filled."""
        self.started = False
        self.preempted_at: int | None = None


class _Timeline:
    def __init__(self, requests: list[RequestTrace]) -> None:
        self._tracks = {r.request_id: _Track(i, r) for i, r in enumerate(requests, start=1)}
        self._last = 0
        self._step_cursor = 0
        self._gpu_cursor = 0
        self._gpu_named = False

    def events(self, steps: Iterable[StepTrace]) -> Iterator[dict[str, Any]]:
        yield from _names(REQUESTS_PID, "Requests", 1)
        yield from _names(ENGINE_PID, "Engine", 0)
        yield _event("M", ENGINE_PID, 1, "thread_name", args={"name": "steps"})
        for track in self._tracks.values():
            yield self._track_name(track, letter(track.trace.number) if track.trace else "", track.trace)
        for step in steps:
            yield from self._step(step)
            yield from self._gpu(step)
            for preemption in step.preemptions:
                yield from self._preempted(preemption, _ns(step.start + step.overlap))
            for row in step.scheduled:
                yield from self._row(row, step)
        for track in self._tracks.values():
            if track.trace is not None:
                yield from self._rest(track, track.trace)

    def _track_name(self, track: _Track, name: str, trace: RequestTrace | None) -> dict[str, Any]:
        label = f"{name} {trace.request_id}" if trace else name
        return _event("M", REQUESTS_PID, track.number, "thread_name", args={"name": label})

    def _slice(self, track: _Track, name: str, start: int, end: int, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
        start = max(start, track.cursor)
        end = max(end, start)
        track.cursor = end
        self._last = max(self._last, end)
        yield _event("X", REQUESTS_PID, track.number, name, start, end - start, args)

    def _before(self, track: _Track, until: int) -> Iterator[dict[str, Any]]:
        """Tokenising and queueing, up to ``until``."""
        track.started = True
        if track.trace is None:
            return
        split = parts(track.trace)
        arrival, tokenised = track.trace.arrival, split.tokenised
        if arrival < 0:
            return
        track.cursor = _ns(arrival)
        queued = min(_ns(arrival if tokenised is None else tokenised), until)
        if queued > track.cursor:
            yield from self._slice(track, "tokenise", track.cursor, queued, {})
        if until > track.cursor:
            yield from self._slice(track, "queued", track.cursor, until, {"prompt_tokens": track.trace.prompt_tokens})

    def _until_recorded(self, track: _Track, start: int) -> Iterator[dict[str, Any]]:
        """What came before the first step record of a request, which begins at ``start``."""
        scheduled = track.trace.first_scheduled if track.trace is not None else -1.0
        until = min(_ns(scheduled), start) if scheduled >= 0 else start
        yield from self._before(track, until)
        if until < start:
            yield from self._slice(track, "running, steps not kept", until, start, {})

    def _preempted(self, preemption: Preemption, moment: int) -> Iterator[dict[str, Any]]:
        track = self._tracks.get(preemption.request_id)
        if track is not None:
            track.preempted_at = max(moment, track.cursor)
            args = {"tokens_lost": preemption.tokens_lost, "in_favour_of": preemption.in_favour_of}
            yield _event("i", REQUESTS_PID, track.number, "preempted", track.preempted_at, args=args)

    def _row(self, row: Scheduled, step: StepTrace) -> Iterator[dict[str, Any]]:
        track = self._tracks.get(row.request_id)
        if track is None:
            if row.kind == "padding" and not row.request_id:
                return
            track = self._tracks[row.request_id] = _Track(len(self._tracks) + 1, None)
            yield self._track_name(track, row.request_id, None)
        start, end = _ns(step.start + step.overlap), _ns(max(step.end, step.start))
        if not track.started:
            yield from self._until_recorded(track, start)
        if track.preempted_at is not None:
            yield from self._slice(track, "preempted", track.preempted_at, start, {})
            track.preempted_at = None
        args: dict[str, Any] = {"step": step.index, "tokens": row.num_tokens, "context": row.context}
        if row.cached:
            args["tokens_from_cache"] = row.cached
        if row.recomputed:
            args["tokens_recomputed"] = row.recomputed
        if row.sampled >= 0:
            args["token_id"] = row.sampled
        yield from self._slice(track, row.kind, start, end, args)

    def _rest(self, track: _Track, trace: RequestTrace) -> Iterator[dict[str, Any]]:
        """What no step record told: the wait of a request that never ran, parts where steps are missing, and the marks."""
        split = parts(trace)
        end = _ns(trace.finished) if trace.finished >= 0 else max(self._last, self._step_cursor)
        if not track.started:
            scheduled = split.first_scheduled
            yield from self._before(track, end if scheduled is None else _ns(scheduled))
            if scheduled is not None:
                first = _ns(split.first_token) if split.first_token is not None else end
                yield from self._slice(track, "prefill", _ns(scheduled), first, {"prompt_tokens": trace.prompt_tokens})
            if split.first_token is not None:
                last = _ns(trace.token_times[-1])
                yield from self._slice(track, "decode", _ns(split.first_token), last, {"output_tokens": trace.output_tokens})
        if track.preempted_at is not None:
            yield from self._slice(track, "preempted", track.preempted_at, end, {})
        if trace.token_times:
            yield _event("i", REQUESTS_PID, track.number, "first token", _ns(trace.token_times[0]))
        if trace.finished >= 0:
            args = {"output_tokens": trace.output_tokens, "error": trace.error}
            yield _event("i", REQUESTS_PID, track.number, f"finished: {trace.finish_reason}", _ns(trace.finished), args=args)

    def _step(self, step: StepTrace) -> Iterator[dict[str, Any]]:
        start = max(_ns(step.start), self._step_cursor)
        end = max(_ns(step_close(step)), start)
        if step.wait_time > 0 and (waited := max(_ns(step.start - step.wait_time), self._step_cursor)) < start:
            yield _event("X", ENGINE_PID, 1, "other labs", waited, start - waited)
        if step.scheduled:
            args: dict[str, Any] = {"tokens": step.num_tokens, "token_budget": step.token_budget, "seats": step.seats}
            if step.blocked is not None:
                args["blocked"] = f"{step.blocked.request_id}: {step.blocked.reason}"
            names = ["schedule", "prepare", "forward", "sample", "postprocess"]
            if step.overlap:  # it was scheduled during the step before
                args["scheduled_ahead_s"] = _finite(step.schedule_time)
                names.remove("schedule")
            yield _event("X", ENGINE_PID, 1, f"step {step.index}", start, end - start, args)
            moment = start
            for name in names:
                if name == "postprocess":
                    moment = max(moment, min(_ns(step.end), end))
                until = min(moment + _ns(getattr(step, f"{name}_time")), end)
                if until > moment:
                    yield _event("X", ENGINE_PID, 1, name, moment, until - moment)
                moment = until
            self._step_cursor = end
        yield _event("C", ENGINE_PID, 0, "KV blocks", start, args={"in use": step.kv_used, "cached": step.kv_cached})
        yield _event("C", ENGINE_PID, 0, "running", start, args={"requests": step.num_running})
        yield _event("C", ENGINE_PID, 0, "waiting", start, args={"requests": step.num_waiting})

    def _gpu(self, step: StepTrace) -> Iterator[dict[str, Any]]:
        """The GPU's part of a step, where there is one; the process is named when it first appears."""
        if step.gpu_time <= 0 and step.device is None:
            return
        if not self._gpu_named:
            self._gpu_named = True
            yield from _names(GPU_PID, "GPU", 2)
            yield _event("M", GPU_PID, 1, "thread_name", args={"name": "work"})
        end = max(_ns(step.end), self._gpu_cursor)
        if step.gpu_time > 0:
            start = max(end - _ns(step.gpu_time), self._gpu_cursor)
            paused = max(start - _ns(step.gpu_idle_time), self._gpu_cursor)
            if paused < start:
                yield _event("X", GPU_PID, 1, "idle", paused, start - paused, {"measured_s": _finite(step.gpu_idle_time)})
            measured = {"measured_s": _finite(step.gpu_time), "launch_s": _finite(step.launch_time)}
            yield _event("X", GPU_PID, 1, f"step {step.index}", start, end - start, measured)
            self._gpu_cursor = end
        if step.device is not None:
            for name, unit, value in _gauges(step.device):
                yield _event("C", GPU_PID, 0, name, end, args={unit: value})


def _gauges(sample: DeviceSample) -> Iterator[tuple[str, str, float]]:
    """Counters of what the GPU said of itself: (name, unit, value), as far as it is known."""
    if sample.utilisation is not None and math.isfinite(sample.utilisation):
        yield "GPU utilisation", "%", 100 * sample.utilisation
    if sample.memory_used is not None:
        yield "GPU memory", "bytes in use", sample.memory_used
    if sample.power is not None and math.isfinite(sample.power):
        yield "GPU power", "W", sample.power


def _names(pid: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield _event("M", pid, 0, "process_name", args={"name": name})
    yield _event("M", pid, 0, "process_sort_index", args={"sort_index": order})


def _event(
    phase: Phase, pid: int, tid: int, name: str, moment: int = 0, duration: int = 0, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One event; ``moment`` and ``duration`` in nanoseconds (the format wants microseconds, with a fraction)."""
    event: dict[str, Any] = {"ph": phase, "pid": pid, "tid": tid, "name": name}
    if phase != "M":
        event["ts"] = moment / 1000
    if phase == "X":
        event["dur"] = duration / 1000
    if phase == "i":
        event["s"] = "t"
    if args:
        event["args"] = args
    return event


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that slices that touch do so exactly; 0 for what is no time."""
    return round(seconds * 1e9) if math.isfinite(seconds) and seconds > 0 else 0


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
