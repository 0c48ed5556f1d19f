"""Triton kernels of ``engine.model.state``: a step's inputs out of the requests' state, and what the step came to.

One program serves one row, or one chunk of a prompt, and has a few numbers to move: what would be a dozen launches of a few
elements each is one. Choosing a token reads the logits of a row once, cut into chunks so that a single row keeps many
processors busy, and the one chunk that a draw falls into again::

    logits of a row    [ 4,096 tokens | 4,096 | … | the rest ]     survey: one program a chunk: largest, its token, Σ weights
                                          ▲
    finish: one program a row ────────────┘ the chunk in which the running sum exceeds point · Σ; then the token in it
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
def weights_of(logits_ptr, column, top, temperature, VOCABULARY: tl.constexpr):
    """exp((logit − top) / temperature) of some tokens, float64; 0 beyond the vocabulary."""
    logits = tl.load(logits_ptr + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    anchor = tl.where(tl.abs(top) < float("inf"), top, 0.0)  # nothing but −∞ here: −∞ − −∞ would be NaN
    return tl.exp((logits - anchor) / temperature).to(tl.float64)


@triton.jit
def survey_kernel(
    logits_ptr, temperatures_ptr, numbers_ptr, tokens_ptr, logits_stride,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """One chunk of BLOCK tokens of one row's ``logits`` [rows, VOCABULARY]: what ``finish_kernel`` needs to know of it.

    ``numbers`` [rows, CHUNKS, 2] float64: the largest logit, and with DRAWS the sum of weights relative to it. ``tokens``
    [rows, CHUNKS, 2] int64: the largest one's token, and how many logits are NaN.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * logits_stride
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    strange = logits != logits
    top, place = tl.max(tl.where(strange, float("-inf"), logits), 0, return_indices=True)
    at = (row * CHUNKS + chunk) * 2
    tl.store(numbers_ptr + at, top.to(tl.float64))
    tl.store(tokens_ptr + at, (chunk * BLOCK + place).to(tl.int64))
    tl.store(tokens_ptr + at + 1, tl.sum(strange.to(tl.int64), 0))
    if DRAWS:
        temperature = tl.load(temperatures_ptr + row)
        tl.store(numbers_ptr + at + 1, tl.sum(weights_of(logits_ptr, column, top, temperature, VOCABULARY), 0))


@triton.jit
def finish_kernel(
    seats_ptr, logits_ptr, numbers_ptr, tokens_ptr, temperatures_ptr, points_ptr, last_ptr, outcome_ptr, state_tokens_ptr,
    counters_ptr, null_seat, logits_stride, last_stride, outcome_stride,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_2: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    SIZE_2: tl.constexpr, DRAWS: tl.constexpr, COMMIT: tl.constexpr,
):  # fmt: skip
    """One row: its token, and whether logits and last hidden state are finite; with COMMIT its seat keeps the token.

    A draw inverts the running sum of weights: first over chunks, then within the one chunk in which it exceeds ``point`` ·
    sum. ``last`` [rows, SIZE]; CHUNKS_2 and SIZE_2 are powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_2)
    at = (row * CHUNKS + chunk) * 2
    tops = tl.load(numbers_ptr + at, mask=chunk < CHUNKS, other=float("-inf")).to(tl.float32)
    best, place = tl.max(tops, 0, return_indices=True)
    token = tl.load(tokens_ptr + (row * CHUNKS + place) * 2)
    strange = tl.sum(tl.load(tokens_ptr + at + 1, mask=chunk < CHUNKS, other=0), 0)
    fine = (strange == 0) & (tl.abs(best) < float("inf"))
    if DRAWS:
        point, temperature = tl.load(points_ptr + row), tl.load(temperatures_ptr + row)
        if fine & (point >= 0):
            scales = tl.exp((tops - best) / temperature).to(tl.float64)
            sums = tl.load(numbers_ptr + at + 1, mask=chunk < CHUNKS, other=0.0) * scales
            running = tl.cumsum(sums, 0)
            target = point * tl.sum(sums, 0)
            # Rounding may leave a running sum short of a point next to 1: the last token that has any weight is taken then.
            hit = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), tl.max(tl.where(sums > 0, chunk, 0), 0))
            below = tl.sum(tl.where(chunk < hit, sums, 0.0), 0)
            scale = tl.sum(tl.where(chunk == hit, scales, 0.0), 0)
            top = tl.max(tl.where(chunk == hit, tops, float("-inf")), 0)
            offset = tl.arange(0, BLOCK)
            base = logits_ptr + row * logits_stride
            weights = weights_of(base, hit * BLOCK + offset, top, temperature, VOCABULARY) * scale
            passed = tl.sum((below + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            token = (hit * BLOCK + tl.minimum(passed, tl.max(tl.where(weights > 0, offset, 0), 0))).to(tl.int64)
    token = tl.where(fine, token, 0)
    column = tl.arange(0, SIZE_2)
    last = tl.load(last_ptr + row * last_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    fine = fine & (tl.sum(((last != last) | (tl.abs(last) == float("inf"))).to(tl.int32), 0) == 0)
    tl.store(outcome_ptr + row, fine.to(tl.int64))
    tl.store(outcome_ptr + outcome_stride + row, token)
    if COMMIT:
        seat = tl.load(seats_ptr + row)
        generated = tl.load(counters_ptr + seat * 4 + 1)
        tl.debug_barrier()  # every thread has read the number before one of them writes it
        tl.store(state_tokens_ptr + seat, token, mask=seat != null_seat)
        tl.store(counters_ptr + seat * 4 + 1, generated + 1, mask=seat != null_seat)


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
    (rows, vocabulary), size = logits.shape, last.shape[1]
    block = min(4096, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, block)
    numbers = torch.empty((rows, chunks, 2), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, chunks, 2), dtype=torch.int64, device=logits.device)
    temperatures, points = (numbers, numbers) if inputs is None else (inputs.temperatures, inputs.points)
    shape = {"VOCABULARY": vocabulary, "CHUNKS": chunks, "BLOCK": block, "DRAWS": inputs is not None}
    survey_kernel[(rows, chunks)](logits, temperatures, numbers, tokens, logits.stride(0), **shape, num_warps=4)
    finish_kernel[(rows,)](
        seats, logits, numbers, tokens, temperatures, points, last, outcome, state.tokens, state.counters,
        state.null, logits.stride(0), last.stride(0), outcome.stride(0),
        **shape, CHUNKS_2=triton.next_power_of_2(chunks), SIZE=size, SIZE_2=triton.next_power_of_2(size), COMMIT=commit,
        num_warps=8,
    )  # fmt: skip
