"""Paged attention in Triton, for NVIDIA GPUs: the host side. The kernels and their pictures are in ``triton_kernels``.

A step is planned once and the plan serves all layers::

    spans      a: 300 tokens after 40          b: 1 after 900          c: 1 after 25         d: padding
                        │ too long for 16 rows          └──────────┬──────────┴──────────────────┘
                        ▼                                          ▼
    tiles      wide: a[256:300] a[128:256] a[0:128]         narrow: b c d        (token ranges with one head a group)
               one launch, never split                      one launch, keys split where that fills the GPU

Long tiles come first, so that no processor starts the longest one when the others are done.

Without a KV cache the step's own K and V are the pool: block size 1, the slot of a token is its row in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.attention import Plan, Span
from engine.model.attention.sdpa import SdpaAttention
from engine.model.attention.triton_kernels import attend_kernel, merge_kernel, store_kernel

MOST_SPLITS = 64
LONGEST_SPLIT = 4096
"""Keys beyond which a sequence is split even when there are programs enough: one long walk delays the whole step."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a launch cuts its work: rows of a tile, keys a round, warps a program, rounds loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(slots=True)
class Tiles:
    """One launch: ``table`` [tiles, 4] int32 on the device (see ``attend_kernel``), ``most_tokens`` in one of them."""

    table: torch.Tensor
    shape: TileShape
    splits: int
    most_tokens: int


@dataclass(slots=True)
class TritonPlan:
    """One step's index tensors, on the device. ``slots`` [T] int64, −1 for padding; ``tables`` [sequences, blocks] int32."""

    slots: torch.Tensor
    tables: torch.Tensor
    launches: list[Tiles]
    part: torch.Tensor | None
    """Scratch of the splits, float32, used by one layer after another; None when nothing is split."""
    lse: torch.Tensor | None


def narrow_shape(dtype: torch.dtype, group: int) -> TileShape:
    """Tiles for decodes: as few rows as a matrix unit takes, 16, unless more heads than that share a KV head.

    Decodes wait for memory, so rounds are loaded far ahead. Block tables are loaded a round before the keys they lead to,
    so 5 stages keep two rounds of keys under way.
    """
    rows = max(16, power_of_two(group))
    return TileShape(rows, 16, 4, 2) if dtype == torch.float32 else TileShape(rows, 64, 4, 5)


def wide_shape(dtype: torch.dtype, group: int, hopper: bool) -> TileShape:
    """Tiles for prefills: many rows, so that K and V are read seldom.

    As large as leaves the accumulators in registers and the tiles in 99 KiB of shared memory, for heads of 64 to 128;
    tests/triton/test_compile.py holds them to it. Hopper's matrix units take larger operands from shared memory.
    """
    if dtype == torch.float32:
        return TileShape(max(32, power_of_two(group)), 16, 4, 3)
    return TileShape(max(128, power_of_two(group)), 64 if hopper else 32, 8, 3 if hopper else 5)


def choose_splits(tiles: int, num_kv_heads: int, longest: int, processors: int, least: int) -> int:
    """Parts to cut the keys into, a power of two: enough programs for four a processor, and no part beyond LONGEST_SPLIT.

    Args:
        tiles: of the launch.
        num_kv_heads: programs a tile already has.
        longest: keys of the longest sequence; a part has ``least`` keys or more.
        processors: of the GPU.
        least: fewest keys a part may have.
    """
    by_programs = 4 * processors // max(1, tiles * num_kv_heads)
    wanted = max(1, by_programs, math.ceil(longest / LONGEST_SPLIT))
    useful = max(1, math.ceil(longest / least))
    return min(MOST_SPLITS, power_of_two(min(wanted, useful)))


