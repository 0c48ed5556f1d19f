"""What Streamlit pages have been bitten by: threads without a script run, and a picture that comes twice."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app
from app.live import routes
from app.session import Hub

ROOT = Path(app.__path__[0])
MAIN = str(ROOT / "main.py")
SCREENS = sorted(path.name for path in (ROOT / "screens").glob("*.py") if path.name != "__init__.py")
SECONDS = float(os.environ.get("INFERENCE_LAB_PAGES_SECONDS", "6"))
"""How long the pages are run in turn under load."""


def test_no_thread_misses_its_script_run_on_any_page_under_load(hub: Hub, caplog: pytest.LogCaptureFixture):
    """J1: the engine's news come on threads of the client; none of them may draw."""
    page = AppTest.from_file(MAIN, default_timeout=60).run()
    lab = hub.find(page.session_state["lab"])
    assert hub.ensure_open(lab)
    hub.client.send(lab.token, "load", params={"max_tokens": 900, "ignore_eos": True}, copies=4)
    seen: set[str] = set()
    steps = lab.log.next_index
    end = time.monotonic() + SECONDS
    with caplog.at_level(logging.WARNING):
        while time.monotonic() < end or seen != set(SCREENS):
            for name in SCREENS:
                again = AppTest.from_file(MAIN, default_timeout=60)
                again.query_params["lab"] = lab.token
                again.run()
                again.switch_page(str(ROOT / "screens" / name)).run()
                assert not again.exception, (name, again.exception)
                seen.add(name)
    assert lab.log.next_index > steps, "the engine worked all the while"
    missing = [r for r in caplog.records if "missing ScriptRunContext" in r.getMessage() and r.threadName != "MainThread"]
    assert missing == []


def test_the_engines_process_imports_no_page():
    """J1: what has no page can't draw on one."""
    code = (
        "import sys, engine.serve.host; print([m for m in sys.modules if m.split('.')[0] in ('streamlit', 'app', 'plotly')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert found.stdout.strip() == "[]"


def test_fifty_refreshes_that_change_nothing_raise_nothing_and_send_nothing(hub: Hub):
    """J4: an idle engine whose viewers are woken all the time."""
    lab = hub.enter(None)
    assert hub.ensure_open(lab)
    look = routes.Look()
    lab.look(look)

    async def listen() -> list[bytes]:
        viewer = routes.Viewer(look)
        rounds = 0

        async def gone() -> bool:
            nonlocal rounds
            rounds += 1
            lab.changed()
            viewer.bell.set()
            return rounds > 50

        heard = [b"".join(event) async for event in routes._events(hub, lab, viewer, (lab.token, "viewer-one"), gone)]
        assert rounds == 51
        return heard

    heard = [event for event in asyncio.run(listen()) if event.startswith(b"data:")]
    assert len(heard) == 1, "the first picture, and then nothing that is the same again"
