"""The contiguous layout in pool order: extents, what they reserve in vain, and the holes between them."""

from hypothesis import given
from hypothesis import strategies as st

from app.figures.tables import extents
from engine.observe.replay import state_at
from tests.observe.recorded import record


def test_extents_and_holes_by_hand() -> None:
    rows = extents({"a": [2, 3, 4], "b": [7, 8]}, {"a": 20, "b": 32}, {"a": 0, "b": 1}, 16, 10)
    assert [(row["first"], row["last"], row["letter"], row["used"], row["tokens"]) for row in rows] == [
        (1, 1, "", 0, 16),
        (2, 4, "A", 20, 48),
        (5, 6, "", 0, 32),
        (7, 8, "B", 32, 32),
        (9, 10, "", 0, 32),
    ]


def test_an_empty_pool_is_one_hole() -> None:
    assert extents({}, {}, {}, 16, 8) == [
        {"first": 1, "last": 8, "number": None, "tokens": 128, "id": "", "letter": "", "used": 0}
    ]


@given(seed=st.integers(0, 10**6), at=st.floats(0, 1))
def test_rows_cover_the_pool_once(seed: int, at: float) -> None:
    config, recording = record(seed, 60, batching="continuous", kv_layout="contiguous", reserve="request", use_kv_cache=True)
    index = int(at * (len(recording.steps) - 1))
    state = state_at(recording.steps, index, config.num_kv_blocks, "during")
    numbers = {e.trace.request_id: e.trace.number for e in recording.opened_events}
    rows = extents(state.tables, state.computed, numbers, config.block_size, config.num_kv_blocks)
    covered = [block for row in rows for block in range(row["first"], row["last"] + 1)]
    assert covered == list(range(1, config.num_kv_blocks + 1))
    assert sum(row["tokens"] for row in rows if row["number"] is None) == len(state.free) * config.block_size
    assert all(row["used"] <= row["tokens"] for row in rows)
