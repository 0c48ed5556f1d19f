"""Metrics mean what their definitions say, in every state; and agree with the steps of the real engine."""

from __future__ import annotations

import json
import math
import random
import time
from fractions import Fraction
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.trace import RequestTrace, Scheduled, StepTrace
from engine.observe import metrics as m
from engine.observe.metrics import Objectives, Summary, Window, measure, summarise
from tests.observe.runs import random_run, trace

SEEDS = st.integers(0, 10_000)


# One token, no token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 200])
def test_single_token_answers_have_no_tpot_and_no_gaps(k: int) -> None:
    run = measure([trace(str(i), i, [i + 0.5]) for i in range(k)])
    assert run.latency["tpot"] == Summary()
    assert run.latency["itl"] == Summary()
    assert run.latency["user_tokens_per_second"] == Summary()
    assert run.latency["ttft"].count == k
    assert run.latency["decode"].mean == 0.0  # first and last token are one: it decoded for no time


def test_tpot_of_a_mix_rests_on_the_requests_that_have_one() -> None:
    run = measure([trace("one", 0.0, [0.2]), trace("five", 0.0, [0.2, 0.3, 0.4, 0.5, 0.6])])
    assert run.latency["tpot"].count == 1
    assert run.latency["tpot"].mean == pytest.approx(0.100)  # (0.6 − 0.2) / 4
    assert run.latency["itl"].count == 4


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_ends_without_a_token_has_a_time_to_finish_and_nothing_else(reason: str) -> None:
    request = trace("cut", 1.0, [], finished=3.0, reason=reason)  # type: ignore[arg-type]
    assert m.time_to_finish(request) == 2.0
    assert m.parts(request) == m.Parts()
    values = m.latency_values(request)
    assert {name for name, value in values.items() if value is not None} == {"time_to_finish"}
    run = measure([request])
    assert {name for name, s in run.latency.items() if s.count} == {"time_to_finish"}


def test_an_aborted_request_counts_with_what_happened_and_is_never_fast() -> None:
    cut = trace("cut", 0.0, [1.0, 1.5], finished=2.0, reason="abort")
    run = measure([cut, trace("whole", 0.0, [1.0, 2.0, 3.0])], objectives=Objectives(ttft=5.0))
    assert run.latency["ttft"].count == 2
    assert run.latency["itl"].count == 3
    assert (run.latency["e2e"].count, run.latency["tpot"].count, run.latency["decode"].count) == (1, 1, 1)
    assert run.output_tokens == 5
    assert run.goodput is not None and (run.goodput.good, run.goodput.judged) == (1, 2)


@pytest.mark.parametrize(("max_tokens", "n"), [(128, 5), (5, 5), (4096, 2)])
def test_tpot_divides_by_the_tokens_generated_not_by_those_asked_for(max_tokens: int, n: int) -> None:
    """Stops early, and nothing of its text need be visible: the counts are those of the ids."""
    times = [0.2 + 0.4 * i / (n - 1) for i in range(n)]  # first 0.2 s, last 0.6 s
    request = trace("a", 0.0, times, reason="stop", max_tokens=max_tokens)
    assert request.tpot == pytest.approx(0.4 / (n - 1))
    assert measure([request]).output_tokens == n


def test_engine_ttft_and_time_to_first_text_are_two_numbers() -> None:
    """Tokens at 0.3 and 0.4; the first is half an emoji, so text shows at 0.4."""
    request = trace("a", 0.0, [0.3, 0.4])
    assert request.ttft == 0.3
    assert m.time_to_first_text(request, ["", "🙂"]) == 0.4
    assert m.time_to_first_text(request, ["", ""]) is None
    assert m.DEFINITIONS["ttft"].label != m.DEFINITIONS["time_to_first_text"].label


# Every state --------------------------------------------------------------------------------------------------------------

