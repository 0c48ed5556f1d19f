"""Experiments on a real host with the scripted model, and one finished result for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from engine.serve.client import EngineClient
from engine.serve.experiments import ExperimentRunner, HostPlace
from engine.workload.experiment import load_experiments
from engine.workload.results import ExperimentResult

READY = load_experiments()


def small(experiment_id: str, **changes):
    """A ready-made experiment, measured once."""
    return msgspec.structs.replace(READY.find(experiment_id), **{"repetitions": 1, **changes})


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineClient]:
    """One host with the scripted model, a millisecond a step."""
    with EngineClient("scripted:seconds=0.001") as client:
        client.wait_ready(60)
        yield client


@pytest.fixture(scope="session")
def result(engine: EngineClient) -> ExperimentResult:
    """Static against continuous, three repetitions."""
    return ExperimentRunner(small("static-continuous", repetitions=3), HostPlace(engine)).run()
