"""Sizes and ceilings from shapes: estimates, to be shown beside what the engine measures and labelled as such.

Units: bytes, tokens, floating point operations (a multiply-add counts as two), seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

DTYPE_BYTES: dict[str, float] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip
"""Bytes an element, without the scales that quantised formats add."""


class FormulaError(ValueError):
    """A shape or number that can't be; the message names the field, the value and the limit."""


# Shapes -------------------------------------------------------------------------------------------------------------------


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a Llama-like decoder that decide its memory and its work."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    """Input embedding and output matrix are one."""
    attention_bias: bool = False
    """Q, K and V projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Q and K are normalised per head (Qwen3)."""
    max_position: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__[:7]:
            _require(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise FormulaError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )

    @property
    def attention_kind(self) -> Literal["MHA", "GQA", "MQA"]:
        """Every query head has its own K and V (MHA), groups share one (GQA), or all do (MQA)."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices that every token is multiplied with, all layers; norms and biases not included."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All elements: embedding, layers with norms and biases, last norm, output matrix."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        small = 2 * self.hidden_size
        small += (query + 2 * kv) if self.attention_bias else 0
        small += 2 * self.head_dim if self.qk_norm else 0
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layer_parameters + self.num_layers * small + self.hidden_size + vocabulary


