"""Run files: everything comes back, a cut file up to its last whole frame, and no file can do harm."""

import random
import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from engine.observe.replay import state_at
from engine.observe.runfile import FORMAT, MAGIC, RunFileError, RunReader, RunWriter, new_header
from engine.observe.runlog import RunLog, view_at
from engine.observe.runs import RunLibrary, clean_name
from tests.observe.recorded import Recording, record

DATA = Path(__file__).parent / "data"


def write(path: Path, seed: int = 4, actions: int = 400, **config: object) -> Recording:
    engine_config, recording = record(seed, actions, **config)
    writer = RunWriter(path, new_header(engine_config, title="a test", seed=seed, model={"title": "scripted"}))
    for place, step in enumerate(recording.steps):
        first = place == 0
        writer.add(
            opened=recording.opened_events if first else (),
            steps=[step],
            tokens=[token for token in recording.token_events if token.step == step.index],
            closed=recording.closed_events if place == len(recording.steps) - 1 else (),
        )
    writer.close()
    return recording


def test_everything_comes_back(tmp_path: Path) -> None:
    recording = write(tmp_path / "run.inflab")
    with RunReader(tmp_path / "run.inflab") as reader:
        assert reader.header.title == "a test" and reader.header.seed == 4 and not reader.damage
        assert list(reader.all_steps()) == recording.steps
        assert list(reader.opened()) == recording.opened_events
        assert list(reader.closed()) == recording.closed_events
        assert list(reader.tokens()) == recording.token_events
        assert reader.num_steps == len(recording.steps)
        config = reader.header.engine_config()
        for index in (0, 1, 127, 128, 300, len(recording.steps) - 1):
            window = reader.steps(index - 256, index)
            assert window == recording.steps[max(0, index - 256) : index + 1]
            assert state_at(reader.steps(0, index), index, config.num_kv_blocks).keyframe == recording.states[index]


def test_tokens_of_one_request_are_found_without_reading_all(tmp_path: Path) -> None:
    recording = write(tmp_path / "run.inflab", actions=600)
    with RunReader(tmp_path / "run.inflab") as reader:
        for closed in recording.closed_events:
            trace = closed.trace
            if trace.token_steps:
                found = reader.tokens_of(trace.request_id, trace.token_steps[0], trace.token_steps[-1])
                assert found == [token for token in recording.token_events if token.request_id == trace.request_id]


def test_a_cut_file_reads_up_to_its_last_whole_frame(tmp_path: Path) -> None:
    recording = write(tmp_path / "run.inflab")
    whole = (tmp_path / "run.inflab").read_bytes()
    rng = random.Random(0)
    seen = set()
    for length in [*rng.sample(range(len(whole)), 60), len(whole) - 1]:
        cut = tmp_path / "cut.inflab"
        cut.write_bytes(whole[:length])
        try:
            with RunReader(cut) as reader:
                steps = list(reader.all_steps())
                assert steps == recording.steps[: len(steps)]
                seen.add(len(steps))
        except RunFileError:
            assert length < 600, "only a cut header is worth an error"
    assert len(seen) > 2


def test_a_file_being_written_can_be_followed(tmp_path: Path) -> None:
    config, recording = record(4, 400)
    writer = RunWriter(tmp_path / "run.inflab", new_header(config))
    with RunReader(tmp_path / "run.inflab") as reader:
        for step in recording.steps[:200]:
            writer.add(steps=[step])
        writer.flush()
        reader.refresh()
        assert list(reader.all_steps()) == recording.steps[:200]
        writer.add(steps=recording.steps[200:])
        writer.close()
        reader.refresh()
        assert list(reader.all_steps()) == recording.steps


def test_flipped_bits_are_noticed_or_harmless(tmp_path: Path) -> None:
    recording = write(tmp_path / "run.inflab", actions=150)
    whole = bytearray((tmp_path / "run.inflab").read_bytes())
    rng = random.Random(1)
    noticed = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        (tmp_path / "bad.inflab").write_bytes(damaged)
        try:
            with RunReader(tmp_path / "bad.inflab") as reader:
                steps = list(reader.all_steps())
                list(reader.closed())
                noticed += bool(reader.damage) or steps != recording.steps
        except RunFileError:
            noticed += 1
    assert noticed > 150


def frame(kind: bytes, payload: bytes, first: int = 0, count: int = 1, crc: int | None = None) -> bytes:
    head = struct.pack("<cIIQI", kind, len(payload), zlib.crc32(payload) if crc is None else crc, first, count)
    return head + payload


def header(**fields: object) -> bytes:
    return frame(b"H", zlib.compress(msgspec.msgpack.encode([{"format": FORMAT, "config": {}, **fields}])))


