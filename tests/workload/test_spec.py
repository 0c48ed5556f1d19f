import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import EngineConfig
from engine.workload.arrivals import Arrivals
from engine.workload.check import WorkloadError
from engine.workload.datafile import parse, to_json, to_yaml
from engine.workload.lengths import Lengths
from engine.workload.spec import ListedRequest, Prefix, Stop, WorkloadSpec, check_fits, plan
from engine.workload.traces import TraceRef

TEXT = st.text(min_size=1, max_size=30).filter(str.strip)
LENGTHS = st.builds(
    Lengths,
    distribution=st.sampled_from(["fixed", "uniform", "lognormal"]),
    tokens=st.integers(100, 900),
    sigma=st.floats(0, 2),
    low=st.integers(60, 100),
    high=st.integers(900, 1000),
)
ARRIVALS = st.builds(
    Arrivals,
    process=st.sampled_from(["poisson", "constant", "bursty", "closed"]),
    unit=st.sampled_from(["seconds", "steps"]),
    rate=st.floats(0.001, 1000),
    burstiness=st.floats(0.01, 100),
    in_flight=st.integers(1, 50),
    think=st.integers(0, 50).map(float),
)
STOP = st.builds(
    Stop, requests=st.integers(1, 40), seconds=st.none() | st.floats(0.1, 100), steps=st.none() | st.integers(1, 99)
)
REQUEST = st.builds(
    ListedRequest,
    at=st.integers(0, 100).map(float),
    prompt_tokens=st.integers(60, 500),
    output_tokens=st.integers(1, 99),
    prefix_tokens=st.integers(0, 50),
    priority=st.integers(-5, 5),
    cache_salt=st.none() | TEXT,
    copies=st.integers(1, 3),
) | st.builds(ListedRequest, at=st.integers(0, 100).map(float), prompt=TEXT, output_tokens=st.integers(1, 99))
GENERATED = st.builds(
    WorkloadSpec,
    arrivals=ARRIVALS,
    prompt=LENGTHS,
    output=LENGTHS,
    prefix=st.builds(Prefix, tokens=st.integers(0, 50), share=st.floats(0, 1), variants=st.integers(1, 5)),
    priorities=st.lists(st.integers(-9, 9), min_size=1, max_size=4).map(tuple),
    sampling=st.fixed_dictionaries({}, optional={"temperature": st.floats(0, 2), "stop": st.lists(TEXT, max_size=2)}),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    stop=STOP,
)
LISTED = st.builds(WorkloadSpec, requests=st.lists(REQUEST, min_size=1, max_size=5).map(tuple))


@given(GENERATED | LISTED, st.sampled_from([("w.yaml", to_yaml), ("w.json", to_json)]))
def test_a_workload_survives_writing_and_reading(spec, form):
    name, write = form
    assert parse(write(spec), name, WorkloadSpec) == spec


@given(GENERATED.filter(lambda spec: not spec.closed))
def test_the_same_workload_gives_the_same_plan_in_order_within_its_stop(spec):
    planned = plan(spec)
    assert planned == plan(spec)
    assert [item.due for item in planned] == sorted(item.due for item in planned)
    assert 1 <= len(planned) <= spec.stop.requests
    assert [item.name for item in planned] == [f"r{i}" for i in range(len(planned))]
    steps = spec.arrivals.unit == "steps"
    limit = spec.stop.steps if steps else spec.stop.seconds
    assert all(limit is None or item.due < limit for item in planned)
    assert all(not steps or item.due == int(item.due) for item in planned)
    assert all(spec.prompt.least <= item.prompt_tokens <= spec.prompt.most for item in planned)


def base(**changes):
    fields = {"stop": Stop(requests=200), "output": Lengths(distribution="uniform", low=1, high=99)}
    return WorkloadSpec(**{**fields, **changes})


def test_what_is_changed_leaves_the_other_draws_alone():
    first = plan(base())
    longer = plan(base(output=Lengths(tokens=7), prefix=Prefix(tokens=16, share=0.5, variants=3)))
    assert [item.due for item in first] == [item.due for item in longer]
    assert [item.prompt_tokens for item in first] == [item.prompt_tokens for item in longer]
    faster = plan(base(arrivals=Arrivals(rate=9)))
    assert [item.output_tokens for item in first] == [item.output_tokens for item in faster]


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.25, 50), (0.1, 20), (0.75, 150), (1, 200)])
def test_exactly_the_share_of_requests_begins_with_the_prefix(share, count):
    planned = plan(base(prefix=Prefix(tokens=32, share=share, variants=4)))
    assert sum(item.prefix_tokens == 32 for item in planned) == count
    assert {item.prefix_id for item in planned if item.prefix_tokens} <= {0, 1, 2, 3}


def test_arrivals_in_steps_fall_into_whole_steps():
    planned = plan(WorkloadSpec(arrivals=Arrivals(process="constant", unit="steps", rate=0.3), stop=Stop(requests=7)))
    assert [item.due for item in planned] == [0, 3, 6, 10, 13, 16, 20]


def test_priorities_are_taken_in_turn():
    planned = plan(WorkloadSpec(priorities=(5, 1, 1), stop=Stop(requests=7)))
    assert [item.priority for item in planned] == [5, 1, 1, 5, 1, 1, 5]


