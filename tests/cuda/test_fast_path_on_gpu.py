"""Triton's kernels, CUDA graphs and steps asked for ahead, on the GPU at hand; skipped without one.

In float32 the fast path must write the tokens of the plain one; in half precision its logits must be near.
"""

import gc
import random
from dataclasses import replace

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.config import EngineConfig
from engine.core.runner import StepBatch, Work
from engine.model.attention import Span
from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import verdict_on
from engine.model.fused import norm_heads
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.model.selfcheck import ALLOWED, _attention_difference
from tests.fixtures import assert_greedy, make_rand, oracle
from tests.model.kit import make_request
from tests.model.state_lives import live

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SETTINGS = {"max_model_len": 256, "num_kv_blocks": 128, "max_num_seqs": 6, "max_num_batched_tokens": 64}
MIXED = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 9, "top_p": 0.8, "top_k": 40},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 1, "min_tokens": 4},
    {"temperature": 1.0, "seed": 2},
]


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", "cuda", "float32")


def prompts(count=6, longest=90):
    ids = random.Random(0)
    return [[ids.randrange(3, 200) for _ in range(ids.randrange(1, longest))] for _ in range(count)]


def tokens(llm, params=None, repeat=1):
    wanted = params or [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in MIXED]
    found = [[output.outputs[0].token_ids for output in llm.generate(prompts(), wanted)] for _ in range(repeat)]
    llm.check()
    assert all(found[0] == other for other in found)
    return found[0]


@pytest.fixture(scope="module")
def plain(tiny):
    return tokens(LLM(tiny, attention_backend="sdpa", **SETTINGS))


# ---------------------------------------------------------------------- the requests' state


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_inputs_are_those_that_the_host_would_send(kernels):
    for seed in range(4):
        live(seed, kernels=kernels, where="cuda")


@pytest.mark.parametrize("ways", [{}, {"enforce_eager": True}], ids=["graphs", "calls"])
def test_to_submit_a_step_never_waits(tiny, plain, ways, monkeypatch):
    """torch raises where a call would make the host wait. Each kind of step ran before: memory and kernels are there."""
    llm = LLM(tiny, async_scheduling=True, attention_backend="triton", **ways, **SETTINGS)
    assert tokens(llm) == plain
    submit = ModelRunner.submit

    def watched(self, batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return submit(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ModelRunner, "submit", watched)
    assert tokens(llm) == plain


# ---------------------------------------------------------------------- kernels


# Each of them compiles a dozen kernels: a few seconds.
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 8), ("float16", 24), ("bfloat16", 8), ("bfloat16", 24)])
def test_the_check_at_start_passes(dtype, block_size):
    verdict = verdict_on(load_model("tiny", "cuda", dtype).transformer, block_size)
    assert verdict.triton and verdict.fused and verdict.graphs, verdict.reason
    assert verdict.reason == "" and len(verdict.checks) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_are_normed_in_place(dtype):
    number = getattr(torch, dtype)
    qkv = torch.randn(5, 32, 128, device="cuda").to(number)
    ways, weights = (qkv.clone(), qkv.clone()), torch.randn(2, 128, device="cuda").to(number)
    for kernels, heads in enumerate(ways):
        norm_heads(heads, *weights, num_heads=16, eps=1e-6, kernels=bool(kernels))
    plain, kernel = ways
    assert torch.equal(kernel[:, 24:], qkv[:, 24:]), "values stay"
    assert (kernel - plain).abs().max() <= ALLOWED[number] * plain.abs().max()
    assert not torch.equal(kernel[:, :24], qkv[:, :24])


