"""A lab's address sets up the same lab elsewhere; what is wrong with it is told, and a lab opens all the same."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.link import WorkloadRefused, parse, query_of, read_workload
from app.scenes import catalogue
from app.session import DEFAULT_CONFIG, Lab, Limits
from engine.core.config import EngineConfig
from engine.serve.client import EngineClient
from engine.workload.arrivals import Arrivals
from engine.workload.lengths import Lengths
from engine.workload.scenes import Scene
from engine.workload.spec import Prefix, Stop, WorkloadSpec

SCENES = {scene.id: scene for scene in catalogue().scenes}

lengths = st.builds(Lengths, tokens=st.integers(1, 60)) | st.builds(
    Lengths, distribution=st.just("uniform"), low=st.integers(1, 30), high=st.integers(30, 60)
)
workloads = st.builds(
    WorkloadSpec,
    arrivals=st.builds(
        Arrivals,
        process=st.sampled_from(["poisson", "constant", "bursty", "closed"]),
        rate=st.floats(0.01, 100.0, allow_nan=False),
        unit=st.sampled_from(["seconds", "steps"]),
    ),
    prompt=st.just(Lengths(tokens=64)) | st.just(Lengths(distribution="lognormal", tokens=70, low=40, high=90, sigma=0.3)),
    output=lengths,
    prefix=st.builds(Prefix, tokens=st.integers(0, 30), share=st.floats(0, 1)),
    seed=st.integers(0, 2**32 - 1),
    stop=st.builds(Stop, seconds=st.floats(0.1, 3600), requests=st.none() | st.integers(1, 1000)),
)
configs = st.builds(
    EngineConfig,
    max_model_len=st.just(512),
    max_num_batched_tokens=st.integers(512, 4096),
    max_num_seqs=st.integers(1, 64),
    block_size=st.sampled_from([4, 8, 16, 32]),
    num_kv_blocks=st.integers(128, 1000),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    async_scheduling=st.booleans(),
    max_num_queued_requests=st.just(DEFAULT_CONFIG.max_num_queued_requests),
    seed=st.just(DEFAULT_CONFIG.seed),
)


def read(query: str):
    return parse(dict(parse_qsl(query, keep_blank_values=True)), DEFAULT_CONFIG, SCENES.get)


@given(configs, st.none() | workloads)
def test_settings_and_traffic_come_back_as_they_were(config: EngineConfig, workload: WorkloadSpec | None):
    found = read(query_of(config, DEFAULT_CONFIG, workload, None))
    assert found.problems == ()
    assert found.config == config
    assert found.workload == workload


@pytest.mark.parametrize("scene", SCENES.values(), ids=lambda scene: scene.id)
def test_a_scene_comes_back_by_its_name_also_with_changed_settings(scene: Scene):
    query = query_of(scene.engine_config(), DEFAULT_CONFIG, scene.workload, scene)
    assert query == f"scene={scene.id}"
    found = read(query)
    assert (found.config, found.workload, found.scene) == (scene.engine_config(), scene.workload, scene)
    changed = scene.engine_config().replace(num_kv_blocks=777)
    assert read(query_of(changed, DEFAULT_CONFIG, scene.workload, scene)).config == changed


def test_the_defaults_need_no_words():
    assert query_of(DEFAULT_CONFIG, DEFAULT_CONFIG, None, None) == ""
    assert read("").config == DEFAULT_CONFIG


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("scene=no-such", "scene 'no-such'"),
        ("engine=nonsense:3", "unknown engine setting 'nonsense'"),
        ("engine=num_kv_blocks", "is not name:value"),
        ("engine=num_kv_blocks:0", "num_kv_blocks=0 must be at least 1"),
        ("engine=num_kv_blocks:true", "must be a whole number"),
        ("engine=enable_chunked_prefill:false", "max_num_batched_tokens=256 is less than"),
        ("engine=" + "x" * 20_000, "at most 16,000 are read"),
        ("traffic={", "not valid JSON"),
        ("traffic=" + "[" * 10_000, "not valid JSON"),
        ("traffic=[]", "Expected `object`"),
        ("traffic={}", "stop is empty"),
        ('traffic={"stop":{"seconds":5},"arrivals":{"rate":-1}}', "rate=-1"),
        ('traffic={"stop":{"seconds":5},"evil":1}', "evil"),
        ('traffic={"stop":{"seconds":5},"prompt":{"tokens":5000}}', "max_model_len=1,024"),
    ],
)
def test_a_bad_link_says_what_is_wrong_and_still_opens_a_lab(query: str, says: str):
    found = read(query)
    assert len(found.problems) == 1
    assert says in found.problems[0]
    assert found.config == DEFAULT_CONFIG
    assert found.workload is None


def test_one_bad_part_leaves_the_others():
    found = read("engine=num_kv_blocks:64&traffic=nonsense&scene=unknown")
    assert found.config.num_kv_blocks == 64
    assert len(found.problems) == 2


def test_a_link_sets_up_a_fresh_lab_only_once_and_within_the_quotas():
    lab = Lab("a" * 24, EngineClient("scripted"), Limits(max_tokens=100, queued=64))
    lab.set_up({"engine": "num_kv_blocks:40,max_model_len:512", "traffic": '{"stop":{"seconds":5}}'})
    assert (lab.config.num_kv_blocks, lab.config.max_num_queued_requests, lab.prepared) == (40, 64, True)
    lab.set_up({"engine": "num_kv_blocks:99"})
    assert lab.config.num_kv_blocks == 40
    other = Lab("b" * 24, EngineClient("scripted"), Limits(max_tokens=100))
    other.set_up({"traffic": '{"stop":{"seconds":5},"output":{"tokens":101}}'})
    assert other.workload is None
    assert "at most 100" in other.problems[0]


def test_a_workload_error_names_its_field():
    with pytest.raises(WorkloadRefused) as refused:
        read_workload({"stop": {"seconds": 5}, "prompt": {"tokens": 0}})
    assert refused.value.field == "prompt"
    assert "tokens=0 must be a whole number from 1" in str(refused.value)
    assert "$" not in str(refused.value)
    assert msgspec.json.encode(str(refused.value))
