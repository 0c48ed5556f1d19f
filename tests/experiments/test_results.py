"""Differences with known answers, warnings, and files that come back."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest

from engine.workload.arrivals import Arrivals
from engine.workload.datafile import DataFileError
from engine.workload.results import (
    COUNTED,
    NUMBERS,
    Compared,
    ExperimentResult,
    RunValues,
    cautions,
    differences,
    differences_csv,
    parse_result,
    read_result,
    spread_text,
    spreads,
    text_report,
    thinned,
    write_result,
)
from tests.experiments.conftest import small


def synthetic(a: dict[str, list[float]], b: dict[str, list[float]], **changes) -> ExperimentResult:
    """A result with given numbers of two variants."""
    runs = []
    for variant, numbers in (("static", a), ("continuous", b)):
        count = len(next(iter(numbers.values())))
        runs += [
            RunValues(variant=variant, repetition=i, values={name: values[i] for name, values in numbers.items()})
            for i in range(count)
        ]
    return ExperimentResult(experiment=small("static-continuous"), runs=tuple(runs), **changes)


def test_a_steady_factor_of_two_is_clear_and_said_in_words():
    base = [1.0, 1.1, 1.2, 1.3, 1.4]
    found = {
        d.name: d for d in differences(synthetic({"output_throughput": base}, {"output_throughput": [2 * x for x in base]}))
    }
    d = found["output_throughput"]
    assert (d.kind, d.ratio, d.interval, d.good) == ("clear", pytest.approx(2.0), pytest.approx((2.0, 2.0)), True)
    assert d.words == "With continuous, the server makes more of its time: 2.00 × that with static."


def test_what_rises_is_bad_where_less_is_better():
    found = differences(synthetic({"ttft_p50": [1.0] * 5}, {"ttft_p50": [1.2] * 5}))
    assert (found[0].kind, found[0].good) == ("clear", False)
    assert found[0].words == "With continuous, a typical user waits longer for the first token: 20 % more than with static."


def test_how_sure_the_size_is_stands_in_brackets():
    base = [1.0, 1.2, 1.1, 1.05, 1.3]
    (slower,) = differences(
        synthetic({"ttft_p50": base}, {"ttft_p50": [x * y for x, y in zip(base, (1.2, 1.22, 1.18, 1.2, 1.2), strict=True)]})
    )
    low, high = (100 * (end - 1) for end in slower.interval)
    assert slower.words.endswith(f": 20 % more than with static ({low:.0f} to {high:.0f} %).") and low < 19 < 21 < high
    (faster,) = differences(
        synthetic({"ttft_p50": base}, {"ttft_p50": [x * y for x, y in zip(base, (0.5, 0.52, 0.5, 0.5, 0.48), strict=True)]})
    )
    assert faster.words.endswith(": 50 % less than with static (48 to 52 %).")
    (twice,) = differences(
        synthetic({"ttft_p50": base}, {"ttft_p50": [x * y for x, y in zip(base, (2, 2.1, 2, 2, 1.9), strict=True)]})
    )
    assert twice.words.endswith(": 2.00 × that with static (1.91 to 2.09 ×).")


def test_what_is_not_clear_says_what_remains_possible():
    (noise,) = differences(synthetic({"ttft_p50": [1.0, 2.0, 1.5, 1.2, 1.8]}, {"ttft_p50": [1.6, 1.1, 1.9, 1.3, 1.4]}))
    assert (noise.kind, noise.good) == ("not clear", None)
    low, high = noise.interval
    assert low < 1 < high
    assert noise.words == f"Not clear: it may be {100 * (1 - low):.0f} % less, or {high:.2f} × as much."
    (shares,) = differences(synthetic({"attainment": [0.0, 0.5, 1.0, 0.5, 0.5]}, {"attainment": [1.0, 0.5, 0.0, 0.5, 0.5]}))
    assert shares.words == "Not clear: it may be 87.8 percentage points less, or 87.8 percentage points more."


def test_a_share_is_never_said_to_leave_0_to_100_percent():
    (shares,) = differences(synthetic({"attainment": [0.0, 0.3, 0.1, 0.2, 0.0]}, {"attainment": [1.0, 0.0, 0.9, 0.0, 0.5]}))
    assert shares.words == "Not clear: it may be 30.0 percentage points less, or 100.0 percentage points more."


def test_a_difference_too_small_to_matter_is_told_from_one_that_is_not_clear():
    (small_one,) = differences(synthetic({"ttft_p50": [1.0] * 5}, {"ttft_p50": [1.01, 1.012, 1.009, 1.01, 1.01]}))
    assert (small_one.kind, small_one.good) == ("too small", None)
    assert small_one.words == "No difference that matters: less than 3 % either way."


def test_too_few_repetitions_are_named():
    (few,) = differences(synthetic({"ttft_p50": [1.0, 1.0]}, {"ttft_p50": [2.0, 2.0]}))
    assert (few.kind, few.interval) == ("too few repetitions", None)
    assert few.words == "2 repetitions are too few to tell it from noise: run at least 5."


def test_all_timed_numbers_are_judged_together_and_exact_counts_are_not_among_them():
    base = [1.0] * 5
    unsure = [1.1, 1.3, 1.2, 1.25, 1.05]  # p = 0.018 alone
    noise = [1.1, 0.9, 1.05, 0.95, 1.0]
    counted = {name: [10.0] * 5 for name in COUNTED}
    alone = differences(synthetic({"ttft_p50": base, **counted}, {"ttft_p50": unsure, **counted}))
    assert {d.name: d.kind for d in alone} == {"ttft_p50": "clear", **dict.fromkeys(COUNTED, "equal")}
    others = ("ttft_p95", "tpot_p50", "itl_p95")
    among = differences(
        synthetic({"ttft_p50": base, **dict.fromkeys(others, base)}, {"ttft_p50": unsure, **dict.fromkeys(others, noise)})
    )
    assert {d.kind for d in among} == {"not clear"}


def test_what_is_counted_needs_no_repetitions():
    found = {
        d.name: d
        for d in differences(synthetic({"steps": [10.0], "preemptions": [0.0]}, {"steps": [5.0], "preemptions": [0.0]}))
    }
    assert found["steps"].kind == "counted"
    assert found["steps"].words == "With continuous, fewer passes over the weights: 50 % less than with static."
    assert found["preemptions"].words == "The same as with static."
    (tiny,) = differences(synthetic({"largest_step": [196.0]}, {"largest_step": [194.0]}))
    assert (tiny.kind, tiny.good) == ("counted", None)
    assert tiny.words == "Nearly the same: 1 % less than with static."
    from_none = differences(synthetic({"padding_tokens": [0.0]}, {"padding_tokens": [294.0]}))
    assert from_none[0].words.endswith("294 more than with static.")


def test_counts_that_vary_are_treated_as_measured():
    found = differences(synthetic({"steps": [10.0, 11, 12, 13, 14]}, {"steps": [11.0, 10, 14, 12, 13]}))
    assert found[0].kind == "not clear"


def test_counts_that_follow_the_clock_are_exact_only_when_enough_repetitions_agree():
    """One run each on a busy machine: 101 steps and 99 are no difference between the variants."""

    def kind(repetitions: int, unit: str) -> str:
        found = synthetic({"steps": [101.0] * repetitions}, {"steps": [99.0] * repetitions})
        workload = msgspec.structs.replace(found.experiment.workload, arrivals=Arrivals(unit=unit))
        timed = msgspec.structs.replace(found.experiment, workload=workload)
        return differences(msgspec.structs.replace(found, experiment=timed))[0].kind

    assert [kind(1, "steps"), kind(1, "seconds"), kind(5, "seconds")] == ["counted", "too few repetitions", "counted"]


def test_undefined_numbers_are_left_out():
    assert differences(synthetic({"ttft_p50": [None]}, {"ttft_p50": [None]})) == []
    assert spread_text(spreads(synthetic({"steps": [1.0]}, {"steps": [1.0]}), "static")["ttft_p50"], "ttft_p50") == "n/a"


def test_medians_are_shown_with_their_range_and_unit():
    found = synthetic({"ttft_p50": [0.1, 0.3, 0.2]}, {"ttft_p50": [0.1, 0.1, 0.1]})
    assert spread_text(spreads(found, "static")["ttft_p50"], "ttft_p50") == "200.0 (100.0 to 300.0)"
    assert spread_text(spreads(found, "continuous")["ttft_p50"], "ttft_p50") == "100.0"


def test_samples_are_thinned_to_quantiles_with_both_ends():
    values = [float(v) for v in range(10_000)]
    kept = thinned(values, 11)
    assert (len(kept), kept[0], kept[-1], kept[5]) == (11, 0.0, 9999.0, 5000.0)
    assert thinned([3.0, 1.0]) == (1.0, 3.0)


def test_every_number_says_what_it_is_and_what_more_and_less_of_it_mean():
    for name, number in NUMBERS.items():
        assert number.label and number.text.endswith(".") and number.higher != number.lower, name
    assert set(COUNTED) < set(NUMBERS)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"model": {"name": "other", "device": "cpu", "dtype": "none"}}, "model"),
        ({"model": {"name": "scripted", "device": "cuda:0", "dtype": "none"}}, "hardware"),
        ({"others": "other programs used 50 % of the processor"}, "hardware"),
    ],
)
def test_results_that_must_not_be_compared_are_named(change, about):
    base = synthetic({"steps": [1.0]}, {"steps": [1.0]}, model={"name": "scripted", "device": "cpu", "dtype": "none"})
    other = msgspec.structs.replace(base, **change)
    found = cautions([Compared(base, "static"), Compared(other, "static")])
    assert [caution.about for caution in found] == [about]
    assert cautions([Compared(base, "static"), Compared(base, "continuous")]) == []


def test_lengths_and_load_that_differ_are_named(result):
    other = msgspec.structs.replace(result, experiment=small("prefix-cache"), runs=(), shown=())
    run = RunValues(variant="on", repetition=0, values={}, prompt_tokens=1, output_tokens=1, requests=1)
    other = msgspec.structs.replace(other, runs=(run,))
    about = {caution.about for caution in cautions([Compared(result, "static"), Compared(other, "on")])}
    assert about == {"lengths", "concurrency"}


def test_a_result_survives_its_file(result, tmp_path):
    path = tmp_path / "a.experiment.json"
    path.write_bytes(write_result(result))
    again = read_result(path)
    assert again == result
    assert write_result(again) == write_result(result)
    assert differences(again) == differences(result)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"version":1,"experiment"', '"version":9,"experiment"', "reads version 1"),
        ('"variant":"static","repetition":0', '"variant":"gone","repetition":0', "'gone', which is no variant"),
        ('"repetition":0', '"repetition":"x"', "whole number"),
        ('"max_num_seqs":4', '"max_num_seqs":0', "max_num_seqs=0"),
        ('"made"', '"made', "no valid JSON"),
    ],
)
def test_a_damaged_result_is_refused_with_its_place(result, old, new, words):
    text = write_result(result).decode()
    assert old in text
    with pytest.raises(DataFileError) as caught:
        parse_result(text.replace(old, new, 1), "a.json")
    assert words in str(caught.value)
    assert "line 1" in str(caught.value)


def test_csv_has_a_line_for_every_number_and_no_formulas(result):
    evil = msgspec.structs.replace(result.runs[0], variant="static")
    rows = list(csv.DictReader(io.StringIO(differences_csv(result))))
    assert len(rows) == len(result.runs) * len(NUMBERS)
    first = next(r for r in rows if r["number"] == "duration")
    assert float(first["value"]) == evil.values["duration"] and first["unit"] == "s"
    experiment = small("static-continuous")
    variants = (msgspec.structs.replace(experiment.variants[0], name="=cmd()"), experiment.variants[1])
    named = msgspec.structs.replace(experiment, variants=variants, expect=())
    runs = (RunValues(variant="=cmd()", repetition=0, values={"steps": 1.0}),)
    assert ",'=cmd()," in differences_csv(ExperimentResult(experiment=named, runs=runs))


def test_the_terminal_s_report_tells_numbers_differences_and_expectations(result):
    text = text_report(result)
    assert "Steps" in text and "holds" in text and "With continuous, fewer passes over the weights" in text
    assert "Not clear with 3 repetitions: Time for all requests;" in text
