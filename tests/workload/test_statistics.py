import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.workload.check import WorkloadError
from engine.workload.statistics import (
    bootstrap_interval,
    compare_paired,
    compare_unpaired,
    ecdf,
    spread,
)

FINITE = st.floats(-1e6, 1e6)


def test_the_spread_of_known_numbers():
    found = spread([5, 1, 3, None, 2, 4])
    assert (found.count, found.median, found.q1, found.q3, found.iqr, found.low, found.high) == (5, 3, 2, 4, 2, 1, 5)
    assert spread([None]).median is None
    assert spread([]).iqr is None


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        low, high = bootstrap_interval(rng.normal(10, 2, 25).tolist(), seed=trial, resamples=400)
        hits += low <= 10 <= high
    assert 0.90 <= hits / 300 <= 0.99


def test_the_interval_of_equal_values_is_that_value_and_the_seed_decides():
    assert bootstrap_interval([2.0] * 6) == (2.0, 2.0)
    values = [1.0, 2.0, 4.0, 8.0, 9.0, 3.0]
    assert bootstrap_interval(values, 1) == bootstrap_interval(values, 1)
    assert bootstrap_interval([]) is None


def test_a_steady_difference_is_clear_and_its_size_is_right():
    drift = [1.0, 1.3, 1.8, 0.9, 1.1, 2.0]  # the machine changes speed; the ratio does not
    a, b = [10 * d for d in drift], [8 * d for d in drift]
    found = compare_paired(a, b)
    assert found.verdict == "clear"
    assert found.ratio == pytest.approx(0.8)
    assert found.ratio_interval == pytest.approx((0.8, 0.8))
    assert found.difference < 0
    assert "0.80 × a" in found.words


def test_noise_is_called_noise():
    rng = np.random.default_rng(7)
    called = sum(
        compare_paired(rng.normal(10, 1, 8).tolist(), rng.normal(10, 1, 8).tolist(), seed).verdict == "clear"
        for seed in range(300)
    )
    assert called / 300 < 0.10


def test_a_real_difference_is_found_with_eight_repetitions():
    rng = np.random.default_rng(8)
    called = sum(
        compare_paired(rng.normal(10, 0.3, 8).tolist(), rng.normal(9, 0.3, 8).tolist(), seed).verdict == "clear"
        for seed in range(100)
    )
    assert called >= 95


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([], [], "no data"),
        ([1.0], [None], "no data"),
        ([1, 1, 1, 1], [9, 9, 9, 9], "too few repetitions"),
        ([100] * 6, [100.5] * 6, "within noise"),
        ([100] * 6, [102] * 6, "clear"),
        ([0.0] * 5, [0.0] * 5, "within noise"),
        ([0.0] * 5, [3.0] * 5, "clear"),
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], "within noise"),
    ],
)
def test_the_decision(a, b, verdict):
    found = compare_paired(a, b)
    assert found.verdict == verdict
    assert found.words


def test_unpaired_results_are_compared_by_their_medians():
    rng = np.random.default_rng(3)
    a, b = rng.normal(10, 0.5, 9).tolist(), rng.normal(13, 0.5, 7).tolist()
    found = compare_unpaired(a, b)
    assert found.verdict == "clear"
    assert found.difference == pytest.approx(np.median(b) - np.median(a))
    assert found.ratio_interval[0] < found.ratio < found.ratio_interval[1]
    assert compare_unpaired(a, a).verdict == "within noise"
    assert compare_unpaired(a, []).verdict == "no data"


def test_pairs_need_partners_and_finite_values():
    with pytest.raises(WorkloadError, match="2 repetitions of a and 1 of b"):
        compare_paired([1, 2], [1])
    with pytest.raises(WorkloadError, match="NaN"):
        spread([float("nan")])


@given(st.lists(FINITE, min_size=1, max_size=60), st.integers(2, 20))
def test_an_ecdf_rises_to_one_and_says_the_share_at_or_below(values, most):
    points = ecdf(values, most)
    assert len(points) <= max(most, 1)
    assert points[-1] == (max(values), pytest.approx(1.0))
    assert points[0][0] == min(values)
    assert points == sorted(points)
    for x, share in points:
        assert share == pytest.approx(sum(value <= x for value in values) / len(values))


def test_an_ecdf_of_nothing_is_empty():
    assert ecdf([None]) == []


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_a_run_compared_with_itself_never_differs(values):
    assert compare_paired(values, values).verdict in ("within noise", "too few repetitions")
