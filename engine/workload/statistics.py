"""Is a difference real? Medians, their spread, and the decision "within noise", for a handful of repetitions.

An experiment runs its variants in turn (A B, B A, A B …), so what drifts on the machine (heat, other programs) meets both
alike. Each repetition gives one pair of values, and the pairs are compared:

1. the effect is the median over the repetitions of b / a (a ratio), or of b − a where a ratio has no meaning;
2. its 95 % interval comes from the percentile bootstrap: the pairs are drawn again with replacement, 2,000 times, from a
   seed (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13);
3. a difference is **clear** when there are at least 5 pairs, the interval holds no "no change", and the effect is at least
   1 %. Otherwise it is **within noise**; with fewer than 5 pairs there are **too few repetitions** to tell.

With 5 pairs and no real difference all five point the same way in 1 of 16 cases: read "clear" after 5 as a strong hint, and
repeat more for proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from engine.workload.check import WorkloadError, whole

MIN_PAIRS = 5
"""Fewer repetitions than this never call a difference clear."""
MIN_EFFECT = 0.01
"""Relative differences under this are within noise, however steady: timing is no better on a shared machine."""
RESAMPLES = 2000
CONFIDENCE = 0.95

Verdict = Literal["clear", "within noise", "too few repetitions", "no data"]


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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How b differs from a: ``difference`` b − a, ``ratio`` b / a, and their 95 % intervals; None where undefined."""

    pairs: int
    a: Spread
    b: Spread
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    verdict: Verdict = "no data"

    @property
    def words(self) -> str:
        """The result as a sentence."""
        if self.verdict == "no data":
            return "There is nothing to compare."
        if self.verdict == "too few repetitions":
            return f"{self.pairs} repetitions are too few to tell a difference from noise: run at least {MIN_PAIRS}."
        if self.verdict == "within noise":
            return "The difference is within noise."
        if self.ratio is None or self.ratio_interval is None:
            assert self.difference is not None
            return f"b is {'higher' if self.difference > 0 else 'lower'} by {abs(self.difference):.3g}."
        low, high = self.ratio_interval
        return f"b is {self.ratio:.2f} × a (95 % interval {low:.2f} to {high:.2f})."


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


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Percentile-bootstrap interval of the median; None without values. The same seed gives the same interval."""
    whole("resamples", resamples, 10, 1_000_000)
    known = _known(values)
    if not known.size:
        return None
    rng = np.random.default_rng([seed, known.size])
    picks = rng.integers(known.size, size=(resamples, known.size))
    medians = np.median(known[picks], axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(medians, (tail, 100 - tail))
    return float(low), float(high)


def compare_paired(a: Sequence[float | None], b: Sequence[float | None], seed: int = 0) -> Comparison:
    """Compare repetitions that ran in turn: ``a[i]`` and ``b[i]`` belong together; pairs with a None are left out.

    Raises:
        WorkloadError: different lengths, or a value is NaN or infinite.
    """
    if len(a) != len(b):
        raise WorkloadError(f"{len(a)} repetitions of a and {len(b)} of b are no pairs: compare as many of each")
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    firsts, seconds = [x for x, _ in pairs], [y for _, y in pairs]
    if not pairs:
        return Comparison(pairs=0, a=spread(a), b=spread(b))
    differences = [y - x for x, y in pairs]
    ratios = [y / x for x, y in pairs] if all(x > 0 and y > 0 for x, y in pairs) else []
    interval, ratio_interval = bootstrap_interval(differences, seed), bootstrap_interval(ratios, seed)
    difference = float(np.median(differences))
    ratio = float(np.median(ratios)) if ratios else None
    return Comparison(
        pairs=len(pairs),
        a=spread(firsts),
        b=spread(seconds),
        difference=difference,
        difference_interval=interval,
        ratio=ratio,
        ratio_interval=ratio_interval,
        verdict=_verdict(len(pairs), difference, interval, ratio, ratio_interval, spread(firsts).median or 0.0),
    )


def compare_unpaired(a: Sequence[float | None], b: Sequence[float | None], seed: int = 0) -> Comparison:
    """Compare two sets of repetitions that did not run in turn (saved results): the medians, each drawn again by itself.

    Raises:
        WorkloadError: a value is NaN or infinite.
    """
    first, second = _known(a), _known(b)
    if not first.size or not second.size:
        return Comparison(pairs=0, a=spread(a), b=spread(b))
    rng = np.random.default_rng([seed, first.size, second.size])
    of_a = np.median(first[rng.integers(first.size, size=(RESAMPLES, first.size))], axis=1)
    of_b = np.median(second[rng.integers(second.size, size=(RESAMPLES, second.size))], axis=1)
    tails = (100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2)
    low, high = (float(x) for x in np.percentile(of_b - of_a, tails))
    median_a, median_b = float(np.median(first)), float(np.median(second))
    ratio, ratio_interval = None, None
    if first.min() > 0 and second.min() > 0:
        ratio = median_b / median_a
        ratio_low, ratio_high = (float(x) for x in np.percentile(of_b / of_a, tails))
        ratio_interval = (ratio_low, ratio_high)
    fewest, difference = int(min(first.size, second.size)), median_b - median_a
    return Comparison(
        pairs=fewest,
        a=spread(a),
        b=spread(b),
        difference=difference,
        difference_interval=(low, high),
        ratio=ratio,
        ratio_interval=ratio_interval,
        verdict=_verdict(fewest, difference, (low, high), ratio, ratio_interval, median_a),
    )


def _verdict(
    count: int,
    difference: float,
    interval: tuple[float, float] | None,
    ratio: float | None,
    ratio_interval: tuple[float, float] | None,
    base: float,
) -> Verdict:
    if count < MIN_PAIRS:
        return "too few repetitions"
    if ratio is not None and ratio_interval is not None:
        clear = not ratio_interval[0] <= 1.0 <= ratio_interval[1] and abs(ratio - 1.0) >= MIN_EFFECT
    else:
        assert interval is not None
        clear = not interval[0] <= 0.0 <= interval[1] and abs(difference) >= MIN_EFFECT * abs(base)
    return "clear" if clear else "within noise"


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