HOSTILE = {
    "empty": b"",
    "foreign": b"PK\x03\x04" + bytes(100),
    "no header": MAGIC + frame(b"S", zlib.compress(msgspec.msgpack.encode([]))),
    "bomb in the header": MAGIC + frame(b"H", zlib.compress(bytes(100 * 1024 * 1024), 9)),
    "huge length": MAGIC + struct.pack("<cIIQI", b"H", 2**31, 0, 0, 1),
    "deep nesting": MAGIC + frame(b"H", zlib.compress(b"\x91" * 100_000)),
    "not compressed": MAGIC + frame(b"H", b"hello"),
    "wrong check sum": MAGIC + frame(b"H", zlib.compress(msgspec.msgpack.encode([{}])), crc=1),
    "newer format": MAGIC + header(format=FORMAT + 1),
    "endless pool": MAGIC + header(config={"num_kv_blocks": 10**15}),
    "pool of text": MAGIC + header(config={"num_kv_blocks": "many"}),
    "pickle": b"\x80\x04\x95cos\nsystem\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.inflab"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(RunFileError, match=r"hostile\.inflab"):
        RunReader(path)
    library = RunLibrary(tmp_path / "runs")
    with pytest.raises(ValueError):
        library.bring_in([HOSTILE[name]], "x")
    assert library.list() == [] and not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    "payload",
    [zlib.compress(bytes(100 * 1024 * 1024), 9), b"junk", zlib.compress(b"\x93\x01\x02\x03"), zlib.compress(b"\x91" * 9999)],
    ids=["bomb", "junk", "numbers", "nesting"],
)
def test_hostile_records_behind_a_good_header_are_refused(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "hostile.inflab"
    path.write_bytes(MAGIC + header() + frame(b"S", payload))
    with RunReader(path) as reader, pytest.raises(RunFileError, match="byte"):
        reader.steps(0, 10)
    with pytest.raises(RunFileError):
        RunLibrary(tmp_path / "runs").bring_in([path.read_bytes()], "x")


def test_impossible_settings_and_unknown_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.inflab"
    path.write_bytes(MAGIC + header(config={"block_size": -1}))
    with RunReader(path) as reader, pytest.raises(RunFileError, match="block_size"):
        reader.header.engine_config()
    path.write_bytes(MAGIC + header(config={"block_size": 8, "from_the_future": 1}))
    with RunReader(path) as reader:
        assert reader.header.engine_config().block_size == 8


def test_recording_stops_at_its_limit_and_the_file_stays_valid(tmp_path: Path) -> None:
    config, recording = record(4, 400)
    writer = RunWriter(tmp_path / "run.inflab", new_header(config), max_bytes=20_000)
    writer.add(steps=recording.steps)
    writer.close()
    assert writer.full
    with RunReader(tmp_path / "run.inflab") as reader:
        steps = list(reader.all_steps())
        assert 0 < len(steps) < len(recording.steps) and steps == recording.steps[: len(steps)]


def test_a_file_of_the_first_format_still_opens() -> None:
    """Written by the version that introduced the format; never regenerate it."""
    with RunReader(DATA / "run_v1.inflab") as reader:
        log = RunLog(reader)
        assert reader.num_steps == 161 and log.traces()[0].output_tokens > 0
        config = log.info.config
        state = state_at(log.steps(), reader.next_index - 1, config.num_kv_blocks)
        assert len(state.free) == config.num_kv_blocks and not state.running


def test_a_saved_run_reads_like_a_live_log(tmp_path: Path) -> None:
    recording = write(tmp_path / "run.inflab")
    with RunReader(tmp_path / "run.inflab") as reader:
        log = RunLog(reader)
        assert [trace.request_id for trace in log.traces()] == [e.trace.request_id for e in recording.opened_events]
        middle = recording.steps[len(recording.steps) // 2]
        snapshot = log.snapshot(upto=middle.index)
        assert snapshot.steps[-1] == middle
        for view in snapshot.requests:
            then = view_at(view, middle)
            sampled = [
                row.sampled
                for step in recording.steps[: middle.index + 1]
                for row in step.scheduled
                if row.request_id == view.trace.request_id and row.sampled >= 0
            ]
            assert len(then.trace.token_times) == len(sampled) == len(then.tokens)
            assert (then.trace.finish_reason is None) or then.trace.finished <= middle.end


def test_the_library_of_runs(tmp_path: Path) -> None:
    write(tmp_path / "run.inflab", actions=100)
    library = RunLibrary(tmp_path / "runs")
    assert library.list() == []
    name = library.save(tmp_path / "run.inflab", "first run")
    assert library.save(tmp_path / "run.inflab", "first run") == "first run (2)"
    assert {info.name for info in library.list()} == {name, "first run (2)"}
    assert all(info.steps > 0 and info.model == "scripted" and not info.problem for info in library.list())
    with pytest.raises(ValueError, match="already"):
        library.rename(name, "first run (2)")
    assert library.rename(name, "lecture 1") == "lecture 1"
    library.delete("first run (2)")
    with pytest.raises(ValueError, match="no saved run"):
        library.delete("first run (2)")
    uploaded = library.bring_in([library.path("lecture 1").read_bytes()], "../../etc/lecture 1")
    assert library.path(uploaded).parent == library.folder and len(library.list()) == 2
    with pytest.raises(ValueError, match="MiB"):
        library.bring_in([bytes(1000)] * 3, "big", max_bytes=2048)
    assert len(library.list()) == 2


@pytest.mark.parametrize("name", ["", "...", "////", "\x00", " - "])
def test_names_without_anything_usable_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        clean_name(name)


@pytest.mark.parametrize("name", ["../x", "a/b", "C:\\x", "x\x00y", "." * 50 + "a", "n" * 500])
def test_no_name_leaves_the_folder(name: str) -> None:
    clean = clean_name(name)
    assert "/" not in clean and "\\" not in clean and not clean.startswith(".") and len(clean) <= 80
