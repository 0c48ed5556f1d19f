"""The HTTP side of the live view: one event stream a tab, JSON commands, and the files that the browser loads.

::

    GET  /lab/api/stream   server-sent events: only the sections that changed, the newest value wins
    GET  /lab/api/state    the same sections once: polling where streams do not pass, and for tests
    GET  /lab/api/token    one token's step, latency, candidates, block and slot
    GET  /lab/api/scenes   the scenes, and what is wrong with the files of others
    POST /lab/api/<verb>   view, send, samples, abort, clear, control, engine, restart, traffic, rate, stop, scene, share,
                           model
    GET  /lab/owner        with the owner's key: this browser is the owner's from now on
    GET  /lab/assets/...   the view's own modules and style sheet;  /lab/plotly/...: plotly.js

What is looked at is named by ``lab``: a lab's token, ``follow:TOKEN`` to look on, ``run:NAME`` for a saved run (its owner
only). Commands are accepted from this server's own pages only, as JSON of bounded size, with the token of a lab; whoever
follows can command nothing. A session that sends faster than the engine takes is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from app import sharing
from app.figures.vllm import vllm_command
from app.files import announcement
from app.link import WorkloadRefused, read_workload
from app.live.moment import Look, token_detail
from app.owner import COOKIE, request_is_owner
from app.samples import SAMPLE_PROMPTS
from app.saved import PREFIX, SavedRun, saved_run
from app.scenes import catalogue, listing
from app.session import Hub, Lab, LabUnknown, hub
from engine.core.config import ConfigError, EngineConfig, build_config
from engine.core.sampling_params import SamplingParams
from engine.workload.arrivals import MAX_RATE
from engine.workload.check import assets
from engine.workload.spec import check_fits

MAX_BODY = 1_000_000
"""Bytes of a command."""
MAX_PROMPT = 200_000
"""Characters of a typed prompt."""
SMALL_BODY = 16_000
"""Bytes; more than this is read for a few callers at a time only."""
LARGE_BODIES = 8
BODY_TIME = 10.0
"""Seconds that a command may take to arrive."""
MAX_IN_FLIGHT = 24
"""Commands of all sessions that may wait for the engine at once: looking needs threads too."""
MAX_VIEWERS = 500
"""Open streams of the whole server."""
FOLLOW = "follow:"
"""What the name of a followed lab begins with where a lab's token is expected."""
REFRESH = 0.2
"""Least seconds between two pushes to one viewer."""
FOLLOW_REFRESH = 0.4
"""The same for those who look on: thirty of them share a classroom's network."""
TICK = 0.05
HEARTBEAT = 10.0
STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
TOO_LONG = f"the command is longer than {MAX_BODY:,} bytes: a prompt may have {MAX_PROMPT:,} characters"
VIEWER = re.compile(r"[A-Za-z0-9_-]{8,64}")


class Refused(Exception):
    """A command that is not carried out: the HTTP status and a sentence for a person."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Viewer:
    """One open tab: what it looks at and how, and the bell that wakes its stream."""

    look: Look
    lab: Lab | SavedRun | None = None
    follows: bool = False
    mirror: bool = False
    """A projector: it shows what the presenter looks at."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def shown(self) -> Look:
        """How it looks at the lab now."""
        if not self.mirror:
            return self.look
        driven = self.lab.driven if isinstance(self.lab, Lab) else None
        return replace(driven, theme=self.look.theme) if driven is not None else replace(self.look, selected=None, step=None)


_viewers: dict[tuple[str, str], Viewer] = {}
"""Open streams by what they look at, as the address names it, and the tab's own name."""
_in_flight = 0
"""Commands that wait for the engine; touched on the event loop only."""
_large: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
_closing = threading.Event()
"""Set when the server is asked to end, so that open streams do not keep it."""


# Reading ------------------------------------------------------------------------------------------------------------------


async def stream(request: Request) -> Response:
    """The event stream of one tab."""
    shown = request.query_params.get("lab", "")
    lab = _shown(request, shown)
    name = request.query_params.get("viewer", "")
    if not VIEWER.fullmatch(name):
        raise Refused(400, "the stream needs a viewer name of 8 to 64 letters")
    most = hub().limits.viewers
    if len(_viewers) >= MAX_VIEWERS or sum(v.lab is lab for v in _viewers.values()) >= most:
        raise Refused(503, f"{most} pages look at this lab already, the most that one lab is shown to: try again later")
    viewer = Viewer(
        _look(request.query_params),
        lab,
        follows=shown.startswith(FOLLOW),
        mirror=request.query_params.get("mirror") == "1",
    )
    key = (shown, name)
    _viewers[key] = viewer
    events = _events(hub(), lab, viewer, key, request.is_disconnected)
    small = viewer.follows and "gzip" in request.headers.get("accept-encoding", "")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **({"Content-Encoding": "gzip"} if small else {})}
    return StreamingResponse(_joined(events, small), media_type="text/event-stream", headers=headers)


