"""Draws a lesson's pictures from the records of a run, at the step being spoken of."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.figures.batch import batch_alt, batch_figure
from app.figures.lesson_bars import per_step_alt, per_step_figure, sizes_alt, sizes_figure
from app.figures.lesson_schedule import schedule_alt, schedule_figure
from app.figures.palette import Theme
from app.figures.pool import PoolView, Use, pool_alt, pool_figure
from app.figures.request_life import request_life_alt, request_life_figure
from app.figures.timeline import timeline_alt, timeline_figure
from engine.core.trace import letter
from lessons.runs import RunRecord, Runs


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: a Plotly figure or a piece of HTML, its title, and what it says in words."""

    kind: str
    title: str
    alt: str
    figure: dict[str, Any] = field(default_factory=dict)
    markup: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to draw. ``runs``: all of the lesson's; ``run``: the one spoken of; ``step`` None: no cursor."""

    runs: Runs
    run: str
    step: int | None
    request: str
    theme: Theme
    sizes: Mapping[str, Mapping[str, float]]
    """Experiment → named sizes, for ``sizes`` pictures."""
    pairs: Mapping[str, Mapping[str, str]]
    """Experiment → line name → experiment, for pictures that compare runs."""

    @property
    def record(self) -> RunRecord:
        """The run spoken of."""
        return self.runs[self.run]


def draw(kind: str, wanted: Wanted) -> Picture:
    """The picture of that kind.

    Raises:
        KeyError: the run it needs is missing.
    """
    return DRAWN[kind](wanted)


def _frame(record: RunRecord) -> tuple[int, int]:
    last = max((step.index for step in record.work), default=0)
    return 0, max(last, 5)


def _cursor(wanted: Wanted) -> int:
    """The step shown; the last one where none is named."""
    last = max((step.index for step in wanted.record.work), default=0)
    return last if wanted.step is None else min(wanted.step, last)


def _schedule(wanted: Wanted) -> Picture:
    record = wanted.record
    seats = record.config.max_num_seqs
    figure = schedule_figure(record.steps, record.numbers, seats, wanted.theme, wanted.step)
    return Picture("schedule", "Seats", schedule_alt(record.steps, record.numbers, seats, wanted.step), figure)


def _batch(wanted: Wanted) -> Picture:
    record = wanted.record
    upto = [step for step in record.work if step.index <= _cursor(wanted)]
    figure = batch_figure(record.work, record.numbers, record.config.token_budget, _frame(record), wanted.theme, wanted.step)
    figure["layout"] |= {"height": 230, "margin": {"l": 62, "r": 10, "t": 8, "b": 36}}
    _few_ticks(figure, record)
    return Picture(
        "batch", "Tokens computed in each step", batch_alt(upto, record.numbers, record.config.token_budget), figure
    )


def _timeline(wanted: Wanted) -> Picture:
    record = wanted.record
    traces = record.traces
    traces.sort(key=lambda trace: trace.number)
    rows = len(traces)
    figure = timeline_figure(record.work, traces, _frame(record), wanted.theme, wanted.step, rows=rows)
    figure["layout"] |= {"height": 26 * rows + 60, "margin": {"l": 62, "r": 10, "t": 6, "b": 36}}
    _few_ticks(figure, record)
    return Picture("timeline", "Life of each request", timeline_alt(record.work, traces), figure)


def _few_ticks(figure: dict[str, Any], record: RunRecord) -> None:
    if _frame(record)[1] < 16:
        figure["layout"]["xaxis"]["dtick"] = 1


def pool_view(record: RunRecord, step: int) -> PoolView:
    """The pool during a step, as ``app.figures.pool`` draws it."""
    state = record.state(step)
    numbers, size = record.numbers, record.config.block_size
    uses: dict[int, list[Use]] = {}
    for block, held in state.owners.items():
        uses[block] = sorted(
            (
                Use(numbers[request], logical, max(0, min(size, state.computed.get(request, 0) - logical * size)))
                for request, logical in held
                if request in numbers
            ),
            key=lambda use: use.number,
        )
    found = next(s for s in record.steps if s.index == step)
    taken = {block for event in found.events if event.op == "alloc" for block in event.blocks}
    taken |= {event.blocks[1] for event in found.events if event.op == "cow"}
    return PoolView(
        num_blocks=record.config.num_kv_blocks,
        block_size=size,
        uses={block: held for block, held in uses.items() if held},
        cached=state.cached - state.owners.keys(),
        allocated=frozenset(taken),
        places={block: place for place, block in enumerate(state.free)},
    )


