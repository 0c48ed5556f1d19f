"""An experiment as a file: a model, variants of the engine's settings, one workload for all, and what must come of it.

::

    version: 1
    id: static-continuous
    title: Static against continuous batching
    about: What it asks, in a few sentences.
    model: smollm2
    variants:                          # one to four; the first is what the others are compared with
      - {name: static, config: {batching: static, max_num_seqs: 4}}
      - {name: continuous, config: {max_num_seqs: 4}}
    workload: {…}                      # see engine.workload.spec: every variant gets the same requests
    objectives: {ttft: 2.0}            # seconds, for goodput
    repetitions: 5
    seed: 0                            # of the order of the runs; the requests' seed is the workload's
    expect:                            # by counting, see engine.workload.claims
      - {measure: steps, variant: static, relation: more, than: continuous}
      - {measure: padding_rows, variant: continuous, at_most: 0}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engine.core.config import EngineConfig
from engine.core.trace import RequestTrace
from engine.workload.check import WorkloadError, assets, choice, label, number, whole
from engine.workload.claims import MEASURES, Claim, Outcome, Run, check_measure, count, judge
from engine.workload.datafile import DataFileError, parse, read_file
from engine.workload.scenes import check_id, engine_config
from engine.workload.spec import WorkloadSpec, check_fits

VERSION = 1
MAX_VARIANTS = 4
MAX_REPETITIONS = 100


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration under test.

    Raises:
        WorkloadError: no name. ConfigError: the settings can't work.
    """

    name: str
    config: dict[str, Any] = {}

    def __post_init__(self) -> None:
        label("name", self.name, 40)
        self.engine_config()

    def engine_config(self) -> EngineConfig:
        """The settings as a configuration."""
        return engine_config(self.config)


