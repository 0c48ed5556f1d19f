r"""Run files: everything a lab recorded, in one file that describes itself.

::

    file    "INFLAB\r\n" │ frame │ frame │ frame │ …
    frame   kind 1 byte │ length 4 │ crc32 4 │ first 8 │ count 4 │ payload: zlib(msgpack list of records)

The first frame is the header: format version, configuration, model, weights, device, versions, workload, seed. Frames are
only ever appended, so a file is readable while it is being written and, after a crash, up to its last whole frame. The
fields ``first`` (step of the first record of a step or token frame) and ``count`` let a reader find a step without decoding
all that comes before it.

Opening never runs code and never trusts a length: frames, their unpacked sizes and counts are bounded, check sums are
verified, records are decoded into typed structs, and what does not fit gives a ``RunFileError`` that says where.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.core.config import EngineConfig
from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.trace import StepTrace

MAGIC = b"INFLAB\r\n"
FORMAT = 1
"""Version of the format. Readers accept every version up to their own."""
SUFFIX = ".inflab"
MAX_PACKED = 16 * 1024 * 1024
"""Bytes of a frame in the file."""
MAX_UNPACKED = 64 * 1024 * 1024
"""Bytes of a frame once unpacked."""
MAX_FRAMES = 1_000_000
MAX_BLOCKS = 4_000_000
"""Largest pool that a file may speak of, in blocks."""
MAX_FILE = 8 * 1024**3
"""Bytes; a longer file is refused."""
STEPS_PER_FRAME = 128
_FRAME = struct.Struct("<cIIQI")
_CACHED_FRAMES = 32


class RunFileError(ValueError):
    """The file is damaged, foreign, hostile or too new. The message says where and what to do."""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What produced the numbers of a run."""

    title: str = ""
    created: float = 0.0
    """Unix time, seconds."""
    config: dict[str, Any] = {}
    """Engine settings by name."""
    model: dict[str, Any] = {}
    """Model, weights, device, dtype, threads, versions, by name."""
    workload: dict[str, Any] = {}
    """What was asked of the engine, if a workload asked."""
    seed: int | None = None
    lab_version: str = ""
    format: int = FORMAT

    def engine_config(self) -> EngineConfig:
        """The configuration; settings that this version doesn't know are left out.

        Raises:
            RunFileError: the settings are impossible.
        """
        known = {name: value for name, value in self.config.items() if name in EngineConfig.__struct_fields__}
        try:
            return EngineConfig(**known)
        except (ValueError, TypeError) as error:
            raise RunFileError(f"the file's engine settings are impossible: {error}") from None


_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[bytes, Any] = {
    b"H": msgspec.msgpack.Decoder(list[RunHeader]),
    b"S": msgspec.msgpack.Decoder(list[StepTrace]),
    b"O": msgspec.msgpack.Decoder(list[OpenedRequest]),
    b"T": msgspec.msgpack.Decoder(list[TokenEvent]),
    b"C": msgspec.msgpack.Decoder(list[ClosedRequest]),
}


