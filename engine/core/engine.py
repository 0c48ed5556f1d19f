"""The engine: requests in, one step at a time, tokens and trace records out."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from array import array
from collections import Counter, OrderedDict
from copy import copy as copy_struct

from engine.core.ahead import AheadScheduler, Flight, async_runner, concerned, in_vain, take_off
from engine.core.block_pool import BlockHash
from engine.core.clock import Clock, MonotonicClock
from engine.core.config import EngineConfig
from engine.core.kv_cache import make_kv_cache
from engine.core.outputs import (
    ClosedRequest,
    CompletionOutput,
    EngineStats,
    Listener,
    OpenedRequest,
    RequestOutput,
    TextCodec,
    TokenEvent,
)
from engine.core.request import Request, Status
from engine.core.runner import PENDING, AsyncRunner, Runner, StepResult
from engine.core.sampling_params import SamplingParams
from engine.core.scheduler import Plan, Scheduler, StaticScheduler
from engine.core.stop import check_tokens, take_text
from engine.core.trace import DeviceSample, Event, FinishReason, Keyframe, RequestTrace, Scheduled, StepTrace

KEYFRAME_EVERY = 256
"""Steps between two keyframes."""
KEEP_FINISHED = 4096
"""Finished requests that ``request`` and ``output`` still answer for."""


class RequestRefused(ValueError):
    """A request that can't be accepted. The message names what was asked, the limit and the way out."""


