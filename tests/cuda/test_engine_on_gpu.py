"""The engine on an NVIDIA GPU gives what it gives on a CPU. Skipped where there is no GPU."""

import gc
import random

import pytest
import torch

from engine import LLM, SamplingParams

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
VOCABULARY = 200


def prompts(count: int = 6, longest: int = 90) -> list[list[int]]:
    """Prompts of mixed lengths, the same every time."""
    ids = random.Random(0)
    return [[ids.randrange(3, VOCABULARY) for _ in range(ids.randrange(1, longest))] for _ in range(count)]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), params)]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    return tokens(LLM("tiny", device="cpu", dtype="float32"))


@pytest.mark.parametrize("budget", [7, 16, 17, 512])
def test_greedy_tokens_are_those_of_the_cpu(on_cpu, budget):
    gpu = LLM("tiny", device="cuda", dtype="float32", max_num_batched_tokens=budget, max_num_seqs=6)
    assert tokens(gpu) == on_cpu
    gpu.check()


def test_preemption_changes_no_token(on_cpu):
    gpu = LLM(
        "tiny",
        device="cuda",
        dtype="float32",
        block_size=16,
        num_kv_blocks=12,
        max_model_len=160,
        enable_prefix_caching=False,
    )
    assert tokens(gpu) == on_cpu
    assert gpu.stats().preemptions > 0


def test_prefix_cache_changes_no_token(on_cpu):
    gpu = LLM("tiny", device="cuda", dtype="float32", enable_prefix_caching=True)
    assert tokens(gpu) == on_cpu
    assert tokens(gpu) == on_cpu
    assert gpu.stats().tokens_cached > 0


def test_a_seeded_sample_does_not_depend_on_the_batch():
    gpu = LLM("tiny", device="cuda", dtype="float32")
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
    together = tokens(gpu, params)
    alone = [gpu.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts()]
    assert together == alone


def test_bfloat16_runs_to_the_end():
    gpu = LLM("tiny", device="cuda", dtype="bfloat16")
    outputs = gpu.generate(prompts(), GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [GREEDY.max_tokens] * len(outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_weights_and_cache_live_on_the_gpu():
    gc.collect()  # engines of earlier tests, which would be counted as freed
    before = torch.cuda.memory_allocated()
    gpu = LLM("tiny", device="cuda", dtype="float32", num_kv_blocks=256)
    grown = torch.cuda.memory_allocated() - before
    assert grown >= gpu.model.info.weight_bytes + 256 * 16 * gpu.model.info.kv_bytes_per_token


def test_ceilings_of_a_gpu_are_of_a_plausible_size():
    from engine.bench.ceilings import measure_ceilings

    measured = measure_ceilings(torch.device("cuda"), torch.bfloat16, seconds=1.0)
    assert 5e10 < measured.copy_bandwidth < 3e13
    assert 1e12 < measured.matmul_rate < 1e16
