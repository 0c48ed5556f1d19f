"""The teaching baselines: static batching, contiguous layout, no KV cache. Each is right, and reports its waste."""

from __future__ import annotations

import pytest

from engine.core.engine import RequestRefused
from tests.core.kit import add, assert_oracle, drain, make, rows, who


def padding(step):
    return [(row.request_id, row.num_tokens, row.context) for row in step.scheduled if row.kind == "padding"]


# ---------------------------------------------------------------- static batching


def static(**fields):
    fields.setdefault("num_kv_blocks", 64)
    return make(batching="static", **fields)


def test_a_static_batch_pads_prompts_and_keeps_finished_rows_to_its_end():
    engine = static(max_num_seqs=3)
    add(engine, 12, 8, request_id="A", start=1)
    add(engine, 8, 2, request_id="B", start=2)
    add(engine, 4, 5, request_id="C", start=3)
    add(engine, 4, 1, request_id="D", start=4)
    first = engine.step()
    assert rows(first) == {"A": 12, "B": 8, "C": 4}
    assert padding(first) == [("B", 4, 0), ("C", 8, 0)]
    assert first.num_tokens == 36
    assert (first.blocked.request_id, first.blocked.reason) == ("D", "seats")
    steps = [engine.step() for _ in range(7)]
    assert [who(step) for step in steps] == ["A B C", "A C", "A C", "A C", "A", "A", "A"]
    assert [padding(step) for step in steps] == [
        [],
        [("B", 1, 13)],
        [("B", 1, 14)],
        [("B", 1, 15)],
        [("B", 1, 16), ("C", 1, 16)],
        [("B", 1, 17), ("C", 1, 17)],
        [("B", 1, 18), ("C", 1, 18)],
    ]
    assert all(step.num_tokens == 3 for step in steps)
    assert all(step.seats == 3 for step in steps)
    assert [step.num_running for step in steps] == [3, 2, 2, 2, 1, 1, 1]
    assert {step.blocked.reason for step in steps} == {"batch"}
    assert who(engine.step()) == "D"
    assert not engine.has_unfinished()
    stats = engine.stats()
    assert stats.tokens_padded == 12 + 3 + 6
    assert stats.tokens_computed == 12 + 8 + 4 + 7 + 1 + 4 + 4
    for name in "ABCD":
        assert_oracle(engine, name)


def test_a_static_batch_is_formed_only_when_the_last_is_done():
    engine = static(max_num_seqs=4)
    add(engine, 4, 3, request_id="A")
    engine.step()
    add(engine, 4, 2, request_id="B")
    add(engine, 4, 2, request_id="C")
    steps = drain(engine)
    assert [who(step) for step in steps] == ["A", "A", "B C", "B C"]
    assert [step.blocked and step.blocked.reason for step in steps] == ["batch", "batch", None, None]


def test_the_padded_batch_fits_the_budget():
    engine = static(max_num_seqs=8, max_model_len=40, max_num_batched_tokens=40)
    add(engine, 5, 2, request_id="A", start=1)
    add(engine, 20, 2, request_id="B", start=2)
    add(engine, 13, 2, request_id="C", start=3)
    step = engine.step()
    assert who(step) == "A B"
    assert step.num_tokens == 40
    assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed, step.blocked.available) == (
        "C",
        "tokens",
        60,
        40,
    )
    for later in drain(engine):
        assert later.num_tokens <= 40
    for name in "ABC":
        assert_oracle(engine, name)


def test_a_static_batch_reserves_blocks_to_its_end():
    engine = static(block_size=4, num_kv_blocks=6)
    add(engine, 6, 7, request_id="A", start=1)  # 12 stored tokens: 3 blocks
    add(engine, 3, 9, request_id="B", start=2)  # 11: 3 blocks
    add(engine, 1, 1, request_id="C", start=3)
    step = engine.step()
    assert who(step) == "A B"
    assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed, step.blocked.available) == (
        "C",
        "blocks",
        7,
        6,
    )
    drain(engine)
    assert engine.stats().preemptions == 0
    for name in "ABC":
        assert_oracle(engine, name)


def test_padding_never_reaches_beyond_the_context_limit():
    engine = static(max_model_len=64, max_num_seqs=2)
    add(engine, 60, 4, request_id="A", start=1)
    add(engine, 4, 60, request_id="B", start=2)  # 60 padded positions, then 59 more
    steps = drain(engine)
    assert max(context + count for step in steps for _, count, context in padding(step)) <= 64
    assert_oracle(engine, "B")


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("victim", ["A", "B", "C"])
@pytest.mark.parametrize("moment", range(1, 6))
def test_an_aborted_row_leaves_the_static_batch_at_once(layout, victim, moment):
    engine = static(max_num_seqs=3, kv_layout=layout, reserve="request")
    for name, count in (("A", 3), ("B", 5), ("C", 7)):
        add(engine, 6, count, request_id=name, start=ord(name))
    add(engine, 6, 2, request_id="D")
    for _ in range(moment):
        engine.step()
    done = engine.request(victim).finish_reason is not None
    assert engine.abort(victim) is not done
    engine.check()
    step = engine.step()
    if not done:
        assert all(row.request_id != victim for row in step.scheduled)
    drain(engine)
    for name in "ABCD":
        if name != victim or done:
            assert_oracle(engine, name)


def test_aborting_the_last_live_row_ends_the_static_batch():
    engine = static(max_num_seqs=2)
    add(engine, 6, 1, request_id="A")
    add(engine, 6, 9, request_id="B", start=2)
    add(engine, 6, 2, request_id="C", start=3)
    engine.step()
    assert engine.stats().blocks_referenced == 2
    engine.abort("B")
    engine.check()
    assert engine.stats().blocks_referenced == 0
    assert who(engine.step()) == "C"
    drain(engine)


