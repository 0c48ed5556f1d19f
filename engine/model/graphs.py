"""CUDA graphs: a whole decode step, recorded once and replayed with one launch.

At small batches a GPU computes a layer faster than Python can ask for the next one. A graph removes the asking: it holds
the kernels of a step *with the addresses and sizes that they were recorded with*. So everything that changes from step to
step lives in buffers that never move, and everything that doesn't is part of the graph's key::

    step       rows ──stage──▶ [token ids | sources | positions | slots | … | block tables]       one copy to the GPU
                                      │ read by
    replay                     graph (16 rows, 8 splits, "draw")  ──▶ tokens, finite                one launch
                                      ▲ chosen by
    11 rows, one draws ──▶ smallest bucket that holds them: 16; rows 11 … 15 are padding

Padding rows compute like any other, on the first row's token at position 0: they write nowhere (slot −1) and read one slot
of the null block. A buffer's contents from an earlier step are never read: every row of the bucket is written, and the
table entries behind a row's last block are masked in the kernel.

The tokens of a step stay on the GPU for the next one, which may be asked for before the host knows them. ``sources`` says
where a row's token is: among those, or among the ones that the host sent::

    candidates   [ 17  5 301  · | 44  0  0  0 ]      tokens of the step before | token ids from the host
    sources      [ 2  0  4  5 ]                      row 0 goes on with what row 2 sampled, row 2 with the host's 44

Graphs are captured largest first, into one memory pool: the smaller ones then fit into what the largest one needed.
They never run at the same time, so they may share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol

import numpy as np
import torch

from engine.core.request import Request
from engine.core.runner import PENDING, StepBatch
from engine.model.attention import Attention, Plan
from engine.model.device import Device, device_of
from engine.model.sampler import choose, draw_of, needs_sampler
from engine.model.staging import aligned
from engine.model.transformer import Transformer

Sampling = Literal["greedy", "draw", "logits"]
"""What ends a graph: the most likely token, a draw at a temperature, or logits for the ordinary sampler."""
Replay = Callable[[], None]


class ResidentAttention(Attention, Protocol):
    """A backend that can plan decodes over tensors on the device, without knowing what is in them."""

    def splits_for(self, tiles: int, longest: int) -> int:
        """Parts into which to cut the keys of ``tiles`` decodes whose longest sequence has ``longest`` keys."""
        ...

    def plan_decodes(self, slots: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, splits: int) -> Plan:
        """A plan for one token a row, good for whatever the tensors hold when it is used.

        Args:
            slots: [rows] int64, where K and V go; −1 for nowhere.
            tables: [rows, width] int32 block tables; entries behind a row's last block may be anything.
            tiles: [rows, 4] int32: row, 1, position, row.
            splits: parts that each row's keys are cut into.
        """
        ...


@dataclass(slots=True)
class DecodeRow:
    """One token of a sequence, at position ``context``."""

    token_id: int
    """Means nothing where ``source`` names a row."""
    context: int
    block_table: list[int]
    temperature: float = 1.0
    point: float = -1.0
    """In [0, 1) it draws; below 0 the row is greedy. See ``engine.model.sampler.choose``."""
    source: int = -1
    """Row of the step before whose token this row goes on with; −1: ``token_id``."""
    writes: bool = True
    """Whether K and V are stored."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything that is baked into a graph apart from addresses: grid sizes (rows, splits) and the kernels at its end."""

    rows: int
    splits: int
    sampling: Sampling


class GraphBackend(Protocol):
    """Records and replays. CUDA in earnest; tests bring their own."""

    def capture(self, work: Replay) -> Replay:
        """Record what ``work`` does to tensors; calling the result does it again, on the same addresses."""
        ...

    def allocated_bytes(self) -> int:
        """Device memory in use; the difference around captures is what graphs cost."""
        ...


