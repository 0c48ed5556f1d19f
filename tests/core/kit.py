"""Tools of the core's tests: a runner that keeps real K and V slots, its oracle, short ways to build and drive engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig, build_config
from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.runner import PENDING, StepBatch, StepResult, Work
from engine.core.sampling_params import SamplingParams
from engine.core.trace import Keyframe, StepTrace

VOCABULARY = 53
NAN = -1
"""Content of a slot that holds NaN."""
STALE = 0
"""Content of a slot that was never written, or scrubbed."""


def link(before: int, token: int) -> int:
    """K and V of a position stand for the whole history: a number that depends on every token up to it."""
    return (before * 1_000_003 + token * 7919 + 12345) % (2**61 - 1) + 1


def next_token(last: int, sample_index: int = 0) -> int:
    """The token that follows a history; samples of one prompt differ."""
    return (last // 97 + 31 * sample_index) % VOCABULARY


def oracle(prompt: Sequence[int], count: int, sample_index: int = 0) -> list[int]:
    """The tokens a request must get, whatever shares the batch."""
    history = 7
    for token in prompt:
        history = link(history, token)
    out: list[int] = []
    for _ in range(count):
        out.append(next_token(history, sample_index))
        history = link(history, out[-1])
    return out


class MemoryRunner:
    """A runner whose KV blocks really hold something, so that a wrong table, copy or hit gives a wrong token.

    Every position's slot gets ``link`` of all tokens up to it. A token is sampled from what the block table leads to, after
    comparing every slot of the history. Reading a block with a NaN slot, even a masked one, is an error: 0 × NaN is NaN.
    """

    def __init__(self, config: EngineConfig, clock: VirtualClock | None = None) -> None:
        self.config = config
        self.clock = clock
        self.blocks = {block: [STALE] * config.block_size for block in range(config.num_kv_blocks + 1)}
        self.batches: list[StepBatch] = []
        self.keep_batches = True
        self.faults: list[str] = []
        self.poison: set[str] = set()
        """Requests that produce NaN the next time they compute anything."""
        self.fail_next: Exception | None = None
        self.script: Callable[[Request], int] | None = None
        """Overrides the token that a request samples."""
        self.sick: set[str] = set()
        """Requests that were poisoned while a later step was in flight: what they read there is NaN, and they say so."""
        self._links: dict[str, list[int]] = {}

    def execute(self, batch: StepBatch) -> StepResult:
        """One step. The engine turns what a runner raises into failed requests, so ``faults`` keeps what broke too."""
        try:
            return self._execute(batch)
        except AssertionError as error:
            self.faults.append(str(error))
            raise

    def _execute(self, batch: StepBatch) -> StepResult:
        """Scrub, copy, write, read, sample."""
        if self.keep_batches:
            self.batches.append(batch)
        if self.clock is not None:
            self.clock.advance(1.0)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for work in batch.work:
                self._write(work, poisoned=True)
            self._fall_ill(batch.work)
            raise error
        for block in batch.scrub:
            assert block != 0, "the null block is scrubbed"
            self.blocks[block] = [STALE] * self.config.block_size
        self._copy(batch.copies)
        nonfinite = frozenset(w.request.request_id for w in batch.work if w.request and w.request.request_id in self.poison)
        self.poison -= nonfinite
        if self.config.async_scheduling:
            nonfinite |= {w.request.request_id for w in batch.work if w.request and w.request.request_id in self.sick}
            self._fall_ill([w for w in batch.work if w.request and w.request.request_id in nonfinite])
        written: set[tuple[int, int]] = set()
        for work in batch.work:
            slots = self._write(work, bool(work.request and work.request.request_id in nonfinite))
            assert not slots & written, "two requests write one slot in the same step"
            written |= slots
        tokens: list[int] = []
        for work in batch.work:
            if work.request is None:
                assert not work.samples
                assert set(work.block_table) <= {0}, "padding reads more than the null block"
                assert len(work.block_table) * self.config.block_size >= work.context + len(work.token_ids)
                assert work.context + len(work.token_ids) <= self.config.max_model_len, "padding beyond the longest position"
                continue
            bad = work.request.request_id in nonfinite
            last = 1 if bad else self._read(work)
            tokens.extend(self._sample(request, last) for request in work.samples)
        assert self.blocks[0] == [STALE] * self.config.block_size, "the null block was written"
        return StepResult(tokens, nonfinite=nonfinite)

    def _fall_ill(self, works: Iterable[Work]) -> None:
        self.sick.update(request.request_id for work in works for request in (work.request, *work.samples) if request)

    def _sample(self, request: Request, last: int) -> int:
        return self.script(request) if self.script else next_token(last, request.sample_index)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        before = {source: list(self.blocks[source]) for source, _ in copies}
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert 0 not in targets, "a copy into the null block"
        for source, target in copies:
            assert self.blocks[source] == before[source], "the order of copies decides the result"
            self.blocks[target] = list(self.blocks[source])

    def links(self, request: Request) -> list[int]:
        """``link`` of every position of the request."""
        links = self._links.setdefault(request.request_id, [])
        for token in request.token_ids[len(links) :]:
            links.append(link(links[-1] if links else 7, token))
        return links

    def _write(self, work: Work, poisoned: bool) -> set[tuple[int, int]]:
        request = work.request
        if request is None or not self.config.use_kv_cache:
            return set()
        size = self.config.block_size
        assert work.token_ids == request.token_ids[work.context : work.context + len(work.token_ids)]
        links = self.links(request)
        slots = set()
        for position in range(work.context, work.context + len(work.token_ids)):
            block = work.block_table[position // size]
            assert block != 0, "a request writes the null block"
            self.blocks[block][position % size] = NAN if poisoned else links[position]
            slots.add((block, position % size))
        return slots

    def _read(self, work: Work) -> int:
        request = work.request
        assert request is not None
        end = work.context + len(work.token_ids)
        assert work.token_ids, "a row of work without tokens"
        assert bool(work.samples) == (end == len(request.token_ids)), "samples if and only if everything is computed"
        assert end <= self.config.max_model_len
        links = self.links(request)
        if not self.config.use_kv_cache:
            assert work.context == 0
            assert work.block_table == []
            return links[end - 1]
        size = self.config.block_size
        for block in work.block_table:
            assert NAN not in self.blocks[block], f"{request} reads block {block}, which holds NaN"
        found = [self.blocks[work.block_table[p // size]][p % size] for p in range(end)]
        assert found == links[:end], f"{request} reads the K and V of something else"
        return found[-1]


class QueueRunner(MemoryRunner):
    """A device with a queue: ``submit`` is computed at once, in order; what it sampled is told when it is collected."""

    def __init__(self, config: EngineConfig, clock: VirtualClock | None = None) -> None:
        super().__init__(config, clock)
        self.in_flight: list[int] = []
        """Handles that were submitted and not collected."""
        self.fail_collect = False
        """The next step that is submitted fails when it is collected."""
        self._count = 0
        self._results: dict[int, StepResult | Exception] = {}
        self._sampled: dict[Request, int] = {}

    def submit(self, batch: StepBatch) -> int:
        """Fill in pending tokens from what the step before sampled, and compute."""
        handle, self._count = self._count, self._count + 1
        assert len(self.in_flight) < 2, "more than one step ahead"
        ends = [work for work in batch.work if work.token_ids[-1] == PENDING]
        for work in ends:
            assert work.request is not None
            assert work.request.token_ids[-1] == PENDING
            work.token_ids[-1] = work.request.token_ids[-1] = self._sampled.get(work.request, 0)
        try:
            assert not any(PENDING in work.token_ids for work in batch.work)
            self._results[handle] = self._compute(batch)
        finally:
            for work in ends:
                work.request.token_ids[-1] = PENDING  # type: ignore[union-attr]
        self.in_flight.append(handle)
        return handle

    def _compute(self, batch: StepBatch) -> StepResult | Exception:
        failing, self.fail_collect = self.fail_collect, False
        self._sampled, requests = {}, [request for work in batch.work for request in work.samples]
        result = self.execute(batch)
        if failing:
            return RuntimeError("lost on the device")
        self._sampled = dict(zip(requests, result.tokens, strict=True))
        return result

    def collect(self, handle: int) -> StepResult:
        """What the step sampled."""
        assert self.in_flight.pop(0) == handle, "collected out of order"
        result = self._results.pop(handle)
        if isinstance(result, Exception):
            raise result
        return result


def make(
    runner: Any = None,
    *,
    block_hash: Any = None,
    codec: Any = None,
    listener: Any = None,
    eos: Iterable[int] = (),
    vocab_size: int | None = None,
    **fields: Any,
) -> Engine:
    """An engine on a virtual clock, with its ``runner`` or the class of one; found again as ``engine.runner``."""
    fields.setdefault("max_model_len", 256)
    config = build_config(fields)
    clock = VirtualClock()
    if runner is None or isinstance(runner, type):
        runner = (runner or MemoryRunner)(config, clock)
    engine = Engine(
        config,
        runner,
        clock,
        block_hash=block_hash,
        codec=codec,
        listener=listener,
        eos_token_ids=frozenset(eos),
        vocab_size=vocab_size,
    )
    engine.runner = runner  # type: ignore[attr-defined]
    return engine


def note_schedules(engine: Engine) -> dict[int, Keyframe]:
    """The state right after each step was scheduled, by the step's index: filled in while the engine runs."""
    schedule, states = engine._schedule, {}

    def noting(*args: Any) -> Any:
        flight = schedule(*args)
        if flight.plan.work:
            states[flight.index] = engine.snapshot()
        return flight

    engine._schedule = noting  # type: ignore[method-assign]
    return states


