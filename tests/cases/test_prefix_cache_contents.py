"""The prefix cache never gives K and V of anything but the same tokens of the same owner, computed to the end."""

import random

import pytest

from tests.cases.kit import (
    Ear,
    assert_hits_follow_fills,
    assert_idle,
    assert_oracle,
    checked_step,
    drain,
    greedy,
    outputs_of,
    prompt_of,
    steps_of,
)

pytestmark = pytest.mark.timeout(120)


def send(llm, prompt, params, **options):
    name = llm.add_request(prompt, params, **options)
    drain(llm)
    return llm.output(name)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_whole_hit_still_computes_the_last_token(rand, block_size):
    llm = rand.llm(block_size=block_size, num_kv_blocks=1024)
    outputs = []
    for seed, length in enumerate([1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64]):
        first = send(llm, prompt_of(length, 100 + seed), greedy(4))
        before = llm.stats().tokens_computed
        second = send(llm, prompt_of(length, 100 + seed), greedy(4))
        cached = (length - 1) // block_size * block_size
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
        assert llm.stats().tokens_computed - before == length - cached + 3
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        outputs += [first, second]
    assert_oracle(rand, outputs, count=4)


def test_generated_tokens_are_found_again_in_a_longer_prompt(rand):
    llm = rand.llm()
    for length in (12, 15, 16, 17, 30):
        first = send(llm, prompt_of(length, 60), greedy(20))
        longer = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
        second = send(llm, longer, greedy(6))
        assert second.num_cached_tokens == (length + 19) // 16 * 16, "the last sampled token has no K and V"
        assert_oracle(rand, [first, second])


@pytest.mark.parametrize("blocks", [4, 5, 8, 11])
def test_an_evicted_block_is_no_hit(rand, blocks):
    llm = rand.llm(num_kv_blocks=blocks, max_model_len=64)
    first = send(llm, prompt_of(32, 1), greedy(2))
    others = [prompt_of(32, seed) for seed in range(2, 2 + blocks)]
    outputs = [first, *(send(llm, prompt, greedy(2)) for prompt in others)]
    assert llm.stats().evictions > 0
    again = send(llm, prompt_of(32, 1), greedy(2))
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    for prompt in reversed(others):
        held = llm.stats().blocks_cached
        output = send(llm, prompt, greedy(2))
        assert output.num_cached_tokens <= 16 * held
        outputs.append(output)
    assert_oracle(rand, [*outputs, again], count=2)


def test_a_thousand_hits_and_evictions_in_a_small_pool_give_no_wrong_token(rand):
    """Prompts grow from a few roots, so that what is evicted is often the middle or the root of something still cached."""
    source = random.Random(12)
    roots = [prompt_of(16, seed) for seed in range(3)]
    middles = [prompt_of(8, 50 + seed) for seed in range(3)]
    llm = rand.llm(block_size=8, num_kv_blocks=12, max_model_len=64, max_num_seqs=2)
    names = []
    for _ in range(500):
        prompt = [*source.choice(roots), *source.choice(middles), *source.choice(middles)][: source.randrange(9, 33)]
        names.append(llm.add_request(prompt, greedy(source.randrange(1, 4))))
        steps_of(llm, source.randrange(3))
    drain(llm)
    stats = llm.stats()
    assert stats.prefix_hit_blocks > 200 and stats.evictions > 200
    assert_oracle(rand, outputs_of(llm, names))


def one_of_256(parent, tokens, salt):
    return bytes([(sum(parent) + sum(tokens)) % 256])


def always_the_same(parent, tokens, salt):
    return b"same"


def forgets_the_parent(parent, tokens, salt):
    return bytes(token % 256 for token in tokens)


def forgets_the_tokens(parent, tokens, salt):
    return bytes([len(parent)])


WEAK = [one_of_256, always_the_same, forgets_the_parent, forgets_the_tokens]


