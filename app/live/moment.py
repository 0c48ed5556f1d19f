"""One moment of one lab as a viewer sees it: sections of plain data, encoded once and shared by all who look alike.

Sections: ``head`` (model, state, mode), ``clock`` (steps and cursor), ``pool``, ``batch``, ``timeline`` (figures, with one
sentence that describes each), ``requests``, ``tables``, ``tiles``, ``story``, ``focus`` (the selected request's tokens),
``words`` (definitions), ``failed``.

The sections stand alone: one that can't be made is left out (the browser keeps what it has) and named in ``failed`` with a
short message, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.figures.batch import batch_alt, batch_figure, moment_words, window
from app.figures.palette import Theme
from app.figures.palette import theme as theme_named
from app.figures.pool import FADES, PoolView, Use, columns, pool_alt, pool_figure
from app.figures.pool_groups import per_cell
from app.figures.story import ENDS, WORDS, jumps, reason_words, story
from app.figures.tables import block_tables, extents
from app.figures.tiles import gauges, latency_rows
from app.figures.timeline import choose, timeline_alt, timeline_figure
from app.live.ledger import Ledger, LiveLedger, nothing, past
from engine.core.config import EngineConfig
from engine.core.outputs import EngineStats
from engine.core.trace import Blocked, StepTrace, letter
from engine.observe.log import LogSnapshot, RequestView, TraceLog
from engine.observe.runlog import RunLog, stats_at, trace_at

LOGGER = logging.getLogger(__name__)
Log = TraceLog | RunLog
"""What a look reads: a live lab's mirror, or a saved run."""
JUMP_STEPS = 4000
"""Steps around the cursor in which jumps look for events."""
TAIL = 220
"""Characters of a request's text in the list; all of it is in the focus."""
STORY_STEPS = 400
LISTED = 24
"""Finished requests in the list, newest first to go."""
FOCUS_TOKENS = 1500
NEAR_TIE = 0.01
"""Two candidates whose probabilities differ by less than this are called a near tie."""

_logged: set[tuple[str, type]] = set()
"""What went wrong before: said once in the server's log, not at every refresh."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a viewer looks at a lab: the theme, the selected request, and the chosen step (None: live)."""

    theme: str = "light"
    selected: str | None = None
    step: int | None = None
    root: bool = False
    """Whether the batch is drawn on a square-root scale."""
    queue: bool = False
    """Whether free blocks show their place in the free queue."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything the sections are made from."""

    log: LogSnapshot
    config: EngineConfig
    ledger: Ledger
    steps: Sequence[StepTrace]
    """Steps inside the frame, up to the cursor and beyond."""
    recent: Sequence[StepTrace]
    """Steps of the story."""
    step: StepTrace | None
    """The step at the cursor."""
    frame: tuple[int, int]
    cursor: int | None
    look: Look
    theme: Theme

    numbers: dict[str, int]
    """Arrival number of each request."""

    @property
    def selected(self) -> int | None:
        """Arrival number of the selected request."""
        return self.numbers.get(self.look.selected) if self.look.selected else None


def scene(log: Log, config: EngineConfig, live: LiveLedger, look: Look) -> Scene:
    """Collect what one look at a lab needs."""
    last = log.next_index - 1
    cursor = None if look.step is None or last < 0 else max(log.first_index, min(look.step, last))
    snapshot = log.snapshot(last_steps=1, max_finished=64, upto=cursor)
    last = max(last, snapshot.next_index - 1) if cursor is None else last
    frame = window(last, cursor)
    steps = log.steps(frame[0], frame[1])
    upto = last if cursor is None else cursor
    ledger = _ledger(log, config, live, cursor, snapshot.generation)
    return Scene(
        log=snapshot,
        config=config,
        ledger=ledger,
        steps=steps,
        recent=log.steps(max(0, upto - STORY_STEPS), upto),
        step=log.step(upto) if upto >= 0 else None,
        frame=frame,
        cursor=cursor,
        look=look,
        theme=theme_named(look.theme),
        numbers={view.trace.request_id: view.trace.number for view in snapshot.requests},
    )