GZIP = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""How a gzip stream begins."""


@lru_cache(maxsize=256)
def _packed(piece: bytes) -> bytes:
    """A piece of a gzip stream that refers to nothing before it, so that all streams can share it."""
    packer = zlib.compressobj(2, zlib.DEFLATED, -15)
    return packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)


async def _joined(events: AsyncIterator[Sequence[bytes]], small: bool) -> AsyncIterator[bytes]:
    """Events as bytes. ``small``: compressed, each section once for a whole class, which shares one network."""
    if small:
        yield GZIP
    async with contextlib.aclosing(events) as source:  # type: ignore[type-var]
        async for pieces in source:
            yield b"".join([_packed(piece) for piece in pieces] if small else pieces)


async def _events(
    rooms: Hub, lab: Lab | SavedRun, viewer: Viewer, key: tuple[str, str], gone: Callable[[], Awaitable[bool]]
) -> AsyncIterator[Sequence[bytes]]:
    """Whenever something changed, the sections that differ from what this viewer has; a heartbeat when nothing did.

    An event comes in pieces, the sections being pieces of their own: viewers who look alike get the same objects.
    """
    sent: dict[str, bytes] = {}
    shown: Any = None
    quiet = 0.0
    refresh = FOLLOW_REFRESH if viewer.follows else REFRESH
    loop = asyncio.get_running_loop()
    _count(lab, viewer, 1)
    try:
        yield [b"retry: 1000\n\n"]
        while not _closing.is_set() and not await gone() and _still_shown(rooms, lab, viewer, key):
            begin = loop.time()
            look, old = viewer.shown, shown
            if (lab.version, look) != shown:
                viewer.bell.clear()
                version, parts = await run_in_threadpool(_recent, rooms, lab, look, 0.6 * refresh)
                shown = (version, look)
                news = {name: value for name, value in parts.items() if sent.get(name) != value}
                if news:
                    sent.update(news)
                    quiet = 0.0
                    yield [b"data: ", *_pieces(news), b"\n\n"]
            if quiet >= HEARTBEAT:
                quiet = 0.0
                yield [b": still here\n\n"]
            behind = shown != (lab.version, viewer.shown) and shown != old
            pause = max(TICK, refresh - (loop.time() - begin)) if behind else TICK
            try:
                await asyncio.wait_for(viewer.bell.wait(), pause)
                viewer.bell.clear()
            except TimeoutError:
                pass
            quiet += loop.time() - begin
    finally:
        _count(lab, viewer, -1)
        if _viewers.get(key) is viewer:
            del _viewers[key]


def _count(lab: Lab | SavedRun, viewer: Viewer, change: int) -> None:
    """Keep count of who looks at a lab: its own pages keep it, followers are told to the presenter."""
    if not isinstance(lab, Lab):
        return
    if viewer.follows:
        lab.followers += change
        lab.changed()
    else:
        lab.viewers += change
        lab.seen = time.monotonic()
        if change < 0 and lab.viewers == 0:
            lab.driven = None


def _still_shown(rooms: Hub, lab: Lab | SavedRun, viewer: Viewer, key: tuple[str, str]) -> bool:
    """Whether what the stream shows may still be looked at: labs are released, and sharing ends."""
    if not isinstance(lab, Lab):
        return True
    if viewer.follows:
        return bool(lab.follow) and key[0] == FOLLOW + lab.follow
    return lab.token in rooms.tokens()


def _recent(rooms: Hub, lab: Lab | SavedRun, look: Look, fresh: float) -> tuple[Any, dict[str, bytes]]:
    trouble = _open_if_possible(rooms, lab)
    version, parts = lab.recent(look, fresh)
    return version, {**parts, "trouble": trouble}


def _look_at(rooms: Hub, lab: Lab | SavedRun, look: Look) -> dict[str, bytes]:
    trouble = _open_if_possible(rooms, lab)
    return {**lab.look(look), "trouble": trouble}


def _open_if_possible(rooms: Hub, lab: Lab | SavedRun) -> bytes:
    """Open the lab once the model is ready; what is in the way, as JSON."""
    if isinstance(lab, SavedRun):
        return b'""'
    try:
        rooms.ensure_open(lab)
    except Exception as error:  # the host may go at any moment: the head says what state it is in
        return msgspec.json.encode(str(error))
    return b'""'


async def state(request: Request) -> Response:
    """All sections once."""
    lab = _shown(request, request.query_params.get("lab", ""))
    parts = await run_in_threadpool(_look_at, hub(), lab, _look(request.query_params))
    return Response(_object(parts), media_type="application/json", headers={"Cache-Control": "no-store"})


async def scenes(request: Request) -> Response:
    """All scenes, and the files that can't be used."""
    return JSONResponse(await run_in_threadpool(listing), headers={"Cache-Control": "no-store"})


