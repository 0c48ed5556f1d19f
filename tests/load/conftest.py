"""A lab server in a process of its own with one lab on it, and HTTP clients that cost next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.bench.viewers import SERVE, TOKEN

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running server and ways to talk to it."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port, self.process = port, process

    @property
    def cpu(self) -> float:
        """Seconds of processor time that the server's process (not the engine's) took so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    @property
    def rss(self) -> int:
        """Bytes of the server's process."""
        return psutil.Process(self.process.pid).memory_info().rss

    def command(self, verb: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Send one command as the presenter."""
        return asyncio.run(self.ask("POST", f"/lab/api/{verb}", json.dumps({"lab": TOKEN, **body}).encode()))

    def state(self) -> dict[str, Any]:
        """All sections of the lab."""
        return asyncio.run(self.ask("GET", f"/lab/api/state?lab={TOKEN}"))[1]

    async def ask(self, method: str, path: str, body: bytes = b"", timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
        """One request on a connection of its own: status and JSON."""
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(self.head(method, path, len(body)) + body)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                status = int((await reader.readline()).split()[1])
                length = 0
                while (line := await reader.readline()).strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                found = json.loads(await reader.readexactly(length)) if length else {}
                return status, found
            finally:
                writer.close()

    def head(self, method: str, path: str, length: int = 0) -> bytes:
        """The head of a request."""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: localhost:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    async def follow(
        self, name: str, viewer: str, seen: list[tuple[float, int]], until: asyncio.Event, *, reads: bool = True
    ) -> None:
        """Listen to a stream; ``seen`` gets the moment of each refresh and its bytes on the wire.

        ``reads``: unpack and parse everything, as a browser does on a machine of its own; else only count.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)
        plain = self.head("GET", f"/lab/api/stream?lab={name}&viewer={viewer}")
        writer.write(plain[:-2] + b"Accept-Encoding: gzip\r\n\r\n")
        unpack = zlib.decompressobj(31)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            packed = b"content-encoding: gzip" in head.lower()
            while not until.is_set():
                try:
                    length = int(await asyncio.wait_for(reader.readline(), 1.0), 16)
                except TimeoutError:
                    continue
                if not length:
                    return
                chunk = (await reader.readexactly(length + 2))[:-2]
                if reads:
                    event = unpack.decompress(chunk) if packed else chunk
                    if not event.startswith(b"data: "):
                        continue
                    json.loads(event[6:])
                elif length < 200:  # the stream's beginning, or a heartbeat
                    continue
                seen.append((time.monotonic(), length))
        finally:
            writer.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Start a server with a model and wait until its lab is open."""
    started: list[Server] = []

    def start(model: str) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = (tmp_path / "server.log").open("wb")
        process = subprocess.Popen([sys.executable, "-c", SERVE, model, str(port), "0"], cwd=ROOT, stdout=log, stderr=log)
        server = Server(port, process)
        started.append(server)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError, IndexError):
                if server.state()["head"]["open"]:
                    return server
            time.sleep(0.2)
        raise AssertionError((tmp_path / "server.log").read_text(errors="replace"))

    yield start
    for server in started:
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.terminate()
        server.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