def _pool(wanted: Wanted) -> Picture:
    step = _cursor(wanted)
    view = pool_view(wanted.record, step)
    figure = pool_figure(view, wanted.theme)
    figure["layout"]["height"] = 60 if view.num_blocks <= 10 else 210
    return Picture("pool", f"Block pool in step {step}", pool_alt(view), figure)


def _tables(wanted: Wanted) -> Picture:
    """Block tables and the free queue, as a table that a screen reader reads too."""
    record, step = wanted.record, _cursor(wanted)
    state = record.state(step)
    numbers = record.numbers
    size = record.config.block_size
    rows = []
    words = []
    for request in sorted((r for r in state.tables if r in numbers), key=lambda r: numbers[r]):
        table, done = state.tables[request], state.computed.get(request, 0)
        name = letter(numbers[request])
        blocks = " ".join(str(block) for block in table) or "none"
        slots = len(table) * size
        rows.append(
            f"<tr><th scope='row' style='color:{wanted.theme.hue(numbers[request])}'>{html.escape(name)}</th>"
            f"<td>{' '.join(str(i) for i in range(len(table)))}</td><td><b>{blocks}</b></td>"
            f"<td>{done}</td><td>{slots - done}</td></tr>"
        )
        words.append(f"{name} → {blocks}")
    free = " ".join(str(block) for block in state.free[:16]) + (" …" if len(state.free) > 16 else "")
    markup = (
        "<div class='lesson-tables'><table><thead><tr><th scope='col'>request</th><th scope='col'>logical</th>"
        "<th scope='col'>physical</th><th scope='col'>tokens</th><th scope='col'>empty slots</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><p>Free blocks, next to be taken first: <b>{free or 'none'}</b></p></div>"
    )
    return Picture(
        "tables", f"Block tables in step {step}", f"Block tables: {'; '.join(words)}. Free: {free}.", markup=markup
    )


def _life(wanted: Wanted) -> Picture:
    record = wanted.record
    request = record.request(wanted.request) if wanted.request else record.requests[-1]
    trace = next(t for t in record.traces if t.request_id == request.trace.request_id)
    return Picture(
        "life", f"Request {request.letter} on a time axis", request_life_alt(trace), request_life_figure(trace, wanted.theme)
    )


def _tokens(wanted: Wanted) -> Picture:
    """The answer, token by token, with the step that made each."""
    record, step = wanted.record, wanted.step
    request = record.request(wanted.request) if wanted.request else record.requests[-1]
    steps = request.trace.token_steps
    texts = {token.index: token.text for token in request.tokens}
    cells = []
    for index, made in enumerate(steps):
        if step is not None and made > step:
            break
        text = texts.get(index, "")
        shown = html.escape(text.replace("\n", "⏎").replace(" ", "␣")) or "…"
        mark = " class='now'" if made == step else ""
        cells.append(f"<li{mark}><span>{shown}</span><small>step {made}</small></li>")
    prompt = html.escape(request.prompt[:200])
    ids = " ".join(str(token) for token in request.prompt_token_ids[:24])
    more = " …" if len(request.prompt_token_ids) > 24 else ""
    markup = (
        f"<div class='lesson-tokens'><p><b>Prompt</b> {prompt}</p>"
        f"<p><b>{len(request.prompt_token_ids)} token ids</b> {ids}{more}</p><p><b>Answer so far</b></p>"
        f"<ol>{''.join(cells) or '<li><span>nothing yet</span></li>'}</ol></div>"
    )
    return Picture("tokens", "Prompt and answer as tokens", f"{len(cells)} tokens of the answer.", markup=markup)


def _lines(wanted: Wanted, what: str, kind: str, title: str) -> Picture:
    pairs = wanted.pairs.get(wanted.run, {wanted.run: wanted.run})
    runs = {name: wanted.runs[experiment].steps for name, experiment in pairs.items() if experiment in wanted.runs}
    return Picture(kind, title, per_step_alt(runs, what), per_step_figure(runs, what, wanted.theme, wanted.step))


def _sizes(wanted: Wanted) -> Picture:
    parts = wanted.sizes[wanted.run]
    return Picture("sizes", "From the formula to the engine's bytes", sizes_alt(parts, "bytes"),
                   sizes_figure(parts, wanted.theme, "bytes"))  # fmt: skip


DRAWN: dict[str, Callable[[Wanted], Picture]] = {
    "schedule": _schedule,
    "batch": _batch,
    "timeline": _timeline,
    "pool": _pool,
    "tables": _tables,
    "life": _life,
    "tokens": _tokens,
    "compute": lambda wanted: _lines(wanted, "tokens", "compute", "Tokens computed in each step"),
    "seconds": lambda wanted: _lines(wanted, "ms", "seconds", "Time of each step"),
    "sizes": _sizes,
}
"""Kind → what draws it; ``lessons.model.PICTURES`` names the same kinds."""
