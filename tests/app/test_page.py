"""Every page loads, before and after the model is ready, and says so when it was not started by the launcher."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app
from app import server
from app.session import Hub, install

MAIN = str(Path(app.__path__[0]) / "main.py")


def test_the_page_before_the_engine_is_there(sleeping: Hub):
    page = AppTest.from_file(MAIN, default_timeout=20).run()
    assert not page.exception
    token = page.query_params["lab"]
    assert sleeping.find(token[0] if isinstance(token, list) else token)


def test_the_page_on_a_ready_engine_and_again_after_a_reload(hub: Hub, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        page = AppTest.from_file(MAIN, default_timeout=20).run()
        assert not page.exception
        token = page.session_state["lab"]
        again = AppTest.from_file(MAIN, default_timeout=20)
        again.query_params["lab"] = token
        again.run()
    assert not again.exception
    assert again.session_state["lab"] == token
    messages = [record.getMessage() for record in caplog.records]
    assert not [text for text in messages if "ScriptRunContext" in text and "MainThread" not in text]


def test_without_the_launcher_the_page_says_what_to_do():
    install(None)
    page = AppTest.from_file(MAIN, default_timeout=20).run()
    assert "make lab" in page.exception[0].value


def test_a_port_in_use_is_refused_with_a_way_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"can't listen on 127.0.0.1:{port} .*--port"):
            server.check_port("127.0.0.1", port)
    server.check_port("127.0.0.1", port)


def test_the_settings_are_options_that_streamlit_knows():
    from streamlit import config

    known = config.get_config_options()
    assert not [name for name in server.SETTINGS if name not in known]


def test_the_app_takes_the_routes_of_the_live_view(sleeping: Hub):
    made = server.build_app(sleeping, "http://localhost:1")
    assert any(getattr(route, "path", "") == "/lab/api/stream" for route in made._user_routes)
    assert server.address("127.0.0.1", 8501) == "http://localhost:8501"
    assert server.address("192.168.1.4", 80) == "http://192.168.1.4:80"
