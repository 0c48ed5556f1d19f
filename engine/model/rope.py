"""Rotary position embedding: each pair of a head's elements turns by an angle proportional to the token's position."""

from __future__ import annotations

import math

import torch

from engine.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians by which one position turns each of the ``head_dim / 2`` pairs: theta^(−2i/d), scaled; float32.

    "linear" divides all by ``factor``. "llama3" (Llama 3.1) divides those that turn less than ``low_freq_factor`` times
    within the original context, keeps those that turn more than ``high_freq_factor`` times, and interpolates in between.
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * inverse / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return inverse * (keep + (1.0 - keep) / rope.factor)
    return inverse


def rope_tables(rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of positions 0 … ``positions`` − 1, each [positions, head_dim].

    Element i pairs with element i + d/2. The sine's first half is negated, so that a rotation is
    ``x * cos + swap_halves(x) * sin``.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn ``x`` [tokens, heads, head_dim] in place; cos and sin are [tokens, 1, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