_KV_COMPRESSED = ("kv_lora_rank", "linear_num_key_heads")
_QWEN_BIAS, _QWEN_NORM = ("qwen2",), ("qwen3",)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Read a checkpoint's config.json (Llama, Mistral, Qwen2, Qwen3 and alike), as parsed JSON.

    Raises:
        FormulaError: a field is missing or no whole number, or the model stores something else than K and V per head.
    """
    for field in _KV_COMPRESSED:
        if config.get(field):
            raise FormulaError(
                f"{field} in the configuration: this model does not store plain K and V, the formula is not its"
            )
    heads = _field(config, "num_attention_heads")
    hidden = _field(config, "hidden_size")
    kind = str(config.get("model_type", ""))
    return ModelShape(
        num_layers=_field(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_field(config, "num_key_value_heads", heads),
        head_dim=_field(config, "head_dim", hidden // heads),
        intermediate_size=_field(config, "intermediate_size"),
        vocab_size=_field(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", kind in _QWEN_BIAS)),
        qk_norm=kind in _QWEN_NORM,
        max_position=_field(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
    )


def _field(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise FormulaError(f"{name} is missing in the configuration: paste the whole config.json of a decoder model")
        return default
    _require(name, value, 1)
    return int(value)


def _require(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FormulaError(f"{name}={str(value)[:40]!r} must be a whole number of at least {least}")
    if value < least:
        raise FormulaError(f"{name}={value} must be at least {least}")


def dtype_bytes(dtype: str) -> float:
    """Bytes an element of a named type.

    Raises:
        FormulaError: for a name that is not in ``DTYPE_BYTES``.
    """
    if dtype not in DTYPE_BYTES:
        raise FormulaError(f"dtype={dtype!r} is not known: choose one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


# Memory -------------------------------------------------------------------------------------------------------------------


def kv_bytes(
    *, num_layers: int, num_kv_heads: int, head_dim: int, tokens: int, sequences: int = 1, element_bytes: float = 2
) -> float:
    """Bytes of K and V: 2 · L · H_kv · D · S · B · P.

    2 for K and V; L layers; H_kv KV heads of dimension D; S tokens of each of B sequences; P bytes an element. Example: 32
    layers, 8 KV heads of 128, 4,096 tokens, 1 sequence, BF16 → 512 MiB. Before paging, alignment, sharing and what the
    runtime adds. Source: each token's K and V vectors are kept per layer and KV head (Ainslie et al., GQA, arXiv 2305.13245;
    Kwon et al., PagedAttention, arXiv 2309.06180).
    """
    for name, value in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        _require(name, value, 1)
    _require("tokens", tokens, 0)
    _require("sequences", sequences, 0)
    return 2 * num_layers * num_kv_heads * head_dim * tokens * sequences * element_bytes


def kv_bytes_per_token(shape: ModelShape, element_bytes: float = 2) -> float:
    """Bytes of K and V that one more token of one sequence costs."""
    return kv_bytes(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tokens=1,
        element_bytes=element_bytes,
    )


class PagedKV(msgspec.Struct, frozen=True, kw_only=True):
    """What paging makes of the stored tokens of equal sequences."""

    blocks: int
    slots: int
    """Token slots of these blocks."""
    wasted_slots: int
    """Slots of the last, partly filled blocks: at most block_size − 1 a sequence."""
    waste: float
    """Share of the slots that is wasted, 0 to 1."""
    bytes: float
    """Memory of the blocks."""
    stored_bytes: float
    """What the formula without paging says."""


def paged_kv(tokens: int, block_size: int, bytes_per_token: float, sequences: int = 1) -> PagedKV:
    """Blocks, slots and bytes for ``sequences`` sequences with ``tokens`` stored tokens each; ⌈S / block_size⌉ blocks each.

    A request that ran to its end stores prompt + output − 1 tokens: the last sampled token is never fed back. Source: Kwon
    et al., PagedAttention, arXiv 2309.06180 (waste only in the last block).
    """
    _require("tokens", tokens, 0)
    _require("block_size", block_size, 1)
    _require("sequences", sequences, 0)
    blocks = sequences * -(-tokens // block_size)
    slots, stored = blocks * block_size, sequences * tokens
    return PagedKV(
        blocks=blocks,
        slots=slots,
        wasted_slots=slots - stored,
        waste=(slots - stored) / slots if slots else 0.0,
        bytes=slots * bytes_per_token,
        stored_bytes=stored * bytes_per_token,
    )


def sequences_that_fit(memory: float, tokens: int, block_size: int, bytes_per_token: float) -> int:
    """How many sequences of ``tokens`` stored tokens whole blocks in ``memory`` bytes can hold at once (nothing shared).

    Raises:
        FormulaError: for a size that is not above 0.
    """
    _require("tokens", tokens, 1)
    _require("block_size", block_size, 1)
    if not bytes_per_token > 0 or not math.isfinite(memory):
        raise FormulaError(f"bytes_per_token={bytes_per_token} must be above 0 and memory={memory} a number")
    blocks = max(0, int(memory // (block_size * bytes_per_token)))
    return blocks // -(-tokens // block_size)


def weight_bytes(parameters: int, element_bytes: float = 2) -> float:
    """Bytes of the weights: parameters · bytes an element. Quantised formats add scales (Q4_1: 5 bits an element in all)."""
    _require("parameters", parameters, 0)
    return parameters * element_bytes


# Work of one step ---------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What one request computes in a step: ``num_tokens`` positions after ``context`` stored ones; whether it samples."""

    num_tokens: int
    context: int
    samples: bool = True


