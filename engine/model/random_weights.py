"""A model of a given shape with random weights, made on the device itself: speeds depend on shapes, not on what was learned.

No file is read or written, so a shape of 16 GB is ready in seconds wherever there is memory for it.
"""

from __future__ import annotations

import torch

from engine.model.spec import ModelSpec
from engine.model.transformer import Transformer
from engine.model.weights import LayerWeights, ModelWeights


class _Random:
    """Makes tensors one after another; the same ones for the same seed, device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        # The "meta" device holds shapes without numbers, and has no generator.
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        """A matrix that turns inputs of size 1 into outputs of size ``spread``."""
        matrix = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
        if self._generator is None:
            return matrix
        return matrix.normal_(0.0, spread / columns**0.5, generator=self._generator)

    def constant(self, length: int, value: float) -> torch.Tensor:
        return torch.full((length,), value, device=self.device, dtype=self.dtype)


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ModelWeights:
    """Random weights of a shape; norms are 1 and biases 0. Activations and logits stay of size 1, whatever the depth.

    Args:
        spec: the shape.
        device: where to make them; "meta" for shapes without numbers.
        dtype: of all tensors.
        seed: the same seed gives the same weights on the same kind of device.
    """
    make = _Random(device, dtype, seed)
    embedding = make.normal(spec.vocab_size, spec.hidden_size)
    return ModelWeights(
        embedding=embedding,
        layers=[_random_layer(make, spec) for _ in range(spec.num_layers)],
        final_norm=make.constant(spec.hidden_size, 1.0),
        head=embedding if spec.tied else make.normal(spec.vocab_size, spec.hidden_size),
    )


def _random_layer(make: _Random, spec: ModelSpec) -> LayerWeights:
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    fused = spec.qkv_heads * spec.head_dim
    # Each layer adds twice to the residual; the sum of all of them shall stay of size 1.
    added = (2 * spec.num_layers) ** -0.5
    return LayerWeights(
        input_norm=make.constant(hidden, 1.0),
        qkv=make.normal(fused, hidden),
        out=make.normal(hidden, heads, added),
        post_norm=make.constant(hidden, 1.0),
        gate_up=make.normal(2 * inner, hidden),
        down=make.normal(hidden, inner, added),
        qkv_bias=make.constant(fused, 0.0) if spec.qkv_bias else None,
        out_bias=make.constant(hidden, 0.0) if spec.out_bias else None,
        gate_up_bias=make.constant(2 * inner, 0.0) if spec.mlp_bias else None,
        down_bias=make.constant(hidden, 0.0) if spec.mlp_bias else None,
        q_norm=make.constant(spec.head_dim, 1.0) if spec.qk_norm else None,
        k_norm=make.constant(spec.head_dim, 1.0) if spec.qk_norm else None,
    )


def random_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A transformer of that shape with random weights, ready for a ``ModelRunner``."""
    return Transformer(spec, random_weights(spec, device, dtype, seed))
