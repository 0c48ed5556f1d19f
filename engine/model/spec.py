"""What a checkpoint's ``config.json`` says, as the numbers the transformer needs. Anything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and their ``model_type``."""
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How positions turn into angles.

    ``kind`` is "default", "linear" (positions divided by ``factor``) or "llama3" (long wavelengths divided by ``factor``,
    short ones kept, with a ramp between ``low_freq_factor`` and ``high_freq_factor`` turns over ``original_max_position``
    tokens).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of a decoder-only transformer. Lengths are tokens; ``head_dim`` is elements a head."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    """Context length the checkpoint was made for."""
    context_limit: int
    """Longest sequence that is computed exactly: ``max_position``, or the sliding window where that is shorter."""
    rope: RopeSpec
    tied: bool
    """Whether the checkpoint says that the output head is the embedding matrix."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share one K and V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_heads(self) -> int:
        """Heads that the fused projection makes: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads


def read_spec(config: Mapping[str, Any], name: str = "the model") -> ModelSpec:
    """Read a ``config.json``.

    Raises:
        ModelError: for an architecture or a feature that this transformer does not compute, named, with the way out.
    """
    architecture = _architecture(config, name)
    kind = ARCHITECTURES[architecture]
    _refuse_features(config, name)
    hidden, heads = _positive(config, "hidden_size", name), _positive(config, "num_attention_heads", name)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{name}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    head_dim = int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads))
    if head_dim % 2:
        raise ModelError(f"{name}: head_dim={head_dim} must be even for rotary positions")
    max_position = int(config.get("max_position_embeddings") or 2048)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size", name),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size", name),
        num_layers=_positive(config, "num_hidden_layers", name),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=max_position,
        context_limit=min(max_position, _window(config, kind) or max_position),
        rope=_rope(config, name, max_position),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and attention_bias),
        out_bias=kind in ("llama", "qwen3") and attention_bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _architecture(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures") or []
    if listed:
        architecture = str(listed[0])
    else:
        by_type = {model_type: arch for arch, model_type in ARCHITECTURES.items()}
        architecture = by_type.get(str(config.get("model_type")), f"model_type {config.get('model_type')!r}")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{name}: architecture {architecture} is not supported; choose a checkpoint of {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _refuse_features(config: Mapping[str, Any], name: str) -> None:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"{name}: quantised weights ({method}) are not supported; use the float16, bfloat16 or float32 checkpoint"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "logit_scale"):
        if config.get(key) is not None:
            raise ModelError(f"{name}: {key}={config[key]} is not supported; choose a checkpoint without it")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{name}: hidden_act={activation!r} is not supported; the transformer computes 'silu' only")
    partial = config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"{name}: partial_rotary_factor={partial} is not supported; only whole heads are rotated")


def _window(config: Mapping[str, Any], kind: str) -> int | None:
    """Width of the sliding window if one is in use. Shorter sequences than that attend to everything, as without one."""
    window = config.get("sliding_window")
    if not window or kind == "llama":
        return None
    layers = config.get("layer_types")
    used = bool(config.get("use_sliding_window", False)) if kind.startswith("qwen") else True
    if isinstance(layers, list):
        used = used and "sliding_attention" in layers
    return int(window) if used else None


def _rope(config: Mapping[str, Any], name: str, max_position: int) -> RopeSpec:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelError(f"{name}: rotary settings that differ between layers are not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(f"{name}: rope_type {kind!r} is not supported; choose a checkpoint with {', '.join(ROPE_KINDS)}")
    if (scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{name}: partial_rotary_factor={scaling['partial_rotary_factor']} is not supported")
    try:
        return RopeSpec(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            factor=float(scaling["factor"]) if kind != "default" else 1.0,
            low_freq_factor=float(scaling["low_freq_factor"]) if kind == "llama3" else 1.0,
            high_freq_factor=float(scaling["high_freq_factor"]) if kind == "llama3" else 4.0,
            original_max_position=int(scaling.get("original_max_position_embeddings") or max_position),
        )
    except KeyError as missing:
        raise ModelError(f"{name}: rope_type {kind!r} needs {missing} in config.json") from None


def _positive(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name}: config.json gives {key}={value!r}, but a whole number of at least 1 is needed")
    return value
