"""Three Triton kernels: store K and V, attend over paged K and V, merge what was split.

A kernel is written for one *program*; a grid of them runs at once. Read each as "what one program does".

**Store** (``store_kernel``): one program a token. It turns the token's query and key heads by their position, leaves the
queries in place, and sends keys and values where the block table wants them::

    one token of the packed batch     [ q0 q1 q2 | k | v ]          3 query heads share one KV head
                                        ↻  ↻  ↻    ↻   ·            ↻ rotated, · as it is
                                        in place   └─┬─┘
    pool                              … [k v] [k v] [■ ■] [k v] …   slot 30 = block 7 · 4 + offset 2;  slot −1: nowhere

**Attend** (``attend_kernel``): one program a (tile, KV head, split). A *tile* is a few query tokens of one sequence, times
the G heads that share a KV head: those G read K and V once, not G times. Rows are laid out token by token, head by head,
whatever G is; with G = 3 a tile of 16 rows holds 5 tokens and leaves one row idle::

    row      0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 | 12 13 14 | 15
    token    0  0  0 | 1  1  1 | 2  2  2 | 3  3  3 |  4  4  4 |  –
    head     0  1  2 | 0  1  2 | …                               idle

A decode is a tile with one token. A prefill chunk is as many tiles as it takes. Nothing else tells them apart, so any mix
is one list of tiles. The program walks along the keys, BLOCK_N at a time, looking each one's block up in the table, and
keeps for each row only a running maximum m, a running sum l and a running output (online softmax)::

    keys     0 ──────────────▶ first_position + num_tokens           scores [BLOCK_M, BLOCK_N], never stored as a whole
             [ tile ][ tile ][ tile ][ ti        first row sees keys up to its own position: masked above the diagonal
    new m  = max(m, scores)      l = l · 2^(m − new m) + Σ 2^(scores − new m)      out likewise      (base 2 is cheaper)

**Split and merge** (``merge_kernel``): a decode over a long context has one tile and so keeps one processor busy, while a
hundred idle. So the keys are cut into splits, one program each; each stores its softmax over its own part and the part's
log-sum-exp, and the merge weighs them by it::

    keys of one sequence   |── split 0 ──|── split 1 ──|── split 2 ──|–| split 3 is empty: −∞, weight 0, output never read
    out = Σ 2^(lse_s − max) · out_s / Σ 2^(lse_s − max)

**What is never read.** Masked positions are masked loads: no address is touched and K and V are 0 there. A stale slot
that holds NaN therefore has no influence (0 · NaN would be NaN), and nobody has to clear blocks.

Heads whose size is no power of two (80, 96) are widened to 128 in registers by the same masks; nothing more is read.
"""

