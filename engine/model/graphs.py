"""CUDA graphs: a whole decode step, recorded once and replayed with one launch.

At small batches a GPU computes a layer faster than Python can ask for the next one. A graph removes the asking: it holds
the kernels of a step *with the addresses and sizes that they were recorded with*. So everything that changes from step to
step lives in tensors that never move, and everything that doesn't is part of the graph's key::

    host       rows that take part ──▶ seats [2 0 5 · ]        copied only when they differ from the step before
    replay     seats ──▶ inputs ──▶ forward pass ──▶ tokens     one launch: graph (16 rows, 8 splits, "draw")
                 ▲                                     │           ▲ chosen by
    GPU        state of each request ◀── commit ───────┘           11 rows, one draws: the smallest bucket that holds them

Token, position, slot and random number of a row are made on the GPU out of its request's state (``engine.model.state``),
and the tokens sampled go back there. So the next step can be asked for before the host knows them.

Padding rows compute like any other, on token 0 at position 0: they sit in the null seat, write nowhere (slot −1) and read
one slot of the null block. What an earlier step left in the buffers is never read: every row of the bucket is written, and
the table entries behind a row's last block are masked in the kernel.

Graphs are captured largest first, into one memory pool: the smaller ones then fit into what the largest one needed.
They never run at the same time, so they may share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol

import torch

from engine.core.runner import StepBatch
from engine.model.attention import Attention, Plan
from engine.model.sampler import needs_sampler
from engine.model.state import DecodeInputs, RequestState
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
            tables: [seats, width] int32 block tables; entries behind a sequence's last block may be anything.
            tiles: [rows, 4] int32: row, 1, position, row of ``tables``.
            splits: parts that each row's keys are cut into.
        """
        ...


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


