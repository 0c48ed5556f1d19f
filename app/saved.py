"""Saved runs in the live view: the same pictures, read from a file, with nothing to drive."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from app.live.ledger import LiveLedger
from app.live.moment import Look, encode, scene, sections
from engine.observe.runfile import RunReader
from engine.observe.runlog import RunLog
from engine.observe.runs import RunLibrary

PREFIX = "run:"
"""What the name of a saved run begins with where a lab's token is expected."""
MAX_OPEN = 4
"""Saved runs that stay open at once."""
KEPT_LOOKS = 8


def library() -> RunLibrary:
    """The user's saved runs."""
    return RunLibrary()


class SavedRun:
    """A saved run in the place of a lab: it can be looked at, not changed."""

    def __init__(self, name: str, log: RunLog) -> None:
        self.name = name
        self.token = PREFIX + name
        self.log = log
        self.config = log.info.config
        self.seen = 0.0
        self.version = (self.token, log.next_index)
        self._lock = threading.RLock()
        self._live = LiveLedger()
        self._looks: dict[Look, dict[str, bytes]] = {}

    def look(self, look: Look) -> dict[str, bytes]:
        """All sections for one way of looking; without a chosen step, the end of the run."""
        if look.step is None and self.log.next_index:
            look = replace(look, step=self.log.next_index - 1)
        with self._lock:
            if look not in self._looks:
                parts = sections(scene(self.log, self.config, self._live, look), self.log)
                self._looks[look] = encode({"head": self._head(), **parts})
                while len(self._looks) > KEPT_LOOKS:
                    del self._looks[next(iter(self._looks))]
            return self._looks[look]

    def recent(self, look: Look, fresh: float = 0.0) -> tuple[tuple[str, int], dict[str, bytes]]:
        """The version seen, and its sections; they never change, however ``fresh`` they must be."""
        return self.version, self.look(look)

    def _head(self) -> dict[str, Any]:
        model = self.log.info.model
        return {
            "state": "saved",
            "stage": "",
            "progress": None,
            "error": self.log.reader.damage,
            "model": model if "title" in model and "num_parameters" in model else None,
            "open": False,
            "mode": None,
            "rate": None,
            "generation": 1,
            "kv_pool_bytes": 0,
            "config": self.config,
            "run": self.name,
        }


_open: OrderedDict[tuple[str, float, int], SavedRun] = OrderedDict()
_lock = threading.Lock()


def saved_run(name: str) -> SavedRun:
    """A saved run, opened once and kept for all who look at it.

    Raises:
        ValueError: there is no such run, or it can't be read.
    """
    path = library().path(name)
    stat = path.stat()
    key = (str(path), stat.st_mtime, stat.st_size)
    with _lock:
        if key not in _open:
            _open[key] = SavedRun(name, RunLog(RunReader(path)))
            while len(_open) > MAX_OPEN:
                _, oldest = _open.popitem(last=False)
                oldest.log.reader.close()
        _open.move_to_end(key)
        return _open[key]
