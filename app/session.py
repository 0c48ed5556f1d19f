"""Who shares what: one engine for the whole server, one private lab for each browser session.

::

    ?lab=TOKEN      a session's own lab: found again after a reload, released when its browser is gone for a while
    ?follow=TOKEN   the same lab for others, to look at only; another token, so that it gives nothing else away

Both tokens are unguessable. The server installs one ``Hub``; pages and routes reach everything through it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from app import link
from app.experiments.running import measuring
from app.figures.tiles import gpu_words
from app.live.ledger import LiveLedger
from app.live.moment import Look, encode, scene, sections
from app.owner import Owner
from app.scenes import catalogue
from engine.core.config import EngineConfig, build_config
from engine.observe.log import TraceLog
from engine.serve.client import EngineClient, HostError, HostGone
from engine.serve.protocol import HostState, LabInfo
from engine.workload.datafile import plain
from engine.workload.scenes import Scene
from engine.workload.spec import WorkloadSpec

LOGGER = logging.getLogger(__name__)
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")
KEPT_LOOKS = 12
WAIT_STEPS = 200
"""Newest steps over which the wait for other labs is told."""
REAP_EVERY = 5.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server, and one session on it, may take."""

    labs: int = 32
    """Labs at once."""
    grace: float = 600.0
    """Seconds after which a lab is released whose browser is gone."""
    crowded_grace: float = 60.0
    """The same while all labs are taken and somebody asks for one."""
    queued: int = 256
    """Requests that may wait in one lab."""
    max_tokens: int = 2048
    """Tokens that one request may generate."""
    copies: int = 64
    """Copies of one prompt."""
    traffic_seconds: float = 3600.0
    """Longest time that traffic comes."""
    in_flight: int = 8
    """Commands of one session that may wait for the engine at once."""
    viewers: int = 120
    """Open pages that look at one lab."""

    @classmethod
    def from_environment(cls) -> Limits:
        """The defaults, with ``INFERENCE_LAB_LABS`` and ``INFERENCE_LAB_GRACE`` (seconds) in their place.

        Raises:
            ValueError: one of them is no number within limits.
        """
        usual = cls()
        return cls(
            labs=int(_number("INFERENCE_LAB_LABS", usual.labs, 1, 1000)),
            grace=_number("INFERENCE_LAB_GRACE", usual.grace, 1, 7 * 24 * 3600),
        )


def _number(name: str, default: float, least: float, most: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise ValueError(f"{name}={text!r} must be a number from {least:,g} to {most:,g}")
    return value


LAB_DEFAULTS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_kv_blocks": 128,
    "max_num_queued_requests": Limits().queued,
}
"""The first engine of a lab: small enough that its whole pool is seen at a glance."""
DEFAULT_CONFIG = build_config(LAB_DEFAULTS)


class LabUnknown(LookupError):
    """The token names no lab of this server."""


class LabsFull(RuntimeError):
    """No more labs: all are in use."""


class QuotaExceeded(ValueError):
    """Something beyond what a session may take; the message says how much that is."""


def session_alive(session_id: str) -> bool:
    """Whether a browser holds this Streamlit session open."""
    from streamlit import runtime

    return runtime.exists() and runtime.get_instance().is_active_session(session_id)


def public_name(model: str) -> str:
    """A model's name for everybody: of a folder on the owner's machine only its last part."""
    path = Path(model).expanduser()
    return path.name if path.is_absolute() or model.startswith(".") else model


