"""The lab's server: an ASGI Streamlit app with the live view's routes, and the launcher that starts it.

The engine's process is started beside it at once, so that the page shows before the model is ready. Everything that touches
``st.App``, which is young, is in this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import streamlit as st
from starlette.middleware import Middleware
from streamlit.file_util import get_static_dir
from streamlit.web.server.starlette import starlette_server

from app import sharing
from app.figures.palette import DARK
from app.files import KeptFiles
from app.live.routes import allow_streams, announced, end_streams, routes
from app.session import Hub, Limits, install

MAIN = Path(__file__).parent / "main.py"
LEAVING_LABS = 8
"""Labs that may still be closing on the host while others take their places."""

SETTINGS: dict[str, Any] = {
    "runner.postScriptGC": False,
    "runner.magicEnabled": False,
    "server.fileWatcherType": "none",
    "server.headless": True,
    "server.showEmailPrompt": False,
    "server.enableCORS": True,
    "server.enableXsrfProtection": True,
    "server.maxUploadSize": 16,
    "browser.gatherUsageStats": False,
    "client.toolbarMode": "minimal",
    "client.showErrorLinks": False,
    "logger.hideWelcomeMessage": True,
    "logger.level": "warning",
    # Dark enough that a caption, which is text at 60 %, has a contrast of 4.5; the accents are those of the live view.
    "theme.light.textColor": "#0f141c",
    "theme.light.primaryColor": "#2a4bd0",
    "theme.dark.primaryColor": "#8ab4ff",
    # The paper on which the pictures are drawn.
    "theme.dark.backgroundColor": DARK.paper,
    "theme.dark.secondaryBackgroundColor": "#1b212c",
}
"""Streamlit's settings: nothing that disturbs the engine's process or talks to the outside, and colours that read."""


def address(host: str, port: int) -> str:
    """What a person types into the browser."""
    shown = "localhost" if host in ("127.0.0.1", "0.0.0.0", "::", "::1", "localhost") else host
    return f"http://{shown}:{port}"


def stay_inside() -> None:
    """Keep Streamlit from asking a server on the internet for this machine's address when a page of elsewhere calls."""
    from streamlit import net_util

    net_util.get_external_ip = lambda: None


def answer_at_once() -> None:
    """Let answers leave without waiting for the browser's acknowledgement.

    Streamlit binds a socket that asyncio doesn't recognise as TCP, so that Nagle's algorithm stays on. An answer is written
    in two pieces, headers and body, and the second then waits 40 ms: for each of the sixty files of a page, and for each
    command. Connections inherit the option from the socket that listens.
    """
    bind = starlette_server._bind_socket
    if getattr(bind, "answers_at_once", False):
        return

    def bound(*arguments: Any, **more: Any) -> socket.socket:
        listening = bind(*arguments, **more)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening

    bound.answers_at_once = True  # type: ignore[attr-defined]
    starlette_server._bind_socket = bound


def network_words(hub: Hub, host: str, port: int) -> str:
    """What is printed when other machines are let in: how they reach the lab, what that opens, and the owner's address."""
    addresses = sharing.network_addresses(host)
    if not addresses:
        return ""
    shown = [f"http://{f'[{place}]' if ':' in place else place}:{port}" for place in addresses]
    return (
        f"Others on your network reach it at {' or '.join(shown)}\n{sharing.opened_words(port)}\n"
        f"Your own page, from another machine or by such an address: {shown[0]}/lab/owner?key={hub.owner.key}\n"
        "Keep that address to yourself: whoever opens it may change the model and read the saved runs."
    )


def check_port(host: str, port: int) -> None:
    """Fail early and clearly when the address can't be used.

    Raises:
        ValueError: the port is in use or not allowed, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"can't listen on {host}:{port} ({error.strerror}): stop the program that holds the port, "
                f"or choose another one, for example --port {port + 1 if port < 65535 else 8501}"
            ) from error


def build_app(hub: Hub, where: str) -> st.App:
    """The ASGI app of one hub. ``where``: the address to print once the page can be opened."""

    @contextlib.asynccontextmanager
    async def lifespan(app: st.App) -> AsyncIterator[None]:
        install(hub)
        allow_streams()
        _end_streams_on_signals()
        words = network_words(hub, *hub.listens)
        print(f"The lab is open: {where}\n{words + chr(10) if words else ''}The model is loading beside it.", end=" ")
        print("Ctrl-C ends everything.", flush=True)
        yield

    answer_at_once()
    kept = Middleware(KeptFiles, folder=Path(get_static_dir()) / "static", announced=announced())
    return st.App(MAIN, lifespan=lifespan, routes=routes(), middleware=[kept])


def _end_streams_on_signals() -> None:
    """Let the server's own handlers end it, but close the open event streams first: it would wait for them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)

        def handle(received: int, frame: Any, before: Any = before) -> None:
            end_streams()
            if callable(before):
                before(received, frame)

        signal.signal(number, handle)


def _leave(received: int, frame: Any) -> None:
    """SIGTERM ends the program as Ctrl-C does: with everything closed."""
    raise SystemExit(0)


def run(
    model: str = "smollm2",
    device: str = "auto",
    dtype: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8501,
    threads: int | None = None,
    attention_backend: Literal["auto", "sdpa", "triton"] = "auto",
    enforce_eager: bool = False,
) -> None:
    """Serve the lab until it is interrupted; then the engine's process ends too.

    Raises:
        ValueError: the port can't be used.
    """
    from engine.observe.runs import data_folder
    from engine.serve.client import EngineClient
    from engine.serve.protocol import HostOptions

    limits = Limits.from_environment()
    check_port(host, port)
    recordings = data_folder() / "recordings"
    options = HostOptions(
        max_labs=limits.labs + LEAVING_LABS, attention_backend=attention_backend, enforce_eager=enforce_eager
    )
    client = EngineClient(model=model, device=device, dtype=dtype, threads=threads, recordings=recordings, options=options)
    hub = Hub(client, limits)
    hub.listens = (host, port)
    install(hub)
    stay_inside()
    app = build_app(hub, address(host, port))
    starter = threading.Thread(target=client.start, name="engine-start", daemon=True)
    starter.start()
    hub.start_reaping()
    signal.signal(signal.SIGTERM, _leave)
    try:
        app.run(config={**SETTINGS, "server.address": host, "server.port": port})
    except KeyboardInterrupt:
        pass
    except SystemExit as stop:
        if stop.code not in (0, None):
            print(f"inference-lab: the server could not start on {host}:{port}", file=sys.stderr)
            raise
    finally:
        hub.end()
        client.close()
        install(None)
        print("The lab is closed.", flush=True)
