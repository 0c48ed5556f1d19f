"""The physical KV block pool: one cell a block, coloured by its owner.

::

    ┌──┬──┬──┬──┐   filled cell     owner's colour, filled from the left by tokens of block_size
    │▓A│▓A│▒B│  │   dashed edge     cached, owned by nobody
    ├──┼──┼──┼──┤   double edge     shared, with the number of owners
    │┄┄│  │▣2│  │   heavy edge      taken in this step
    └──┴──┴──┴──┘   red dotted edge its content was evicted in this step; it fades over the next steps
                    empty           free, on demand with its place in the free queue (1 is taken next)

Pools of more than 8,000 blocks: one cell is several blocks (``app.figures.pool_groups``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.figures.palette import Theme, mix
from app.figures.pool_groups import Groups, per_cell
from app.figures.template import Figure, boxes, hidden_axis, layout
from engine.core.trace import letter

LETTERS_UP_TO = 256
"""Pools up to this many blocks print a letter in every owned cell, larger ones at the start of each run."""
MOST_LABELS = 120
FADES = 3
"""Steps over which the outline of an evicted block fades."""


class Use(msgspec.Struct, frozen=True, gc=False):
    """One block in one request's table. ``tokens``: how many of the block's slots hold K and V of that request."""

    number: int
    logical: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one step. Blocks are numbered from 1; block 0, the null block, is not drawn."""

    num_blocks: int
    block_size: int
    uses: dict[int, Sequence[Use]] = field(default_factory=dict)
    cached: frozenset[int] = frozenset()
    allocated: frozenset[int] = frozenset()
    evicted: frozenset[int] = frozenset()
    places: dict[int, int] = field(default_factory=dict)
    """Place of a block in the free queue, 0 is taken next."""
    unit: str = "block"
    fading: dict[int, int] = field(default_factory=dict)
    """Blocks whose content was evicted a few steps ago: how many steps."""


