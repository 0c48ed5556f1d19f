"""Experiments on a real host with the tiny model: the same counts as on the script, fast enough, and told when disturbed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from engine.serve.client import EngineClient, HostGone
from lessons.catalogue import module_of
from lessons.judge import judge
from lessons.model import Compare, Lesson, Predict, RunBlock
from lessons.runs import Experiment, RunError, Send, measured, run_on_lab
from tests.lessons.independent import ANSWERS


@pytest.fixture(scope="module")
def client() -> Iterator[EngineClient]:
    with EngineClient("tiny", device="cpu", threads=1) as made:
        made.wait_ready(120)
        made.open_lab("lesson", {"num_kv_blocks": 64})
        yield made


def counted(lesson: Lesson) -> list[Predict]:
    """The predictions whose answer is a count and not a time."""
    times = {block.predict for block in lesson.blocks if isinstance(block, Compare) and block.timing}
    return [block for block in lesson.blocks if isinstance(block, Predict) and block.id not in times]


def test_the_model_gives_the_same_counts(lesson: Lesson, client: EngineClient):
    module, runs = module_of(lesson.folder), {}
    for block in lesson.blocks:
        if isinstance(block, RunBlock):
            begin = time.monotonic()
            for name in block.experiments:
                runs[name] = run_on_lab(client, "lesson", module.EXPERIMENTS[name]())
            assert time.monotonic() - begin < 10
            for name in block.experiments:
                assert runs[name].model["name"] == "tiny"
                assert not runs[name].disturbed
    for block in counted(lesson):
        truth = measured(module.VALUES, block.answer, runs)
        assert judge(block, ANSWERS[lesson.id][block.id], truth).right, f"{block.id}: {truth}"


def test_every_byte_of_a_real_pool_is_accounted_for(client: EngineClient):
    module = module_of("04_kv_cache")
    run = run_on_lab(client, "lesson", module.sized())
    sizes = module.SIZES["sized"]({"sized": run})
    assert sum(value for name, value in sizes.items() if not name.endswith("=")) == sizes["allocated ="] == run.pool_bytes
    assert module.VALUES["token_bytes"]({"sized": run}) == 2 * 2 * 2 * 16 * 4, "2 · layers · KV heads · dimension · float32"


def test_a_run_beside_another_lab_is_marked(client: EngineClient):
    client.open_lab("neighbour", {"num_kv_blocks": 256, "max_model_len": 2048})
    try:
        client.send("neighbour", "Go on and on", params={"max_tokens": 1500, "ignore_eos": True})
        run = run_on_lab(client, "lesson", module_of("01_one_request").one())
        assert run.disturbed
    finally:
        client.close_lab("neighbour")


def test_a_run_that_does_not_end_says_so(client: EngineClient):
    slow = Experiment(
        config={"num_kv_blocks": 256, "max_model_len": 2048},
        sends=(Send(name="A", prompt=(40,), params={"max_tokens": 2000, "ignore_eos": True}),),
    )
    with pytest.raises(RunError, match=r"0 of 1 requests finished within 0\.2 s"):
        run_on_lab(client, "lesson", slow, timeout=0.2)


def test_a_run_on_a_host_that_is_gone_says_so(client: EngineClient):
    gone = EngineClient("scripted")
    with pytest.raises(HostGone):
        run_on_lab(gone, "lesson", module_of("01_one_request").one())


def test_a_disturbed_record(runs_of):
    run = runs_of("one-request")["one"]
    assert not run.disturbed
    steps = (*run.steps[:3], msgspec.structs.replace(run.steps[3], wait_time=0.01), *run.steps[4:])
    assert msgspec.structs.replace(run, steps=steps).disturbed