STATES = {
    "nothing yet": [],
    "waiting": [trace("w", 0.0, [], reason=None, first_scheduled=-1.0)],
    "running": [trace("r", 0.0, [1.0], reason=None)],
    "all failed": [trace(str(i), 0.0, [], finished=1.0, reason="error") for i in range(3)],
    "all refused": [
        trace(str(i), 0.0, [], finished=0.0, reason="error", queued=-1.0, first_scheduled=-1.0) for i in range(3)
    ],
    "all aborted at once": [trace(str(i), 2.0, [], finished=2.0, reason="abort") for i in range(3)],
    "instantaneous": [trace("i", 5.0, [5.0])],
    "instantaneous, several tokens": [trace("i", 5.0, [5.0, 5.0, 5.0])],
    "instantaneous among others": [trace("i", 5.0, [5.0]), trace("j", 5.0, [6.0, 7.0])],
    "due at zero": [trace("z", 0.0, [0.0, 0.0])],
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("objectives", [None, Objectives(), Objectives(ttft=1, tpot=1, e2e=1)])
def test_no_state_breaks_the_report(state: str, objectives: Objectives | None) -> None:
    requests = STATES[state]
    run = measure(requests, objectives=objectives)
    json.dumps(msgspec.to_builtins(run), allow_nan=False)
    assert run.counts.arrived == len(requests)
    assert set(run.latency) == set(m.LATENCIES)
    for summary in run.latency.values():
        assert (summary.mean is None) == (summary.count == 0)


def test_when_all_failed_the_report_says_none_of_k() -> None:
    run = measure(STATES["all failed"], objectives=Objectives(ttft=1.0))
    assert (run.counts.completed, run.counts.failed, run.counts.arrived) == (0, 3, 3)
    assert run.request_throughput == 0.0
    assert run.output_throughput == 0.0
    assert run.latency["ttft"] == Summary()
    assert run.goodput is not None and (run.goodput.attainment, run.goodput.judged) == (0.0, 3)


def test_no_time_gives_no_rate() -> None:
    run = measure(STATES["instantaneous"])
    assert (run.request_throughput, run.output_throughput, run.concurrency.mean) == (None, None, None)
    assert run.output_tokens == 1
    assert m.user_tokens_per_second(STATES["instantaneous, several tokens"][0]) is None


def test_nothing_yet_has_no_data_at_all() -> None:
    run = measure([], refused=2, objectives=Objectives(ttft=1.0))
    assert run.window is None
    assert (run.counts.arrived, run.counts.refused, run.counts.completed) == (2, 2, 0)
    assert run.request_throughput is None
    assert run.goodput is not None and run.goodput.attainment == 0.0


# Due, not sent ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 2])
def test_latency_counts_from_when_a_request_was_due(concurrency: int) -> None:
    """One server, 1.0 s a request; due at 0, 0.1 … 0.4: the wait of the ones that could not be sent is theirs."""
    free = [0.0] * concurrency
    requests = []
    for i in range(5):
        due = i / 10
        begin = max(due, free[0])
        free = sorted([*free[1:], begin + 1.0])
        requests.append(trace(str(i), due, [begin + 1.0], tokenised=begin, queued=begin, first_scheduled=begin))
    run = measure(requests)
    expected = {1: [1.0, 1.9, 2.8, 3.7, 4.6], 2: [1.0, 1.0, 1.8, 1.8, 2.6]}[concurrency]
    assert [r.e2e_latency for r in requests] == pytest.approx(expected)
    assert run.latency["e2e"].mean == pytest.approx({1: 2.8, 2: 1.64}[concurrency])
    assert run.offered_rate == pytest.approx(10.0)  # four gaps in 0.4 s
    assert run.request_throughput == pytest.approx(5 / {1: 5.0, 2: 3.0}[concurrency])


# Parts --------------------------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_parts_add_up_to_e2e_exactly(seed: int) -> None:
    run = random_run(seed)
    for request in run.traces:
        split = m.parts(request)
        if not request.token_times:
            assert split == m.Parts()
            continue
        pieces = [split.tokenise, split.queue, split.prefill, split.decode]
        assert all(p is not None and p >= 0 for p in pieces), (request, split)
        # times are multiples of 1/64 s, so sums of differences are exact
        assert sum(p for p in pieces if p is not None) == split.e2e == request.e2e_latency
        assert split.ttft == request.ttft


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=5).map(sorted))
def test_borders_of_the_parts_telescope_for_any_times(times: list[float]) -> None:
    arrival, tokenised, scheduled, first, last = times
    split = m.parts(trace("a", arrival, [first, last], tokenised=tokenised, queued=tokenised, first_scheduled=scheduled))
    borders = [split.arrival, split.tokenised, split.first_scheduled, split.first_token, split.last_token]
    assert borders == times
    exact = [Fraction(b) - Fraction(a) for a, b in pairwise(times)]
    assert sum(exact) == Fraction(last) - Fraction(arrival)
    parts = (split.tokenise, split.queue, split.prefill, split.decode)
    for part, value in zip(parts, exact, strict=True):
        assert part == pytest.approx(float(value), abs=1e-9)
    assert split.e2e == last - arrival


