"""A pool of more blocks than can be told apart: one cell is several neighbouring blocks, and every number stays exact.

A cell has the colour of the request that holds most of its blocks and is filled by the share of its blocks in use; its hover
names all owners with their counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.core.trace import letter

if TYPE_CHECKING:
    from app.figures.pool import PoolView

MOST_CELLS = 8000
"""Pools up to this many blocks are drawn block by block."""


def per_cell(num_blocks: int) -> int:
    """How many blocks one cell stands for: 1, or the power of two that brings the cells to at most ``MOST_CELLS``."""
    size = 1
    while -(-num_blocks // size) > MOST_CELLS:
        size *= 2
    return size


class Groups:
    """The cells of a large pool, numbered from 1 as blocks are."""

    def __init__(self, view: PoolView) -> None:
        self.size = per_cell(view.num_blocks)
        self.count = -(-view.num_blocks // self.size)
        self._view = view
        self._owners: dict[int, Counter[int]] = {}
        self._used: Counter[int] = Counter()
        for block, uses in view.uses.items():
            cell = self.cell(block)
            self._used[cell] += 1
            self._owners.setdefault(cell, Counter()).update({use.number for use in uses})
        self._cached = Counter(self.cell(block) for block in view.cached if not view.uses.get(block))

    def cell(self, block: int) -> int:
        """The cell that shows a block."""
        return (block - 1) // self.size + 1

    def blocks(self, cell: int) -> range:
        """The blocks of a cell."""
        return range((cell - 1) * self.size + 1, min(cell * self.size, self._view.num_blocks) + 1)

    def level(self, cell: int, selected: int | None, hues: int) -> int | None:
        """The colour level, as ``pool_figure`` numbers them."""
        if cell > self.count:
            return None
        owners = self._owners.get(cell)
        if not owners:
            return 1 if self._cached[cell] else 0
        most = selected if selected is not None and selected in owners else max(owners, key=lambda n: (owners[n], -n))
        return 2 + most % hues + (hues if selected is not None and most != selected else 0)

    def share(self, cell: int) -> float:
        """Share of the cell's blocks that are in use."""
        return self._used[cell] / len(self.blocks(cell))

    def used(self) -> list[int]:
        """Cells with a block in use."""
        return sorted(self._used)

    def hover(self, cell: int) -> str:
        """All that the cell stands for."""
        if cell > self.count:
            return ""
        blocks, view = self.blocks(cell), self._view
        owners = self._owners.get(cell, Counter())
        names = ", ".join(f"{letter(number)} {count}" for number, count in sorted(owners.items()))
        cached = f", {self._cached[cell]} cached" if self._cached[cell] else ""
        held = f"<br>{names}" if names else ""
        return f"{view.unit}s {blocks[0]}–{blocks[-1]}: {self._used[cell]} of {len(blocks)} in use{cached}{held}"
