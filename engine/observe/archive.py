"""The disk behind a live lab's log: everything is recorded as it happens, so that the ring in memory may forget.

::

    engine ──▶ TraceLog (the newest 20,000 steps in memory)
                  └──▶ Archive ──▶ run file (one a generation) ──▶ older steps on demand; "save this run" copies the file
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.core.trace import StepTrace
from engine.observe.runfile import RunHeader, RunReader, RunWriter, new_header

FLUSH_EVERY = 0.5
"""Seconds that a record may stay in memory before it is written."""
MAX_BYTES = 256 * 1024 * 1024
"""Bytes of one recording; what comes after is kept in memory only, and the log says so."""
STALE_AFTER = 3 * 24 * 3600.0
"""Seconds after which a recording that nobody closed is removed."""


class Archive:
    """Records one lab into a run file of its own. Thread-safe; a full disk ends the recording, never the lab.

    Args:
        folder: where recordings are kept while they are live.
        facts: model and versions for the header, asked when a recording starts.
        max_bytes: bound of one recording.
    """

    def __init__(self, folder: Path, facts: Callable[[], dict[str, Any]] = dict, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.problem = ""
        """Why recording ended early, '' while it goes on."""
        self._facts = facts
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._writer: RunWriter | None = None
        self._reader: RunReader | None = None
        self._flushed = 0.0
        self._info: Any = None
        self._generation = -1

    def apply(self, update: Any) -> None:
        """Record news of the lab (``engine.observe.log.Update``)."""
        with self._lock:
            if update.info is not None:
                self._info = update.info
            if update.generation != self._generation:
                self._drop()
                self._generation = update.generation
            if not (update.opened or update.steps or update.tokens or update.closed):
                return
            try:
                self._record(update)
            except OSError as error:
                self.problem = f"recording ended: {error}"
                self._writer = None

    def _record(self, update: Any) -> None:
        if self._writer is None:
            if self.problem or self._info is None:
                return
            model = dict(self._facts())
            backend = getattr(self._info, "backend", None)
            if backend is not None:  # what this lab really computes with, which need not be what its model was loaded for
                model["attention"] = backend.words()
            header = new_header(self._info.config, model=model, seed=self._info.config.seed)
            name = f"{int(time.time())}-{secrets.token_hex(6)}.inflab"
            self._writer = RunWriter(self.folder / name, header, self._max_bytes)
        self._writer.add(opened=update.opened, steps=update.steps, tokens=update.tokens, closed=update.closed)
        if self._writer.full:
            self.problem = f"recording ended at {self._max_bytes // 1024**2} MiB: newer steps are kept in memory only"
        if time.monotonic() - self._flushed > FLUSH_EVERY:
            self._flushed = time.monotonic()
            self._writer.flush()

    def steps(self, first: int, last: int) -> list[StepTrace]:
        """Recorded steps with ``first <= index <= last``, oldest first; fewer when they were not recorded."""
        with self._lock:
            reader = self._open()
            return reader.steps(first, last) if reader else []

    @property
    def first_index(self) -> int | None:
        """Index of the oldest recorded step, or None."""
        with self._lock:
            reader = self._reader or self._open()
            return reader.first_index if reader and reader.num_steps else None

    def _open(self) -> RunReader | None:
        if self._writer is None:
            return self._reader
        self._writer.flush()
        if self._reader is None:
            self._reader = RunReader(self._writer.path)
        self._reader.refresh()
        return self._reader

    def file(self) -> Path | None:
        """The recording so far, flushed; None when nothing happened yet."""
        with self._lock:
            if self._writer is None:
                return None
            self._writer.flush()
            return self._writer.path

    def header(self) -> RunHeader | None:
        """What the recording says of itself."""
        with self._lock:
            reader = self._open()
            return reader.header if reader else None

    def close(self) -> None:
        """End the recording and remove its file: a saved run is a copy."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
                self._writer.path.unlink(missing_ok=True)
            self._writer = None
        self.problem = ""


def remove_stale(folder: Path, older_than: float = STALE_AFTER) -> int:
    """Remove recordings that a crashed server left behind; returns how many."""
    removed = 0
    for path in folder.glob("*.inflab") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()
                removed += 1
    return removed


def model_facts(model: Any) -> dict[str, Any]:
    """A model's description (a struct or None) as plain data for a header."""
    return msgspec.to_builtins(model) if model is not None else {}
