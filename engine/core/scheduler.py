"""Who computes how many tokens in this step.

There is no prefill phase and no decode phase. A request needs ``num_tokens - num_computed_tokens`` more positions, and a
step hands out ``max_num_batched_tokens`` of them::

    budget 16 │ A 1 │ B 1 │ C 1 │ D ············ 13 of its 40 prompt tokens │
              └── running first, in order: decodes ──┘ then the waiting ones, while budget, seats and blocks last

1. **Running** requests first. When one finds no free block, the last running request (``fcfs``) or the worst by (priority,
   arrival) is preempted: its blocks are freed, its output is kept, and it waits to be computed again.
2. **Waiting** requests only if nothing was preempted: the head looks up the prefix cache and is admitted if its whole
   sequence fits the pool now. The first that can't be admitted stops the loop; all others wait behind it.
3. A request **samples** if and only if all its tokens are computed after this step.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.core.config import EngineConfig
from engine.core.kv_cache import KVCache
from engine.core.request import Request, Status
from engine.core.runner import StepBatch, Work
from engine.core.trace import Blocked, Event, Kind, Preemption


class Row(msgspec.Struct, gc=False):
    """One line of the plan: what becomes a ``Scheduled`` record once its token is known."""

    request: Request
    kind: Kind
    num_tokens: int
    context: int
    cached: int = 0
    recomputed: int = 0
    samples: bool = False


@dataclass(slots=True)
class Plan:
    """The decision for one step."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    blocked: Blocked | None = None
    cached: dict[str, int] = field(default_factory=dict)
    """Prefix-cache tokens of requests admitted in this step."""
    decided: dict[str, tuple[Request, int, Sequence[tuple[int, int]]]] = field(default_factory=dict)
    """The dict that is the decision: request_id → (request, num_scheduled_tokens, copies it needs)."""

    def batch(self, index: int, scrub: list[int]) -> StepBatch:
        """The plan as a runner reads it."""
        return StepBatch(index, self.work, self.copies, scrub)


@dataclass(slots=True)
class Counters:
    """What the scheduler has seen so far; see ``EngineStats`` for the meaning."""

    preemptions: int = 0
    tokens_computed: int = 0
    tokens_cached: int = 0
    tokens_recomputed: int = 0
    tokens_lost: int = 0
    tokens_resumed: int = 0
    tokens_padded: int = 0
    prefix_queries: int = 0
    prefix_query_blocks: int = 0
    prefix_hit_blocks: int = 0