def attention_pairs(num_tokens: int, context: int) -> int:
    """(query, key) pairs under a causal mask: Σ (context + i) for i = 1 … n = n·context + n(n + 1)/2."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


def step_flops(shape: ModelShape, rows: Iterable[Row]) -> float:
    """Operations of one forward pass over a packed batch, matrix products only.

    Two for each weight element a token meets (layers; the output matrix only for rows that sample), and 4 · heads · head_dim
    for each (query, key) pair and layer (QKᵀ and PV, two each). Norms, RoPE and softmax are left out: they are small.
    Source: Kaplan et al., arXiv 2001.08361, section 2.1; Hoffmann et al., arXiv 2203.15556, appendix F.
    """
    tokens = sampling = pairs = 0
    for row in rows:
        tokens += row.num_tokens
        sampling += row.samples
        pairs += attention_pairs(row.num_tokens, row.context)
    linear = 2 * shape.layer_parameters * tokens
    logits = 2 * shape.hidden_size * shape.vocab_size * sampling
    attention = 4 * shape.num_heads * shape.head_dim * pairs * shape.num_layers
    return float(linear + logits + attention)


def step_bytes(shape: ModelShape, rows: Iterable[Row], weight_element: float = 2, kv_element: float = 2) -> float:
    """Bytes that one forward pass must at least move: weights once, K and V of every sequence read once, new ones written.

    Activations are left out, and of the embedding only the rows looked up count. Source: Pope et al., arXiv 2211.05102.
    """
    tokens = read = 0
    sampling = False
    for row in rows:
        tokens += row.num_tokens
        read += row.context + row.num_tokens
        sampling = sampling or row.samples
    if not tokens:
        return 0.0
    weights = shape.layer_parameters + tokens * shape.hidden_size
    weights += shape.hidden_size * shape.vocab_size if sampling else 0
    return weights * weight_element + (read + tokens) * kv_bytes_per_token(shape, kv_element)


# Roofline -----------------------------------------------------------------------------------------------------------------


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """The least time some work can take, and which limit says so."""

    compute_time: float
    """Operations over peak."""
    memory_time: float
    """Bytes over bandwidth."""
    intensity: float | None
    """Operations a byte of this work; None without bytes."""
    ridge: float
    """Operations a byte at which both limits are equal: below it memory binds."""
    binds: Literal["compute", "memory", "neither"]

    @property
    def time(self) -> float:
        """Seconds; the longer of the two."""
        return max(self.compute_time, self.memory_time)

    def share(self, measured: float) -> float | None:
        """Which share of the ceiling a measured time reaches, 0 to 1 (above: the count or the ceiling is wrong)."""
        return self.time / measured if measured > 0 else None


def roofline(flops: float, moved_bytes: float, peak_flops: float, bandwidth: float) -> Roofline:
    """Work against a device's peak (operations/s) and memory bandwidth (bytes/s).

    Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.

    Raises:
        FormulaError: for a ceiling that is not above 0, or work below 0.
    """
    for name, value in (("peak_flops", peak_flops), ("bandwidth", bandwidth)):
        if not 0 < value < math.inf:
            raise FormulaError(f"{name}={value} must be above 0")
    for name, value in (("flops", flops), ("moved_bytes", moved_bytes)):
        if not 0 <= value < math.inf:
            raise FormulaError(f"{name}={value} must be at least 0")
    compute, memory = flops / peak_flops, moved_bytes / bandwidth
    return Roofline(
        compute_time=compute,
        memory_time=memory,
        intensity=flops / moved_bytes if moved_bytes > 0 else None,
        ridge=peak_flops / bandwidth,
        binds="neither" if compute == memory else "compute" if compute > memory else "memory",
    )


def latency_from_parts(ttft: float, tpot: float, output_tokens: int) -> float:
    """E2E ≈ TTFT + (N − 1) · TPOT, seconds. Example: 1.0 s, 40 ms, 101 tokens → 5.0 s."""
    _require("output_tokens", output_tokens, 1)
    return ttft + (output_tokens - 1) * tpot


class Datasheet(msgspec.Struct, frozen=True, kw_only=True):
    """What a maker's datasheet says of a device: ceilings, not measurements."""

    name: str
    bf16_flops: float
    """Dense matrix operations/s, no sparsity."""
    bandwidth: float
    """Bytes/s."""
    memory: float
    """Bytes."""


DATASHEETS: tuple[Datasheet, ...] = (
    Datasheet(name="NVIDIA H200 SXM", bf16_flops=989e12, bandwidth=4.8e12, memory=141e9),
    Datasheet(name="NVIDIA H100 SXM", bf16_flops=989e12, bandwidth=3.35e12, memory=80e9),
    Datasheet(name="NVIDIA A100 SXM 80 GB", bf16_flops=312e12, bandwidth=2.039e12, memory=80e9),
    Datasheet(name="NVIDIA L4", bf16_flops=121e12, bandwidth=0.3e12, memory=24e9),
)
"""NVIDIA's datasheets; matrix rates without sparsity."""
