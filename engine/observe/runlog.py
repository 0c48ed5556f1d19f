"""A saved run, or the older part of a live one, read like the log of a live lab."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.config import EngineConfig
from engine.core.outputs import ClosedRequest, EngineStats, OpenedRequest
from engine.core.trace import RequestTrace, StepTrace
from engine.observe.log import LogSnapshot, RequestView, present_at
from engine.observe.runfile import RunReader


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A saved run's settings, in the place of a live lab's."""

    config: EngineConfig
    model: dict[str, Any]
    title: str


class RunLog:
    """Reads a run file through the methods of ``engine.observe.log.TraceLog`` that pages use.

    Requests are read at once (a run of 100,000 steps takes well under a second), steps and tokens when they are looked at.

    Raises:
        RunFileError: the file is damaged where it was read.
    """

    version = 1
    generation = 1
    num_live = 0
    steps_let_go = 0
    finished_let_go = 0

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        header = reader.header
        self.info = RunFacts(config=header.engine_config(), model=header.model, title=header.title)
        closed: dict[str, ClosedRequest] = {event.trace.request_id: event for event in reader.closed()}
        self._opened: dict[str, OpenedRequest] = {event.trace.request_id: event for event in reader.opened()}
        self._closed = closed
        self._order = sorted(self._opened.values(), key=lambda event: event.trace.number)
        last = self.step(self.next_index - 1) if self.next_index else None
        self.now = last.end if last else 0.0
        self.stats = _stats(last, closed.values(), self.info.config)

    @property
    def first_index(self) -> int:
        """Index of the oldest recorded step."""
        return self.reader.first_index

    @property
    def next_index(self) -> int:
        """Index after the newest recorded step."""
        return self.reader.next_index

    def steps(self, first: int = 0, last: int | None = None) -> list[StepTrace]:
        """The recorded steps with ``first <= index <= last``, oldest first."""
        return self.reader.steps(first, last)

    def step(self, index: int) -> StepTrace | None:
        """The step of this index, or None when it was not recorded."""
        found = self.reader.steps(index, index) if index >= 0 else []
        return found[0] if found else None

    def request(self, request_id: str) -> RequestView | None:
        """One request with its tokens, or None."""
        opened = self._opened.get(request_id)
        return self._view(opened, with_tokens=True) if opened else None

    def traces(self, *, live: bool = True) -> list[RequestTrace]:
        """Request traces in order of arrival; of a request whose end was not recorded, its beginning (if ``live``)."""
        found = []
        for opened in self._order:
            closed = self._closed.get(opened.trace.request_id)
            if closed or live:
                found.append(closed.trace if closed else opened.trace)
        return found

    def snapshot(self, last_steps: int = 64, max_finished: int = 64, upto: int | None = None) -> LogSnapshot:
        """The run as it stood at step ``upto`` (default: its end)."""
        last = self.next_index - 1 if upto is None else min(upto, self.next_index - 1)
        steps = self.steps(max(self.first_index, last - last_steps + 1), last) if last_steps > 0 and last >= 0 else []
        until = steps[-1].end if steps else self.now
        chosen = set(present_at({name: event.trace for name, event in self._closed.items()}, until, max_finished))
        never_closed = {
            name for name, event in self._opened.items() if name not in self._closed and event.trace.queued <= until
        }
        shown = [event for event in self._order if event.trace.request_id in chosen | never_closed]
        views = [self._view(event, with_tokens=True) for event in shown]
        return LogSnapshot(
            version=1,
            generation=1,
            info=self.info,
            stats=self.stats,
            now=until,
            first_index=self.first_index,
            next_index=self.next_index,
            steps=tuple(steps),
            requests=tuple(views),
            waiting=(),
            running=(),
            notices=(),
        )

    def _view(self, opened: OpenedRequest, *, with_tokens: bool) -> RequestView:
        closed = self._closed.get(opened.trace.request_id)
        trace = closed.trace if closed else opened.trace
        tokens: Sequence[Any] = ()
        if with_tokens and trace.token_steps:
            tokens = self.reader.tokens_of(trace.request_id, trace.token_steps[0], trace.token_steps[-1])
        return RequestView(
            trace=trace,
            prompt=opened.prompt,
            prompt_token_ids=opened.prompt_token_ids,
            text=closed.text if closed else "",
            tokens=tuple(tokens),
            tokens_left_out=max(0, len(trace.token_times) - len(tokens)),
            closed=closed is not None,
        )


