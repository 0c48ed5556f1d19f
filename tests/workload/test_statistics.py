import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.workload.check import WorkloadError
from engine.workload.statistics import (
    compare_paired,
    compare_together,
    ecdf,
    estimate,
    spread,
    t_critical,
    t_tail,
)
from tests.workload.noise import MACHINES, alternating, bootstrap, clear

FINITE = st.floats(-1e6, 1e6)


def test_the_spread_of_known_numbers():
    found = spread([5, 1, 3, None, 2, 4])
    assert (found.count, found.median, found.q1, found.q3, found.iqr, found.low, found.high) == (5, 3, 2, 4, 2, 1, 5)
    assert spread([None]).median is None
    assert spread([]).iqr is None


# Student's t --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [
        (0.05, 1, 12.7062),
        (0.05, 2, 4.3027),
        (0.05, 4, 2.7764),
        (0.01, 5, 4.0321),
        (0.10, 9, 1.8331),
        (0.05, 30, 2.0423),
        (0.001, 99, 3.3915),
    ],
)
def test_student_s_t_is_that_of_the_tables(level, freedom, expected):
    assert t_critical(level, freedom) == pytest.approx(expected, abs=5e-5)
    assert t_tail(expected, freedom) == pytest.approx(level, rel=1e-3)
    assert t_tail(0.0, freedom) == 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        a = rng.lognormal(0, 0.1, 5)
        low, high = compare_paired(a.tolist(), (1.2 * a * rng.lognormal(0, 0.2, 5)).tolist()).ratio_interval
        hits += low <= 1.2 <= high
    assert 0.93 <= hits / 1000 <= 0.97


# The verdict --------------------------------------------------------------------------------------------------------------


def test_a_steady_difference_is_clear_and_its_size_is_right():
    drift = [1.0, 1.3, 1.8, 0.9, 1.1, 2.0]  # the machine changes speed; the ratio does not
    a, b = [10 * d for d in drift], [8 * d for d in drift]
    found = compare_paired(a, b)
    assert found.verdict == "clear"
    assert found.ratio == pytest.approx(0.8)
    assert found.ratio_interval == pytest.approx((0.8, 0.8))
    assert found.difference < 0 and not found.higher


def test_the_worked_example_of_a_paired_t_test():
    """Differences 1, 2, 3, 4, 5: mean 3, standard error sqrt(2.5 / 5), t = 4.243, 95 % interval 3 ± 2.776 · 0.7071."""
    found = compare_paired([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.difference, found.ratio) == (3.0, None)
    assert found.difference_interval == pytest.approx((3 - 1.9632, 3 + 1.9632), abs=1e-4)
    assert estimate([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]).p_value == pytest.approx(0.01324, abs=1e-5)
    assert found.verdict == "clear"


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([], [], "no data"),
        ([1.0], [None], "no data"),
        ([1, 1, 1, 1], [9, 9, 9, 9], "too few repetitions"),
        ([100] * 6, [102] * 6, "too small"),
        ([100] * 6, [103] * 6, "clear"),
        ([103] * 6, [100] * 6, "clear"),
        ([0.0] * 5, [0.0] * 5, "too small"),
        ([0.0] * 5, [3.0] * 5, "clear"),
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], "not clear"),
        ([10] * 5, [11, 12, 10.5, 13, 12], "clear"),
        ([10] * 5, [11, 15, 10.1, 12, 10.5], "not clear"),
    ],
)
def test_the_decision(a, b, verdict):
    assert compare_paired(a, b).verdict == verdict