@pytest.mark.parametrize("weak", WEAK)
def test_a_weak_hash_costs_hits_but_never_gives_a_wrong_one(rand, weak):
    """400 prompts; a quarter differ from an earlier one in block 0 only, after that block 0 was cached by a third."""
    source = random.Random(3)
    prompts = [prompt_of(32, seed) for seed in range(100)]
    strangers = [[*prompt_of(16, 100 + seed), *prompt_of(16, 300 + seed)] for seed in range(100)]
    crossed = [[*b[:16], *a[16:], 1 + i % 9] for i, (a, b) in enumerate(zip(prompts, strangers, strict=True))]
    swapped = [[*a[16:], *a[:16], 3] for a in prompts]
    sent = [*prompts, *strangers, *crossed, *swapped]
    assert len({tuple(prompt) for prompt in sent}) == 400
    llm = rand.llm(num_kv_blocks=1024, block_hash=weak)
    exact = rand.llm(num_kv_blocks=1024)
    outputs = []
    for start in range(0, 400, 20):
        part = sent[start : start + 20]
        source.shuffle(part)
        found, right = llm.generate(part, greedy(2)), exact.generate(part, greedy(2))
        for weakly, exactly in zip(found, right, strict=True):
            assert weakly.num_cached_tokens <= exactly.num_cached_tokens
        outputs += found
        llm.check()
    assert exact.stats().prefix_hit_blocks == 100, "each crossed prompt finds its own block 0 and nothing more"
    assert_oracle(rand, outputs, count=2)
    assert_idle(llm)


@pytest.mark.parametrize("weak", WEAK)
def test_prompts_that_differ_in_block_0_only(rand, weak):
    """Block 1 and 2 hold the same tokens at the same positions, behind another beginning."""
    llm = rand.llm(num_kv_blocks=512, block_hash=weak)
    tail = prompt_of(33, 9)
    prompts = [[*prompt_of(16, seed), *tail] for seed in range(40)]
    prompts += [[*prompt_of(16, seed)[:15], 255 - seed, *tail] for seed in range(10)]
    outputs = []
    for prompt in prompts:
        outputs.append(send(llm, prompt, greedy(3)))
        assert outputs[-1].num_cached_tokens == 0
    assert_oracle(rand, outputs, count=3)


@pytest.mark.parametrize("block_hash", [None, *WEAK])
@pytest.mark.parametrize("tenants", [("S1", "S2"), ("S1", None), ("", None), ("a", "ab"), ("S1", "s1")])
def test_a_salt_keeps_tenants_apart_and_lets_each_find_its_own(rand, tenants, block_hash):
    one, other = tenants
    prompt = prompt_of(64, 30)
    llm = rand.llm(block_hash=block_hash)
    outputs = [send(llm, prompt, greedy(3), cache_salt=salt) for salt in (one, other)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    again = [send(llm, prompt, greedy(3), cache_salt=salt) for salt in (one, other)]
    found = [output.num_cached_tokens for output in again]
    if block_hash in (None, forgets_the_parent):
        assert found[0] == 48, "private, not off"
    if block_hash is None:
        assert found[1] == 48
    assert_oracle(rand, [*outputs, *again], count=3)


@pytest.mark.parametrize("budget", [5, 16, 32, 33, 319, 320, 512])
def test_chunks_of_one_prompt_are_not_hits_of_each_other(rand, budget):
    llm = rand.llm(max_num_batched_tokens=budget, max_num_seqs=2, max_model_len=400)
    first = send(llm, prompt_of(320, 8), greedy(2))
    assert first.num_cached_tokens == 0
    assert llm.stats().hit_rate == 0.0
    second = send(llm, prompt_of(320, 8), greedy(2))
    assert second.num_cached_tokens == 304
    assert llm.stats().hit_rate == 304 / 640
    assert_oracle(rand, [first, second], count=2)


@pytest.mark.parametrize("budget", [16, 40, 64])
@pytest.mark.parametrize("threshold", [0, 16])
def test_no_block_is_shared_before_it_is_computed_or_after_its_owner_was_cancelled_too_soon(rand, budget, threshold):
    prompt = prompt_of(160, 6)
    for moment in range(12):
        ear = Ear()
        llm = rand.llm(max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, listener=ear)
        first, second = llm.add_request(prompt, greedy(3)), llm.add_request(prompt, greedy(3))
        steps_of(llm, moment)
        llm.abort(first)
        third = llm.add_request(prompt, greedy(3))
        drain(llm)
        assert_hits_follow_fills(ear.steps)
        assert_oracle(rand, outputs_of(llm, [second, third]), count=3)


def test_requests_of_one_step_do_not_read_what_the_same_step_writes(rand):
    for budget in (64, 200, 512):
        ear = Ear()
        llm = rand.llm(max_num_batched_tokens=budget, listener=ear)
        names = [llm.add_request([*prompt_of(48, 11), i], greedy(4)) for i in range(6)]
        while llm.has_unfinished():
            checked_step(llm)
        assert_hits_follow_fills(ear.steps)
        assert_oracle(rand, outputs_of(llm, names), count=4)
