"""Every scene on real weights, in the lab's own process: tiny always, the embedded model with the long tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.serve.client import EngineClient
from engine.workload.claims import Run, judge
from engine.workload.scenes import Scene, load_scenes

SCENES = load_scenes().scenes


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.soak)])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with EngineClient(model=request.param, device="cpu") as engine:
        engine.wait_ready(180)
        yield engine


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.id)
def test_a_scene_shows_what_it_claims(client: EngineClient, scene: Scene) -> None:
    config = scene.engine_config()
    client.open_lab(scene.id, {name: getattr(config, name) for name in config.__struct_fields__})
    try:
        client.start_traffic(scene.id, scene.workload)
        log = client.log(scene.id)
        assert log.wait_until(lambda now: bool(now.traffic and now.traffic.ended and not now.traffic.in_flight), 120)
        run = Run(log.traces(), log.steps())
        for claim in scene.shows:
            outcome = judge(claim, run)
            assert outcome.holds, outcome.text
    finally:
        client.close_lab(scene.id)
        client.forget(scene.id)