class Engine:
    """One engine: a scheduler, a KV layout and a runner.

    ``step()`` is schedule → execute → postprocess::

        plan   = scheduler.schedule()            who computes how many tokens
        result = runner.execute(plan)            the forward pass, one token for each sampling request
        postprocess(plan, result)                append, detokenise, finish, free; write the StepTrace

    With ``async_scheduling`` the next step is scheduled and handed to the device before the tokens of this one are known:
    ``engine.core.ahead`` has the picture.

    All public methods may be called from any thread; they wait for a step in progress.

    Args:
        config: the knobs.
        runner: computes a step (a model, a script, a cost model).
        clock: engine time; default the machine's monotonic clock.
        codec: turns tokens into text; None: no texts, and stop strings are refused.
        eos_token_ids: tokens that end every request which does not ignore them.
        vocab_size: token ids must be below it; None: not checked.
        listener: hears of everything as it happens.
        block_hash: digest of a block for the prefix cache; default SHA-256.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Clock | None = None,
        *,
        codec: TextCodec | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        listener: Listener | None = None,
        block_hash: BlockHash | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or MonotonicClock()
        self._runner = runner
        self._codec = codec
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._listener = listener
        self._events: list[Event] = []
        self._kv = make_kv_cache(config, self._record, block_hash)
        continuous = AheadScheduler if config.async_scheduling else Scheduler
        make = StaticScheduler if config.batching == "static" else continuous
        self._scheduler: Scheduler = make(config, self._kv, self._record)
        self._live: dict[str, Request] = {}
        self._done: OrderedDict[str, Request] = OrderedDict()
        self._ids = itertools.count()
        self._orders = itertools.count()
        self._numbers = itertools.count()
        self._seed = config.seed if config.seed is not None else int.from_bytes(os.urandom(7), "little")
        self._counts = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._refused = 0
        self._generated = 0
        self._wasted = 0
        self._steps = 0
        """Steps whose record is complete; those in flight have the numbers that follow."""
        self._last_end = -math.inf
        self._flights: list[Flight] = []
        """Steps that are submitted and not collected, first one first: at most two, and one between two calls."""
        self._async_runner = async_runner(runner) if config.async_scheduling else None
        self._keyframe: Keyframe | None = self._snapshot()
        self._lock = threading.RLock()

    def _record(self, event: Event) -> None:
        self._events.append(event)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float | None = None,
        tokenised: float | None = None,
        prompt: str | None = None,
    ) -> str:
        """Queue a request; returns its id (the id of its first sample when ``n`` > 1, the others append ``#1``, ``#2`` …).

        Args:
            prompt_token_ids: at least one token.
            params: sampling settings; default ``SamplingParams()``.
            request_id: a new id; default a running number.
            priority: smaller is served first (policy ``priority`` only).
            cache_salt: prefix-cache hits happen only between requests with the same salt.
            arrival: when the request was due, seconds of the engine's clock; default now.
            tokenised: when its prompt was tokenised; default now.
            prompt: the text, kept for display.

        Raises:
            RequestRefused: (a ``ValueError``) the request can never run, or the queue is full. Nothing was changed.
        """
        with self._lock:
            params = params or SamplingParams()
            try:
                max_tokens = self._validate(prompt_token_ids, params, request_id, priority, cache_salt)
            except RequestRefused:
                self._refused += 1
                raise
            now = self.clock.now()
            order = next(self._orders)
            samples = _sample_ids(request_id if request_id is not None else self._new_id(params.n), params.n)
            life = RequestTrace(
                request_id=samples[0],
                samples=samples if params.n > 1 else (),
                arrival=arrival if arrival is not None else now,
                tokenised=tokenised if tokenised is not None else now,
                queued=now,
                prompt_tokens=len(prompt_token_ids),
                priority=priority,
                max_tokens=max_tokens,
                seed=params.seed if params.seed is not None else _mix(self._seed, [order]),
            )
            self._enter(
                [
                    self._sample(index, name, life, prompt_token_ids, params, order, cache_salt, prompt)
                    for index, name in enumerate(samples)
                ]
            )
            return samples[0]

    def _sample(
        self,
        index: int,
        name: str,
        life: RequestTrace,
        prompt_token_ids: list[int],
        params: SamplingParams,
        order: int,
        cache_salt: str | None,
        prompt: str | None,
    ) -> Request:
        """One sample of a request; ``life`` is the trace that all of them start with."""
        trace = _copy(life)
        trace.request_id = name
        trace.number = next(self._numbers)
        trace.parent_id = life.request_id if index else ""
        return Request(
            name,
            prompt_token_ids,
            params,
            trace=trace,
            max_tokens=life.max_tokens,
            order=order,
            priority=life.priority,
            cache_salt=cache_salt,
            seed=_mix(life.seed, prompt_token_ids),
            sample_index=index,
            eos_token_ids=self._eos_token_ids,
            decoder=self._codec.decoder(prompt_token_ids, params.skip_special_tokens) if self._codec else None,
            prompt=prompt,
        )

    def _new_id(self, samples: int) -> str:
        while True:
            names = _sample_ids(str(next(self._ids)), samples)
            if not any(name in self._live or name in self._done for name in names):
                return names[0]

    def _enter(self, group: list[Request]) -> None:
        first = group[0]
        first.forks = group[1:]
        for request in group:
            request.group = group if len(group) > 1 else []
            self._live[request.request_id] = request
            if self._listener:
                text = request.prompt or ""
                self._listener.opened(OpenedRequest(_copy(request.trace), text[:20_000], tuple(request.prompt_token_ids)))
        self._scheduler.add(first)

    def _validate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> int:
        """Refuse what can never run; returns the most tokens it may generate."""
        config = self.config
        count = len(prompt_token_ids)
        if count == 0:
            raise RequestRefused("the prompt has no tokens: send at least one")
        for token in prompt_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**63:
                raise RequestRefused(f"the prompt holds {token!r}, which is not a token id: a whole number from 0 to 2^63-1")
        if self._vocab_size is not None and max(prompt_token_ids) >= self._vocab_size:
            raise RequestRefused(
                f"the prompt holds token id {max(prompt_token_ids)}, but the vocabulary has {self._vocab_size} tokens"
            )
        if count >= config.max_model_len:
            raise RequestRefused(
                f"the prompt has {count} tokens, but max_model_len={config.max_model_len} must hold the prompt and at least "
                f"one generated token: shorten the prompt to {config.max_model_len - 1} tokens or raise max_model_len"
            )
        if params.max_tokens is not None and count + params.max_tokens > config.max_model_len:
            raise RequestRefused(
                f"the prompt has {count} tokens and max_tokens={params.max_tokens}, together {count + params.max_tokens}, "
                f"but max_model_len={config.max_model_len}: lower max_tokens to {config.max_model_len - count}, shorten "
                f"the prompt, or raise max_model_len"
            )
        room = max(1, min(config.max_model_len - count, self._kv.room(count)))
        max_tokens = params.max_tokens if params.max_tokens is not None else room
        refusal = self._kv.refusal(count, max_tokens)
        if refusal:
            raise RequestRefused(refusal)
        if params.min_tokens > max_tokens:
            raise RequestRefused(f"min_tokens={params.min_tokens}, but only {max_tokens} tokens fit: lower min_tokens")
        self._validate_samples(params)
        if params.stop_strings and self._codec is None:
            raise RequestRefused("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        for name in _sample_ids(request_id, params.n) if request_id is not None else ():
            if name in self._live or name in self._done:
                raise RequestRefused(f"request_id={name!r} was used before: choose another or leave it out")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestRefused(f"priority={priority!r} must be a whole number (smaller is served first)")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestRefused(f"cache_salt={cache_salt!r} must be a text")
        if len(self._scheduler.waiting) >= config.max_num_queued_requests:
            raise RequestRefused(
                f"{len(self._scheduler.waiting)} requests wait already and "
                f"max_num_queued_requests={config.max_num_queued_requests}: wait until some have started, or raise the limit"
            )
        return max_tokens

    def _validate_samples(self, params: SamplingParams) -> None:
        if params.n == 1:
            return
        config = self.config
        if params.n > config.max_num_seqs:
            raise RequestRefused(
                f"n={params.n} samples need {params.n} seats, but max_num_seqs={config.max_num_seqs}: "
                f"lower n or raise max_num_seqs"
            )
        for obstacle, present in (
            ("kv_layout='contiguous'", config.kv_layout == "contiguous"),
            ("use_kv_cache=False", not config.use_kv_cache),
            ("batching='static'", config.batching == "static"),
        ):
            if present:
                raise RequestRefused(
                    f"n={params.n} samples share the prompt's KV blocks, which {obstacle} can't do: "
                    f"send {params.n} requests with n=1, or change {obstacle.split('=')[0]}"
                )

    def abort(self, request_id: str) -> bool:
        """Stop a request and all its samples (or one sample, by its own id); frees everything at once.

        Returns False, and changes nothing, for an unknown, finished or already aborted id.
        """
        with self._lock:
            request = self._live.get(request_id) or self._done.get(request_id)
            if request is None:
                return False
            members = [r for r in (request.group or [request]) if r.status is not Status.FINISHED]
            if request.sample_index:
                members = [r for r in members if r is request]
            return self._abort(members) > 0

    def abort_all(self) -> int:
        """Stop everything; returns how many requests (samples) were stopped."""
        with self._lock:
            return self._abort(list(self._live.values()))

    def _abort(self, members: list[Request]) -> int:
        for member in members:
            if member.status is not Status.FINISHED:  # closing a parent closes the samples that wait to fork from it
                self._close(member, "abort")
        return len(members)

    def _close(self, request: Request, reason: FinishReason, error: str = "", scrub: bool = False) -> None:
        """End a request before its time, or after it produced its last token."""
        forks, request.forks = request.forks, []
        if forks and request.status is Status.RUNNING:
            self._scheduler.seats_taken -= len(forks)
        waits_to_fork = request.sample_index and request.status is Status.WAITING and not request.trace.preemptions
        if waits_to_fork and request.group[0].forks and request in request.group[0].forks:
            self._leave_before_fork(request)
        elif reason in ("stop", "length"):
            self._scheduler.finish(request)
        else:
            self._scheduler.remove(request, scrub=scrub)
        self._report_closed(request, reason, error)
        for fork in forks:
            fork.status = Status.FINISHED
            self._report_closed(fork, reason, error)

    def _leave_before_fork(self, request: Request) -> None:
        parent = request.group[0]
        parent.forks.remove(request)
        if parent.status is Status.RUNNING:
            self._scheduler.seats_taken -= 1
        request.status = Status.FINISHED

    def _report_closed(self, request: Request, reason: FinishReason, error: str) -> None:
        trace = request.trace
        trace.finish_reason = reason
        trace.error = error
        trace.finished = trace.token_times[-1] if reason in ("stop", "length") else self.clock.now()
        if request.decoder and reason in ("abort", "error"):
            request.text += request.decoder.finish()
        self._counts[reason] += 1
        del self._live[request.request_id]
        self._done[request.request_id] = request
        while len(self._done) > KEEP_FINISHED:
            self._done.popitem(last=False)
        self._record(Event("finish", request.request_id, (), 0, reason))
        if self._listener:
            self._listener.closed(ClosedRequest(_copy(trace), request.text))

    # ------------------------------------------------------------------ stepping

    def step(self, *, wait_time: float = 0.0, slow: bool = False, device: DeviceSample | None = None) -> StepTrace:
        """Run one step; returns its record.

        With nothing to compute the record has no rows; it carries what happened since the last step, if anything did, and
        only then counts as a step. With ``async_scheduling`` the next step is in flight when this returns, if there is one.

        Args:
            wait_time: seconds spent on other labs since the last step.
            slow: the step is single-stepped or in slow motion.
            device: what the GPU said of itself since the last step, for the record.
        """
        with self._lock:
            if self._async_runner is not None:
                return self._step_ahead(self._async_runner, wait_time, slow, device)
            flight = self._schedule(wait_time, slow)
            if not flight.plan.work:
                return self._idle_step(flight)
            result = self._execute(flight)
            return self._complete(flight, result, slow, device)

    def _step_ahead(
        self, runner: AsyncRunner, wait_time: float, slow: bool, device: DeviceSample | None = None
    ) -> StepTrace:
        """Have a step in flight, put the next one behind it, and collect the first; see ``engine.core.ahead``."""
        if not self._flights:
            flight = self._launch(runner, wait_time, slow)
            if not flight.plan.work:
                return self._idle_step(flight)
            wait_time = 0.0
        first = self._flights[0]
        if not first.failure:
            after = self._launch(runner, wait_time, slow)
            if not after.plan.work:
                first.plan.preemptions += after.plan.preemptions
                first.wait_time += wait_time
        return self._land(runner, slow, device)

    def _launch(self, runner: AsyncRunner, wait_time: float, slow: bool) -> Flight:
        """Schedule a step and hand it to the device."""
        flight = self._schedule(wait_time, slow)
        if not flight.plan.work:
            return flight
        self._begin_record(flight.index + 1)
        batch = flight.plan.batch(flight.index, self._kv.take_scrub())
        try:
            flight.handle = runner.submit(batch)
        except Exception as error:
            self._kv.return_scrub(batch.scrub)
            flight.failure = f"{type(error).__name__}: {error}"
        take_off(flight)
        self._flights.append(flight)
        return flight

    def _land(self, runner: AsyncRunner, slow: bool = False, device: DeviceSample | None = None) -> StepTrace:
        """Wait for the first step in flight and hand out its tokens."""
        flight = self._flights[0]
        result = StepResult([])
        if not flight.failure:
            try:
                result = runner.collect(flight.handle)
            except Exception as error:
                flight.failure = f"{type(error).__name__}: {error}"
        del self._flights[0]
        return self._complete(flight, result, slow, device)

    def _schedule(self, wait_time: float, slow: bool) -> Flight:
        """Decide a step; what happened before belongs to its record."""
        start = self.clock.now()
        plan = self._scheduler.schedule()
        flight = Flight(
            index=self._steps + len(self._flights),
            plan=plan,
            start=start,
            keyframe=self._keyframe,
            kv_used=self._kv.pool.num_referenced,
            kv_cached=self._kv.pool.num_cached,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            seats=self._scheduler.seats_taken,
            wait_time=wait_time,
            slow=slow,
        )
        if plan.work:
            for row in plan.rows:
                trace = row.request.trace
                if trace.first_scheduled < 0:
                    trace.first_scheduled = start
                trace.slow = trace.slow or slow
            flight.events, self._events = self._events, []
        flight.scheduled = self.clock.now()
        return flight

    def _complete(self, flight: Flight, result: StepResult, slow: bool, device: DeviceSample | None) -> StepTrace:
        """The step's tokens are known: hand them out and write its record."""
        end = self.clock.now()
        postprocess = self._postprocess if self._async_runner is None else self._postprocess_late
        rows = postprocess(flight.plan, result, flight.failure, end)
        if slow and not flight.slow:
            for row in flight.plan.rows:
                row.request.trace.slow = True
        self._steps += 1
        last = not self._flights
        step = StepTrace(
            index=flight.index,
            start=flight.start,
            schedule_time=flight.scheduled - flight.start,
            prepare_time=result.prepare_time,
            forward_time=result.forward_time,
            sample_time=result.sample_time,
            launch_time=result.launch_time,
            gpu_time=result.gpu_time,
            gpu_idle_time=result.gpu_idle_time,
            postprocess_time=self.clock.now() - end,
            wait_time=flight.wait_time,
            overlap=max(0.0, self._last_end - flight.start),
            end=end,
            scheduled=rows,
            token_budget=self.config.token_budget,
            seats=flight.seats,
            num_running=flight.running,
            num_waiting=flight.waiting,
            blocked=flight.plan.blocked,
            preemptions=tuple(flight.plan.preemptions),
            events=tuple(flight.events),
            events_after=tuple(self._events) if last else (),
            keyframe=flight.keyframe,
            kv_used=flight.kv_used,
            kv_cached=flight.kv_cached,
            flops=result.flops,
            bytes=result.bytes,
            slow=slow or flight.slow,
            device=device,
        )
        self._last_end = end
        return self._finish_step(step, last)

    def flush_events(self) -> StepTrace | None:
        """Record what happened since the last step without computing one: a paused lab's pictures stay true.

        While a step is in flight the next record will tell it; a step that nobody needs any more is collected for that.
        """
        with self._lock:
            if self._flights and self._async_runner is not None:
                return None if self._live else self._land(self._async_runner)
            return self._idle_record(self.clock.now()) if self._events else None

    def _finish_step(self, step: StepTrace, last: bool = True) -> StepTrace:
        """Report the record. After the last step in flight, what happens next belongs to a step not yet scheduled."""
        if last:
            self._begin_record(self._steps)
        if self._listener:
            self._listener.stepped(step)
        return step

    def _begin_record(self, index: int) -> None:
        """What happens from here on belongs to step ``index``, which starts with a keyframe if one is due."""
        self._events = []
        self._keyframe = self._snapshot() if index % KEYFRAME_EVERY == 0 else None

    def _idle_step(self, flight: Flight) -> StepTrace:
        if self._scheduler.waiting:
            head, blocked = self._scheduler.waiting[0], flight.plan.blocked
            raise RuntimeError(f"nothing could be scheduled although {head} waits: {blocked}")
        return self._idle_record(flight.start)

    def _idle_record(self, start: float) -> StepTrace:
        pool = self._kv.pool
        step = StepTrace(
            index=self._steps,
            start=start,
            end=start,
            token_budget=self.config.token_budget,
            seats=self._scheduler.seats_taken,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            events=tuple(self._events),
            keyframe=self._keyframe,
            kv_used=pool.num_referenced,
            kv_cached=pool.num_cached,
        )
        if not self._events:
            return step
        self._steps += 1
        return self._finish_step(step)

    def _execute(self, flight: Flight) -> StepResult:
        """Run the step; a runner that fails as a whole fails all its requests, and the engine goes on."""
        batch = flight.plan.batch(flight.index, self._kv.take_scrub())
        try:
            return self._runner.execute(batch)
        except Exception as error:
            self._kv.return_scrub(batch.scrub)
            flight.failure = f"{type(error).__name__}: {error}"
            return StepResult([])

    def _postprocess(self, plan: Plan, result: StepResult, failure: str, now: float) -> tuple[Scheduled, ...]:
        """Hand each sampled token to its request, offer full blocks to others, and end what is done."""
        failed = {row.request.request_id for row in plan.rows} if failure else result.nonfinite
        if failed:
            self._fail(plan, failed, failure)
        sampled: dict[str, int] = {}
        position = 0
        tokens, logprobs = result.tokens, result.logprobs
        commit = self._kv.commit
        for work in plan.work:
            request = work.request
            if request is None:
                continue
            if request.status is Status.RUNNING:
                commit(request)
            for request in work.samples:
                if not failure:
                    if request.status is Status.RUNNING:
                        sampled[request.request_id] = tokens[position]
                        self._append(request, tokens[position], logprobs[position] if logprobs else None, now)
                    position += 1
        return _records(plan, sampled)

    def _postprocess_late(self, plan: Plan, result: StepResult, failure: str, now: float) -> tuple[Scheduled, ...]:
        """The same where the next step is already in flight: requests may have ended or been preempted meanwhile."""
        self._wasted += in_vain(plan)
        failed = {row.request.request_id for row in plan.rows} if failure else result.nonfinite
        if failed:
            self._fail(plan, failed, failure)
        sampled: dict[str, int] = {}
        position = 0
        for work in plan.work:
            computed = work.context + len(work.token_ids)
            if work.request and work.request.status is Status.RUNNING:
                self._kv.commit_until(work.request, computed)
            for request in concerned(work):
                request.in_flight -= len(work.token_ids)
            for request in () if failure else work.samples:
                if request.status is not Status.FINISHED:
                    sampled[request.request_id] = result.tokens[position]
                    top = result.logprobs[position] if result.logprobs else None
                    self._append_late(request, computed, result.tokens[position], top, now)
                position += 1
        return _records(plan, sampled)

    def _append_late(self, request: Request, place: int, token: int, logprobs: dict | None, now: float) -> None:
        """The token takes the place of its placeholder; one that a later step samples stays behind it."""
        later = len(request.token_ids) - place - 1
        del request.token_ids[place:]
        self._append(request, token, logprobs, now)
        if request.status is not Status.FINISHED:
            request.token_ids += [PENDING] * later

    def _fail(self, plan: Plan, failed: frozenset[str] | set[str], failure: str) -> None:
        """End requests whose numbers are not finite (or all of the step): alone, with their blocks zeroed before reuse.

        Samples that a step in flight forks off the prompt of such a request end too: they read the same blocks.
        """
        forked_ahead = [work for later in self._flights for work in later.plan.work if len(work.samples) > 1]
        for work in [*plan.work, *forked_ahead]:
            if work.request is None:
                continue
            error = failure or (
                f"the model produced NaN or infinity for this request after {work.context + len(work.token_ids)} tokens: "
                f"the weights or the prompt are at fault, other requests are not affected"
            )
            for request in work.samples or (work.request,):
                hit = work.request.request_id in failed or request.request_id in failed
                if hit and request.status is not Status.FINISHED:
                    self._close(request, "error", error, scrub=True)

    def _append(self, request: Request, token: int, logprobs: dict | None, now: float) -> None:
        request.token_ids.append(token)
        trace = request.trace
        trace.token_times.append(now)
        trace.token_steps.append(self._steps)
        self._generated += 1
        if logprobs is not None:
            request.logprobs.append(logprobs)
        reason = check_tokens(request, token, self.config.max_model_len)
        text = ""
        if request.decoder is not None:
            text, reason = take_text(request, token, reason)
        if self._listener:
            top = tuple((t, lp.decoded_token, math.exp(lp.logprob)) for t, lp in (logprobs or {}).items())
            self._listener.token(
                TokenEvent(request.request_id, request.num_output_tokens - 1, token, text, self._steps, top)
            )
        if reason and request.status is not Status.FINISHED:  # the listener may have aborted it
            self._close(request, reason)

    # ------------------------------------------------------------------ looking in

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return bool(self._live or self._flights)

    def has_pending_events(self) -> bool:
        """Whether something happened since the last step that only the next record will tell."""
        return bool(self._events)

    def is_finished(self, request_id: str) -> bool:
        """Whether the request (the sample) has ended; False for an unknown one too."""
        return request_id in self._done

    def request(self, request_id: str) -> RequestTrace:
        """The life of a request (a sample) so far: a copy.

        Raises:
            KeyError: unknown, or finished so long ago that it is forgotten.
        """
        with self._lock:
            return _copy(self._find(request_id).trace)

    def _find(self, request_id: str) -> Request:
        found = self._live.get(request_id) or self._done.get(request_id)
        if found is None:
            raise KeyError(
                f"no request {request_id!r}: unknown, or one of those before the last {KEEP_FINISHED} finished ones"
            )
        return found

    def output(self, request_id: str) -> RequestOutput:
        """Texts and tokens of a request so far, all samples.

        Raises:
            KeyError: unknown, or finished so long ago that it is forgotten.
        """
        with self._lock:
            first = self._find(request_id)
            group = first.group or [first]
            return RequestOutput(
                request_id=group[0].request_id,
                prompt=first.prompt,
                prompt_token_ids=first.prompt_token_ids,
                outputs=[_completion(request) for request in group],
                finished=all(request.status is Status.FINISHED for request in group),
                metrics=_copy(group[0].trace),
            )

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        with self._lock:
            scheduler, pool, counters = self._scheduler, self._kv.pool, self._scheduler.counters
            held = [*scheduler.running, *scheduler.finished_rows()]
            reserved = pool.num_referenced * self.config.block_size
            return EngineStats(
                steps=self._steps,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                finished=self._counts["stop"] + self._counts["length"],
                aborted=self._counts["abort"],
                failed=self._counts["error"],
                refused=self._refused,
                preemptions=counters.preemptions,
                blocks_total=pool.num_blocks,
                blocks_free=pool.num_available - pool.num_cached,
                blocks_cached=pool.num_cached,
                blocks_referenced=pool.num_referenced,
                tokens_computed=counters.tokens_computed,
                tokens_cached=counters.tokens_cached,
                tokens_recomputed=counters.tokens_recomputed,
                tokens_lost=counters.tokens_lost,
                tokens_resumed=counters.tokens_resumed,
                tokens_generated=self._generated,
                tokens_padded=counters.tokens_padded,
                tokens_wasted=self._wasted,
                prefix_queries=counters.prefix_queries,
                prefix_query_blocks=counters.prefix_query_blocks,
                prefix_hit_blocks=counters.prefix_hit_blocks,
                evictions=pool.evictions,
                kv_reserved_tokens=reserved,
                kv_stored_tokens=reserved - self._kv.unused_tokens(held),
                largest_hole=self._kv.largest_hole,
            )

    def _snapshot(self) -> Keyframe:
        """The whole state now."""
        scheduler, pool = self._scheduler, self._kv.pool
        held = [*scheduler.running, *scheduler.finished_rows()]
        return Keyframe(
            free=tuple(pool.free),
            cached=pool.cached_blocks(),
            tables={r.request_id: tuple(r.block_table) for r in held},
            computed={r.request_id: r.num_computed_tokens for r in held},
            waiting=tuple(r.request_id for r in scheduler.waiting),
            running=tuple(r.request_id for r in scheduler.running),
        )

    def snapshot(self) -> Keyframe:
        """The state of pool, tables and queues now: what replaying the trace must give."""
        with self._lock:
            return self._snapshot()

    def check(self) -> None:
        """Verify every invariant of pool, tables, queues and request table; when idle, that everything was returned.

        Raises:
            RuntimeError: saying what is wrong.
        """
        with self._lock:
            scheduler = self._scheduler
            scheduler.check()
            self._check_pending()
            waiting_forks = [fork for r in [*scheduler.waiting, *scheduler.running] for fork in r.forks]
            queued = {r.request_id for r in [*scheduler.waiting, *scheduler.running, *waiting_forks]}
            if queued != set(self._live):
                raise RuntimeError(f"the request table and the queues differ: {sorted(queued ^ set(self._live))}")
            if not self._live and (self._kv.pool.num_referenced or scheduler.seats_taken):
                raise RuntimeError(
                    f"idle, but {self._kv.pool.num_referenced} blocks and {scheduler.seats_taken} seats are held"
                )

    def _check_pending(self) -> None:
        """A request ends in a placeholder for each step in flight that samples for it, and counts what they compute."""
        works = [(work, not flight.failure) for flight in self._flights for work in flight.plan.work]
        pending = Counter(request for work, submitted in works if submitted for request in work.samples)
        computed = Counter[Request]()
        for work, _ in works:
            computed.update(dict.fromkeys(concerned(work), len(work.token_ids)))
        for request in self._live.values():
            known = request.num_tokens - pending[request]
            if request.token_ids[known - 1 :].count(PENDING) != pending[request] or request.token_ids[known - 1] == PENDING:
                raise RuntimeError(f"{request} ends in {request.token_ids[-3:]} with {pending[request]} tokens in flight")
            if request.in_flight != computed[request]:
                raise RuntimeError(
                    f"{request} counts {request.in_flight} positions in flight: there are {computed[request]}"
                )


def _records(plan: Plan, sampled: dict[str, int]) -> tuple[Scheduled, ...]:
    """The rows of a step for its record, with the tokens that requests got."""
    get = sampled.get
    return tuple(
        [
            Scheduled(
                row.request.request_id,
                row.kind,
                row.num_tokens,
                row.context,
                row.cached,
                row.recomputed,
                get(row.request.request_id, -1) if row.samples else -1,
            )
            for row in plan.rows
        ]
    )


def _completion(request: Request) -> CompletionOutput:
    return CompletionOutput(
        index=request.sample_index,
        text=request.text,
        token_ids=request.output_token_ids,
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        finish_reason=request.trace.finish_reason,
        stop_reason=request.trace.stop_reason,
        error=request.trace.error,
    )


def _sample_ids(identity: str, samples: int) -> tuple[str, ...]:
    return (identity, *(f"{identity}#{index}" for index in range(1, samples)))


def _copy(trace: RequestTrace) -> RequestTrace:
    """A copy whose lists no later step changes."""
    copy = copy_struct(trace)
    copy.token_times = list(trace.token_times)
    copy.token_steps = list(trace.token_steps)
    return copy


def _mix(seed: int, numbers: list[int]) -> int:
    """A 63-bit number that depends on ``seed`` and all of ``numbers``."""
    digest = hashlib.blake2b((seed % 2**64).to_bytes(8, "little") + array("q", numbers).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
