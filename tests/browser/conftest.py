"""The real lab with the embedded model, and a real Chromium that must find nothing to complain about."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, TimeoutError, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "assets"
OUT = ROOT / "out" / "screenshots"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
LAB_STARTS = 240.0


class Lab:
    """A running lab server."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log
        self.address = f"http://localhost:{port}"

    @property
    def host_pid(self) -> int:
        """Process id of the engine's host."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child.pid for child in children if "engine.serve.host" in " ".join(child.cmdline()))


def start_lab(tmp: Path, model: str = "smollm2", **environment: str) -> Lab:
    """Start the lab as its command line does and wait until the page answers; ``environment`` is added to ours."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp / f"lab-{model}.log"
    command = [sys.executable, "-m", "engine.cli", "lab", "--model", model, "--device", "cpu", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/_stcore/health", timeout=2):
                return Lab(port, process, log)
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise AssertionError(f"the lab did not start:\n{log.read_text(errors='replace')}")


def stop_lab(lab: Lab) -> None:
    """End the lab; nothing of it may stay behind."""
    children = psutil.Process(lab.process.pid).children(recursive=True)
    lab.process.terminate()
    try:
        lab.process.wait(20)
    except subprocess.TimeoutExpired:
        lab.process.kill()
        raise
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"processes stay behind: {alive}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One lab with the embedded model for all tests."""
    running = start_lab(tmp_path_factory.mktemp("lab"))
    yield running
    stop_lab(running)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of the module's own on the random model, with a data folder of its own."""
    folder = tmp_path_factory.mktemp("tiny")
    running = start_lab(folder, "tiny", INFERENCE_LAB_DATA=str(folder / "data"))
    yield running
    stop_lab(running)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as found:
        yield found


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Chromium: the system's where there is one, else Playwright's own."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    found = playwright.chromium.launch(executable_path=path, args=FLAGS)
    yield found
    found.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, lab: Lab) -> Iterator[Open]:
    """Open the lab in a window of its own. At the end: no console error, no page error, no request to any other host."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    expected: list[str] = []

    def open_page(width: int = 1280, height: int = 800, theme: str = "light", expect: tuple[str, ...] = ()) -> Page:
        expected.extend(expect)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: complaints.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda e: complaints.append(f"page error: {e}"))
        page.on("request", lambda r: None if _ours(r.url, lab.port) else complaints.append(f"request to {r.url}"))
        page.goto(lab.address)
        page.wait_for_selector(".lab-head")
        page.wait_for_function("window.__lab.sections.head?.open === true", timeout=LAB_STARTS * 1000)
        page.wait_for_function("window.Plotly !== undefined")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [c for c in complaints if not any(text in c for text in expected)]


def _ours(url: str, port: int) -> bool:
    return url.startswith(("data:", "blob:", f"http://localhost:{port}/", f"ws://localhost:{port}/"))


def picture(page: Page, name: str) -> None:
    """Save a screenshot of what a test has on its screen."""
    OUT.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=OUT / f"{name}.png")


def download(page: Page, label: str, folder: Path) -> Path:
    """Click once the page stands still; Streamlit loses a click on what it is just drawing anew, so click again then."""
    for last in (False, False, True):
        page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', state="attached")
        try:
            with page.expect_download(timeout=30_000 if last else 10_000) as caught:
                page.get_by_role("button", name=label, exact=True).click()
        except TimeoutError:
            if last:
                raise
            continue
        path = folder / caught.value.suggested_filename
        caught.value.save_as(path)
        return path
    raise AssertionError("unreachable")
