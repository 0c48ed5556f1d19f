"""What looking on costs: a busy lab with nobody watching, and with several viewers, in turns of one run.

The lab's server runs as its own process with one lab on it: as many requests as asked for decode all the time, on as many
KV blocks. The viewers are clients of the event stream, as an open page is, that read and throw away; they run in this
process, on the same machine, so their own small cost is in the result as well. Throughput and step times come from the steps
that the lab records, not from the viewers. With ``--browser`` a real Chromium opens the page too: how soon it can be used on
a warm server, and how long a refresh takes to draw.

``python -m engine.bench.viewers``; the last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.trace import StepTrace
from engine.observe.runfile import RunReader

TOKEN = "benchmark-of-viewers-lab"
GOALS = {"refreshes": 4.0, "throughput_share": 0.9, "p99_ratio": 1.5, "draw_ms": 100.0, "usable_s": 2.0}
PROMPT = "A prompt that is a few blocks long, so that the pool is well filled while all of them decode. "
SERVE = f"""
import sys
from pathlib import Path
from app import server
from app.session import Hub
from engine.serve.client import EngineClient

model, port, threads, *folder = sys.argv[1:]
port, folder = int(port), Path(*folder) if folder else None
client = EngineClient(model, device="cpu", threads=int(threads) or None, recordings=folder)
hub = Hub(client, alive=lambda session: True)
hub.listens = ("127.0.0.1", port)
hub.enter("{TOKEN}", "open tab")
app = server.build_app(hub, server.address("127.0.0.1", port))
client.start()
try:
    app.run(config={{**server.SETTINGS, "server.address": "127.0.0.1", "server.port": port}})
finally:
    client.close()
