"""Thirty people follow one lab: each sees it move, and the engine hardly notices. Needs a machine that does nothing else."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable

import pytest

from tests.load.conftest import TOKEN, Server

FOLLOWERS = 30
SECONDS = float(os.environ.get("INFERENCE_LAB_LOAD_SECONDS", "5"))
ROUNDS = 6


async def _steps(server: Server) -> int:
    return (await server.ask("GET", f"/lab/api/state?lab={TOKEN}"))[1]["clock"]["last"]


async def _rate(server: Server) -> float:
    """Steps a second of the engine over a while."""
    begin, first = time.monotonic(), await _steps(server)
    await asyncio.sleep(SECONDS)
    return (await _steps(server) - first) / (time.monotonic() - begin)


async def _measure(server: Server, name: str) -> tuple[list[float], list[float], list[float], float, float]:
    """Step rates alone and followed, refreshes a second of each follower, bytes a second to all, and the server's cores."""
    alone, followed, refreshes, traffic, cores = [], [], [], 0.0, 0.0
    for number in range(ROUNDS):
        alone.append(await _rate(server))
        until = asyncio.Event()
        seen: list[list[tuple[float, int]]] = [[] for _ in range(FOLLOWERS)]
        pages = [
            asyncio.create_task(server.follow(name, f"follower{number}x{place:02}", seen[place], until, reads=place == 0))
            for place in range(FOLLOWERS)
        ]
        await asyncio.sleep(1.5)
        begin, cpu = time.monotonic(), server.cpu
        followed.append(await _rate(server))
        took = time.monotonic() - begin
        cores = max(cores, (server.cpu - cpu) / took)
        counted = [[size for moment, size in page if begin <= moment <= begin + took] for page in seen]
        refreshes += [len(page) / took for page in counted]
        traffic = max(traffic, sum(map(sum, counted)) / took)
        until.set()
        await asyncio.gather(*pages)
    return alone, followed, refreshes, traffic, cores


@pytest.mark.soak
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_thirty_followers(serve: Callable[[str], Server], model: str, record_property: Callable[[str, object], None]):
    server = serve(model)
    spec = {
        "arrivals": {"process": "closed", "in_flight": 4}, "prompt": {"tokens": 64}, "output": {"tokens": 128},
        "stop": {"seconds": 600},
    }  # fmt: skip
    assert server.command("traffic", spec=spec)[0] == 200
    address = server.command("share", origin="")[1]["address"]
    name = "follow:" + address.partition("follow=")[2]
    alone, followed, refreshes, traffic, cores = asyncio.run(_measure(server, name))
    kept = statistics.median(b / a for a, b in zip(alone, followed, strict=True))
    record_property("measured", {
        "followers": FOLLOWERS, "alone steps/s": [round(x, 1) for x in alone],
        "followed steps/s": [round(x, 1) for x in followed], "kept": round(kept, 3),
        "least refreshes/s": round(min(refreshes), 2), "median": round(statistics.median(refreshes), 2),
        "MB/s to all": round(traffic / 1e6, 2), "server's cores": round(cores, 2),
    })  # fmt: skip
    assert min(refreshes) >= 2.0
    assert cores < 0.3, "the server leaves the processor to the engine"
    assert kept >= 0.9
