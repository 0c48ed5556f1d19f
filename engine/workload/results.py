"""What an experiment found: values of every run, records of one repetition to draw, and the differences in words.

A result is plain data in one JSON file that carries the experiment itself, so it can be read, drawn and run again anywhere.
Numbers that are counted (steps, padding, hits) come out the same in every repetition where arrivals are in steps; numbers
that are timed do not, so they are given as the median of the repetitions with their spread, and a difference is called one
only when it stands out of the noise (``engine.workload.statistics``); all timed numbers of a result are judged together.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.trace import RequestTrace, StepTrace
from engine.workload.claims import MEASURES, Outcome, Run
from engine.workload.datafile import parse, read_file
from engine.workload.experiment import Caution, Conditions, Experiment, compatibility, conditions, judge_all
from engine.workload.spec import WorkloadSpec
from engine.workload.statistics import MIN_EFFECT, MIN_PAIRS, Comparison, Spread, compare_together, spread

VERSION = 1
SUFFIX = ".experiment.json"
MAX_SAMPLES = 2000
"""Latencies of one run that are kept for its distribution; more are thinned to as many evenly spaced quantiles."""
DISTRIBUTIONS = ("ttft", "tpot", "itl", "e2e")


class Number(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of differences.

    ``scale``: shown value = stored value × scale. ``better``: "more", "less" or "" (neither is good in itself). ``higher``
    and ``lower`` say in words what it means when a variant has more, or less, of it than the first one.
    """

    label: str
    unit: str
    text: str
    higher: str
    lower: str
    better: Literal["more", "less", ""] = "less"
    scale: float = 1.0
    digits: int = 1
    counted: bool = False