class Targets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must reach to count for goodput: upper limits in seconds, None: not asked for.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 0.0, 86_400.0)


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that must come of an experiment: a measure of a variant, within limits or beside another variant's.

    Raises:
        WorkloadError: neither or both forms, or an unknown measure.
    """

    measure: str
    variant: str
    request: str = ""
    relation: Literal["more", "less", "same"] | None = None
    than: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.relation is None) != (not self.than):
            raise WorkloadError(
                "relation and than go together: relation says more, less or same, than names the other variant"
            )
        if self.relation is None:
            self._claim()
            return
        check_measure(self.measure, self.request)
        choice("relation", self.relation, ("more", "less", "same"))
        if self.at_least is not None or self.at_most is not None:
            raise WorkloadError("an expectation has either a relation or limits (at_least, at_most): remove one")

    def _claim(self) -> Claim:
        return Claim(measure=self.measure, at_least=self.at_least, at_most=self.at_most, request=self.request)


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An experiment, validated when built.

    Raises:
        WorkloadError: naming the field, its value and the limit. ConfigError: a variant's settings can't work.
    """

    version: int = VERSION
    id: str
    title: str
    about: str = ""
    model: str = "smollm2"
    variants: tuple[Variant, ...]
    workload: WorkloadSpec
    objectives: Targets = Targets()
    repetitions: int = 5
    seed: int = 0
    order: int = 100
    """Place in the list; equal ones by title."""
    expect: tuple[Expectation, ...] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise WorkloadError(
                f"version={self.version!r} can't be read here; this program reads version {VERSION}: "
                f"use the program that wrote the file, or a newer one"
            )
        check_id(self.id)
        label("title", self.title, 80)
        label("about", self.about, 2000, empty=True)
        label("model", self.model, 300)
        whole("repetitions", self.repetitions, 1, MAX_REPETITIONS)
        whole("seed", self.seed, 0, 2**32 - 1)
        whole("order", self.order, 0, 10_000)
        if not 1 <= len(self.variants) <= MAX_VARIANTS:
            raise WorkloadError(f"variants has {len(self.variants)} entries; an experiment has 1 to {MAX_VARIANTS}")
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise WorkloadError(f"variants has two of the same name among {', '.join(names)}: name each differently")
        for variant in self.variants:
            try:
                check_fits(self.workload, variant.engine_config())
            except WorkloadError as error:
                raise WorkloadError(f"variant {variant.name!r}: {error}") from None
        for expected in self.expect:
            for name in filter(None, (expected.variant, expected.than)):
                choice("expect: variant", name, names)

    def variant(self, name: str) -> Variant:
        """The variant of this name.

        Raises:
            KeyError: there is none.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(f"no variant {name!r}; there are {', '.join(variant.name for variant in self.variants)}")


class Turn(msgspec.Struct, frozen=True):
    """One run of an experiment: which repetition (0 is the first) of which variant."""

    repetition: int
    variant: str


def turns(experiment: Experiment) -> list[Turn]:
    """All runs in their order: every repetition runs each variant once, forwards (A B) or backwards (B A)."""
    names = [variant.name for variant in experiment.variants]
    return [
        Turn(repetition, name)
        for repetition, forwards in enumerate(directions(experiment.repetitions, experiment.seed))
        for name in (names if forwards else reversed(names))
    ]


def directions(repetitions: int, seed: int = 0) -> list[bool]:
    """Which repetitions run forwards: every other one, shuffled. Of an odd number one more runs forwards.

    As many of each, so that what drifts steadily meets all variants alike; shuffled, so that what comes and goes in a rhythm
    does too (Box, Hunter and Hunter, Statistics for Experimenters, 1978, chapter 4: randomised pairs). An order that happens
    to alternate is drawn again: in A B, B A, A B … a rhythm of four runs meets the same variant each time.
    """
    rng = np.random.default_rng([seed, repetitions])
    while True:
        order = [bool(place % 2 == 0) for place in rng.permutation(repetitions)]
        if repetitions < 4 or any(before == after for before, after in pairwise(order)):
            return order


def judge_all(experiment: Experiment, runs: Mapping[str, Run]) -> list[Outcome]:
    """Put the expectations to one run of each variant (name → records).

    Raises:
        WorkloadError: a run lacks a request that is asked about.
    """
    return [_judge(expected, runs) for expected in experiment.expect]


def _judge(expected: Expectation, runs: Mapping[str, Run]) -> Outcome:
    if expected.relation is None:
        found = judge(expected._claim(), runs[expected.variant])
        return Outcome(f"{expected.variant}: {found.text}", found.value, found.holds)
    value = count(expected.measure, runs[expected.variant], expected.request)
    other = count(expected.measure, runs[expected.than], expected.request)
    holds = {"more": value > other, "less": value < other, "same": value == other}[expected.relation]
    about = f" of {expected.request}" if expected.request else ""
    wanted = "the same" if expected.relation == "same" else expected.relation
    text = f"{MEASURES[expected.measure].text}{about}: {expected.variant} {value:g}, {expected.than} {other:g} ({wanted})"
    return Outcome(text, value, holds)


# Files --------------------------------------------------------------------------------------------------------------------


class Experiments(msgspec.Struct, frozen=True):
    """The ready-made experiments in their order, and what is wrong with files that could not be read."""

    experiments: tuple[Experiment, ...]
    problems: tuple[str, ...]

    def find(self, experiment_id: str) -> Experiment | None:
        """The experiment of this id."""
        return next((each for each in self.experiments if each.id == experiment_id), None)


def parse_experiment(text: str, name: str) -> Experiment:
    """An experiment from the text of a file (YAML or JSON).

    Raises:
        DataFileError: naming file, line and field.
    """
    return parse(text, name, Experiment)


def read_experiment(path: Path) -> Experiment:
    """An experiment from a file.

    Raises:
        DataFileError: naming file, line and field.
    """
    return read_file(path, Experiment)


def load_experiments() -> Experiments:
    """The experiments of ``assets/experiments``."""
    found: list[Experiment] = []
    problems: list[str] = []
    for path in sorted(assets("experiments").glob("*.yaml")):
        try:
            experiment = read_experiment(path)
            if experiment.id != path.stem:
                raise DataFileError(path.name, f"id={experiment.id!r} must be the file's name without ending, {path.stem!r}")
            found.append(experiment)
        except DataFileError as error:
            problems.append(str(error))
    return Experiments(tuple(sorted(found, key=lambda each: (each.order, each.title))), tuple(problems))


# May two runs be compared? ------------------------------------------------------------------------------------------------


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for two runs to be compared. '' and None: not known, and not compared."""

    model: str = ""
    weights: str = ""
    dtype: str = ""
    device: str = ""
    threads: int | None = None
    attention: str = ""
    requests: int | None = None
    prompt_tokens: int | None = None
    """Sum over the requests."""
    output_tokens: int | None = None
    """Sum over the requests, really generated."""
    load: str = ""
    """The offered load in words: 'poisson, 2 a second', 'closed, 4 in flight' …"""
    seed: int | None = None
    others: str = ""
    """What else used the machine, '' for nothing known."""


