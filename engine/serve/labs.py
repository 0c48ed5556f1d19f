"""The labs of a host: engines that share one model and take turns on it.

::

    lab A  step ─┐      ┌─ step ─┐      ┌─ step …        one step each, in turn;
    lab B        └ step ┘        └ step ┘                a step records how long it waited for the others

No torch here: a model is whatever satisfies ``HostModel``.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from engine.core.clock import PausableClock
from engine.core.config import ConfigError, EngineConfig, build_config, require_gpu
from engine.core.engine import Engine
from engine.core.model_info import ModelInfo
from engine.core.outputs import ClosedRequest, OpenedRequest, TextCodec, TokenEvent
from engine.core.runner import Runner
from engine.core.sampling_params import SamplingParams
from engine.core.trace import DeviceSample, StepTrace
from engine.serve.gpu_figures import GpuName
from engine.serve.protocol import BackendFacts, LabInfo, LabUpdate, Send
from engine.serve.traffic import Traffic

MAX_COPIES = 64
"""Most copies of one ``Send``."""
MAX_STEPS_ASKED = 100_000
"""Most single steps of one ``Control``."""
MUTED_EVERY = 0.5
"""Seconds between two updates of a lab that is being measured."""
MIN_RATE, MAX_RATE = 0.01, 1000.0
"""Slow motion: steps a second."""
CHARS_A_TOKEN = 8
"""A first guess at the characters of a token, on the generous side: how much of a long text is looked at first."""


class HostModel(Protocol):
    """A loaded model as the labs need it."""

    info: ModelInfo
    context_limit: int
    """Longest sequence that the model computes, tokens."""
    codec: TextCodec
    eos_token_ids: frozenset[int]
    gpu: GpuName | None
    """The GPU that computes, by the names that NVML knows it by; None on a CPU."""

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a text, wrapped in the chat template or with the model's usual special tokens."""
        ...

    def fit(self, config: EngineConfig) -> EngineConfig:
        """The settings with the pool that ``gpu_memory_utilization`` asks for; unchanged without it.

        Raises:
            ValueError: there is no GPU, or too little memory, with all numbers.
        """
        ...

    def runner(self, config: EngineConfig) -> Runner:
        """A runner with a KV pool of its own.

        Raises:
            ValueError: this model can't run with these settings.
            Exception: the pool could not be allocated.
        """
        ...

    def pool_bytes(self, config: EngineConfig) -> int:
        """Bytes that the KV pool of such a runner takes."""
        ...

    def release(self, runner: Runner) -> None:
        """Free a runner's pool."""
        ...

    def free_bytes(self) -> int:
        """Bytes that are free now where pools live."""
        ...


def nothing_sampled() -> DeviceSample | None:
    """What a GPU that isn't there says of itself."""
    return None


class RefusalError(ValueError):
    """A command that can't be done; the message is for people."""


