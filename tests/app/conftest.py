"""A hub on a real host process with the scripted model: everything of the page but the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from app.live import routes
from app.owner import LOCAL_NAMES, Owner
from app.session import Hub, install
from engine.serve.client import EngineClient


@pytest.fixture(scope="session")
def engine_client() -> Iterator[EngineClient]:
    """One host process for all tests."""
    with EngineClient("scripted:seconds=0.002") as client:
        yield client


@pytest.fixture
def hub(engine_client: EngineClient) -> Iterator[Hub]:
    """A ready hub without labs."""
    engine_client.start()
    engine_client.wait_ready(60)
    made = Hub(engine_client, owner=Owner(LOCAL_NAMES | {"lab.test"}))
    install(made)
    routes.allow_streams()
    yield made
    for token in made.tokens():
        if engine_client.pid is not None:
            engine_client.close_lab(token)
    install(None)


@pytest.fixture
def sleeping() -> Iterator[Hub]:
    """A hub whose engine was not started yet."""
    made = Hub(EngineClient("scripted"))
    install(made)
    yield made
    install(None)


def wait_for(condition, seconds: float = 10.0) -> None:
    """Block until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