class TritonAttention(SdpaAttention):
    """The CUDA backend. The pool, its clearing and its copying are the reference's, so either can take over the other's.

    Beyond the contract of ``Attention`` it can rotate queries and keys while it stores them: ``attend_rotating``.
    """

    name = "Triton paged attention"
    rotates = True
    resident = True

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
        processors: int | None = None,
    ) -> None:
        """See ``SdpaAttention``. ``processors`` of the GPU decide how much is split; by default the driver is asked."""
        super().__init__(
            num_layers=num_layers,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self.processors = processors or (cuda.multi_processor_count if cuda else 1)
        self.narrow = narrow_shape(dtype, self.group)
        self.wide = wide_shape(dtype, self.group, hopper=cuda is not None and cuda.major == 9)
        self.least = max(self.narrow.keys, 128)

    def splits_for(self, tiles: int, longest: int) -> int:
        """Splits of a launch of ``tiles`` narrow tiles whose longest sequence has ``longest`` keys."""
        return choose_splits(tiles, self.num_kv_heads, longest, self.processors, self.least)

    def warm_up(self, longest: int) -> None:
        """Compile what steps will need: without it each number of splits would stop the first step that meets it."""
        if self.pool is None:
            return
        long = self.narrow.rows // self.group + 1
        table = [0] * -(-long // self.block_size)
        plans = [self.plan([Span(0, long, 0, table, writes=False)])]
        nowhere, blocks = self.upload([-1], torch.int64), self.upload([[0]], torch.int32)
        tile, splits = self.upload([[0, 1, 0, 0]], torch.int32), 1
        while splits <= self.splits_for(1, longest):
            plans.append(self.plan_decodes(nowhere, blocks, tile, splits))
            splits *= 2
        heads = self.num_heads + 2 * self.num_kv_heads
        for plan in plans:
            qkv = torch.zeros((plan.slots.shape[0], heads, self.head_dim), dtype=self.dtype, device=self.device)
            angle = torch.zeros((plan.slots.shape[0], self.head_dim), dtype=self.dtype, device=self.device)
            self.attend_rotating(0, qkv, angle, angle, plan)

    def plan(self, spans: list[Span]) -> TritonPlan:  # type: ignore[override]
        """Slots, block tables and tiles of a step, brought to the device."""
        slots: list[int] = []
        tables: list[list[int]] = []
        for span in spans:
            cached, rows = self.pool is not None, range(span.start, span.start + span.num_tokens)
            slots += (self._slots(span, span.context) if span.writes else [-1] * len(rows)) if cached else rows
            tables.append(span.block_table if cached else list(rows))
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        return self.plan_resident(spans, range(len(spans)), self._ids(slots), self.upload(padded, torch.int32))

    def plan_resident(
        self, spans: list[Span], seats: Sequence[int], slots: torch.Tensor, tables: torch.Tensor
    ) -> TritonPlan:
        """A plan where slots and block tables lie on the device already; ``seats`` are the spans' rows of ``tables``."""
        short, long = self.narrow.rows // self.group, self.wide.rows // self.group
        narrow: list[tuple[int, int, int, int]] = []
        wide: list[tuple[int, int, int, int]] = []
        for span, seat in zip(spans, seats, strict=True):
            tiles, size = (narrow, short) if span.num_tokens <= short else (wide, long)
            for done in range(0, span.num_tokens, size):
                tiles.append((span.start + done, min(size, span.num_tokens - done), span.context + done, seat))
        splits = self.splits_for(len(narrow), max((at + count for _, count, at, _ in narrow), default=1))
        launches = [
            Tiles(self.upload(sorted(tiles, key=_keys, reverse=True), torch.int32), shape, parts, max(t[1] for t in tiles))
            for tiles, shape, parts in ((wide, self.wide, 1), (narrow, self.narrow, splits))
            if tiles
        ]
        return self.plan_from(slots, tables, launches)

    def plan_decodes(self, slots: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, splits: int) -> TritonPlan:
        """A plan over tensors that already lie on the device and are refilled before each use: what a CUDA graph needs."""
        return self.plan_from(slots, tables, [Tiles(tiles, self.narrow, splits, 1)])

    def plan_from(self, slots: torch.Tensor, tables: torch.Tensor, launches: list[Tiles]) -> TritonPlan:
        """A plan with scratch for whatever is split. At most one of the launches is."""
        parts = [
            item.table.shape[0] * self.num_kv_heads * item.splits * item.shape.rows for item in launches if item.splits > 1
        ]
        if not parts:
            return TritonPlan(slots, tables, launches, None, None)
        part = torch.empty((max(parts), self.head_dim), dtype=torch.float32, device=self.device)
        lse = torch.empty(max(parts), dtype=torch.float32, device=self.device)
        return TritonPlan(slots, tables, launches, part, lse)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan) -> torch.Tensor:  # type: ignore[override]
        """Store K and V of the step's tokens and attend; see ``Attention``."""
        pool, block_size = self._pool_of(layer, kv)
        if self.pool is not None:
            self._launch_store(kv.flatten(1, 2), None, pool, plan.slots, num_q=0)
        return self._attend(q, pool, block_size, plan)

    def attend_rotating(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """Rotate, store and attend; see ``Attention``."""
        kv = qkv[:, self.num_heads :].unflatten(1, (2, self.num_kv_heads))
        pool, block_size = self._pool_of(layer, kv)
        self._launch_store(qkv, (cos, sin), pool, plan.slots, num_q=self.num_heads)
        return self._attend(qkv[:, : self.num_heads], pool, block_size, plan)

    def _pool_of(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, int]:
        """K and V as [slots, 2, Hkv, D], and the block size."""
        if self.pool is None:
            return kv, 1
        return self.pool[layer].flatten(0, 1), self.block_size

    def _launch_store(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        pool: torch.Tensor,
        slots: torch.Tensor,
        num_q: int,
    ) -> None:
        tokens, heads = x.shape[:2]
        block = min(16, power_of_two(heads))
        cos, sin = angles or (x, x)
        store_kernel[(tokens, -(-heads // block))](
            x, cos, sin, pool, slots, x.stride(0), pool.stride(0),
            NUM_Q=num_q, NUM_KV=self.num_kv_heads, HEAD_DIM=self.head_dim, HALF=power_of_two(self.head_dim // 2),
            BLOCK_H=block, ROTATE=angles is not None, num_warps=4,
        )  # fmt: skip

    def _attend(self, q: torch.Tensor, pool: torch.Tensor, block_size: int, plan: TritonPlan) -> torch.Tensor:
        out = q.new_empty(q.shape[0], self.num_heads * self.head_dim)
        common = {
            "NUM_KV": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "WIDTH": max(16, power_of_two(self.head_dim)),  # a matrix unit takes 16 at least
        }
        for tiles in plan.launches:
            count, shape = tiles.table.shape[0], tiles.shape
            # Without splits nothing is stored in it, but its type is part of what gets compiled: were it float32 in some
            # steps, the first one that mixes a chunk with split decodes would wait for the compiler.
            scratch = (out, out)
            if tiles.splits > 1 and plan.part is not None and plan.lse is not None:
                scratch = plan.part, plan.lse
            attend_kernel[(count, self.num_kv_heads, tiles.splits)](
                q, pool, out, *scratch, tiles.table, plan.tables, q.stride(0), pool.stride(0), plan.tables.stride(0),
                math.log2(math.e) / math.sqrt(self.head_dim), **common,
                BLOCK_SIZE=block_size, BLOCK_M=shape.rows, BLOCK_N=shape.keys, SPLITS=tiles.splits, LEAST=self.least,
                num_warps=shape.warps, num_stages=shape.stages,
            )  # fmt: skip
            if tiles.splits > 1:
                merge_kernel[(count, self.num_kv_heads, tiles.most_tokens * self.group)](
                    out, *scratch, tiles.table, BLOCK_M=shape.rows, SPLITS=tiles.splits, num_warps=2, **common,
                )  # fmt: skip
        return out


def _keys(tile: tuple[int, int, int, int]) -> int:
    """Keys that a tile walks along."""
    return tile[2] + tile[1]


def power_of_two(value: int) -> int:
    """The smallest power of two that is not less than ``value``."""
    return 1 << max(0, value - 1).bit_length()
