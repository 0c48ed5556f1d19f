"""Logits and tokens are the oracle's, however the prompt is cut, cached, batched or stored."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from tests.cases.conftest import FAMILIES
from tests.cases.kit import (
    Model,
    assert_idle,
    assert_logprobs,
    assert_oracle,
    drain,
    greedy,
    logprobs_of,
    oracle_logits_of,
    oracle_logprobs,
    prompt_of,
)
from tests.fixtures import copy_with_config, make_rand
from tests.model.test_gguf import write_gguf

pytestmark = pytest.mark.timeout(120)
EVERYTHING = greedy(4, logprobs=-1)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("budget", [1, 7, 16, 17, 47, 48, 512])
def test_logits_do_not_depend_on_the_chunks_of_the_prompt(family, name, budget):
    model = family(name)
    llm = model.llm(max_num_batched_tokens=budget, max_num_seqs=1)
    (output,) = llm.generate([prompt_of(48, 7)], EVERYTHING)
    assert_logprobs(model, output)
    assert_oracle(model, [output], count=4)
    (again,) = llm.generate([[*prompt_of(48, 7)[:17], *prompt_of(31, 8)]], EVERYTHING)
    assert again.num_cached_tokens == 16
    assert_logprobs(model, again)


def test_the_scaled_positions_really_differ(family):
    """Else the cases above would not notice a rotary scaling that is left out."""
    plain, scaled = (oracle_logprobs(family(name), prompt_of(48, 7), [1]) for name in ("llama", "llama3-rope"))
    assert (plain - scaled).abs().max() > 0.1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200, 400])
def test_long_sequences_keep_their_positions(family, length):
    model = family("llama3-rope")
    llm = model.llm(max_model_len=512, max_num_batched_tokens=50)
    (output,) = llm.generate([prompt_of(length, 3)], greedy(20, logprobs=-1))
    assert_logprobs(model, output, 2e-4)
    assert_oracle(model, [output], count=20)


# ------------------------------------------------------------------ output heads


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_rand(tmp_path_factory.mktemp("tied"), tied=True)


def with_head(source, target, factor, **config):
    path = copy_with_config(source, target, **config)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", ["tied, no head", "tied, with its head", "untied, twice the embedding"])
def test_output_heads_tied_and_not(tied, tmp_path, kind):
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"].numel()
    alone = Model.load(tied).loaded.info
    path, heads = {
        "tied, no head": lambda: (tied, 0),
        "tied, with its head": lambda: (with_head(tied, tmp_path / "both", 1.0), 0),
        "untied, twice the embedding": lambda: (with_head(tied, tmp_path / "two", 2.0, tie_word_embeddings=False), 1),
    }[kind]()
    model = Model.load(path)
    assert model.loaded.info.num_parameters == alone.num_parameters + heads * embedding
    assert model.loaded.info.weight_bytes == alone.weight_bytes + heads * embedding * 4
    for output in model.llm().generate([prompt_of(9, 1), prompt_of(20, 2)], EVERYTHING):
        assert_logprobs(model, output)


# ------------------------------------------------------------------ batch and cache


@pytest.mark.parametrize("length", [8, 33])
def test_the_same_tokens_alone_in_a_batch_and_from_the_cache(rand, length):
    prompts = [prompt_of(length + i, 60 + i) for i in range(8)]
    params = greedy(24, logprobs=0)
    alone = [rand.llm().generate([prompt], params)[0] for prompt in prompts]
    llm = rand.llm(num_kv_blocks=128)
    batch = llm.generate(prompts, params)
    cached = llm.generate(prompts, params)
    assert all(output.num_cached_tokens == (length + i - 1) // 16 * 16 for i, output in enumerate(cached))
    for outputs in (alone, batch, cached):
        assert_oracle(rand, outputs, count=24)
    for one, other, third in zip(alone, batch, cached, strict=True):
        clear = clear_tokens(rand, one)
        assert clear >= 8
        tokens = one.outputs[0].token_ids[:clear]
        assert tokens == other.outputs[0].token_ids[:clear] == third.outputs[0].token_ids[:clear]


def clear_tokens(model, output):
    """Tokens before the oracle's first near tie."""
    top = oracle_logprobs(model, output.prompt_token_ids, output.outputs[0].token_ids).topk(2).values
    near = (top[:, 0] - top[:, 1] < 1e-3).nonzero()
    return int(near[0]) if len(near) else len(top)