class CudaGraphs:
    """Captures on a CUDA device; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def capture(self, work: Replay) -> Replay:
        """Run ``work`` once (kernels compile, libraries take their workspaces), then record it on the same stream."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            try:
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    work()
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                # torch keeps random numbers' state for all graphs in tensors that the first one makes. Made in inference
                # mode (as in the check at start), they could not be written by a graph that is recorded outside of it.
                # Other threads of the process may go on calling CUDA meanwhile: only this one's calls are watched.
                ordinary = torch.inference_mode(False)
                recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
                with ordinary, recording:
                    work()
            finally:
                torch.cuda.set_stream(current)  # a recording that fails leaves its own stream behind
        return graph.replay

    def allocated_bytes(self) -> int:
        """Bytes of the device that are not free, whoever holds them; torch's own spare memory counts as free."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all labs: matrix libraries keep a workspace for each stream that they have ever run on."""
    return torch.cuda.Stream(device)


def buckets(most: int) -> list[int]:
    """Batch sizes to capture, up to ``most``: doubling to 16, then two to a doubling, so that at most a third is padding."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < most:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [size for size in sizes if size < most] + [most]


_FIELDS: dict[str, tuple[str, torch.dtype]] = {
    "token_ids": ("i8", torch.int64),
    "sources": ("i8", torch.int64),
    "positions": ("i8", torch.int64),
    "slots": ("i8", torch.int64),
    "points": ("f8", torch.float64),
    "temperatures": ("f4", torch.float32),
    "tiles": ("i4", torch.int32),
    "tables": ("i4", torch.int32),
}
"""Inputs in the order in which they lie in memory: the tables last, so that a small bucket copies a prefix."""


class _Staging:
    """The inputs on the host, laid out as on the device."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: Device) -> None:
        sizes = {name: math.prod(shapes[name]) * np.dtype(kind).itemsize for name, (kind, _) in _FIELDS.items()}
        self.starts: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self.starts[name] = total
            total += aligned(size)
        self.flat = device.pinned(total)
        self.flat.zero_()
        raw = self.flat.numpy()
        self.fields = {
            name: raw[self.starts[name] :][: sizes[name]].view(kind).reshape(shapes[name])
            for name, (kind, _) in _FIELDS.items()
        }
        self.copied = device.event()
        """Behind the last copy out of this memory."""
        self.tables: list[list[int]] = [[] for _ in range(shapes["tables"][0])]
        """Each row's block table as it is in ``fields``: a decode's table only grows, so mostly nothing is to be written."""


