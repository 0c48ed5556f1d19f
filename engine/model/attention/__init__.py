"""Attention over paged K and V: the contract between the transformer and a backend.

K and V of all layers live in one pool of blocks. A sequence's block table says where its positions are::

    block table of a sequence     [ 7, 3, 9 ]            block_size 4, context 9, one new token at position 9
    position      0 1 2 3 | 4 5 6 7 | 8 9
    slot         28 … 31  | 12 … 15 | 36 37              slot = block · block_size + offset

A step goes: ``plan`` once (which slots are written, what each sequence reads), then ``attend`` once a layer.
Block 0 is the null block: zeros, read by padding, never written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Plan = Any
"""What a backend prepared for one step; opaque to everybody else."""
Upload = Callable[[Sequence[Any], torch.dtype], torch.Tensor]
"""Numbers (nested lists of one shape) in, a tensor on the device out."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of the packed batch: ``num_tokens`` rows from ``start`` on, at positions from ``context`` on."""

    start: int
    num_tokens: int
    context: int
    block_table: list[int]
    """Physical blocks of positions 0 … context + num_tokens − 1. Empty without a KV cache (``context`` is 0 then)."""
    writes: bool = True
    """Whether K and V are stored. Padding stores nothing."""


class Attention(Protocol):
    """A backend. It owns the KV pool.

    Contract: after ``attend`` of a layer the K and V of every writing span are in the pool at the slots of its block
    table, and row t of the result is softmax(q·K / sqrt(D))·V over the positions of its own sequence up to and including
    its own. Slots beyond a sequence's length, and slots of other sequences, have no influence whatever they hold, NaN
    included.
    """

    name: str
    """For people: shown on the screen."""
    rotates: bool
    """Whether ``attend_rotating`` is there, which turns queries and keys by their positions while it stores them."""
    resident: bool
    """Whether ``plan_resident`` is there, which takes slots and block tables that lie on the device."""
    pool: torch.Tensor | None
    """K and V of all layers; None without a KV cache, and once the memory was given back."""
    upload: Upload
    """How plans bring their numbers to the device; a runner may put a way in its place that doesn't wait."""

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the pool, the null block included; 0 without a KV cache."""
        ...

    def warm_up(self, longest: int) -> None:
        """Do beforehand what a first use would wait for, for sequences of up to ``longest`` positions; stores nothing."""
        ...

    def zero_blocks(self, blocks: list[int]) -> None:
        """Set blocks to zero in all layers."""
        ...

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers. No destination is another copy's source."""
        ...

    def plan(self, spans: list[Span]) -> Plan:
        """Prepare a step whose packed batch consists of ``spans``, in order and without gaps."""
        ...

    def plan_resident(self, spans: list[Span], seats: Sequence[int], slots: torch.Tensor, tables: torch.Tensor) -> Plan:
        """As ``plan``, where the device already knows slots and block tables; only where ``resident`` is true.

        Args:
            spans: the packed batch; their block tables are not looked at.
            seats: row of ``tables`` for each span.
            slots: [T] int64, −1 for nowhere.
            tables: [seats, width] int32; entries behind a sequence's last block may be anything.
        """
        ...

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Store K and V of the step's tokens and attend.

        Args:
            layer: index of the layer.
            q: [T, H, D], rotated.
            kv: [T, 2, Hkv, D], keys (rotated) and values.
            plan: of this step.

        Returns:
            [T, H · D].
        """
        ...

    def attend_rotating(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """Rotate, store and attend; only where ``rotates`` is true.

        Args:
            layer: index of the layer.
            qkv: [T, H + 2 · Hkv, D], not rotated; its queries are rotated in place, its keys and values are left undefined.
            cos: [T, 1, D] or [T, D], contiguous.
            sin: likewise, the first half negated (``engine.model.rope.rope_tables``).
            plan: of this step.

        Returns:
            [T, H · D].
        """
        ...