def test_bfloat16_differs_between_batches_no_more_than_the_oracle_does(tmp_path):
    path = make_rand(tmp_path, heads=32, kv_heads=8, intermediate_size=1024, initializer_range=0.05)
    model = Model.load(path, "bfloat16")
    assert model.loaded.info.dtype == "bfloat16"
    prompts = [prompt_of(24, i) for i in range(8)]
    params = greedy(1, logprobs=-1)
    alone = torch.cat([logprobs_of(model.llm().generate([prompt], params)[0].outputs[0]) for prompt in prompts])
    batch = torch.cat([logprobs_of(output.outputs[0]) for output in model.llm().generate(prompts, params)])
    chunked = torch.cat([logprobs_of(o.outputs[0]) for o in model.llm(max_num_batched_tokens=17).generate(prompts, params)])

    def oracle(dtype, size):
        groups = [prompts[i : i + size] for i in range(0, 8, size)]
        rows = [row[-1].float().log_softmax(-1) for group in groups for row in oracle_logits_of(path, group, dtype)]
        return torch.stack(rows)

    own = (oracle(torch.bfloat16, 1) - oracle(torch.bfloat16, 8)).abs().max()
    rounding = 2**-8 * oracle(torch.bfloat16, 1).abs().max()
    allowed = 4 * max(own, rounding)
    assert (alone - batch).abs().max() <= allowed
    assert (alone - chunked).abs().max() <= allowed
    exact = oracle(torch.float32, 8)
    oracle_error = (oracle(torch.bfloat16, 8) - exact).abs().max()
    assert (batch - exact).abs().max() <= 2 * oracle_error
    assert oracle_error > 1e-3, "else this ran in float32"


# ------------------------------------------------------------------ GGUF


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_gguf_file_gives_the_same_logits_as_safetensors(tmp_path, monkeypatch, kv_heads):
    monkeypatch.setenv("INFERENCE_LAB_CACHE", str(tmp_path / "cache"))
    source = make_rand(tmp_path / "rand", kv_heads=kv_heads)
    model = Model.load(source)
    llm = LLM(write_gguf(source, tmp_path / "rand.gguf"), device="cpu", max_model_len=128, num_kv_blocks=32)
    spec, original = llm.model.transformer.spec, model.loaded.transformer.spec
    assert (spec.rope, spec.num_kv_heads, spec.tied) == (original.rope, kv_heads, original.tied)
    outputs = llm.generate([prompt_of(20, 1), prompt_of(33, 2)], EVERYTHING)
    for output in outputs:
        assert_logprobs(model, output)
    assert_oracle(model, outputs, count=4)


# ------------------------------------------------------------------ numbers that are not finite