class Lab:
    """One session's lab: its token, its settings, its traffic, and what its viewers share."""

    def __init__(
        self, token: str, client: EngineClient, limits: Limits | None = None, leaving: threading.Event | None = None
    ) -> None:
        self.token = token
        self.client = client
        self.limits = limits or Limits()
        self.config: EngineConfig = DEFAULT_CONFIG
        self.workload: WorkloadSpec | None = None
        """The newest traffic, or the one that a link brought."""
        self.scene: Scene | None = None
        self.prepared = False
        """Whether a link brought traffic that nobody started yet."""
        self.problems: tuple[str, ...] = ()
        """What could not be used of the link that opened this lab."""
        self.notice = ""
        """Something that happened to this lab from outside."""
        self.seen = time.monotonic()
        self.sessions: set[str] = set()
        """Browser sessions that have this lab."""
        self.viewers = 0
        """Open streams of the lab's own pages."""
        self.followers = 0
        self.commands = 0
        """Commands that wait for the engine now."""
        self.driven: Look | None = None
        """How the presenter looks at the lab: what a projector shows."""
        self.follow = ""
        """The token of those who may look, '' while nobody may."""
        self.opened_on: HostState | None = None
        """The loaded model that this lab was opened on."""
        self.lock = threading.RLock()
        self._leaving = leaving
        """Set once an earlier lab of this token is closed; until then its records are not ours."""
        self._log = client.log(token) if leaving is None else TraceLog()
        self._fresh = True
        self._changes = 0
        self._live = LiveLedger()
        self._looks: dict[Look, tuple[float, tuple[Any, ...], dict[str, bytes]]] = {}

    @property
    def log(self) -> TraceLog:
        """The lab's mirror; empty until the lab is open."""
        return self._log

    @property
    def open(self) -> bool:
        """Whether the host has this lab."""
        state = self.client.state
        return state.state == "ready" and self.opened_on is state

    @property
    def version(self) -> tuple[Any, ...]:
        """Changes whenever a viewer would see something new."""
        state = self.client.state
        host = (state.state, state.stage, state.progress, state.error, self.client.gpu)
        return (self.open, self._changes, self._log.version, *host)

    def wait_for_turn(self) -> None:
        """Block until an earlier lab of this token is gone from the host."""
        if self._leaving is not None:
            self._leaving.wait(30)
            self._leaving = None
            self._log = self.client.log(self.token)

    # -- what it is set to ---------------------------------------------------------------------------------------------

    def set_up(self, query: Mapping[str, str]) -> None:
        """Take settings and traffic from the address that opened this lab; later addresses change nothing."""
        with self.lock:
            if not self._fresh:
                return
            self._fresh = False
            if not any(query.get(part) for part in ("engine", "scene", "traffic")):
                return
            setup = link.parse(query, DEFAULT_CONFIG, catalogue().find)
            problems = list(setup.problems)
            if setup.workload is not None:
                try:
                    self.check_workload(setup.workload)
                except QuotaExceeded as error:
                    problems.append(f"The link's traffic can't be used: {error}.")
                    setup = link.Setup(setup.config, None, None)
            self.config = self.within_quota(setup.config)
            self.workload, self.scene = setup.workload, setup.scene
            self.prepared, self.problems = setup.workload is not None, tuple(problems)
            self.changed()

    def within_quota(self, config: EngineConfig) -> EngineConfig:
        """These settings with a queue that a session may have."""
        return config.replace(max_num_queued_requests=min(config.max_num_queued_requests, self.limits.queued))

    def check_config(self, config: EngineConfig) -> None:
        """Refuse settings beyond a session's quota.

        Raises:
            QuotaExceeded: with both numbers.
        """
        if config.max_num_queued_requests > self.limits.queued:
            raise QuotaExceeded(
                f"max_num_queued_requests={config.max_num_queued_requests:,} is more than a session may have waiting: "
                f"set it to at most {self.limits.queued:,}"
            )

    def check_params(self, params: Mapping[str, Any]) -> None:
        """Refuse sampling settings beyond a session's quota.

        Raises:
            QuotaExceeded: with both numbers.
        """
        asked = params.get("max_tokens")
        if isinstance(asked, int) and asked > self.limits.max_tokens:
            raise QuotaExceeded(
                f"max_tokens={asked:,} is more than one request of a session may generate: "
                f"set it to at most {self.limits.max_tokens:,}"
            )

    def check_workload(self, workload: WorkloadSpec) -> None:
        """Refuse traffic beyond a session's quota.

        Raises:
            QuotaExceeded: with both numbers.
        """
        longest = max((r.output_tokens for r in workload.requests), default=0)
        if workload.kind == "generated":
            longest = workload.output.most
        if longest > self.limits.max_tokens:
            raise QuotaExceeded(
                f"the longest answer has {longest:,} tokens, more than one request of a session may generate: "
                f"lower it to at most {self.limits.max_tokens:,}"
            )
        if workload.trace is not None:
            raise QuotaExceeded("recorded traces are replayed by experiments only: give arrivals and lengths instead")
        if workload.stop.seconds is not None and workload.stop.seconds > self.limits.traffic_seconds:
            raise QuotaExceeded(
                f"the traffic would come for {workload.stop.seconds:,.0f} seconds: "
                f"stop it after at most {self.limits.traffic_seconds:,.0f}"
            )

    def began(self, workload: WorkloadSpec, scene: Scene | None) -> None:
        """Traffic was started."""
        self.workload, self.scene, self.prepared = workload, scene, False
        self.changed()

    def tell(self, text: str) -> None:
        """Let this lab's viewers know of something that happened from outside."""
        self.notice = text
        self.changed()

    def changed(self) -> None:
        """Viewers have something new to see."""
        self._changes += 1

    # -- what its viewers see ------------------------------------------------------------------------------------------

    def look(self, look: Look) -> dict[str, bytes]:
        """All sections for one way of looking, as JSON and up to date; built once for all who look alike."""
        return self.recent(look, 0.0)[1]

    def recent(self, look: Look, fresh: float) -> tuple[tuple[Any, ...], dict[str, bytes]]:
        """The version seen and its sections; what is younger than ``fresh`` seconds is new enough."""
        with self.lock:
            version = self.version
            found = self._looks.get(look)
            if found is not None and (found[1] == version or time.monotonic() - found[0] < fresh):
                return found[1], found[2]
            info: LabInfo | None = self._log.info
            if info is not None and self.open:
                self.config = info.config
            parts = encode({
                "head": self.head(info), "room": self.room(),
                **sections(scene(self._log, self.config, self._live, look), self._log),
            })  # fmt: skip
            self._looks.pop(look, None)
            self._looks[look] = (time.monotonic(), version, parts)
            while len(self._looks) > KEPT_LOOKS:
                del self._looks[next(iter(self._looks))]
            return version, parts

    def head(self, info: LabInfo | None) -> dict[str, Any]:
        """The model, the host's state, the engine's mode and settings."""
        state = self.client.state
        open_now = info is not None and self.open
        return {
            "state": state.state,
            "stage": state.stage,
            "progress": state.progress,
            "error": state.error,
            "gpu": gpu_words(self.client.gpu) if self.client.gpu is not None else "",
            "model": msgspec.structs.replace(state.model, name=public_name(state.model.name)) if state.model else None,
            "open": open_now,
            "mode": info.mode if info and open_now else None,
            "rate": info.rate if info else None,
            "generation": info.generation if info else 0,
            "kv_pool_bytes": info.kv_pool_bytes if info else 0,
            "backend": {"words": info.backend.words(), "reason": info.backend.reason, "checks": info.backend.checks}
            if info is not None and info.backend is not None
            else None,
            "config": self.config,
        }

    def _fallback(self) -> tuple[str, ...]:
        """Why a GPU does not compute as fast as it could, in a sentence; nothing on a CPU, where nobody expects it."""
        model, info = self.client.state.model, self._log.info
        on_gpu = model is not None and model.device.startswith("cuda")
        if not (on_gpu and info and info.backend and info.backend.reason):
            return ()
        return (f"{info.backend.reason} Answers are right all the same, only slower: inference-lab doctor tells more.",)

    def _measured(self) -> tuple[str, ...]:
        """Why requests stand still, while they do."""
        if not self._log.num_live or not measuring():
            return ()
        return ("An experiment is being measured on this machine. This lab's requests wait until it is done.",)

    def room(self) -> dict[str, Any]:
        """Traffic, scene, and what this lab shares with others."""
        steps = self._log.steps(max(0, self._log.next_index - WAIT_STEPS))
        waited = sum(step.wait_time for step in steps)
        worked = sum(step.duration for step in steps)
        return {
            "traffic": self._log.traffic,
            "workload": plain(self.workload) if self.workload is not None else None,
            "prepared": self.prepared,
            "scene": {"id": self.scene.id, "title": self.scene.title, "look": self.scene.look, "view": self.scene.view}
            if self.scene is not None else None,
            "link": link.query_of(self.config, DEFAULT_CONFIG, self.workload, self.scene),
            "problems": (*self.problems, *self._fallback(), *self._measured()),
            "notice": self.notice,
            "waited": round(waited / (waited + worked), 3) if waited + worked > 0 else 0.0,
            "followers": self.followers,
            "limits": self.limits,
        }  # fmt: skip