NUMBERS: dict[str, Number] = {
    "duration": Number(
        label="Time for all requests",
        unit="s",
        digits=2,
        text="From the first arrival to the last token.",
        higher="the same requests take longer",
        lower="the same requests are done sooner",
    ),
    "output_throughput": Number(
        label="Output throughput",
        unit="tokens/s",
        better="more",
        text="Tokens generated for all requests together, a second: the server's speed.",
        higher="the server makes more of its time",
        lower="the server makes less of its time",
    ),
    "user_speed": Number(
        label="One user's speed (median)",
        unit="tokens/s",
        better="more",
        text="1 / TPOT of the median request: how fast one answer appears.",
        higher="one answer appears faster",
        lower="one answer appears more slowly",
    ),
    "ttft_p50": Number(
        label="TTFT, median",
        text="Time from when a request was due to its first token.",
        unit="ms",
        scale=1000.0,
        higher="a typical user waits longer for the first token",
        lower="a typical user sees the first token sooner",
    ),
    "ttft_p95": Number(
        label="TTFT, p95",
        text="95 of 100 requests have their first token by then.",
        unit="ms",
        scale=1000.0,
        higher="the unlucky wait longer for their first token",
        lower="the unlucky wait less for their first token",
    ),
    "tpot_p50": Number(
        label="TPOT, median",
        text="Mean gap between the tokens of one answer.",
        digits=2,
        unit="ms",
        scale=1000.0,
        higher="answers flow more slowly",
        lower="answers flow faster",
    ),
    "itl_p95": Number(
        label="ITL, p95",
        text="95 of 100 gaps between two tokens are no longer.",
        unit="ms",
        scale=1000.0,
        higher="more gaps between tokens are long",
        lower="fewer gaps between tokens are long",
    ),
    "itl_max": Number(
        label="Longest gap",
        text="The longest gap between two tokens of any answer: the worst stutter.",
        unit="ms",
        scale=1000.0,
        higher="the worst stutter is longer",
        lower="the worst stutter is shorter",
    ),
    "e2e_p50": Number(
        label="E2E latency, median",
        text="Time from when a request was due to its last token.",
        unit="ms",
        scale=1000.0,
        higher="a typical answer is complete later",
        lower="a typical answer is complete sooner",
    ),
    "e2e_p95": Number(
        label="E2E latency, p95",
        text="95 of 100 answers are complete by then.",
        unit="ms",
        scale=1000.0,
        higher="the slowest answers are complete later",
        lower="the slowest answers are complete sooner",
    ),
    "attainment": Number(
        label="Objectives met",
        unit="%",
        better="more",
        scale=100.0,
        text="Share of the requests that met every objective of the experiment.",
        higher="more requests meet the objectives",
        lower="fewer requests meet the objectives",
    ),
    "gpu_idle_share": Number(
        label="GPU idle share",
        unit="%",
        scale=100.0,
        text="Of the GPU's time from step to step, the part in which it waited for the host. Not defined on a CPU.",
        higher="the GPU waits more for its host",
        lower="the GPU waits less for its host",
    ),
    "steps": Number(
        label="Steps",
        unit="",
        digits=0,
        counted=True,
        text="Engine steps that computed something.",
        higher="more passes over the weights",
        lower="fewer passes over the weights",
    ),
    "computed_tokens": Number(
        label="Tokens computed",
        unit="",
        digits=0,
        counted=True,
        text="Positions that went through the model, padding left out.",
        higher="more work for the same answers",
        lower="less work for the same answers",
    ),
    "padding_tokens": Number(
        label="Padding",
        unit="",
        digits=0,
        counted=True,
        text="Positions computed and thrown away.",
        higher="more work is thrown away",
        lower="less work is thrown away",
    ),
    "cached_tokens": Number(
        label="From the prefix cache",
        unit="",
        digits=0,
        counted=True,
        better="more",
        text="Prompt tokens that were not computed again.",
        higher="more of the prompts is reused",
        lower="less of the prompts is reused",
    ),
    "preemptions": Number(
        label="Preemptions",
        unit="",
        digits=0,
        counted=True,
        text="Requests thrown out of the batch for want of KV blocks.",
        higher="more requests lose their KV blocks",
        lower="fewer requests lose their KV blocks",
    ),
    "recomputed_tokens": Number(
        label="Computed again",
        unit="",
        digits=0,
        counted=True,
        text="Positions computed a second time.",
        higher="more is computed twice",
        lower="less is computed twice",
    ),
    "largest_step": Number(
        label="Largest step",
        unit="",
        digits=0,
        counted=True,
        better="",
        text="Tokens of the largest step: how long others may wait for it.",
        higher="others wait longer beside the largest step",
        lower="no step keeps others waiting as long",
    ),
    "peak_running": Number(
        label="Most at once",
        unit="",
        digits=0,
        counted=True,
        better="more",
        text="Most requests running at once.",
        higher="more requests share a step",
        lower="fewer requests share a step",
    ),
    "peak_waiting": Number(
        label="Longest queue",
        unit="",
        digits=0,
        counted=True,
        text="Most requests waiting at once.",
        higher="more requests queue",
        lower="fewer requests queue",
    ),
    "peak_blocks": Number(
        label="Most KV blocks",
        unit="",
        digits=0,
        counted=True,
        better="",
        text="Most KV blocks held at once.",
        higher="more KV memory is in use",
        lower="less KV memory is in use",
    ),
}
"""Name → how the table shows it, in its order."""

COUNTED = tuple(name for name, number in NUMBERS.items() if number.counted)
TIMED = tuple(name for name, number in NUMBERS.items() if not number.counted)