class Lab:
    """One engine and its settings. Hears of everything its engine does and posts it as updates.

    Args:
        name: the lab's unguessable name.
        model: the shared model.
        config, runner: the engine's.
        post: takes updates.
        generation: number of the first engine.
        paused: whether it starts paused.
        device_sample: what the GPU last said of itself; each sample goes into one step's record.
    """

    def __init__(
        self,
        name: str,
        model: HostModel,
        config: EngineConfig,
        runner: Runner,
        post: Callable[[LabUpdate], None],
        *,
        generation: int = 1,
        paused: bool = False,
        device_sample: Callable[[], DeviceSample | None] = nothing_sampled,
    ) -> None:
        self.name = name
        self.model = model
        self.mode: Literal["running", "paused"] = "paused" if paused else "running"
        self.rate: float | None = None
        self.steps_asked = 0
        """Single steps still to be taken."""
        self.due = 0.0
        """When the next slow-motion step may start, ``time.monotonic`` seconds."""
        self.traffic: Traffic | None = None
        """The newest workload."""
        self.muted = False
        """Under a lease: updates are rare."""
        self._workloads = 0
        self._told = ""
        """The newest reason for a refused request of the workload that was told."""
        self._flushed = 0.0
        self.turns_seen = 0.0
        """The host's total step time when this lab last stepped or became ready."""
        self._post = post
        self._device_sample, self._sampled = device_sample, -1.0
        self._start(config, runner, generation)

    def _start(self, config: EngineConfig, runner: Runner, generation: int) -> None:
        self.config, self.runner, self.generation = config, runner, generation
        self.traffic = None
        self.clock = PausableClock()
        self._opened: list[OpenedRequest] = []
        self._steps: list[StepTrace] = []
        self._tokens: list[TokenEvent] = []
        self._closed: list[ClosedRequest] = []
        self.engine = Engine(
            config,
            runner,
            self.clock,
            codec=self.model.codec,
            eos_token_ids=self.model.eos_token_ids,
            vocab_size=self.model.info.vocab_size,
            listener=self,
        )
        self.steps_asked = 0
        self._set_clock()

    # -- what the engine tells -----------------------------------------------------------------------------------------

    def opened(self, event: OpenedRequest) -> None:
        """A request entered."""
        self._opened.append(event)

    def token(self, event: TokenEvent) -> None:
        """A token was sampled."""
        self._tokens.append(event)

    def closed(self, event: ClosedRequest) -> None:
        """A request ended."""
        self._closed.append(event)
        if self.traffic is not None:
            self.traffic.closed(event, self.clock.now())

    def stepped(self, step: StepTrace) -> None:
        """A step is complete."""
        self._steps.append(step)
        if self.traffic is not None:
            self.traffic.stepped()

    def flush(self, *, info: bool = False, notice: str = "") -> None:
        """Post what happened since the last time, with fresh gauges."""
        busy = self.engine.has_unfinished() and not (info or notice)
        if self.muted and busy and time.monotonic() - self._flushed < MUTED_EVERY:
            return
        self._flushed = time.monotonic()
        update = LabUpdate(
            lab=self.name,
            generation=self.generation,
            info=self.info() if info else None,
            opened=self._opened,
            steps=self._steps,
            tokens=self._tokens,
            closed=self._closed,
            stats=self.engine.stats(),
            now=self.clock.now(),
            notice=notice,
            traffic=self.traffic.report() if self.traffic is not None else None,
        )
        self._opened, self._steps, self._tokens, self._closed = [], [], [], []
        self._post(update)

    # -- running -------------------------------------------------------------------------------------------------------

    @property
    def slow(self) -> bool:
        """Whether steps are single steps or slow motion: left out of percentiles, and time stands still between them."""
        return self.mode == "paused" or self.rate is not None

    def ready_at(self) -> float | None:
        """When the next step may start (``time.monotonic``, 0 for at once); None while there is nothing to do."""
        engine = self.engine
        ready: float | None = None
        if engine.has_unfinished() or (self.steps_asked and self.traffic is not None):
            if self.steps_asked or (self.mode == "running" and self.rate is None):
                ready = 0.0
            elif self.mode == "running":
                ready = self.due
        elif engine.has_pending_events():
            ready = 0.0
        elif self.traffic is not None and self.mode == "running":
            if self.rate is not None:
                self.clock.resume()  # nothing runs in slow motion, so the time until the next arrival passes as it is
            ready = self.traffic.due_at(self.clock)
        return ready

    def step(self, turns: float) -> None:
        """Take one step; ``turns`` is the host's total step time so far, seconds."""
        wait, slow = max(0.0, turns - self.turns_seen), self.slow
        if self.rate is not None:
            self.due = time.monotonic() + 1.0 / self.rate
        if self.steps_asked:
            self.steps_asked -= 1
        if slow:
            self.clock.resume()
        refused = self._feed()
        self.engine.step(wait_time=wait, slow=slow, device=self._new_sample())
        if slow:
            self.clock.pause()
        if not self.engine.has_unfinished():
            self.steps_asked = 0
        self.flush(notice=refused)

    def _new_sample(self) -> DeviceSample | None:
        """What the GPU said since the last step of this lab, if it said anything."""
        sample = self._device_sample()
        if sample is None or sample.time == self._sampled:
            return None
        self._sampled = sample.time
        return sample

    def _feed(self) -> str:
        """Send what the workload has due; why a request was refused, unless that was told before."""
        if self.traffic is None:
            return ""
        self.traffic.feed(self.engine)
        reason = self.traffic.last_refusal
        if not reason or reason == self._told:
            return ""
        self._told = reason
        return f"A request of the traffic was refused: {reason}"

    def _set_clock(self) -> None:
        if self.slow:
            self.clock.pause()
        else:
            self.clock.resume()
        self.resumed = time.perf_counter()

    def control(self, action: str, steps: int, rate: float | None) -> None:
        """Run, pause, or ask for single steps."""
        if action == "step":
            if not 1 <= steps <= MAX_STEPS_ASKED:
                raise RefusalError(f"steps={steps} must be from 1 to {MAX_STEPS_ASKED:,}")
            if not self.engine.has_unfinished() and (self.traffic is None or self.traffic.due_at(self.clock) != 0.0):
                raise RefusalError("there is nothing to step through: no request waits or runs. Send a prompt first")
            self.steps_asked += steps
            self.mode = "paused"
        elif action == "pause":
            self.mode, self.steps_asked = "paused", 0
        else:
            if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
                raise RefusalError(
                    f"rate={rate:g} steps a second must be from {MIN_RATE:g} to {MAX_RATE:g}, or None for full speed"
                )
            self.mode, self.rate, self.steps_asked, self.due = "running", rate, 0, 0.0
        self._set_clock()
        self.flush(info=True)

    def info(self) -> LabInfo:
        """The lab as others see it."""
        return LabInfo(
            lab=self.name,
            config=self.config,
            mode=self.mode,
            rate=self.rate,
            generation=self.generation,
            kv_pool_bytes=getattr(self.runner, "kv_pool_bytes", None) or self.model.pool_bytes(self.config),
            backend=backend_facts(self.runner),
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def send(self, command: Send, received: float) -> list[str]:
        """Add the copies of a request; all or none. ``received``: ``time.perf_counter`` when the host read the command."""
        if not 1 <= command.copies <= MAX_COPIES:
            raise RefusalError(f"copies={command.copies} must be from 1 to {MAX_COPIES}")
        waiting, longest = self.engine.stats().waiting, self.config.max_num_queued_requests
        if waiting + command.copies > longest:
            raise RefusalError(
                f"{command.copies} more would make {waiting + command.copies} waiting requests; the queue holds at most "
                f"max_num_queued_requests={longest}. Wait, stop some, or raise the limit"
            )
        arrival = self._arrival(received)
        params = _params(command.params)
        prompt = command.prompt if isinstance(command.prompt, str) else None
        token_ids = self._tokens_of(command)
        tokenised = self.clock.now()
        added: list[str] = []
        try:
            for _ in range(command.copies):
                added.append(  # noqa: PERF401 - what was added must be known when one fails
                    self.engine.add_request(
                        token_ids,
                        params,
                        priority=command.priority,
                        cache_salt=command.cache_salt,
                        arrival=arrival,
                        tokenised=tokenised,
                        prompt=prompt,
                    )
                )
        except Exception:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        finally:
            self.flush()
        return added

    def _arrival(self, received: float) -> float:
        """``received`` on the engine's clock, which may have stood still meanwhile."""
        now = time.perf_counter()
        running_for = 0.0 if self.clock.paused else now - max(received, self.resumed)
        return max(0.0, self.clock.now() - max(0.0, running_for))

    def _tokens_of(self, command: Send) -> list[int]:
        """The prompt as token ids. Of a text far beyond the context no more is tokenised than it takes to say so."""
        if not isinstance(command.prompt, str):
            return list(command.prompt)
        text, limit = command.prompt, self.config.max_model_len
        size = limit * CHARS_A_TOKEN
        while size < len(text):
            count = len(self.model.encode(text[:size], chat=command.chat))
            if count > limit + 16:
                raise RefusalError(
                    f"the prompt has {len(text):,} characters and more than {count:,} tokens; "
                    f"max_model_len={limit:,} tokens is the limit of prompt and answer together. Shorten the prompt, or "
                    f"raise max_model_len (this model computes up to {self.model.context_limit:,})"
                )
            size *= 4
        return self.model.encode(text, chat=command.chat)

    def abort(self, request_id: str | None) -> int:
        """Stop one request or all; returns how many were stopped. Unknown and finished ones count 0."""
        stopped = self.engine.abort_all() if request_id is None else int(self.engine.abort(request_id))
        if not self.engine.has_unfinished():
            self.steps_asked = 0
        self.engine.flush_events()
        self.flush()
        return stopped

    # -- workloads -----------------------------------------------------------------------------------------------------

    def start_traffic(self, spec: dict[str, Any]) -> None:
        """Run a workload, in the place of the one that may be running."""
        traffic = Traffic(spec, lambda text: self.model.encode(text, chat=False), self._workloads)
        self._workloads += 1
        if self.traffic is not None:
            self.traffic.stop()
        self.traffic, self._told = traffic, ""
        self.flush()

    def change_traffic(self, rate: float | None) -> None:
        """Change the rate of the workload, or end it."""
        if self.traffic is None:
            raise RefusalError("no workload runs in this lab: start one first")
        if rate is None:
            self.traffic.stop()
        else:
            self.traffic.set_rate(rate, self.engine)
        self.flush()

    # -- ending and changing -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all requests and report what that brought about."""
        if self.traffic is not None:
            self.traffic.stop()
        self.engine.abort_all()
        if self.engine.has_pending_events() and not self.engine.has_unfinished():
            self.engine.step(slow=self.slow)
        self.flush()

    def restart(self, config: EngineConfig, runner: Runner) -> None:
        """Go on with a new engine, after ``stop``."""
        self._start(config, runner, self.generation + 1)
        self.flush(info=True)


def backend_facts(runner: Any) -> BackendFacts | None:
    """What a runner says of itself (``ModelRunner.describe_backend``); None from one that says nothing."""
    describe = getattr(runner, "describe_backend", None)
    if describe is None:
        return None
    told, verdict = describe(), getattr(runner, "verdict", None)
    return BackendFacts(
        name=told.name,
        fused=told.fused,
        graphs=told.graphs,
        reason=told.reason,
        graph_bytes=told.graph_bytes,
        checks=tuple(str(check) for check in verdict.checks) if verdict is not None else (),
    )


class LabSet:
    """All labs of a host: opening and closing within the quotas, and whose turn it is.

    Args:
        model: the shared model.
        post: takes updates.
        max_labs: how many can be open at once.
        quota_bytes: how much all pools may take together.
        device_sample: what the GPU last said of itself.
    """

    def __init__(
        self,
        model: HostModel,
        post: Callable[[LabUpdate], None],
        *,
        max_labs: int,
        quota_bytes: int,
        device_sample: Callable[[], DeviceSample | None] = nothing_sampled,
    ) -> None:
        self.model = model
        self.max_labs = max_labs
        self.quota_bytes = quota_bytes
        self._post = post
        self._device_sample = device_sample
        self._labs: dict[str, Lab] = {}
        self._turn: list[str] = []
        """Names in the order of their turns."""
        self._turns = 0.0
        """Seconds spent in steps of all labs."""
        self._leased: str | None = None

    def get(self, name: str) -> Lab:
        """The lab of this name.

        Raises:
            RefusalError: there is none.
        """
        lab = self._labs.get(name)
        if lab is None:
            raise RefusalError("this lab is not open (any more): open it again")
        return lab

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(self.model.pool_bytes(lab.config) for lab in self._labs.values())

    def open(self, name: str, fields: dict[str, Any], *, paused: bool, generation: int) -> LabInfo:
        """Create a lab, or find the one of this name."""
        if name in self._labs:
            self._labs[name].flush(info=True)
            return self._labs[name].info()
        if not 1 <= len(name) <= 200:
            raise RefusalError(f"a lab's name has {len(name)} characters; it must have from 1 to 200")
        if len(self._labs) >= self.max_labs:
            raise RefusalError(
                f"{len(self._labs)} labs are open, the most this host takes (max_labs={self.max_labs}). Close one first"
            )
        config = self.model.fit(self._config(fields))
        self._check_quota(config, self.pool_bytes)
        lab = Lab(
            name,
            self.model,
            config,
            self.model.runner(config),
            self._post,
            generation=generation,
            paused=paused,
            device_sample=self._device_sample,
        )
        self._labs[name] = lab
        self._turn.append(name)
        lab.flush(info=True)
        return lab.info()

    def close(self, name: str, notice: str = "The lab was closed.") -> None:
        """End a lab and free its pool; an unknown one is no error."""
        lab = self._labs.pop(name, None)
        if lab is None:
            return
        self._turn.remove(name)
        if self._leased == name:
            self._leased, lab.muted = None, False
        lab.stop()
        lab.flush(notice=notice)
        self.model.release(lab.runner)

    def close_all(self, notice: str) -> None:
        """End every lab."""
        for name in list(self._labs):
            self.close(name, notice)

    def reconfigure(self, name: str, fields: dict[str, Any]) -> LabInfo:
        """Give a lab a new engine. When the settings are refused the old one goes on, untouched."""
        lab = self.get(name)
        config = self._config({**msgspec.structs.asdict(lab.config), **_loosen(fields), **fields})
        others = self.pool_bytes - self.model.pool_bytes(lab.config)
        if config.gpu_memory_utilization is not None:
            self._replace_in_place(lab, config, others)
            return lab.info()
        self._check_quota(config, others)
        if others + self.model.pool_bytes(lab.config) + self.model.pool_bytes(config) <= self.quota_bytes:
            runner = self.model.runner(config)
            lab.stop()
            self.model.release(lab.runner)
            lab.restart(config, runner)
        else:
            self._replace_in_place(lab, config, others)
        return lab.info()

    def _replace_in_place(self, lab: Lab, config: EngineConfig, others: int) -> None:
        """Both pools don't fit at once, or the old one would be in the way of measuring what the new one may have.

        The old one goes first, and comes back empty if the new one can't be had.
        """
        lab.stop()
        self.model.release(lab.runner)
        try:
            config = self.model.fit(config)
            self._check_quota(config, others)
            runner = self.model.runner(config)
        except Exception:
            lab.restart(lab.config, self.model.runner(lab.config))
            raise
        lab.restart(config, runner)

    def _config(self, fields: dict[str, Any]) -> EngineConfig:
        longest = self.model.context_limit
        fields = dict(fields)
        if "max_model_len" not in fields:
            fields["max_model_len"] = min(EngineConfig().max_model_len, longest)
        config = build_config(fields)
        if config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len:,} is more than the {longest:,} tokens that {self.model.info.title} "
                f"was made for: set max_model_len to at most {longest:,}"
            )
        if self.model.gpu is None:
            require_gpu(config, "the CPU" if self.model.info.device == "cpu" else self.model.info.device)
        return config

    def _check_quota(self, config: EngineConfig, others: int) -> None:
        needed = self.model.pool_bytes(config)
        if others + needed <= self.quota_bytes:
            return
        free = max(0, self.quota_bytes - others)
        a_block = max(1, needed // (config.num_kv_blocks + 1))
        raise RefusalError(
            f"num_kv_blocks={config.num_kv_blocks:,} of block_size={config.block_size} take {_size(needed)}; all pools "
            f"together may take {_size(self.quota_bytes)}, of which other labs hold {_size(others)} and {_size(free)} are "
            f"left. Set num_kv_blocks to at most {max(0, free // a_block - 1):,}"
            + (", or lower gpu_memory_utilization" if config.gpu_memory_utilization is not None else "")
        )

    def next(self) -> tuple[Lab | None, float | None]:
        """Whose turn it is now, and otherwise when somebody's will be (``time.monotonic``; None: nobody has work)."""
        now = time.monotonic()
        chosen: Lab | None = None
        soonest: float | None = None
        for name in self._turn if self._leased is None else (self._leased,):
            lab = self._labs[name]
            ready = lab.ready_at()
            if ready is not None and ready <= now:
                chosen = chosen or lab
                continue
            lab.turns_seen = self._turns
            if ready is not None:
                soonest = ready if soonest is None else min(soonest, ready)
        return chosen, soonest

    def lease(self, name: str, on: bool) -> list[str]:
        """Give a lab the host for itself, or take it back; returns the other labs that have work to do."""
        lab = self.get(name)
        if not on:
            if self._leased == name:
                self._leased, lab.muted = None, False
                lab.flush()
            return []
        if self._leased not in (None, name):
            raise RefusalError("another experiment is being measured on this machine: try again when it is done")
        self._leased, lab.muted = name, True
        return [other for other in self._turn if other != name and self._labs[other].ready_at() is not None]

    def step(self, lab: Lab) -> None:
        """Let a lab take its turn; it goes to the end of the line. A lab whose engine breaks down gets a new one."""
        self._turn.remove(lab.name)
        self._turn.append(lab.name)
        start = time.perf_counter()
        try:
            lab.step(self._turns)
        except Exception as error:
            traceback.print_exc()
            self._rescue(lab, error)
        self._turns += time.perf_counter() - start
        lab.turns_seen = self._turns

    def _rescue(self, lab: Lab, error: Exception) -> None:
        notice = f"The engine of this lab broke down in a step and was started anew, its requests ended: {describe(error)}"
        try:
            lab.engine.abort_all()
        except Exception:
            traceback.print_exc()
        lab.flush(notice=notice)
        self.model.release(lab.runner)
        lab.restart(lab.config, self.model.runner(lab.config))
        lab.flush(notice=notice)

    def __len__(self) -> int:
        return len(self._labs)


def describe(error: BaseException) -> str:
    """An exception for people: its message, with its type unless it was meant for them."""
    text = str(error) or "no details"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _params(fields: dict[str, Any]) -> SamplingParams:
    unknown = sorted(set(fields) - set(SamplingParams.__struct_fields__))
    if unknown:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise RefusalError(f"unknown sampling setting {unknown[0]!r}; the settings are {known}")
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise RefusalError(f"a sampling setting has a value of the wrong kind: {error}") from error


def _loosen(fields: dict[str, Any]) -> dict[str, Any]:
    """Settings that follow others are worked out anew when what they follow changes, unless they are given too."""
    follow: dict[str, Any] = {}
    if {"batching", "kv_layout", "use_kv_cache"} & set(fields):
        follow = {"enable_chunked_prefill": None, "enable_prefix_caching": None}
    return follow


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
