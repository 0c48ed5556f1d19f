"""Every supported architecture gives transformers' logits: in one piece, in chunks, token by token, in company."""

import pytest
import torch
import torch.nn.functional as F

from engine.model.attention import Span
from engine.model.loader import load_model
from engine.model.rope import rotate
from engine.model.transformer import project
from tests.fixtures import VOCAB, make_rand, oracle_logits
from tests.model.kit import chunked_logits, make_attention, packed_logits

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
SHAPES = {
    "llama": {},
    "llama, every head its own": {"kv_heads": 4, "tied": True},
    "llama, llama3 rope, groups of 3": {"heads": 6, "rope_parameters": LLAMA3},
    "llama, linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, one KV head": {"kv_heads": 1},
    "mistral": {"architecture": "mistral"},
    "mistral, wide heads": {"architecture": "mistral", "head_dim": 32, "heads": 6},
    "qwen2": {"architecture": "qwen2", "heads": 6},
    "qwen2, tied": {"architecture": "qwen2", "tied": True},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "qwen3, tied, with biases": {"architecture": "qwen3", "tied": True, "attention_bias": True, "kv_heads": 4},
}
IDS = torch.randint(0, VOCAB, (83,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def shape(request, tmp_path_factory):
    path = make_rand(tmp_path_factory.mktemp("shape"), spread=0.15, **SHAPES[request.param])
    return load_model(path), oracle_logits(path, IDS)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 82, 83])
def test_logits_equal_transformers_whatever_the_chunks(shape, chunk):
    model, expected = shape
    logits = chunked_logits(model, make_attention(model), IDS, [5, 9, 2, 40, 11, 30], chunk)
    assert (logits - expected).abs().max() < 1e-4


def test_sequences_of_any_kind_share_a_batch(shape):
    model, expected = shape
    attention = make_attention(model, block_size=8)
    tables = [list(range(1 + i, 64, 4)) for i in range(4)]
    for i, context in enumerate((40, 17, 16)):
        packed_logits(model, attention, [(IDS[:context], 0, tables[i])])
    pieces = [
        (IDS[40:41], 40, tables[0]),
        (IDS[:20], 0, tables[3]),
        (IDS[17:18], 17, tables[1]),
        (IDS[16:33], 16, tables[2]),
    ]
    logits = packed_logits(model, attention, pieces)
    wanted = torch.cat([expected[context : context + len(tokens)] for tokens, context, _ in pieces])
    assert (logits - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("cached", [16, 32, 48])
def test_a_prefix_computed_by_another_sequence_can_be_read(shape, cached):
    model, expected = shape
    attention = make_attention(model)
    packed_logits(model, attention, [(IDS[:cached], 0, [7, 3, 9])])
    table = [*[7, 3, 9][: cached // 16], 20, 21, 22, 23, 24]
    logits = chunked_logits(model, attention, IDS, table, 11, context=cached)
    assert (logits - expected[cached:]).abs().max() < 1e-4


def test_without_a_pool_each_step_attends_within_itself(shape):
    model, expected = shape
    attention = make_attention(model, num_blocks=0)
    assert attention.kv_pool_bytes == 0
    logits = packed_logits(model, attention, [(IDS[:30], 0, []), (IDS[:1], 0, []), (IDS, 0, [])])
    assert (logits[:30] - expected[:30]).abs().max() < 1e-4
    assert (logits[31:] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(rand_dir, dtype):
    model = load_model(rand_dir, dtype=dtype)
    expected = oracle_logits(rand_dir, IDS)
    logits = chunked_logits(model, make_attention(model), IDS, [5, 9, 2, 40, 11, 30], 17)
    assert logits.dtype == torch.float32
    scale = expected.std()
    assert (logits - expected).abs().mean() < (0.05 if dtype == "bfloat16" else 0.01) * scale


def test_decodes_of_very_different_lengths_are_grouped_and_right(rand):
    attention = make_attention(rand, num_blocks=200, block_size=4)
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 390, 8, 150, 1, 30, 31, 32, 200, 5, 4, 6]
    sequences = [torch.randint(0, VOCAB, (n + 1,), generator=generator).tolist() for n in lengths]
    attention = make_attention(rand, num_blocks=300, block_size=4)
    free = iter(range(1, 301))
    tables = [[next(free) for _ in range(-(-(n + 1) // 4))] for n in lengths]
    expected = []
    for ids, table in zip(sequences, tables, strict=True):
        packed_logits(rand, attention, [(ids[:-1], 0, table)])
        expected.append(packed_logits(rand, make_attention(rand, num_blocks=0), [(ids, 0, [])])[-1])
    pieces = [(ids[-1:], n, table) for ids, n, table in zip(sequences, lengths, tables, strict=True)]
    logits = packed_logits(rand, attention, pieces)
    assert (logits - torch.stack(expected)).abs().max() < 1e-4


def plain_norm(x, weight, eps):
    if x.dtype == torch.float32:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_() * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))).to(x.dtype) * weight


def plain_forward(model, ids, positions, attention, plan):
    """The transformer as its formula: every branch is added where it ends, nothing in place."""
    spec, (cos, sin) = model.spec, model.rotary_tables
    heads, rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    x = F.embedding(ids, model.weights.embedding)
    for index, layer in enumerate(model.weights.layers):
        normed = plain_norm(x, layer.input_norm, spec.norm_eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, spec.qkv_heads, spec.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads:rotated], qkv[:, rotated:]
        if layer.q_norm is not None:
            q, k = plain_norm(q, layer.q_norm, spec.norm_eps), plain_norm(k, layer.k_norm, spec.norm_eps)
        turned = torch.cat((q, k), 1)
        rotate(turned, cos, sin)
        kv = torch.cat((turned[:, heads:], v), 1).unflatten(1, (2, spec.num_kv_heads))
        x = x + F.linear(attention.attend(index, turned[:, :heads], kv, plan), layer.out, layer.out_bias)
        normed = plain_norm(x, layer.post_norm, spec.norm_eps)
        gate, up = project(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_numbers_are_those_of_the_plain_formula_to_the_last_bit(shape, dtype):
    """What fusing and adding in place may save, it may not change."""
    path = shape[0].info.name
    model = load_model(path, "cpu", dtype)
    for pieces in ([(0, 40)], [(0, 7), (7, 8), (8, 20), (20, 21)]):
        spans = [Span(0, stop - start, start, [5, 9, 2]) for start, stop in pieces]
        pools = [make_attention(model) for _ in range(2)]
        for (start, stop), span in zip(pieces, spans, strict=True):
            ids, positions = torch.tensor(IDS[start:stop]), torch.arange(start, stop)
            run = model.transformer.forward(ids, positions, pools[0], pools[0].plan([span]))
            assert torch.equal(run, plain_forward(model.transformer, ids, positions, pools[1], pools[1].plan([span])))