async def owner(request: Request) -> Response:
    """Give this browser the owner's cookie, if it has the owner's key, and go to the lab."""
    key = request.query_params.get("key", "")
    if not hub().owner.has_key(key):
        raise Refused(403, "this is not the owner's key: the lab prints it in the terminal when it starts")
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(COOKIE, key, httponly=True, samesite="strict", max_age=30 * 24 * 3600)
    return answer


async def token(request: Request) -> Response:
    """One output token in detail."""
    lab = _shown(request, request.query_params.get("lab", ""))
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
    return Look(theme, query.get("selected") or None, chosen, query.get("scale") == "root", query.get("queue") == "1")


def _object(parts: dict[str, bytes]) -> bytes:
    return b"".join(_pieces(parts))


def _pieces(parts: Mapping[str, bytes]) -> list[bytes]:
    """A JSON object in pieces; the values are the very objects of ``parts``."""
    pieces = [b"{"]
    for place, (name, value) in enumerate(parts.items()):
        pieces += [f'{"," if place else ""}"{name}":'.encode(), value]
    return [*pieces, b"}"]


# Commands -----------------------------------------------------------------------------------------------------------------


async def view(lab: Lab | SavedRun, body: dict[str, Any]) -> Any:
    """Change how a viewer looks: theme, selected request, chosen step (null: live)."""
    viewer = _viewers.get((str(body.get("lab")), str(body.get("viewer"))))
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
        queue=body.get("queue") is True,
    )
    viewer.bell.set()
    if isinstance(lab, Lab) and not viewer.follows and not viewer.mirror:
        lab.driven = viewer.look
        _wake(lab)
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
    most = lab.limits.copies
    if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= most:
        raise Refused(400, f"copies={copies!r} must be a whole number from 1 to {most}")
    params = _params(lab, body)
    await _need_open(lab)
    ids = await run_in_threadpool(
        lab.client.send,
        lab.token,
        prompt,
        chat=bool(body.get("chat", True)),
        params=params,
        copies=copies,
        priority=_whole(body, "priority", 0),
        cache_salt=None if body.get("cache_salt") is None else str(body["cache_salt"])[:200],
    )
    return {"ids": ids}


async def samples(lab: Lab, body: dict[str, Any]) -> Any:
    """Send the four sample prompts."""
    await _need_open(lab)
    params = _params(lab, body)

    def all_four() -> list[str]:
        return [i for prompt in SAMPLE_PROMPTS for i in lab.client.send(lab.token, prompt, chat=True, params=params)]

    return {"ids": await run_in_threadpool(all_four)}