def test_a_prompt_that_came_as_tokens_spends_no_time_on_tokenising() -> None:
    split = m.parts(trace("a", 1.0, [4.0, 5.0], tokenised=-1.0, queued=-1.0, first_scheduled=3.0))
    assert (split.tokenise, split.queue, split.prefill, split.decode) == (0.0, 2.0, 1.0, 1.0)


def test_a_running_request_has_the_parts_it_reached() -> None:
    split = m.parts(trace("a", 1.0, [], reason=None, first_scheduled=2.5))
    assert (split.tokenise, split.queue, split.prefill, split.decode, split.e2e) == (0.0, 1.5, None, None, None)


@pytest.mark.parametrize("n", [2, 5, 101])
def test_identity_of_latency(n: int) -> None:
    """1.0 s to the first token, 40 ms a token, 101 tokens → 5.0 s."""
    request = trace("a", 0.0, [1.0 + 0.04 * i for i in range(n)])
    sides = m.identity(request)
    assert sides is not None and sides[0] == pytest.approx(sides[1]) == pytest.approx(1.0 + 0.04 * (n - 1))
    assert m.identity(trace("b", 0.0, [1.0])) is None
    assert m.user_tokens_per_second(request) == pytest.approx(25.0)


# Totals -------------------------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_totals_over_requests_equal_totals_over_steps(seed: int) -> None:
    """With aborted, failed, refused and preempted requests in the run; drained or cut off in the middle."""
    for drain in (True, False):
        run = random_run(seed, drain=drain)
        assert m.totals_of_requests(run.traces) == m.totals_of_steps(run.steps)
        whole = measure(run.traces, run.steps, refused=run.refused)
        counts = whole.counts
        assert counts.arrived == len(run.traces) + run.refused
        assert counts.arrived == (counts.completed + counts.aborted + counts.failed + counts.refused + counts.unfinished)
        assert whole.output_tokens == sum(row.sampled >= 0 for step in run.steps for row in step.scheduled)


def test_the_random_runs_hold_what_they_are_meant_to_hold() -> None:
    runs = [random_run(seed) for seed in range(40)]
    ends = {m.outcome(r) for run in runs for r in run.traces}
    assert ends == {"completed", "aborted", "failed"}
    assert all(any(test(run) for run in runs) for test in (
        lambda run: run.refused,
        lambda run: any(step.preemptions for step in run.steps),
        lambda run: any(r.parent_id for r in run.traces),
        lambda run: any(r.slow for r in run.traces),
        lambda run: any(row.kind == "padding" for step in run.steps for row in step.scheduled),
        lambda run: any(r.finished >= 0 and not r.token_times for r in run.traces),
    ))  # fmt: skip


# Windows ------------------------------------------------------------------------------------------------------------------


