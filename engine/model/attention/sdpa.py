"""Paged attention with torch's scaled_dot_product_attention: right on every device and dtype, quick on a CPU.

Decodes (one new token a sequence) go through one call a layer, however many there are: the blocks of their tables are
gathered into [R, S] positions, shorter tables filled up with the null block, positions beyond a sequence's end masked.
The G query heads that share a KV head are laid out as G queries of one head, so grouped-query attention copies nothing::

    q [R, H, D] → [R, Hkv, G, D]      K, V [R, S, Hkv, D] → [R, Hkv, S, D]      mask [R, 1, 1, S]

When lengths differ much, rows are sorted into groups of similar length, one call each, so that one long sequence doesn't
make all short ones read as much as it does.

Prefills go one by one: without context on the K and V of the batch itself under a causal mask; with context on the
gathered slots under a mask whose lower right corner is the diagonal.

A masked slot that holds NaN would still poison the sum (0 · NaN). So a block is set to zero when its first slot is
written: what an earlier owner left behind is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from engine.model.attention import Plan, Span, Upload

MOST_WASTED_BLOCKS = 64
"""Null blocks that a group of decodes may gather before a second call is cheaper."""


@dataclass(slots=True)
class _Decodes:
    """Decodes that share a call. ``rows`` None: they are the whole batch, in order."""

    rows: torch.Tensor | None
    blocks: torch.Tensor
    """[R · blocks a row] ids to gather."""
    mask: torch.Tensor
    """[R, 1, 1, S], 0 or −inf, in the model's dtype."""


@dataclass(slots=True)
class _Prefill:
    start: int
    stop: int
    slots: torch.Tensor | None
    """[S] slots of all its positions; None without context."""
    mask: torch.Tensor | None
    """[n, S]."""


@dataclass(slots=True)
class SdpaPlan:
    """One step's index tensors, on the device."""

    write_slots: torch.Tensor | None
    write_rows: torch.Tensor | None
    """Packed rows that are stored; None: all."""
    decodes: list[_Decodes] = field(default_factory=list)
    prefills: list[_Prefill] = field(default_factory=list)