def test_numbers_judged_together_must_be_surer_than_one_alone():
    """p = 0.0132: enough alone, and after a surer one of two (Holm's second step), not as the surest of four."""
    unsure = ([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    surer, nothing = ([1.0] * 5, [2.0] * 5), ([1.0, 2.0] * 3, [2.0, 1.0] * 3)
    assert [found.verdict for found in compare_together([unsure, surer])] == ["clear", "clear"]
    assert [found.verdict for found in compare_together([unsure, nothing, nothing])] == ["clear", "not clear", "not clear"]
    found = compare_together([nothing, unsure, nothing, nothing])
    assert {each.verdict for each in found} == {"not clear"}
    low, high = found[1].difference_interval
    assert low < 0 < high, "the interval that is shown is the one that judged"


def test_numbers_without_enough_pairs_do_not_count_among_those_judged():
    unsure, few = ([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), ([1.0] * 4 + [None], [2.0] * 5)
    found = compare_together([few] * 10 + [unsure, ([None], [1.0])])
    assert [each.verdict for each in found] == ["too few repetitions"] * 10 + ["clear", "no data"]
    assert (found[0].pairs, found[0].ratio_interval) == (4, None)


POSITIVE = st.floats(0.01, 100.0)
FAMILIES = st.integers(5, 8).flatmap(
    lambda count: st.lists(
        st.tuples(*[st.lists(POSITIVE | st.just(1.0), min_size=count, max_size=count)] * 2), min_size=1, max_size=5
    )
)


@settings(max_examples=40)
@given(FAMILIES)
def test_swapping_both_mirrors_every_verdict(family):
    there, back = compare_together(family), compare_together([(b, a) for a, b in family])
    for one, other in zip(there, back, strict=True):
        assert one.verdict == other.verdict
        assert one.ratio * other.ratio == pytest.approx(1.0)
        assert one.verdict != "clear" or one.higher != other.higher
        assert one.ratio_interval[0] * other.ratio_interval[1] == pytest.approx(1.0)


@settings(max_examples=40)
@given(FAMILIES, st.sampled_from([2.0**-10, 0.5, 1024.0]))
def test_the_unit_changes_no_verdict(family, unit):
    scaled = [([unit * x for x in a], [unit * y for y in b]) for a, b in family]
    for one, other in zip(compare_together(family), compare_together(scaled), strict=True):
        assert one.ratio == pytest.approx(other.ratio)
        assert one.ratio_interval == pytest.approx(other.ratio_interval)
        if not any(abs(math.log(end)) < 1e-9 for end in one.ratio_interval):
            assert one.verdict == other.verdict


@settings(max_examples=40)
@given(FAMILIES)
def test_the_same_pairs_once_more_never_make_a_clear_difference_unclear(family):
    once, twice = compare_together(family), compare_together([(2 * a, 2 * b) for a, b in family])
    for one, other in zip(once, twice, strict=True):
        assert one.verdict != "clear" or other.verdict == "clear"


@settings(max_examples=40)
@given(FAMILIES)
def test_clear_is_what_leaves_out_no_change_and_matters(family):
    for found in compare_together(family):
        low, high = found.ratio_interval
        beyond = not low <= 1.0 <= high
        matters = abs(math.log(found.ratio)) >= math.log(1.03) * (1 - 1e-9)
        if min(abs(math.log(low)), abs(math.log(high))) > 1e-9:
            assert (found.verdict == "clear") == (beyond and matters)


# How often it is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_at_most_five_experiments_of_a_hundred_call_a_difference_where_there_is_none(machine):
    assert clear(machine, 5, 250).any(1).mean() <= 0.05
    assert clear(machine, 10, 60).any(1).mean() <= 0.05


def test_what_is_equal_stays_unnamed_where_other_numbers_differ():
    assert clear("steady, 5 %", 5, 250, effect=0.3, touched=6)[:, 6:].any(1).mean() <= 0.05


def test_each_number_alone_called_differences_that_are_none():
    """Why the rule is as strict as it is: the simulation does tell a good rule from a bad one."""
    assert clear("steady, 5 %", 5, 200, judge=bootstrap, order=alternating).any(1).mean() > 0.15


def test_differences_that_are_there_are_found():
    assert clear("steady, 2 %", 5, 100, effect=0.3).mean() >= 0.98
    assert clear("steady, 5 %", 5, 100, effect=0.3).mean() >= 0.85
    assert clear("steady, 5 %", 5, 100, effect=0.3).any(1).mean() >= 0.98
    assert clear("steady, 2 %", 10, 100, effect=0.05).mean() >= 0.8


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
    assert compare_paired(values, values).verdict in ("too small", "too few repetitions")
