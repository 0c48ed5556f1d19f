"""What a runner needs of a device beyond tensors: memory that can be copied from without waiting, events, a second stream.

A GPU works off a queue (a *stream*) while the host goes on. Three things then need care, and each has its call here::

    host         fill pinned memory ── send ──▶        it may be filled again once an event behind the copy has passed
    stream       … earlier steps │ copy │ event │ kernels of the step │
    2nd stream                                                        └─▶ fetch: copy of the tokens │ event ──▶ host reads

On a CPU torch has finished when a call returns, so there everything is trivial: no event, no second stream, no waiting.
Tests bring a device of their own that puts every copy off as long as a GPU might.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import torch


class Event(Protocol):
    """A mark in the device's queue."""

    def record(self) -> None:
        """Put the mark behind everything asked for so far; an earlier mark of this event is forgotten."""
        ...

    def wait(self) -> None:
        """Hold the host until the device has passed the mark; at once if there is none."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two marks that the device has passed, seconds; 0 on a CPU."""
        ...


class Fetch(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Hold the host until it is there; the tensor on the host."""
        ...


class Device(Protocol):
    """A device and its queues. One for all runners on it: what one submits, the others' steps wait for."""

    asynchronous: bool
    """Whether the device still works when a call returns."""
    last_work: Event | None
    """Behind the newest step of any runner; None before the first."""

    def pinned(self, size: int) -> torch.Tensor:
        """``size`` bytes of host memory (uint8) that ``send`` copies from without waiting."""
        ...

    def event(self) -> Event:
        """A new event without a mark."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pinned host memory to a tensor on the device, in the order of its queue; ``source`` must stay as it is until
        an event recorded afterwards has passed.
        """
        ...

    def fetch(self, source: torch.Tensor) -> Fetch:
        """Copy a tensor to the host beside the queue: it waits for what was asked for so far, and nothing waits for it.

        Nobody may write to ``source`` any more.
        """
        ...

    def scope(self) -> AbstractContextManager[object]:
        """In which kernels start on this device rather than on another one of the machine."""
        ...

    def finish(self) -> None:
        """Hold the host until the device has nothing left to do."""
        ...


def device_of(where: torch.device) -> Device:
    """The one ``Device`` for a torch device."""
    return _cuda_device(where.index or 0) if where.type == "cuda" else HOST


class _NoEvent:
    """What a CPU's queue has: nothing to wait for, and no time of its own."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class _Here:
    """A tensor that is on the host already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class HostDevice:
    """The CPU: what is asked for is done at once."""

    asynchronous = False
    last_work: Event | None = None

    def pinned(self, size: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=torch.uint8)

    def event(self) -> Event:
        """Nothing to wait for."""
        return _NoEvent()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def fetch(self, source: torch.Tensor) -> Fetch:
        """The tensor itself."""
        return _Here(source)

    def scope(self) -> AbstractContextManager[object]:
        """Nothing to choose."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing is left to do."""


HOST = HostDevice()


class _CudaEvent:
    """An event of the compute stream, with time."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return earlier._event.elapsed_time(self._event) / 1e3


class _CudaFetch:
    """A copy on the side stream. It holds its source: what the allocator gets back early, somebody else would overwrite."""

    def __init__(self, source: torch.Tensor, side: torch.cuda.Stream) -> None:
        self._source = source
        self._copied = torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._copied.record(side)
        source.record_stream(side)  # should nobody ever wait

    def wait(self) -> torch.Tensor:
        self._copied.synchronize()
        return self._host


class CudaDevice:
    """An NVIDIA GPU: its current stream computes, a stream of our own copies results back."""

    asynchronous = True

    def __init__(self, index: int) -> None:
        self.index = index
        self.last_work: Event | None = None
        self._side = torch.cuda.Stream(torch.device("cuda", index))

    def pinned(self, size: int) -> torch.Tensor:
        """Page-locked memory: the GPU reads it by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        """An event of the compute stream."""
        return _CudaEvent()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)

    def fetch(self, source: torch.Tensor) -> Fetch:
        """Queue the copy on the side stream, behind what is in the compute stream now."""
        return _CudaFetch(source, self._side)

    def scope(self) -> AbstractContextManager[object]:
        """Make it the current device."""
        return torch.cuda.device(self.index)

    def finish(self) -> None:
        """Wait for all its streams."""
        torch.cuda.synchronize(self.index)


@cache
def _cuda_device(index: int) -> CudaDevice:
    return CudaDevice(index)