class RunValues(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run of one variant: its numbers (``NUMBERS``; None where undefined) and its latencies in seconds."""

    variant: str
    repetition: int
    values: dict[str, float | None]
    samples: dict[str, tuple[float, ...]] = {}
    """One entry for each of ``DISTRIBUTIONS``, sorted."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    trouble: tuple[str, ...] = ()
    """What went wrong in this run: refused, aborted or failed requests."""


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """All records of one run of one variant, for pictures and for a run file."""

    variant: str
    opened: tuple[OpenedRequest, ...] = ()
    closed: tuple[ClosedRequest, ...] = ()
    tokens: tuple[TokenEvent, ...] = ()
    steps: tuple[StepTrace, ...] = ()

    @property
    def requests(self) -> list[RequestTrace]:
        """The final traces by arrival number."""
        return sorted((event.trace for event in self.closed), key=lambda trace: trace.number)

    @property
    def begin(self) -> float:
        """Engine time of the first arrival, seconds: 0 on the time axis that variants share."""
        moments = [trace.arrival for trace in self.requests if trace.arrival >= 0] + [s.start for s in self.steps[:1]]
        return min(moments, default=0.0)

    @property
    def length(self) -> float:
        """Seconds from the first arrival to the end of the last step."""
        return max((step.end for step in self.steps), default=self.begin) - self.begin


class ExperimentResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an experiment found on one machine."""

    version: int = VERSION
    experiment: Experiment
    made: float = 0.0
    """Unix time, seconds."""
    model: dict[str, Any] = {}
    """Name, weights, dtype, device, threads … of what computed it."""
    others: str = ""
    """What else used the machine, in words; '' when nothing was found."""
    runs: tuple[RunValues, ...] = ()
    shown_repetition: int = 0
    """The repetition whose records are kept: the one of median length."""
    shown: tuple[RunRecords, ...] = ()
    lab_version: str = ""

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version={self.version} of a result can't be read here; this program reads version {VERSION}")
        names = [variant.name for variant in self.experiment.variants]
        for name in {run.variant for run in self.runs} | {records.variant for records in self.shown}:
            if name not in names:
                raise ValueError(f"the result has a run of {name!r}, which is no variant of its experiment")

    @property
    def repetitions(self) -> int:
        """Measured repetitions."""
        return max((run.repetition for run in self.runs), default=-1) + 1

    def of(self, variant: str) -> list[RunValues]:
        """The runs of one variant by repetition."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.repetition)

    def values(self, variant: str, name: str) -> list[float | None]:
        """One number of one variant over the repetitions."""
        return [run.values.get(name) for run in self.of(variant)]

    def samples(self, variant: str, name: str) -> list[float]:
        """The latencies of one variant, all repetitions together, seconds."""
        return [value for run in self.of(variant) for value in run.samples.get(name, ())]

    def records(self, variant: str) -> RunRecords | None:
        """The kept records of one variant."""
        return next((records for records in self.shown if records.variant == variant), None)

    @property
    def trouble(self) -> list[str]:
        """What went wrong, each sentence once."""
        return list(dict.fromkeys(f"{run.variant}: {text}" for run in self.runs for text in run.trouble))

    def outcomes(self) -> list[Outcome]:
        """The experiment's expectations put to the kept records.

        Raises:
            WorkloadError: a run lacks a request that is asked about.
        """
        runs = {records.variant: Run(records.requests, records.steps) for records in self.shown}
        if any(variant.name not in runs for variant in self.experiment.variants):
            return []
        return judge_all(self.experiment, runs)


def thinned(values: Sequence[float], most: int = MAX_SAMPLES) -> tuple[float, ...]:
    """Sorted values, to a microsecond; beyond ``most`` as many evenly spaced quantiles, first and last kept."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if ordered.size > most:
        ordered = ordered[np.linspace(0, ordered.size - 1, most).round().astype(int)]
    return tuple(round(float(value), 6) for value in ordered)


def counts(requests: Sequence[RequestTrace], steps: Sequence[StepTrace]) -> dict[str, float | None]:
    """The counted numbers of one run."""
    run = Run(requests, steps)
    return {name: float(MEASURES[name].count(run, "")) for name in COUNTED}


# Differences --------------------------------------------------------------------------------------------------------------


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One number of one variant beside the first variant's.

    ``kind``: "clear", "not clear", "too small" or "too few repetitions" (timed numbers, and counts that vary); "counted" or
    "equal" where every repetition counted the same.
    """

    name: str
    variant: str
    base: str
    kind: str
    a: Spread
    b: Spread
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    """Of the ratio, as it was judged: 95 % or more."""
    good: bool | None = None
    """Whether the difference is for the better; None where it can't be told."""
    words: str = ""


def differences(result: ExperimentResult) -> list[Difference]:
    """Every number of every other variant against the first one, in the order of ``NUMBERS``.

    Timed numbers, and counts that vary, are judged together: the more of them, the surer each one must be.
    """
    names = [variant.name for variant in result.experiment.variants]
    found: dict[tuple[str, str], tuple[str, Comparison]] = {}
    judged: dict[tuple[str, str], tuple[list[float | None], list[float | None]]] = {}
    for name in NUMBERS:
        for other in names[1:]:
            a, b = _paired(result, name, names[0], other)
            if NUMBERS[name].counted and (kind := _counted(result.experiment.workload, a, b)):
                found[name, other] = kind, compare_together([(a, b)])[0]
            else:
                judged[name, other] = a, b
    for key, comparison in zip(judged, compare_together(list(judged.values())), strict=True):
        found[key] = comparison.verdict, comparison
    keys = [(name, other) for name in NUMBERS for other in names[1:] if found[name, other][1].pairs]
    return [_difference(name, names[0], other, *found[name, other]) for name, other in keys]


def _paired(result: ExperimentResult, name: str, base: str, other: str) -> tuple[list[float | None], list[float | None]]:
    a, b = result.values(base, name), result.values(other, name)
    pairs = min(len(a), len(b))
    return a[:pairs], b[:pairs]


def _counted(workload: WorkloadSpec, a: Sequence[float | None], b: Sequence[float | None]) -> str:
    """Whether a count needs no statistics: 'equal' or 'counted' where every repetition counted the same, else ''.

    Where requests come by the clock, a count depends on how fast the machine happens to be: a few repetitions that agree
    don't show that it is exact.
    """
    if len({*a}) != 1 or len({*b}) != 1 or None in (a[0], b[0]):
        return ""
    if a[0] == b[0]:
        return "equal"
    timed = workload.arrivals.unit == "seconds" or workload.stop.seconds is not None
    return "" if timed and len(a) < MIN_PAIRS else "counted"


def _difference(name: str, base: str, other: str, kind: str, found: Comparison) -> Difference:
    better = NUMBERS[name].better
    told = kind in ("clear", "counted") and better and not _tiny(kind, found)
    return Difference(
        name=name,
        variant=other,
        base=base,
        kind=kind,
        a=found.a,
        b=found.b,
        ratio=found.ratio,
        interval=found.ratio_interval,
        good=(found.higher == (better == "more")) if told else None,
        words=_words(name, base, other, kind, found),
    )


def _words(name: str, base: str, other: str, kind: str, found: Comparison) -> str:
    """One sentence: what the difference means and how sure its size is, or that there is none to speak of."""
    number = NUMBERS[name]
    if kind == "equal":
        return f"The same as with {base}."
    if kind == "too small":
        return f"No difference that matters: less than {100 * MIN_EFFECT:.0f} % either way."
    if kind == "not clear":
        low, high = _ends(found, number)
        return f"Not clear: it may be {low}, or {high}."
    if kind == "too few repetitions":
        few = f"{found.pairs} {'repetition is' if found.pairs == 1 else 'repetitions are'} too few"
        return f"{few} to tell it from noise: run at least {MIN_PAIRS}."
    if _tiny(kind, found):
        return f"Nearly the same: {times(found, number)} {base}."
    meaning = number.higher if found.higher else number.lower
    return f"With {other}, {meaning}: {times(found, number)} {base}{_range(found) if kind == 'clear' else ''}."


def _tiny(kind: str, found: Comparison) -> bool:
    """Whether counts differ by less than matters: that is certain, but means nothing."""
    return kind == "counted" and found.ratio is not None and abs(found.ratio - 1) < MIN_EFFECT


def _ends(found: Comparison, number: Number) -> tuple[str, str]:
    """Both ends of the interval in words: '8 % less', '2.80 × as much', '3 ms more'."""
    if found.ratio_interval is not None:
        low, high = (_factor(end) for end in found.ratio_interval)
        return low, high
    ends = found.difference_interval or (0.0, 0.0)
    if number.unit == "%" and found.a.low is not None and found.a.high is not None:  # a share can't leave 0 to 100 %
        ends = max(ends[0], -found.a.high), min(ends[1], 1.0 - found.a.low)
    low, high = (_amount(end, number) for end in ends)
    return low, high


def _factor(ratio: float) -> str:
    percent = f"{100 * abs(ratio - 1):.0f} %"
    if percent == "0 %":
        return "the same"
    if ratio >= 1.5:
        return f"{ratio:,.2f} × as much"
    return f"{percent} {'more' if ratio > 1 else 'less'}"


def _amount(difference: float, number: Number) -> str:
    unit = "percentage points" if number.unit == "%" else number.unit
    amount = f"{abs(difference) * number.scale:,.{number.digits}f}{' ' if unit else ''}{unit}"
    return f"{amount} {'more' if difference > 0 else 'less'}"


def _range(found: Comparison) -> str:
    """' (12 to 29 %)', ' (1.81 to 2.20 ×)': the interval in the unit of ``times``; '' where all pairs agree."""
    if found.ratio is None or found.ratio_interval is None:
        return ""
    if found.ratio >= 1.5:
        low, high = (f"{end:,.2f}" for end in found.ratio_interval)
        return f" ({low} to {high} ×)" if low != high else ""
    low, high = (f"{end:.0f}" for end in sorted(100 * abs(end - 1) for end in found.ratio_interval))
    return f" ({low} to {high} %)" if low != high else ""


def times(found: Comparison, number: Number) -> str:
    """'1.62 × that with', '12 % less than with', '14 more than with'."""
    if found.ratio is None:
        return f"{_amount(found.difference or 0.0, number)} than with"
    if found.ratio >= 1.5:
        return f"{found.ratio:,.2f} × that with"
    percent = 100 * abs(found.ratio - 1)
    return f"{percent:.0f} % {'more' if found.ratio > 1 else 'less'} than with" if percent >= 1 else "hardly different from"


def shown(value: float | None, name: str) -> str:
    """A number as the table shows it, without its unit."""
    number = NUMBERS[name]
    return "n/a" if value is None else f"{value * number.scale:,.{number.digits}f}"


def spread_text(found: Spread, name: str) -> str:
    """'median (lowest to highest)', or the one value where all are equal."""
    if found.median is None:
        return "n/a"
    if found.low == found.high:
        return shown(found.median, name)
    return f"{shown(found.median, name)} ({shown(found.low, name)} to {shown(found.high, name)})"


def spreads(result: ExperimentResult, variant: str) -> dict[str, Spread]:
    """Median and spread of every number of one variant."""
    return {name: spread(result.values(variant, name)) for name in NUMBERS}


def repetitions_text(count: int) -> str:
    """'1 repetition', '5 repetitions'."""
    return f"{count} repetition{'' if count == 1 else 's'}"


def with_repetitions(experiment: Experiment, repetitions: int) -> Experiment:
    """The same experiment, measured so many times.

    Raises:
        WorkloadError: out of range.
    """
    return msgspec.structs.replace(experiment, repetitions=repetitions)


def text_report(result: ExperimentResult) -> str:
    """The result for a terminal: a table of medians and ranges, what differs in words, what was expected."""
    variants = [variant.name for variant in result.experiment.variants]
    found = {name: spreads(result, name) for name in variants}
    rows = [["", *variants]]
    for name, number in NUMBERS.items():
        if any(found[variant][name].count for variant in variants):
            unit = f", {number.unit}" if number.unit else ""
            rows.append([f"{number.label}{unit}", *(spread_text(found[variant][name], name) for variant in variants)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [result.experiment.title, ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    differing = differences(result)
    told = [f"  {NUMBERS[d.name].label}: {d.words}" for d in differing if d.kind in ("clear", "counted")]
    if told:
        lines += ["", "What differs:", *told]
    unclear = list(dict.fromkeys(NUMBERS[d.name].label for d in differing if d.kind in ("not clear", "too few repetitions")))
    if unclear:
        lines += ["", f"Not clear with {repetitions_text(result.repetitions)}: {'; '.join(unclear)}."]
    outcomes = result.outcomes()
    if outcomes:
        lines += ["", "Expected, by counting:", *(f"  {'holds' if o.holds else 'FAILS'}  {o.text}" for o in outcomes)]
    lines += [f"Note: {text}" for text in [*result.trouble, *([f"{result.others}."] if result.others else [])]]
    return "\n".join(lines)


# May they be compared? ----------------------------------------------------------------------------------------------------


class Compared(msgspec.Struct, frozen=True):
    """One variant of one result, for an overlay."""

    result: ExperimentResult
    variant: str

    @property
    def label(self) -> str:
        """The experiment's title and the variant's name."""
        return f"{self.result.experiment.title} · {self.variant}"


def cautions(items: Sequence[Compared]) -> list[Caution]:
    """Why the other items should not be compared with the first one; each reason once, model and hardware first."""
    found: dict[tuple[str, str], Caution] = {}
    bases = [_conditions(item) for item in items]
    for item, other in zip(items[1:], bases[1:], strict=True):
        for caution in compatibility(bases[0], other):
            text = f"{item.label}: {caution.text}" if len(items) > 2 else caution.text
            found.setdefault((caution.about, text), Caution(caution.about, text))
    order = {"model": 0, "hardware": 1, "lengths": 2, "concurrency": 3}
    return sorted(found.values(), key=lambda caution: order.get(caution.about, 9))


def _conditions(item: Compared) -> Conditions:
    runs = item.result.of(item.variant)
    base = conditions(item.result.model, item.result.experiment.workload, (), item.result.others)
    first = runs[0] if runs else None
    return msgspec.structs.replace(
        base,
        requests=first.requests if first else None,
        prompt_tokens=first.prompt_tokens if first else None,
        output_tokens=first.output_tokens if first else None,
    )


# Files --------------------------------------------------------------------------------------------------------------------


def write_result(result: ExperimentResult) -> bytes:
    """The result as a JSON file."""
    return msgspec.json.encode(result)


def parse_result(text: str, name: str) -> ExperimentResult:
    """A result from the text of a file.

    Raises:
        DataFileError: too large, no JSON, or not a result, with line and field.
    """
    return parse(text, name if name.endswith(".json") else f"{name}.json", ExperimentResult)


def read_result(path: str | Path) -> ExperimentResult:
    """A result from a file.

    Raises:
        DataFileError: unreadable, too large, no JSON, or not a result.
    """
    return read_file(Path(path), ExperimentResult)


def differences_csv(result: ExperimentResult) -> str:
    """One line for every number, variant and repetition, in stored units (seconds, tokens a second, counts)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["experiment", "variant", "repetition", "number", "unit", "value"])
    for run in result.runs:
        for name, value in run.values.items():
            if name not in NUMBERS:
                continue
            unit = "s" if NUMBERS[name].unit in ("ms", "s") else "share" if NUMBERS[name].unit == "%" else NUMBERS[name].unit
            cell = "" if value is None or not math.isfinite(value) else repr(value)
            writer.writerow([result.experiment.id, _plain(run.variant), run.repetition + 1, name, unit, cell])
    return buffer.getvalue()


def _plain(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return "'" + text if text.lstrip().startswith(("=", "+", "-", "@", "\t")) else text
