"""The HTTP side of the live view: one event stream a tab, JSON commands, and the files that the browser loads.

::

    GET  /lab/api/stream   server-sent events: only the sections that changed, the newest value wins
    GET  /lab/api/state    the same sections once: polling where streams do not pass, and for tests
    GET  /lab/api/token    one token's step, latency, candidates, block and slot
    POST /lab/api/<verb>   view, send, samples, abort, clear, control, engine, restart
    GET  /lab/assets/...   the view's own modules and style sheet;  /lab/plotly.js: plotly.js of the plotly package

Commands are accepted from this server's own pages only, as JSON of bounded size, with the token of a lab.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.figures.vllm import vllm_command
from app.live.moment import Look, token_detail
from app.samples import SAMPLE_PROMPTS
from app.saved import PREFIX, SavedRun, saved_run
from app.session import Hub, Lab, LabUnknown, hub
from engine.core.config import ConfigError, EngineConfig, build_config

MAX_BODY = 1_000_000
"""Bytes of a command."""
MAX_PROMPT = 200_000
"""Characters of a typed prompt."""
MAX_COPIES = 64
REFRESH = 0.2
"""Least seconds between two pushes to one viewer."""
TICK = 0.05
HEARTBEAT = 10.0
STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
VIEWER = re.compile(r"[A-Za-z0-9_-]{8,64}")


class Refused(Exception):
    """A command that is not carried out: the HTTP status and a sentence for a person."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Viewer:
    """One open tab: how it looks at the lab, and the bell that wakes its stream."""

    look: Look
    bell: asyncio.Event = field(default_factory=asyncio.Event)


_viewers: dict[tuple[str, str], Viewer] = {}
_closing = threading.Event()
"""Set when the server is asked to end, so that open streams do not keep it."""


# Reading ------------------------------------------------------------------------------------------------------------------