class DecodeBuffers:
    """Inputs and outputs of decode graphs at addresses that never change.

    Args:
        most_rows: rows of the largest graph.
        max_model_len: longest sequence; with ``block_size`` it gives the width of the block tables.
        block_size: of the KV pool.
        vocab_size: width of the logits.
        where: torch's name of the device on which the graphs run.
        device: its copies and events; default: those of ``where``.
    """

    def __init__(
        self,
        most_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        where: torch.device,
        device: Device | None = None,
    ) -> None:
        self.most_rows, self.max_model_len, self.block_size = most_rows, max_model_len, block_size
        self.table_width = -(-max_model_len // block_size)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_FIELDS, (most_rows,))
        shapes |= {"tiles": (most_rows, 4), "tables": (most_rows, self.table_width)}
        self._device = device or device_of(where)
        # Two: one is filled for the next step while the copy out of the other may still be under way.
        self._staging = [_Staging(shapes, self._device) for _ in range(2)]
        self._turn = 0
        # [finite | tokens | inputs]: tokens lie before the token ids from the host, so that one index reaches both.
        self._own = aligned(most_rows * 8) // 8
        memory = torch.zeros(2 * self._own * 8 + self._staging[0].flat.numel(), dtype=torch.uint8, device=where)
        self.flat = memory[2 * self._own * 8 :]
        """The inputs."""
        numbers = memory[: (3 * self._own) * 8].view(torch.int64)
        self.candidates = numbers[self._own : 2 * self._own + most_rows]
        self.outcome = numbers[: 2 * self._own].view(2, self._own)
        """What a step leaves: whether each row was finite (1 or 0), and its token."""
        self.finite, self.tokens = self.outcome[0, :most_rows], self.outcome[1, :most_rows]
        self.logits = torch.zeros((most_rows, vocab_size), dtype=torch.float32, device=where)
        """[rows, vocabulary]; written by the sampling "logits" only."""
        views = {name: self._view(name, shapes[name]) for name in _FIELDS}
        self.token_ids, self.sources = views["token_ids"], views["sources"]
        self.positions, self.slots = views["positions"], views["slots"]
        self.temperatures, self.points = views["temperatures"], views["points"]
        self.tiles, self.tables = views["tiles"], views["tables"]

    @property
    def num_bytes(self) -> int:
        """Device memory that the buffers take."""
        return self.outcome.nbytes + self.flat.nbytes + self.logits.nbytes

    def _view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        start, dtype = self._staging[0].starts[name], _FIELDS[name][1]
        return self.flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def fill(self, rows: Sequence[DecodeRow], bucket: int) -> None:
        """``stage`` and ``send``.

        Raises:
            ValueError: as ``stage``.
        """
        self.stage(rows, bucket)
        self.send(bucket)

    def stage(self, rows: Sequence[DecodeRow], bucket: int) -> None:
        """Write ``rows`` and padding up to ``bucket`` into the spare memory on the host.

        Raises:
            ValueError: for more rows than ``bucket`` or ``most_rows``, or a block table wider than the buffers.
        """
        count = len(rows)
        if not count <= bucket <= self.most_rows:
            raise ValueError(f"{count} rows in a bucket of {bucket}, but the buffers hold {self.most_rows}")
        widest = max((len(row.block_table) for row in rows), default=1)
        if widest > self.table_width:
            raise ValueError(
                f"a block table of {widest} blocks, but the buffers hold {self.table_width}: raise max_model_len"
            )
        staging = self._staging[1 - self._turn]
        staging.copied.wait()
        self._turn = 1 - self._turn
        size, into, padding = self.block_size, staging.fields, bucket - count
        contexts = [row.context for row in rows] + [0] * padding
        into["token_ids"][:bucket] = [max(0, row.token_id) for row in rows] + [0] * padding
        sources = [self._own + place if row.source < 0 else row.source for place, row in enumerate(rows)]
        into["sources"][:bucket] = sources + [self._own] * padding
        into["positions"][:bucket] = contexts
        slots = [row.block_table[row.context // size] * size + row.context % size if row.writes else -1 for row in rows]
        into["slots"][:bucket] = slots + [-1] * padding
        into["temperatures"][:bucket] = [row.temperature for row in rows] + [1.0] * padding
        into["points"][:bucket] = [row.point for row in rows] + [-1.0] * padding
        into["tiles"][:bucket] = [(row, 1, context, row) for row, context in enumerate(contexts)]
        for place, table in enumerate([row.block_table for row in rows] + [[0]] * padding):
            self._write_table(staging, place, table)

    def send(self, bucket: int) -> None:
        """Ask for the copy of what was staged last to the device."""
        staging = self._staging[self._turn]
        end = staging.starts["tables"] + bucket * self.table_width * 4
        self._device.send(staging.flat[:end], self.flat[:end])
        staging.copied.record()

    @staticmethod
    def _write_table(staging: _Staging, place: int, table: list[int]) -> None:
        known = staging.tables[place]
        same = len(known) if table[: len(known)] == known else 0
        if same < len(table):
            staging.fields["tables"][place, same : len(table)] = table[same:]
        if same < len(table) or not same:
            staging.tables[place] = list(table)


@dataclass(slots=True)
class DecodeOutput:
    """What a replay left on the device: valid until the next one. Reading it waits for the GPU."""

    outcome: torch.Tensor
    """[2, rows] int64: whether finite, and token."""
    logits: torch.Tensor | None
    """[rows, vocabulary] float32; only with the sampling "logits", where the tokens mean nothing."""

    @property
    def finite(self) -> torch.Tensor:
        """[rows] bool."""
        return self.outcome[0] != 0

    @property
    def tokens(self) -> torch.Tensor:
        """[rows] int64."""
        return self.outcome[1]


class DecodeStep:
    """What a graph records: forward pass and sampling over the buffers' first rows.

    Args:
        model: whose rotary tables reach the buffers' longest sequence.
        attention: with the pool.
        buffers: to read and write.
        fused: as for ``Transformer.forward``.

    Raises:
        ValueError: the rotary tables are too short; growing them later would not reach a graph.
    """

    def __init__(
        self, model: Transformer, attention: ResidentAttention, buffers: DecodeBuffers, fused: bool = False
    ) -> None:
        self.model, self.attention, self.buffers, self.fused = model, attention, buffers, fused
        self._held = model.rotary_tables
        """A graph reads them by address: should the model replace them by longer ones, these must stay."""
        if self._held[0].shape[0] < buffers.max_model_len:
            raise ValueError(
                f"rotary tables of {self._held[0].shape[0]} positions for sequences of {buffers.max_model_len}: call "
                "prepare_positions first"
            )

    @torch.inference_mode()
    def __call__(self, key: GraphKey) -> None:
        """Compute a step of ``key.rows`` rows."""
        buffers, n = self.buffers, key.rows
        plan = self.attention.plan_decodes(buffers.slots[:n], buffers.tables[:n], buffers.tiles[:n], key.splits)
        token_ids = buffers.candidates.index_select(0, buffers.sources[:n])
        hidden = self.model.forward(token_ids, buffers.positions[:n], self.attention, plan, self.fused)
        last = self.model.normalise(hidden, self.fused)
        logits = self.model.logits(last, buffers.logits[:n] if key.sampling == "logits" else None)
        if key.sampling == "draw":
            tokens, finite = choose(logits, buffers.temperatures[:n], buffers.points[:n])
        else:
            tokens, finite = choose(logits)
        buffers.tokens[:n].copy_(tokens)
        buffers.finite[:n].copy_(finite & torch.isfinite(last).all(-1))


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step whose inputs lie ready on the host."""

    key: GraphKey
    count: int


class DecodeGraphs:
    """The graphs of one lab: which exist, which one serves a step, what they cost.

    Args:
        step: computes a step for a key over the buffers.
        buffers: that ``step`` reads and writes.
        backend: records and replays.
        splits_for: splits of a bucket's attention (``TritonAttention.splits_for`` with the longest context allowed).
        sampling: kinds to capture for every bucket.
        sizes: the buckets, ascending; default ``buckets(buffers.most_rows)``.
    """

    def __init__(
        self,
        step: Callable[[GraphKey], None],
        buffers: DecodeBuffers,
        backend: GraphBackend,
        splits_for: Callable[[int], int],
        sampling: Sequence[Sampling] = ("greedy", "draw", "logits"),
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.buffers = buffers
        self._step, self._backend, self._splits_for, self._sampling = step, backend, splits_for, sampling
        self._buckets = list(sizes or buckets(buffers.most_rows))
        self._graphs: dict[GraphKey, Replay] = {}
        self.graph_bytes = 0
        """Device memory taken by all graphs, measured; to be left out of what the KV pool may have."""

    def key_for(self, rows: int, sampling: Sampling) -> GraphKey | None:
        """The smallest graph for ``rows``; None when there are more than the largest one holds."""
        bucket = next((size for size in self._buckets if size >= rows), None)
        return None if bucket is None else GraphKey(bucket, self._splits_for(bucket), sampling)

    def capture(self) -> None:
        """Record all graphs, the largest first, on padding alone: nothing is written to the pool."""
        before = self._backend.allocated_bytes()
        for bucket in reversed(self._buckets):
            for sampling in self._sampling:
                key = GraphKey(bucket, self._splits_for(bucket), sampling)
                self.buffers.fill([], bucket)
                self._graphs[key] = self._backend.capture(partial(self._step, key))
        self.graph_bytes = max(0, self._backend.allocated_bytes() - before)

    def stage(self, rows: Sequence[DecodeRow], sampling: Sampling) -> StagedStep | None:
        """Write a step's inputs on the host; None when no captured graph fits and it must be computed the ordinary way."""
        key = self.key_for(len(rows), sampling)
        if key is None or key not in self._graphs:
            return None
        self.buffers.stage(rows, key.rows)
        return StagedStep(key, len(rows))

    def launch(self, staged: StagedStep) -> DecodeOutput:
        """Ask for the step that was staged last: its copy to the device and the replay."""
        self.buffers.send(staged.key.rows)
        self._graphs[staged.key]()
        return self._output(staged.count, staged.key.sampling)

    def run(self, rows: Sequence[DecodeRow], sampling: Sampling) -> DecodeOutput | None:
        """``stage`` and ``launch``; None when no captured graph fits."""
        staged = self.stage(rows, sampling)
        return None if staged is None else self.launch(staged)

    def run_eagerly(self, rows: Sequence[DecodeRow], sampling: Sampling, padded: bool = False) -> DecodeOutput:
        """The same step without a graph, to compare with; ``padded`` up to the bucket that a graph would have.

        Raises:
            ValueError: for more rows than the buffers hold.
        """
        key = self.key_for(len(rows), sampling) if padded else None
        key = key or GraphKey(len(rows), self._splits_for(len(rows)), sampling)
        self.buffers.fill(rows, key.rows)
        self._step(key)
        return self._output(len(rows), sampling)

    def _output(self, count: int, sampling: Sampling) -> DecodeOutput:
        logits = self.buffers.logits[:count] if sampling == "logits" else None
        return DecodeOutput(self.buffers.outcome[:, :count], logits)


def decode_rows(batch: StepBatch, places: Mapping[Request, int]) -> tuple[list[DecodeRow], Sampling] | None:
    """A step's work as rows of a graph and how they sample; None unless each is one token that samples, or padding.

    Args:
        batch: the step.
        places: row of each request in the step before, whose token a pending one is.

    Raises:
        KeyError: a token is pending of a request that didn't sample in the step before.
    """
    rows: list[DecodeRow] = []
    logits = draws = False
    for work in batch.work:
        request, token = work.request, work.token_ids[0]
        if len(work.token_ids) != 1 or not work.block_table:
            return None
        if request is None:
            rows.append(DecodeRow(token, work.context, work.block_table, writes=False))
            continue
        if work.samples != (request,):
            return None
        logits = logits or needs_sampler(request)
        draws = draws or not request.params.greedy
        source = place_of(request, places) if token == PENDING else -1
        rows.append(DecodeRow(token, work.context, work.block_table, *draw_of(request), source))
    if not rows:
        return None
    return rows, "logits" if logits else "draw" if draws else "greedy"


def place_of(request: Request | None, places: Mapping[Request, int]) -> int:
    """Where the pending token of a request is among those of the step before.

    Raises:
        KeyError: the step before didn't sample for it.
    """
    place = places.get(request, -1) if request is not None else -1
    if place < 0:
        raise KeyError(f"a token of {request!r} is pending, but the step submitted before doesn't sample for it")
    return place


def estimated_graph_bytes(model: Transformer, max_num_seqs: int) -> int:
    """Device memory that graphs for up to ``max_num_seqs`` rows will take, roughly, before any is recorded.

    The largest step's tensors, of which the widest are the logits: in the model's format, as float32 in the buffers and
    in the pool, as float32 weights, and twice as float64 while a token is drawn. Then two layers' activations, and what
    the driver keeps for each graph.
    """
    spec, element = model.spec, model.weights.embedding.element_size()
    layer = 4 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.qkv_heads * spec.head_dim
    row = spec.vocab_size * (element + 3 * 4 + 2 * 8) + 2 * layer * element
    return max_num_seqs * row + 3 * len(buckets(max_num_seqs)) * (2 << 20)
