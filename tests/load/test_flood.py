"""Floods: whatever arrives, memory stays bounded, refusals are clear, and the presenter's page stays alive."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from tests.load.conftest import TOKEN, Server

MIB = 2**20


async def _while_watched(server: Server, work: Callable[[], object]) -> tuple[object, list[float]]:
    """Do something while the presenter's page listens; also returns the gaps between its refreshes, seconds."""
    seen: list[tuple[float, int]] = []
    until = asyncio.Event()
    page = asyncio.create_task(server.follow(TOKEN, "presenter1", seen, until))
    await asyncio.sleep(1.0)
    begin = time.monotonic()
    result = await work()
    await asyncio.sleep(2.0)
    until.set()
    await page
    moments = [begin, *(moment for moment, _ in seen if moment >= begin), time.monotonic()]
    return result, [b - a for a, b in pairwise(moments)]


def _traffic(server: Server) -> None:
    """Keep the presenter's pictures moving."""
    spec = {
        "arrivals": {"process": "closed", "in_flight": 2}, "prompt": {"tokens": 16}, "output": {"tokens": 64},
        "stop": {"seconds": 120},
    }  # fmt: skip
    assert server.command("traffic", spec=spec)[0] == 200


def test_a_thousand_sends_at_once(serve: Callable[[str], Server]):
    server = serve("scripted:seconds=0.01")
    _traffic(server)
    before = server.rss
    body = json.dumps({"lab": TOKEN, "prompt": "flood " * 50, "max_tokens": 300}).encode()

    async def flood() -> Counter[int]:
        async def one() -> tuple[int, str]:
            try:
                status, found = await server.ask("POST", "/lab/api/send", body)
            except OSError:
                return 0, ""
            return status, found.get("error", "")

        answers = await asyncio.gather(*(one() for _ in range(1000)))
        said = {error for status, error in answers if status >= 400}
        assert said, "most of them are refused"
        for error in said:
            assert "commands of this page wait for the engine already" in error or "max_num_queued_requests=256" in error
        return Counter(status for status, _ in answers)

    counts, gaps = asyncio.run(_while_watched(server, flood))
    assert sum(counts.values()) == 1000
    assert counts[200] >= 1
    assert set(counts) <= {0, 200, 400, 429}
    assert max(gaps) < 3.0, f"the presenter's page stood still: {max(gaps):.1f} s"
    assert server.rss - before < 120 * MIB
    assert server.state()["head"]["open"] is True


def test_long_bodies_and_bodies_that_are_none(serve: Callable[[str], Server]):
    server = serve("scripted:seconds=0.01")
    _traffic(server)
    before = server.rss
    huge = json.dumps({"lab": TOKEN, "prompt": "x" * 960_000}).encode()
    bodies = [huge] * 60 + [b"{" * 5000, b"\xff\x00", b"[]", b"", b'{"lab": 7}', b'{"lab": {"a": []}}'] * 20

    async def flood() -> Counter[int]:
        async def one(body: bytes) -> int:
            status, found = await server.ask("POST", "/lab/api/send", body)
            assert found["error"]
            return status

        return Counter(await asyncio.gather(*(one(body) for body in bodies)))

    counts, gaps = asyncio.run(_while_watched(server, flood))
    assert set(counts) <= {400, 403, 408, 413, 429}, counts
    assert sum(counts.values()) == len(bodies)
    assert max(gaps) < 3.0, f"the presenter's page stood still: {max(gaps):.1f} s"
    assert server.rss - before < 150 * MIB


def test_a_body_that_never_comes_is_given_up(serve: Callable[[str], Server]):
    server = serve("scripted")

    async def talk() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(server.head("POST", "/lab/api/send", 500_000) + b'{"lab": "')
        status = int((await asyncio.wait_for(reader.readline(), 20)).split()[1])
        writer.close()
        return status

    assert asyncio.run(talk()) == 408


def test_readers_that_do_not_read_hold_nobody_up(serve: Callable[[str], Server]):
    server = serve("scripted:seconds=0.005")
    _traffic(server)

    async def starve() -> int:
        lazy = []
        for number in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.write(server.head("GET", f"/lab/api/stream?lab={TOKEN}&viewer=lazyviewer{number:02}"))
            await writer.drain()
            lazy.append((reader, writer))
        await asyncio.sleep(2.0)
        early = server.rss
        await asyncio.sleep(6.0)
        grown = server.rss - early
        for _, writer in lazy:
            writer.transport.abort()
        return grown

    grown, gaps = asyncio.run(_while_watched(server, starve))
    assert grown < 60 * MIB
    assert max(gaps) < 3.0, f"the presenter's page stood still: {max(gaps):.1f} s"
