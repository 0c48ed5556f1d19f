"""What the KV memory calculator computes: estimates from shapes, beside which the page puts the engine's own figures."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from engine.core.model_info import ModelInfo
from engine.observe.formulas import (
    FormulaError,
    ModelShape,
    dtype_bytes,
    kv_bytes_per_token,
    paged_kv,
    sequences_that_fit,
    shape_from_config,
    weight_bytes,
)

MAX_CONFIG = 200_000
"""Longest config.json that can be pasted, characters."""
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
KNOWN: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336,
    },
    "Llama-3.2-1B": {
        **_LLAMA, "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True,
    },
    "Llama-2-7B": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "SmolLM2-135M": {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
"""Shapes as their published config.json states them."""


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides KV memory, whatever the model was read from."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    parameters: int
    """0 where they are not known."""

    def bytes_per_token(self, dtype: str, kv_heads: int | None = None) -> float:
        """Bytes of K and V of one more token."""
        shape = ModelShape(
            num_layers=self.num_layers, hidden_size=1, num_heads=self.num_heads, num_kv_heads=kv_heads or self.num_kv_heads,
            head_dim=self.head_dim, intermediate_size=1, vocab_size=1,
        )  # fmt: skip
        return kv_bytes_per_token(shape, dtype_bytes(dtype))

    @property
    def kind(self) -> str:
        """MHA, GQA or MQA."""
        if self.num_heads == self.num_kv_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"


def of_config(config: Any) -> KVShape:
    """From a parsed config.json.

    Raises:
        FormulaError: saying which field is missing or impossible.
    """
    if not isinstance(config, dict):
        raise FormulaError("a config.json is an object with fields: paste all of it, from { to }")
    shape = shape_from_config(config)
    return KVShape(
        num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        max_position=shape.max_position or 8192, parameters=shape.parameters,
    )  # fmt: skip


def of_text(text: str) -> KVShape:
    """From a pasted config.json.

    Raises:
        FormulaError: no JSON (with line and column), or a field is missing or impossible.
    """
    if len(text) > MAX_CONFIG:
        raise FormulaError(f"the text has {len(text):,} characters; a config.json has at most {MAX_CONFIG:,}")
    try:
        return of_config(json.loads(text))
    except json.JSONDecodeError as error:
        raise FormulaError(f"line {error.lineno}, column {error.colno}: no valid JSON, {error.msg}") from None
    except RecursionError:
        raise FormulaError("the text is nested too deeply for a config.json") from None


def of_model(info: ModelInfo) -> KVShape | None:
    """From the loaded model; None for one without weights."""
    if info.num_layers < 1:
        return None
    return KVShape(
        num_layers=info.num_layers, num_heads=info.num_heads, num_kv_heads=info.num_kv_heads, head_dim=info.head_dim,
        max_position=info.max_position, parameters=info.num_parameters,
    )  # fmt: skip


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates for one shape and one setting; bytes, tokens, requests."""

    per_token: float
    stored: float
    """Of one request at this context, without paging."""
    held: float
    """Of one request, in whole blocks."""
    blocks: int
    wasted_slots: int
    weights: float
    memory_for_kv: float
    """What the weights leave of the usable memory; below 0: they don't fit."""
    fit: int
    """Requests of this context that fit at once."""


def answer(
    shape: KVShape, *, kv_dtype: str, weight_dtype: str, block_size: int, context: int, memory: float, share: float
) -> Answer:
    """How much one request takes and how many fit.

    ``context``: tokens that a request stores. ``memory``: bytes of the device, of which weights and KV may use ``share``
    (0 to 1); the rest is for activations.

    Raises:
        FormulaError: a number is impossible.
    """
    per_token = shape.bytes_per_token(kv_dtype)
    paged = paged_kv(context, block_size, per_token)
    weights = weight_bytes(shape.parameters, dtype_bytes(weight_dtype))
    left = memory * share - weights
    return Answer(
        per_token=per_token,
        stored=paged.stored_bytes,
        held=paged.bytes,
        blocks=paged.blocks,
        wasted_slots=paged.wasted_slots,
        weights=weights,
        memory_for_kv=left,
        fit=sequences_that_fit(left, context, block_size, per_token) if left > 0 else 0,
    )


def pool_estimate(bytes_per_token: float, num_kv_blocks: int, block_size: int) -> float:
    """Bytes of a pool by the formula: its blocks and the null block, all their slots."""
    return (num_kv_blocks + 1) * block_size * bytes_per_token


def size(count: float) -> str:
    """Bytes for people: 128 KiB, 22.5 KiB, 1.5 GiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= step:
            value = count / step
            return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.4g} {unit}"
    return f"{count:,.0f} bytes"