"""
"""The server, started in a process of its own as the command line does, with a lab whose token is known."""


@dataclass
class Server:
    """A running server and its lab."""

    port: int
    folder: Path

    def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """One command of the lab's owner.

        Raises:
            urllib.error.HTTPError: it was refused.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/lab/api/{verb}",
            json.dumps({"lab": TOKEN, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def state(self) -> dict[str, Any]:
        """All sections of the lab."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/lab/api/state?lab={TOKEN}", timeout=60) as answer:
            return dict(json.load(answer))

    def last_step(self) -> int:
        """Index of the newest step."""
        return int(self.state()["clock"]["last"])

    def fill(self, wanted: int, max_tokens: int) -> None:
        """Queue copies of the prompt until ``wanted`` of them wait, or the queue is full."""
        waiting = int(next(g["value"] for g in self.state()["tiles"]["gauges"] if g["name"] == "waiting"))
        with contextlib.suppress(urllib.error.HTTPError):
            while waiting < wanted:
                copies = min(32, wanted - waiting)
                params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
                self.post("send", prompt=PROMPT, chat=False, copies=copies, **params)
                waiting += copies

    def steps(self, first: int, last: int) -> list[StepTrace]:
        """Recorded steps ``first`` to ``last``."""
        newest = max(self.folder.glob("*.inflab"), key=lambda path: path.stat().st_mtime)
        with RunReader(newest) as reader:
            return reader.steps(first, last)


@contextlib.contextmanager
def serving(model: str, threads: int, running: int, blocks: int) -> Iterator[Server]:
    """A server whose lab is set up for the load; everything ends with the context."""
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        command = [sys.executable, "-c", SERVE, model, str(port), str(threads), temporary]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "INFERENCE_LAB_DATA": temporary})
        try:
            server = Server(port, Path(temporary))
            _wait_open(server, process)
            config = {
                "max_num_seqs": running, "num_kv_blocks": blocks, "block_size": 16, "max_model_len": 512,
                "max_num_batched_tokens": 512,
            }  # fmt: skip
            server.post("engine", config=config)
            yield server
        finally:
            process.terminate()
            process.wait(30)


def _wait_open(server: Server, process: subprocess.Popen[bytes], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if server.state()["head"]["open"]:
                return
        if process.poll() is not None:
            raise RuntimeError(f"the lab's server ended with code {process.returncode}: start it with `make lab` to see why")
        time.sleep(0.3)
    raise TimeoutError(f"the lab was not open after {seconds:.0f} s")


# Viewers ------------------------------------------------------------------------------------------------------------------


async def watch(port: int, viewers: int, looks: int, seconds: float) -> list[int]:
    """Hold event streams open for some seconds; returns how many refreshes each of them got.

    Args:
        port: the server's.
        viewers: streams.
        looks: 1: all look alike; more: themes and scales differ in turn.
        seconds: how long.
    """
    counts = [0] * viewers

    async def one(place: int) -> None:
        theme, scale = [("light", "linear"), ("dark", "linear"), ("light", "root"), ("dark", "root")][place % looks % 4]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        query = f"lab={TOKEN}&viewer=bench-viewer-{place}&theme={theme}&scale={scale}"
        writer.write(f"GET /lab/api/stream?{query} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        try:
            while True:
                chunk = await reader.read(1 << 20)
                if not chunk:
                    raise ConnectionError("the event stream ended early")
                counts[place] += chunk.count(b"data: {")
        finally:
            writer.close()

    tasks = [asyncio.create_task(one(place)) for place in range(viewers)]
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError(f"a viewer failed: {task.exception()}")
    return counts


# Measuring ----------------------------------------------------------------------------------------------------------------


@dataclass
class Series:
    """What was measured under one condition, all its turns together."""

    name: str
    viewers: int
    looks: int
    tokens: int = 0
    busy: float = 0.0
    step_times: list[float] = field(default_factory=list)
    refreshes: list[float] = field(default_factory=list)

    def add(self, steps: Sequence[StepTrace]) -> None:
        """The steps of one turn; the first and last are cut by the turn's borders and left out."""
        whole = [step for step in steps[1:-1] if step.scheduled]
        if len(whole) < 2:
            raise RuntimeError("fewer than two steps in a turn: measure longer, with --seconds, or a smaller --model")
        self.tokens += sum(row.sampled >= 0 for step in whole for row in step.scheduled)
        self.busy += whole[-1].end - whole[0].start
        self.step_times += [step.duration for step in whole]

    def summary(self) -> dict[str, Any]:
        """Tokens a second, step times in milliseconds, refreshes a second of the slowest viewer."""
        ordered = sorted(self.step_times)
        return {
            "name": self.name,
            "viewers": self.viewers,
            "tokens_per_second": round(self.tokens / self.busy, 1),
            "step_p50_ms": round(1000 * statistics.median(ordered), 2),
            "step_p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
            "steps": len(ordered),
            "refreshes_per_second": round(min(self.refreshes), 2) if self.refreshes else None,
        }


def measure(server: Server, series: Sequence[Series], running: int, seconds: float, rounds: int) -> None:
    """Turns of ``seconds`` each, one for each condition, ``rounds`` times over."""
    for turn in range(rounds):
        for one in series if turn % 2 == 0 else tuple(reversed(series)):
            server.fill(2 * running, 384)
            time.sleep(0.5)
            first = server.last_step()
            begin = time.monotonic()
            counts = asyncio.run(watch(server.port, one.viewers, one.looks, seconds)) if one.viewers else []
            if not counts:
                time.sleep(seconds)
            length = time.monotonic() - begin
            last = server.last_step()
            time.sleep(0.6)  # until the recording has them
            one.add(server.steps(first, last))
            one.refreshes += [count / length for count in counts]


SAMPLE = """() => {
  window.__samples = [];
  let draws = window.__lab.draws;
  setInterval(() => {
    if (window.__lab.draws === draws) return;
    draws = window.__lab.draws;
    window.__samples.push({ ...window.__lab.times });
  }, 50);
}"""
"""Keeps the drawing times of every refresh."""


OPENINGS = 5
"""Pages opened on the idle server."""
READY = "window.__lab?.draws > 0 && window.__lab.sections.head?.open && document.querySelector('#lab-send')"
DRAWN = "window.__lab?.times?.pool !== undefined"


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser.

    Raises:
        ImportError: Playwright is not installed (``pip install -e '.[dev]'``).
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or ("/usr/bin/chromium" if Path("/usr/bin/chromium").exists() else None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def opening(browser: Any, port: int) -> tuple[Any, float, float]:
    """Open the page with an empty cache: (page, seconds until controls and words are there, until all pictures are)."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    begin = time.monotonic()
    page.goto(f"http://127.0.0.1:{port}/?lab={TOKEN}")
    page.wait_for_function(READY, timeout=60_000)
    usable = time.monotonic() - begin
    page.wait_for_function(DRAWN, timeout=60_000)
    return page, usable, time.monotonic() - begin


def openings(port: int) -> dict[str, float]:
    """Seconds that opening the page takes on a warm, idle server: medians, after one opening that is not counted."""
    with chromium() as browser:
        opening(browser, port)[0].context.close()
        usable, drawn = [], []
        for _ in range(OPENINGS):
            page, first, last = opening(browser, port)
            page.context.close()
            usable.append(first)
            drawn.append(last)
    return {"usable_s": round(statistics.median(usable), 2), "all_drawn_s": round(statistics.median(drawn), 2)}


def drawing(server: Server, running: int, seconds: float) -> dict[str, Any]:
    """A real page on the busy server: seconds until it can be used, and milliseconds that a refresh takes to draw."""
    with chromium() as browser:
        page, usable, drawn = opening(browser, server.port)
        server.fill(2 * running, 384)
        page.evaluate(SAMPLE)
        page.wait_for_timeout(1000 * seconds)
        times = page.evaluate("window.__samples.slice(2)")
    if not times:
        raise RuntimeError(f"the page drew nothing in {seconds:g} s: measure longer, with --seconds")
    sums = sorted(sum(one.values()) for one in times)
    return {
        "usable_under_load_s": round(usable, 2),
        "all_drawn_under_load_s": round(drawn, 2),
        "draw_p50_ms": round(statistics.median(sums), 1),
        "draw_p90_ms": round(sums[int(0.9 * (len(sums) - 1))], 1),
        "each_p50_ms": {name: round(statistics.median(one[name] for one in times), 1) for name in times[-1]},
        "draws_per_second": round(len(times) / seconds, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the last line printed is one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.viewers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny", help="model of the lab (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="the engine's threads, 0: its choice (default %(default)s)")
    parser.add_argument("--running", type=int, default=64, help="requests that decode at once (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of the pool (default %(default)s)")
    parser.add_argument("--viewers", type=int, default=5, help="viewers (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each condition (default %(default)s)")
    parser.add_argument("--browser", action="store_true", help="measure a real page in Chromium too (needs the dev extra)")
    options = parser.parse_args(arguments)
    series = [
        Series("nobody looks on", 0, 1),
        Series("all look alike", options.viewers, 1),
        Series("they look in four ways", options.viewers, 4),
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with serving(options.model, options.threads, options.running, options.blocks) as server:
        page = None
        if options.browser:
            server.fill(4, 64)
            time.sleep(2.0)
            page = openings(server.port)
        measure(server, series, options.running, options.seconds, options.rounds)
        if page is not None:
            server.fill(2 * options.running, 384)
            page |= drawing(server, options.running, options.seconds)
    result = report([one.summary() for one in series], page)
    result |= {
        "model": options.model,
        "running": options.running,
        "blocks": options.blocks,
        "cpus": os.cpu_count(),
        "load": load,
    }
    print(json.dumps({"benchmark": "viewers", **result}))
    return 0


def report(lines: list[dict[str, Any]], page: dict[str, Any] | None) -> dict[str, Any]:
    """Print the table with its ratios and whether each goal is met; returns all of it."""
    base = lines[0]
    print(f"{'':24} {'tokens/s':>9} {'share':>6} {'step p50':>9} {'p99 ms':>8} {'ratio':>6} {'refreshes/s':>12}")
    for line in lines:
        line["throughput_share"] = round(line["tokens_per_second"] / base["tokens_per_second"], 3)
        line["p99_ratio"] = round(line["step_p99_ms"] / base["step_p99_ms"], 2)
        refreshes = "–" if line["refreshes_per_second"] is None else f"{line['refreshes_per_second']:.1f}"
        speed = f"{line['tokens_per_second']:>9,.1f} {line['throughput_share']:>6.2f}"
        steps = f"{line['step_p50_ms']:>9.1f} {line['step_p99_ms']:>8.1f} {line['p99_ratio']:>6.2f}"
        print(f"{line['name']:24} {speed} {steps} {refreshes:>12}")
    watched = lines[1]
    met = {
        "refreshes": watched["refreshes_per_second"] >= GOALS["refreshes"],
        "throughput_share": watched["throughput_share"] >= GOALS["throughput_share"],
        "p99_ratio": watched["p99_ratio"] <= GOALS["p99_ratio"],
    }
    if page is not None:
        met |= {"draw_ms": page["draw_p50_ms"] <= GOALS["draw_ms"], "usable_s": page["usable_s"] <= GOALS["usable_s"]}
        print(
            f"In Chromium: on the idle server usable after {page['usable_s']} s and all drawn after {page['all_drawn_s']} s "
            f"(under load {page['usable_under_load_s']} and {page['all_drawn_under_load_s']}); "
            f"a refresh draws in {page['draw_p50_ms']} ms."
        )
    for name, good in met.items():
        print(f"goal {name} {GOALS[name]:g}: {'met' if good else 'missed'}")
    return {"lines": lines, "browser": page, "goals": GOALS, "met": met}


if __name__ == "__main__":
    raise SystemExit(main())
