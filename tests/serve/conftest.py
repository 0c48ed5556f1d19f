"""Hosts for the tests of this folder: quick to start, their logs in a folder of their own, none left behind."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.serve.client import EngineClient


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def make_client() -> Iterator[Callable[..., EngineClient]]:
    """Makes started, ready clients; closes them, and checks that no process is left."""
    clients: list[tuple[EngineClient, int]] = []

    def make(model: str = "scripted:seconds=0.002", wait: bool = True, **options) -> EngineClient:
        client = EngineClient(model=model, **options)
        client.start()
        clients.append((client, client.pid))
        if wait:
            client.wait_ready(60)
        return client

    yield make
    for client, pid in clients:
        client.close()
        assert gone(pid), f"host {pid} is still there"


@pytest.fixture
def client(make_client) -> EngineClient:
    return make_client()


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether the process ends in time; a zombie has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


ROOT = Path(__file__).resolve().parents[2]
assert (ROOT / "engine").is_dir()
os.environ.setdefault("PYTHONPATH", str(ROOT))