POISON = 255


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """Any sequence that holds token 255 becomes NaN; all others are untouched (the head is not tied)."""
    path = make_rand(tmp_path_factory.mktemp("nan"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Model.load(path)


def sick(length, place, seed):
    prompt = prompt_of(length, seed, below=POISON)
    prompt[place] = POISON
    return prompt


ARRANGEMENTS = {
    "paged": {},
    "chunked": {"max_num_batched_tokens": 16},
    "odd chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "no prefix cache": {"enable_prefix_caching": False},
    "tight pool": {"num_kv_blocks": 12, "max_model_len": 80},
    "static": {"batching": "static"},
    "contiguous": {"kv_layout": "contiguous", "reserve": "request"},
    "no KV cache": {"use_kv_cache": False, "max_num_batched_tokens": 1024},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_prompt_that_becomes_nan_ends_alone_and_infects_nobody(poisoned, arrangement, place):
    llm = poisoned.llm(**{"num_kv_blocks": 20, "max_model_len": 96, **ARRANGEMENTS[arrangement]})
    healthy = [prompt_of(12 + 9 * i, i, below=POISON) for i in range(3)]
    prompts = [healthy[0], sick(40, place, 9), healthy[1], sick(40, place, 9), healthy[2]]
    for _ in range(4):  # the later rounds run on the blocks of the earlier ones
        outputs = llm.generate(prompts, greedy(12))
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error", "length"]
        for output in (outputs[1], outputs[3]):
            assert output.outputs[0].token_ids == []
            assert "NaN" in output.outputs[0].error
            assert output.num_cached_tokens <= place // 16 * 16, "a block with NaN was offered to others"
        assert_oracle(poisoned, [outputs[0], outputs[2], outputs[4]], count=12)
        assert_idle(llm)
    assert llm.stats().failed == 8


@pytest.mark.parametrize("prefix", [0, 16, 20, 32])
def test_what_was_healthy_before_the_nan_may_be_shared(poisoned, prefix):
    """The blocks before the token are right, and stay right for others; the one that holds it does not."""
    llm = poisoned.llm(max_num_batched_tokens=16)
    beginning = prompt_of(prefix, 3, below=POISON) if prefix else []
    for _ in range(3):
        bad = llm.add_request([*beginning, POISON, *prompt_of(20, 4, below=POISON)], greedy(5))
        good = llm.add_request([*beginning, *prompt_of(20, 5, below=POISON)], greedy(5))
        drain(llm)
        assert llm.request(bad).finish_reason == "error"
        assert_oracle(poisoned, [llm.output(good)], count=5)


@pytest.mark.parametrize("budget", [5, 512])
def test_a_generated_token_that_becomes_nan_ends_its_request_alone(poisoned, tmp_path, budget):
    """The head is bent so that a healthy prompt generates the poisoned token after some steps."""
    path = copy_with_config(poisoned.path, tmp_path / "bent")
    tensors = load_file(path / "model.safetensors")
    model = poisoned
    (probe,) = model.llm().generate([prompt_of(10, 6, below=POISON)], greedy(12))
    target = probe.outputs[0].token_ids[7]
    first = probe.outputs[0].token_ids.index(target)
    head = tensors["lm_head.weight"]
    head[[POISON, target]] = head[[target, POISON]]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    bent = Model.load(path)
    llm = bent.llm(max_num_batched_tokens=budget, max_num_seqs=4)
    neighbour = prompt_of(9, 2, below=POISON)
    for _ in range(3):
        ill, well = llm.generate([prompt_of(10, 6, below=POISON), neighbour], greedy(20))
        assert ill.outputs[0].finish_reason == "error"
        assert ill.outputs[0].token_ids == [*probe.outputs[0].token_ids[:first], POISON]
        if POISON not in well.outputs[0].token_ids:
            assert_oracle(bent, [well], count=20)
        (longer,) = llm.generate([[*ill.prompt_token_ids, *ill.outputs[0].token_ids[:-1], 3, 4]], greedy(1))
        assert longer.outputs[0].finish_reason == "length"
        assert_oracle(bent, [longer], count=1)
    assert_idle(llm)


def test_nan_ends_all_samples_of_its_prompt(poisoned):
    llm = poisoned.llm(block_size=4)
    for _ in range(3):
        (bad, good) = llm.generate(
            [sick(10, 4, 1), prompt_of(10, 2, below=POISON)],
            [SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4), greedy(6, n=2)],
        )
        assert [sample.finish_reason for sample in bad.outputs] == ["error"] * 3
        assert_oracle(poisoned, [good], count=6)
        assert_idle(llm)
