"""Is a difference real? Medians, their spread, and a verdict on each number, for a handful of repetitions.

An experiment runs its variants in a shuffled order (``engine.workload.experiment.directions``), so what drifts or comes and
goes on the machine (heat, other programs) meets all alike. Each repetition gives a pair of values; the pairs are compared:

1. **How much?** The geometric mean of b / a over the pairs (Fleming and Wallace, How not to lie with statistics: the correct
   way to summarize benchmark results, 1986), or the mean of b − a where a value is zero or negative.
2. **How sure?** Student's t of the pairs' logarithms (or of b − a), which knows that few pairs say little (Georges, Buytaert
   and Eeckhout, Statistically rigorous Java performance evaluation, 2007, section 3). An experiment judges about a dozen
   numbers, and one of a dozen is often far off by chance. So they are judged together, by Holm's step-down method (A simple
   sequentially rejective multiple test procedure, 1979): the surest of m numbers must pass at 5 % / m, the next at
   5 % / (m − 1), and so on until one fails.
3. **Does it matter?** Under ``MIN_EFFECT`` it does not.

A difference is **clear** when its number passes and it is at least ``MIN_EFFECT``. It is **too small** when its whole
interval lies within ± ``MIN_EFFECT`` (two one-sided tests; Schuirmann, 1987). Otherwise it is **not clear**; with fewer
than ``MIN_PAIRS`` pairs there are **too few repetitions**. The interval that is shown is the one of the level at which the
number was judged, at least 95 %: it leaves out "no change" exactly where the number passes.

Where nothing differs, at most about 5 of 100 experiments call anything clear. ``tests/workload/noise.py`` measures that
under several kinds of noise; ``docs/measurements.md`` holds the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np

from engine.workload.check import WorkloadError, whole

MIN_PAIRS = 5
"""Fewer repetitions than this never call a difference clear."""
MIN_EFFECT = 0.03
"""The smallest difference that matters, relative: 1.03 times as much, or as little."""
ERROR_RATE = 0.05
"""How often an experiment in which nothing differs may call anything clear."""

Verdict = Literal["clear", "not clear", "too small", "too few repetitions", "no data"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and spread of repetitions, in their unit; None without values."""

    count: int
    median: float | None = None
    q1: float | None = None
    q3: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def iqr(self) -> float | None:
        """Interquartile range: third minus first quartile."""
        return self.q3 - self.q1 if self.q1 is not None and self.q3 is not None else None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the pairs of one number say, before it is judged.

    ``mean`` and ``error`` (standard error) are of ln(b / a) where ``relative``, else of b − a; ``margin`` is the smallest
    difference that matters, on the same scale.
    """

    pairs: int
    mean: float
    error: float
    margin: float
    relative: bool

    @property
    def p_value(self) -> float:
        """How often chance alone gives a mean this far from 0; 1 where there are too few pairs to say."""
        if self.pairs < MIN_PAIRS or self.mean == 0.0:
            return 1.0
        return t_tail(abs(self.mean) / self.error, self.pairs - 1) if self.error else 0.0

    def interval(self, level: float) -> tuple[float, float]:
        """Of the mean, at confidence 1 − ``level``."""
        reach = self.error * t_critical(level, self.pairs - 1)
        return self.mean - reach, self.mean + reach


class Judgement(msgspec.Struct, frozen=True):
    """The verdict on one number, and the interval of its mean by which it was judged; None with too few pairs."""

    verdict: Verdict
    interval: tuple[float, float] | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How b differs from a: ``difference`` b − a (mean), ``ratio`` b / a (geometric mean), with the intervals by which they
    were judged; None where undefined. The difference's interval is given only where there is no ratio.
    """

    pairs: int
    a: Spread
    b: Spread
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    verdict: Verdict = "no data"

    @property
    def higher(self) -> bool:
        """Whether b is more than a."""
        return self.ratio > 1.0 if self.ratio is not None else (self.difference or 0.0) > 0.0


def spread(values: Sequence[float | None]) -> Spread:
    """Median, quartiles (linear interpolation) and range; None entries are undefined and skipped.

    Raises:
        WorkloadError: a value is NaN or infinite.
    """
    known = _known(values)
    if not known.size:
        return Spread(count=0)
    q1, median, q3 = (float(q) for q in np.percentile(known, (25, 50, 75)))
    return Spread(count=int(known.size), median=median, q1=q1, q3=q3, low=float(known.min()), high=float(known.max()))


# Student's t --------------------------------------------------------------------------------------------------------------


def t_tail(t: float, freedom: int) -> float:
    """The chance of a Student's t beyond ± ``t`` with a whole number of degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = total = 1.0 if not odd else math.cos(angle)
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + (inside if freedom > 1 else 0.0))
    return max(0.0, 1.0 - inside)


@lru_cache(maxsize=4096)
def t_critical(level: float, freedom: int) -> float:
    """The t beyond ± of which lies ``level`` of Student's distribution."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > level else (low, middle)
    return high


