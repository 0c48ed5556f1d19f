"""From a checkpoint's named tensors to the fused matrices the transformer multiplies by."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from engine.model.checkpoint import Checkpoint
from engine.model.errors import ModelError
from engine.model.spec import ModelSpec

IGNORED = re.compile(r"(rotary_emb\.inv_freq|attention\.masked_bias)$")


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; the fused ones stack their parts along the output: q, k, v and gate, up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """All weights of a model on one device in one dtype. A tied head is the embedding itself, the same tensor."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return self.head is self.embedding

    @property
    def layer_parameters(self) -> int:
        """Elements of all layers and the final norm: what every token goes through."""
        fields = LayerWeights.__slots__
        tensors = [getattr(layer, name) for layer in self.layers for name in fields]
        return self.final_norm.numel() + sum(tensor.numel() for tensor in tensors if tensor is not None)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied head is counted once."""
        return self.layer_parameters + self.embedding.numel() + (0 if self.tied else self.head.numel())


class _Source:
    """Named tensors that are taken one by one; what is left over afterwards was not understood."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._name = checkpoint.name
        self._tensors = dict(checkpoint.tensors)
        self._device = device
        self._dtype = dtype

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def raw(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.pop(key, None)
        if tensor is None:
            raise ModelError(
                f"model={self._name!r}: tensor {key} is missing; the checkpoint and its config.json don't fit together"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"model={self._name!r}: tensor {key} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise ModelError(
                f"model={self._name!r}: tensor {key} is {tensor.dtype}; only 16- and 32-bit floats are supported"
            )
        return tensor

    def take(self, key: str, *shape: int) -> torch.Tensor:
        return self.raw(key, shape).to(self._device, self._dtype)

    def fuse(self, template: str, parts: dict[str, int], *rest: int) -> torch.Tensor:
        return torch.cat(
            [self.raw(template % part, (rows, *rest)).to(self._device, self._dtype) for part, rows in parts.items()]
        )

    def finish(self) -> None:
        left = sorted(key for key in self._tensors if not IGNORED.search(key))
        if left:
            raise ModelError(
                f"model={self._name!r}: {len(left)} tensors have no place in its architecture (first: {left[0]}); "
                "the checkpoint and its config.json don't fit together"
            )


def load_weights(checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Bring a checkpoint's tensors to ``device`` and ``dtype``, fused. Tensors that already fit stay memory-mapped.

    Raises:
        ModelError: a tensor is missing, superfluous, or of another shape or type than config.json says.
    """
    source = _Source(checkpoint, device, dtype)
    embedding, head = _embedding_and_head(source, spec)
    final_norm = source.take("model.norm.weight", spec.hidden_size)
    layers = [_load_layer(source, f"model.layers.{index}", spec) for index in range(spec.num_layers)]
    source.finish()
    return ModelWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def _embedding_and_head(source: _Source, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A tied checkpoint may bring its matrix under either name, or both; two that differ stay two."""
    shape = (spec.vocab_size, spec.hidden_size)
    embed_key, head_key = "model.embed_tokens.weight", "lm_head.weight"
    if spec.tied and embed_key not in source and head_key in source:
        embedding = source.take(head_key, *shape)
        return embedding, embedding
    embedding = source.take(embed_key, *shape)
    if spec.tied and head_key not in source:
        return embedding, embedding
    head = source.take(head_key, *shape)
    return embedding, embedding if spec.tied and torch.equal(embedding, head) else head


def _load_layer(source: _Source, prefix: str, spec: ModelSpec) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=source.fuse(f"{attention}.%s.weight", qkv, hidden),
        out=source.take(f"{attention}.o_proj.weight", hidden, q_rows),
        post_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=source.fuse(f"{mlp}.%s.weight", gate_up, hidden),
        down=source.take(f"{mlp}.down_proj.weight", hidden, inner),
        qkv_bias=source.fuse(f"{attention}.%s.bias", qkv) if spec.qkv_bias else None,
        out_bias=source.take(f"{attention}.o_proj.bias", hidden) if spec.out_bias else None,
        gate_up_bias=source.fuse(f"{mlp}.%s.bias", gate_up) if spec.mlp_bias else None,
        down_bias=source.take(f"{mlp}.down_proj.bias", hidden) if spec.mlp_bias else None,
        q_norm=source.take(f"{attention}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=source.take(f"{attention}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
    )
