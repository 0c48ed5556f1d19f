"""The seam between scheduling and computing: what a step hands to a runner, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.core.clock import Clock, VirtualClock
from engine.core.outputs import Logprob
from engine.core.request import Request

PENDING = -1
"""A token that is not known yet, at the end of ``Work.token_ids``: the one that the step submitted before samples."""


class Work(msgspec.Struct, gc=False):
    """``num_tokens`` consecutive positions of one sequence, computed in this step.

    ::

        positions   0 ...... context ............ context + num_tokens
                    K, V stored │ computed now:  │
                    already     │ Q, K, V; each attends to all positions up to itself

    K and V of position p are stored in block ``block_table[p // block_size]`` at offset ``p % block_size``. The table covers
    all positions of the step. Without a KV cache the table is empty and ``context`` is 0.
    """

    request: Request | None
    """None for padding rows: their results are thrown away."""
    token_ids: list[int]
    context: int
    block_table: list[int]
    """Read-only; for padding rows a list of 0s, the null block, which is read and never written."""
    samples: tuple[Request, ...] = ()
    """Requests that sample from the logits of the last position: none, the request itself, or it and its forks."""


@dataclass(slots=True)
class StepBatch:
    """All the work of one step, in packed order."""

    index: int
    work: list[Work]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Whole blocks to copy (source, destination) before the forward pass: copy-on-write."""
    scrub: list[int] = field(default_factory=list)
    """Blocks to set to zero before the forward pass and before ``copies``: they may hold NaN."""


@dataclass(slots=True)
class StepResult:
    """What a step produced. ``tokens`` has one entry a sampling request, in packed order, forks after their parent."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None] | None = None
    """Parallel to ``tokens``; None when nobody asked."""
    nonfinite: frozenset[str] = frozenset()
    """Requests whose hidden state or logits hold NaN or infinity; their entries in ``tokens`` mean nothing."""
    prepare_time: float = 0.0
    forward_time: float = 0.0
    sample_time: float = 0.0
    launch_time: float = 0.0
    """Host seconds spent asking the device for the step's work; 0 where the host computes itself."""
    gpu_time: float = 0.0
    """Seconds that the GPU worked on the step, measured by the GPU's own events; 0 without one."""
    gpu_idle_time: float = 0.0
    """Seconds that the GPU idled between the work of the step before and this step's; 0 without one, and after a pause."""
    flops: float = 0.0
    bytes: float = 0.0


class Runner(Protocol):
    """Computes a step. One method; everything else about the device is its own business."""

    def execute(self, batch: StepBatch) -> StepResult:
        """Store K and V of the batch's tokens and sample where asked. Called by one thread at a time.

        Raises:
            Exception: the step failed as a whole (out of memory, device error); the engine ends its requests with "error".
        """
        ...


class AsyncRunner(Protocol):
    """A ``Runner`` may have these two as well: it can be asked for a step before the one in front of it is done.

    Everything that ``submit`` asks of the device runs after all that was asked before (one stream), so a block that a
    finished request gave back may be written by a later step while an earlier one still reads it.

    Where ``Work.token_ids`` ends in ``PENDING``, the token is the one that ``Work.request`` (by identity; it may have been
    a fork) samples in the step submitted just before; the runner fills it in, on the device. ``request.token_ids`` ends in
    ``PENDING`` then too. The placeholder of the token that a step itself samples is appended after ``submit`` has
    returned, so ``num_output_tokens`` means in ``submit`` what it means in ``execute``. Penalties count a pending token too,
    where it is: on the device.
    """

    def submit(self, batch: StepBatch) -> object:
        """Start computing and don't wait for the tokens; returns a handle for ``collect``.

        Whatever is needed of the batch is read before this returns: block tables and token lists change afterwards.

        Raises:
            Exception: as ``execute``. The step is not collected, and a later one is asked again to scrub its blocks.
        """
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step. Handles come in the order of submission, each once, also when the step before failed.

        Raises:
            Exception: as ``execute``. What was asked to be scrubbed must have been scrubbed all the same.
        """
        ...


def count_up(request: Request) -> int:
    """The scripted runner's default: token ids that count the output, 0, 1, 2 …"""
    return request.num_output_tokens


class ScriptedRunner:
    """A runner without a model, for tests, benchmarks of the engine's own time, and lessons that count steps.

    Args:
        script: gives the next token id of a request.
        clock: a virtual clock to advance by ``cost(batch)`` seconds a step; None leaves time alone.
        cost: seconds that a batch takes; default 1.0 for every step.
    """

    def __init__(
        self,
        script: Callable[[Request], int] = count_up,
        clock: Clock | None = None,
        cost: Callable[[StepBatch], float] | None = None,
    ) -> None:
        self.script = script
        self.clock = clock
        self.cost = cost or (lambda batch: 1.0)

    def execute(self, batch: StepBatch) -> StepResult:
        """Ask the script for each sampling request; advance the virtual clock."""
        tokens = [self.script(request) for work in batch.work for request in work.samples]
        seconds = 0.0
        if isinstance(self.clock, VirtualClock):
            seconds = self.cost(batch)
            self.clock.advance(seconds)
        return StepResult(tokens, forward_time=seconds)