def _ledger(log: Log, config: EngineConfig, live: LiveLedger, cursor: int | None, generation: int) -> Ledger:
    """The pool of the chosen moment; an unknown one when its records can't be read."""
    try:
        if cursor is None:
            return live.at_end(log, generation, config.num_kv_blocks)
        return past(log, cursor, config.num_kv_blocks)
    except Exception:
        LOGGER.exception("the pool of step %s can't be rebuilt", cursor)
        return nothing(config.num_kv_blocks, complete=False)


def sections(view: Scene, log: Log) -> dict[str, Any]:
    """All sections of a lab but the head, as plain data."""
    makers: dict[str, Callable[[], Any]] = {
        "clock": lambda: _clock(view, log),
        "pool": lambda: _pool(view),
        "batch": lambda: _batch(view),
        "timeline": lambda: _timeline(view),
        "requests": lambda: _requests(view),
        "tables": lambda: block_tables(
            view.ledger.pool.tables, view.ledger.pool.computed, view.numbers, view.config.block_size, view.ledger.allocated
        ),
        "extents": lambda: _extents(view) if view.config.kv_layout == "contiguous" else None,
        "tiles": lambda: _tiles(view, log),
        "story": lambda: story(view.recent, view.numbers),
        "focus": lambda: _focus(view, log),
        "notices": lambda: [notice.text for notice in view.log.notices][-3:],
    }
    made: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            made[name] = maker()
        except Exception as error:  # one panel's trouble must not take the others away
            level = logging.DEBUG if (name, type(error)) in _logged else logging.ERROR
            LOGGER.log(level, "the section %r can't be made", name, exc_info=True)
            _logged.add((name, type(error)))
            failed[name] = f"This can't be shown at the moment ({type(error).__name__}). The rest goes on."
    return {**made, "words": WORDS, "failed": failed}


def _now(view: Scene) -> int | None:
    """The step that the cursor line marks."""
    return view.cursor if view.cursor is not None else (view.log.next_index - 1 if view.log.next_index else None)


def _clock(view: Scene, log: Log) -> dict[str, Any]:
    return {
        "first": view.log.first_index, "last": view.log.next_index - 1, "cursor": view.cursor,
        "jumps": jumps(_around(log, _now(view))),
    }  # fmt: skip


def _pool(view: Scene) -> dict[str, Any]:
    pool = _pool_view(view)
    return {
        "figure": pool_figure(pool, view.theme, view.selected, queue=view.look.queue),
        "alt": pool_alt(pool),
        "used": len(pool.uses), "cached": len(pool.cached), "total": pool.num_blocks,
        "complete": view.ledger.complete, "columns": columns(pool.num_blocks), "per_cell": per_cell(pool.num_blocks),
    }  # fmt: skip


def _batch(view: Scene) -> dict[str, Any]:
    numbers, steps = view.numbers, view.steps
    budget = view.step.token_budget if view.step is not None and view.step.token_budget else view.config.token_budget
    figure = batch_figure(steps, numbers, budget, view.frame, view.theme, _now(view), view.selected, root=view.look.root)
    return {
        "figure": figure, "alt": batch_alt(steps, numbers, budget), "moment": moment_words(view.step, numbers, budget),
        "top": round(figure["layout"]["yaxis"]["range"][1] ** (2 if view.look.root else 1)),
    }  # fmt: skip


def _timeline(view: Scene) -> dict[str, Any]:
    traces = [v.trace for v in view.log.requests]
    rows = choose(traces, view.steps, selected=view.look.selected)
    return {
        "figure": timeline_figure(view.steps, rows, view.frame, view.theme, _now(view), view.selected),
        "alt": timeline_alt(view.steps, rows),
        "shown": len(rows), "total": len(traces), "ids": [row.request_id for row in rows],
    }  # fmt: skip


def _extents(view: Scene) -> list[dict[str, Any]]:
    pool, config = view.ledger.pool, view.config
    return extents(pool.tables, pool.computed, view.numbers, config.block_size, config.num_kv_blocks)


