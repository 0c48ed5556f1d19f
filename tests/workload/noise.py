"""How often an experiment's verdicts are wrong, and how often they find what is there, under several kinds of noise.

``python -m tests.workload.noise`` prints the table of ``docs/measurements.md``; the tests try a smaller one.

A made-up machine gives eleven timed numbers a run: its slowness in that run shows in all of them (throughput and speed fall,
latencies rise, the longest gap most), and each has noise of its own, of which neighbours share a part. Only the pairs matter
to a verdict, so a machine is what it does to ln(value).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from engine.workload.experiment import directions
from engine.workload.statistics import estimate, judge_together

SHOWS = np.array([1, -1, -1, 1, 1, 1, 1, 1.5, 1, 1, 0.3])
"""How much of the machine's slowness shows in each number; the second mirrors the first, the third the sixth."""
OWN = np.array([0.3, 0.3, 0.5, 1, 1.5, 0.5, 1.5, 4, 0.6, 1, 0.5])
"""How much noise of its own each number has, beside the others."""
NUMBERS = len(SHOWS)
Rng = np.random.Generator


def steady(scatter: float) -> Callable[[Rng, int], np.ndarray]:
    """Independent runs, lognormal."""
    return lambda rng, runs: rng.normal(0, scatter, runs)


def drifting(rng: Rng, runs: int) -> np.ndarray:
    """Each run keeps nine tenths of the slowness of the run before it."""
    slow = [rng.normal(0, 0.1)]
    while len(slow) < runs:
        slow.append(0.9 * slow[-1] + rng.normal(0, 0.1 * np.sqrt(1 - 0.81)))
    return np.array(slow)


def warming(rng: Rng, runs: int) -> np.ndarray:
    """Every run about 3 % slower than the one before it."""
    return 0.03 * rng.normal(1, 0.3) * np.arange(runs) + rng.normal(0, 0.01, runs)


def bursts(rng: Rng, runs: int) -> np.ndarray:
    """A neighbour slows every fifth run, at random, by 20 to 120 %."""
    return np.where(rng.random(runs) < 0.2, rng.uniform(0.2, 0.8, runs), 0) + rng.normal(0, 0.02, runs)


def halves(rng: Rng, runs: int) -> np.ndarray:
    """A neighbour slows every other run, at random, by half."""
    return np.where(rng.random(runs) < 0.5, 0.4, 0) + rng.normal(0, 0.01, runs)


def stays(rng: Rng, runs: int) -> np.ndarray:
    """A neighbour comes and stays for about four runs, then leaves for about four."""
    changes = rng.random(runs) < 0.25
    return 0.5 * ((np.cumsum(changes) + rng.integers(2)) % 2) + rng.normal(0, 0.02, runs)


def outliers(rng: Rng, runs: int) -> np.ndarray:
    """Now and then a run is far off: Student's t with two degrees of freedom."""
    return 0.03 * rng.standard_t(2, runs)


def rhythm(rng: Rng, runs: int) -> np.ndarray:
    """A neighbour works every so many runs, for half of them."""
    return _every(rng.uniform(1.5, 8), rng.random(), runs) + rng.normal(0, 0.02, runs)


def four(rng: Rng, runs: int) -> np.ndarray:
    """A neighbour slows two runs of every four: just as a b b a would have it."""
    return _every(4.0, rng.integers(4) / 4, runs) + rng.normal(0, 0.02, runs)


def _every(period: float, phase: float, runs: int) -> np.ndarray:
    return 0.4 * ((np.arange(runs) / period + phase) % 1 < 0.5)


MACHINES: dict[str, tuple[Callable[[Rng, int], np.ndarray], float]] = {
    "steady, 2 %": (steady(0.02), 0.01),
    "steady, 5 %": (steady(0.05), 0.025),
    "steady, 15 %": (steady(0.15), 0.075),
    "drifts": (drifting, 0.01),
    "warms by 3 % a run": (warming, 0.01),
    "a neighbour slows 1 run in 5": (bursts, 0.01),
    "a neighbour slows 1 run in 2": (halves, 0.01),
    "a neighbour comes and stays": (stays, 0.01),
    "heavy tails": (outliers, 0.01),
    "a neighbour with a rhythm": (rhythm, 0.01),
    "a rhythm of four runs": (four, 0.01),
}
"""The machine's slowness, run after run, in ln; and the numbers' own scatter."""


def pairs(machine: str, rng: Rng, count: int, order: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a and of b where nothing differs, [pairs, numbers] each, run in this order."""
    slowness, own = MACHINES[machine]
    runs = 2 * count
    noise = own * OWN * (0.7 * rng.normal(size=(runs, 1)) + 0.71 * rng.normal(size=(runs, NUMBERS)))
    noise[:, 1], noise[:, 2] = -noise[:, 0], -noise[:, 5]
    values = np.exp(SHOWS * slowness(rng, runs)[:, None] + noise).reshape(count, 2, NUMBERS)
    forwards = np.asarray(order)[:, None]
    return np.where(forwards, values[:, 0], values[:, 1]), np.where(forwards, values[:, 1], values[:, 0])


def rule(a: np.ndarray, b: np.ndarray) -> list[bool]:
    """What the experiments page calls clear."""
    family = [estimate(x, y) for x, y in zip(a.T.tolist(), b.T.tolist(), strict=True)]
    return [judged.verdict == "clear" for judged in judge_together(family)]


def bootstrap(a: np.ndarray, b: np.ndarray) -> list[bool]:
    """What was called clear before: each number alone, by the percentile bootstrap of the median ratio, from 1 %."""
    ratios = b / a
    picks = np.random.default_rng([0, len(ratios)]).integers(len(ratios), size=(1000, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), (2.5, 97.5), axis=0)
    middle = np.median(ratios, axis=0)
    return [bool(sure) for sure in ((low > 1) | (high < 1)) & (abs(middle - 1) >= 0.01)]


def alternating(count: int, seed: int) -> list[bool]:
    """The order of before: a b, b a, a b …"""
    return [place % 2 == 0 for place in range(count)]


def clear(
    machine: str,
    count: int,
    trials: int,
    *,
    effect: float = 0.0,
    touched: int = NUMBERS,
    judge: Callable[[np.ndarray, np.ndarray], list[bool]] = rule,
    order: Callable[[int, int], Sequence[bool]] = directions,
) -> np.ndarray:
    """What is called clear, [trials, numbers], where the first ``touched`` numbers of b are ``effect`` worse."""
    found = np.zeros((trials, NUMBERS), bool)
    worse = np.where(np.arange(NUMBERS) < touched, (1 + effect) ** np.sign(SHOWS), 1.0)
    for trial in range(trials):
        a, b = pairs(machine, np.random.default_rng([trial, count]), count, order(count, trial))
        found[trial] = judge(a, b * worse)
    return found


def main(trials: int) -> None:
    """Print the table: false verdicts, and what is found of a true difference."""
    _row("machine", "pairs", "false before", "false", "false, half differ", "5 % found", "10 % found", "30 % found")
    _row(*["---"] * 8)
    for machine in MACHINES:
        for count in (5, 10):
            before = clear(machine, count, trials, judge=bootstrap, order=alternating).any(1).mean()
            false = clear(machine, count, trials).any(1).mean()
            half = clear(machine, count, trials, effect=0.3, touched=6)[:, 6:].any(1).mean()
            wrong = [f"{100 * share:.1f} %" for share in (before, false, half)]
            found = [f"{100 * clear(machine, count, trials, effect=effect).mean():.0f} %" for effect in (0.05, 0.1, 0.3)]
            _row(machine, str(count), *wrong, *found)


def _row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
