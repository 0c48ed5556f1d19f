"""Triton kernels of ``engine.model.fused``. One program reads a row once, keeps it in registers, and writes it once."""

# Triton reads the annotations of a kernel: only compile-time constants may have one.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, out_ptr, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Norm of one row of SIZE elements; with ADD, ``added`` [rows, SIZE] is added to ``x`` first, and the sum stored in x.

    Rows of ``x`` are ``x_stride`` apart; ``out`` is [rows, SIZE].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < SIZE
    at = x_ptr + row * x_stride + column
    x = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    number = x_ptr.dtype.element_ty
    if ADD:
        x += tl.load(added_ptr + row * SIZE + column, mask=exists, other=0.0).to(tl.float32)
        x = x.to(number)
        tl.store(at, x, mask=exists)
        x = x.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded where the plain version rounds: before the weight and after it.
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (scaled.to(number).to(tl.float32) * weight).to(number), mask=exists)


@triton.jit
def head_norm_kernel(
    x_ptr,
    query_weight_ptr,
    key_weight_ptr,
    x_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Norm of BLOCK_H heads of one token, in place: each of SIZE elements, the first NUM_Q queries, the next NUM_KV keys.

    ``x`` is [tokens, NUM_Q + NUM_KV or more, SIZE]; a token's heads follow each other. WIDTH is SIZE's power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, WIDTH)
    real = column < SIZE
    exists = (head < NUM_Q + NUM_KV)[:, None] & real[None, :]
    at = x_ptr + token * x_stride + head[:, None] * SIZE + column[None, :]
    x = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    query_weight = tl.load(query_weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    weight = tl.where((head < NUM_Q)[:, None], query_weight[None, :], key_weight[None, :])
    number = x_ptr.dtype.element_ty
    tl.store(at, (scaled.to(number).to(tl.float32) * weight).to(number), mask=exists)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of silu(gate) · up for one row: ``x`` [rows, 2 · SIZE], gate then up; ``out`` [rows, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    at = x_ptr + row * x_stride + column
    gate = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=exists, other=0.0).to(tl.float32)
    number = x_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(number).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (silu * up).to(number), mask=exists)
