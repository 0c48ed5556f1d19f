"""Preemption by recomputation: everyone finishes, with the tokens of a request that runs alone."""

import pytest

from engine import SamplingParams
from tests.cases.kit import assert_idle, assert_oracle, drain, greedy, outputs_of, prompt_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 33, 512])
@pytest.mark.parametrize("shared", [0, 32])
def test_six_requests_in_a_pool_for_two(rand, policy, caching, budget, shared):
    llm = rand.llm(
        num_kv_blocks=8, max_model_len=96, max_num_batched_tokens=budget, enable_prefix_caching=caching,
        scheduling_policy=policy, max_num_seqs=6,
    )  # fmt: skip
    names = [
        llm.add_request([*prompt_of(shared, 9), *prompt_of(40 - shared, i)] if shared else prompt_of(40, i), greedy(40),
                        priority=i % 3)
        for i in range(6)
    ]  # fmt: skip
    steps = drain(llm)
    assert llm.stats().preemptions > 0
    assert sum(len(step.preemptions) for step in steps) == llm.stats().preemptions
    lost = sum(preemption.tokens_lost for step in steps for preemption in step.preemptions)
    stats = llm.stats()
    assert stats.tokens_lost == lost
    assert stats.tokens_recomputed + stats.tokens_resumed == lost, "everything lost is computed again or found again"
    assert stats.tokens_cached == sum(llm.request(name).cached_tokens for name in names), "a resumption is no hit"
    if not caching:
        assert (stats.tokens_cached, stats.tokens_resumed) == (0, 0)
    assert_oracle(rand, outputs_of(llm, names), count=40)


@pytest.mark.parametrize("budget", [16, 24, 40, 128])
@pytest.mark.parametrize("caching", [True, False])
def test_resuming_does_not_turn_into_a_loop_of_preemptions(rand, budget, caching):
    llm = rand.llm(num_kv_blocks=6, max_model_len=96, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    names = [llm.add_request(prompt_of(40, 4 + i), greedy(24)) for i in range(2)]
    drain(llm)
    assert llm.stats().preemptions <= 2
    assert llm.stats().tokens_computed <= 126 + 49 + 16
    assert_oracle(rand, outputs_of(llm, names), count=24)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_a_prefill_that_fills_all_blocks_lets_somebody_decode(rand, policy, length, blocks):
    llm = rand.llm(num_kv_blocks=blocks, max_model_len=32, scheduling_policy=policy)
    names = [llm.add_request(prompt_of(length, 20 + i), greedy(8), priority=-i) for i in range(8)]
    steps = drain(llm, 500)
    assert len(steps) < 500
    if length == 16:
        assert llm.stats().preemptions > 0
    assert_oracle(rand, outputs_of(llm, names), count=8)
    assert_idle(llm)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_tiny_blocks_and_pools_of_every_size(rand, block_size):
    for tokens in range(16, 44, 4):
        llm = rand.llm(num_kv_blocks=tokens // block_size, block_size=block_size, max_model_len=64, max_num_batched_tokens=9,
                       max_num_seqs=4)  # fmt: skip
        names = [llm.add_request(prompt_of(3 + 2 * i, i), greedy(9 - i)) for i in range(5)]
        drain(llm)
        assert_oracle(rand, outputs_of(llm, names))


def test_samples_of_one_prompt_survive_preemption(rand):
    """Forks share blocks, are preempted one by one, and come back on blocks of their own."""
    params = SamplingParams(n=3, seed=11, temperature=1.2, max_tokens=30)
    (alone,) = rand.llm(block_size=4).generate([prompt_of(10, 3)], params)
    llm = rand.llm(block_size=4, num_kv_blocks=14, max_model_len=48, max_num_seqs=8)
    names = [llm.add_request(prompt_of(10, 3), params), llm.add_request(prompt_of(12, 4), greedy(20, n=2))]
    drain(llm)
    assert llm.stats().preemptions > 0
    assert [s.token_ids for s in llm.output(names[0]).outputs] == [s.token_ids for s in alone.outputs]
    assert_oracle(rand, [llm.output(names[1])], count=20)


def test_priority_decides_who_is_preempted_and_who_comes_back_first(rand):
    llm = rand.llm(num_kv_blocks=8, max_model_len=96, scheduling_policy="priority", max_num_seqs=8)
    late = llm.add_request(prompt_of(40, 1), greedy(40), priority=5)
    drain_some = [llm.step() for _ in range(3)]
    urgent = [llm.add_request(prompt_of(40, 2 + i), greedy(20), priority=0) for i in range(2)]
    steps = [*drain_some, *drain(llm)]
    victims = {p.request_id for step in steps for p in step.preemptions}
    assert late in victims
    assert all(llm.request(name).finished < llm.request(late).finished for name in urgent)
    assert_oracle(rand, outputs_of(llm, [late, *urgent]))