class RunWriter:
    """Appends records to a new run file; buffers up to a frame of each kind.

    Not thread-safe: one thread writes. A file that reached ``max_bytes`` takes no more (``full`` says so) and stays valid.

    Args:
        path: the file to create (refused if it exists).
        header: what the run is.
        max_bytes: size at which recording stops.
    """

    def __init__(self, path: Path, header: RunHeader, max_bytes: int = 512 * 1024 * 1024) -> None:
        self.path = path
        self.full = False
        self.bytes_written = 0
        self.last_step = -1
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115  (closed by close())
        self._file.write(MAGIC)
        self._buffers: dict[bytes, list[Any]] = {kind: [] for kind in (b"S", b"O", b"T", b"C")}
        self._write(b"H", [header], 0)
        self._file.flush()

    def add(
        self,
        *,
        opened: Sequence[OpenedRequest] = (),
        steps: Sequence[StepTrace] = (),
        tokens: Sequence[TokenEvent] = (),
        closed: Sequence[ClosedRequest] = (),
    ) -> None:
        """Take records, oldest first in each list."""
        if self.full:
            return
        buffers = self._buffers
        buffers[b"O"].extend(opened)
        buffers[b"T"].extend(tokens)
        buffers[b"C"].extend(closed)
        for step in steps:
            if buffers[b"S"] and step.index != buffers[b"S"][-1].index + 1:
                self._flush_kind(b"S")
            buffers[b"S"].append(step)
            self.last_step = step.index
            if len(buffers[b"S"]) >= STEPS_PER_FRAME:
                self._flush_kind(b"S")
        for kind, most in ((b"O", 256), (b"T", 4096), (b"C", 256)):
            if len(buffers[kind]) >= most:
                self._flush_kind(kind)

    def flush(self) -> None:
        """Write what is buffered, so that readers (and a crash) find it."""
        if self._file.closed:
            return
        for kind in self._buffers:
            self._flush_kind(kind)
        self._file.flush()

    def close(self) -> None:
        """Flush and close; closing twice is harmless."""
        self.flush()
        self._file.close()

    def _flush_kind(self, kind: bytes) -> None:
        records = self._buffers[kind]
        if records:
            self._buffers[kind] = []
            self._write(kind, records, _first_step(kind, records))

    def _write(self, kind: bytes, records: list[Any], first: int) -> None:
        if self.full:
            return
        body = _encode(records)
        packed = zlib.compress(body, 1)
        if (len(body) > MAX_UNPACKED or len(packed) > MAX_PACKED) and len(records) > 1:
            half = len(records) // 2
            self._write(kind, records[:half], first)
            self._write(kind, records[half:], _first_step(kind, records[half:]))
            return
        self._file.write(_FRAME.pack(kind, len(packed), zlib.crc32(packed), first, len(records)))
        self._file.write(packed)
        self.bytes_written += _FRAME.size + len(packed)
        self.full = self.bytes_written >= self._max_bytes


class _Frame(msgspec.Struct, frozen=True, gc=False):
    kind: bytes
    offset: int
    length: int
    crc: int
    first: int
    count: int


