"""Scenes and ready-made experiments on real models: the counting holds whoever computes."""

import pytest

from engine.core.clock import VirtualClock
from engine.workload.claims import Run, judge
from engine.workload.driver import run_offline
from engine.workload.experiment import judge_all, load_experiments
from engine.workload.scenes import load_scenes

llm = pytest.importorskip("engine.llm")

SCENES = load_scenes().scenes
EXPERIMENTS = load_experiments().experiments


@pytest.fixture(scope="module")
def tiny():
    return llm.load_model("tiny", "cpu")


@pytest.fixture(scope="module")
def embedded():
    try:
        return llm.load_model("smollm2", "cpu")
    except ValueError as error:
        pytest.skip(f"the embedded model is not installed: {error}")


def run_on(loaded, workload, config):
    engine = llm.build_engine(loaded, config, clock=VirtualClock())
    result = run_offline(engine, workload, loaded.tokenizer.encode)
    engine.check()
    assert result.refused == ()
    return Run(result.requests, result.steps)


def shows(scene, loaded):
    records = run_on(loaded, scene.workload, scene.engine_config())
    return [outcome.text for outcome in (judge(claim, records) for claim in scene.shows) if not outcome.holds]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_a_scene_shows_what_it_claims_on_the_tiny_model(scene, tiny):
    assert shows(scene, tiny) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.id)
def test_an_experiment_gives_what_it_expects_on_the_tiny_model(experiment, tiny):
    runs = {v.name: run_on(tiny, experiment.workload, v.engine_config()) for v in experiment.variants}
    assert [outcome.text for outcome in judge_all(experiment, runs) if not outcome.holds] == []


@pytest.mark.soak
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_a_scene_shows_what_it_claims_on_the_embedded_model(scene, embedded):
    assert shows(scene, embedded) == []
