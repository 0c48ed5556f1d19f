"""PagedAttention: contiguous reservations of both kinds against blocks; tables in a used pool; sharing and copy-on-write."""

from __future__ import annotations

from typing import Any

from lessons.runs import Experiment, RunRecord, Send, Value

BLOCK = 16
POOL = 32
"""Blocks of the pool in most runs: room for 512 tokens."""
LONGEST = 128
"""``max_model_len`` of the runs that reserve it."""
PROMPT, OUTPUT, MANY = 20, 12, 16
"""Of the many equal requests: prompt tokens, output tokens, how many."""


def _config(**changes: Any) -> dict[str, Any]:
    base = {
        "max_model_len": LONGEST, "max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": BLOCK,
        "num_kv_blocks": POOL, "enable_prefix_caching": False,
    }  # fmt: skip
    return {**base, **changes}


def _steps(requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"arrivals": {"unit": "steps"}, "requests": requests}


def _many() -> dict[str, Any]:
    return _steps([{"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "copies": MANY}])


def reserve_max() -> Experiment:
    """Sixteen short requests, each with room for the longest possible text."""
    return Experiment(config=_config(kv_layout="contiguous", reserve="max_model_len"), workload=_many())


def paged() -> Experiment:
    """The same sixteen, in blocks."""
    return Experiment(config=_config(), workload=_many())


HOLES = {"A": (128, 20), "B": (90, 4), "C": (128, 24), "D": (90, 4), "E": (118, 6)}
"""Prompt and output tokens of requests whose ends leave holes: 10, 6, 10, 6 and 8 blocks."""


def _holes() -> dict[str, Any]:
    return _steps(
        [{"id": name, "prompt_tokens": prompt, "output_tokens": output} for name, (prompt, output) in HOLES.items()]
    )


def holes() -> Experiment:
    """Each request reserves one piece of exactly its own size."""
    return Experiment(config=_config(max_model_len=256, kv_layout="contiguous", reserve="request"), workload=_holes())


def no_holes() -> Experiment:
    """The same requests, in blocks."""
    return Experiment(config=_config(max_model_len=256), workload=_holes())


GUESTS = {1: 13, 2: 4, 3: 5, 4: 13, 5: 3, 6: 13, 7: 6, 8: 13, 9: 2}
"""Block of an earlier request → its output tokens. Those of 9, 5, 2, 3 and 7 end in this order; the others run on."""
ARRIVE = 6
"""The step in which A and B arrive, when the pool has been used."""


def used() -> Experiment:
    """Nine short requests use the pool; five of them end; then A and B come."""
    requests: list[dict[str, Any]] = [
        {"id": f"guest{block}", "prompt_tokens": 4, "output_tokens": output} for block, output in GUESTS.items()
    ]
    requests.append({"id": "A", "at": ARRIVE, "prompt_tokens": 28, "output_tokens": 10})
    requests.append({"id": "B", "at": ARRIVE, "prompt_tokens": 20, "output_tokens": 10})
    letters = {"A": 0, "B": 1, **{f"guest{block}": block + 1 for block in GUESTS}}
    return Experiment(config=_config(num_kv_blocks=10), workload=_steps(requests), letters=letters)


def fork() -> Experiment:
    """One prompt of 20 tokens, two answers."""
    params = {"n": 2, "max_tokens": 8, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    prompt = tuple(range(40, 60))
    return Experiment(config=_config(num_kv_blocks=8), sends=(Send(name="A", prompt=prompt, params=params),))


LAYOUTS = {
    "blocks": {},
    "one piece, longest": {"kv_layout": "contiguous", "reserve": "max_model_len"},
    "one piece, own size": {"kv_layout": "contiguous", "reserve": "request"},
}
SLOTS = BLOCK * POOL


def free(layout: str = "blocks", block_size: str = "16", requests: int = 12) -> Experiment:
    """Up to 24 requests of different lengths in the same memory."""
    size = int(block_size)
    listed = [{"prompt_tokens": 10 + 9 * (index * 5 % 7), "output_tokens": 4 + index * 3 % 8} for index in range(requests)]
    return Experiment(
        config=_config(block_size=size, num_kv_blocks=SLOTS // size, max_num_seqs=24, **LAYOUTS[layout]),
        workload=_steps(listed),
    )


EXPERIMENTS = {
    "reserve_max": reserve_max, "paged": paged, "holes": holes, "no_holes": no_holes, "used": used, "fork": fork,
    "free": free,
}  # fmt: skip


def _peak(run: RunRecord) -> int:
    return max(step.num_running for step in run.work)


def _first(run: RunRecord, name: str) -> int:
    return run.rows(name)[0][0].index


def _last(run: RunRecord, name: str) -> int:
    return run.rows(name)[-1][0].index


def _held(run: RunRecord, step: int) -> int:
    """Token slots of all blocks that requests hold in a step, a shared block once."""
    return len(run.state(step).owners) * run.config.block_size


def _empty_slots(run: RunRecord, step: int) -> int:
    """Held slots without a token in a step; blocks must not be shared."""
    return _held(run, step) - sum(run.state(step).computed.values())


def _wave_end(run: RunRecord) -> int:
    """The last step of the first request."""
    return run.requests[0].trace.token_steps[-1]


def _table(run: RunRecord, name: str, step: int) -> tuple[int, ...]:
    return run.state(step).tables[run.request(name).trace.request_id]


def _words(table: tuple[int, ...]) -> str:
    return " ".join(str(block) for block in table)


def _third_block_step(run: RunRecord) -> int:
    """The step in which A's table gets its third block."""
    return next(step.index for step, _ in run.rows("A") if len(_table(run, "A", step.index)) == 3)


def _empty_of(run: RunRecord, name: str, step: int) -> int:
    state, wanted = run.state(step), run.request(name).trace.request_id
    return len(state.tables[wanted]) * run.config.block_size - state.computed[wanted]


def _most_empty(run: RunRecord) -> int:
    """Most empty slots that any request holds in any step."""
    size = run.config.block_size
    worst = 0
    for step in run.work:
        state = run.state(step.index)
        worst = max([worst, *(len(table) * size - state.computed[r] for r, table in state.tables.items())])
    return worst


def _hole(run: RunRecord) -> int:
    """Largest hole while E waits and B and D are gone."""
    blocked = next(step.blocked for step in run.work if step.index == _last(run, "B") + 2)
    assert blocked is not None
    return blocked.available


def _free_blocks(run: RunRecord, step: int) -> int:
    return len(run.state(step).free)


def _waits(run: RunRecord) -> str:
    """Whether E starts as soon as enough blocks are free in all."""
    return "no" if _first(run, "E") > _last(run, "D") + 1 else "yes"


def _copies(run: RunRecord) -> int:
    return sum(event.op == "cow" for step in run.steps for event in step.events)


def _copy_step(run: RunRecord) -> int:
    return next(step.index for step in run.steps if any(event.op == "cow" for event in step.events))


def _distinct(run: RunRecord, step: int) -> int:
    return len(run.state(step).owners)


def _shared(run: RunRecord, step: int) -> int:
    return sum(len(held) > 1 for held in run.state(step).owners.values())


def _worst_empty(run: RunRecord) -> float:
    """Share of held slots that is empty when most is held, percent."""
    fullest = max(run.work, key=lambda step: _held(run, step.index)).index
    return 100 * _empty_slots(run, fullest) / _held(run, fullest)


VALUES: dict[str, Value] = {
    "together_max": lambda runs: _peak(runs["reserve_max"]),
    "wave_end": lambda runs: _wave_end(runs["reserve_max"]),
    "held_max": lambda runs: _held(runs["reserve_max"], _wave_end(runs["reserve_max"])),
    "empty_max": lambda runs: _empty_slots(runs["reserve_max"], _wave_end(runs["reserve_max"])),
    "steps_max": lambda runs: len(runs["reserve_max"].work),
    "together_paged": lambda runs: _peak(runs["paged"]),
    "steps_paged": lambda runs: len(runs["paged"].work),
    "empty_paged": lambda runs: _empty_slots(runs["paged"], _wave_end(runs["paged"])),
    "held_paged": lambda runs: _held(runs["paged"], _wave_end(runs["paged"])),
    "e_starts": lambda runs: _waits(runs["holes"]),
    "hole_step": lambda runs: _last(runs["holes"], "B") + 2,
    "hole": lambda runs: _hole(runs["holes"]),
    "free_in_holes": lambda runs: _free_blocks(runs["holes"], _last(runs["holes"], "B") + 2),
    "e_first_holes": lambda runs: _first(runs["holes"], "E"),
    "e_first_paged": lambda runs: _first(runs["no_holes"], "E"),
    "e_table_paged": lambda runs: _words(_table(runs["no_holes"], "E", _first(runs["no_holes"], "E"))),
    "before_arrival": lambda runs: _first(runs["used"], "A") - 1,
    "arrival": lambda runs: _first(runs["used"], "A"),
    "queue_front": lambda runs: _words(runs["used"].state(_first(runs["used"], "A") - 1, "after").free),
    "a_first_block": lambda runs: _table(runs["used"], "A", _first(runs["used"], "A"))[0],
    "a_third_block": lambda runs: _table(runs["used"], "A", _third_block_step(runs["used"]))[2],
    "third_step": lambda runs: _third_block_step(runs["used"]),
    "table_a": lambda runs: _words(_table(runs["used"], "A", _last(runs["used"], "A"))),
    "table_b": lambda runs: _words(_table(runs["used"], "B", _last(runs["used"], "B"))),
    "empty_third": lambda runs: _empty_of(runs["used"], "A", _third_block_step(runs["used"])),
    "most_empty": lambda runs: max(_most_empty(runs["used"]), _most_empty(runs["paged"])),
    "copies": lambda runs: _copies(runs["fork"]),
    "copy_step": lambda runs: _copy_step(runs["fork"]),
    "shared_first": lambda runs: _shared(runs["fork"], _copy_step(runs["fork"])),
    "blocks_fork": lambda runs: _distinct(runs["fork"], runs["fork"].work[-1].index),
    "blocks_apart": lambda runs: sum(len(t) for t in runs["fork"].state(runs["fork"].work[-1].index).tables.values()),
    "free_together": lambda runs: _peak(runs["free"]),
    "free_steps": lambda runs: len(runs["free"].work),
    "free_empty": lambda runs: _worst_empty(runs["free"]),
    "free_most": lambda runs: _most_empty(runs["free"]),
}
"""What the runs of this lesson measure."""
