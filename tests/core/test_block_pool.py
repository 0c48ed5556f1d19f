"""The pool alone: the free queue's golden order, reference counts, eviction, and a check that finds what is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool, FreeQueue, sha256_block_hash
from engine.core.trace import Event
from tests.core.kit import add, make, prompt_of


def register(pool: BlockPool, block: int, tokens: tuple[int, ...] = (1, 2), parent: int | str | None = None) -> int:
    return pool.register(block, sha256_block_hash(b"", tokens, None), tokens, parent)


def test_golden_order_at_pool_level():
    pool = BlockPool(10)
    first = pool.take(4)
    assert first == [1, 2, 3, 4]
    parent = None
    for block in first[:3]:
        parent = register(pool, block, (block, block), parent)
    for block in (1, 2, 3):
        pool.share(block)
    second = [1, 2, 3, *pool.take(1)]
    assert second == [1, 2, 3, 5]
    pool.release(list(reversed(first)))
    assert list(pool.free) == [4, 6, 7, 8, 9, 10]
    pool.release(list(reversed(second)))
    assert list(pool.free) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert (pool.num_available, pool.num_cached, pool.num_referenced) == (10, 3, 0)
    pool.check([])


def test_golden_order_end_to_end_through_the_engine():
    engine = make(block_size=16, num_kv_blocks=10)
    shared = prompt_of(48)
    add(engine, [*shared, 1, 2], 3, request_id="A")
    engine.step()
    add(engine, [*shared, 3, 4], 3, request_id="B")
    engine.step()
    assert engine.snapshot().tables == {"A": (1, 2, 3, 4), "B": (1, 2, 3, 5)}
    engine.step()
    assert engine.request("A").finish_reason == "length"
    assert engine.snapshot().free == (4, 6, 7, 8, 9, 10)
    engine.step()
    assert not engine.has_unfinished()
    assert engine.snapshot().free == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    assert engine.snapshot().cached == (1, 2, 3)


def test_taking_from_the_front_forgets_the_content():
    events: list[Event] = []
    pool = BlockPool(2, events.append)
    pool.take(2)
    register(pool, 1, (1, 1))
    register(pool, 2, (2, 2))
    pool.release([2, 1])
    assert list(pool.free) == [2, 1]
    assert pool.take(1) == [2]
    assert [event for event in events if event.op == "evict"] == [Event("evict", "", (2,))]
    assert (pool.evictions, pool.num_cached) == (1, 1)
    assert not pool.is_cached(2)
    assert pool.is_cached(1)
    pool.check([[2]])


def test_a_shared_cached_block_leaves_the_queue_wherever_it_is():
    pool = BlockPool(4)
    pool.take(3)
    for block in (1, 2, 3):
        register(pool, block, (block, 0))
    pool.release([3, 2, 1])
    assert list(pool.free) == [4, 3, 2, 1]
    pool.share(2)
    assert list(pool.free) == [4, 3, 1]
    pool.check([[2]])
    pool.share(2)
    pool.release([2])
    assert list(pool.free) == [4, 3, 1]
    pool.release([2])
    assert list(pool.free) == [4, 3, 1, 2]
    pool.check([])


def test_an_empty_queue_says_so():
    queue = FreeQueue(1)
    assert queue.pop_front() == 1
    with pytest.raises(IndexError, match="empty"):
        queue.pop_front()
    with pytest.raises(IndexError, match="empty"):
        BlockPool(0).take(1)


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "front", "back"]), st.integers(1, 12)), max_size=80))
def test_the_free_queue_behaves_like_a_list(actions):
    queue, model = FreeQueue(12), list(range(1, 13))
    for action, block in actions:
        if action == "pop" and model:
            assert queue.pop_front() == model.pop(0)
        elif action == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif action == "front" and block not in model:
            queue.push_front(block)
            model.insert(0, block)
        elif action == "back" and block not in model:
            queue.push_back(block)
            model.append(block)
        assert list(queue) == model
        assert len(queue) == len(model)


def test_equal_content_has_one_identity_and_different_parents_differ():
    pool = BlockPool(5)
    pool.take(5)
    first = register(pool, 1, (1, 2))
    assert register(pool, 1, (1, 2)) == first
    assert register(pool, 2, (1, 2)) == first
    other = register(pool, 3, (3, 4), first)
    assert register(pool, 4, (3, 4), None) != other
    assert pool.find(sha256_block_hash(b"", (1, 2), None), (1, 2), None).uid == first
    assert pool.find(sha256_block_hash(b"", (1, 2), None), (1, 2), "salt") is None
    assert pool.longest_partial_match([3, 9], first) == 1
    assert pool.longest_partial_match([9, 9], first) == 0


def test_the_digest_depends_on_parent_tokens_and_salt():
    digests = {
        sha256_block_hash(parent, tokens, salt)
        for parent in (b"", b"p")
        for tokens in ((1, 2), (2, 1), (258,), (1,))
        for salt in (None, "", "s")
    }
    assert len(digests) == 24
    assert all(len(digest) == 32 for digest in digests)


def _break_count(pool: BlockPool) -> None:
    pool.ref_count[1] += 1


def _break_queue(pool: BlockPool) -> None:
    pool.free.push_back(1)


def _lose_block(pool: BlockPool) -> None:
    pool.free.remove(3)


def _break_cached(pool: BlockPool) -> None:
    pool.num_cached += 1


def _break_map(pool: BlockPool) -> None:
    pool._by_digest.clear()


def _hold_null(pool: BlockPool) -> None:
    pool.ref_count[0] = 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_break_count, "block 1 has reference count 2"),
        (_break_queue, "block 1 is also in the free queue"),
        (_lose_block, "block 3 is neither held nor in the free queue"),
        (_break_cached, "the count says 1"),
        (_break_map, "hash map"),
        (_hold_null, "null block"),
    ],
)
def test_check_finds_each_kind_of_damage(fault: Callable[[BlockPool], None], words: str):
    pool = BlockPool(3)
    pool.take(2)
    register(pool, 1)
    pool.check([[1], [2]])
    fault(pool)
    with pytest.raises(RuntimeError, match=words):
        pool.check([[1], [2]])