HEADS = [(9, 3, 64), (32, 8, 128), (16, 8, 128), (32, 32, 80), (32, 32, 96)]


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [*[("bfloat16", heads) for heads in HEADS], *[(dtype, h) for dtype in ("float32", "float16") for h in HEADS[:2]]],
)
def test_attention_agrees_in_the_shapes_of_real_models(dtype, heads):
    from engine.model.attention.triton_backend import TritonAttention

    model = load_model("tiny", "cuda", dtype, attention_backend="sdpa").transformer
    num_heads, kv_heads, head_dim = heads
    model.spec = replace(model.spec, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    with torch.inference_mode():
        assert _attention_difference(model, 16, 9000, TritonAttention) <= ALLOWED[model.dtype]


def step_logits(loaded, attention, fused):
    """Logits of a step that mixes prefills, a chunk and decodes, after their contexts were computed."""
    ids, model = random.Random(4), loaded.transformer
    contexts, counts = (0, 40, 17, 16, 63), (50, 1, 1, 30, 1)
    tables = [list(range(1 + 8 * place, 9 + 8 * place)) for place in range(len(contexts))]
    text = [[ids.randrange(3, 200) for _ in range(c + n)] for c, n in zip(contexts, counts, strict=True)]
    with torch.inference_mode():
        for pieces in ([(t[:c], 0) for t, c in zip(text, contexts, strict=True)], list(zip(text, contexts, strict=True))):
            spans, packed, positions = [], [], []
            for (content, context), table in zip(pieces, tables, strict=True):
                if len(content) > context:
                    spans.append(Span(len(packed), len(content) - context, context, table))
                    packed += content[context:]
                    positions += range(context, len(content))
            numbers = torch.tensor([packed, positions], device="cuda")
            hidden = model.forward(numbers[0], numbers[1], attention, attention.plan(spans), fused)
        return model.logits(model.normalise(hidden, fused))


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_logits_of_a_whole_model_agree(dtype, allowed):
    from engine.model.attention.triton_backend import TritonAttention

    loaded = load_model("tiny", "cuda", dtype)
    spec = loaded.transformer.spec
    pool = {
        "num_layers": spec.num_layers,
        "num_kv_blocks": 48,
        "block_size": 16,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": loaded.transformer.dtype,
        "device": loaded.transformer.device,
    }
    expected = step_logits(loaded, SdpaAttention(**pool), fused=False)
    found = step_logits(loaded, TritonAttention(**pool), fused=True)
    assert (found - expected).abs().max() <= allowed * expected.abs().max()


# ---------------------------------------------------------------------- whole engines


@pytest.mark.parametrize("eager", [True, False], ids=["calls", "graphs"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_every_way_writes_the_same_tokens(tiny, plain, backend, eager, ahead):
    llm = LLM(tiny, attention_backend=backend, enforce_eager=eager, async_scheduling=ahead, **SETTINGS)
    assert llm.engine._runner.describe_backend().graphs == (backend == "triton" and not eager)
    assert tokens(llm) == plain


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_preemption_changes_no_token(tiny, plain, ahead):
    small = {**SETTINGS, "num_kv_blocks": 16, "enable_prefix_caching": False}
    llm = LLM(tiny, attention_backend="triton", async_scheduling=ahead, **small)
    assert tokens(llm) == plain
    assert llm.stats().preemptions > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_prefix_cache_changes_no_token(tiny, plain, ahead):
    llm = LLM(tiny, attention_backend="triton", async_scheduling=ahead, enable_prefix_caching=True, **SETTINGS)
    assert tokens(llm, repeat=3) == plain
    assert llm.stats().tokens_cached > 0


def test_without_a_kv_cache(tiny, plain):
    whole = {**SETTINGS, "max_num_batched_tokens": 1024, "use_kv_cache": False}
    assert tokens(LLM(tiny, attention_backend="triton", **whole)) == plain


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_static_batches_run_as_graphs_too(tiny, plain, batching):
    llm = LLM(tiny, attention_backend="triton", batching=batching, **{**SETTINGS, "max_num_batched_tokens": 1024})
    assert tokens(llm) == plain


def test_labs_on_one_model_take_turns_without_disturbing_each_other(tiny, plain):
    labs = [LLM(tiny, attention_backend="triton", async_scheduling=ahead, **SETTINGS) for ahead in (False, True, True)]
    wanted = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in MIXED]
    names = [[lab.add_request(prompt, params) for prompt, params in zip(prompts(), wanted, strict=True)] for lab in labs]
    while any(lab.has_unfinished() for lab in labs):
        for lab in labs:
            lab.step()
    for lab, ids in zip(labs, names, strict=True):
        assert [lab.output(name).outputs[0].token_ids for name in ids] == plain


SHAPES = {
    "llama, groups of 3": {"heads": 9, "kv_heads": 3, "head_dim": 64},
    "qwen3": {"architecture": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 128},
    "qwen2": {"architecture": "qwen2", "heads": 6, "kv_heads": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_random_checkpoints_are_those_of_transformers(tmp_path, shape):
    path = make_rand(tmp_path, **SHAPES[shape])
    llm = LLM(path, device="cuda", dtype="float32", attention_backend="triton", async_scheduling=True, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts(), params)
    for output, prompt in zip(outputs, prompts(), strict=True):
        assert_greedy(output.outputs[0].token_ids, *oracle(path, prompt, 20), least=0)


def test_half_precision_runs_to_the_end_in_every_way():
    for dtype in ("float16", "bfloat16"):
        loaded = load_model("tiny", "cuda", dtype)
        llm = LLM(loaded, attention_backend="triton", async_scheduling=True, **SETTINGS)
        params = SamplingParams(temperature=0.6, seed=3, max_tokens=40, ignore_eos=True)
        assert {len(output.outputs[0].token_ids) for output in llm.generate(prompts(), params)} == {40}


# ---------------------------------------------------------------------- steps


def decode(request, context=0):
    return StepBatch(0, [Work(request, [7], context, [1, 2], (request,))])


@pytest.mark.parametrize("eager", [True, False], ids=["calls", "graphs"])
def test_times_of_a_step(tiny, eager):
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), attention_backend="triton", enforce_eager=eager)
    request = make_request("a", [7], temperature=0)
    results = [runner.execute(decode(request)) for _ in range(5)]
    assert results[0].gpu_idle_time == 0
    for result in results[1:]:
        assert 0 < result.gpu_time < 1 and result.launch_time > 0 and result.prepare_time > 0
        assert 0 < result.gpu_idle_time < 1
        assert result.forward_time + result.sample_time == pytest.approx(result.gpu_time, abs=1e-5)
    runner.close()


def test_nan_is_reported_by_a_graph(tiny):
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), attention_backend="triton")
    sick, well = (make_request(name, [7], temperature=0) for name in ("sick", "well"))
    runner.attention.pool[:, 1, 0] = float("nan")
    works = [Work(sick, [7], 1, [1], (sick,)), Work(well, [7], 1, [2], (well,))]
    assert runner.execute(StepBatch(0, works)).nonfinite == {"sick"}
    runner.close()


def test_graphs_are_counted_and_given_back(tiny):
    torch.cuda.synchronize()
    gc.collect()  # labs of earlier tests and their graphs
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    runner = ModelRunner(tiny.transformer, EngineConfig(**SETTINGS), attention_backend="triton")
    assert runner.graph_bytes > 0
    taken = before - torch.cuda.mem_get_info()[0]
    assert taken >= runner.graph_bytes * 0.5
    runner.close()
    assert before - torch.cuda.mem_get_info()[0] < taken
