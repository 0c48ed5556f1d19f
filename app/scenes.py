"""The scenes that the page offers: the project's, and the teacher's own in the data folder; read again when one changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from engine.observe.runs import data_folder
from engine.workload.check import assets
from engine.workload.scenes import Catalogue, load_scenes

_lock = threading.Lock()
_known: tuple[Any, Catalogue] | None = None


def own_folder() -> Path:
    """Where a teacher's own scenes lie."""
    return data_folder() / "scenes"


def catalogue() -> Catalogue:
    """All scenes and what is wrong with the files that can't be used."""
    global _known
    own = own_folder()
    folders = [own] if own.is_dir() else []
    mark = [_stamp(folder) for folder in (assets("scenes"), *folders)]
    with _lock:
        if _known is None or _known[0] != mark:
            _known = (mark, load_scenes(folders))
        return _known[1]


def _stamp(folder: Path) -> tuple[Any, ...]:
    return (str(folder), *sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.glob("*.*")))


def listing() -> dict[str, Any]:
    """What the page shows of them."""
    found = catalogue()
    return {
        "scenes": [{"id": s.id, "title": s.title, "look": s.look, "view": s.view} for s in found.scenes],
        "problems": list(found.problems),
    }
