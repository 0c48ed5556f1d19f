"""The runner: a step's work in, sampled tokens out. Everything about tensors and devices lies behind it.

::

    StepBatch ─ prepare ─▶ flat token ids, positions, plan of attention
                forward ─▶ hidden states of the last position of each piece of work ─ finite? ─▶ logits of those that sample
                sample  ─▶ StepResult

A GPU is asked for all of it at once (``submit``), and the host looks at the tokens later (``collect``). It keeps the state
of each request by itself (``engine.model.state``), the newest token included, so the next step can be asked for meanwhile::

    submit step 5 ─▶ tokens of 5 go to the requests' state ─┬─▶ submit step 6, which reads them there
                                                            └─▶ copied back beside the queue ─▶ collect step 5

A step that is nothing but decodes runs as a CUDA graph where there are graphs (``engine.model.graphs``); all others, and
everything on a CPU, run call by call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from engine.core.config import EngineConfig
from engine.core.outputs import TextCodec
from engine.core.request import Request
from engine.core.runner import StepBatch, StepResult, Work
from engine.model.attention import Attention, Plan, Span
from engine.model.backend import Backend, BackendInfo, choose_backend, working
from engine.model.device import Device, Fetch, device_of
from engine.model.errors import ModelError, in_one_line
from engine.model.graphs import (
    DecodeBuffers,
    DecodeGraphs,
    DecodeStep,
    ResidentAttention,
    estimated_graph_bytes,
    kind_of_decode,
)
from engine.model.memory import explained, ran_out
from engine.model.sampler import Sampler, Sampling, choose, needs_sampler
from engine.model.selfcheck import Verdict
from engine.model.staging import Uploads
from engine.model.state import RequestState
from engine.model.stepclock import StepClock
from engine.model.transformer import Transformer

PAUSE = 0.25
"""Seconds without a step after which the time in between is a pause of the user's, not the GPU waiting for the host."""


@dataclass(slots=True)
class _Prepared:
    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: Plan
    last_rows: torch.Tensor
    """Packed row of the last position of each piece of work."""
    head_rows: torch.Tensor | None
    """Pieces of work that need logits; None: all of them."""
    spread: torch.Tensor | None
    """Row of the logits for each sampling request; None: one each, in order. Forks of one prompt share a row."""
    seats: torch.Tensor | None
    """Seat of each sampling request; None where the host keeps all state, and nothing samples."""
    learners: Sequence[int] = ()
    """``seats`` on the host."""


@dataclass(slots=True)
class Flight:
    """A step that was submitted: what ``collect`` needs to know of it."""

    clock: StepClock
    work: Sequence[Work] = ()
    requests: Sequence[Request] = ()
    outcome: Fetch | None = None
    """Numbers on their way to the host: finite and token of each of ``rows`` rows, then whether each work was finite."""
    rows: int = 0
    places: Sequence[int] = ()
    """Row of each sampling request."""
    sampling: Sampling | None = None
    """What the sampler was asked for; None: the tokens are among the numbers."""
    sampled: Sequence[Fetch] = ()
    """Its numbers."""
    turn: int = 0
    learners: Sequence[int] = ()
    """Seats of ``requests``, and the number by which the state knows the step."""
    flops: float = 0.0
    bytes: float = 0.0


