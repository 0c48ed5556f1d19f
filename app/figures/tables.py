"""Block tables: for each request, logical block → physical block, with fill, sharing and what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.trace import letter

MOST_CELLS = 512
"""Entries of one table that are sent; longer tables say how many are left out."""


def block_tables(
    tables: Mapping[str, Sequence[int]],
    computed: Mapping[str, int],
    numbers: Mapping[str, int],
    block_size: int,
    allocated: frozenset[int] = frozenset(),
    shown: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """One row a request, by arrival. A cell is [physical block, tokens in it, owners, 1 if taken in this step]."""
    holders: dict[int, int] = {}
    for table in tables.values():
        for block in table:
            holders[block] = holders.get(block, 0) + 1
    wanted = sorted((r for r in tables if r in numbers and (shown is None or r in shown)), key=lambda r: numbers[r])
    rows = []
    for request_id in wanted:
        table, done = tables[request_id], computed.get(request_id, 0)
        cells = [
            [block, max(0, min(block_size, done - i * block_size)), holders[block], int(block in allocated)]
            for i, block in enumerate(table[:MOST_CELLS])
        ]
        rows.append(
            {
                "id": request_id,
                "number": numbers[request_id],
                "letter": letter(numbers[request_id]),
                "cells": cells,
                "left_out": max(0, len(table) - MOST_CELLS),
                "tokens": done,
            }
        )
    return rows


def extents(
    tables: Mapping[str, Sequence[int]],
    computed: Mapping[str, int],
    numbers: Mapping[str, int],
    block_size: int,
    num_blocks: int,
) -> list[dict[str, Any]]:
    """The contiguous layout in pool order: each request's extent, and the holes between them.

    A row has ``first`` and ``last`` block, and either the owner with ``used`` of ``tokens`` slots (the rest is reserved but
    unused: internal waste), or ``number`` None: a hole. Holes too short for a request are external fragmentation.
    """
    owned = sorted((table[0], table[-1], request) for request, table in tables.items() if table and request in numbers)
    rows: list[dict[str, Any]] = []
    free_from = 1
    for first, last, request in [*owned, (num_blocks + 1, num_blocks + 1, "")]:
        if first > free_from:
            hole = {"first": free_from, "last": first - 1, "number": None, "tokens": (first - free_from) * block_size}
            rows.append({**hole, "id": "", "letter": "", "used": 0})
        if request:
            number = numbers[request]
            rows.append(
                {
                    "first": first,
                    "last": last,
                    "number": number,
                    "tokens": (last - first + 1) * block_size,
                    "id": request,
                    "letter": letter(number),
                    "used": computed.get(request, 0),
                }
            )
        free_from = last + 1
    return rows
