"""Who shares what: one engine for the whole server, one private lab for each browser session.

A lab is named by an unguessable token that stands in the page's address: a reload finds it again, and nobody else does.
The server installs one ``Hub``; pages and routes reach everything through it.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from typing import Any

from app.live.ledger import LiveLedger
from app.live.moment import Look, encode, scene, sections
from engine.core.config import EngineConfig, build_config
from engine.observe.log import TraceLog
from engine.serve.client import EngineClient
from engine.serve.protocol import LabInfo

LAB_DEFAULTS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "block_size": 16,
    "num_kv_blocks": 128,
}
"""The first engine of a lab: small enough that its whole pool is seen at a glance."""
MAX_LABS = 32
"""Labs on one server; the one that nobody has looked at for longest makes room."""
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")
KEPT_LOOKS = 8


class LabUnknown(LookupError):
    """The token names no lab of this server."""


class Lab:
    """One session's lab: its token, its settings and what its viewers share."""

    def __init__(self, token: str, client: EngineClient) -> None:
        self.token = token
        self.client = client
        self.config: EngineConfig = build_config(LAB_DEFAULTS)
        self.seen = time.monotonic()
        self.opened_at: int | None = None
        """The host start that this lab was opened on, or None."""
        self.lock = threading.RLock()
        self._live = LiveLedger()
        self._looks: dict[tuple[Any, ...], dict[str, bytes]] = {}

    @property
    def log(self) -> TraceLog:
        """The lab's mirror; empty until the lab is open."""
        return self.client.log(self.token)

    @property
    def version(self) -> tuple[Any, ...]:
        """Changes whenever a viewer would see something new."""
        log = self.log
        state = self.client.state
        return (self.opened_at is not None, log.version, state.state, state.stage, state.progress, state.error)

    def look(self, look: Look) -> dict[str, bytes]:
        """All sections for one way of looking, as JSON; built once for all who look alike."""
        with self.lock:
            key = (self.version, look)
            found = self._looks.get(key)
            if found is None:
                log = self.log
                info: LabInfo | None = log.info
                if info is not None:
                    self.config = info.config
                found = encode({"head": self.head(info), **sections(scene(log, self.config, self._live, look), log)})
                self._looks[key] = found
                while len(self._looks) > KEPT_LOOKS:
                    del self._looks[next(iter(self._looks))]
            return found

    def head(self, info: LabInfo | None) -> dict[str, Any]:
        """The model, the host's state, the engine's mode and settings."""
        state = self.client.state
        open_now = info is not None and self.opened_at is not None and state.state == "ready"
        return {
            "state": state.state,
            "stage": state.stage,
            "progress": state.progress,
            "error": state.error,
            "model": state.model,
            "open": open_now,
            "mode": info.mode if info and open_now else None,
            "rate": info.rate if info else None,
            "generation": info.generation if info else 0,
            "kv_pool_bytes": info.kv_pool_bytes if info else 0,
            "config": self.config,
        }


class Hub:
    """The one engine client of the server and the labs on it."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._labs: dict[str, Lab] = {}
        self._lock = threading.RLock()
        self._start = 0

    def enter(self, token: str | None) -> Lab:
        """The lab of this token; a fresh one, with a token of its own, when there is none of that name."""
        with self._lock:
            if token is None or not TOKEN.fullmatch(token):
                token = secrets.token_urlsafe(18)
            lab = self._labs.get(token)
            if lab is None:
                lab = self._labs[token] = Lab(token, self.client)
                self._make_room()
            lab.seen = time.monotonic()
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
        if self.client.state.state != "ready":
            return False
        with lab.lock:
            if lab.opened_at != self._start:
                self.client.open_lab(lab.token, _plain(lab.config))
                lab.opened_at = self._start
            return True

    def tokens(self) -> tuple[str, ...]:
        """Tokens of all labs."""
        return tuple(self._labs)

    def restart(self) -> None:
        """Start the host process again; every lab is opened anew, with its settings."""
        with self._lock:
            self._start += 1
            self.client.restart()

    def _make_room(self) -> None:
        while len(self._labs) > MAX_LABS:
            oldest = min(self._labs.values(), key=lambda lab: lab.seen)
            del self._labs[oldest.token]
            if oldest.opened_at is not None and self.client.state.state == "ready":
                threading.Thread(target=self.client.close_lab, args=(oldest.token,), daemon=True).start()


def _plain(config: EngineConfig) -> dict[str, Any]:
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
