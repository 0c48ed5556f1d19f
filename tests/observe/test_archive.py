"""A ring that forgets, and the disk behind it."""

from pathlib import Path
from types import SimpleNamespace

from engine.observe.archive import Archive, remove_stale
from engine.observe.log import TraceLog
from engine.observe.runfile import RunReader
from engine.observe.runs import RunLibrary
from engine.serve.protocol import BackendFacts
from tests.observe.recorded import Recording, record


def update(recording: Recording, first: int, last: int, config: object, generation: int = 1) -> SimpleNamespace:
    """News of steps ``first`` to ``last - 1``; everything that opened or closed comes with the first or last."""
    return SimpleNamespace(
        generation=generation,
        info=SimpleNamespace(config=config) if first == 0 else None,
        opened=recording.opened_events if first == 0 else [],
        steps=recording.steps[first:last],
        tokens=[token for token in recording.token_events if first <= token.step < last],
        closed=recording.closed_events if last >= len(recording.steps) else [],
        stats=None,
        now=recording.steps[last - 1].end,
        notice="",
    )


def fed(folder: Path, max_steps: int, **bounds: int) -> tuple[TraceLog, Archive, Recording]:
    config, recording = record(9, 700, batching="continuous", kv_layout="paged", use_kv_cache=True)
    archive = Archive(folder, lambda: {"title": "scripted"}, **bounds)
    log = TraceLog(max_steps=max_steps, archive=archive)
    for first in range(0, len(recording.steps), 50):
        log.apply(update(recording, first, min(first + 50, len(recording.steps)), config))
    return log, archive, recording


def test_steps_that_the_ring_forgot_come_from_the_disk(tmp_path: Path) -> None:
    log, _, recording = fed(tmp_path, max_steps=100)
    assert log.steps_let_go > 300 and log.first_index == 0
    assert log.steps(0) == recording.steps
    for first, last in ((0, 0), (10, 250), (len(recording.steps) - 150, len(recording.steps) - 1)):
        assert log.steps(first, last) == recording.steps[first : last + 1]
    assert log.step(3) == recording.steps[3]
    assert len(log.steps()) <= 100


def test_without_an_archive_old_steps_are_gone_and_the_log_says_so(tmp_path: Path) -> None:
    config, recording = record(9, 700)
    log = TraceLog(max_steps=100)
    log.apply(update(recording, 0, len(recording.steps), config))
    assert log.first_index == len(recording.steps) - 100 and log.step(3) is None
    assert log.steps(0) == recording.steps[-100:]


def test_a_recording_becomes_a_saved_run(tmp_path: Path) -> None:
    _, archive, recording = fed(tmp_path / "live", max_steps=100)
    source = archive.file()
    assert source is not None
    library = RunLibrary(tmp_path / "runs")
    name = library.save(source, "my run")
    archive.close()
    assert not list((tmp_path / "live").iterdir())
    with RunReader(library.path(name)) as reader:
        assert list(reader.all_steps()) == recording.steps and reader.header.model == {"title": "scripted"}


def test_an_engine_restart_begins_a_new_recording(tmp_path: Path) -> None:
    log, archive, recording = fed(tmp_path, max_steps=100)
    config = log.info.config
    log.apply(update(recording, 0, 50, config, generation=2))
    assert len(list(tmp_path.iterdir())) == 1
    assert log.steps(0) == recording.steps[:50]
    archive.close()


def test_a_full_recording_ends_and_the_lab_goes_on(tmp_path: Path) -> None:
    log, archive, recording = fed(tmp_path, max_steps=100, max_bytes=10_000)
    assert "recording ended" in archive.problem
    assert log.steps() == recording.steps[-100:]


def test_a_disk_that_refuses_ends_the_recording_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    log, archive, recording = fed(blocked, max_steps=100)
    assert "recording ended" in archive.problem and archive.file() is None
    assert log.steps() == recording.steps[-100:]


def test_what_a_crash_left_behind_is_removed_after_days(tmp_path: Path) -> None:
    _, archive, _ = fed(tmp_path, max_steps=100)
    assert remove_stale(tmp_path) == 0
    assert remove_stale(tmp_path, older_than=-1) == 1 and not list(tmp_path.iterdir())
    archive.close()


def test_a_recording_says_what_its_lab_computed_with(tmp_path: Path) -> None:
    config, recording = record(9, 20)
    archive = Archive(tmp_path, lambda: {"title": "scripted", "attention": "as loaded"})
    news = update(recording, 0, len(recording.steps), config)
    news.info.backend = BackendFacts(name="Triton paged attention", fused=True)
    archive.apply(news)
    header = archive.header()
    assert header is not None
    assert header.model == {"title": "scripted", "attention": "Triton paged attention, fused kernels"}