def _whole(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or abs(value) > 2**31:
        raise Refused(400, f"{name}={value!r} must be a whole number")
    return int(value)


def _params(lab: Lab, body: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings of a command, within the session's quota; the engine checks their values."""
    params: dict[str, Any] = {"logprobs": 5}
    for name in SAMPLING:
        if body.get(name) is not None:
            params[name] = body[name]
    lab.check_params(params)
    return params


async def abort(lab: Lab, body: dict[str, Any]) -> Any:
    """Stop one request, or all."""
    await _need_open(lab)
    request_id = body.get("request_id")
    return {"stopped": await run_in_threadpool(lab.client.abort, lab.token, None if request_id is None else str(request_id))}


async def clear(lab: Lab, body: dict[str, Any]) -> Any:
    """Stop everything and begin again with an empty engine of the same settings."""
    await _need_open(lab)
    await run_in_threadpool(hub().configure, lab, lab.config)
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
    lab.check_config(config)
    await _configure(lab, config)
    return {"config": lab.config}


async def _configure(lab: Lab, config: EngineConfig) -> None:
    if not await run_in_threadpool(hub().configure, lab, config):
        await _need_open(lab)


async def traffic(lab: Lab, body: dict[str, Any]) -> Any:
    """Let requests come as a workload says, in the place of what may be coming."""
    workload = read_workload(body.get("spec"))
    lab.check_workload(workload)
    check_fits(workload, lab.config)
    await _need_open(lab)
    await run_in_threadpool(lab.client.start_traffic, lab.token, workload)
    lab.began(workload, lab.scene if workload == lab.workload else None)
    return {}


async def rate(lab: Lab, body: dict[str, Any]) -> Any:
    """Change how often requests come."""
    wanted = body.get("rate")
    if isinstance(wanted, bool) or not isinstance(wanted, (int, float)) or not 0 < wanted <= MAX_RATE:
        raise Refused(400, f"rate={wanted!r} must be a number above 0, at most {MAX_RATE:,.0f}")
    await _need_open(lab)
    await run_in_threadpool(lab.client.change_traffic, lab.token, float(wanted))
    return {}


async def stop(lab: Lab, body: dict[str, Any]) -> Any:
    """No more requests come; those under way run on."""
    await _need_open(lab)
    await run_in_threadpool(lab.client.stop_traffic, lab.token)
    return {}


async def scene(lab: Lab, body: dict[str, Any]) -> Any:
    """Set the lab up for a scene and start it."""
    name = str(body.get("id", ""))[:60]
    found = (await run_in_threadpool(catalogue)).find(name)
    if found is None:
        raise Refused(404, f"there is no scene {name!r} (any more): reload the page to see which there are")
    lab.check_workload(found.workload)
    await _configure(lab, lab.within_quota(found.engine_config()))
    pace = body.get("rate")
    await run_in_threadpool(lab.client.control, lab.token, "run", rate=float(pace) if pace else None)
    await run_in_threadpool(lab.client.start_traffic, lab.token, found.workload)
    lab.began(found.workload, found)
    return {"id": found.id, "view": found.view}


async def share(lab: Lab, body: dict[str, Any]) -> Any:
    """Let others look on, or no longer: the addresses for them and a QR code."""
    if body.get("on") is False:
        hub().unshare(lab)
        return {}
    host, port = hub().listens
    others = sharing.network_addresses(host)
    origin = str(body.get("origin", ""))[:200]
    chosen = str(body.get("address", ""))
    if _is_local(origin) or not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", origin) or chosen in others:
        place = chosen if chosen in others else others[0] if others else ""
        origin = f"http://{f'[{place}]' if ':' in place else place}:{port}" if place else origin
    address = f"{origin}/?follow={hub().share(lab)}"
    return {
        "address": address,
        "qr": await run_in_threadpool(sharing.qr, address),
        "addresses": others,
        "open": bool(others),
        "words": sharing.opened_words(port) if others else "",
    }


def _is_local(origin: str) -> bool:
    return origin.startswith(("http://localhost", "http://127.", "http://[::1]"))


async def model(lab: Lab, body: dict[str, Any]) -> Any:
    """Change the model of the whole machine: the owner's right."""
    name, device, dtype = (
        body.get(part, default) for part, default in (("model", ""), ("device", "auto"), ("dtype", "auto"))
    )
    if not isinstance(name, str) or not name.strip() or len(name) > 500:
        raise Refused(400, "name a model: smollm2, tiny, a folder on this machine, or a hub name such as Qwen/Qwen3-0.6B")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise Refused(400, f"dtype={dtype!r} must be auto, float32, bfloat16 or float16")
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", device):
        raise Refused(400, f"device={device!r} must be auto, cpu, cuda or cuda:1 and so on")
    await run_in_threadpool(hub().load_model, name.strip(), device, dtype, lab)
    return {}


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


SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name not in ("logprobs", "skip_special_tokens"))
"""Sampling settings that a page may send."""
COMMANDS: dict[str, Callable[[Lab, dict[str, Any]], Awaitable[Any]]] = {
    "view": view, "send": send, "samples": samples, "abort": abort, "clear": clear, "control": control, "engine": engine,
    "restart": restart, "traffic": traffic, "rate": rate, "stop": stop, "scene": scene, "share": share, "model": model,
}  # fmt: skip
OWNERS = ("model",)
"""Commands that concern the whole machine."""


async def command(request: Request) -> Response:
    """Check who asks and what, then carry it out."""
    verb = COMMANDS.get(request.path_params["verb"])
    if verb is None:
        raise Refused(404, f"there is no command {request.path_params['verb']!r}")
    _check_origin(request)
    body = await _body(request)
    name = str(body.get("lab", ""))
    if verb is view:
        shown: Any = _shown(request, name)
        result = await verb(shown, body)
    else:
        lab = _lab(name)
        if request.path_params["verb"] in OWNERS and not request_is_owner(hub().owner, request):
            raise Refused(403, "only the owner of this machine changes its model")
        result = await _in_turn(lab, verb, body)
        lab.changed()
        _wake(lab)
    return Response(msgspec.json.encode({"ok": True, **(result or {})}), media_type="application/json")


async def _in_turn(lab: Lab, verb: Callable[[Lab, dict[str, Any]], Awaitable[Any]], body: dict[str, Any]) -> Any:
    """Carry a command out unless too many wait for the engine already."""
    global _in_flight
    if lab.commands >= lab.limits.in_flight:
        raise Refused(
            429, f"{lab.commands} commands of this page wait for the engine already, the most it may have: wait a moment"
        )
    if _in_flight >= MAX_IN_FLIGHT:
        raise Refused(503, f"{_in_flight} commands wait for the engine already, the most it takes: try again in a moment")
    lab.commands += 1
    _in_flight += 1
    try:
        return await verb(lab, body)
    finally:
        lab.commands -= 1
        _in_flight -= 1


def _wake(lab: Lab | SavedRun) -> None:
    """Everybody who looks at the lab looks again."""
    for viewer in tuple(_viewers.values()):
        if viewer.lab is lab:
            viewer.bell.set()


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
    """The command's content, of bounded size, in bounded time; long ones are read for a few callers at a time."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY:
        raise Refused(413, TOO_LONG)
    small = announced.isdigit() and int(announced) <= SMALL_BODY
    try:
        async with asyncio.timeout(BODY_TIME):
            if small:
                raw = await _read(request)
            else:
                async with _large_bodies():
                    raw = await _read(request)
    except TimeoutError:
        raise Refused(408, f"the command did not arrive within {BODY_TIME:.0f} seconds: try again") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Refused(400, "the command is not valid JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the command must be a JSON object")
    return body


async def _read(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY:
            raise Refused(413, TOO_LONG)
        chunks.append(chunk)
    return b"".join(chunks)


def _large_bodies() -> asyncio.Semaphore:
    """Who may read a long body; of the loop that runs now."""
    global _large
    loop = asyncio.get_running_loop()
    if _large is None or _large[0] is not loop:
        _large = (loop, asyncio.Semaphore(LARGE_BODIES))
    return _large[1]


def _shown(request: Request, name: str) -> Lab | SavedRun:
    """What a viewer looks at: a lab, a lab of somebody who shares it, or a saved run of this machine."""
    if name.startswith(FOLLOW):
        try:
            return hub().followed(name.removeprefix(FOLLOW))
        except LabUnknown as error:
            raise Refused(403, str(error)) from None
    if name.startswith(PREFIX):
        if not request_is_owner(hub().owner, request):
            raise Refused(403, "saved runs are shown to the owner of this machine only")
        return saved_run(name.removeprefix(PREFIX))
    return _lab(name)


def _lab(name: str) -> Lab:
    """The lab of this token, to be commanded.

    Raises:
        Refused: there is none, or the caller may only look.
    """
    if name.startswith(FOLLOW):
        raise Refused(403, "this page follows somebody's lab: it can look, and move in time, but change nothing")
    if name.startswith(PREFIX):
        raise Refused(403, "a saved run can be looked at, not changed")
    try:
        return hub().find(name)
    except LabUnknown as error:
        raise Refused(403, str(error)) from None


# Files --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def build_tag() -> str:
    """Changes when one of the view's files does: part of their addresses, so that browsers may keep them for good."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=1)
def plotly_address() -> str:
    """Where a page finds plotly.js; changes with the file."""
    return f"/lab/plotly/{hashlib.sha256(_plotly()).hexdigest()[:12]}.js"


@lru_cache(maxsize=1)
def _plotly() -> bytes:
    return gzip.compress((assets("plotly") / "plotly-cartesian.min.js").read_bytes(), 6, mtime=0)


async def plotly_js(request: Request) -> Response:
    """plotly.js with the chart types that the lab draws, compressed once."""
    packed = _plotly()
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type="text/javascript", headers={**headers, "Content-Encoding": "gzip"})
    return Response(await run_in_threadpool(gzip.decompress, packed), media_type="text/javascript", headers=headers)


def announced() -> str:
    """The files of the live view, for the front page to announce."""
    base = f"/lab/assets/{build_tag()}/"
    modules = [base + path.name for path in sorted(STATIC.glob("*.js"))]
    return announcement(modules, [base + "live.css"], [plotly_address()])


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
        except LabUnknown as error:
            return JSONResponse({"error": str(error)}, status_code=403)
        except WorkloadRefused as error:
            return JSONResponse({"error": str(error), "field": error.field}, status_code=400)
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
        Route("/lab/api/scenes", _guard(scenes)),
        Route("/lab/owner", _guard(owner)),
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