class ModelRunner:
    """Runs a transformer for an engine (``engine.core.runner.AsyncRunner``); owns the KV pool and the graphs.

    Args:
        model: weights and shapes; may be shared with other runners.
        config: the engine's configuration: pool size, block size, whether there is a KV cache.
        codec: names the candidate tokens of logprobs; None leaves them without text.
        attention_backend: "auto", "sdpa" or "triton"; see ``engine.model.backend``.
        enforce_eager: no CUDA graphs.
        backend: in place of what these two choose.
        device: in place of the model's own: copies, events, clock.

    Raises:
        ModelError: ``max_model_len`` exceeds what the model computes exactly, the pool doesn't fit into memory, or the
            backend can't be used here.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        codec: TextCodec | None = None,
        *,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        backend: Backend | None = None,
        device: Device | None = None,
    ) -> None:
        spec = model.spec
        if config.max_model_len > spec.context_limit:
            raise ModelError(
                f"max_model_len={config.max_model_len} is more than the {spec.context_limit} positions of this model: "
                f"set max_model_len to at most {spec.context_limit}"
            )
        self.model = model
        self.config = config
        self.device = device or device_of(model.device)
        chosen = backend or choose_backend(model, config.block_size, attention_backend, enforce_eager)
        num_blocks = config.num_kv_blocks if config.use_kv_cache else 0
        check_pool_memory(model, num_blocks, config.block_size)
        model.prepare_positions(config.max_model_len)
        self._uploads = Uploads(self.device, model.device) if self.device.asynchronous else None
        by_name = backend is not None or attention_backend == "triton"
        self.backend, made = working(chosen, lambda used: self._build(used, num_blocks), by_name)
        self.attention: Attention = made[0]
        self.state: RequestState | None = made[1]
        """What the device keeps of requests; None where it is the host itself."""
        upload, waits = self.attention.upload, not self.device.asynchronous
        self.sampler = Sampler(codec.token_text if codec is not None else None, upload, may_look=waits)
        self._members: set[Request] = set()
        self._in_flight, self._collected = 0, 0.0
        self._no_graphs = ""
        self.graphs = self._make_graphs() if num_blocks else None

    # ------------------------------------------------------------------ what it is

    @property
    def asynchronous(self) -> bool:
        """Whether ``submit`` returns before the step is computed. On a CPU it doesn't: nothing is won by it there."""
        return self.device.asynchronous

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool, the null block included."""
        return self.attention.kv_pool_bytes

    @property
    def graph_bytes(self) -> int:
        """Device memory of the graphs, measured, and of their buffers; 0 without graphs."""
        return self.graphs.graph_bytes + self.graphs.buffers.num_bytes if self.graphs is not None else 0

    @property
    def attention_name(self) -> str:
        """Name of the attention backend, for people."""
        return self.backend.name

    @property
    def verdict(self) -> Verdict | None:
        """What the check at start said; None if nobody asked it."""
        return self.backend.verdict

    def describe_backend(self) -> BackendInfo:
        """What computes, and why something fast is not in use."""
        reason = " ".join(part for part in (self.backend.reason, self._no_graphs) if part)
        return BackendInfo(self.backend.name, self.backend.fused, self.graphs is not None, reason, self.graph_bytes)

    def close(self) -> None:
        """Give the memory of pool and graphs back; the runner can't be used any more."""
        self.device.finish()
        self.graphs = None  # before the pool, whose address they hold
        self.state, self._members = None, set()
        self.sampler.forget()
        self.attention.pool = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build(self, backend: Backend, num_blocks: int) -> tuple[Attention, RequestState | None]:
        """What a backend computes with, compiled for what steps will need."""
        model, config, spec = self.model, self.config, self.model.spec
        attention = backend.make_attention(
            num_layers=spec.num_layers,
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        state = None
        if self._uploads is not None:
            attention.upload = self._uploads.put
            state = RequestState(
                config.max_num_seqs, config.max_model_len, config.block_size, model.device, attention.upload, backend.fused
            )
        with torch.inference_mode(), self.device.scope(), self._uploading():
            attention.warm_up(config.max_model_len)
            if state is not None:
                state.warm_up()
        return attention, state

    def _make_graphs(self) -> DecodeGraphs | None:
        """Capture the graphs of decode steps; without them, and a note why, where memory is short."""
        if self.backend.graphs is None:
            return None
        model, config, attention, state = self.model, self.config, cast(ResidentAttention, self.attention), self.state
        assert state is not None, "graphs are for devices of their own"
        needed, free = estimated_graph_bytes(model, config.max_num_seqs), available_bytes(model.device)
        lower = "lower num_kv_blocks or max_num_seqs"
        if free is not None and needed > free:
            self._no_graphs = (
                f"CUDA graphs are off: for max_num_seqs={config.max_num_seqs} they take about {needed / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB are free: {lower}."
            )
            return None
        try:
            with self.device.scope():
                longest = config.max_model_len
                buffers = DecodeBuffers(config.max_num_seqs, model.spec.vocab_size, model.device)
                step = DecodeStep(model, attention, state, buffers, longest, self.backend.fused)
                graphs = DecodeGraphs(
                    step, buffers, state, self.backend.graphs(), lambda rows: attention.splits_for(rows, longest)
                )
                graphs.capture()
                return graphs
        except Exception as error:
            # Memory ran out, a kernel can't be compiled, or a call recorded: steps run without graphs all the same.
            first_line = in_one_line(error)
            self._no_graphs = f"CUDA graphs are off: recording them failed ({first_line})."
            if ran_out(error):
                self._no_graphs = f"CUDA graphs are off: memory ran out while they were recorded ({first_line}): {lower}."
            return None

    # ------------------------------------------------------------------ steps

    def execute(self, batch: StepBatch) -> StepResult:
        """Store K and V of the batch's tokens and sample where asked; see ``Runner``."""
        return self.collect(self.submit(batch))

    @explained
    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> Flight:
        """Ask for a step; see ``AsyncRunner``. On a CPU it is computed at once."""
        clock = StepClock(self.device)
        with self.device.scope(), self._uploading():
            if batch.scrub or batch.copies:
                clock.start()
            self.attention.zero_blocks(batch.scrub)
            self.attention.copy_blocks(batch.copies)
            if not batch.work:
                return Flight(clock)
            try:
                flight = self._replay(batch, clock) or self._compute(batch, clock)
            except Exception:
                if self.state is not None:
                    self.state.distrust()
                raise
            flight.flops, flight.bytes = count_work(self.model, batch, with_cache=self.config.use_kv_cache)
            self._note(flight)
        return flight

    @explained
    def collect(self, flight: Flight) -> StepResult:
        """Wait for a submitted step and read what it sampled; see ``AsyncRunner``."""
        if flight.outcome is None:
            return StepResult([])
        self._in_flight -= 1
        numbers: list[int] = flight.outcome.wait().tolist()
        rows = flight.rows
        fine = numbers[2 * rows :] or numbers[:rows]
        if flight.sampling is not None:
            sampled = flight.sampling.read([fetch.wait() for fetch in flight.sampled])
            tokens, logprobs, broken = sampled.tokens, sampled.logprobs, sampled.broken
        else:
            tokens, logprobs = [numbers[rows + place] for place in flight.places], None
            broken = [not numbers[place] for place in flight.places]
        if self.state is not None:
            self.state.learn(flight.turn, flight.learners, tokens)
        result = StepResult(tokens, logprobs, _nonfinite(flight, broken, fine), flops=flight.flops, bytes=flight.bytes)
        flight.clock.tell(result)
        self._collected = time.perf_counter()
        return result

    def _uploading(self) -> AbstractContextManager[object]:
        """In which numbers go to the device without waiting."""
        return nullcontext() if self._uploads is None else self._uploads

    def _note(self, flight: Flight) -> None:
        """Remember what the next step needs to know of this one."""
        self._in_flight += 1
        if not self.device.asynchronous:
            return
        members = {work.request for work in flight.work if work.request is not None}
        follows = self._in_flight > 1 or (
            time.perf_counter() - self._collected < PAUSE and not members.isdisjoint(self._members)
        )
        flight.clock.close(follows)
        self._members = members

    def _replay(self, batch: StepBatch, clock: StepClock) -> Flight | None:
        """The step as a graph; None if it isn't one."""
        graphs, state, kind = self.graphs, self.state, kind_of_decode(batch)
        key = graphs.find(len(batch.work), kind) if graphs is not None and kind is not None else None
        if graphs is None or state is None or key is None:
            return None
        changes = state.plan(batch.work, resident_tokens=True)
        clock.start()
        state.apply(changes)
        output = graphs.run(changes.seats, key)
        places = [place for place, work in enumerate(batch.work) if work.request is not None]
        requests = [request for work in batch.work for request in work.samples]
        sampling = None
        if output.logits is None:
            self.sampler.forget()
        else:
            clock.computed()
            logits = output.logits
            if len(places) < len(batch.work):
                logits = logits.index_select(0, state.upload(places, torch.int64))
            seats = state.upload(changes.sampling, torch.int64)
            sampling = self.sampler.submit(logits, requests, state.metadata(seats))
            state.commit(seats, sampling.tokens)
        outcome = output.outcome.clone()  # the next step writes there while this is on its way to the host
        clock.stop()
        flight = Flight(clock, batch.work, requests, self.device.fetch(outcome.flatten()), len(batch.work), places)
        return self._learning(flight, sampling, changes.sampling)

    def _compute(self, batch: StepBatch, clock: StepClock) -> Flight:
        """The step call by call."""
        fused = self.backend.fused
        requests = [request for work in batch.work for request in work.samples]
        prepared = self._prepare(batch)
        clock.start()
        hidden = self.model.forward(prepared.token_ids, prepared.positions, self.attention, prepared.plan, fused)
        last = self.model.normalise(hidden.index_select(0, prepared.last_rows), fused)
        finite = torch.isfinite(last).all(-1)
        logits = self._logits(last, prepared) if requests else None
        clock.computed()
        rows, sampling, outcome = 0, None, finite
        if logits is not None and prepared.seats is not None and not any(map(needs_sampler, requests)):
            greedy = all(request.params.greedy for request in requests)
            draws = () if greedy or self.state is None else self.state.draws(prepared.seats)
            tokens, good = choose(logits, *draws)
            rows, outcome = len(requests), torch.cat((good.long(), tokens, finite.long()))
            self.sampler.forget()
        elif logits is not None:
            wanted = self.state.metadata(prepared.seats) if self.state is not None and prepared.seats is not None else None
            sampling = self.sampler.submit(logits, requests, wanted)
            tokens = sampling.tokens
        if logits is not None and self.state is not None and prepared.seats is not None:
            self.state.commit(prepared.seats, tokens)
        clock.stop()
        flight = Flight(clock, batch.work, requests, self.device.fetch(outcome), rows, range(rows))
        return self._learning(flight, sampling, prepared.learners)

    def _learning(self, flight: Flight, sampling: Sampling | None, learners: Sequence[int]) -> Flight:
        """The flight, with what its tokens are to be learned from."""
        if sampling is not None:
            flight.sampling, flight.sampled = sampling, [self.device.fetch(numbers) for numbers in sampling.numbers]
        flight.turn, flight.learners = self.state.turn if self.state is not None else 0, learners
        return flight

    def _prepare(self, batch: StepBatch) -> _Prepared:
        token_ids: list[int] = []
        spans: list[Span] = []
        sampling: list[int] = []
        for index, work in enumerate(batch.work):
            spans.append(Span(len(token_ids), len(work.token_ids), work.context, work.block_table, work.request is not None))
            token_ids += work.token_ids
            sampling += [index] * len(work.samples)
        put = self.attention.upload
        last_rows = put([span.start + span.num_tokens - 1 for span in spans], torch.int64)
        head_rows = spread = None
        distinct = list(dict.fromkeys(sampling))
        if len(distinct) < len(spans):
            head_rows = put(distinct, torch.int64)
        if len(distinct) < len(sampling):
            row_of = {index: row for row, index in enumerate(distinct)}
            spread = put([row_of[index] for index in sampling], torch.int64)
        if self.state is not None:
            return self._prepare_on_device(batch, token_ids, spans, (last_rows, head_rows, spread), self.state)
        positions = [position for span in spans for position in range(span.context, span.context + span.num_tokens)]
        packed = put([token_ids, positions], torch.int64)
        return _Prepared(packed[0], packed[1], self.attention.plan(spans), last_rows, head_rows, spread, None)

    def _prepare_on_device(
        self,
        batch: StepBatch,
        token_ids: list[int],
        spans: list[Span],
        heads: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        state: RequestState,
    ) -> _Prepared:
        """Positions and slots come from the requests' state, as do tokens that only the device knows."""
        changes = state.plan(batch.work, resident_tokens=False)
        state.apply(changes)
        ends = [(span.start, span.num_tokens, seat) for span, seat in zip(spans, changes.seats, strict=True)]
        ids, positions, slots = state.chunk_inputs(state.upload(ends, torch.int64), state.upload(token_ids, torch.int64))
        if self.attention.resident and self.attention.pool is not None:
            plan = self.attention.plan_resident(spans, changes.seats, slots, state.tables)
        else:
            plan = self.attention.plan(spans)
        seats = state.upload(changes.sampling, torch.int64) if changes.sampling else None
        return _Prepared(ids, positions, plan, *heads, seats, changes.sampling)

    def _logits(self, last: torch.Tensor, prepared: _Prepared) -> torch.Tensor:
        """Logits of the sampling requests. Forks of one prompt share a row, which is multiplied once."""
        rows = last if prepared.head_rows is None else last.index_select(0, prepared.head_rows)
        logits = self.model.logits(rows)
        return logits if prepared.spread is None else logits.index_select(0, prepared.spread)


def _nonfinite(flight: Flight, broken: Sequence[bool], fine: Sequence[int]) -> frozenset[str]:
    """Requests whose logits, or whose hidden state or that of the prompt they share, are not finite."""
    if all(fine) and not any(broken):
        return frozenset()
    found = {request.request_id for request, bad in zip(flight.requests, broken, strict=True) if bad}
    for work, good in zip(flight.work, fine, strict=True):
        if not good and work.request is not None:
            found |= {work.request.request_id, *(request.request_id for request in work.samples)}
    return frozenset(found)


def count_work(model: Transformer, batch: StepBatch, with_cache: bool) -> tuple[float, float]:
    """Operations of a step's forward pass, and bytes it must at least move, counted from shapes.

    Operations: 2 a matrix element and token for the layers; 2 · hidden · vocabulary a row of logits; attention 4 · H · D
    · layers for each pair of a token and a position it attends to (query·key and probability·value).

    Bytes: each weight once a step (the embedding as far as tokens look it up, the head where something samples); K and V
    of every attended position read once a sequence, and of every new token written once.
    """
    spec, weights = model.spec, model.weights
    element = weights.embedding.element_size()
    tokens = pairs = attended = written = logit_rows = 0
    for work in batch.work:
        count, context = len(work.token_ids), work.context
        tokens += count
        pairs += count * context + count * (count + 1) // 2
        attended += context + count if with_cache and context else 0
        written += count if with_cache and work.request is not None else 0
        logit_rows += bool(work.samples)
    flops = 2.0 * weights.layer_parameters * tokens
    flops += 2.0 * weights.head.numel() * logit_rows + 4.0 * spec.num_heads * spec.head_dim * spec.num_layers * pairs
    moved = weights.layer_parameters + tokens * spec.hidden_size + (weights.head.numel() if logit_rows else 0)
    return flops, float(moved * element + (attended + written) * model.kv_bytes_per_token)


def check_pool_memory(model: Transformer, num_kv_blocks: int, block_size: int) -> None:
    """Refuse a pool that the device can't hold, before it is allocated.

    Raises:
        ModelError: naming the bytes needed and free, and how many blocks would fit.
    """
    block_bytes = block_size * model.kv_bytes_per_token
    needed = (num_kv_blocks + 1) * block_bytes if num_kv_blocks else 0
    free = available_bytes(model.device)
    if free is None or needed <= free:
        return
    fitting = max(0, free // block_bytes - 1)
    raise ModelError(
        f"num_kv_blocks={num_kv_blocks} with block_size={block_size} needs {needed:,} bytes ({needed / 2**30:.2f} GiB), "
        f"but {free:,} bytes ({free / 2**30:.2f} GiB) are free on {model.device}: lower num_kv_blocks to at most {fitting}, "
        "or lower block_size"
    )


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on ``device``, bytes; None where the system doesn't say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_meminfo_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _cgroup_available() -> int | None:
    """What a container's limit leaves; page cache that can be dropped counts as free."""
    try:
        root = Path("/sys/fs/cgroup")
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
