"""The pictures: valid Plotly figures of fixed size that say exactly what the trace says."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import pytest

from app.figures.batch import KINDS, MOST_LEVELS, NOTE_WIDTH, batch_figure, heights, kind_sums, parts, scale, window
from app.figures.palette import DARK, LIGHT
from app.figures.pool import PoolView, Use, columns, pool_alt, pool_figure
from app.figures.pool_groups import MOST_CELLS, Groups, per_cell
from app.figures.story import story
from app.figures.template import root_ticks
from app.figures.tiles import throughput
from app.figures.timeline import THROWN_AWAY, choose, timeline_figure
from app.live import moment
from app.live.ledger import LiveLedger
from app.live.moment import Look, encode, scene, sections, token_detail
from engine.core.sampling_params import SamplingParams
from engine.core.trace import Scheduled, StepTrace
from tests.app.kit import Recorded


def drawn(recorded: Recorded, **look: Any) -> dict[str, Any]:
    """The sections as the browser gets them."""
    view = scene(recorded.log, recorded.config, LiveLedger(), Look(**look))
    return {name: json.loads(value) for name, value in encode(sections(view, recorded.log)).items()}


def check(figure: dict[str, Any]) -> None:
    """Plotly's own validation: raises on a property that does not exist or a value out of range."""
    go.Figure(data=figure["data"], layout=figure["layout"])


