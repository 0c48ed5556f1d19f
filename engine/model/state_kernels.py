"""Triton kernels of ``engine.model.state``: a step's inputs out of the requests' state, and what the step came to.

One program serves one row (or one chunk) and has a few numbers to move, so each runs in a single warp. What would be a
dozen launches of a few elements each is one.
"""

# Triton reads the annotations of a kernel: only compile-time constants may have one.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from engine.model.state import DecodeInputs, RequestState

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
"""SplitMix64, as in ``engine.model.sampler.uniform``."""


@triton.jit
def uniform_of(key, number):
    """Output ``number`` of the stream that starts at ``key``, in [0, 1) with 53 bits."""
    z = key.to(tl.uint64) + (number.to(tl.uint64) + 1) * GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def decode_inputs_kernel(
    seats_ptr, state_tokens_ptr, counters_ptr, numbers_ptr, tables_ptr, token_ids_ptr, positions_ptr, slots_ptr,
    tiles_ptr, temperatures_ptr, points_ptr, null_seat,
    WIDTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row of a decode: its token, position, slot, tile, temperature and point; its seat's length grows by one.

    Columns of ``counters``: length, generated, key, writes; of ``numbers``: the temperature first.
    """
    row = tl.program_id(0)
    seat = tl.load(seats_ptr + row)
    length = tl.load(counters_ptr + seat * 4)
    generated = tl.load(counters_ptr + seat * 4 + 1)
    key = tl.load(counters_ptr + seat * 4 + 2)
    writes = tl.load(counters_ptr + seat * 4 + 3) != 0
    block = tl.load(tables_ptr + seat * WIDTH + length // BLOCK_SIZE).to(tl.int64)
    token = tl.load(state_tokens_ptr + seat)
    temperature = tl.load(numbers_ptr + seat * FIELDS)
    warm = temperature > 0
    tl.debug_barrier()  # every thread has read the length before one of them writes it
    tl.store(counters_ptr + seat * 4, length + 1, mask=seat != null_seat)
    tl.store(token_ids_ptr + row, tl.where(writes, token, 0))
    tl.store(positions_ptr + row, length)
    tl.store(slots_ptr + row, tl.where(writes, block * BLOCK_SIZE + length % BLOCK_SIZE, -1))
    tl.store(tiles_ptr + row * 4, row)
    tl.store(tiles_ptr + row * 4 + 1, 1)
    tl.store(tiles_ptr + row * 4 + 2, length.to(tl.int32))
    tl.store(tiles_ptr + row * 4 + 3, seat.to(tl.int32))
    tl.store(temperatures_ptr + row, tl.where(warm, temperature, 1.0).to(tl.float32))
    tl.store(points_ptr + row, tl.where(warm, uniform_of(key, generated), -1.0))


@triton.jit
def chunk_inputs_kernel(
    spans_ptr, ids_ptr, state_tokens_ptr, counters_ptr, tables_ptr, token_ids_ptr, positions_ptr, slots_ptr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One span of a step: token ids, positions and slots of its rows; its seat's length grows by their number."""
    span = tl.program_id(0)
    start = tl.load(spans_ptr + span * 3)
    count = tl.load(spans_ptr + span * 3 + 1)
    seat = tl.load(spans_ptr + span * 3 + 2)
    length = tl.load(counters_ptr + seat * 4)
    writes = tl.load(counters_ptr + seat * 4 + 3) != 0
    newest = tl.load(state_tokens_ptr + seat)
    tl.debug_barrier()  # every thread has read the length before one of them writes it
    tl.store(counters_ptr + seat * 4, length + count)
    for base in range(0, count, BLOCK):
        offset = base + tl.arange(0, BLOCK)
        exists = offset < count
        position = length + offset
        token = tl.load(ids_ptr + start + offset, mask=exists, other=0)
        block = tl.load(tables_ptr + seat * WIDTH + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = tl.where(writes, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_ids_ptr + start + offset, tl.where(token < 0, newest, token), mask=exists)
        tl.store(positions_ptr + start + offset, position, mask=exists)
        tl.store(slots_ptr + start + offset, slot, mask=exists)


@triton.jit
def finish_kernel(
    seats_ptr, logits_ptr, temperatures_ptr, points_ptr, last_ptr, outcome_ptr, state_tokens_ptr, counters_ptr,
    null_seat, logits_stride, last_stride, outcome_stride,
    VOCABULARY: tl.constexpr, SIZE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, DRAWS: tl.constexpr,
    COMMIT: tl.constexpr,
):  # fmt: skip
    """One row: its token, and whether logits and last hidden state are finite; with COMMIT its seat keeps the token.

    ``logits`` [rows, VOCABULARY], walked along BLOCK_V at a time: for the largest; with DRAWS again for the sum of weights,
    and once more for the first token at which the running sum exceeds ``point`` · sum. ``last`` [rows, SIZE].
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * logits_stride
    best, token, strange = float("-inf"), tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for base in range(0, VOCABULARY, BLOCK_V):
        column = base + tl.arange(0, BLOCK_V)
        logits = tl.load(logits_ptr + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
        strange += tl.sum((logits != logits).to(tl.int32), 0)
        top, place = tl.max(logits, 0, return_indices=True)
        token = tl.where(top > best, (base + place).to(tl.int64), token)
        best = tl.maximum(top, best)
    fine = (strange == 0) & (tl.abs(best) < float("inf"))
    if DRAWS:
        point, temperature = tl.load(points_ptr + row), tl.load(temperatures_ptr + row)
        if fine & (point >= 0):
            total = tl.full([], 0, tl.float64)
            for base in range(0, VOCABULARY, BLOCK_V):
                total += tl.sum(weights_of(logits_ptr, base, best, temperature, VOCABULARY, BLOCK_V), 0)
            target, below, passed = point * total, tl.full([], 0, tl.float64), tl.full([], 0, tl.int64)
            final = tl.full([], 0, tl.int32)
            for base in range(0, VOCABULARY, BLOCK_V):
                column = base + tl.arange(0, BLOCK_V)
                weights = weights_of(logits_ptr, base, best, temperature, VOCABULARY, BLOCK_V)
                reached = below + tl.cumsum(weights, 0)
                passed += tl.sum(((reached <= target) & (column < VOCABULARY)).to(tl.int64), 0)
                final = tl.maximum(final, tl.max(tl.where(weights > 0, column, 0), 0))
                below += tl.sum(weights, 0)
            token = tl.minimum(passed, final.to(tl.int64))  # rounding may leave the sum short of a point next to 1
    token = tl.where(fine, token, 0)
    column = tl.arange(0, BLOCK)
    last = tl.load(last_ptr + row.to(tl.int64) * last_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    fine = fine & (tl.sum(((last != last) | (tl.abs(last) == float("inf"))).to(tl.int32), 0) == 0)
    tl.store(outcome_ptr + row, fine.to(tl.int64))
    tl.store(outcome_ptr + outcome_stride + row, token)
    if COMMIT:
        seat = tl.load(seats_ptr + row)
        generated = tl.load(counters_ptr + seat * 4 + 1)
        tl.debug_barrier()
        tl.store(state_tokens_ptr + seat, token, mask=seat != null_seat)
        tl.store(counters_ptr + seat * 4 + 1, generated + 1, mask=seat != null_seat)


@triton.jit
def weights_of(logits_ptr, base, best, temperature, VOCABULARY: tl.constexpr, BLOCK_V: tl.constexpr):
    """Probabilities up to a factor, the largest 1, of BLOCK_V tokens from ``base`` on; float64, 0 beyond the vocabulary."""
    column = base + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    return tl.exp((logits - best) / temperature).to(tl.float64)


def launch_decode_inputs(state: RequestState, seats: torch.Tensor, into: DecodeInputs) -> None:
    """See ``RequestState.decode_inputs``."""
    decode_inputs_kernel[(seats.shape[0],)](
        seats, state.tokens, state.counters, state.numbers, state.tables, into.token_ids, into.positions, into.slots,
        into.tiles, into.temperatures, into.points, state.null,
        WIDTH=state.width, FIELDS=state.numbers.shape[1], BLOCK_SIZE=state.block_size, num_warps=1,
    )  # fmt: skip


def launch_chunk_inputs(
    state: RequestState, spans: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``RequestState.chunk_inputs``."""
    ids, positions, slots = (torch.empty_like(token_ids) for _ in range(3))
    chunk_inputs_kernel[(spans.shape[0],)](
        spans, token_ids, state.tokens, state.counters, state.tables, ids, positions, slots,
        WIDTH=state.width, BLOCK_SIZE=state.block_size, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return ids, positions, slots


def launch_finish(
    state: RequestState,
    seats: torch.Tensor,
    logits: torch.Tensor,
    inputs: DecodeInputs | None,
    last: torch.Tensor,
    outcome: torch.Tensor,
    commit: bool,
) -> None:
    """See ``RequestState.finish_decodes``."""
    vocabulary, size = logits.shape[1], last.shape[1]
    draws = (seats, seats) if inputs is None else (inputs.temperatures, inputs.points)
    finish_kernel[(seats.shape[0],)](
        seats, logits, *draws, last, outcome, state.tokens, state.counters,
        state.null, logits.stride(0), last.stride(0), outcome.stride(0),
        VOCABULARY=vocabulary, SIZE=size, BLOCK_V=min(4096, triton.next_power_of_2(vocabulary)),
        BLOCK=triton.next_power_of_2(size), DRAWS=inputs is not None, COMMIT=commit, num_warps=8,
    )  # fmt: skip
