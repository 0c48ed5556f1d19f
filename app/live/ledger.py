"""Pool, tables and queues for the pictures: live ones moved on step by step, past ones rebuilt from the trace."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.trace import Keyframe, StepTrace
from engine.observe.log import TraceLog
from engine.observe.replay import PoolState, Replayer, StepGoneError, state_at
from engine.observe.runlog import RunLog

KEYFRAME_STRIDE = 300
"""Steps to look back for a keyframe before looking through all of them."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of the pool at one moment and what the step at the cursor changed.

    ``complete`` is False when the records before it are gone, so that the pool can't be known.
    """

    pool: PoolState
    allocated: frozenset[int] = frozenset()
    evicted: frozenset[int] = frozenset()
    complete: bool = True


def nothing(num_blocks: int, *, complete: bool = True) -> Ledger:
    """An empty pool."""
    keyframe = Keyframe(tuple(range(1, num_blocks + 1)), (), {}, {}, (), ())
    return Ledger(Replayer(keyframe, num_blocks).state(-1), complete=complete)


def past(log: TraceLog | RunLog, index: int, num_blocks: int) -> Ledger:
    """The state during step ``index``."""
    steps = log.steps(index - KEYFRAME_STRIDE, index)
    if not any(step.keyframe is not None for step in steps):
        steps = log.steps(0, index)
    try:
        return Ledger(state_at(steps, index, num_blocks, "during"), *_changes(steps[-1]))
    except (StepGoneError, LookupError, ValueError):
        return nothing(num_blocks, complete=False)


def _changes(step: StepTrace) -> tuple[frozenset[int], frozenset[int]]:
    taken = {block for e in step.events if e.op == "alloc" for block in e.blocks}
    taken |= {e.blocks[1] for e in step.events if e.op == "cow"}
    return frozenset(taken), frozenset(block for e in step.events if e.op == "evict" for block in e.blocks)


class LiveLedger:
    """The pool after the newest step. Not thread-safe: its lab holds a lock."""

    def __init__(self) -> None:
        self._replayer: Replayer | None = None
        self._of: tuple[int, int] = (-1, 0)
        self._at = -1
        self._found: Ledger | None = None

    def at_end(self, log: TraceLog | RunLog, generation: int, num_blocks: int) -> Ledger:
        """The state once the newest step is done; costs O(new steps)."""
        if self._of != (generation, num_blocks) or self._at >= log.next_index:
            self._replayer, self._found, self._at, self._of = None, None, -1, (generation, num_blocks)
        new = log.steps(self._at + 1)
        if not new and self._found is not None:
            return self._found
        try:
            for step in new:
                self._take(step, num_blocks)
        except (LookupError, ValueError, AttributeError):
            self._replayer = None
        if new:
            self._at = new[-1].index
        if self._replayer is None:
            self._found = nothing(num_blocks, complete=not new)
        else:
            self._found = Ledger(self._replayer.state(self._at), *(_changes(new[-1]) if new else ()))
        return self._found

    def _take(self, step: StepTrace, num_blocks: int) -> None:
        """One step; after a gap the next keyframe starts afresh."""
        if step.keyframe is not None and (self._replayer is None or step.index != self._at + 1):
            self._replayer = Replayer(step.keyframe, num_blocks)
        elif self._replayer is None or step.index != self._at + 1:
            self._replayer = None
            return
        self._replayer.before(step)
        self._replayer.after(step)
        self._at = step.index
