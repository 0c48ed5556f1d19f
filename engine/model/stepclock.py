"""Where a step's time goes, on the host's clock and on the device's own."""

from __future__ import annotations

import time

from engine.core.runner import StepResult
from engine.model.device import Device, Event


class StepClock:
    """Follows one step from its begin.

    A CPU computes while it is asked, so its times follow each other::

        begin ── prepare ── start ── forward ── computed ── sample ── stop

    A GPU gets events between its kernels, and its times are those between the events. What the host does meanwhile is
    ``launch_time``::

        host   begin ── prepare ── start ─ launch ─ stop          (collect waits …)
        GPU    … step before ▓▓│ idle │▓▓▓▓ forward ▓▓▓▓│▓ sample ▓│
                            before  start            computed    stop

    In a step that runs call by call the GPU may have to wait for the host between two kernels; that counts as its work. In
    a CUDA graph sampling is part of the forward time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin = time.perf_counter()
        self._start = self._computed = self._stop = 0.0
        self._started: Event | None = None
        self._forwarded: Event | None = None
        self._stopped: Event | None = None
        self._before: Event | None = None

    def start(self) -> None:
        """All is prepared; the device begins. Asked again, only the host's clock is read."""
        self._start = time.perf_counter()
        if self._started is None:
            self._started = self._mark()

    def computed(self) -> None:
        """The forward pass ends here."""
        self._computed = time.perf_counter()
        self._forwarded = self._mark()

    def stop(self) -> None:
        """The step's work ends here."""
        self._stop = time.perf_counter()
        self._stopped = self._mark()

    def close(self, follows: bool) -> None:
        """The step was asked for. ``follows``: no pause lies before it, so that a gap means the GPU waited for the host."""
        self._before = self._device.last_work if follows else None
        self._device.last_work = self._stopped

    def tell(self, result: StepResult) -> None:
        """Write the times into a result, once the device has passed all marks."""
        result.prepare_time = self._start - self._begin
        if self._started is None or self._stopped is None:
            result.forward_time = self._computed - self._start
            result.sample_time = self._stop - self._computed
            return
        result.launch_time = self._stop - self._start
        result.gpu_time = self._stopped.seconds_since(self._started)
        forwarded = self._forwarded or self._stopped
        result.forward_time = forwarded.seconds_since(self._started)
        result.sample_time = self._stopped.seconds_since(forwarded)
        if self._before is not None:
            result.gpu_idle_time = max(0.0, self._started.seconds_since(self._before))

    def _mark(self) -> Event | None:
        if not self._device.asynchronous:
            return None
        event = self._device.event()
        event.record()
        return event