def test_a_window_counts_tokens_inside_it_and_leaves_the_warm_up_out() -> None:
    """Window 10 … 20. W: warm-up, due 8, tokens 9, 10.5, 11. A: due 12, tokens 13, 15. B: due 19, tokens 21, 30.

    By hand: tokens inside 10.5, 11, 13, 15 = 4; prompts answered inside: A's 100; completed inside: W (11), A (15) = 2.
    Latencies: A and B, followed to their end: TTFT 1, 2; E2E 3, 11; TPOT 2, 9; gaps 2, 9.
    Present: W 10–11, A 12–15, B 19–20 = 5 s of 10. Little: (W's 3 + A's 3)/10.
    """
    requests = [
        trace("W", 8.0, [9.0, 10.5, 11.0], prompt_tokens=7),
        trace("A", 12.0, [13.0, 15.0], prompt_tokens=100),
        trace("B", 19.0, [21.0, 30.0], prompt_tokens=1000),
    ]
    run = measure(requests, window=Window(10.0, 20.0), objectives=Objectives(e2e=5.0))
    assert (run.output_tokens, run.input_tokens) == (4, 100)
    assert (run.output_throughput, run.input_throughput, run.total_throughput) == (0.4, 10.0, 10.4)
    assert run.request_throughput == 0.2
    assert run.counts.arrived == 2
    assert run.latency["ttft"].mean == 1.5
    assert run.latency["e2e"].mean == 7.0
    assert run.latency["tpot"].mean == 5.5
    assert run.latency["itl"].max == 9.0
    assert run.concurrency == m.Concurrency(mean=0.5, little=0.6, peak=1)
    # good: W and A complete inside with E2E 3; of A and B, which were due inside, A is good
    assert run.goodput == m.Goodput(good=1, judged=2, attainment=0.5, rate=0.2)


@given(SEEDS, st.integers(1, 10))
def test_windows_that_share_no_border_event_split_the_tokens(seed: int, cut: int) -> None:
    run = random_run(seed)
    whole = m.whole_run(run.traces)
    assert whole is not None
    border = whole.start + whole.length * cut / 11 + 1 / 997  # between multiples of 1/64 s
    parts = [m.tokens_in(run.traces, w) for w in (Window(whole.start, border), Window(border, whole.end + 1))]
    assert tuple(map(sum, zip(*parts, strict=True))) == m.tokens_in(run.traces, whole)


def test_samples_of_one_prompt_count_it_once() -> None:
    requests = [trace("a", 0.0, [1.0], prompt_tokens=50), trace("a#1", 0.0, [1.0], prompt_tokens=50, parent_id="a")]
    assert m.tokens_in(requests, Window(0.0, 2.0)) == (50, 2)


# Summaries ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300))
def test_summaries_are_numpys(samples: list[float]) -> None:
    summary = summarise(samples)
    assert summary.count == len(samples)
    assert summary.p99_flagged == (len(samples) < 100)
    for value, q in ((summary.p50, 50), (summary.p90, 90), (summary.p95, 95), (summary.p99, 99)):
        assert value == pytest.approx(float(np.percentile(samples, q)), rel=1e-12, abs=1e-9)
    assert summary.mean == pytest.approx(float(np.mean(samples)), rel=1e-12, abs=1e-9)
    assert summary.std == pytest.approx(float(np.std(samples)), rel=1e-9, abs=1e-6)
    assert (summary.min, summary.max) == (min(samples), max(samples))


def test_a_summary_by_hand() -> None:
    """1, 2, 3, 4, 10: rank of p90 is 0.9 · 4 = 3.6 → 4 + 0.6 · 6 = 7.6; variance (9 + 4 + 1 + 0 + 36) / 5 = 10."""
    s = summarise([10.0, 1.0, 4.0, 2.0, 3.0])
    assert (s.count, s.mean, s.min, s.p50, s.max) == (5, 4.0, 1.0, 3.0, 10.0)
    assert (s.p90, s.p95, s.p99, s.std) == pytest.approx((7.6, 8.8, 9.76, math.sqrt(10)))


def test_undefined_samples_are_skipped_and_impossible_ones_refused() -> None:
    assert summarise([None, 1.0, None]).count == 1
    assert summarise([None]) == Summary()
    with pytest.raises(ValueError, match="2 of 3 samples"):
        summarise([1.0, float("nan"), float("inf")])


