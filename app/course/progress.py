"""What a learner has done, kept without an account: a file named by an unguessable token that stands in the address.

The file can be downloaded and brought back. Records of runs lie beside it, so that pictures survive a reload; they are made
here and never taken from outside.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from engine.observe.runs import data_folder
from lessons.model import Check, Explain, Lesson, Predict
from lessons.runs import Answer, RunRecord

TOKEN = re.compile(r"[A-Za-z0-9_-]{16,64}")
MAX_UPLOAD = 1_000_000
"""Bytes of a progress file that can be brought in."""
VERSION = 1


class ProgressError(ValueError):
    """A progress file that can't be used; the message says why and what to do."""


class LessonProgress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One lesson. Keys are ids of blocks; of questions, ``check/question``."""

    answers: dict[str, float | str | list[str]] = {}
    """Locked predictions."""
    measured: dict[str, float | str | list[str]] = {}
    """What the run measured, for each prediction."""
    ran: list[str] = []
    """Runs done."""
    seen: dict[str, int] = {}
    """Furthest frame of each explanation."""
    checks: dict[str, float | str] = {}
    """Newest answer to each question."""
    cards: int = 0
    """Parts done."""
    done: bool = False


class Progress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All of a learner's lessons."""

    inference_lab_progress: int = VERSION
    """Version of the file's form."""
    updated: float = 0.0
    """Unix time, seconds."""
    lessons: dict[str, LessonProgress] = {}

    def of(self, lesson_id: str) -> LessonProgress:
        """The entry of a lesson, made when there is none."""
        return self.lessons.setdefault(lesson_id, LessonProgress())


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(18)


class Store:
    """The files of one learner.

    Args:
        token: the learner's.
        folder: where files lie; default the user's data folder.

    Raises:
        ProgressError: the token is none.
    """

    def __init__(self, token: str, folder: Path | None = None) -> None:
        if not TOKEN.fullmatch(token):
            raise ProgressError("the resume link is damaged: its token must have 16 to 64 letters, digits, - or _")
        self.token = token
        self._folder = folder or data_folder() / "progress"
        self._runs = self._folder / f"{token}.runs"

    @property
    def path(self) -> Path:
        """The progress file."""
        return self._folder / f"{self.token}.json"

    def load(self) -> Progress:
        """What was kept; a fresh one where nothing was. A damaged file is set aside, not overwritten."""
        try:
            return read_progress(self.path.read_bytes())
        except FileNotFoundError:
            return Progress()
        except ProgressError:
            self.path.replace(self.path.with_suffix(".damaged"))
            return Progress()

    def save(self, progress: Progress) -> None:
        """Keep it, at once or not at all."""
        progress.updated = time.time()
        self._write(self.path, msgspec.json.format(msgspec.json.encode(progress), indent=1))

    def save_run(self, lesson_id: str, experiment: str, record: RunRecord) -> None:
        """Keep the newest run of an experiment."""
        self._write(self._run_path(lesson_id, experiment), msgspec.msgpack.encode(record))

    def load_run(self, lesson_id: str, experiment: str) -> RunRecord | None:
        """The newest run of an experiment; None where there is none, or an older version of the lab wrote it."""
        try:
            return msgspec.msgpack.decode(self._run_path(lesson_id, experiment).read_bytes(), type=RunRecord)
        except (FileNotFoundError, msgspec.MsgspecError, ValueError):
            return None

    def _run_path(self, lesson_id: str, experiment: str) -> Path:
        return self._runs / f"{lesson_id}.{experiment}.msgpack"

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
        partial.write_bytes(content)
        partial.replace(path)


def read_progress(content: bytes) -> Progress:
    """A progress file's content.

    Raises:
        ProgressError: it is none.
    """
    if len(content) > MAX_UPLOAD:
        raise ProgressError(f"the file has {len(content):,} bytes; a progress file has at most {MAX_UPLOAD:,}")
    try:
        progress = msgspec.json.decode(content, type=Progress)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProgressError(
            f"this is no progress file of the lab ({error}): choose a file that the lab let you download"
        ) from None
    if progress.inference_lab_progress != VERSION:
        raise ProgressError(
            f"the file has form {progress.inference_lab_progress}; this lab reads form {VERSION}: update the lab"
        )
    return progress


def check_progress(progress: Progress, lessons: dict[str, Lesson]) -> None:
    """Refuse answers that don't fit their question; entries of blocks that no longer exist are fine.

    Raises:
        ProgressError: naming the lesson and the entry.
    """
    for lesson_id, entry in progress.lessons.items():
        lesson = lessons.get(lesson_id)
        if lesson is None:
            raise ProgressError(f"the file speaks of a lesson {lesson_id!r}, which this lab does not have")
        if not 0 <= entry.cards <= len(lesson.cards):
            raise ProgressError(f"lesson {lesson_id!r}: cards={entry.cards}, but it has {len(lesson.cards)} parts")
        for block in lesson.blocks:
            if isinstance(block, Predict):
                for given in (entry.answers.get(block.id), entry.measured.get(block.id)):
                    if given is not None and not fits(block, given):
                        raise ProgressError(f"lesson {lesson_id!r}: the answer to {block.id!r} can't be {given!r}")
            if isinstance(block, Explain) and not 0 <= entry.seen.get(block.id, 0) < len(block.frames):
                raise ProgressError(f"lesson {lesson_id!r}: {block.id!r} has {len(block.frames)} frames")
            if isinstance(block, Check):
                for question in block.questions:
                    given_check = entry.checks.get(f"{block.id}/{question.id}")
                    if given_check is not None and not fits(question, given_check):
                        raise ProgressError(f"lesson {lesson_id!r}: the answer to {question.id!r} can't be {given_check!r}")


def fits(block: object, given: Answer) -> bool:
    """Whether an answer has the form that its question asks for."""
    kind = getattr(block, "kind", "number")
    ids = {option.id for option in getattr(block, "options", ())}
    if kind == "number":
        return isinstance(given, (int, float))
    if kind == "order":
        return isinstance(given, list) and set(given) == ids and len(given) == len(ids)
    return isinstance(given, str) and given in ids