class Hub:
    """The one engine client of the server and the labs on it.

    Args:
        client: the engine.
        limits: quotas of sessions.
        owner: tells the machine's owner from guests.
        alive: whether a browser session is still there.
    """

    def __init__(
        self,
        client: EngineClient,
        limits: Limits | None = None,
        owner: Owner | None = None,
        alive: Callable[[str], bool] = session_alive,
    ) -> None:
        self.client = client
        self.limits = limits or Limits()
        self.owner = owner or Owner()
        self.alive = alive
        self.listens = ("127.0.0.1", 8501)
        """Host and port of the server."""
        self._labs: dict[str, Lab] = {}
        self._followed: dict[str, Lab] = {}
        self._leaving: dict[str, threading.Event] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()

    # -- labs ----------------------------------------------------------------------------------------------------------

    def enter(self, token: str | None, session: str = "") -> Lab:
        """The lab of this token; a fresh one, with a token of its own, when there is none of that name.

        Args:
            token: from the page's address.
            session: the browser session that holds the page open.

        Raises:
            LabsFull: all labs are in use.
        """
        with self._lock:
            if token is None or not TOKEN.fullmatch(token):
                token = secrets.token_urlsafe(18)
            lab = self._labs.get(token)
            if lab is None:
                self._make_room()
                lab = self._labs[token] = Lab(token, self.client, self.limits, self._leaving.get(token))
            lab.seen = time.monotonic()
            if session:
                lab.sessions.add(session)
            return lab

    def find(self, token: str) -> Lab:
        """The lab of this token.

        Raises:
            LabUnknown: there is none.
        """
        lab = self._labs.get(token)
        if lab is None:
            raise LabUnknown("this page's lab is not on this server any more: reload the page to open it again")
        lab.seen = time.monotonic()
        return lab

    def ensure_open(self, lab: Lab) -> bool:
        """Open the lab on the host once the model is ready; True when it is open. Blocks: not for an event loop."""
        return lab.open or self.configure(lab, None)

    def configure(self, lab: Lab, config: EngineConfig | None) -> bool:
        """Open the lab with these settings (None: its own), or give the open one a new engine; False: no model is ready.

        Raises:
            HostError: the host refuses the settings.
        """
        with lab.lock:
            state = self.client.state
            if state.state != "ready":
                return False
            lab.wait_for_turn()
            if self._labs.get(lab.token) is not lab:
                raise LabUnknown("this page's lab was released: reload the page to open it again")
            if lab.opened_on is not state:
                info = self.client.open_lab(lab.token, _fields(config or lab.config))
                lab.opened_on = state
            elif config is not None:
                info = self.client.reconfigure(lab.token, _fields(config))
            else:
                return True
            lab.config = info.config
            lab.changed()
            return True

    def tokens(self) -> tuple[str, ...]:
        """Tokens of all labs."""
        return tuple(self._labs)

    @property
    def num_open(self) -> int:
        """Labs that are open on the host."""
        return sum(lab.open for lab in tuple(self._labs.values()))

    # -- looking on ----------------------------------------------------------------------------------------------------

    def share(self, lab: Lab) -> str:
        """The token under which others may look at a lab; the same until ``unshare``."""
        with self._lock:
            if not lab.follow:
                lab.follow = secrets.token_urlsafe(18)
                self._followed[lab.follow] = lab
            return lab.follow

    def unshare(self, lab: Lab) -> None:
        """Nobody may look at the lab any more; another ``share`` gives another token."""
        with self._lock:
            self._followed.pop(lab.follow, None)
            lab.follow = ""

    def followed(self, token: str) -> Lab:
        """The lab that may be looked at under this token.

        Raises:
            LabUnknown: there is none.
        """
        lab = self._followed.get(token)
        if lab is None:
            raise LabUnknown("nothing is shown under this link any more: ask the presenter for the newest one")
        return lab

    # -- the model -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the host process again; every lab is opened anew, with its settings."""
        with self._lock:
            self.client.restart()

    def load_model(self, model: str, device: str, dtype: str, by: Lab | None = None) -> None:
        """Change the model for all labs; each is opened again with its own settings, and told.

        Raises:
            HostError: a model is being loaded already.
        """
        with self._lock:
            if self.client.state.state in ("loading", "starting"):
                raise HostError("a model is being loaded already: wait until it is ready")
            try:
                self.client.load_model(model, device, dtype, wait=False)
            except HostGone:
                self.client.model, self.client.device, self.client.dtype = model, device, dtype
                self.client.restart()
            for lab in self._labs.values():
                if lab is not by:
                    lab.tell(
                        f"The owner of this machine changed the model to {public_name(model)}. "
                        "Your requests ended; your settings stay."
                    )

    # -- ending --------------------------------------------------------------------------------------------------------

    def start_reaping(self) -> threading.Thread:
        """Release labs whose browser is gone, every few seconds, until ``end``."""

        def work() -> None:
            while not self._ended.wait(min(REAP_EVERY, self.limits.grace / 2)):
                try:
                    self.reap()
                except Exception:
                    LOGGER.exception("releasing labs failed")

        thread = threading.Thread(target=work, daemon=True, name="lab-reaper")
        thread.start()
        return thread

    def end(self) -> None:
        """Stop reaping."""
        self._ended.set()

    def reap(self, now: float | None = None) -> list[str]:
        """Release every lab whose browser is gone for longer than the grace time; returns their tokens."""
        now = time.monotonic() if now is None else now
        gone = [lab for lab in tuple(self._labs.values()) if self._away(lab, now) > self.limits.grace]
        for lab in gone:
            self.release(lab)
        return [lab.token for lab in gone]

    def _away(self, lab: Lab, now: float) -> float:
        """Seconds since a browser was there."""
        lab.sessions = {session for session in tuple(lab.sessions) if self.alive(session)}
        if lab.viewers or lab.sessions or lab.commands:
            lab.seen = now
        return now - lab.seen

    def release(self, lab: Lab) -> None:
        """Close a lab on the host and forget its records. Unknown to others at once; blocks until it is closed."""
        left = self._detach(lab)
        if left is not None:
            self._close(lab, left)

    def _detach(self, lab: Lab) -> threading.Event | None:
        """Nobody finds the lab any more; returns the event to set once it is closed, None when it was gone already."""
        with self._lock:
            if self._labs.get(lab.token) is not lab:
                return None
            del self._labs[lab.token]
            self.unshare(lab)
            left = self._leaving[lab.token] = threading.Event()
            return left

    def _close(self, lab: Lab, left: threading.Event) -> None:
        try:
            with lab.lock:
                if lab.open:
                    with contextlib.suppress(HostError, HostGone):
                        self.client.close_lab(lab.token)
                lab.opened_on = None
                self.client.forget(lab.token)
        finally:
            with self._lock:
                self._leaving.pop(lab.token, None)
            left.set()

    def _make_room(self) -> None:
        """Let the lab go whose browser is away longest.

        Raises:
            LabsFull: every browser is there, or was a moment ago.
        """
        if len(self._labs) < self.limits.labs:
            return
        now = time.monotonic()
        away, oldest = max(((self._away(lab, now), lab) for lab in self._labs.values()), key=lambda pair: pair[0])
        if away < self.limits.crowded_grace:
            raise LabsFull(
                f"All {self.limits.labs} labs of this machine are in use. Try again in a few minutes, or follow somebody "
                "else's lab with the link that they share."
            )
        left = self._detach(oldest)
        if left is not None:
            threading.Thread(target=self._close, args=(oldest, left), daemon=True, name="lab-release").start()


def _fields(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


_hub: Hub | None = None


def install(hub: Hub | None) -> None:
    """Make ``hub`` the server's; None takes it away."""
    global _hub
    _hub = hub


def hub() -> Hub:
    """The server's hub.

    Raises:
        RuntimeError: the page was not started by the lab's own launcher.
    """
    if _hub is None:
        raise RuntimeError("the lab's engine is not attached: start the lab with `make lab` or `inference-lab lab`")
    return _hub