def test_p99_is_flagged_below_a_hundred_samples() -> None:
    assert not summarise([]).p99_flagged
    assert summarise([1.0] * 99).p99_flagged
    assert not summarise([1.0] * 100).p99_flagged


def test_slow_motion_is_left_out_of_percentiles_and_counted() -> None:
    run = measure([trace("a", 0.0, [1.0, 2.0]), trace("s", 0.0, [50.0, 100.0], slow=True)], objectives=Objectives(e2e=500))
    assert (run.counts.slow, run.latency["ttft"].count, run.latency["itl"].max) == (1, 1, 1.0)
    assert run.goodput is not None and run.goodput.judged == 1
    assert run.output_tokens == 4


# Goodput ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (Objectives(), 3),
        (Objectives(ttft=0.2, tpot=0.029), 2),  # R2's TPOT is 30 ms; R3 has one token and can't miss it
        (Objectives(ttft=0.1), 1),
        (Objectives(e2e=0.206), 2),
        (Objectives(ttft=0.2, tpot=0.03, e2e=0.31), 3),
    ],
)
def test_goodput_of_the_golden_requests(objectives: Objectives, good: int) -> None:
    """R1 TTFT 95, TPOT 27.75, E2E 206; R2 160, 30, 310; R3 170, –, 170 ms."""
    requests = [
        trace("R1", 0.0, [0.095, 0.115, 0.141, 0.161, 0.206]),
        trace("R2", 0.040, [0.2, 0.26, 0.26, 0.29, 0.35, 0.35]),
        trace("R3", 0.110, [0.28]),
    ]
    # limits that a value meets exactly in decimal get room for the rounding of differences
    roomy = Objectives(**{f: v + 1e-12 for f, v in msgspec.structs.asdict(objectives).items() if v is not None})
    result = m.goodput(requests, Window(0.0, 0.352), roomy)
    assert (result.good, result.judged) == (good, 3)
    assert result.rate == pytest.approx(good / 0.352)
    assert result.attainment == pytest.approx(good / 3)


def test_refusals_and_failures_count_against_attainment() -> None:
    requests = [trace("a", 0.0, [1.0]), trace("f", 0.0, [], finished=1.0, reason="error")]
    assert m.goodput(requests, Window(0.0, 2.0), Objectives(ttft=2.0), refused=2).attainment == 0.25


def test_a_running_request_is_not_judged_yet() -> None:
    assert m.meets(trace("r", 0.0, [1.0], reason=None), Objectives(ttft=0.5)) is None


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_an_impossible_objective_is_refused_by_name(limit: float) -> None:
    with pytest.raises(ValueError, match="tpot"):
        Objectives(tpot=limit)


# Concurrency --------------------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_concurrency_equals_a_count_on_a_fine_grid(seed: int) -> None:
    run = random_run(seed)
    window = m.whole_run(run.traces)
    assert window is not None
    result = m.concurrency(run.traces, window)
    ticks = [window.start + (i + 0.5) / 64 for i in range(round(window.length * 64))]
    present = [sum(r.arrival < t < r.finished for r in run.traces) for t in ticks]
    assert result.peak == max(present, default=0)
    assert result.mean == pytest.approx(sum(present) / len(present)) if present else result.mean is None


def test_requests_that_follow_each_other_do_not_overlap() -> None:
    requests = [trace(str(i), float(i), [i + 1.0]) for i in range(4)]
    assert m.concurrency(requests, Window(0.0, 4.0)) == m.Concurrency(mean=1.0, little=1.0, peak=1)


# Steps --------------------------------------------------------------------------------------------------------------------


def step(index: int, start: float, **fields: object) -> StepTrace:
    return StepTrace(index=index, start=start, scheduled=(Scheduled("a", "decode", 1, 3),), **fields)  # type: ignore[arg-type]