def columns(num_blocks: int) -> int:
    """Columns of the grid: a power of two that gives about 1.8 times as many columns as rows."""
    cells = -(-num_blocks // per_cell(num_blocks))
    wide = 8
    while wide * wide < cells * 1.8:
        wide *= 2
    return min(wide, max(cells, 1))


def pool_figure(view: PoolView, theme: Theme, selected: int | None = None, *, queue: bool = False) -> Figure:
    """The pool as a heatmap with a handful of overlay shapes.

    Args:
        view: the pool at one step.
        theme: its colours.
        selected: a request number; the others step back.
        queue: print the place in the free queue into each free block.
    """
    if selected not in {use.number for uses in view.uses.values() for use in uses}:
        selected = None  # it holds nothing, so nobody steps back
    wide = columns(view.num_blocks)
    if per_cell(view.num_blocks) > 1:
        return _grouped(view, theme, selected, wide)
    rows = -(-view.num_blocks // wide)
    z = [[_level(view, row * wide + column + 1, selected, len(theme.hues)) for column in range(wide)] for row in range(rows)]
    hover = [[_hover(view, row * wide + column + 1) for column in range(wide)] for row in range(rows)]
    labels = _labels(view, theme, wide, selected)
    over = [labels] if labels["x"] else []
    if queue:
        over.append(_places(view, theme, wide))
    room = _unfilled(_fills(view), wide)
    edges = _edges(view, theme, wide)
    if not over:
        return {"data": [_grid(z, hover, theme)], "layout": _layout(theme, wide, rows, [*_room_shape(room, theme), *edges])}
    data = [_grid(z, hover, theme), *_room_trace(room, theme), *over]  # a shape would cover the letters
    return {"data": data, "layout": _layout(theme, wide, rows, edges)}


def _grouped(view: PoolView, theme: Theme, selected: int | None, wide: int) -> Figure:
    """One cell for several blocks; edges and letters would not be readable, the hover says it all."""
    groups = Groups(view)
    rows = -(-groups.count // wide)
    cells = [[row * wide + column + 1 for column in range(wide)] for row in range(rows)]
    z = [[groups.level(cell, selected, len(theme.hues)) for cell in row] for row in cells]
    fills = {cell: share for cell in groups.used() if (share := groups.share(cell)) < 1}
    grid = _grid(z, [[groups.hover(cell) for cell in row] for row in cells], theme)
    return {"data": [grid], "layout": _layout(theme, wide, rows, _room_shape(_unfilled(fills, wide), theme))}


def _grid(z: list[list[int | None]], hover: list[list[str]], theme: Theme) -> dict[str, Any]:
    levels = _colours(theme)
    return {
        "type": "heatmap",
        "name": "blocks",
        "z": z,
        "zmin": -0.5,
        "zmax": len(levels) - 0.5,
        "colorscale": steps(levels),
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "hovertext": hover,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": False,
    }


def _layout(theme: Theme, wide: int, rows: int, shapes: list[dict[str, Any]]) -> dict[str, Any]:
    return layout(
        theme,
        margin={"l": 4, "r": 4, "t": 4, "b": 4},
        xaxis=hidden_axis(range=[-0.5, wide - 0.5]),
        yaxis=hidden_axis(range=[rows - 0.5, -0.5]),
        shapes=shapes,
    )


def pool_alt(view: PoolView, title: str = "KV block pool") -> str:
    """The picture in one sentence, for those who hear it."""
    owners = sorted({use.number for uses in view.uses.values() for use in uses})
    names = ", ".join(letter(number) for number in owners[:12]) or "nobody"
    shared = sum(len(uses) > 1 for uses in view.uses.values())
    size = per_cell(view.num_blocks)
    coarse = f" One cell is {size} blocks." if size > 1 else ""
    return (
        f"{title}: {len(view.uses)} of {view.num_blocks} blocks in use by {names}; "
        f"{len(view.cached)} cached and unowned, {shared} shared, block size {view.block_size} tokens.{coarse}"
    )


def steps(colours: Sequence[str]) -> list[list[float | str]]:
    """A colour scale of flat steps, one for each whole number from 0 on."""
    count = len(colours)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / count, (i + 1) / count)]


def _colours(theme: Theme) -> list[str]:
    """Levels: free, cached, the hues, the hues stepped back behind a selection."""
    free = mix(theme.muted, theme.paper, 0.07)
    cached = mix(theme.muted, theme.paper, 0.25)
    return [free, cached, *theme.hues, *(mix(hue, theme.paper, 0.4) for hue in theme.hues)]


def _level(view: PoolView, block: int, selected: int | None, hues: int) -> int | None:
    if block > view.num_blocks:
        return None
    uses = view.uses.get(block)
    if not uses:
        return 1 if block in view.cached else 0
    owner = uses[0].number
    if selected is not None and len(uses) > 1 and any(use.number == selected for use in uses):
        owner = selected
    back = selected is not None and owner != selected
    return 2 + owner % hues + (hues if back else 0)


def _hover(view: PoolView, block: int) -> str:
    if block > view.num_blocks:
        return ""
    uses = view.uses.get(block)
    if uses and len(uses) == 1:
        use = uses[0]
        fresh = "<br>taken in this step" if block in view.allocated else ""
        owner = f"{letter(use.number)} (logical {use.logical})"
        return f"{view.unit} {block}: {owner}<br>{use.tokens} of {view.block_size} tokens{fresh}"
    if uses:
        owners = ", ".join(f"{letter(use.number)} (logical {use.logical})" for use in uses)
        fill = max(use.tokens for use in uses)
        fresh = "<br>taken in this step" if block in view.allocated else ""
        return f"{view.unit} {block}: {owners}<br>{fill} of {view.block_size} tokens<br>shared by {len(uses)}{fresh}"
    place = f"<br>place {view.places[block] + 1} in the free queue" if block in view.places else ""
    if block in view.cached:
        return f"{view.unit} {block}: cached, nobody holds it{place}"
    return f"{view.unit} {block}: free{place}"


def _cell(block: int, wide: int) -> tuple[int, int]:
    return (block - 1) % wide, (block - 1) // wide


def _labels(view: PoolView, theme: Theme, wide: int, selected: int | None) -> dict[str, Any]:
    """Letters as one text trace: in every cell of a small pool, at the start of each run in a large one."""
    everywhere = view.num_blocks <= LETTERS_UP_TO
    blocks: list[int] = []
    for block in sorted(view.uses):
        before = view.uses.get(block - 1)
        starts = not before or before[0].number != view.uses[block][0].number or (block - 1) % wide == 0
        if everywhere or starts or len(view.uses[block]) > 1:
            blocks.append(block)
    if view.num_blocks > 1024 or len(blocks) > max(MOST_LABELS, LETTERS_UP_TO if everywhere else 0):
        blocks = blocks[:: max(1, len(blocks) // MOST_LABELS + 1)] if view.num_blocks <= 1024 else []
    cells = [_cell(block, wide) for block in blocks]
    dark = [_reads_on_hue(view, block, selected) for block in blocks]
    return {
        "type": "scatter",
        "name": "letters",
        "mode": "text",
        "x": [x + _aside(view, block) for (x, _), block in zip(cells, blocks, strict=True)],
        "y": [y for _, y in cells],
        "text": [_label(view.uses[block]) for block in blocks],
        "textfont": {
            "size": 11 if everywhere else 9,
            "color": [theme.paper if on_hue else theme.ink for on_hue in dark],
        },
        "hoverinfo": "skip",
        "cliponaxis": True,
    }


def _reads_on_hue(view: PoolView, block: int, selected: int | None) -> bool:
    """Whether the letter stands on the owner's full colour: most of the cell is filled and not stepped back."""
    uses = view.uses[block]
    filled = _filled(view, block) >= 0.5
    return filled and (selected is None or any(use.number == selected for use in uses))


def _filled(view: PoolView, block: int) -> float:
    return max(use.tokens for use in view.uses[block]) / view.block_size


def _aside(view: PoolView, block: int) -> float:
    """How far the letter steps aside where the fill ends near the middle of its cell, so that it stands on one colour."""
    filled = _filled(view, block)
    if not 1 / 3 < filled < 2 / 3:
        return 0.0
    return round((filled - 1) / 2 if filled >= 0.5 else filled / 2, 3)


def _label(uses: Sequence[Use]) -> str:
    return letter(uses[0].number) if len(uses) == 1 else f"{letter(uses[0].number)}×{len(uses)}"


def _edges(view: PoolView, theme: Theme, wide: int) -> list[dict[str, Any]]:
    """A handful of shapes, each one path around all the cells it marks."""
    shared = [_cell(block, wide) for block, uses in sorted(view.uses.items()) if len(uses) > 1]
    cached = [_cell(block, wide) for block in sorted(view.cached) if not view.uses.get(block)]
    groups: list[tuple[str, str, dict[str, Any]]] = [
        ("cached", boxes(cached, 0.12), {"color": theme.muted, "width": 1, "dash": "2px,2px"}),
        ("shared", boxes(shared, 0.03) + boxes(shared, 0.16), {"color": theme.ink, "width": 1}),
        ("allocated", boxes([_cell(b, wide) for b in sorted(view.allocated)], 0.03), {"color": theme.ink, "width": 2}),
        ("evicted", boxes([_cell(b, wide) for b in sorted(view.evicted)], 0.03),
         {"color": theme.alert, "width": 2, "dash": "3px,2px"}),
        *(_faded(view, theme, wide, age) for age in range(1, FADES + 1)),
    ]  # fmt: skip
    return [
        {"type": "path", "name": name, "path": path, "line": line, "layer": "above"} for name, path, line in groups if path
    ]


def _faded(view: PoolView, theme: Theme, wide: int, age: int) -> tuple[str, str, dict[str, Any]]:
    """The outline of blocks evicted ``age`` steps ago, paler with each step."""
    cells = [_cell(b, wide) for b, steps_ago in sorted(view.fading.items()) if steps_ago == age and b not in view.evicted]
    colour = mix(theme.alert, theme.paper, 1 - age / (FADES + 1))
    return f"evicted {age} ago", boxes(cells, 0.03), {"color": colour, "width": 2, "dash": "3px,2px"}


def _places(view: PoolView, theme: Theme, wide: int) -> dict[str, Any]:
    """Places in the free queue, 1 is taken next: all of a small pool, the next ones of a large one."""
    most = LETTERS_UP_TO if view.num_blocks <= LETTERS_UP_TO else MOST_LABELS
    blocks = sorted((place, block) for block, place in view.places.items() if place < most)
    cells = [_cell(block, wide) for _, block in blocks]
    return {
        "type": "scatter",
        "name": "queue",
        "mode": "text",
        "x": [x for x, _ in cells],
        "y": [y for _, y in cells],
        "text": [str(place + 1) for place, _ in blocks],
        "textfont": {"size": 10 if view.num_blocks <= LETTERS_UP_TO else 9, "color": theme.ink},
        "hoverinfo": "skip",
        "cliponaxis": True,
    }


def _fills(view: PoolView) -> dict[int, float]:
    """How full the blocks are that have room left, 0 to 1."""
    size = view.block_size
    return {
        block: max(use.tokens for use in uses) / size
        for block, uses in view.uses.items()
        if uses[0].tokens < size and all(use.tokens < size for use in uses)
    }


def _unfilled(fills: dict[int, float], wide: int) -> list[tuple[float, float, float, float]]:
    """The part of each owned cell that holds nothing yet, from the right: (left, right, top, bottom)."""
    cells = [(*_cell(cell, wide), filled) for cell, filled in fills.items()]
    return [(round(x - 0.46 + 0.92 * filled, 3), x + 0.46, y - 0.42, y + 0.42) for x, y, filled in cells]


def _room_shape(boxes: Sequence[tuple[float, float, float, float]], theme: Theme) -> list[dict[str, Any]]:
    """Rectangles as one shape: quick to draw, and above every trace."""
    path = "".join(f"M{left:g},{top:g}H{right:g}V{bottom:g}H{left:g}Z" for left, right, top, bottom in boxes)
    if not path:
        return []
    return [{"type": "path", "name": "unfilled", "path": path, "fillcolor": _room(theme), "line": {"width": 0}}]


def _room_trace(boxes: Sequence[tuple[float, float, float, float]], theme: Theme) -> list[dict[str, Any]]:
    """The same as a trace, below the letters that come after it."""
    if not boxes:
        return []
    return [
        {
            "type": "scatter",
            "name": "unfilled",
            "mode": "lines",
            "x": [x for left, right, _, _ in boxes for x in (left, right, right, left, left, None)],
            "y": [y for _, _, top, bottom in boxes for y in (top, top, bottom, bottom, top, None)],
            "fill": "toself",
            "fillcolor": _room(theme),
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
    ]


def _room(theme: Theme) -> str:
    return mix(theme.muted, theme.paper, 0.1)