def bars(figure: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars of the batch picture, without the strip of those who wait."""
    return [t for t in figure["data"] if t["type"] == "bar"]


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in figure["data"] if t.get("name") == name)


@pytest.fixture
def busy() -> Recorded:
    recorded = Recorded(max_num_batched_tokens=16, block_size=4)
    for prompt in (20, 5, 6):
        recorded.add(prompt, max_tokens=6)
    recorded.steps(3)
    return recorded


@pytest.mark.parametrize(
    "look", [{}, {"theme": "dark"}, {"step": 1}, {"root": True}, {"step": 0, "theme": "dark", "root": True}]
)
def test_every_picture_is_a_valid_figure(busy: Recorded, look: dict[str, Any]):
    found = drawn(busy, **look)
    for name in ("pool", "batch", "timeline"):
        check(found[name]["figure"])
        assert found[name]["alt"].endswith(".")


def test_an_engine_that_did_nothing_gives_empty_frames():
    found = drawn(Recorded())
    for name in ("pool", "batch", "timeline"):
        check(found[name]["figure"])
    assert found["clock"] == {
        "first": 0,
        "last": -1,
        "cursor": None,
        "jumps": {"preempt": [], "admit": [], "finish": [], "evict": []},
    }
    assert found["pool"]["used"] == 0
    assert found["requests"] == found["tables"] == found["story"] == []
    assert [row["p50"] for row in found["tiles"]["latency"]] == [None] * 4
    assert found["focus"] is None


def test_bars_hold_exactly_the_tokens_of_each_step(busy: Recorded):
    figure = drawn(busy)["batch"]["figure"]
    tokens: dict[int, int] = {}
    for level in bars(figure):
        for x, y, data in zip(level["x"], level["y"], level["customdata"], strict=True):
            assert y == data[3]
            if data[1] != "cached":
                tokens[x] = tokens.get(x, 0) + y
    assert tokens == {step.index: step.num_tokens for step in busy.log.steps()}
    assert tokens[0] == 16, "the budget is used up by A's first chunk"


def test_prefill_and_decode_differ_by_more_than_colour(busy: Recorded):
    figure = drawn(busy)["batch"]["figure"]
    looks = {}
    for level in bars(figure):
        for data, fill, edge in zip(
            level["customdata"], level["marker"]["color"], level["marker"]["line"]["color"], strict=True
        ):
            looks.setdefault(data[1], set()).add(fill == edge)
    assert looks["prefill"] == {True}
    assert looks["decode"] == {False}


def test_a_preempted_request_is_hatched_when_computed_again():
    recorded = Recorded(num_kv_blocks=6, block_size=4, max_num_batched_tokens=32, max_model_len=24)
    recorded.add(8, max_tokens=12)
    recorded.add(8, max_tokens=12)
    recorded.steps(26)
    found = drawn(recorded, step=next(s.index for s in recorded.log.steps() for r in s.scheduled if r.recomputed))
    shapes = [
        (data[1], level["marker"].get("pattern", {"shape": [""] * len(level["x"])})["shape"][i])
        for level in bars(found["batch"]["figure"])
        for i, data in enumerate(level["customdata"])
    ]
    assert ("recompute", "/") in shapes
    assert trace(found["timeline"]["figure"], "preempt")["x"]
    assert any(entry["kind"] == "preempt" and "will be computed again" in entry["text"] for entry in found["story"])


def test_cached_tokens_stand_on_top_dotted_and_outside_the_budget():
    recorded = Recorded(block_size=4)
    prompt = list(range(1, 14))
    recorded.add(prompt, max_tokens=2)
    recorded.steps(3)
    recorded.add(prompt, max_tokens=2)
    recorded.steps(2)
    bar = parts(next(s for s in recorded.log.steps() for r in s.scheduled if r.cached), {})
    assert [(p.kind, p.tokens) for p in bar] == [("prefill", 1), ("cached", 12)]
    found = drawn(recorded)
    last = bars(found["batch"]["figure"])[-1]
    assert last["marker"]["pattern"]["shape"][-1] == "."


def test_padding_is_a_grey_cross_hatch():
    recorded = Recorded(batching="static", max_num_seqs=2, max_model_len=64)
    recorded.add(9, max_tokens=4)
    recorded.add(3, max_tokens=2)
    recorded.steps(3)
    found = drawn(recorded)
    check(found["batch"]["figure"])
    kinds = [data[1] for level in bars(found["batch"]["figure"]) for data in level["customdata"]]
    assert "padding" in kinds
    told = [entry for entry in found["story"] if entry["kind"] == "padding"]
    assert [entry["step"] for entry in told] == [2, 0], "told when it begins: the short prompt, then the row that is done"
    assert told[0]["definition"].startswith("Padding:")


def test_the_budget_line_shows_when_it_fits_and_is_announced_when_not(busy: Recorded):
    layout = drawn(busy)["batch"]["figure"]["layout"]
    assert [s["y0"] for s in layout["shapes"] if s.get("name") == "budget"] == [16]
    small = Recorded(max_num_batched_tokens=256)
    small.add(3)
    small.steps(2)
    layout = drawn(small)["batch"]["figure"]["layout"]
    assert not any(s.get("name") == "budget" for s in layout["shapes"])
    assert "scale 0–8 tokens; the budget, 256, is above" in [note["text"] for note in layout["annotations"]]


def test_a_square_root_axis_stacks_to_the_root_of_the_sum():
    assert heights([9, 7], root=True) == pytest.approx([3, 1])
    assert heights([9, 7], root=False) == [9, 7]
    assert heights([], root=True) == []


@pytest.mark.parametrize(
    ("peak", "budget", "top"), [(0, 256, 8), (8, 256, 8), (9, 256, 16), (200, 256, 276), (300, 256, 300), (5, 6, 6)]
)
def test_the_scale_moves_in_few_announced_steps(peak: int, budget: int, top: int):
    assert scale(peak, budget) == top


def test_the_window_stands_still_while_stepping():
    assert window(-1) == (0, 39)
    assert {window(last) for last in range(40)} == {(0, 39)}
    assert {window(last) for last in range(40, 50)} == {(10, 49)}
    assert window(1000, cursor=7) == (0, 39)


def test_many_requests_a_step_are_drawn_by_kind():
    rows = tuple(Scheduled(f"r{i}", "decode", 1, 10) for i in range(MOST_LEVELS + 1))
    step = StepTrace(index=0, start=0.0, scheduled=(*rows, Scheduled("p", "prefill", 30, 0)), token_budget=64)
    figure = batch_figure([step], {}, 64, (0, 39), LIGHT)
    check(figure)
    assert {t["name"]: t["y"] for t in bars(figure)} == {"prefill": [30], "decode": [MOST_LEVELS + 1]}
    check(batch_figure([step], {}, 64, (0, 39), DARK, root=True))


def test_the_pool_shows_owner_fill_sharing_and_state():
    view = PoolView(
        num_blocks=20,
        block_size=4,
        uses={1: [Use(0, 0, 4), Use(1, 0, 4)], 2: [Use(0, 1, 1)]},
        cached=frozenset({5}),
        allocated=frozenset({2}),
        evicted=frozenset({2}),
        places={5: 3},
    )
    figure = pool_figure(view, LIGHT)
    check(figure)
    grid, wide = trace(figure, "blocks"), columns(20)
    flat = [cell for row in grid["z"] for cell in row]
    assert flat[:6] == [2, 2, 0, 0, 1, 0], "two blocks of A, two free, one cached, one free"
    assert flat[20:] == [None] * (len(flat) - 20)
    hover = [text for row in grid["hovertext"] for text in row]
    assert "shared by 2" in hover[0]
    assert "1 of 4 tokens" in hover[1]
    assert "place 4 in the free queue" in hover[4]
    assert {shape["name"] for shape in figure["layout"]["shapes"]} == {"cached", "shared", "allocated", "evicted"}
    assert trace(figure, "letters")["text"] == ["A×2", "A"]
    assert len(trace(figure, "unfilled")["x"]) == 6, "one rectangle"
    assert wide == 8
    assert "2 of 20 blocks in use by A, B" in pool_alt(view)


def test_a_selection_steps_the_others_back():
    view = PoolView(num_blocks=4, block_size=4, uses={1: [Use(0, 0, 4)], 2: [Use(1, 0, 4)]})
    flat = [cell for row in trace(pool_figure(view, LIGHT, selected=1), "blocks")["z"] for cell in row]
    assert flat[:2] == [10, 3]


@pytest.mark.parametrize("blocks", [1, 7, 128, 512, 2048, 6000])
def test_pools_of_any_size_keep_their_frame(blocks: int):
    view = PoolView(num_blocks=blocks, block_size=16, uses={b: [Use(b % 9, 0, 16)] for b in range(1, blocks + 1)})
    figure = pool_figure(view, DARK)
    check(figure)
    assert sum(cell is not None for row in trace(figure, "blocks")["z"] for cell in row) == blocks
    letters = [t for t in figure["data"] if t["name"] == "letters"]
    assert bool(letters) == (blocks <= 1024)
    assert all(len(t["x"]) <= 300 for t in letters)
    assert len(figure["layout"]["shapes"]) <= 8


@pytest.mark.parametrize("blocks", [128, 2048, 20_000])
def test_what_is_not_filled_yet_is_drawn_in_pools_of_any_size(blocks: int):
    view = PoolView(num_blocks=blocks, block_size=16, uses={3: [Use(0, 0, 4)], 50: [Use(1, 0, 15)], 51: [Use(1, 1, 16)]})
    figure = pool_figure(view, LIGHT)
    check(figure)
    traces = [len(t["x"]) // 6 for t in figure["data"] if t["name"] == "unfilled"]
    shapes = [s["path"].count("M") for s in figure["layout"]["shapes"] if s["name"] == "unfilled"]
    assert sum(traces) + sum(shapes) == (2 if blocks < 8000 else len({3 // 10, 50 // 10}))
    full = pool_figure(PoolView(num_blocks=blocks, block_size=16), LIGHT)
    assert not [t for t in full["data"] if t["name"] == "unfilled"], "an empty pool has nothing half full"


def test_pictures_stay_small(busy: Recorded):
    found = drawn(busy)
    assert len(json.dumps(found["batch"])) < 40_000
    assert len(json.dumps(found["timeline"])) < 40_000


def test_a_timeline_shows_those_at_work_before_those_that_wait():
    recorded = Recorded(max_num_seqs=4, num_kv_blocks=64)
    ids = [recorded.add(4, max_tokens=40) for _ in range(40)]
    recorded.steps(6)
    steps, traces = recorded.log.steps(), recorded.log.traces()
    assert [r.request_id for r in choose(traces, steps, 6)] == [*ids[:4], *ids[4:6]], "four at work, then the next to come"
    assert [r.request_id for r in choose(traces, steps, 3)] == ids[1:4]
    assert ids[30] in [r.request_id for r in choose(traces, steps, 3, selected=ids[30])]


def test_a_timeline_tells_a_life(busy: Recorded):
    busy.steps(12)
    found = drawn(busy)["timeline"]
    life, ids = trace(found["figure"], "life"), found["ids"]
    assert life["z"][ids.index(busy.log.traces()[2].request_id)][0] == 0, "C waits in the first step"
    assert sorted(trace(found["figure"], "finish")["y"]) == [0, 1, 2]
    assert len(life["z"]) == 8


def test_past_and_live_agree_on_a_step(busy: Recorded):
    live = drawn(busy)
    past = drawn(busy, step=live["clock"]["last"])
    assert live["tables"] == past["tables"]
    assert past["clock"]["cursor"] == live["clock"]["last"]
    first = drawn(busy, step=0)
    assert [row["state"] for row in first["requests"]] == ["prefill", "waiting", "waiting"]
    assert first["requests"][0]["text"] == ""


def test_tables_show_what_the_engine_holds(busy: Recorded):
    held = busy.engine.snapshot().tables
    assert {row["id"]: [cell[0] for cell in row["cells"]] for row in drawn(busy)["tables"]} == {
        k: list(v) for k, v in held.items()
    }


def test_a_step_out_of_range_is_the_nearest_one(busy: Recorded):
    assert drawn(busy, step=10_000)["clock"]["cursor"] == 2


def test_tiles_name_their_percentiles_and_counts(busy: Recorded):
    busy.steps(12)
    rows = {row["name"]: row for row in drawn(busy)["tiles"]["latency"]}
    assert rows["ttft"]["count"] == 3
    assert rows["itl"]["count"] == 15
    assert rows["itl"]["p50"] == 1000.0
    assert "linear interpolation" in rows["ttft"]["text"]
    assert rows["itl"]["few"]


def test_a_huge_pool_is_fast_enough_to_be_live():
    import time

    view = PoolView(num_blocks=2048, block_size=16, uses={b: [Use(b % 64, 0, 16)] for b in range(1, 2049)})
    best = min(_timed(lambda: pool_figure(view, LIGHT), time.perf_counter) for _ in range(3))
    assert best < 0.15


def _timed(action: Any, clock: Any) -> float:
    begin = clock()
    action()
    return clock() - begin


def test_timeline_marks_stay_inside_the_frame(busy: Recorded):
    figure = timeline_figure(busy.log.steps(), busy.log.traces(), (1, 40), LIGHT)
    check(figure)
    path = next(s["path"] for s in figure["layout"]["shapes"] if s["name"] == "decode")
    ticks = [int(x) for x in re.findall(r"M(\d+),", path)]
    rows = trace(figure, "life")["z"]
    decodes = sum(1 + len(LIGHT.hues) <= (cell or 0) <= 2 * len(LIGHT.hues) for row in rows for cell in row)
    assert ticks
    assert len(ticks) == decodes
    assert min(ticks) >= 1
    assert not math.isnan(figure["layout"]["xaxis"]["range"][0])


def test_a_decode_in_vain_says_so_and_makes_no_tick():
    """With async_scheduling a request that ends by itself has one more row, whose token is thrown away."""
    lab = Recorded(async_scheduling=True)
    lab.engine.add_request(list(range(1, 7)), SamplingParams(max_tokens=20, stop_token_ids=[4]))
    lab.engine.add_request(list(range(11, 15)), SamplingParams(max_tokens=12, ignore_eos=True))
    lab.steps(30)
    assert lab.engine.stats().tokens_wasted == 1
    figure = timeline_figure(lab.log.steps(), lab.log.traces(), (0, 39), LIGHT)
    texts = [text for row in trace(figure, "life")["hovertext"] for text in row]
    vain = [text for text in texts if "thrown away" in text]
    ended = lab.log.traces()[0].token_steps[-1]
    assert vain == [f"step {ended + 1}: A decode, 1 token{THROWN_AWAY}"]
    marks = trace(figure, "finish")
    assert next(zip(marks["x"], marks["y"], strict=True)) == (ended + 1, 0), "it ends where it was last, not beyond"
    assert "A ends by itself" in marks["hovertext"][0] and THROWN_AWAY in marks["hovertext"][0]
    assert THROWN_AWAY not in marks["hovertext"][1]
    path = next(s["path"] for s in figure["layout"]["shapes"] if s["name"] == "decode")
    made = sum(row.kind == "decode" and row.sampled >= 0 for step in lab.log.steps() for row in step.scheduled)
    assert path.count("M") == made


def test_one_of_a_thing_is_not_told_as_several(busy: Recorded):
    found = drawn(busy)
    told = [
        text
        for name in ("batch", "timeline")
        for data in found[name]["figure"]["data"]
        for row in data.get("hovertext", [])
        for text in (row if isinstance(row, list) else [row])
    ]
    assert any("1 token" in text for text in told)
    assert not [text for text in told if re.search(r"\b1 (tokens|requests|steps|blocks)", text)]


@pytest.mark.parametrize("cursor", [None, 0, 10, 20, 30, 39])
@pytest.mark.parametrize("tall", [None, 2, 38])
def test_the_note_keeps_clear_of_the_cursor_and_of_tall_bars(cursor: int | None, tall: int | None):
    steps = [
        StepTrace(index=i, start=i, end=i + 1, scheduled=(Scheduled("a", "prefill", 16 if i == tall else 2, 0),))
        for i in range(40)
    ]
    layout = batch_figure(steps, {"a": 0}, 4096, (0, 39), LIGHT, cursor)["layout"]
    check({"data": [], "layout": layout})
    [note] = layout["annotations"]
    share = NOTE_WIDTH * 40
    covered = range(int(share)) if note["xanchor"] == "left" else range(40 - int(share), 40)
    assert cursor not in covered
    if cursor in (None, 20):
        assert tall not in covered


# -- who waits -------------------------------------------------------------------------------------------------------------


def test_who_waits_and_why_is_in_the_picture_and_beside_it():
    recorded = Recorded(max_num_seqs=2)
    for _ in range(5):
        recorded.add(5, max_tokens=6)
    recorded.steps(2)
    found = drawn(recorded, step=1)["batch"]
    check(found["figure"])
    strip = trace(found["figure"], "waiting")
    assert list(zip(strip["x"], strip["text"], strict=True)) == [(0, "3"), (1, "·")]
    assert "C waits, 2 behind it: every seat is taken (max_num_seqs)" in strip["hovertext"][1]
    assert found["moment"] == "Step 1: 2 of 512 tokens; C waits, 2 behind it: every seat is taken (max_num_seqs)."
    assert "In the queue: C waits" in found["alt"]


@pytest.mark.parametrize(
    ("fields", "prompts", "reason"),
    [
        ({"max_num_seqs": 1}, (4, 4), "max_num_seqs"),
        ({"max_num_batched_tokens": 8}, (8, 4), "token of budget"),
        ({"num_kv_blocks": 3, "block_size": 4, "max_model_len": 12}, (8, 8), "KV blocks"),
    ],
)
def test_each_reason_for_waiting_is_told_with_its_definition(fields: dict[str, Any], prompts: tuple[int, ...], reason: str):
    recorded = Recorded(**fields)
    for prompt in prompts:
        recorded.add(prompt, max_tokens=4)
    recorded.steps(2)
    found = drawn(recorded)
    told = [entry for entry in found["story"] if entry["kind"] == "block"]
    assert any(reason in entry["text"] for entry in told)
    assert all(entry["definition"].startswith("Waiting") for entry in told)
    waiting = next(row for row in drawn(recorded, step=told[-1]["step"])["requests"] if row["state"] == "waiting")
    assert reason in waiting["detail"]


def test_who_comes_late_waits_for_the_static_batch():
    recorded = Recorded(batching="static", max_num_seqs=2, max_model_len=32)
    recorded.add(4)
    recorded.steps(1)
    recorded.add(4)
    recorded.steps(1)
    told = next(entry for entry in drawn(recorded)["story"] if entry["kind"] == "block")
    assert "B waits: the static batch before it is still running" in told["text"]
    assert told["definition"].startswith("Waiting for the batch:")


def test_every_entry_of_the_log_has_a_step_and_a_definition():
    recorded = Recorded(num_kv_blocks=6, block_size=4, max_num_batched_tokens=32, max_model_len=24)
    prompt = list(range(1, 10))
    for _ in range(4):
        recorded.add(prompt, max_tokens=10)
    recorded.steps(80)
    found = drawn(recorded)
    assert {entry["kind"] for entry in found["story"]} >= {
        "queue",
        "admit",
        "hit",
        "preempt",
        "evict",
        "finish",
        "block",
    } - {
        "queue"  # only the newest sentences are kept
    }
    indices = {step.index for step in recorded.log.steps()}
    for entry in found["story"]:
        assert entry["step"] in indices
        assert entry["definition"] in found["words"].values(), entry


def test_the_newest_sentences_do_not_depend_on_how_far_back_one_looks():
    recorded = Recorded(num_kv_blocks=8, block_size=4, max_num_seqs=3, max_model_len=24)
    for _ in range(30):
        recorded.add(7, max_tokens=8)
    recorded.steps(150)
    numbers = {t.request_id: t.number for t in recorded.log.traces()}
    steps = recorded.log.steps()
    whole = story(steps, numbers, limit=10_000)
    for limit in (1, 7, 60):
        assert story(steps, numbers, limit=limit) == whole[:limit]


# -- the pool --------------------------------------------------------------------------------------------------------------


def test_places_in_the_free_queue_are_the_engines_own(busy: Recorded):
    busy.steps(12)
    assert not [t for t in drawn(busy)["pool"]["figure"]["data"] if t.get("name") == "queue"], "on demand"
    found = drawn(busy, queue=True)["pool"]
    check(found["figure"])
    texts, wide = trace(found["figure"], "queue"), found["columns"]
    places = {int(text): y * wide + x + 1 for x, y, text in zip(texts["x"], texts["y"], texts["text"], strict=True)}
    assert [places[place + 1] for place in range(len(places))] == list(busy.engine.snapshot().free)


def test_an_evicted_block_fades_over_the_next_steps():
    recorded = Recorded(num_kv_blocks=5, block_size=4, max_model_len=20)
    for _ in range(3):
        recorded.add(12, max_tokens=6)
    recorded.steps(30)
    step = next(s for s in recorded.log.steps() if any(e.op == "evict" for e in s.events))
    names = [
        [s["name"] for s in drawn(recorded, step=step.index + age)["pool"]["figure"]["layout"]["shapes"]] for age in range(5)
    ]
    assert "evicted" in names[0]
    assert "evicted 1 ago" in names[1]
    assert "evicted 3 ago" in names[3]
    assert "evicted 4 ago" not in names[4]


@pytest.mark.parametrize(("blocks", "size"), [(8000, 1), (8001, 2), (40_000, 8)])
def test_a_pool_too_large_to_tell_blocks_apart_is_aggregated_and_says_so(blocks: int, size: int):
    uses = {b: [Use(b % 3, 0, 16)] for b in range(1, 101)}
    view = PoolView(num_blocks=blocks, block_size=16, uses=uses, cached=frozenset(range(1000, 1100)))
    figure = pool_figure(view, LIGHT)
    check(figure)
    assert per_cell(blocks) == size
    flat = [cell for row in trace(figure, "blocks")["z"] for cell in row if cell is not None]
    assert len(flat) == -(-blocks // size) <= MOST_CELLS
    assert (f"One cell is {size} blocks." in pool_alt(view)) == (size > 1)
    if size > 1:
        groups = Groups(view)
        shares = [groups.share(cell) * len(groups.blocks(cell)) for cell in groups.used()]
        assert round(sum(shares)) == 100, "no block is lost or counted twice"
        hover = [text for row in trace(figure, "blocks")["hovertext"] for text in row]
        assert hover[0].startswith(f"blocks 1–{size}: {size} of {size} in use")
        assert sum(cell == 1 for cell in flat) == len({(b - 1) // size for b in range(1000, 1100)})


# -- many requests ---------------------------------------------------------------------------------------------------------


def test_by_kind_counts_the_same_as_piece_by_piece():
    recorded = Recorded(num_kv_blocks=24, block_size=4, max_num_seqs=20, max_num_batched_tokens=32, max_model_len=40)
    for _ in range(20):
        recorded.add(9, max_tokens=12)
    recorded.steps(60)
    for step in recorded.log.steps():
        tokens = dict.fromkeys(KINDS, 0)
        for part in parts(step, {}):
            tokens[part.kind] += part.tokens
        assert kind_sums(step.scheduled)[0] == list(tokens.values())


def test_the_selected_request_stands_apart_from_the_kinds():
    recorded = Recorded(num_kv_blocks=200, max_num_seqs=20)
    ids = [recorded.add(6, max_tokens=12) for _ in range(16)]
    recorded.steps(5)
    figure = drawn(recorded, selected=ids[9])["batch"]["figure"]
    check(figure)
    own = [d for t in bars(figure) for d in t["customdata"] if d[2] == ids[9]]
    assert len(own) == 5
    assert {d[2] for t in bars(figure) for d in t["customdata"]} == {ids[9], ""}
    heights_of: dict[int, float] = {}
    for level in bars(figure):
        for x, y in zip(level["x"], level["y"], strict=True):
            heights_of[x] = heights_of.get(x, 0) + y
    assert heights_of == {s.index: s.num_tokens for s in recorded.log.steps()}


# -- tiles -----------------------------------------------------------------------------------------------------------------


def test_throughput_counts_what_the_steps_did(busy: Recorded):
    busy.steps(3)
    tiles = {g["name"]: g for g in drawn(busy)["tiles"]["gauges"]}
    rows = [row for step in busy.log.steps()[1:] for row in step.scheduled]
    assert tiles["generation"]["value"] == pytest.approx(sum(r.sampled >= 0 for r in rows) / 5, abs=0.06)
    assert tiles["prompt"]["value"] == pytest.approx(sum(r.num_tokens for r in rows if r.kind == "prefill") / 5, abs=0.06)
    assert (tiles["running"]["value"], tiles["waiting"]["value"]) == (3, 0)


def test_throughput_is_undefined_in_slow_motion_and_before_anything_ran():
    step = StepTrace(index=0, start=0.0, end=1.0, scheduled=(Scheduled("a", "prefill", 5, 0, sampled=1),), slow=True)
    assert throughput([step], 1.0)[:2] == (None, None)
    assert throughput([], 0.0) == (None, None, 0.0)


# -- sections stand alone --------------------------------------------------------------------------------------------------


def test_a_failing_section_says_so_and_leaves_the_others_alone(busy: Recorded, monkeypatch: pytest.MonkeyPatch):
    whole = drawn(busy)
    with monkeypatch.context() as patch:
        patch.setattr(moment, "pool_figure", lambda *args, **kwargs: 1 / 0)
        for _ in range(5):
            busy.steps(1)
            found = drawn(busy)
            assert "pool" not in found
            assert found["failed"] == {"pool": "This can't be shown at the moment (ZeroDivisionError). The rest goes on."}
            assert found.keys() == whole.keys() - {"pool"}
            assert found["clock"]["last"] == busy.log.next_index - 1
    assert drawn(busy)["failed"] == {}
    assert drawn(busy).keys() == whole.keys()


def test_records_that_cannot_be_replayed_cost_the_pool_only(busy: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moment, "past", lambda *args: {}["gone"])
    found = drawn(busy, step=1)
    assert found["pool"]["complete"] is False
    assert found["batch"]["moment"].startswith("Step 1")


# -- one token -------------------------------------------------------------------------------------------------------------


def test_a_tokens_place_is_where_the_replayed_engine_keeps_it():
    recorded = Recorded(block_size=4, num_kv_blocks=64)
    ids = [recorded.add(prompt, max_tokens=9) for prompt in (3, 10, 6)]
    tables: list[dict[str, tuple[int, ...]]] = []
    while recorded.engine.has_unfinished():
        recorded.engine.step()
        tables.append({k: tuple(v) for k, v in recorded.engine.snapshot().tables.items()})
    recorded.flush()
    checked = 0
    for request_id in ids:
        trace_of = recorded.log.request(request_id).trace
        for index, step in enumerate(trace_of.token_steps):
            detail = token_detail(recorded.log, recorded.config, request_id, index)
            assert detail["step"] == step
            assert (detail["logical"], detail["offset"]) == divmod(trace_of.prompt_tokens + index, 4)
            if index:
                gap = trace_of.token_times[index] - trace_of.token_times[index - 1]
                assert detail["itl_ms"] == pytest.approx(gap * 1000)
            table = tables[step + 1].get(request_id) if step + 1 < len(tables) else None
            if table is not None and detail["logical"] < len(table):
                assert detail["block"] == table[detail["logical"]]
                checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("probabilities", "near"),
    [([0.5, 0.495], True), ([0.5, 0.4], False), ([1.0], False), ([], False), ([0.1, 0.3, 0.299], True)],
)
def test_a_near_tie_is_called_so(probabilities: list[float], near: bool):
    assert moment._near_tie(probabilities) is near


@pytest.mark.parametrize("top", [1, 2, 5, 8, 16, 100, 192, 553, 4096, 20000])
def test_ticks_of_a_root_axis_never_touch(top: int):
    values = root_ticks(top)["tickvals"]
    assert values[0] == 0 and values[-1] >= 0.5 * math.sqrt(top)
    assert all(high - low >= 0.1 * math.sqrt(top) for low, high in pairwise(values))


@pytest.mark.parametrize("filled", range(1, 17))
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_a_letter_in_the_pool_stands_on_one_colour(filled: int, theme: Any):
    """Its middle lies well inside the filled part, in the paper's colour, or well inside the rest, in the ink's."""
    view = PoolView(num_blocks=8, block_size=16, uses={1: [Use(number=0, logical=0, tokens=filled)]})
    letters = trace(pool_figure(view, theme), "letters")
    middle, edge = letters["x"][0] + 0.5, filled / 16
    [colour] = letters["textfont"]["color"]
    assert colour == (theme.paper if middle < edge else theme.ink)
    assert abs(middle - edge) > 0.15