# ---------------------------------------------------------------- contiguous layout


def contiguous(**fields):
    return make(kv_layout="contiguous", block_size=4, **fields)


def test_an_extent_is_reserved_whole_first_fit_and_its_waste_is_counted():
    engine = contiguous(num_kv_blocks=12, reserve="request")
    add(engine, 6, 6, request_id="A", start=1)  # 12 tokens: 3 blocks
    add(engine, 4, 12, request_id="B", start=2)  # 16: 4 blocks
    add(engine, 3, 5, request_id="C", start=3)  # 8: 2 blocks
    engine.step()
    assert engine.snapshot().tables == {"A": (1, 2, 3), "B": (4, 5, 6, 7), "C": (8, 9)}
    stats = engine.stats()
    assert (stats.kv_reserved_tokens, stats.kv_stored_tokens) == (36, 13)
    assert (stats.blocks_free, stats.largest_hole) == (3, 3)
    engine.abort("A")
    stats = engine.stats()
    assert (stats.blocks_free, stats.largest_hole) == (6, 3)  # six free, but no more than three side by side
    add(engine, 10, 6, request_id="D", start=4)  # 16 tokens: 4 blocks
    step = engine.step()
    assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed, step.blocked.available) == (
        "D",
        "blocks",
        4,
        3,
    )
    engine.abort("D")
    add(engine, 2, 6, request_id="E", start=5)  # 2 blocks: the first hole
    engine.step()
    assert engine.snapshot().tables["E"] == (1, 2)
    drain(engine)
    for name in "BCE":
        assert_oracle(engine, name)


def test_reserving_the_limit_wastes_more_and_admits_fewer():
    def admitted(reserve):
        engine = contiguous(num_kv_blocks=16, reserve=reserve, max_model_len=32)
        for start in range(8):
            add(engine, 6, 3, start=start)
        step = engine.step()
        stats = engine.stats()
        assert step.num_running == stats.running
        names = [row.request_id for row in step.scheduled]
        drain(engine)
        return len(names), stats.kv_reserved_tokens - stats.kv_stored_tokens, step.blocked and step.blocked.reason

    assert admitted("max_model_len") == (2, 2 * (32 - 6), "blocks")
    assert admitted("request") == (5, 5 * (12 - 6), "blocks")


def test_a_contiguous_request_is_never_preempted_and_stays_one_run():
    engine = contiguous(num_kv_blocks=10, reserve="request", max_num_batched_tokens=7)
    names = [add(engine, 5 + start, 6, start=start) for start in range(6)]
    drain(engine)
    assert engine.stats().preemptions == 0
    for name in names:
        assert_oracle(engine, name)


# ---------------------------------------------------------------- no KV cache


def test_without_a_kv_cache_every_step_computes_everything_again():
    engine = make(use_kv_cache=False, max_model_len=64, max_num_batched_tokens=64)
    add(engine, 10, 4, request_id="A")
    steps = drain(engine)
    assert [rows(step)["A"] for step in steps] == [10, 11, 12, 13]
    assert [row.context for step in steps for row in step.scheduled] == [0, 0, 0, 0]
    assert [row.recomputed for step in steps for row in step.scheduled] == [0, 10, 11, 12]
    assert [row.kind for step in steps for row in step.scheduled] == ["prefill", *["recompute"] * 3]
    stats = engine.stats()
    assert (stats.tokens_computed, stats.tokens_recomputed, stats.blocks_total, stats.kv_usage) == (46, 33, 0, 0.0)
    assert engine.request("A").recomputed_tokens == 33
    assert_oracle(engine, "A")


def test_without_a_kv_cache_admission_reserves_prompt_and_output_of_all():
    engine = make(use_kv_cache=False, max_model_len=64, max_num_batched_tokens=64)
    add(engine, 20, 10, request_id="A", start=1)
    add(engine, 14, 20, request_id="B", start=2)
    add(engine, 1, 1, request_id="C", start=3)
    step = engine.step()
    assert rows(step) == {"A": 20, "B": 14}
    assert (step.blocked.request_id, step.blocked.reason, step.blocked.needed, step.blocked.available) == (
        "C",
        "tokens",
        2,
        0,
    )
    for later in drain(engine):
        assert later.num_tokens <= 64
    for name in "ABC":
        assert_oracle(engine, name)
    assert engine.stats().preemptions == 0


def test_the_largest_request_fits_alone():
    engine = make(use_kv_cache=False, max_model_len=64, max_num_batched_tokens=64)
    add(engine, 1, 63, request_id="A")
    with pytest.raises(RequestRefused):
        add(engine, 1, 64)
    drain(engine)
    assert_oracle(engine, "A")


# ---------------------------------------------------------------- all of them agree


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 17},
        {"long_prefill_token_threshold": 3},
        {"batching": "static"},
        {"batching": "static", "kv_layout": "contiguous"},
        {"kv_layout": "contiguous", "reserve": "request"},
        {"use_kv_cache": False},
        {"scheduling_policy": "priority"},
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks", [16, 7])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_configuration_gives_the_same_tokens(fields, blocks, block_size):
    if fields.get("kv_layout") == "contiguous":
        fields = {"reserve": "request", **fields}
    engine = make(num_kv_blocks=blocks * 16 // block_size, block_size=block_size, max_num_seqs=5, **fields)
    names = [add(engine, 3 + 9 * (start % 4), 3 + 5 * (start % 3), start=start, priority=start % 2) for start in range(9)]
    drain(engine, 2000)
    for name in names:
        assert_oracle(engine, name)
