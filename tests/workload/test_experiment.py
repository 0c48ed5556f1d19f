from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.trace import RequestTrace
from engine.workload.arrivals import Arrivals
from engine.workload.datafile import DataFileError, parse, to_json, to_yaml
from engine.workload.experiment import (
    Conditions,
    Expectation,
    Experiment,
    Targets,
    Variant,
    compatibility,
    conditions,
    describe_load,
    directions,
    judge_all,
    load_experiments,
    parse_experiment,
    read_experiment,
    turns,
)
from engine.workload.spec import ListedRequest, Stop, WorkloadSpec
from engine.workload.traces import TraceRef
from tests.workload.kit import records, run
from tests.workload.test_spec import GENERATED, TEXT

READY = load_experiments()
WANTED = {
    "static-continuous", "chunked-prefill", "prefix-cache", "paged-contiguous", "kv-cache", "priority",
    "long-prompt-threshold", "batch-size", "replayed-trace", "async-scheduling",
}  # fmt: skip


def test_every_ready_made_experiment_is_there_and_no_file_is_broken():
    assert READY.problems == ()
    assert {experiment.id for experiment in READY.experiments} == WANTED
    assert READY.find("priority").variants[1].name == "priority"
    assert READY.find("none") is None


@pytest.mark.parametrize("experiment", READY.experiments, ids=lambda experiment: experiment.id)
def test_a_ready_made_experiment_gives_what_it_expects(experiment):
    runs = {}
    for variant in experiment.variants:
        result = run(experiment.workload, variant.engine_config())
        assert result.refused == ()
        runs[variant.name] = records(result)
    assert experiment.expect
    assert [outcome.text for outcome in judge_all(experiment, runs) if not outcome.holds] == []


@pytest.mark.parametrize("experiment", READY.experiments, ids=lambda experiment: experiment.id)
def test_swapped_variants_do_not_give_it(experiment):
    """The expectations tell the variants apart: given each other's records, at least one of them fails."""
    found = [records(run(experiment.workload, variant.engine_config())) for variant in experiment.variants]
    swapped = dict(zip([variant.name for variant in experiment.variants], reversed(found), strict=True))
    assert not all(outcome.holds for outcome in judge_all(experiment, swapped))


NAMES = st.lists(TEXT.map(lambda text: text[:40]).filter(str.strip), min_size=1, max_size=4, unique=True)


@st.composite
def experiments(draw):
    names = draw(NAMES)
    settings_ = st.fixed_dictionaries(
        {"max_model_len": st.just(2048)},
        optional={"max_num_seqs": st.integers(1, 64), "scheduling_policy": st.sampled_from(["fcfs", "priority"])},
    )
    expect = st.builds(Expectation, measure=st.just("steps"), variant=st.sampled_from(names), at_least=st.floats(0, 1e6))
    return Experiment(
        id=draw(st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)),
        title=draw(TEXT),
        about=draw(st.text(max_size=100)),
        variants=tuple(Variant(name=name, config=draw(settings_)) for name in names),
        workload=draw(GENERATED),
        objectives=Targets(ttft=draw(st.none() | st.floats(0, 1000)), tpot=draw(st.none() | st.floats(0, 9))),
        repetitions=draw(st.integers(1, 100)),
        seed=draw(st.integers(0, 2**32 - 1)),
        expect=tuple(draw(st.lists(expect, max_size=2))),
    )


@settings(max_examples=60)
@given(experiments(), st.sampled_from([("e.yaml", to_yaml), ("e.json", to_json)]))
def test_an_experiment_survives_writing_and_reading(experiment, form):
    name, write = form
    assert parse(write(experiment), name, Experiment) == experiment