# Triton reads the annotations of a kernel: only compile-time constants may have one.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    x_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, x_stride, pool_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Rotate queries in place; store rotated keys and values. One program: one token, BLOCK_H of its heads.

    ``x`` [T, NUM_Q + 2 · NUM_KV, HEAD_DIM]: q, k, v. ``cos``, ``sin`` [T, HEAD_DIM], the sine's first half negated.
    ``pool`` [slots, 2 · NUM_KV, HEAD_DIM]. ``slots`` [T] int64. HALF: HEAD_DIM / 2, up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    exists = (head < NUM_Q + 2 * NUM_KV) & (pair < HEAD_DIM // 2)
    left = x_ptr + token * x_stride + head * HEAD_DIM + pair
    a = tl.load(left, mask=exists, other=0.0)
    b = tl.load(left + HEAD_DIM // 2, mask=exists, other=0.0)
    if ROTATE:
        angle = token * HEAD_DIM + pair
        cos = tl.load(cos_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
        sin = -tl.load(sin_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
        turns = head < NUM_Q + NUM_KV
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = tl.where(turns, (wide_a * cos - wide_b * sin).to(a.dtype), a)
        b = tl.where(turns, (wide_b * cos + wide_a * sin).to(b.dtype), b)
        stays = exists & (head < NUM_Q)
        tl.store(left, a, mask=stays)
        tl.store(left + HEAD_DIM // 2, b, mask=stays)
    slot = tl.load(slots_ptr + token)
    kept = exists & (head >= NUM_Q) & (slot >= 0)
    target = pool_ptr + slot * pool_stride + (head - NUM_Q) * HEAD_DIM + pair
    tl.store(target, a, mask=kept)
    tl.store(target + HEAD_DIM // 2, b, mask=kept)


@triton.jit(do_not_specialize=["table_stride"])  # differs from step to step: one compiled kernel serves all widths
def attend_kernel(
    q_ptr, kv_ptr, out_ptr, part_ptr, lse_ptr, tiles_ptr, tables_ptr, q_stride, kv_stride, table_stride, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Attention of one tile to one split of its keys, for one KV head.

    ``q`` [T, heads, HEAD_DIM]; ``kv`` [slots, 2, NUM_KV, HEAD_DIM]; ``out`` [T, heads, HEAD_DIM]. ``tiles`` [grid, 4] int32:
    first packed row, tokens, position of the first, row of ``tables`` [sequences, blocks] int32. ``scale``: log2(e) /
    sqrt(HEAD_DIM). WIDTH: HEAD_DIM up to a power of two. LEAST: keys a split has at least, a multiple of BLOCK_N.
    With SPLITS > 1 the result goes to ``part`` [grid, NUM_KV, SPLITS, BLOCK_M, HEAD_DIM] and ``lse`` [… BLOCK_M], float32.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + tile * 4 + 1)
    first_position = tl.load(tiles_ptr + tile * 4 + 2)
    table_ptr = tables_ptr + tl.load(tiles_ptr + tile * 4 + 3).to(tl.int64) * table_stride

    row, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = token < num_tokens
    inside = d < HEAD_DIM
    q_at = (first_row + token)[:, None] * q_stride + (head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=used[:, None] & inside[None, :], other=0.0)

    end = first_position + num_tokens
    start = 0
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N, LEAST)
        start = split * share
        end = tl.minimum(end, start + share)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for base in range(start, end, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        readable = (key < end)[:, None] & inside[None, :]
        kv_at = kv_ptr + slot[:, None] * kv_stride + kv_head * HEAD_DIM + d[None, :]
        k = tl.load(kv_at, mask=readable, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (key[None, :] <= (first_position + token)[:, None]) & (key < end)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen no key yet: −∞ − −∞ is NaN
        weight = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(kv_at + NUM_KV * HEAD_DIM, mask=readable, other=0.0)
        out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        best = new_best

    seen = total != 0  # not > 0: NaN counts as seen, so that the request that made it is found out
    total = tl.where(seen, total, 1.0)
    out = out / total[:, None]
    if SPLITS == 1:
        out_at = (first_row + token)[:, None] * (NUM_KV * GROUP * HEAD_DIM) + (head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=used[:, None] & inside[None, :])
    else:
        part = ((tile.to(tl.int64) * NUM_KV + kv_head) * SPLITS + split) * BLOCK_M + row
        tl.store(lse_ptr + part, best + tl.log2(total), mask=used)
        kept = (used & seen)[:, None] & inside[None, :]
        tl.store(part_ptr + part[:, None] * HEAD_DIM + d[None, :], out, mask=kept)


@triton.jit
def merge_kernel(
    out_ptr, part_ptr, lse_ptr, tiles_ptr,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row of a tile. One program: one (tile, KV head, row). SPLITS is a power of two."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row // GROUP
    if token < tl.load(tiles_ptr + tile * 4 + 1):
        split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
        part = ((tile.to(tl.int64) * NUM_KV + kv_head) * SPLITS + split) * BLOCK_M + row
        lse = tl.load(lse_ptr + part)
        weight = tl.exp2(lse - tl.max(lse, 0))
        # What an empty split left in memory may be anything: it is not read.
        mask = (lse != float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
        parts = tl.load(part_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        out = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
        packed = (tl.load(tiles_ptr + tile * 4).to(tl.int64) + token) * (NUM_KV * GROUP)
        target = out_ptr + (packed + kv_head * GROUP + row % GROUP) * HEAD_DIM + d
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