class Scheduler:
    """Continuous batching: requests join and leave the running batch at every step.

    Args:
        config: budget, seats and policy.
        kv: the KV layout.
        record: receives queue events.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, record: Callable[[Event], None]) -> None:
        self.config = config
        self.kv = kv
        self.counters = Counters()
        self.waiting: list[Request] = []
        """Sorted by urgency; under fcfs a preempted request therefore stands at the head, for it arrived first."""
        self.running: list[Request] = []
        """In admission order."""
        self.seats_taken = 0
        self._record = record
        self._stores = config.use_kv_cache
        self._threshold = config.long_prefill_token_threshold

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.urgency = (
            request.priority if self.config.scheduling_policy == "priority" else 0,
            request.order,
            request.sample_index,
        )
        place = self._enqueue(request)
        self._record(Event("queue", request.request_id, (), request.num_prompt_tokens, str(place)))

    def _enqueue(self, request: Request) -> int:
        """Put the request at its place in the waiting queue; returns the place, 0 is the head."""
        request.status = Status.WAITING
        place = bisect(self.waiting, request.urgency, key=lambda r: r.urgency)
        self.waiting.insert(place, request)
        return place

    def remove(self, request: Request, *, scrub: bool = False) -> None:
        """A request is done, aborted or failed: give back its seats and blocks at once."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.seats_taken -= _seats(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self.kv.release(request, scrub=scrub)

    def finish(self, request: Request) -> None:
        """A request is done: here it leaves at once."""
        self.remove(request)

    # ------------------------------------------------------------------ the step

    def schedule(self) -> Plan:
        """Decide one step and count its tokens as computed."""
        plan = Plan(self.config.token_budget)
        self._schedule_running(plan)
        if not plan.preemptions:
            self._schedule_waiting(plan)
        elif self.waiting:
            plan.blocked = Blocked(self.waiting[0].request_id, "preemption")
        for request, num_tokens, copies in plan.decided.values():
            plan.copies.extend(copies)
            self._compute(plan, request, num_tokens)
        for row in [row for row in plan.rows if row.samples and row.request.forks]:
            self._fork(plan, row.request)
        return plan

    def _wanted(self, request: Request, budget: int) -> int:
        """Tokens this request gets: what is missing, capped by threshold and budget."""
        if not self._stores:
            request.num_computed_tokens = 0
        wanted = len(request.token_ids) - request.num_computed_tokens
        threshold = self._threshold
        if wanted > threshold > 0 and len(self.running) + len(self.waiting) > 1:
            wanted = threshold
        return min(wanted, budget)

    def _schedule_running(self, plan: Plan) -> None:
        running = self.running
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            num_tokens = self._wanted(request, plan.budget)
            if not num_tokens:  # only with async_scheduling: its next token must be known first
                index += 1
                continue
            copies = self.kv.grow(request, num_tokens)
            while copies is None:
                victim = self._victim()
                position = running.index(victim)
                self._preempt(plan, victim, request)
                if position < index:
                    index -= 1
                if victim is request:
                    break
                copies = self.kv.grow(request, num_tokens)
            if copies is None:
                continue
            plan.decided[request.request_id] = (request, num_tokens, copies)
            plan.budget -= num_tokens
            index += 1

    def _victim(self) -> Request:
        if self.config.scheduling_policy == "priority":
            return max(self.running, key=lambda r: r.urgency)
        return self.running[-1]

    def _preempt(self, plan: Plan, victim: Request, in_favour_of: Request) -> None:
        """Free the victim's blocks; it keeps its output and waits to be computed again."""
        decided = plan.decided.pop(victim.request_id, None)
        if decided is not None:
            plan.budget += decided[1]
        lost = victim.num_computed_tokens
        self.running.remove(victim)
        self.seats_taken -= _seats(victim)
        self.kv.release(victim)
        victim.num_computed_tokens = 0
        victim.trace.preemptions += 1
        place = self._enqueue(victim)
        self.counters.preemptions += 1
        self.counters.tokens_lost += lost
        plan.preemptions.append(Preemption(victim.request_id, lost, in_favour_of.request_id))
        self._record(Event("preempt", victim.request_id, (), lost, str(place)))

    def _schedule_waiting(self, plan: Plan) -> None:
        while self.waiting:
            plan.blocked = self._admit(plan, self.waiting[0])
            if plan.blocked:
                return

    def _admit(self, plan: Plan, request: Request) -> Blocked | None:
        """Move the head of the queue into the running batch, or say what it lacks."""
        free_seats = self.config.max_num_seqs - self.seats_taken
        if _seats(request) > free_seats:
            return Blocked(request.request_id, "seats", _seats(request), free_seats)
        if plan.budget <= 0:
            return Blocked(request.request_id, "tokens", 1, 0)
        hits = self.kv.lookup(request)
        cached = len(hits) * self.config.block_size
        lacking = self._lacks_tokens(plan, request, cached)
        if lacking:
            return lacking
        shortage = self.kv.shortage(request, hits)
        if shortage:
            return Blocked(request.request_id, "blocks", *shortage)
        self.waiting.pop(0)
        self.running.append(request)
        self.seats_taken += _seats(request)
        request.status = Status.RUNNING
        self._count_lookup(request, hits, cached)
        self._record(Event("admit", request.request_id, (), cached))
        self.kv.admit(request, hits)
        num_tokens = self._wanted(request, plan.budget)
        copies = self.kv.grow(request, num_tokens)
        assert copies is not None, "the whole sequence fits, so its first chunk does"
        plan.decided[request.request_id] = (request, num_tokens, copies)
        plan.budget -= num_tokens
        plan.cached[request.request_id] = cached
        return None

    def _lacks_tokens(self, plan: Plan, request: Request, cached: int) -> Blocked | None:
        """Budget rules of the configurations that can't split a prompt."""
        if not self.config.use_kv_cache:
            reserved = sum(r.num_prompt_tokens + r.max_tokens for r in self.running)
            needed = request.num_prompt_tokens + request.max_tokens
            if reserved + needed > self.config.token_budget:
                return Blocked(request.request_id, "tokens", needed, self.config.token_budget - reserved)
        elif not self.config.enable_chunked_prefill:
            needed = request.num_tokens - cached
            if needed > plan.budget:
                return Blocked(request.request_id, "tokens", needed, plan.budget)
        return None

    def _count_lookup(self, request: Request, hits: list[int], cached: int) -> None:
        """A first admission counts as a query of the prefix cache; a resumption after preemption never counts as a hit."""
        counters = self.counters
        if request.trace.preemptions:
            counters.tokens_resumed += cached
            return
        request.trace.cached_tokens = cached
        request.trace.cache_note = self.kv.explain(request, hits)
        if self.config.enable_prefix_caching:
            counters.prefix_queries += request.num_prompt_tokens
            counters.prefix_query_blocks += request.num_prompt_tokens // self.config.block_size
            counters.tokens_cached += cached
            counters.prefix_hit_blocks += len(hits)

    def _compute(self, plan: Plan, request: Request, num_tokens: int) -> None:
        """Turn a decision into a row of work; from here on these tokens count as computed."""
        context = request.num_computed_tokens
        end = context + num_tokens
        tokens = request.token_ids
        recomputed = min(end, request.high_water) - context
        if recomputed <= 0:
            recomputed = 0
        samples = end == len(tokens)
        if recomputed:
            kind: Kind = "recompute"
        else:
            kind = "prefill" if context < request.num_prompt_tokens else "decode"
        request.num_computed_tokens = end
        if end > request.high_water:
            request.high_water = end
        counters = self.counters
        counters.tokens_computed += num_tokens
        if recomputed:
            counters.tokens_recomputed += recomputed
            request.trace.recomputed_tokens += recomputed
        cached = plan.cached.get(request.request_id, 0) if plan.cached else 0
        plan.rows.append(Row(request, kind, num_tokens, context, cached, recomputed, samples))
        step_tokens = tokens[-1:] if num_tokens == 1 and samples else tokens[context:end]
        plan.work.append(Work(request, step_tokens, context, request.block_table, (request,) if samples else ()))

    def _fork(self, plan: Plan, parent: Request) -> None:
        """The prompt is computed: the other samples join the batch on shared blocks and sample from the same logits."""
        children, parent.forks = parent.forks, []
        position = self.running.index(parent)
        for offset, child in enumerate(children, 1):
            child.urgency = (parent.urgency[0], parent.order, child.sample_index)
            self.kv.fork(parent, child)
            child.num_computed_tokens = child.high_water = parent.num_computed_tokens
            child.status = Status.RUNNING
            self.running.insert(position + offset, child)
            plan.rows.append(Row(child, "fork", 0, parent.num_computed_tokens, samples=True))
        work = next(work for work in plan.work if work.request is parent)
        work.samples = (parent, *children)

    def finished_rows(self) -> list[Request]:
        """Rows that are done but keep their blocks until a static batch ends: none here."""
        return []

    def check(self) -> None:
        """Verify queues and seats; raises RuntimeError saying what is wrong."""
        if self.waiting != sorted(self.waiting, key=lambda r: r.urgency):
            raise RuntimeError(f"the waiting queue is out of order: {self.waiting}")
        for request in self.waiting:
            if request.status is not Status.WAITING or request.block_table or request.num_computed_tokens:
                raise RuntimeError(f"{request} waits but holds blocks or counts as running")
        for request in self.running:
            if request.status is not Status.RUNNING:
                raise RuntimeError(f"{request} is in the running batch")
        held = [*self.running, *self.finished_rows()]
        if len(set(held)) != len(held) or set(held) & set(self.waiting):
            raise RuntimeError("a request is in two queues")
        seats = sum(_seats(request) for request in held)
        if seats != self.seats_taken or seats > self.config.max_num_seqs:
            raise RuntimeError(f"{seats} seats are taken, {self.seats_taken} counted, {self.config.max_num_seqs} allowed")
        self.kv.check([*held, *self.waiting])


