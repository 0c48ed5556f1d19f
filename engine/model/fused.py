"""Elementwise work between two matrix products, in one kernel each where there is a GPU.

Written plainly, a norm is six kernels that each read and write the whole activation, and an activation function two. At
batch 1 each costs a launch (a few µs) to move a few kB: a layer of a small model would spend most of its time starting
kernels. Every function here has two ways with one meaning: ``kernels=True`` is a Triton kernel (CUDA tensors), False is
plain torch. Both round to the model's number format at the same places, so that they differ in the last bit at most.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

HEADS_A_PROGRAM = 8
"""Heads that one program norms: with 128 numbers of 2 bytes in a head, each thread of 4 warps reads 16 bytes at once."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: bool) -> torch.Tensor:
    """Root-mean-square norm, x / sqrt(mean(x²) + eps) · weight, over the last dimension, computed in float32.

    Args:
        x: [T, n], each row contiguous; a slice of wider rows is fine. Without ``kernels`` any number of dimensions.
        weight: [n].
        eps: keeps the square root away from 0.
        kernels: use the Triton kernel.

    Returns:
        A new contiguous tensor shaped like ``x``.
    """
    if kernels:
        return _launch_norm(x, None, weight, eps)
    if x.dtype == torch.float32:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_() * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))).to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, kernels: bool) -> torch.Tensor:
    """Add ``added`` to the residual ``x`` in place and return the norm of the sum; see ``rms_norm``.

    Args:
        x: [T, n], changed in place.
        added: [T, n], contiguous.
        weight: [n].
        eps: keeps the square root away from 0.
        kernels: use the Triton kernel.
    """
    if kernels:
        return _launch_norm(x, added, weight, eps)
    return rms_norm(x.add_(added), weight, eps, kernels=False)


def norm_heads(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, eps: float, kernels: bool
) -> None:
    """Norm each query head and each key head in place (Qwen3 does so); values stay as they are. See ``rms_norm``.

    Args:
        qkv: [T, H + 2 · Hkv, D], queries, keys, values; a token's heads follow each other without gaps.
        query_weight: [D], for all query heads.
        key_weight: [D], for all key heads.
        num_heads: H.
        eps: keeps the square root away from 0.
        kernels: use the Triton kernel, one launch for both.
    """
    if kernels:
        _launch_head_norm(qkv, query_weight, key_weight, num_heads, eps)
        return
    queries, keys, _ = qkv.split([num_heads, *[(qkv.shape[1] - num_heads) // 2] * 2], dim=1)
    queries.copy_(rms_norm(queries, query_weight, eps, kernels=False))
    keys.copy_(rms_norm(keys, key_weight, eps, kernels=False))


def silu_mul(gate_up: torch.Tensor, kernels: bool) -> torch.Tensor:
    """silu(gate) · up for ``gate_up`` [T, 2 · n], gate first; returns [T, n]."""
    if kernels:
        return _launch_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _launch_norm(x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from engine.model.fused_kernels import rms_norm_kernel

    rows, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_kernel[(rows,)](
        x, x if added is None else added, weight, out, x.stride(0), eps,
        SIZE=size, BLOCK=_power_of_two(size), ADD=added is not None, num_warps=min(16, max(1, _power_of_two(size) // 512)),
    )  # fmt: skip
    return out


def _launch_head_norm(
    qkv: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, eps: float
) -> None:
    from engine.model.fused_kernels import head_norm_kernel

    tokens, heads, size = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    normed = num_heads + num_kv_heads
    block = min(HEADS_A_PROGRAM, _power_of_two(normed))
    head_norm_kernel[(tokens, -(-normed // block))](
        qkv,
        query_weight,
        key_weight,
        qkv.stride(0),
        eps,
        NUM_Q=num_heads,
        NUM_KV=num_kv_heads,
        SIZE=size,
        WIDTH=_power_of_two(size),
        BLOCK_H=block,
        num_warps=min(4, block),
    )


def _launch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    from engine.model.fused_kernels import silu_mul_kernel

    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, _power_of_two(size))
    silu_mul_kernel[(tokens, -(-size // block))](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
