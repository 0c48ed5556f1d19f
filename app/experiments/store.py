"""The user's saved results: one file each, in a folder of their own."""

from __future__ import annotations

import time

import msgspec

from engine.observe.runs import NamedFiles, clean_name
from engine.workload.datafile import DataFileError
from engine.workload.results import SUFFIX, ExperimentResult, parse_result, read_result, write_result

MOST_OVERLAID = 4


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    name: str
    made: float
    """Unix time, seconds."""
    size: int
    """Bytes."""


class ResultStore(NamedFiles):
    """The folder of results."""

    kind, suffix, place = "result", SUFFIX, "experiments"

    def list(self) -> list[Saved]:
        """All results, newest first."""
        paths = self.folder.glob(f"*{SUFFIX}") if self.folder.is_dir() else ()
        found = [
            Saved(name=path.name.removesuffix(SUFFIX), made=path.stat().st_mtime, size=path.stat().st_size) for path in paths
        ]
        return sorted(found, key=lambda saved: -saved.made)

    def read(self, name: str) -> ExperimentResult:
        """One result.

        Raises:
            ValueError: there is none (``DataFileError``: it can't be read).
        """
        return read_result(self.path(name))

    def save(self, result: ExperimentResult, name: str = "") -> str:
        """Write a result; returns the name it got: the experiment's id and the date unless one is given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        when = time.strftime("%Y-%m-%d %H-%M-%S", time.localtime(result.made))
        free = self._free_name(clean_name(name.removesuffix(SUFFIX) or f"{result.experiment.id} {when}"))
        partial = self.folder / f"{free}.partial"
        partial.write_bytes(write_result(result))
        partial.replace(self.folder / f"{free}{SUFFIX}")
        return free

    def bring_in(self, text: str, name: str) -> str:
        """Take a result from elsewhere, after checking that it is one; returns its name.

        Raises:
            DataFileError: it is none.
        """
        return self.save(parse_result(text, name), name.removesuffix(".json").removesuffix(".experiment"))


__all__ = ["DataFileError", "ResultStore", "Saved"]