def trace_at(trace: RequestTrace, step: StepTrace) -> RequestTrace:
    """A request's trace as it stood after ``step``: later tokens and its end are cut off."""
    known = bisect_right(trace.token_steps, step.index)
    ended = 0 <= trace.finished <= step.end
    if known == len(trace.token_steps) and (ended or trace.finished < 0):
        return trace
    return msgspec.structs.replace(
        trace,
        token_times=trace.token_times[:known],
        token_steps=trace.token_steps[:known],
        first_scheduled=trace.first_scheduled if 0 <= trace.first_scheduled <= step.end else -1.0,
        finished=trace.finished if ended else -1.0,
        finish_reason=trace.finish_reason if ended else None,
        stop_reason=trace.stop_reason if ended else None,
        error=trace.error if ended else "",
    )


def view_at(view: RequestView, step: StepTrace) -> RequestView:
    """A request as it stood after ``step``: later tokens, text and its end are cut off."""
    cut = trace_at(view.trace, step)
    if cut is view.trace:
        return view
    ended = cut.finished >= 0
    tokens = tuple(token for token in view.tokens if token.step <= step.index)
    text = view.text if ended else "".join(token.text for token in tokens)
    return msgspec.structs.replace(view, trace=cut, tokens=tokens, text=text, closed=ended)


def stats_at(
    stats: EngineStats, step: StepTrace, traces: Sequence[RequestTrace], recent: Sequence[StepTrace] = ()
) -> EngineStats:
    """Gauges as they stood after ``step``; counters from ``traces``, the requests as they stood then (``trace_at``).

    Preemptions of requests that had not ended are counted in ``recent``, the steps up to ``step``.
    """
    ended = {trace.request_id: trace.preemptions for trace in traces if trace.finished >= 0}
    under_way = sum(p.request_id not in ended for one in recent for p in one.preemptions)
    reasons = [trace.finish_reason for trace in traces]
    cached, asked = sum(t.cached_tokens for t in traces), sum(t.prompt_tokens for t in traces if t.first_scheduled >= 0)
    return msgspec.structs.replace(
        stats,
        steps=step.index + 1,
        running=step.num_running,
        waiting=step.num_waiting,
        finished=sum(reason in ("stop", "length") for reason in reasons),
        aborted=reasons.count("abort"),
        failed=reasons.count("error"),
        preemptions=sum(ended.values()) + under_way,
        blocks_referenced=step.kv_used,
        blocks_cached=step.kv_cached,
        blocks_free=stats.blocks_total - step.kv_used - step.kv_cached,
        tokens_cached=cached if stats.prefix_queries else 0,
        prefix_queries=asked if stats.prefix_queries else 0,
        tokens_generated=sum(trace.output_tokens for trace in traces),
    )


def _stats(last: StepTrace | None, closed: Any, config: EngineConfig) -> EngineStats:
    reasons = [event.trace.finish_reason for event in closed]
    used, cached = (last.kv_used, last.kv_cached) if last else (0, 0)
    asked = sum(event.trace.prompt_tokens for event in closed if not event.trace.parent_id) if config.prefix_caching else 0
    return EngineStats(
        steps=last.index + 1 if last else 0,
        running=last.num_running if last else 0,
        waiting=last.num_waiting if last else 0,
        finished=sum(reason in ("stop", "length") for reason in reasons),
        aborted=reasons.count("abort"),
        failed=reasons.count("error"),
        preemptions=sum(event.trace.preemptions for event in closed),
        blocks_total=config.num_kv_blocks,
        blocks_referenced=used,
        blocks_cached=cached,
        blocks_free=config.num_kv_blocks - used - cached,
        tokens_generated=sum(event.trace.output_tokens for event in closed),
        prefix_queries=asked,
        tokens_cached=sum(event.trace.cached_tokens for event in closed) if asked else 0,
    )