# The verdict --------------------------------------------------------------------------------------------------------------


def estimate(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """What pairs say of one number; ``a[i]`` and ``b[i]`` belong together, at least one pair, all finite."""
    relative = min(a) > 0 and min(b) > 0
    if relative:
        changes = [math.log(y) - math.log(x) for x, y in zip(a, b, strict=True)]
        margin = math.log1p(MIN_EFFECT)
    else:
        changes = [y - x for x, y in zip(a, b, strict=True)]
        margin = MIN_EFFECT * max(abs(_median(a)), abs(_median(b)))
    count = len(changes)
    mean = math.fsum(changes) / count
    squares = math.fsum((change - mean) ** 2 for change in changes)
    error = math.sqrt(squares / (count - 1) / count) if count > 1 else math.inf
    return Estimate(pairs=count, mean=mean, error=error, margin=margin, relative=relative)


def judge_together(family: Sequence[Estimate]) -> list[Judgement]:
    """One verdict on each number of an experiment, all of them together (see the module)."""
    judged = sorted((i for i, one in enumerate(family) if one.pairs >= MIN_PAIRS), key=lambda i: family[i].p_value)
    found = [Judgement("too few repetitions")] * len(family)
    passing = True
    level = ERROR_RATE
    for place, i in enumerate(judged):
        if passing:
            level = ERROR_RATE / (len(judged) - place)
            passing = family[i].p_value <= level
        found[i] = Judgement(_verdict(family[i], passing, level), family[i].interval(level))
    return found


def _verdict(one: Estimate, passes: bool, level: float) -> Verdict:
    low, high = one.interval(level)
    # Equal factors differ in their last digit: a difference of exactly the margin is meant to count.
    if passes and abs(one.mean) >= one.margin * (1 - 1e-9):
        return "clear"
    return "too small" if -one.margin <= low and high <= one.margin else "not clear"


def compare_together(family: Sequence[tuple[Sequence[float | None], Sequence[float | None]]]) -> list[Comparison]:
    """Compare the numbers of one experiment: each as values of a and of b by repetition; pairs with a None are left out.

    Raises:
        WorkloadError: different lengths, or a value is NaN or infinite.
    """
    paired = [_pairs(a, b) for a, b in family]
    estimates = [estimate(*each) for each in paired if each[0]]
    judged = iter(zip(estimates, judge_together(estimates), strict=True))
    return [_comparison(a, b, *next(judged)) if a else Comparison(pairs=0, a=spread(()), b=spread(())) for a, b in paired]


def compare_paired(a: Sequence[float | None], b: Sequence[float | None]) -> Comparison:
    """Compare one number alone, as ``compare_together`` does with several.

    Raises:
        WorkloadError: different lengths, or a value is NaN or infinite.
    """
    return compare_together([(a, b)])[0]


def _pairs(a: Sequence[float | None], b: Sequence[float | None]) -> tuple[list[float], list[float]]:
    if len(a) != len(b):
        raise WorkloadError(f"{len(a)} repetitions of a and {len(b)} of b are no pairs: compare as many of each")
    both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return [float(x) for x in _known([x for x, _ in both])], [float(y) for y in _known([y for _, y in both])]


def _comparison(a: list[float], b: list[float], found: Estimate, judged: Judgement) -> Comparison:
    interval = judged.interval
    return Comparison(
        pairs=found.pairs,
        a=spread(a),
        b=spread(b),
        difference=math.fsum(y - x for x, y in zip(a, b, strict=True)) / len(a),
        difference_interval=None if found.relative else interval,
        ratio=math.exp(found.mean) if found.relative else None,
        ratio_interval=(_exp(interval[0]), _exp(interval[1])) if found.relative and interval else None,
        verdict=judged.verdict,
    )


def _exp(value: float) -> float:
    """The exponential, within what a file can hold."""
    return math.exp(min(max(value, -600.0), 600.0))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def ecdf(values: Sequence[float | None], most: int = 500) -> list[tuple[float, float]]:
    """The empirical distribution as (value, share of values at or below it), rising, ending at share 1.

    One point for each distinct value; beyond ``most`` they are thinned evenly in rank, first and last kept.

    Raises:
        WorkloadError: a value is NaN or infinite.
    """
    whole("most", most, 2, 1_000_000)
    known = _known(values)
    if not known.size:
        return []
    distinct, counts = np.unique(known, return_counts=True)
    shares = np.cumsum(counts) / known.size
    if distinct.size > most:
        kept = np.unique(np.linspace(0, distinct.size - 1, most).round().astype(int))
        distinct, shares = distinct[kept], shares[kept]
    return [(float(x), float(y)) for x, y in zip(distinct, shares, strict=True)]


def _known(values: Sequence[float | None]) -> np.ndarray:
    known = [float(value) for value in values if value is not None]
    if not all(math.isfinite(value) for value in known):
        raise WorkloadError("a value is NaN or infinite, which no measurement gives: leave it out, or pass None")
    return np.array(known, dtype=np.float64)
