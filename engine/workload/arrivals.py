"""When requests are due: open-loop processes, drawn from a seed, and the closed loop.

How ours compares with the field's tools (all draw gaps with mean ``1 / rate``):

============ ============================= ==================== ===========================
What         ours                          vLLM bench serve     SGLang bench_serving
============ ============================= ==================== ===========================
first due    at 0                          after its own gap    at 0
gaps         gamma of shape ``burstiness`` the same             exponential
rescaling    none: the offered rate is     so that the last one none
             what the draw gives           is due at N / rate
constant     burstiness is infinite        the same             –
============ ============================= ==================== ===========================

The gamma distribution with shape b and scale 1 / (rate · b) has mean 1 / rate and a coefficient of variation (standard
deviation over mean) of 1 / √b: b = 1 is the exponential gap of a Poisson process, b < 1 comes in bursts.

Time is seconds of the engine's clock, or steps. In steps a request is due at the whole step in which its moment falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from engine.workload.check import WorkloadError, choice, number, whole

Process = Literal["poisson", "constant", "bursty", "closed"]
Unit = Literal["seconds", "steps"]
MAX_RATE = 10_000.0
"""Most requests a second, or a step."""
MIN_RATE = 1e-6
MAX_IN_FLIGHT = 4096


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests arrive.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    process: Process = "poisson"
    """poisson: at random, independently; constant: evenly; bursty: gamma gaps; closed: as soon as an earlier one is done."""
    unit: Unit = "seconds"
    rate: float = 1.0
    """Mean requests a second (or a step); not used by a closed loop."""
    burstiness: float = 0.25
    """Shape of the gamma gaps of ``bursty``: under 1 in bursts, 1 is Poisson, above 1 more even."""
    in_flight: int = 4
    """Requests at once in a closed loop: users who each wait for their answer."""
    think: float = 0.0
    """Seconds (or steps) between an answer and that user's next request, closed loop only."""

    def __post_init__(self) -> None:
        choice("process", self.process, ("poisson", "constant", "bursty", "closed"))
        choice("unit", self.unit, ("seconds", "steps"))
        number("rate", self.rate, MIN_RATE, MAX_RATE)
        number("burstiness", self.burstiness, 0.01, 1000.0)
        whole("in_flight", self.in_flight, 1, MAX_IN_FLIGHT)
        number("think", self.think, 0.0, 3600.0)
        if self.unit == "steps" and self.think != int(self.think):
            raise WorkloadError(f"think={self.think!r} must be a whole number where unit='steps'")

    @property
    def cv(self) -> float | None:
        """Coefficient of variation of the gaps (standard deviation over mean); None for a closed loop."""
        return {"poisson": 1.0, "constant": 0.0, "bursty": 1 / math.sqrt(self.burstiness), "closed": None}[self.process]


def burstiness_of(cv: float) -> float:
    """The gamma shape whose gaps have this coefficient of variation: 1 / cv²."""
    number("cv", cv, 0.0, 10.0, above=True)
    return 1.0 / (cv * cv)


class ArrivalStream:
    """The endless sequence of due times of an open-loop process.

    Gaps are drawn with mean 1 and divided by the rate, so the same seed gives the same pattern at every rate, and a change
    of rate stretches only what is left of the current gap.

    Args:
        arrivals: an open-loop process.
        rng: where randomness comes from.
    """

    _CHUNK = 256

    def __init__(self, arrivals: Arrivals, rng: np.random.Generator) -> None:
        if arrivals.process == "closed":
            raise WorkloadError("process='closed' has no due times of its own: they follow the answers")
        self._arrivals = arrivals
        self._rng = rng
        self._rate = arrivals.rate
        self._gaps: Iterator[float] = iter(())
        self._base = 0.0
        """The next request is due when ``_gap_sum`` mean gaps have passed since then: even gaps add up without rounding."""
        self._gap_sum = 0.0
        self._last = 0.0

    @property
    def rate(self) -> float:
        """Mean requests a second or step; 0 while switched off."""
        return self._rate

    @property
    def next(self) -> float:
        """When the next request is due, seconds or steps from the start; infinite at rate 0."""
        if self._gap_sum == 0.0:
            return self._base
        return self._base + self._gap_sum / self._rate if self._rate else math.inf

    def pop(self) -> float:
        """Take the next due time and draw the gap after it."""
        due = self.next
        if due == math.inf:
            raise WorkloadError("rate=0: no request is due; raise the rate")
        self._gap_sum += self._gap()
        self._last = due
        return due

    def set_rate(self, rate: float, now: float) -> None:
        """Go on with another rate from ``now`` (seconds or steps from the start); 0 switches arrivals off.

        Due times up to ``now`` must have been taken before.
        """
        number("rate", rate, 0.0, MAX_RATE)
        now = max(now, self._base, self._last)
        self._gap_sum = max(0.0, self._gap_sum - (now - self._base) * self._rate)
        self._base, self._rate = now, float(rate)

    def _gap(self) -> float:
        for gap in self._gaps:
            return gap
        process, shape = self._arrivals.process, self._arrivals.burstiness
        if process == "constant":
            return 1.0
        if process == "poisson":
            drawn = self._rng.standard_exponential(self._CHUNK)
        else:
            drawn = self._rng.standard_gamma(shape, self._CHUNK) / shape
        self._gaps = iter(drawn.tolist())
        return next(self._gaps)


def due_times(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    """The first ``count`` due times of a process, unrounded; for charts and tests."""
    stream = ArrivalStream(arrivals, np.random.default_rng([seed, 0]))
    return [stream.pop() for _ in range(count)]
