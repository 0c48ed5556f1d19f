"""Engine time: a pause is not a latency, and virtual time moves only when told to."""

from __future__ import annotations

import pytest

from engine.core.clock import MonotonicClock, PausableClock, VirtualClock


def test_a_pausable_clock_leaves_out_every_pause():
    source = VirtualClock(100.0)
    clock = PausableClock(source)
    assert clock.now() == 0.0
    source.advance(2.0)
    assert clock.now() == 2.0
    for _ in range(2):
        clock.pause()
    assert clock.paused
    source.advance(50.0)
    assert clock.now() == 2.0
    for _ in range(2):
        clock.resume()
    assert not clock.paused
    assert clock.now() == 2.0
    source.advance(1.5)
    assert clock.now() == 3.5
    clock.pause()
    source.advance(7.0)
    clock.resume()
    assert clock.now() == 3.5


def test_a_virtual_clock_never_runs_backwards():
    clock = VirtualClock()
    clock.advance(0.0)
    clock.advance(0.25)
    assert clock.now() == 0.25
    with pytest.raises(ValueError, match="seconds=-1"):
        clock.advance(-1)


def test_the_monotonic_clock_does_not_decrease():
    clock = MonotonicClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
