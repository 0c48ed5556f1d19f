"""A learner's file: kept, refused when it is not one, and never overwritten when it is damaged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from app.course.progress import (
    MAX_UPLOAD,
    LessonProgress,
    Progress,
    ProgressError,
    Store,
    check_progress,
    new_token,
    read_progress,
)
from lessons.catalogue import catalogue, module_of
from lessons.runs import run_scripted


def kept() -> Progress:
    entry = LessonProgress(answers={"join-late": 3.0, "who-works": "gap"}, checks={"check/when": "step"}, cards=2)
    return Progress(lessons={"continuous-batching": entry})


def test_it_comes_back_as_it_was(tmp_path: Path):
    store = Store(new_token(), tmp_path)
    assert store.load() == Progress()
    store.save(kept())
    assert store.load().lessons == kept().lessons
    assert store.load().updated > 0
    assert not list(tmp_path.glob("*.partial"))


def test_two_learners_do_not_meet(tmp_path: Path):
    one, other = Store(new_token(), tmp_path), Store(new_token(), tmp_path)
    one.save(kept())
    assert other.load() == Progress()


@pytest.mark.parametrize("token", ["", "short", "../../../etc/passwd", "a" * 65, "sixteen letters !"])
def test_only_tokens_name_files(token: str, tmp_path: Path):
    with pytest.raises(ProgressError, match="resume link is damaged"):
        Store(token, tmp_path)


def test_a_damaged_file_is_set_aside(tmp_path: Path):
    store = Store(new_token(), tmp_path)
    store.path.write_text('{"lessons": {"continuous-')
    assert store.load() == Progress()
    assert store.path.with_suffix(".damaged").read_text().startswith('{"lessons"')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no progress file"),
        (b"\xff\xfe\x00", "no progress file"),
        (b'{"name": "other"}', "no progress file"),
        (b'{"lessons": {"x": {"cards": "two"}}}', "no progress file"),
        (b'{"inference_lab_progress": 9}', "form 9.*update the lab"),
        (b" " * (MAX_UPLOAD + 1), "at most 1,000,000"),
        (b'{"lessons": ' + b"[" * 100_000, "no progress file"),
    ],
)
def test_what_is_no_progress_file_is_refused(content: bytes, message: str):
    with pytest.raises(ProgressError, match=message):
        read_progress(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {"join-late": "gap"}}, "answer to 'join-late' can't be 'gap'"),
        ({"answers": {"who-works": "somebody"}}, "answer to 'who-works'"),
        ({"answers": {"who-works": 3.0}}, "answer to 'who-works'"),
        ({"measured": {"join-late": ["a"]}}, "answer to 'join-late'"),
        ({"checks": {"check/when": "never"}}, "answer to 'when'"),
        ({"cards": 99}, "cards=99, but it has 7 parts"),
        ({"cards": -1}, "cards=-1"),
        ({"seen": {"walk-late": 7}}, "'walk-late' has 5 frames"),
    ],
)
def test_answers_that_do_not_fit_their_question_are_refused(change, message: str):
    progress = Progress(lessons={"continuous-batching": LessonProgress(**change)})
    with pytest.raises(ProgressError, match=message):
        check_progress(progress, catalogue())


def test_a_lesson_that_does_not_exist_is_refused_and_an_old_block_is_not():
    with pytest.raises(ProgressError, match="'alchemy', which this lab does not have"):
        check_progress(Progress(lessons={"alchemy": LessonProgress()}), catalogue())
    check_progress(Progress(lessons={"kv-cache": LessonProgress(answers={"a-question-of-last-year": 1.0})}), catalogue())
    check_progress(kept(), catalogue())


def test_an_order_must_hold_every_item_once():
    def with_order(order: list[str]) -> Progress:
        return Progress(lessons={"one-request": LessonProgress(answers={"order": order})})

    full = ["tokenise", "queue", "prefill", "first", "decode"]
    check_progress(with_order(full), catalogue())
    for wrong in (full[:4], [*full[:4], "first"], [*full, "first"]):
        with pytest.raises(ProgressError, match="'order'"):
            check_progress(with_order(wrong), catalogue())


def test_runs_are_kept_whole(tmp_path: Path):
    store = Store(new_token(), tmp_path)
    record = run_scripted(module_of("07_continuous_batching").late())
    store.save_run("continuous-batching", "late", record)
    again = store.load_run("continuous-batching", "late")
    assert again == record
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(record)
    assert store.load_run("continuous-batching", "static") is None