@pytest.mark.parametrize("experiment", READY.experiments, ids=lambda experiment: experiment.id)
def test_a_written_experiment_is_the_same_file_again(experiment, tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(to_yaml(experiment))
    again = read_experiment(path)
    assert again == experiment
    assert to_yaml(again) == to_yaml(experiment)


def test_repetitions_run_forwards_or_backwards():
    variants = (Variant(name="A"), Variant(name="B"), Variant(name="C"))
    workload = WorkloadSpec(stop=Stop(requests=1))
    order = turns(Experiment(id="x", title="x", variants=variants, workload=workload, repetitions=3))
    assert "".join(turn.variant for turn in order) == "ABCCBAABC"
    assert [turn.repetition for turn in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_each_order_comes_as_often_as_the_other_and_in_no_rhythm(repetitions, seed):
    order = directions(repetitions, seed)
    assert sum(order) == (repetitions + 1) // 2 and len(order) == repetitions
    assert order == directions(repetitions, seed)
    assert repetitions < 4 or any(a == b for a, b in pairwise(order))


GOOD = """\
version: 1
id: mine
title: Mine
variants:
  - {name: a, config: {max_num_seqs: 1}}
  - {name: b, config: {max_num_seqs: 2}}
workload:
  stop: {requests: 4}
  output: {tokens: 8}
expect:
  - {measure: peak_running, variant: a, relation: less, than: b}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("version: 1", "version: 9", 1, "reads version 1"),
        ("name: b", "name: a", 1, "two of the same name"),
        ("max_num_seqs: 2", "max_num_seqs: 0", 6, "max_num_seqs=0 must be at least 1"),
        ("max_num_seqs: 2", "batching: static, enable_prefix_caching: true", 6, "can't work with batching='static'"),
        ("max_num_seqs: 2", "max_model_len: 70", 1, "variant 'b': the longest request has 64 prompt and 8 output"),
        ("requests: 4", "request: 4", 8, "no such setting"),
        ("tokens: 8", "tokens: -8", 9, "tokens=-8"),
        ("tokens: 8", "tokens: 8.5", 9, "must be a whole number, but is a number"),
        ("than: b", "than: c", 1, "expect: variant='c' must be one of 'a', 'b'"),
        (", than: b", "", 11, "relation and than go together"),
        ("relation: less, than: b", "", 11, "has no limit"),
        ("workload:", "repetitions: 0\nworkload:", 1, "repetitions=0"),
        ("  stop: {requests: 4}\n", "", 7, "stop is empty"),
    ],
)
def test_a_bad_experiment_names_file_line_and_what_to_change(old, new, line, words):
    assert parse_experiment(GOOD, "mine.yaml").id == "mine"
    with pytest.raises(DataFileError) as caught:
        parse_experiment(GOOD.replace(old, new, 1), "mine.yaml")
    assert caught.value.line == line, str(caught.value)
    assert words in str(caught.value)


BASE = Conditions(
    model="smollm2", weights="Q4_1", dtype="float32", device="cpu", threads=2, attention="sdpa", requests=8,
    prompt_tokens=512, output_tokens=256, load="poisson, 2 a second", seed=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"model": "tiny"}, "model"),
        ({"weights": "bf16"}, "model"),
        ({"dtype": "bfloat16"}, "hardware"),
        ({"device": "cuda:0"}, "hardware"),
        ({"threads": 4}, "hardware"),
        ({"requests": 9}, "lengths"),
        ({"prompt_tokens": 1024}, "lengths"),
        ({"output_tokens": 1}, "lengths"),
        ({"load": "closed, 4 in flight"}, "concurrency"),
        ({"seed": 1}, "lengths"),
        ({"others": "a live lab"}, "hardware"),
    ],
)
def test_each_difference_that_spoils_a_comparison_is_named(change, about):
    other = msgspec.structs.replace(BASE, **change)
    found = compatibility(BASE, other)
    assert [caution.about for caution in found] == [about]
    (value,) = change.values()
    assert (f"{value:,}" if isinstance(value, int) else value) in found[0].text
    assert compatibility(other, other) == []


def test_equal_and_unknown_conditions_give_no_warning():
    assert compatibility(BASE, BASE) == []
    assert compatibility(BASE, Conditions(model="smollm2")) == []


def test_conditions_come_from_a_run():
    requests = [RequestTrace(request_id="a", prompt_tokens=10, token_times=[1.0, 2.0])]
    spec = WorkloadSpec(stop=Stop(requests=1), seed=4)
    found = conditions({"name": "tiny", "threads": 2}, spec, requests)
    assert (found.model, found.threads, found.prompt_tokens, found.output_tokens, found.seed) == ("tiny", 2, 10, 2, 4)
    assert found.load == "poisson, 1 a second"


def test_loads_in_words():
    stop = Stop(requests=1)
    closed = WorkloadSpec(arrivals=Arrivals(process="closed", in_flight=3, think=2.0), stop=stop)
    assert describe_load(closed) == "closed, 3 in flight, think 2 seconds"
    bursty = WorkloadSpec(arrivals=Arrivals(process="bursty", unit="steps", rate=0.5), stop=stop)
    assert describe_load(bursty) == "bursty, 0.5 a step, burstiness 0.25"
    assert describe_load(WorkloadSpec(requests=(ListedRequest(prompt_tokens=1),))) == "listed, in seconds"
    assert describe_load(WorkloadSpec(trace=TraceRef(name="synthetic-chat"))).startswith("replayed synthetic-chat")