_NAMES = {
    "model": ("model", "they ran different models"),
    "weights": ("model", "the weights are stored differently"),
    "dtype": ("hardware", "they computed in different precision"),
    "device": ("hardware", "they ran on different devices"),
    "threads": ("hardware", "they used different numbers of threads"),
    "attention": ("hardware", "they used different attention kernels"),
    "requests": ("lengths", "they served different numbers of requests"),
    "prompt_tokens": ("lengths", "their prompts differ in total length"),
    "output_tokens": ("lengths", "they generated different numbers of tokens"),
    "load": ("concurrency", "the requests arrived differently"),
    "seed": ("lengths", "the requests were drawn from different seeds"),
    "others": ("hardware", "something else used the machine in one of them"),
}


class Caution(msgspec.Struct, frozen=True):
    """One reason why a comparison misleads. ``about``: model, lengths, hardware or concurrency."""

    about: str
    text: str


def describe_load(spec: WorkloadSpec) -> str:
    """The offered load in words."""
    arrivals = spec.arrivals
    unit = "second" if arrivals.unit == "seconds" else "step"
    if spec.kind == "listed":
        return f"listed, in {arrivals.unit}"
    if spec.trace is not None:
        return f"replayed {spec.trace.name}, time × {spec.trace.time:g}"
    if arrivals.process == "closed":
        return f"closed, {arrivals.in_flight} in flight, think {arrivals.think:g} {arrivals.unit}"
    extra = f", burstiness {arrivals.burstiness:g}" if arrivals.process == "bursty" else ""
    return f"{arrivals.process}, {arrivals.rate:g} a {unit}{extra}"


def conditions(
    model: Mapping[str, Any], spec: WorkloadSpec, requests: Sequence[RequestTrace], others: str = ""
) -> Conditions:
    """The conditions of a run.

    Args:
        model: name, weights, dtype, device, threads, attention as the host or a run file tells them; missing ones are
            not compared.
        spec: its workload.
        requests: its records.
        others: what else used the machine.
    """
    return Conditions(
        model=str(model.get("name") or ""),
        weights=str(model.get("weights") or ""),
        dtype=str(model.get("dtype") or ""),
        device=str(model.get("device") or ""),
        threads=model.get("threads"),
        attention=str(model.get("attention") or ""),
        requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        output_tokens=sum(request.output_tokens for request in requests),
        load=describe_load(spec),
        seed=spec.seed,
        others=others,
    )


def compatibility(a: Conditions, b: Conditions) -> list[Caution]:
    """Why these two runs should not be compared: one warning a difference, none when they match."""
    warnings = []
    for field, (about, words) in _NAMES.items():
        first, second = getattr(a, field), getattr(b, field)
        unknown = first in ("", None) or second in ("", None)
        if first == second or (unknown and field != "others"):
            continue
        shown = " and ".join(
            f"{value:,}" if isinstance(value, int) else str(value) or "nothing" for value in (first, second)
        )
        warnings.append(Caution(about, f"Differs in {about}: {words} ({shown})."))
    return warnings
