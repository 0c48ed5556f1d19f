"""Time travel: rebuild pool, block tables and queues of any recorded step from keyframes and deltas.

::

    steps   0 ········ 256 ········ 512 ··· 540          state_at(540):
            K           K            K  ▸▸▸▸▸ here        take keyframe 512, apply the events of 512 … 540

Nothing here asks the engine: a running one is not disturbed, and a saved file is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.core.block_pool import FreeQueue
from engine.core.trace import Event, Keyframe, StepTrace

Phase = Literal["during", "after"]


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the pictures of one step show."""

    step: int
    free: tuple[int, ...]
    """Free queue, front (next to be taken) first; cached blocks are part of it."""
    cached: frozenset[int]
    """Blocks whose content is known by hash, referenced or not."""
    tables: dict[str, tuple[int, ...]]
    """request_id → physical blocks in logical order."""
    computed: dict[str, int]
    """request_id → tokens whose K and V are stored."""
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    owners: dict[int, tuple[tuple[str, int], ...]]
    """Block → (request_id, logical index) of each table that holds it."""

    @property
    def keyframe(self) -> Keyframe:
        """The same state in the form that the engine snapshots."""
        return Keyframe(
            free=self.free,
            cached=tuple(sorted(self.cached)),
            tables=self.tables,
            computed=self.computed,
            waiting=self.waiting,
            running=self.running,
        )


class StepGoneError(LookupError):
    """The step was not recorded, or its record and the keyframe before it are no longer kept."""


class Replayer:
    """Applies the events of consecutive steps to a keyframe."""

    def __init__(self, keyframe: Keyframe, num_blocks: int) -> None:
        self._free = FreeQueue(num_blocks)
        for block in list(self._free):
            self._free.remove(block)
        for block in keyframe.free:
            self._free.push_back(block)
        self._refs = [0] * (num_blocks + 1)
        self._tables = {request: list(table) for request, table in keyframe.tables.items()}
        for table in self._tables.values():
            for block in table:
                self._refs[block] += 1
        self._cached = set(keyframe.cached)
        self._computed = dict(keyframe.computed)
        self._waiting = list(keyframe.waiting)
        self._running = list(keyframe.running)

    def before(self, step: StepTrace) -> None:
        """Apply what happened up to the forward pass of ``step``."""
        for event in step.events:
            self._apply(event)
        for row in step.scheduled:
            if row.kind != "padding":
                self._computed[row.request_id] = row.context + row.num_tokens

    def after(self, step: StepTrace) -> None:
        """Apply what the sampled tokens of ``step`` brought about."""
        for event in step.events_after:
            self._apply(event)

    def state(self, step: int) -> PoolState:
        """The state now, labelled as that of ``step``."""
        owners: dict[int, list[tuple[str, int]]] = {}
        for request, table in self._tables.items():
            for index, block in enumerate(table):
                owners.setdefault(block, []).append((request, index))
        return PoolState(
            step=step,
            free=tuple(self._free),
            cached=frozenset(self._cached),
            tables={request: tuple(table) for request, table in self._tables.items()},
            computed=dict(self._computed),
            waiting=tuple(self._waiting),
            running=tuple(self._running),
            owners={block: tuple(held) for block, held in owners.items()},
        )

    def _apply(self, event: Event) -> None:
        request, blocks = event.request_id, event.blocks
        match event.op:
            case "queue":
                self._waiting.insert(int(event.other), request)
            case "admit":
                self._waiting.remove(request)
                self._running.append(request)
                self._tables[request] = []
                self._computed[request] = event.value
            case "alloc":
                self._take(blocks)
                self._tables[request].extend(blocks)
            case "hit":
                for block in blocks:
                    self._share(block)
                self._tables[request].extend(blocks)
            case "fork":
                self._fork(request, event.other)
            case "cow":
                source, copy = blocks
                self._take((copy,))
                self._refs[source] -= 1
                self._tables[request][event.value] = copy
            case "evict":
                self._cached.difference_update(blocks)
            case "cache":
                self._cached.update(blocks)
            case "free":
                self._release(blocks)
                self._drop(request)
            case "preempt":
                self._running.remove(request)
                self._waiting.insert(int(event.other), request)
                self._drop(request)
            case "finish":
                self._finish(request)
            case "scrub":
                pass

    def _take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._free.remove(block)
            self._refs[block] = 1

    def _share(self, block: int) -> None:
        if not self._refs[block]:
            self._free.remove(block)
        self._refs[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._cached:
                    self._free.push_back(block)
                else:
                    self._free.push_front(block)

    def _fork(self, child: str, parent: str) -> None:
        table = list(self._tables[parent])
        for block in table:
            self._share(block)
        self._tables[child] = table
        self._computed[child] = self._computed[parent]
        place = self._running.index(parent) + 1
        while place < len(self._running) and self._running[place].startswith(f"{parent}#"):
            place += 1
        self._running.insert(place, child)

    def _finish(self, request: str) -> None:
        """A row of a static batch that is done keeps its blocks, so its table stays until they are freed."""
        if request in self._running:
            self._running.remove(request)
            if not self._tables.get(request):
                self._drop(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _drop(self, request: str) -> None:
        self._tables.pop(request, None)
        self._computed.pop(request, None)


def state_at(steps: Sequence[StepTrace], index: int, num_blocks: int, phase: Phase = "after") -> PoolState:
    """The state of the engine at step ``index``.

    Args:
        steps: consecutive records, in order; they may start anywhere.
        index: the step's own index (not its place in ``steps``).
        num_blocks: usable blocks of the pool.
        phase: "during" the forward pass, or "after" the whole step.

    Raises:
        StepGoneError: naming the steps that can be shown.
    """
    first = steps[0].index if steps else 0
    place = index - first
    if not 0 <= place < len(steps):
        raise StepGoneError(f"step {index} is not kept: the record holds steps {first} to {first + len(steps) - 1}")
    start = place
    while steps[start].keyframe is None:
        start -= 1
        if start < 0:
            raise StepGoneError(f"step {index} can't be rebuilt: the keyframe before it is no longer kept")
    keyframe = steps[start].keyframe
    assert keyframe is not None
    replayer = Replayer(keyframe, num_blocks)
    for step in steps[start:place]:
        replayer.before(step)
        replayer.after(step)
    replayer.before(steps[place])
    if phase == "after":
        replayer.after(steps[place])
    return replayer.state(index)
