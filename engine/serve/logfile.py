"""Where the host's output goes, and what its last lines were."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import BinaryIO

from engine.core.folders import cache_folder

KEPT_LOGS = 20
"""Log files kept in the cache folder."""
_numbers = itertools.count(1)


def new_log() -> tuple[Path | None, BinaryIO]:
    """A fresh log file, opened for writing; the null device where none can be made. Old ones are deleted."""
    folder = cache_folder() / "logs"
    path = folder / f"host-{os.getpid()}-{next(_numbers)}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _delete_old(folder)
        return path, path.open("wb")
    except OSError:
        return None, Path(os.devnull).open("wb")


def _delete_old(folder: Path) -> None:
    logs = sorted(folder.glob("host-*.log"), key=_age)
    for old in logs[: max(0, len(logs) - KEPT_LOGS + 1)]:
        with contextlib.suppress(OSError):
            old.unlink()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tail(path: Path | None, lines: int = 12, most: int = 4000) -> str:
    """The last lines of a log, '' when there is nothing to read."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])