async def stream(request: Request) -> Response:
    """The event stream of one tab."""
    lab = _shown(request.query_params.get("lab", ""))
    name = request.query_params.get("viewer", "")
    if not VIEWER.fullmatch(name):
        raise Refused(400, "the stream needs a viewer name of 8 to 64 letters")
    key = (lab.token, name)
    viewer = Viewer(_look(request.query_params))
    _viewers[key] = viewer
    return StreamingResponse(
        _events(hub(), lab, viewer, key, request.is_disconnected),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(
    rooms: Hub, lab: Lab | SavedRun, viewer: Viewer, key: tuple[str, str], gone: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Whenever something changed, the sections that differ from what this viewer has; a heartbeat when nothing did."""
    sent: dict[str, bytes] = {}
    shown: Any = None
    quiet = 0.0
    loop = asyncio.get_running_loop()
    try:
        yield b"retry: 1000\n\n"
        while not _closing.is_set() and not await gone():
            begin = loop.time()
            lab.seen = begin
            now = (lab.version, viewer.look)
            if now != shown:
                viewer.bell.clear()
                shown = now
                parts = await run_in_threadpool(_look_at, rooms, lab, viewer.look)
                news = {name: value for name, value in parts.items() if sent.get(name) != value}
                if news:
                    sent.update(news)
                    quiet = 0.0
                    yield b"data: " + _object(news) + b"\n\n"
            if quiet >= HEARTBEAT:
                quiet = 0.0
                yield b": still here\n\n"
            pause = max(TICK, REFRESH - (loop.time() - begin)) if shown != (lab.version, viewer.look) else TICK
            try:
                await asyncio.wait_for(viewer.bell.wait(), pause)
                viewer.bell.clear()
            except TimeoutError:
                pass
            quiet += loop.time() - begin
    finally:
        if _viewers.get(key) is viewer:
            del _viewers[key]


def _look_at(rooms: Hub, lab: Lab | SavedRun, look: Look) -> dict[str, bytes]:
    if isinstance(lab, SavedRun):
        return {**lab.look(look), "trouble": b'""'}
    try:
        rooms.ensure_open(lab)
    except Exception as error:  # the host may go at any moment: the head says what state it is in
        return {**lab.look(look), "trouble": msgspec.json.encode(str(error))}
    return {**lab.look(look), "trouble": b'""'}


async def state(request: Request) -> Response:
    """All sections once."""
    lab = _shown(request.query_params.get("lab", ""))
    parts = await run_in_threadpool(_look_at, hub(), lab, _look(request.query_params))
    return Response(_object(parts), media_type="application/json", headers={"Cache-Control": "no-store"})


async def token(request: Request) -> Response:
    """One output token in detail."""
    lab = _shown(request.query_params.get("lab", ""))
    try:
        index = int(request.query_params.get("index", ""))
    except ValueError:
        raise Refused(400, "index must be a whole number") from None
    found = await run_in_threadpool(token_detail, lab.log, lab.config, request.query_params.get("request", ""), index)
    if found is None:
        raise Refused(404, "this token is not kept any more")
    return JSONResponse(found, headers={"Cache-Control": "no-store"})


async def vllm(request: Request) -> Response:
    """The matching ``vllm serve`` line."""
    lab = _lab(request.query_params.get("lab", ""))
    model = lab.client.state.model
    return JSONResponse({"command": vllm_command(lab.config, model.title if model else "MODEL")})


def _look(query: Any) -> Look:
    step = query.get("step")
    try:
        chosen = None if step in (None, "", "live") else int(step)
    except ValueError:
        raise Refused(400, f"step={step!r} must be a whole number or 'live'") from None
    theme = "dark" if query.get("theme") == "dark" else "light"
    return Look(theme, query.get("selected") or None, chosen, query.get("scale") == "root")


def _object(parts: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(b'"' + name.encode() + b'":' + value for name, value in parts.items()) + b"}"


# Commands -----------------------------------------------------------------------------------------------------------------


async def view(lab: Lab | SavedRun, body: dict[str, Any]) -> Any:
    """Change how a viewer looks: theme, selected request, chosen step (null: live)."""
    viewer = _viewers.get((lab.token, str(body.get("viewer"))))
    if viewer is None:
        raise Refused(404, "this viewer's stream is closed")
    step = body.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise Refused(400, f"step={step!r} must be a whole number of at least 0, or null for live")
    selected = body.get("selected")
    viewer.look = Look(
        theme="dark" if body.get("theme") == "dark" else "light",
        selected=selected if isinstance(selected, str) and selected else None,
        step=step,
        root=body.get("scale") == "root",
    )
    viewer.bell.set()
    return {}


async def send(lab: Lab, body: dict[str, Any]) -> Any:
    """Send a prompt, once or in copies."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise Refused(400, "the prompt is empty: type at least one character that is not a space")
    if len(prompt) > MAX_PROMPT:
        raise Refused(
            413,
            f"the prompt has {len(prompt):,} characters; the lab takes at most {MAX_PROMPT:,}, and this engine's "
            f"max_model_len is {lab.config.max_model_len:,} tokens: shorten it",
        )
    copies = body.get("copies", 1)
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= MAX_COPIES:
        raise Refused(400, f"copies={copies!r} must be a whole number from 1 to {MAX_COPIES}")
    await _need_open(lab)
    ids = await run_in_threadpool(
        lab.client.send, lab.token, prompt, chat=bool(body.get("chat", True)), params=_params(body), copies=copies
    )
    return {"ids": ids}


async def samples(lab: Lab, body: dict[str, Any]) -> Any:
    """Send the four sample prompts."""
    await _need_open(lab)
    params = _params(body)

    def all_four() -> list[str]:
        return [i for prompt in SAMPLE_PROMPTS for i in lab.client.send(lab.token, prompt, chat=True, params=params)]

    return {"ids": await run_in_threadpool(all_four)}


def _params(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings of a command; the engine checks their values."""
    params: dict[str, Any] = {"logprobs": 5}
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"):
        if body.get(name) is not None:
            params[name] = body[name]
    return params


async def abort(lab: Lab, body: dict[str, Any]) -> Any:
    """Stop one request, or all."""
    await _need_open(lab)
    request_id = body.get("request_id")
    return {"stopped": await run_in_threadpool(lab.client.abort, lab.token, None if request_id is None else str(request_id))}


async def clear(lab: Lab, body: dict[str, Any]) -> Any:
    """Stop everything and begin again with an empty engine of the same settings."""
    await _need_open(lab)
    await run_in_threadpool(lab.client.reconfigure, lab.token, _fields(lab.config))
    return {}


async def control(lab: Lab, body: dict[str, Any]) -> Any:
    """Run, pause, or take single steps."""
    action, steps, rate = body.get("action"), body.get("steps", 1), body.get("rate")
    if action not in ("run", "pause", "step"):
        raise Refused(400, f"action={action!r} must be run, pause or step")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
        raise Refused(400, f"steps={steps!r} must be a whole number from 1 to 1000")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0.1 <= rate <= 1000):
        raise Refused(400, f"rate={rate!r} must be from 0.1 to 1000 steps a second, or null for full speed")
    await _need_open(lab)
    await run_in_threadpool(lab.client.control, lab.token, action, steps=steps, rate=rate)
    return {}


async def engine(lab: Lab, body: dict[str, Any]) -> Any:
    """Restart the lab's engine with other settings; the weights stay loaded."""
    wanted = body.get("config")
    if not isinstance(wanted, dict):
        raise Refused(400, "config must be an object of engine settings by name")
    known = {name: getattr(lab.config, name) for name in ("seed", "max_num_queued_requests")}
    config = build_config({**known, **wanted})
    await _need_open(lab)
    info = await run_in_threadpool(lab.client.reconfigure, lab.token, _fields(config))
    lab.config = getattr(info, "config", config)
    return {"config": lab.config}


async def restart(lab: Lab, body: dict[str, Any]) -> Any:
    """Start the engine's process again after it ended."""
    if lab.client.state.state not in ("stopped", "failed"):
        raise Refused(409, "the engine's process is running: nothing to restart")
    await run_in_threadpool(hub().restart)
    return {}


async def _need_open(lab: Lab) -> None:
    opened = await run_in_threadpool(hub().ensure_open, lab)
    if not opened:
        state = lab.client.state
        if state.state in ("stopped", "failed"):
            raise Refused(503, f"the engine is not running: {state.error or 'its process ended'}. Press Restart the engine.")
        raise Refused(503, f"the model is not ready yet: {state.stage or state.state}. Try again in a moment.")


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


COMMANDS: dict[str, Callable[[Lab, dict[str, Any]], Awaitable[Any]]] = {
    "view": view, "send": send, "samples": samples, "abort": abort, "clear": clear, "control": control, "engine": engine,
    "restart": restart,
}  # fmt: skip


async def command(request: Request) -> Response:
    """Check who asks and what, then carry it out."""
    verb = COMMANDS.get(request.path_params["verb"])
    if verb is None:
        raise Refused(404, f"there is no command {request.path_params['verb']!r}")
    _check_origin(request)
    body = await _body(request)
    name = str(body.get("lab", ""))
    lab: Any = _shown(name) if verb is view else _lab(name)
    result = await verb(lab, body)
    for (owner, _), viewer in list(_viewers.items()):
        if owner == lab.token:
            viewer.bell.set()
    return Response(msgspec.json.encode({"ok": True, **(result or {})}), media_type="application/json")


def _check_origin(request: Request) -> None:
    """Refuse what another site's page sends: its Origin differs from the host that it calls."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host", ""):
        raise Refused(403, "commands are taken from this lab's own pages only")
    if origin is None and site not in (None, "same-origin", "none"):
        raise Refused(403, "commands are taken from this lab's own pages only")
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise Refused(415, "commands are JSON: set Content-Type to application/json")


async def _body(request: Request) -> dict[str, Any]:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY:
            raise Refused(413, f"the command is longer than {MAX_BODY:,} bytes: a prompt may have {MAX_PROMPT:,} characters")
        chunks.append(chunk)
    try:
        body = json.loads(b"".join(chunks))
    except (ValueError, RecursionError):
        raise Refused(400, "the command is not valid JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the command must be a JSON object")
    return body


def _shown(name: str) -> Lab | SavedRun:
    """What a viewer looks at: a lab, or a saved run of this machine."""
    if name.startswith(PREFIX):
        return saved_run(name.removeprefix(PREFIX))
    return _lab(name)


def _lab(name: str) -> Lab:
    """The lab of this token.

    Raises:
        Refused: there is none.
    """
    try:
        return hub().find(name)
    except LabUnknown as error:
        raise Refused(403, str(error)) from None


# Files --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def build_tag() -> str:
    """Changes when one of the view's files does: part of their addresses, so that browsers may keep them for good."""
    digest = hashlib.sha256(version("plotly").encode())
    for path in sorted(STATIC.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=1)
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 6)


async def plotly_js(request: Request) -> Response:
    """plotly.js as the plotly package brings it, compressed once."""
    packed = await run_in_threadpool(_plotly)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type="text/javascript", headers={**headers, "Content-Encoding": "gzip"})
    return Response(await run_in_threadpool(gzip.decompress, packed), media_type="text/javascript", headers=headers)


async def asset(request: Request) -> Response:
    """One of the view's own files."""
    path = STATIC / request.path_params["name"]
    if path.parent != STATIC or path.suffix not in TYPES or not path.is_file():
        raise Refused(404, "there is no such file")
    fresh = request.path_params["tag"] == build_tag()
    caching = "public, max-age=31536000, immutable" if fresh else "no-cache"
    return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers={"Cache-Control": caching})


def _guard(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Errors become a status and a sentence; nothing of the inside leaks."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, status_code=refused.status)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except (ValueError, RuntimeError, OSError, TimeoutError) as error:
            return JSONResponse({"error": str(error) or type(error).__name__}, status_code=400)

    return guarded


def routes() -> list[Route]:
    """Everything under /lab/, to be mounted beside Streamlit's own routes."""
    return [
        Route("/lab/api/stream", _guard(stream)),
        Route("/lab/api/state", _guard(state)),
        Route("/lab/api/token", _guard(token)),
        Route("/lab/api/vllm", _guard(vllm)),
        Route("/lab/api/{verb}", _guard(command), methods=["POST"]),
        Route("/lab/plotly/{tag}.js", _guard(plotly_js)),
        Route("/lab/assets/{tag}/{name}", _guard(asset)),
    ]


def end_streams() -> None:
    """The server ends: close every open stream."""
    _closing.set()


def allow_streams() -> None:
    """The server starts."""
    _closing.clear()
    _viewers.clear()