class StaticScheduler(Scheduler):
    """Static batching: a padded batch runs until its last member is done, and only then the next one is formed.

    ::

                 prompt (padded)   decode
        A  ████████████            ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒      ████ prompt tokens    ▒ output tokens
        B  ████████╳╳╳╳            ▒ ▒ ╳ ╳ ╳ ╳ ╳ ╳      ╳    padding: computed for nothing
        C  ████╳╳╳╳╳╳╳╳            ▒ ▒ ▒ ▒ ▒ ╳ ╳ ╳
                                                  ↑ D, E, F may start only here

    Padding rows are really computed, at full length: they read the null block and write nothing.
    """

    def __init__(self, config: EngineConfig, kv: KVCache, record: Callable[[Event], None]) -> None:
        super().__init__(config, kv, record)
        self._rows: list[Request] = []
        """The batch, finished rows included."""
        self._length = 0
        """Positions of each row computed so far, padding included."""

    def schedule(self) -> Plan:
        """One step of the current batch, or the padded prefill of a new one."""
        plan = Plan(self.config.token_budget)
        if not self._rows:
            self._form_batch(plan)
        elif self.waiting:
            head = self.waiting[0]
            plan.blocked = Blocked(head.request_id, "batch", 1, 0)
        fresh = self._length == 0
        width = max((row.num_tokens for row in self._rows), default=0) if fresh else 1
        for request in self._rows:
            if request.status is not Status.RUNNING:
                self._pad(plan, request, 1, min(self._length, self.config.max_model_len - 1))
                continue
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            copies = self.kv.grow(request, num_tokens)
            assert copies is not None, "the batch was formed so that it fits to its end"
            plan.decided[request.request_id] = (request, num_tokens, copies)
            plan.budget -= num_tokens
            self._compute(plan, request, num_tokens)
            if num_tokens < width:
                self._pad(plan, request, width - num_tokens, 0)
        self._length += width
        return plan

    def _form_batch(self, plan: Plan) -> None:
        """Take requests from the head while there are seats, budget for the padded prompts, and blocks to the very end."""
        longest = needed = 0
        self._length = 0
        while self.waiting:
            request = self.waiting[0]
            longest = max(longest, request.num_tokens)
            rows = len(self._rows) + 1
            if rows > self.config.max_num_seqs:
                plan.blocked = Blocked(request.request_id, "seats", 1, 0)
            elif rows * longest > self.config.token_budget:
                plan.blocked = Blocked(request.request_id, "tokens", rows * longest, self.config.token_budget)
            elif self.config.kv_layout == "contiguous":
                shortage = self.kv.shortage(request, [])
                plan.blocked = Blocked(request.request_id, "blocks", *shortage) if shortage else None
            else:
                size = self.config.block_size
                needed += -(-(request.num_prompt_tokens + request.max_tokens - 1) // size)
                if needed > self.kv.pool.num_available:
                    plan.blocked = Blocked(request.request_id, "blocks", needed, self.kv.pool.num_available)
            if plan.blocked:
                return
            self.waiting.pop(0)
            self.running.append(request)
            self._rows.append(request)
            self.seats_taken += 1
            request.status = Status.RUNNING
            self._record(Event("admit", request.request_id))
            self.kv.admit(request, [])
            request.trace.cache_note = self.kv.explain(request, [])

    def _pad(self, plan: Plan, request: Request, num_tokens: int, context: int) -> None:
        """``num_tokens`` positions computed for nothing, reading ``context`` positions of the null block."""
        null_blocks = [0] * (-(-(context + num_tokens) // self.config.block_size))
        plan.rows.append(Row(request, "padding", num_tokens, context))
        plan.work.append(Work(None, [0] * num_tokens, context, null_blocks))
        plan.budget -= num_tokens
        self.counters.tokens_padded += num_tokens

    def remove(self, request: Request, *, scrub: bool = False) -> None:
        """An aborted or failed row leaves at once, unlike one that is done."""
        super().remove(request, scrub=scrub)
        if request in self._rows:
            self._rows.remove(request)
        self._end_batch()

    def finish(self, request: Request) -> None:
        """A row that is done keeps seat and blocks until the batch ends."""
        self.running.remove(request)
        request.status = Status.FINISHED
        self._end_batch()

    def _end_batch(self) -> None:
        if self.running:
            return
        for row in self._rows:
            self.seats_taken -= 1
            self.kv.release(row)
        self._rows = []
        self._length = 0

    def finished_rows(self) -> list[Request]:
        """Rows of the batch that are done."""
        return [row for row in self._rows if row.status is Status.FINISHED]


def _seats(request: Request) -> int:
    """Seats a request takes: its own and those of the samples that will fork from it."""
    return 1 + len(request.forks)