def without_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` by any of torch's kernels but cuDNN's.

    torch prefers cuDNN on Hopper since it ships version 9.15.1. It prepares a plan for every shape that it has not met,
    which takes longer than a step; and in a decode the number of blocks grows, so that new shapes never end.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(query, key, value, **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _upload(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


class SdpaAttention:
    """The reference backend. Pool: [layers, blocks + 1, block_size, 2, Hkv, D]; K and V of a token lie side by side."""

    name = "torch SDPA over gathered blocks"
    rotates = False
    resident = False

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``num_kv_blocks`` usable blocks; 0 for no KV cache at all, where every step computes whole sequences."""
        self.block_size = block_size
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.dtype, self.device = dtype, device
        self.upload: Upload = partial(_upload, device)
        self._kernel: Callable[..., torch.Tensor] = (
            without_cudnn if device.type == "cuda" else F.scaled_dot_product_attention
        )
        self.pool: torch.Tensor | None = None
        if num_kv_blocks:
            shape = (num_layers, num_kv_blocks + 1, block_size, 2, num_kv_heads, head_dim)
            self.pool = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the pool, the null block included; 0 without a KV cache."""
        return 0 if self.pool is None else self.pool.numel() * self.pool.element_size()

    def warm_up(self, longest: int) -> None:
        """Nothing: torch brings its kernels compiled."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Set blocks to zero in all layers."""
        if blocks and self.pool is not None:
            self.pool.index_fill_(1, self._ids(blocks), 0.0)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers."""
        if copies and self.pool is not None:
            sources, destinations = zip(*copies, strict=True)
            self.pool.index_copy_(1, self._ids(list(destinations)), self.pool.index_select(1, self._ids(list(sources))))

    def plan(self, spans: list[Span]) -> SdpaPlan:
        """Slots to write, decodes in groups of similar length, prefills one by one; zeroes freshly started blocks."""
        if self.pool is None:
            return SdpaPlan(None, None, prefills=[_Prefill(s.start, s.start + s.num_tokens, None, None) for s in spans])
        self.zero_blocks(self._started_blocks(spans))
        plan = self._plan_writes(spans)
        decodes = [span for span in spans if span.num_tokens == 1]
        plan.decodes = [self._plan_decodes(group, len(spans)) for group in self._similar(decodes)]
        plan.prefills = [self._plan_prefill(span) for span in spans if span.num_tokens > 1]
        return plan

    def plan_resident(self, spans: list[Span], seats: Sequence[int], slots: torch.Tensor, tables: torch.Tensor) -> Plan:
        """Not here: which blocks are gathered is worked out on the host."""
        raise NotImplementedError(f"{self.name} plans from block tables on the host")

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        """Store K and V of the step's tokens and attend; see ``Attention``."""
        pool = self._store(layer, kv, plan)
        if len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            assert pool is not None
            return self._decode(q, pool, plan.decodes[0])
        out = q.new_empty(q.shape[0], self.num_heads * self.head_dim)
        for group in plan.decodes:
            assert pool is not None and group.rows is not None
            out.index_copy_(0, group.rows, self._decode(q.index_select(0, group.rows), pool, group))
        for prefill in plan.prefills:
            out[prefill.start : prefill.stop] = self._prefill(q, kv, pool, prefill)
        return out

    def attend_rotating(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """Not offered: the transformer rotates."""
        raise NotImplementedError(f"{self.name} does not rotate: rotate first, then attend")

    def _store(self, layer: int, kv: torch.Tensor, plan: SdpaPlan) -> torch.Tensor | None:
        if self.pool is None:
            return None
        pool = self.pool[layer]
        if plan.write_slots is not None:
            rows = kv if plan.write_rows is None else kv.index_select(0, plan.write_rows)
            pool.view(-1, 2, self.num_kv_heads, self.head_dim).index_copy_(0, plan.write_slots, rows)
        return pool

    def _decode(self, q: torch.Tensor, pool: torch.Tensor, group: _Decodes) -> torch.Tensor:
        rows = q.shape[0]
        gathered = pool.index_select(0, group.blocks).view(rows, -1, 2, self.num_kv_heads, self.head_dim)
        keys, values = gathered.permute(2, 0, 3, 1, 4)
        queries = q.unflatten(1, (self.num_kv_heads, self.group))
        return self._kernel(queries, keys, values, attn_mask=group.mask).reshape(rows, -1)

    def _prefill(self, q: torch.Tensor, kv: torch.Tensor, pool: torch.Tensor | None, work: _Prefill) -> torch.Tensor:
        # Batch = KV heads, heads = the group; K and V are the same for a whole group, so they are expanded, not copied.
        queries = q[work.start : work.stop].unflatten(1, (self.num_kv_heads, self.group)).permute(1, 2, 0, 3)
        if work.slots is None:
            stored = kv[work.start : work.stop]
        else:
            assert pool is not None
            stored = pool.view(-1, 2, self.num_kv_heads, self.head_dim).index_select(0, work.slots)
        keys, values = stored.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, self.group, -1, -1)
        causal = work.slots is None
        out = self._kernel(queries, keys, values, attn_mask=work.mask, is_causal=causal)
        return out.permute(2, 0, 1, 3).reshape(work.stop - work.start, -1)

    def _started_blocks(self, spans: list[Span]) -> list[int]:
        """Blocks whose first slot is written in this step but not the last: their tails are still an earlier owner's."""
        started = []
        for span in spans:
            stop = span.context + span.num_tokens
            first = stop - stop % self.block_size
            if span.writes and stop % self.block_size and first >= span.context:
                started.append(span.block_table[first // self.block_size])
        return started

    def _slots(self, span: Span, first: int) -> list[int]:
        """Slots of positions ``first`` … end of the span."""
        size, table = self.block_size, span.block_table
        return [table[p // size] * size + p % size for p in range(first, span.context + span.num_tokens)]

    def _plan_writes(self, spans: list[Span]) -> SdpaPlan:
        slots = [slot for span in spans if span.writes for slot in self._slots(span, span.context)]
        rows = None
        if not all(span.writes for span in spans):
            rows = self._ids([r for s in spans if s.writes for r in range(s.start, s.start + s.num_tokens)])
        return SdpaPlan(self._ids(slots) if slots else None, rows)

    def _blocks_of(self, span: Span) -> int:
        return -(-(span.context + span.num_tokens) // self.block_size)

    def _similar(self, decodes: list[Span]) -> list[list[Span]]:
        """Split decodes into groups, longest first, where padding all to the longest would waste too much."""
        if not decodes:
            return []
        sizes = [self._blocks_of(span) for span in decodes]
        if max(sizes) * len(sizes) - sum(sizes) <= MOST_WASTED_BLOCKS:
            return [decodes]
        order = sorted(range(len(decodes)), key=sizes.__getitem__, reverse=True)
        rest = list(accumulate((sizes[i] for i in reversed(order)), initial=0))[::-1]
        groups: list[list[Span]] = [[]]
        longest = sizes[order[0]]
        for place, i in enumerate(order):
            remaining = len(order) - place
            if sizes[i] * 2 <= longest and longest * remaining - rest[place] > MOST_WASTED_BLOCKS:
                groups.append([])
                longest = sizes[i]
            groups[-1].append(decodes[i])
        return groups

    def _plan_decodes(self, group: list[Span], batch: int) -> _Decodes:
        width = max(map(self._blocks_of, group))
        blocks: list[int] = []
        for span in group:
            used = span.block_table[: self._blocks_of(span)]
            blocks += used + [0] * (width - len(used))
        lengths = self._ids([span.context + 1 for span in group])
        beyond = torch.arange(width * self.block_size, device=self.device) >= lengths.unsqueeze(1)
        whole = len(group) == batch and all(span.start == row for row, span in enumerate(group))
        rows = None if whole else self._ids([span.start for span in group])
        return _Decodes(rows, self._ids(blocks), self._mask(beyond)[:, None, None, :])

    def _plan_prefill(self, span: Span) -> _Prefill:
        stop = span.start + span.num_tokens
        if not span.context:
            return _Prefill(span.start, stop, None, None)
        positions = torch.arange(span.context + span.num_tokens, device=self.device)
        table = self._ids(span.block_table)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        future = positions > positions[span.context :].unsqueeze(1)
        return _Prefill(span.start, stop, slots, self._mask(future))

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))

    def _ids(self, values: list[int]) -> torch.Tensor:
        return self.upload(values, torch.int64)