def prompt_of(length: int, start: int = 1) -> list[int]:
    """``length`` token ids; different ``start``, different from the first token on."""
    return [(start * 7 + i * (start + 3)) % VOCABULARY for i in range(length)]


def add(engine: Engine, prompt: int | list[int], max_tokens: int, *, start: int = 1, **options: Any) -> str:
    """Add a request: a prompt, or its length. Sampling settings and request options by keyword."""
    known = {k: options.pop(k) for k in ("priority", "cache_salt", "request_id", "arrival", "prompt") if k in options}
    tokens = prompt_of(prompt, start) if isinstance(prompt, int) else prompt
    return engine.add_request(tokens, SamplingParams(max_tokens=max_tokens, **options), **known)


def drain(engine: Engine, limit: int = 500) -> list[StepTrace]:
    """Step until nothing is left, checking every invariant; a bounded number of steps."""
    steps = []
    while engine.has_unfinished():
        assert len(steps) < limit, f"not done after {limit} steps"
        steps.append(engine.step())
        engine.check()
        assert not getattr(engine.runner, "faults", None)
    assert_idle(engine)
    return steps


def assert_idle(engine: Engine) -> None:
    """Everything was returned: free and cached blocks are the whole pool, no table, no queue, each block once."""
    engine.check()
    stats, state = engine.stats(), engine.snapshot()
    assert (stats.running, stats.waiting, stats.blocks_referenced) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert sorted(state.free) == list(range(1, stats.blocks_total + 1))
    assert (state.tables, state.computed, state.waiting, state.running) == ({}, {}, (), ())
    assert stats.kv_reserved_tokens == stats.kv_stored_tokens == 0
    assert stats.kv_usage == 0.0


def tokens_of(engine: Engine, request_id: str, sample: int = 0) -> list[int]:
    """Generated ids of a request's sample."""
    return engine.output(request_id).outputs[sample].token_ids


def assert_oracle(engine: Engine, request_id: str) -> None:
    """Every sample of the request got the tokens it gets alone, as many as it asked for."""
    output = engine.output(request_id)
    for sample in output.outputs:
        count = engine.request(request_id).max_tokens
        assert sample.finish_reason == "length"
        assert sample.token_ids == oracle(output.prompt_token_ids, count, sample.index)


def rows(step: StepTrace) -> dict[str, int]:
    """The decision of a step: request → tokens, padding apart."""
    return {row.request_id: row.num_tokens for row in step.scheduled if row.kind != "padding"}


def who(step: StepTrace) -> str:
    """Who computes in this step, as letters in order (for requests named by letters)."""
    return " ".join(row.request_id for row in step.scheduled if row.kind != "padding")


def state_of(engine: Engine) -> tuple[Any, Any]:
    """What a refused or unknown operation must leave as it was."""
    stats = engine.stats()
    return engine.snapshot(), (stats.running, stats.waiting, stats.aborted, stats.finished)