class RunReader:
    """Reads a run file, one that is still being written too (``refresh`` looks for new frames).

    Opening reads the frame headers only; records are decoded when they are asked for, a few frames being kept.

    Args:
        path: the file.

    Raises:
        RunFileError: not a run file, or a damaged header.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115  (closed by close())
        try:
            size = os.fstat(self._file.fileno()).st_size
            if size > MAX_FILE:
                raise RunFileError(f"{path.name} has {size} bytes, more than the {MAX_FILE} that a run file may have")
            if self._file.read(len(MAGIC)) != MAGIC:
                raise RunFileError(f"{path.name} is not a run file of the lab: it does not begin with {MAGIC[:6].decode()}")
            self._frames: list[_Frame] = []
            self._step_frames: list[int] = []
            """Places of step frames in ``_frames``."""
            self._lock = threading.RLock()
            self._cache: OrderedDict[int, list[Any]] = OrderedDict()
            self._end = len(MAGIC)
            self.damage = ""
            """Why reading stopped before the end of the file, '' when it did not."""
            self.refresh()
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh(self) -> None:
        """Look for whole frames after the last one known."""
        with self._lock:
            self._scan()

    def _scan(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        while self._end + _FRAME.size <= size and len(self._frames) < MAX_FRAMES:
            self._file.seek(self._end)
            kind, length, crc, first, count = _FRAME.unpack(self._file.read(_FRAME.size))
            if kind not in _DECODERS or length > MAX_PACKED or count > MAX_UNPACKED // 8 or first > 2**48:
                self.damage = f"unreadable from byte {self._end} on; what comes before it is shown"
                return
            start = self._end + _FRAME.size
            if start + length > size:
                self.damage = f"the last record is incomplete (byte {self._end}); what comes before it is shown"
                return
            frame = _Frame(kind, start, length, crc, first, count)
            if kind == b"S" and self._step_frames:
                before = self._frames[self._step_frames[-1]]
                if first < before.first + before.count:
                    self.damage = f"step {first} comes after step {before.first + before.count - 1} (byte {self._end})"
                    return
            if kind == b"S":
                self._step_frames.append(len(self._frames))
            self._frames.append(frame)
            self._end = start + length
        self.damage = ""

    def _read_header(self) -> RunHeader:
        if not self._frames or self._frames[0].kind != b"H":
            raise RunFileError(f"{self.path.name} has no header: {self.damage or 'it is empty'}")
        (header,) = self._records(0, cache=False) or [RunHeader()]
        if header.format > FORMAT:
            raise RunFileError(
                f"{self.path.name} has format {header.format}, this lab reads up to {FORMAT}: open it with a newer version"
            )
        blocks = header.config.get("num_kv_blocks", 1)
        if not isinstance(blocks, int) or not 0 < blocks <= MAX_BLOCKS:
            raise RunFileError(f"{self.path.name} speaks of a pool of {blocks!r} blocks; at most {MAX_BLOCKS} can be shown")
        return header

    def _records(self, place: int, cache: bool = True) -> list[Any]:
        """The records of the ``place``-th frame."""
        with self._lock:
            if place in self._cache:
                self._cache.move_to_end(place)
                return self._cache[place]
            records = self._decode(self._frames[place])
            if cache:
                self._cache[place] = records
                while len(self._cache) > _CACHED_FRAMES:
                    self._cache.popitem(last=False)
            return records

    def _decode(self, frame: _Frame) -> list[Any]:
        self._file.seek(frame.offset)
        packed = self._file.read(frame.length)
        where = f"{self.path.name}, record at byte {frame.offset}"
        if len(packed) != frame.length or zlib.crc32(packed) != frame.crc:
            raise RunFileError(f"{where}: the check sum is wrong, the file is damaged")
        unpack = zlib.decompressobj()
        try:
            body = unpack.decompress(packed, MAX_UNPACKED)
            if unpack.unconsumed_tail:
                raise RunFileError(f"{where}: it unpacks to more than {MAX_UNPACKED} bytes")
            records = _DECODERS[frame.kind].decode(body)
        except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
            raise RunFileError(f"{where}: {error}") from None
        if len(records) != frame.count or (frame.kind == b"S" and not _consecutive(records, frame.first)):
            raise RunFileError(f"{where}: it holds other records than it says")
        return records

    def _all(self, kind: bytes) -> Iterator[Any]:
        for place, frame in enumerate(self._frames):
            if frame.kind == kind:
                yield from self._records(place, cache=False)

    def opened(self) -> Iterator[OpenedRequest]:
        """All requests as they entered, oldest first."""
        return self._all(b"O")

    def closed(self) -> Iterator[ClosedRequest]:
        """All requests that ended, oldest first."""
        return self._all(b"C")

    def tokens(self) -> Iterator[TokenEvent]:
        """All token events, oldest first."""
        return self._all(b"T")

    def tokens_of(self, request_id: str, first_step: int, last_step: int) -> list[TokenEvent]:
        """Token events of one request that was sampled in steps ``first_step`` to ``last_step``."""
        frames = [place for place, frame in enumerate(self._frames) if frame.kind == b"T"]
        start = max(0, bisect_left(frames, first_step, key=lambda place: self._frames[place].first) - 1)
        found: list[TokenEvent] = []
        for place in frames[start:]:
            if self._frames[place].first > last_step:
                break
            found.extend(token for token in self._records(place) if token.request_id == request_id)
        return found

    def all_steps(self) -> Iterator[StepTrace]:
        """All steps, oldest first."""
        return self._all(b"S")

    @property
    def first_index(self) -> int:
        """Index of the first recorded step (0 when there is none)."""
        return self._frames[self._step_frames[0]].first if self._step_frames else 0

    @property
    def next_index(self) -> int:
        """Index after the last recorded step."""
        if not self._step_frames:
            return 0
        last = self._frames[self._step_frames[-1]]
        return last.first + last.count

    @property
    def num_steps(self) -> int:
        """Recorded steps."""
        return sum(self._frames[place].count for place in self._step_frames)

    def steps(self, first: int = 0, last: int | None = None) -> list[StepTrace]:
        """The recorded steps with ``first <= index <= last``, oldest first; only their frames are decoded."""
        last = self.next_index - 1 if last is None else last
        start = max(0, bisect_right(self._step_frames, first, key=lambda place: self._frames[place].first) - 1)
        found: list[StepTrace] = []
        for place in self._step_frames[start:]:
            if self._frames[place].first > last:
                break
            found.extend(step for step in self._records(place) if first <= step.index <= last)
        return found


def _first_step(kind: bytes, records: list[Any]) -> int:
    return {b"S": lambda: records[0].index, b"T": lambda: records[0].step}.get(kind, lambda: 0)()


def _consecutive(steps: list[StepTrace], first: int) -> bool:
    return all(step.index == first + place for place, step in enumerate(steps))


def new_header(config: EngineConfig, **fields: Any) -> RunHeader:
    """A header for a run that starts now."""
    return RunHeader(created=time.time(), config=msgspec.to_builtins(config), **fields)
