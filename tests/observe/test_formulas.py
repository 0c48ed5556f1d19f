"""Formulas against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.observe import formulas as f
from engine.observe.formulas import FormulaError, ModelShape, Row

KIB, MIB = 1024, 1024**2

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_1B = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN25_05B = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def test_the_worked_example_is_512_mib() -> None:
    """2 · 32 · 8 · 128 · 4096 · 1 · 2 = 536,870,912."""
    assert f.kv_bytes(num_layers=32, num_kv_heads=8, head_dim=128, tokens=4096, element_bytes=2) == 512 * MIB
    assert f.kv_bytes(num_layers=32, num_kv_heads=8, head_dim=128, tokens=4096, sequences=3, element_bytes=1) == 768 * MIB


@pytest.mark.parametrize(
    ("config", "kib", "kind"),
    [
        (LLAMA_8B, 128, "GQA"),  # 2 · 32 · 8 · 128 · 2 = 131,072
        (QWEN3_06B, 112, "GQA"),  # 2 · 28 · 8 · 128 · 2 = 114,688
        (QWEN25_05B, 12, "GQA"),  # 2 · 24 · 2 · 64 · 2 = 12,288
        (SMOLLM2, 22.5, "GQA"),  # 2 · 30 · 3 · 64 · 2 = 23,040
        (LLAMA_1B, 32, "GQA"),  # 2 · 16 · 8 · 64 · 2 = 32,768
        ({**SMOLLM2, "num_key_value_heads": 9}, 67.5, "MHA"),
        ({**SMOLLM2, "num_key_value_heads": 1}, 7.5, "MQA"),
        ({k: v for k, v in SMOLLM2.items() if k != "num_key_value_heads"}, 67.5, "MHA"),
    ],
)
def test_a_token_in_bf16(config: dict[str, Any], kib: float, kind: str) -> None:
    shape = f.shape_from_config(config)
    assert f.kv_bytes_per_token(shape, f.dtype_bytes("bfloat16")) == kib * KIB
    assert f.kv_bytes_per_token(shape, f.dtype_bytes("float32")) == 2 * kib * KIB
    assert shape.attention_kind == kind


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # published sizes of the checkpoints, norms and biases included
        (SMOLLM2, 134_515_008),
        (LLAMA_1B, 1_235_814_400),
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_06B, 596_049_920),
        (QWEN25_05B, 494_032_768),
    ],
)
def test_parameters_of_known_checkpoints(config: dict[str, Any], parameters: int) -> None:
    assert f.shape_from_config(config).parameters == parameters
    assert f.weight_bytes(parameters) == 2 * parameters


@pytest.mark.parametrize(
    ("tokens", "blocks", "wasted"),
    [(0, 0, 0), (1, 1, 15), (15, 1, 1), (16, 1, 0), (17, 2, 15), (33, 3, 15), (48, 3, 0)],
)
def test_paging_by_hand(tokens: int, blocks: int, wasted: int) -> None:
    paged = f.paged_kv(tokens, 16, 100)
    assert (paged.blocks, paged.wasted_slots, paged.bytes, paged.stored_bytes) == (
        blocks,
        wasted,
        1600 * blocks,
        100 * tokens,
    )


@given(st.integers(0, 10_000), st.integers(1, 256), st.integers(0, 100))
def test_paging_wastes_less_than_a_block_a_sequence(tokens: int, block_size: int, sequences: int) -> None:
    paged = f.paged_kv(tokens, block_size, 1, sequences)
    assert 0 <= paged.wasted_slots <= sequences * (block_size - 1)
    assert paged.slots - paged.wasted_slots == tokens * sequences
    assert 0 <= paged.waste < 1


def test_how_many_sequences_fit() -> None:
    """512 MiB of Llama-3.1-8B's KV hold 4,096 tokens, 256 blocks of 16; 257 tokens need 17 blocks, so 15 such sequences."""
    per_token = 128 * KIB
    for tokens, fit in ((4096, 1), (4097, 0), (2048, 2), (257, 15), (1, 256)):
        assert f.sequences_that_fit(512 * MIB, tokens, 16, per_token) == fit
    assert f.sequences_that_fit(0, 1, 16, per_token) == 0


@given(st.integers(0, 10**9), st.integers(1, 5000), st.integers(1, 64), st.integers(1, 5000))
def test_what_fits_fits_and_one_more_does_not(memory: int, tokens: int, block_size: int, per_token: int) -> None:
    n = f.sequences_that_fit(memory, tokens, block_size, per_token)
    assert f.paged_kv(tokens, block_size, per_token, n).bytes <= memory
    assert f.paged_kv(tokens, block_size, per_token, n + 1).bytes > memory


TOY = ModelShape(
    num_layers=2, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=8, vocab_size=10, max_position=64
)