def test_busy_share_and_achieved_rates() -> None:
    """Window 0 … 10. Forward passes 1.5–3.5 (inside), 9.5–11.5 (half a second inside); 2.5 s of 10 s.

    The first one ends inside: 8 GFLOP and 4 GB in 2 s.
    """
    steps = [
        step(0, 1.0, schedule_time=0.25, prepare_time=0.25, forward_time=2.0, end=3.6, flops=8e9, bytes=4e9),
        step(1, 9.5, forward_time=2.0, end=11.5, flops=8e9, bytes=4e9, slow=True),
        StepTrace(index=2, start=5.0, end=5.0),
    ]
    use = m.device_use(steps, Window(0.0, 10.0))
    assert use == m.DeviceUse(steps=1, slow_steps=0, busy_share=0.25, gflops=4.0, gbytes=2.0)
    assert m.step_rates(steps[0]) == (4.0, 2.0)


def test_uncounted_or_untimed_work_has_no_rate() -> None:
    assert m.step_rates(step(0, 0.0, forward_time=1.0)) == (None, None)
    assert m.step_rates(step(0, 0.0, flops=1e9, bytes=1e9)) == (None, None)
    assert m.device_use([], Window(0.0, 1.0)) == m.DeviceUse()


def test_anatomy_accounts_for_all_time_between_two_steps() -> None:
    """First step closes at 1 + (.1 + .2 + .5 + .1) = 1.9, tokens known at 2.0, postprocess to 2.3; next tokens at 5.0."""
    first = step(
        0, 1.0, schedule_time=0.1, prepare_time=0.2, forward_time=0.5, sample_time=0.1, postprocess_time=0.3, end=2.0
    )
    second = step(1, 4.0, schedule_time=0.1, forward_time=0.6, postprocess_time=0.2, wait_time=1.0, end=5.0)
    a = m.anatomy(second, first)
    assert a.other_labs == 1.0
    assert a.outside == pytest.approx((4.0 - 2.3 - 1.0) + (5.0 - 4.0 - 0.7))
    assert a.total == pytest.approx(m.step_close(second) - m.step_close(first))
    assert m.anatomy(first).outside == pytest.approx(0.1)


def test_anatomy_of_a_step_scheduled_ahead_counts_from_the_end_of_the_one_before() -> None:
    first = step(0, 1.0, schedule_time=0.1, forward_time=0.9, end=2.0)
    second = step(1, 1.2, schedule_time=0.1, forward_time=0.9, overlap=0.8, end=3.0)
    assert second.duration == pytest.approx(1.0)
    assert m.anatomy(second, first).outside == 0.0
    assert m.device_use([first, second], Window(2.0, 3.0)).busy_share == pytest.approx(0.9)


@given(SEEDS)
def test_anatomy_of_a_run_adds_up_to_its_length(seed: int) -> None:
    steps = random_run(seed).steps
    total = sum(m.anatomy(b, a).total for a, b in pairwise(steps))
    assert total == pytest.approx(m.step_close(steps[-1]) - m.step_close(steps[0]))


# Definitions and cost -----------------------------------------------------------------------------------------------------


def test_every_number_that_is_reported_is_defined() -> None:
    reported = {
        *m.LATENCIES,
        *(f for f in m.RunMetrics.__struct_fields__ if f.endswith(("throughput", "rate"))),
        *(f"concurrency_{f}" for f in m.Concurrency.__struct_fields__),
        *(f for f in m.DeviceUse.__struct_fields__ if "steps" not in f),
        "goodput",
        "attainment",
    }
    assert reported <= set(m.DEFINITIONS)
    for definition in m.DEFINITIONS.values():
        assert definition.label and definition.text.endswith(".") and definition.formula


def test_a_large_run_is_measured_in_a_moment() -> None:
    """2,000 requests of 100 tokens; the bound is loose, it catches a cost that grows with the square."""
    rng = random.Random(0)
    requests: list[RequestTrace] = []
    for i in range(2000):
        first = i / 10 + rng.random()
        requests.append(trace(str(i), i / 10, [first + j / 50 for j in range(100)]))
    begin = time.process_time()
    run = measure(requests, objectives=Objectives(ttft=1.0))
    assert run.latency["itl"].count == 2000 * 99
    assert time.process_time() - begin < 2.0
