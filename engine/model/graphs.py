"""CUDA graphs: a whole decode step, recorded once and replayed with one launch.

At small batches a GPU computes a layer faster than Python can ask for the next one. A graph removes the asking: it holds
the kernels of a step *with the addresses and sizes that they were recorded with*. So everything that changes from step to
step lives in buffers that never move, and everything that doesn't is part of the graph's key::

    step       rows ──fill──▶ [token ids | positions | slots | temperatures | … | block tables]   one copy to the GPU
                                     │ read by
    replay                    graph (16 rows, 8 splits, "draw")  ──▶ tokens, finite                one launch
                                     ▲ chosen by
    11 rows, one draws ──▶ smallest bucket that holds them: 16; rows 11 … 15 are padding

Padding rows compute like any other, on token 0 at position 0: they write nowhere (slot −1) and read one slot of the null
block. A buffer's contents from an earlier step are never read: ``fill`` writes every row of the bucket, and the table
entries behind a row's last block are masked in the kernel.

Graphs are captured largest first, into one memory pool: the smaller ones then fit into what the largest one needed.
They never run at the same time, so they may share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from engine.core.request import Request
from engine.core.runner import StepBatch
from engine.model.attention import Attention, Plan
from engine.model.sampler import draw, uniform
from engine.model.transformer import Transformer

Sampling = Literal["greedy", "draw", "logits"]
"""What ends a graph: the most likely token, a draw at a temperature, or logits for the ordinary sampler."""
Replay = Callable[[], None]


class ResidentAttention(Attention, Protocol):
    """A backend that can plan decodes over tensors on the device, without knowing what is in them."""

    def plan_decodes(self, slots: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, splits: int) -> Plan:
        """A plan for one token a row, good for whatever the tensors hold when it is used.

        Args:
            slots: [rows] int64, where K and V go; −1 for nowhere.
            tables: [rows, width] int32 block tables; entries behind a row's last block may be anything.
            tiles: [rows, 4] int32: row, 1, position, row.
            splits: parts that each row's keys are cut into.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request's decode: ``token_id`` at position ``context``; temperature 0 is greedy; ``point`` in [0, 1) draws."""

    token_id: int
    context: int
    block_table: list[int]
    temperature: float = 0.0
    point: float = 0.0


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
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Replay) -> Replay:
        """Run ``work`` once on a side stream (kernels compile, libraries take their workspaces), then record it."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay

    def allocated_bytes(self) -> int:
        """Bytes of the device that are not free, whoever holds them."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


def buckets(most: int) -> list[int]:
    """Batch sizes to capture, up to ``most``: doubling to 16, then two to a doubling, so that at most a third is padding."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < most:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [size for size in sizes if size < most] + [most]


_FIELDS: dict[str, tuple[str, torch.dtype]] = {
    "token_ids": ("i8", torch.int64),
    "positions": ("i8", torch.int64),
    "slots": ("i8", torch.int64),
    "temperatures": ("f8", torch.float64),
    "points": ("f8", torch.float64),
    "tiles": ("i4", torch.int32),
    "tables": ("i4", torch.int32),
}
"""Inputs in the order in which they lie in memory: the tables last, so that a small bucket copies a prefix."""


