"""Differential matrix: every architecture, chunk, cache, pool and teaching baseline gives the oracle's tokens.

Six prompts, some with a shared beginning, in float32. One engine a combination on shared weights; invalid combinations (a
static batch of chunks, say) are refused by the configuration and left out here by construction.
"""

from __future__ import annotations

import itertools

import pytest

from engine import SamplingParams
from tests.cases.conftest import FAMILIES
from tests.cases.kit import assert_idle, assert_oracle, drain, greedy, logprobs_of, oracle_logprobs, outputs_of, prompt_of

pytestmark = pytest.mark.timeout(180)

LIMIT = 48
BUDGETS = {"1": 1, "7": 7, "16": 16, "17": 17, "whole": 6 * LIMIT}
POOLS = {"tight": 7, "ample": 64}
"""Blocks of 8 tokens: one of the requests needs 6."""
SHARED = prompt_of(17, 90)
PROMPTS = [
    prompt_of(5, 1),
    [*SHARED, *prompt_of(15, 2)],
    prompt_of(16, 3),
    [*SHARED, *prompt_of(22, 4)],
    prompt_of(23, 5),
    [*SHARED[:16], *prompt_of(9, 6)],
]
COUNTS = [9, 8, 7, 9, 8, 7]


def combinations() -> dict[str, dict]:
    found: dict[str, dict] = {}
    for (name, budget), (pool, blocks) in itertools.product(BUDGETS.items(), POOLS.items()):
        seats = {"max_num_seqs": min(budget, 6), "max_num_batched_tokens": budget, "num_kv_blocks": blocks}
        for caching in (True, False):
            mark = "cached" if caching else "uncached"
            found[f"continuous, {name}, {pool}, {mark}"] = {**seats, "enable_prefix_caching": caching}
            if name == "whole":
                whole = {**seats, "enable_chunked_prefill": False, "enable_prefix_caching": caching}
                found[f"no chunked prefill, {pool}, {mark}"] = whole
        for reserve in ("max_model_len", "request"):
            found[f"contiguous {reserve}, {name}, {pool}"] = {**seats, "kv_layout": "contiguous", "reserve": reserve}
            if name == "whole":
                static = {"batching": "static", "kv_layout": "contiguous", "reserve": reserve}
                found[f"static contiguous {reserve}, {pool}"] = {**seats, **static}
                unchunked = {"enable_chunked_prefill": False, "kv_layout": "contiguous", "reserve": reserve}
                found[f"contiguous {reserve}, no chunked prefill, {pool}"] = {**seats, **unchunked}
        if name == "whole":
            found[f"static, {pool}"] = {**seats, "batching": "static"}
    for budget in (LIMIT, 6 * LIMIT):
        found[f"no KV cache, {budget}"] = {"use_kv_cache": False, "max_num_batched_tokens": budget, "max_num_seqs": 6}
    for threshold in (3, 10):
        split = {"long_prefill_token_threshold": threshold, "max_num_batched_tokens": 32, "max_num_seqs": 6}
        found[f"threshold {threshold}"] = {**split, "num_kv_blocks": 16}
    urgent = {"scheduling_policy": "priority", "num_kv_blocks": 7, "max_num_seqs": 6}
    return {**found, "priority": urgent, "one seat": {"max_num_seqs": 1}}


COMBINATIONS = combinations()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_all_give_the_oracles_tokens(family, name, combination):
    model, config = family(name), COMBINATIONS[combination]
    llm = model.llm(**{"max_model_len": LIMIT, "block_size": 8, "num_kv_blocks": 64, **config})
    names = [
        llm.add_request(prompt, greedy(count), priority=-i)
        for i, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True))
    ]
    drain(llm)
    outputs = outputs_of(llm, names)
    assert [len(output.outputs[0].token_ids) for output in outputs] == COUNTS
    assert_oracle(model, outputs)
    stats = llm.stats()
    paged = llm.config.kv_layout == "paged" and llm.config.use_kv_cache and llm.config.batching == "continuous"
    if paged and config.get("num_kv_blocks") == 7 and llm.config.max_num_seqs > 1:
        assert stats.preemptions > 0, "a pool that was to force preemption did not"
    elif not paged or config.get("num_kv_blocks", 64) == 64:
        assert stats.preemptions == 0
    if llm.config.batching == "static" and combination != "static contiguous max_model_len, tight":  # a batch of one
        assert stats.tokens_padded > 0
    if not llm.config.use_kv_cache:
        assert stats.tokens_recomputed > 0


def test_prompts_have_clear_gaps(family):
    """Equality of tokens is a fair demand only where the two best logits differ; so most of these must."""
    for name in FAMILIES:
        model = family(name)
        for output in model.llm().generate(PROMPTS, [greedy(count) for count in COUNTS]):
            top = oracle_logprobs(model, output.prompt_token_ids, output.outputs[0].token_ids).topk(2).values
            assert (top[:, 0] - top[:, 1] > 1e-3).float().mean() > 0.8


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_mixed_batch_in_a_tight_pool(family, name):
    """Not the best token alone: all log-probabilities, through chunks, hits, preemption and resumption."""
    model = family(name)
    for config in ({"num_kv_blocks": 7, "max_num_batched_tokens": 13, "max_num_seqs": 6}, {"batching": "static"}):
        llm = model.llm(**{"max_model_len": LIMIT, "block_size": 8, **config})
        outputs = llm.generate(PROMPTS, [SamplingParams(temperature=0, max_tokens=count, logprobs=-1) for count in COUNTS])
        for output in outputs:
            (sample,) = output.outputs
            wanted = oracle_logprobs(model, output.prompt_token_ids, sample.token_ids)
            assert (logprobs_of(sample) - wanted).abs().max() < 1e-4
        assert_idle(llm)