def _around(log: Log, cursor: int | None) -> list[StepTrace]:
    """The steps in which jumps look for the next event."""
    if cursor is None:
        return log.steps(max(0, log.next_index - JUMP_STEPS))
    return log.steps(max(0, cursor - JUMP_STEPS // 2), cursor + JUMP_STEPS // 2)


def encode(parts: Mapping[str, Any]) -> dict[str, bytes]:
    """Each section as JSON."""
    return {name: msgspec.json.encode(value) for name, value in parts.items()}


def _pool_view(view: Scene) -> PoolView:
    pool, size = view.ledger.pool, view.config.block_size
    uses: dict[int, Sequence[Use]] = {}
    numbers, computed = view.numbers, pool.computed
    for block, held in pool.owners.items():
        found = [
            Use(numbers[request], logical, max(0, min(size, computed.get(request, 0) - logical * size)))
            for request, logical in held
            if request in numbers
        ]
        if len(found) > 1:
            found.sort(key=lambda use: use.number)
        if found:
            uses[block] = found
    return PoolView(
        num_blocks=view.config.num_kv_blocks,
        block_size=size,
        uses=uses,
        cached=pool.cached - pool.owners.keys(),
        allocated=view.ledger.allocated,
        evicted=view.ledger.evicted,
        places={block: place for place, block in enumerate(pool.free)},
        fading=_fading(view),
    )


def _fading(view: Scene) -> dict[int, int]:
    """Blocks evicted in the steps before the chosen one: how many steps ago."""
    if view.step is None:
        return {}
    before = [step for step in view.recent[-FADES - 1 :] if 0 < view.step.index - step.index <= FADES]
    return {
        block: view.step.index - step.index
        for step in before
        for event in (*step.events, *step.events_after)
        if event.op == "evict"
        for block in event.blocks
    }


def _requests(view: Scene) -> list[dict[str, Any]]:
    """Live requests and the newest finished ones as they stood at the cursor, by arrival."""
    rows = [row for v in view.log.requests if (row := _request(view, v)) is not None]
    finished = [row for row in rows if row["state"] == "finished"]
    hidden = {row["id"] for row in finished[:-LISTED]}
    return [row for row in rows if row["id"] not in hidden]


def _request(view: Scene, request: RequestView) -> dict[str, Any] | None:
    trace, step, cursor = request.trace, view.step, view.cursor
    if cursor is not None and step is not None and trace.arrival > step.end:
        return None
    text, count = _text_at(request, cursor)
    state, detail = _state(view, request, count)
    return {
        "id": trace.request_id,
        "number": trace.number,
        "letter": letter(trace.number),
        "state": state,
        "detail": detail,
        "prompt": request.prompt[:160],
        "text": text[-TAIL:],
        "cut": len(text) > TAIL,
        "tokens": count,
        "live": trace.finished < 0 and not request.closed,
        "slow": trace.slow,
    }


def _text_at(request: RequestView, cursor: int | None) -> tuple[str, int]:
    """Output text and token count as of the cursor."""
    if cursor is None:
        return request.text, request.trace.output_tokens
    known = [token for token in request.tokens if token.step <= cursor]
    count = sum(step <= cursor for step in request.trace.token_steps)
    complete = request.closed and count == request.trace.output_tokens and not request.tokens_left_out
    return (request.text if complete else "".join(token.text for token in known)), count


def _state(view: Scene, request: RequestView, count: int) -> tuple[str, str]:
    """(state, words) of a request at the cursor."""
    trace, pool = request.trace, view.ledger.pool
    request_id = trace.request_id
    gone = trace.finished >= 0 and (view.cursor is None or view.step is None or trace.finished <= view.step.end)
    if gone and (view.cursor is None or request_id not in pool.tables):
        reason = ENDS.get(trace.finish_reason or "", "ended")
        return "finished", f"{reason}{': ' + trace.error if trace.error else ''} · {count} tokens"
    running = request_id in view.log.running if view.cursor is None else request_id in pool.tables
    if not running:
        return "waiting", _waiting_words(view, request_id)
    done = pool.computed.get(request_id, 0)
    row = next((r for r in view.step.scheduled if r.request_id == request_id), None) if view.step else None
    if count and (row is None or row.kind != "recompute"):
        return "decode", f"decode · {count} of {trace.max_tokens or '∞'} tokens"
    total = trace.prompt_tokens + (count if row is not None and row.kind == "recompute" else 0)
    word = "recompute" if row is not None and row.kind == "recompute" else "prefill"
    return word, f"{word} · {min(done, total)} of {total} tokens"


def _waiting_words(view: Scene, request_id: str) -> str:
    blocked: Blocked | None = view.step.blocked if view.step is not None else None
    numbers = view.numbers
    if blocked is None:
        return "waits for the next step"
    if blocked.request_id == request_id:
        return f"waits: {reason_words(blocked)}"
    ahead = letter(numbers[blocked.request_id]) if blocked.request_id in numbers else "another request"
    return f"waits behind {ahead}"


def _tiles(view: Scene, log: Log) -> dict[str, Any]:
    traces = log.traces()
    stats: EngineStats = view.log.stats
    now = view.log.now
    if view.cursor is not None and view.step is not None:
        traces = [trace_at(trace, view.step) for trace in traces if trace.queued <= view.step.end]
        stats, now = stats_at(stats, view.step, traces, view.recent), view.step.end
    rows = latency_rows(traces)
    slow = sum(trace.slow for trace in traces[-200:])
    return {"latency": rows, "gauges": gauges(stats, now, view.recent), "slow": slow}


def _focus(view: Scene, log: Log) -> dict[str, Any] | None:
    """The selected request with its tokens: [text, step, index] each."""
    request = log.request(view.look.selected) if view.look.selected else None
    if request is None:
        return None
    tokens = [t for t in request.tokens if view.cursor is None or t.step <= view.cursor][-FOCUS_TOKENS:]
    return {
        "id": request.trace.request_id,
        "number": request.trace.number,
        "letter": letter(request.trace.number),
        "prompt": request.prompt,
        "prompt_tokens": request.trace.prompt_tokens,
        "cached_tokens": request.trace.cached_tokens,
        "cache_note": request.trace.cache_note,
        "preemptions": request.trace.preemptions,
        "tokens": [[t.text, t.step, t.index] for t in tokens],
        "text": request.text if not tokens else "",
        "left_out": request.tokens_left_out,
        "error": request.trace.error,
    }


def token_detail(log: Log, config: EngineConfig, request_id: str, index: int) -> dict[str, Any] | None:
    """One output token: its step, time since the one before, candidates, and the block and slot of its K and V."""
    request = log.request(request_id)
    if request is None:
        return None
    trace = request.trace
    token = next((t for t in request.tokens if t.index == index), None)
    if token is None or index >= len(trace.token_times):
        return None
    position = trace.prompt_tokens + index
    logical, offset = divmod(position, config.block_size)
    block = _block_of(log, config, request_id, logical, token.step)
    return {
        "text": token.text,
        "token_id": token.token_id,
        "index": index,
        "step": token.step,
        "itl_ms": round(1000 * (trace.token_times[index] - trace.token_times[index - 1]), 1) if index else None,
        "ttft_ms": None if index or trace.ttft is None else round(1000 * trace.ttft, 1),
        "top": [[text, round(probability, 4), ident == token.token_id] for ident, text, probability in token.top],
        "near_tie": _near_tie([probability for _, _, probability in token.top]),
        "position": position,
        "logical": logical,
        "offset": offset,
        "block": block,
        "last": index + 1 == trace.output_tokens,
    }


def _near_tie(probabilities: Sequence[float]) -> bool:
    """Whether the two likeliest candidates are so close that another number format or batch could swap them."""
    best = sorted(probabilities, reverse=True)[:2]
    return len(best) == 2 and best[0] - best[1] < NEAR_TIE


def _block_of(log: Log, config: EngineConfig, request_id: str, logical: int, step: int) -> int | None:
    """Physical block of a logical one in the step after ``step``, when the token's K and V are computed."""
    later = log.step(step + 1)
    index = step + 1 if later is not None else step
    table = past(log, index, config.num_kv_blocks).pool.tables.get(request_id, ())
    return table[logical] if logical < len(table) else None