class _Staging:
    """The inputs on the host, laid out as on the device; pinned where that speeds the copy up."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], pinned: bool) -> None:
        sizes = {name: math.prod(shapes[name]) * np.dtype(kind).itemsize for name, (kind, _) in _FIELDS.items()}
        self.starts: dict[str, int] = {}
        total = 0
        for name, size in sizes.items():
            self.starts[name] = total
            total += -(-size // 16) * 16
        self.flat = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)
        raw = self.flat.numpy()
        self.fields = {
            name: raw[self.starts[name] :][: sizes[name]].view(kind).reshape(shapes[name])
            for name, (kind, _) in _FIELDS.items()
        }
        self.copied = torch.cuda.Event() if pinned else None
        self.tables: list[list[int]] = [[] for _ in range(shapes["tables"][0])]
        """Each row's block table as it is in ``fields``: a decode's table only grows, so mostly nothing is to be written."""

    def wait(self) -> None:
        """Until the last copy out of this memory is over."""
        if self.copied is not None:
            self.copied.synchronize()


class DecodeBuffers:
    """Inputs and outputs of decode graphs at addresses that never change.

    Args:
        most_rows: rows of the largest graph.
        max_model_len: longest sequence; with ``block_size`` it gives the width of the block tables.
        block_size: of the KV pool.
        device: where the graphs run.
    """

    def __init__(self, most_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.most_rows, self.block_size = most_rows, block_size
        self.table_width = -(-max_model_len // block_size)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_FIELDS, (most_rows,))
        shapes |= {"tiles": (most_rows, 4), "tables": (most_rows, self.table_width)}
        pinned = device.type == "cuda"
        # Two: one is filled for the next step while the copy out of the other may still be under way.
        self._staging = [_Staging(shapes, pinned) for _ in range(2)]
        self._turn = 0
        self.flat = torch.zeros(self._staging[0].flat.numel(), dtype=torch.uint8, device=device)
        views = {name: self._view(name, shapes[name]) for name in _FIELDS}
        self.token_ids, self.positions, self.slots = views["token_ids"], views["positions"], views["slots"]
        self.temperatures, self.points = views["temperatures"], views["points"]
        self.tiles, self.tables = views["tiles"], views["tables"]
        self.tokens = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self.finite = torch.zeros(most_rows, dtype=torch.bool, device=device)

    def _view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        start, dtype = self._staging[0].starts[name], _FIELDS[name][1]
        return self.flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def fill(self, rows: Sequence[DecodeRow], bucket: int) -> None:
        """Write ``rows`` and padding up to ``bucket``, and send it all to the device in one copy.

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
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        staging.wait()
        size, into = self.block_size, staging.fields
        padding = bucket - count
        contexts = [row.context for row in rows] + [0] * padding
        into["token_ids"][:bucket] = [row.token_id for row in rows] + [0] * padding
        into["positions"][:bucket] = contexts
        slots = [row.block_table[row.context // size] * size + row.context % size for row in rows]
        into["slots"][:bucket] = slots + [-1] * padding
        into["temperatures"][:bucket] = [row.temperature for row in rows] + [0.0] * padding
        into["points"][:bucket] = [row.point for row in rows] + [0.0] * padding
        into["tiles"][:bucket] = [(row, 1, context, row) for row, context in enumerate(contexts)]
        for place, table in enumerate([row.block_table for row in rows] + [[0]] * padding):
            self._write_table(staging, place, table)
        end = staging.starts["tables"] + bucket * self.table_width * 4
        self.flat[:end].copy_(staging.flat[:end], non_blocking=True)
        if staging.copied is not None:
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

    tokens: torch.Tensor
    finite: torch.Tensor
    logits: torch.Tensor | None
    """[rows, vocabulary] float32; only with the sampling "logits", where ``tokens`` means nothing."""


class DecodeStep:
    """What a graph records: forward pass and sampling over the buffers' first rows."""

    def __init__(self, model: Transformer, attention: ResidentAttention, buffers: DecodeBuffers) -> None:
        self.model, self.attention, self.buffers = model, attention, buffers

    @torch.inference_mode()
    def __call__(self, key: GraphKey) -> torch.Tensor | None:
        """Compute a step of ``key.rows`` rows; returns logits where the key asks for them."""
        buffers, n = self.buffers, key.rows
        plan = self.attention.plan_decodes(buffers.slots[:n], buffers.tables[:n], buffers.tiles[:n], key.splits)
        hidden = self.model.forward(buffers.token_ids[:n], buffers.positions[:n], self.attention, plan)
        last = self.model.normalise(hidden)
        logits = self.model.logits(last)
        best, tokens = logits.max(dim=-1)
        finite = torch.isfinite(last).all(-1) & torch.isfinite(best)
        if key.sampling == "draw":
            warm = buffers.temperatures[:n] > 0
            temperatures = torch.where(warm, buffers.temperatures[:n], 1.0).float().unsqueeze(1)
            weights = ((logits - best.unsqueeze(1)) / temperatures).exp_()
            tokens = torch.where(warm, draw(weights, buffers.points[:n]), tokens)
        buffers.tokens[:n].copy_(torch.where(finite, tokens, 0))
        buffers.finite[:n].copy_(finite)
        return logits if key.sampling == "logits" else None


class DecodeGraphs:
    """The graphs of one lab: which exist, which one serves a step, what they cost.

    Args:
        step: records a step for a key and returns its logits tensor, or None.
        buffers: that ``step`` reads and writes.
        backend: records and replays.
        splits_for: splits of a bucket's attention (``TritonAttention.splits_for`` with the longest context allowed).
        sampling: kinds to capture for every bucket.
        sizes: the buckets, ascending; default ``buckets(buffers.most_rows)``.
    """

    def __init__(
        self,
        step: Callable[[GraphKey], torch.Tensor | None],
        buffers: DecodeBuffers,
        backend: GraphBackend,
        splits_for: Callable[[int], int],
        sampling: Sequence[Sampling] = ("greedy", "draw", "logits"),
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.buffers = buffers
        self._step, self._backend, self._splits_for, self._sampling = step, backend, splits_for, sampling
        self._buckets = list(sizes or buckets(buffers.most_rows))
        self._graphs: dict[GraphKey, tuple[Replay, torch.Tensor | None]] = {}
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
                logits: list[torch.Tensor | None] = []
                replay = self._backend.capture(partial(self._record, key, logits))
                self._graphs[key] = (replay, logits[-1])
        self.graph_bytes = self._backend.allocated_bytes() - before

    def run(self, rows: Sequence[DecodeRow], sampling: Sampling) -> DecodeOutput | None:
        """Replay a step; None when no captured graph fits and the caller must compute it the ordinary way."""
        key = self.key_for(len(rows), sampling)
        if key not in self._graphs or key is None:
            return None
        replay, logits = self._graphs[key]
        self.buffers.fill(rows, key.rows)
        replay()
        return self._output(len(rows), logits)

    def run_eagerly(self, rows: Sequence[DecodeRow], sampling: Sampling, padded: bool = False) -> DecodeOutput:
        """The same step without a graph, to compare with; ``padded`` up to the bucket that a graph would have.

        Raises:
            ValueError: for more rows than the buffers hold.
        """
        key = self.key_for(len(rows), sampling) if padded else None
        key = key or GraphKey(len(rows), self._splits_for(len(rows)), sampling)
        self.buffers.fill(rows, key.rows)
        return self._output(len(rows), self._step(key))

    def _record(self, key: GraphKey, logits: list[torch.Tensor | None]) -> None:
        logits.append(self._step(key))

    def _output(self, count: int, logits: torch.Tensor | None) -> DecodeOutput:
        shown = None if logits is None else logits[:count]
        return DecodeOutput(self.buffers.tokens[:count], self.buffers.finite[:count], shown)


def decode_rows(batch: StepBatch) -> tuple[list[DecodeRow], Sampling] | None:
    """A step's work as rows of a graph and how they sample; None unless each is one token of a request that samples."""
    rows: list[DecodeRow] = []
    requests: list[Request] = []
    for work in batch.work:
        request = work.request
        if request is None or len(work.token_ids) != 1 or work.samples != (request,) or not work.block_table:
            return None
        requests.append(request)
        params = request.params
        point = 0.0 if params.greedy else uniform(request.seed, request.sample_index, request.num_output_tokens)
        temperature = 0.0 if params.greedy else params.temperature
        rows.append(DecodeRow(work.token_ids[0], work.context, work.block_table, temperature, point))
    if not rows:
        return None
    if any(_asks_for_more(request) for request in requests):
        return rows, "logits"
    return rows, "greedy" if all(request.params.greedy for request in requests) else "draw"


def _asks_for_more(request: Request) -> bool:
    """Whether the ordinary sampler must see the logits: for penalties, candidates, truncation, tokens not allowed yet."""
    params = request.params
    truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    early = request.num_output_tokens < params.min_tokens
    return params.logprobs is not None or params.has_penalties or truncates or early
