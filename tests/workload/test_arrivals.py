import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.workload.arrivals import Arrivals, ArrivalStream, burstiness_of, due_times
from engine.workload.check import WorkloadError
from engine.workload.lengths import Lengths

COUNT = 20_000
OPEN = st.sampled_from(["poisson", "constant", "bursty"])


def gaps(count=COUNT, seed=5, **fields):
    return np.diff(due_times(Arrivals(**fields), count, seed))


@pytest.mark.parametrize(
    ("fields", "cv"),
    [
        ({"process": "poisson"}, 1.0),
        ({"process": "constant"}, 0.0),
        ({"process": "bursty", "burstiness": 0.25}, 2.0),
        ({"process": "bursty", "burstiness": 4.0}, 0.5),
        ({"process": "bursty", "burstiness": 1.0}, 1.0),
    ],
)
@pytest.mark.parametrize("rate", [0.2, 1.0, 40.0])
def test_gaps_have_the_mean_and_variation_of_their_process(fields, cv, rate):
    drawn = gaps(rate=rate, **fields)
    # standard errors of mean and CV for 20,000 gaps; five of them is a bound that a right generator meets
    assert drawn.mean() == pytest.approx(1 / rate, rel=5 * max(cv, 1e-9) / math.sqrt(COUNT) + 1e-9)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, abs=max(0.08 * cv * max(1, cv), 1e-6))
    assert Arrivals(rate=rate, **fields).cv == pytest.approx(cv)


def test_poisson_counts_vary_as_much_as_their_mean():
    times = np.array(due_times(Arrivals(process="poisson", rate=3.0), 30_000, 2))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(3.0, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.06)


def test_gamma_gaps_of_shape_one_are_exponential():
    drawn = np.sort(gaps(process="bursty", burstiness=1.0))
    shares = 1 - np.exp(-drawn)
    distance = np.abs(shares - np.arange(1, drawn.size + 1) / drawn.size).max()
    assert distance < 1.6 / math.sqrt(drawn.size)  # Kolmogorov–Smirnov, beyond the 1 % point


@given(OPEN, st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_the_same_seed_gives_the_same_arrivals_and_the_first_is_due_at_0(process, seed, rate):
    arrivals = Arrivals(process=process, rate=rate)
    first, again = due_times(arrivals, 20, seed), due_times(arrivals, 20, seed)
    assert first == again
    assert first[0] == 0.0
    assert first == sorted(first)


def test_another_seed_gives_other_arrivals():
    assert due_times(Arrivals(), 10, 1) != due_times(Arrivals(), 10, 2)


@given(OPEN, st.integers(0, 1000), st.floats(0.1, 50))
def test_the_pattern_does_not_depend_on_the_rate(process, seed, rate):
    at_one = due_times(Arrivals(process=process, rate=1.0), 15, seed)
    at_rate = due_times(Arrivals(process=process, rate=rate), 15, seed)
    assert at_rate == pytest.approx([due / rate for due in at_one])


def test_a_change_of_rate_stretches_what_is_left_of_the_gap():
    stream = ArrivalStream(Arrivals(process="constant", rate=1.0), np.random.default_rng(0))
    assert stream.pop() == 0.0
    stream.set_rate(4.0, 0.5)  # half of the gap is left, and now lasts 1/8
    assert stream.next == pytest.approx(0.625)
    stream.set_rate(0.0, 0.55)
    assert stream.next == math.inf
    with pytest.raises(WorkloadError, match="raise the rate"):
        stream.pop()
    stream.set_rate(2.0, 10.0)  # 0.3 of a gap is left
    assert stream.pop() == pytest.approx(10.15)
    assert stream.pop() == pytest.approx(10.65)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 20)), max_size=8), st.integers(0, 99))
def test_due_times_rise_whatever_the_rate_does(changes, seed):
    stream = ArrivalStream(Arrivals(), np.random.default_rng(seed))
    last = now = 0.0
    for wait, rate in changes:
        now += wait
        while stream.next <= now:
            due = stream.pop()
            assert due >= last
            last = due
        stream.set_rate(rate, now)
        assert stream.next >= now - 1e-9


def test_burstiness_of_a_variation():
    assert burstiness_of(2.0) == 0.25
    assert Arrivals(process="bursty", burstiness=burstiness_of(3.0)).cv == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rate": 0}, "rate=0 must be a number from 1e-06"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"rate": True}, "rate=True"),
        ({"rate": 1e9}, "10,000"),
        ({"process": "weekly"}, "process='weekly' must be one of 'poisson'"),
        ({"unit": "hours"}, "unit='hours'"),
        ({"burstiness": 0.001}, "burstiness=0.001"),
        ({"in_flight": 0}, "in_flight=0 must be a whole number from 1"),
        ({"think": -1}, "think=-1"),
        ({"unit": "steps", "think": 1.5}, "think=1.5 must be a whole number"),
    ],
)
def test_impossible_arrivals_are_refused_with_field_value_and_limit(fields, words):
    with pytest.raises(WorkloadError, match=words.replace("(", r"\(")):
        Arrivals(**fields)


# Lengths ------------------------------------------------------------------------------------------------------------------


def drawn_lengths(count=20_000, **fields):
    rng = np.random.default_rng(3)
    return np.array([Lengths(**fields).draw(rng) for _ in range(count)])


def test_lengths_follow_their_distribution():
    assert set(drawn_lengths(50, tokens=7)) == {7}
    uniform = drawn_lengths(distribution="uniform", low=10, high=19)
    assert set(uniform) == set(range(10, 20))
    assert uniform.mean() == pytest.approx(14.5, abs=0.1)
    logs = np.log(drawn_lengths(distribution="lognormal", tokens=1000, sigma=0.5, high=10**6))
    assert np.exp(np.median(logs)) == pytest.approx(1000, rel=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.03)


@given(
    st.sampled_from(["uniform", "lognormal"]), st.integers(1, 100), st.integers(0, 400), st.floats(0, 5), st.integers(0, 50)
)
def test_lengths_stay_within_their_limits(distribution, low, width, sigma, seed):
    lengths = Lengths(distribution=distribution, tokens=low, low=low, high=low + width, sigma=sigma)
    rng = np.random.default_rng(seed)
    assert all(lengths.least <= lengths.draw(rng) <= lengths.most for _ in range(30))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": 0}, "tokens=0 must be a whole number from 1"),
        ({"tokens": 2.5}, "tokens=2.5"),
        ({"distribution": "uniform", "low": 9, "high": 3}, "low=9 is more than high=3"),
        ({"distribution": "lognormal", "tokens": 5000}, "tokens=5,000, the median, lies outside low=1 to high=4,096"),
        ({"sigma": -0.1}, "sigma=-0.1"),
    ],
)
def test_impossible_lengths_are_refused(fields, words):
    with pytest.raises(WorkloadError, match=words):
        Lengths(**fields)
