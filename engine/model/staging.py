"""A step's numbers on their way to the device: written into pinned memory, copied in the queue, nobody waits.

Two sets of pinned memory take turns. While the copies out of one may still lie in the queue, the next step fills the other;
a set is filled again only after the event behind its last copy::

    step 1   set A: │ids│positions│slots│tables│       ── send … ── event A
    step 2   set B: │ids│positions│slots│              ── send … ── event B
    step 3   wait for event A (long past), set A again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.model.device import Device, Event

NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
ALIGNED = 16
"""Bytes; what kernels and copies like addresses to be multiples of."""


def aligned(size: int) -> int:
    """``size`` rounded up to whole 16 bytes."""
    return -(-size // ALIGNED) * ALIGNED


class Uploads:
    """Brings lists of numbers to a device, once a step: ``with uploads:``, and ``put`` as often as needed.

    Args:
        device: copies and events.
        where: torch's name of the same device.
        size: bytes that a set holds at first; it grows with what steps need.
    """

    def __init__(self, device: Device, where: torch.device, size: int = 1 << 18) -> None:
        self._device, self._where = device, where
        self._sets = [_PinnedSet(device, size) for _ in range(2)]
        self._turn = 0

    def __enter__(self) -> None:
        """Take the other set, waiting until the copies out of it are over."""
        self._turn = 1 - self._turn
        self._sets[self._turn].reuse()

    def __exit__(self, *raised: object) -> None:
        """Mark the last copy out of the set, also when the step failed behind it."""
        self._sets[self._turn].copied.record()

    def put(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """Numbers, or nested lists of one shape, as a new tensor on the device. It can be used at once."""
        array = np.asarray(values, dtype=NUMPY[dtype])
        target = torch.empty(array.shape, dtype=dtype, device=self._where)
        if array.size:
            pinned = self._sets[self._turn].take(array.nbytes)
            pinned.numpy()[:] = array.reshape(-1).view(np.uint8)
            self._device.send(pinned.view(dtype).view(array.shape), target)
        return target


class _PinnedSet:
    """Pinned memory handed out from front to back; a longer piece is added when it runs out."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._pieces = [device.pinned(size)]
        self._used = 0
        self.copied: Event = device.event()

    def reuse(self) -> None:
        """Start at the front again, in the longest piece alone."""
        self.copied.wait()
        self._pieces, self._used = self._pieces[-1:], 0

    def take(self, size: int) -> torch.Tensor:
        """The next ``size`` bytes."""
        if self._used + size > self._pieces[-1].numel():
            self._pieces.append(self._device.pinned(max(2 * self._pieces[-1].numel(), aligned(size))))
            self._used = 0
        start = self._used
        self._used += aligned(size)
        return self._pieces[-1][start : start + size]