class DecodeBuffers:
    """What decode graphs read and write beside the requests' state, at addresses that never change.

    Args:
        most_rows: rows of the largest graph.
        vocab_size: width of the logits.
        where: the device on which the graphs run.
    """

    def __init__(self, most_rows: int, vocab_size: int, where: torch.device) -> None:
        self.most_rows = most_rows
        self.seats = torch.zeros(most_rows, dtype=torch.int64, device=where)
        """Who takes part: the only input that comes from the host."""
        self.inputs = DecodeInputs(most_rows, where)
        """Written at the start of a graph."""
        self.outcome = torch.zeros((2, most_rows), dtype=torch.int64, device=where)
        """What a step leaves: whether each row was finite (1 or 0), and its token."""
        self.logits = torch.zeros((most_rows, vocab_size), dtype=torch.float32, device=where)
        """[rows, vocabulary]; written by the sampling "logits" only."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.seats, *vars(self.inputs).values(), self.outcome, self.logits]

    @property
    def num_bytes(self) -> int:
        """Device memory that the buffers take."""
        return sum(tensor.nbytes for tensor in self.tensors)


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
    """What a graph records: inputs, forward pass and sampling of the buffers' first rows.

    Args:
        model: whose rotary tables reach ``max_model_len``.
        attention: with the pool.
        state: of the requests.
        buffers: to read and write.
        max_model_len: longest sequence.
        fused: as for ``Transformer.forward``.

    Raises:
        ValueError: the rotary tables are too short; growing them later would not reach a graph.
    """

    def __init__(
        self,
        model: Transformer,
        attention: ResidentAttention,
        state: RequestState,
        buffers: DecodeBuffers,
        max_model_len: int,
        fused: bool = False,
    ) -> None:
        self.model, self.attention, self.state, self.buffers, self.fused = model, attention, state, buffers, fused
        self._held = model.rotary_tables
        """A graph reads them by address: should the model replace them by longer ones, these must stay."""
        if self._held[0].shape[0] < max_model_len:
            raise ValueError(
                f"rotary tables of {self._held[0].shape[0]} positions for sequences of {max_model_len}: call "
                "prepare_positions first"
            )

    @torch.inference_mode()
    def __call__(self, key: GraphKey) -> None:
        """Compute a step of ``key.rows`` rows."""
        buffers, state, n = self.buffers, self.state, key.rows
        seats, inputs = buffers.seats[:n], buffers.inputs[:n]
        state.decode_inputs(seats, inputs, key.sampling == "draw")
        plan = self.attention.plan_decodes(inputs.slots, state.tables, inputs.tiles, key.splits)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self.attention, plan, self.fused)
        last = self.model.normalise(hidden, self.fused)
        logits = self.model.raw_logits(last)
        if key.sampling == "logits":
            buffers.logits[:n].copy_(logits)
        draws = inputs if key.sampling == "draw" else None
        state.finish_decodes(seats, logits, draws, last, buffers.outcome[:, :n], commit=key.sampling != "logits")


class DecodeGraphs:
    """The graphs of one lab: which exist, which one serves a step, what they cost.

    Args:
        step: computes a step for a key over the buffers.
        buffers: that ``step`` reads and writes.
        state: of the requests.
        backend: records and replays.
        splits_for: splits of a bucket's attention (``TritonAttention.splits_for`` with the longest context allowed).
        sampling: kinds to capture for every bucket.
        sizes: the buckets, ascending; default ``buckets(buffers.most_rows)``.
    """

    def __init__(
        self,
        step: Callable[[GraphKey], None],
        buffers: DecodeBuffers,
        state: RequestState,
        backend: GraphBackend,
        splits_for: Callable[[int], int],
        sampling: Sequence[Sampling] = ("greedy", "draw", "logits"),
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.buffers, self.state = buffers, state
        self._step, self._backend, self._splits_for, self._sampling = step, backend, splits_for, sampling
        self._buckets = list(sizes or buckets(buffers.most_rows))
        self._graphs: dict[GraphKey, Replay] = {}
        self._seated: list[int] = []
        """What the device's ``buffers.seats`` begins with."""
        self.graph_bytes = 0
        """Device memory taken by all graphs, measured; to be left out of what the KV pool may have."""

    def key_for(self, rows: int, sampling: Sampling) -> GraphKey | None:
        """The smallest graph for ``rows``; None when there are more than the largest one holds."""
        bucket = next((size for size in self._buckets if size >= rows), None)
        return None if bucket is None else GraphKey(bucket, self._splits_for(bucket), sampling)

    def capture(self) -> None:
        """Record all graphs, the largest first, on padding alone: nothing is written to pool or state."""
        before = self._backend.allocated_bytes()
        self.buffers.seats.fill_(self.state.null)
        self._seated = [self.state.null] * self.buffers.most_rows
        for bucket in reversed(self._buckets):
            for sampling in self._sampling:
                key = GraphKey(bucket, self._splits_for(bucket), sampling)
                self._graphs[key] = self._backend.capture(partial(self._step, key))
        self.graph_bytes = max(0, self._backend.allocated_bytes() - before)

    def find(self, rows: int, sampling: Sampling) -> GraphKey | None:
        """The captured graph for a step; None when it must be computed the ordinary way."""
        key = self.key_for(rows, sampling)
        return key if key in self._graphs else None

    def run(self, seats: Sequence[int], key: GraphKey) -> DecodeOutput:
        """Ask for a step of ``seats``, whose state is up to date: ``key.rows`` of them or fewer."""
        self._sit(seats, key.rows)
        self._graphs[key]()
        return self._output(len(seats), key.sampling)

    def run_eagerly(self, seats: Sequence[int], sampling: Sampling, padded: bool = False) -> DecodeOutput:
        """The same step without a graph, to compare with; ``padded`` up to the bucket that a graph would have."""
        key = self.key_for(len(seats), sampling) if padded else None
        key = key or GraphKey(len(seats), self._splits_for(len(seats)), sampling)
        self._sit(seats, key.rows)
        self._step(key)
        return self._output(len(seats), sampling)

    def forget_seats(self) -> None:
        """Somebody else wrote to ``buffers.seats``: tell the device anew."""
        self._seated = []

    def _sit(self, seats: Sequence[int], rows: int) -> None:
        """Tell the device who takes part, unless it knows."""
        padded = [*seats, *[self.state.null] * (rows - len(seats))]
        if padded != self._seated[:rows]:
            self.buffers.seats[:rows].copy_(self.state.upload(padded, torch.int64))
            self._seated[:rows] = padded

    def _output(self, count: int, sampling: Sampling) -> DecodeOutput:
        logits = self.buffers.logits[:count] if sampling == "logits" else None
        return DecodeOutput(self.buffers.outcome[:, :count], logits)


def kind_of_decode(batch: StepBatch) -> Sampling | None:
    """How a step's rows sample, if each is one token that samples, or padding; None if it isn't such a step."""
    logits = draws = False
    for work in batch.work:
        request = work.request
        if len(work.token_ids) != 1 or not work.block_table:
            return None
        if request is None:
            continue
        if work.samples != (request,):
            return None
        logits = logits or needs_sampler(request)
        draws = draws or not request.params.greedy
    if not batch.work:
        return None
    return "logits" if logits else "draw" if draws else "greedy"


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
