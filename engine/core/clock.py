"""Engine time: seconds that a pause does not spend."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds; its zero means nothing."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never decreases."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of ``time.perf_counter``."""
        return time.perf_counter()


class PausableClock:
    """A clock that stands still between ``pause`` and ``resume``, so that a pause never becomes a latency.

    Starts at 0 and running. Thread-safe; pausing twice or resuming twice changes nothing.
    """

    def __init__(self, source: Clock | None = None) -> None:
        self._source = source or MonotonicClock()
        self._lock = threading.Lock()
        self._offset = self._source.now()
        self._stopped_at: float | None = None

    def now(self) -> float:
        """Seconds this clock has been running."""
        with self._lock:
            return self._stopped_at if self._stopped_at is not None else self._source.now() - self._offset

    @property
    def paused(self) -> bool:
        """Whether the clock stands still."""
        return self._stopped_at is not None

    def pause(self) -> None:
        """Stop the clock."""
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = self._source.now() - self._offset

    def resume(self) -> None:
        """Let the clock run on from where it stopped."""
        with self._lock:
            if self._stopped_at is not None:
                self._offset = self._source.now() - self._stopped_at
                self._stopped_at = None


class VirtualClock:
    """A clock that moves only when told to: tests and countable lessons."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time set so far, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds`` (0 or more)."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must be 0 or more: time does not run backwards")
        self._now += seconds
