"""The user's saved runs: a folder of run files that can be listed, renamed, deleted, brought in and taken out."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.observe.runfile import SUFFIX, RunFileError, RunReader

MAX_NAME = 80
MAX_UPLOAD = 256 * 1024 * 1024
"""Bytes of a run file that can be brought in."""
_BAD = re.compile(r"[^\w .()\[\],=+@-]", re.UNICODE)


def data_folder() -> Path:
    """Where the lab keeps what belongs to the user: ``INFERENCE_LAB_DATA``, or the platform's data folder."""
    chosen = os.environ.get("INFERENCE_LAB_DATA")
    if chosen:
        return Path(chosen)
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local")))
    else:
        base = Path(os.environ.get("XDG_DATA_HOME", str(Path.home() / ".local" / "share")))
    return base / "inference-lab"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of runs."""

    name: str
    title: str
    created: float
    """Unix time, seconds."""
    size: int
    """Bytes."""
    steps: int = 0
    model: str = ""
    problem: str = ""
    """Why it can't be opened, or what is missing at its end; '' when it is whole."""


class NamedFiles:
    """A folder of files of one kind. Every method takes names, never paths, so that nothing outside it can be touched."""

    kind = ""
    """What one file is, for people."""
    suffix = ""
    place = ""
    """The folder's name in the user's data folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_folder() / self.place

    def path(self, name: str) -> Path:
        """Where the file of this name lies.

        Raises:
            ValueError: not a name, or there is none.
        """
        path = self.folder / f"{clean_name(name)}{self.suffix}"
        if not path.is_file():
            raise ValueError(f"there is no saved {self.kind} called {name!r}")
        return path

    def delete(self, name: str) -> None:
        """Remove a file for good."""
        self.path(name).unlink()

    def _free_name(self, name: str) -> str:
        candidate, number = name, 2
        while (self.folder / f"{candidate}{self.suffix}").exists():
            candidate, number = f"{name} ({number})", number + 1
        return candidate


class RunLibrary(NamedFiles):
    """The folder of run files."""

    kind, suffix, place = "run", SUFFIX, "runs"

    def list(self) -> list[RunInfo]:
        """All runs, newest first; one that can't be opened is listed with its problem."""
        found = [self._info(path) for path in self.folder.glob(f"*{SUFFIX}")] if self.folder.is_dir() else []
        return sorted(found, key=lambda info: -info.created)

    def _info(self, path: Path) -> RunInfo:
        stat = path.stat()
        try:
            with RunReader(path) as reader:
                header = reader.header
                return RunInfo(
                    name=path.stem,
                    title=header.title or path.stem,
                    created=header.created or stat.st_mtime,
                    size=stat.st_size,
                    steps=reader.num_steps,
                    model=str(header.model.get("title", "")),
                    problem=reader.damage,
                )
        except (RunFileError, OSError) as error:
            return RunInfo(name=path.stem, title=path.stem, created=stat.st_mtime, size=stat.st_size, problem=str(error))

    def save(self, source: Path, name: str) -> str:
        """Copy a run file (one that is still being written, too) into the library; returns the name it got."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self._free_name(clean_name(name))
        target = self.folder / f"{name}{SUFFIX}"
        partial = target.with_suffix(".partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
        return name

    def rename(self, name: str, new_name: str) -> str:
        """Give a run another name; returns the new one.

        Raises:
            ValueError: no such run, not a name, or the name is taken.
        """
        path, new_name = self.path(name), clean_name(new_name)
        target = self.folder / f"{new_name}{SUFFIX}"
        if target.exists() and not target.samefile(path):
            raise ValueError(f"there is already a run called {new_name!r}: choose another name")
        path.rename(target)
        return new_name

    def bring_in(self, chunks: Iterable[bytes], name: str, max_bytes: int = MAX_UPLOAD) -> str:
        """Take a run file from somewhere else, after checking that it is one; returns the name it got.

        Raises:
            ValueError: too large, or not a readable run file (``RunFileError``). Nothing is kept then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            try:
                size = 0
                for chunk in chunks:
                    size += len(chunk)
                    if size > max_bytes:
                        raise ValueError(f"the file has more than {max_bytes // 1024**2} MiB, the most that can be uploaded")
                    file.write(chunk)
                file.close()
                with RunReader(partial) as reader:
                    reader.header.engine_config()
                    for _ in reader.all_steps():
                        pass
                name = self._free_name(clean_name(name))
                partial.replace(self.folder / f"{name}{SUFFIX}")
                return name
            finally:
                file.close()
                partial.unlink(missing_ok=True)


def clean_name(name: str) -> str:
    """``name`` as a file name without its ending.

    Raises:
        ValueError: nothing usable is left.
    """
    text = _BAD.sub("-", name.removesuffix(SUFFIX)).strip(" .-")[:MAX_NAME].strip(" .-")
    if not text:
        raise ValueError(f"{name!r} is no name for a run: use letters, digits, spaces, or any of . ( ) [ ] , = + @ -")
    return text