def test_a_list_is_sorted_by_due_time_and_its_copies_are_named():
    spec = WorkloadSpec(
        arrivals=Arrivals(unit="steps"),
        requests=(
            ListedRequest(at=5, prompt="Why?", output_tokens=3, id="last"),
            ListedRequest(at=1, prompt_tokens=9, copies=3, every=2, id="x"),
            ListedRequest(at=3, prompt_tokens=8, priority=2, cache_salt="s"),
        ),
    )
    planned = plan(spec)
    assert [(item.name, item.due) for item in planned] == [("x0", 1), ("x1", 3), ("r2", 3), ("last", 5), ("x2", 5)]
    assert (planned[2].priority, planned[2].cache_salt) == (2, "s")
    assert planned[3].prompt == "Why?"


def test_a_replayed_trace_keeps_its_pattern():
    spec = WorkloadSpec(trace=TraceRef(name="synthetic-chat", count=20, time=0.1, length=0.1), stop=Stop(requests=10))
    planned = plan(spec)
    assert len(planned) == 10
    assert planned[0].due == 0
    assert [item.due for item in planned] == sorted(item.due for item in planned)


def test_the_sampling_settings_are_greedy_and_exact_unless_said_otherwise():
    params = WorkloadSpec(stop=Stop(requests=1)).params(12)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 12, True)
    chosen = WorkloadSpec(stop=Stop(requests=1), sampling={"temperature": 0.7, "stop": ["x"]}, ignore_eos=False).params(3)
    assert (chosen.temperature, chosen.stop_strings, chosen.ignore_eos) == (0.7, ("x",), False)


REQUESTS = (ListedRequest(prompt_tokens=4),)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WorkloadSpec(), "stop is empty, so requests would come for ever"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), seed=-1), "seed=-1"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), priorities=()), "priorities has 0 entries"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), sampling={"max_tokens": 5}), "output says how many"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), sampling={"temprature": 5}), "no setting 'temprature'"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), sampling={"top_p": 2}), "top_p=2 must be"),
        (lambda: WorkloadSpec(stop=Stop(requests=1), prefix=Prefix(tokens=64)), "prefix.tokens=64 must be less than .* 64"),
        (lambda: WorkloadSpec(requests=REQUESTS, trace=TraceRef(name="a")), "both given"),
        (lambda: WorkloadSpec(requests=(ListedRequest(prompt_tokens=4, id="a"),) * 2), "id='a' occurs twice"),
        (
            lambda: WorkloadSpec(arrivals=Arrivals(unit="steps"), requests=(ListedRequest(at=0.5, prompt_tokens=4),)),
            "at=0.5, .* whole numbers",
        ),
        (lambda: WorkloadSpec(requests=(ListedRequest(at=90_000, prompt_tokens=4),)), "beyond a day"),
        (lambda: ListedRequest(), "either prompt"),
        (lambda: ListedRequest(prompt="a", prompt_tokens=3), "either prompt"),
        (lambda: ListedRequest(prompt_tokens=3, prefix_tokens=3), "prefix_tokens=3 must be .* 0 to 2"),
        (lambda: ListedRequest(prompt="a", prefix_tokens=3), "needs prompt_tokens"),
        (lambda: ListedRequest(prompt_tokens=3, id="r1"), "id='r1' must begin with a letter"),
        (lambda: ListedRequest(prompt_tokens=3, id="a-b"), "id='a-b'"),
        (lambda: ListedRequest(prompt_tokens=3, output_tokens=0), "output_tokens=0"),
        (lambda: Stop(requests=0), "requests=0"),
        (lambda: Stop(seconds=float("inf")), "seconds=inf"),
        (lambda: Prefix(share=1.5), "share=1.5"),
    ],
)
def test_impossible_workloads_are_refused_with_field_value_and_way_out(make, words):
    with pytest.raises(WorkloadError, match=words):
        make()


def test_what_cannot_be_planned_says_why():
    with pytest.raises(WorkloadError, match="can't be planned"):
        plan(WorkloadSpec(arrivals=Arrivals(process="closed"), stop=Stop(requests=3)))
    with pytest.raises(WorkloadError, match=r"stop.requests or stop.steps"):
        plan(WorkloadSpec(arrivals=Arrivals(unit="steps"), stop=Stop(seconds=3)))
    with pytest.raises(WorkloadError, match="more than 100,000"):
        plan(WorkloadSpec(arrivals=Arrivals(process="constant", rate=10_000), stop=Stop(seconds=3600)))


def test_a_workload_that_the_engine_would_refuse_is_told_beforehand():
    config = EngineConfig(max_model_len=100, num_kv_blocks=4)
    with pytest.raises(WorkloadError, match="64 prompt and 40 output tokens, together 104, but max_model_len=100"):
        check_fits(WorkloadSpec(output=Lengths(tokens=40), stop=Stop(requests=1)), config)
    with pytest.raises(WorkloadError, match=r"request big needs 5 KV blocks, .* num_kv_blocks=4"):
        check_fits(WorkloadSpec(requests=(ListedRequest(prompt_tokens=60, output_tokens=10, id="big"),)), config)
    check_fits(WorkloadSpec(output=Lengths(tokens=1), stop=Stop(requests=1)), config)


def test_unknown_fields_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `rate`"):
        msgspec.convert({"rate": 1}, WorkloadSpec)