def test_work_of_a_step_by_hand() -> None:
    """Layer matrices: Q 4·4, K and V 2·(4·2), O 4·4 = 48; MLP 3·4·8 = 96; 144 a layer, 288 in two.

    Prefill of 3 after 2: pairs 3 + 4 + 5 = 12. Decode after 9: 10. Four tokens, both sample.
    FLOPs: 2·288·4 = 2304; logits 2·4·10·2 = 160; attention 4·(2·2)·22·2 layers = 704.
    Bytes (2 an element): weights 288 + 4·4 embedding rows + 40 output matrix = 344 → 688; KV a token 2·2·1·2·2 = 16 bytes,
    read 5 + 10, written 4 → 304.
    """
    rows = [Row(3, 2), Row(1, 9)]
    assert TOY.layer_parameters == 288
    assert f.step_flops(TOY, rows) == 2304 + 160 + 704
    assert f.step_bytes(TOY, rows) == 688 + 304
    assert f.step_flops(TOY, [Row(3, 2, samples=False)]) == 2 * 288 * 3 + 4 * 4 * 12 * 2
    assert f.step_flops(TOY, []) == f.step_bytes(TOY, []) == 0


@given(st.integers(0, 300), st.integers(0, 300))
def test_attention_pairs_are_those_of_the_mask(num_tokens: int, context: int) -> None:
    assert f.attention_pairs(num_tokens, context) == sum(context + i for i in range(1, num_tokens + 1))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_chunks_of_a_prompt_cost_the_same_operations_as_the_whole(chunks: list[int]) -> None:
    rows, context = [], 0
    for chunk in chunks:
        rows.append(Row(chunk, context, samples=False))
        context += chunk
    assert sum(f.step_flops(TOY, [row]) for row in rows) == f.step_flops(TOY, [Row(context, 0, samples=False)])


def test_the_roofline_says_which_limit_binds() -> None:
    """Peak 100 op/s, 10 bytes/s, ridge 10. 50 op and 20 bytes: 0.5 s against 2 s. 500 op: 5 s against 2 s."""
    low, high = f.roofline(50, 20, 100, 10), f.roofline(500, 20, 100, 10)
    assert (low.binds, low.time, low.intensity, low.ridge) == ("memory", 2.0, 2.5, 10.0)
    assert (high.binds, high.time, high.share(10.0)) == ("compute", 5.0, 0.5)
    assert f.roofline(200, 20, 100, 10).binds == "neither"
    empty = f.roofline(0, 0, 100, 10)
    assert (empty.time, empty.intensity, empty.share(0.0)) == (0.0, None, None)


def test_one_decode_is_memory_bound_and_a_long_prefill_is_not() -> None:
    shape, chip = f.shape_from_config(LLAMA_8B), f.DATASHEETS[0]

    def binds(rows: list[Row]) -> str:
        return f.roofline(f.step_flops(shape, rows), f.step_bytes(shape, rows), chip.bf16_flops, chip.bandwidth).binds

    assert binds([Row(1, 1000)]) == "memory"
    assert binds([Row(1, 1000)] * 16) == "memory"
    assert binds([Row(4096, 0)]) == "compute"


def test_the_worked_latency() -> None:
    assert f.latency_from_parts(1.0, 0.040, 101) == pytest.approx(5.0)
    assert f.latency_from_parts(1.0, 0.040, 1) == 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: f.shape_from_config({}), ["num_attention_heads", "missing"]),
        (lambda: f.shape_from_config({**SMOLLM2, "hidden_size": "many"}), ["hidden_size='many'", "whole number"]),
        (lambda: f.shape_from_config({**SMOLLM2, "num_hidden_layers": 0}), ["num_hidden_layers=0", "at least 1"]),
        (lambda: f.shape_from_config({**SMOLLM2, "num_hidden_layers": True}), ["num_hidden_layers", "whole number"]),
        (lambda: f.shape_from_config({**SMOLLM2, "num_key_value_heads": 2}), ["num_heads=9", "num_kv_heads=2"]),
        (lambda: f.shape_from_config({**SMOLLM2, "kv_lora_rank": 512}), ["kv_lora_rank"]),
        (lambda: f.dtype_bytes("float7"), ["float7", "bfloat16"]),
        (lambda: f.paged_kv(1, 0, 1), ["block_size=0"]),
        (lambda: f.kv_bytes(num_layers=1, num_kv_heads=1, head_dim=1, tokens=-1), ["tokens=-1"]),
        (lambda: f.sequences_that_fit(100, 1, 16, 0), ["bytes_per_token=0"]),
        (lambda: f.roofline(1, 1, 0, 1), ["peak_flops=0"]),
        (lambda: f.roofline(1, float("nan"), 1, 1), ["moved_bytes=nan"]),
        (lambda: f.latency_from_parts(1, 1, 0), ["output_tokens=0"]),
    ],
)
def test_an_impossible_number_is_refused_by_name(call: Any, words: list[str]) -> None:
    with pytest.raises(FormulaError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
