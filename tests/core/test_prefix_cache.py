"""The prefix cache: what is hit, what never may be, and what it says about it."""

from __future__ import annotations

import random

import pytest

from tests.core.kit import add, assert_idle, assert_oracle, drain, make, prompt_of, rows


def run(engine, prompt, max_tokens=4, **options):
    identity = add(engine, prompt, max_tokens, **options)
    drain(engine)
    assert_oracle(engine, identity)
    return engine.request(identity)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_a_full_hit_still_computes_at_least_one_token(length):
    engine = make(block_size=16, num_kv_blocks=12)
    assert run(engine, length).cached_tokens == 0
    before = engine.stats()
    second = run(engine, length)
    assert second.cached_tokens == (length - 1) // 16 * 16 <= length - 1
    assert engine.stats().tokens_computed - before.tokens_computed == length + 3 - second.cached_tokens
    assert engine.stats().tokens_cached == second.cached_tokens
    assert engine.stats().prefix_queries == 2 * length
    assert engine.stats().prefix_hit_blocks == second.cached_tokens // 16
    assert engine.stats().prefix_query_blocks == 2 * (length // 16)


def test_generated_tokens_are_reused_by_a_follow_up_prompt():
    engine = make(block_size=4, num_kv_blocks=20)
    first = add(engine, 6, 8)
    drain(engine)
    conversation = [*prompt_of(6), *engine.output(first).outputs[0].token_ids, 1, 2, 3]
    assert run(engine, conversation).cached_tokens == 12  # 6 + 8 - 1 = 13 tokens were stored: three full blocks of 4


def test_an_evicted_prefix_is_never_hit():
    engine = make(block_size=16, num_kv_blocks=8)
    first = run(engine, 32)
    assert engine.stats().blocks_cached == 2
    overwriters = [prompt_of(32, start) for start in range(2, 9)]
    for prompt in overwriters:
        assert run(engine, prompt).cached_tokens == 0
    assert engine.stats().evictions > 0
    again = run(engine, 32)
    assert again.cached_tokens == 0
    assert engine.output(again.request_id).outputs == engine.output(first.request_id).outputs
    hits = [run(engine, prompt).cached_tokens for prompt in overwriters]
    assert sum(hits) <= 8 * 16  # never more than the pool can hold
    assert_idle(engine)


def test_a_hit_refreshes_a_block_and_eviction_takes_the_oldest():
    engine = make(block_size=4, num_kv_blocks=6)
    run(engine, prompt_of(8, 1), 1)  # 2 cached blocks each
    run(engine, prompt_of(8, 2), 1)
    run(engine, prompt_of(8, 1), 1)  # the first is used again, one block hit
    run(engine, prompt_of(12, 3), 1)
    assert run(engine, prompt_of(8, 1), 1).cached_tokens == 4
    assert run(engine, prompt_of(8, 2), 1).cached_tokens == 0


def eight_bits(parent, tokens, salt):
    return bytes([(sum(parent) + sum(tokens) + len(salt or "")) % 256])


def constant(parent, tokens, salt):
    return b"same"


@pytest.mark.parametrize("block_hash", [eight_bits, constant], ids=["8 bits", "constant"])
@pytest.mark.parametrize("kind", ["all differ", "block 0 only", "last block only", "same block elsewhere"])
def test_colliding_hashes_never_cause_a_wrong_hit(block_hash, kind):
    engine = make(block_hash=block_hash, block_size=16, num_kv_blocks=64)
    draw = random.Random(5)
    tail = [draw.randrange(53) for _ in range(16)]
    seen = set()
    for number in range(400):
        fresh = [*divmod(number, 53), *(draw.randrange(53) for _ in range(14))]
        prompt = {
            "all differ": [*fresh, *(draw.randrange(53) for _ in range(16))],
            "block 0 only": [*fresh, *tail],
            "last block only": [*tail, *fresh],
            "same block elsewhere": [*fresh, *tail] if number % 2 else [*tail, *fresh],
        }[kind]
        trace = run(engine, [*prompt, 5], 2)
        shared = 16 if tuple(prompt[:16]) in seen else 0
        assert trace.cached_tokens == shared
        seen.add(tuple(prompt[:16]))
    assert engine.stats().evictions > 0


def test_a_colliding_hash_still_allows_right_hits():
    engine = make(block_hash=constant, block_size=16, num_kv_blocks=64)
    run(engine, prompt_of(40, 1))
    run(engine, prompt_of(40, 2))
    assert run(engine, prompt_of(40, 1)).cached_tokens == 32
    assert run(engine, prompt_of(40, 2)).cached_tokens == 32


@pytest.mark.parametrize("salts", [("s1", "s2"), (None, "s2"), ("", None), ("1", None)])
def test_a_salt_keeps_tenants_apart_and_each_hits_its_own(salts):
    engine = make(block_size=16, num_kv_blocks=32)
    mine, theirs = salts
    cached = [run(engine, 64, cache_salt=salt).cached_tokens for salt in (mine, theirs, mine, theirs)]
    assert cached == [0, 0, 48, 48]


def test_a_colliding_hash_does_not_mix_salts():
    engine = make(block_hash=constant, block_size=16, num_kv_blocks=32)
    assert [run(engine, 64, cache_salt=salt).cached_tokens for salt in "aba"] == [0, 0, 48]


@pytest.mark.parametrize("budget", [16, 32, 33, 64, 320])
def test_chunks_of_one_prompt_are_no_hits(budget):
    engine = make(block_size=16, num_kv_blocks=64, max_num_batched_tokens=budget, max_model_len=400)
    assert run(engine, 320, 1).cached_tokens == 0
    assert engine.stats().hit_rate == 0.0
    assert run(engine, 320, 1).cached_tokens == 304
    assert engine.stats().hit_rate == 304 / 640


def test_hit_rate_is_unknown_before_the_first_query():
    assert make().stats().hit_rate is None


def test_a_block_is_offered_only_after_the_step_that_filled_it():
    engine = make(block_size=16, num_kv_blocks=64, max_num_batched_tokens=512)
    first, second = add(engine, 64, 2), add(engine, 64, 2)
    step = engine.step()
    assert rows(step) == {first: 64, second: 64}
    assert engine.request(second).cached_tokens == 0
    third = add(engine, 64, 2)
    drain(engine)
    assert engine.request(third).cached_tokens == 48
    for identity in (first, second, third):
        assert_oracle(engine, identity)


@pytest.mark.parametrize("chunks_before_abort", range(1, 10))
@pytest.mark.parametrize("budget", [16, 24, 40])
def test_an_aborted_owner_leaves_only_written_blocks_behind(chunks_before_abort, budget):
    engine = make(block_size=16, num_kv_blocks=40, max_num_batched_tokens=budget)
    first, second = add(engine, 160, 3), add(engine, 160, 3)
    for _ in range(chunks_before_abort):
        engine.step()
        engine.check()
    written = engine.snapshot().computed.get(first, 0)
    aborted = engine.abort(first)
    assert len(engine.snapshot().cached) >= (written // 16 if aborted else 0)
    third = add(engine, 160, 3)
    drain(engine)
    assert_oracle(engine, second)
    assert_oracle(engine, third)
    assert engine.request(third).cached_tokens == 144 or engine.request(second).cached_tokens <= written


@pytest.mark.parametrize("caching", [True, False])
def test_progress_of_a_chunked_prefill_does_not_depend_on_the_cache(caching):
    engine = make(block_size=16, num_kv_blocks=8, max_num_batched_tokens=16, enable_prefix_caching=caching)
    identity = add(engine, 80, 1)
    held = []
    steps = 0
    while engine.has_unfinished():
        assert rows(engine.step()) == {identity: 16}
        held.append(engine.stats().blocks_referenced)
        steps += 1
    assert steps == 5
    assert held == [1, 2, 3, 4, 0]
    assert_oracle(engine, identity)


def test_without_prefix_caching_nothing_is_kept_or_counted():
    engine = make(block_size=16, num_kv_blocks=8, enable_prefix_caching=False)
    assert [run(engine, 64).cached_tokens for _ in range(2)] == [0, 0]
    stats = engine.stats()
    assert (stats.blocks_cached, stats.prefix_queries, stats.tokens_cached, stats.hit_rate) == (0, 0, 0, None)
    assert stats.blocks_free == 8


def test_recomputation_after_preemption_is_no_hit():
    engine = make(block_size=4, num_kv_blocks=8, max_num_batched_tokens=64)
    first, second = add(engine, 12, 12, start=1), add(engine, 12, 12, start=2)
    drain(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.tokens_cached == 0
    assert stats.prefix_queries == 24
    assert stats.tokens_lost == stats.tokens_recomputed + stats.tokens_resumed
    for identity in (first, second):
        assert_oracle(engine, identity)
        assert engine.request(identity).cached_tokens == 0


@pytest.mark.parametrize(
    ("before", "prompt", "words"),
    [
        ([], prompt_of(40), "nothing cached begins like this prompt"),
        ([prompt_of(40)], prompt_of(40, 2), "nothing cached begins like this prompt"),
        ([], prompt_of(5), "the prompt has 5 tokens, not one full block of 16"),
        ([prompt_of(40)], prompt_of(15), "not one full block of 16"),
        (
            [prompt_of(40)],
            [*prompt_of(9), *([0] * 20)],
            "the shared prefix goes on for 9 tokens, shorter than a block of 16",
        ),
        (
            [prompt_of(60)],
            [*prompt_of(41), *([0] * 20)],
            "after 32 tokens the shared prefix goes on for 9 tokens, shorter than",
        ),
        ([prompt_of(60)], [*prompt_of(32), *([0] * 20)], "after 32 tokens the prompts differ"),
        ([prompt_of(60)], prompt_of(33), "every full block of the prompt was found"),
        ([prompt_of(60)], prompt_of(32), "the last token is always computed"),
        ([prompt_of(60)], prompt_of(16), "the last token is always computed"),
    ],
)
def test_a_small_hit_is_explained(before, prompt, words):
    engine = make(block_size=16, num_kv_blocks=32)
    for earlier in before:
        run(engine, earlier)
    assert words in run(engine, prompt).cache_note


def test_a_cold_prompt_of_one_block_does_not_claim_a_hit():
    engine = make(block_size=16, num_kv_blocks=32)
    note = run(engine, 16).cache_note
    assert "everything" not in note


def test_notes_of_configurations_without_a_cache():
    assert run(make(enable_prefix_caching=False), 40).cache_note == "prefix caching is off"
    assert "contiguous" in run(make(kv_layout="contiguous"), 40).cache_note
    assert "KV cache" in run(make(use_kv_cache=False), 40).cache_note


def test_two_requests_share_blocks_while_both_run():
    engine = make(block_size=16, num_kv_blocks=16)
    shared = prompt_of(32)
    first = add(engine, [*shared, 1], 8)
    engine.step()
    second = add(engine, [*shared, 2], 8)
    engine.step()
    tables = engine.snapshot().tables
    assert tables[first][:2] == tables[second][:2]
    assert tables[first][2] != tables[second][2]
    assert engine.stats().blocks_referenced == 4
    drain(engine)
    assert_oracle(engine, first)
    assert_oracle(engine, second)


def test_the_salt_goes_into_the_first_digest_and_each_digest_into_the_next():
    asked = []

    def recording(parent, tokens, salt):
        asked.append((parent, len(tokens), salt))
        return bytes([len(asked)])

    run(make(block_hash=recording, block_size=4, num_kv_blocks=8), 12, 1, cache_salt="s")
    assert asked == [(b"", 4, "s"), (b"\x01", 4, None), (b"\x02", 4, None)]
