"""Experiments of lessons, what a run of one leaves behind, and the two ways to run one.

On the reader's lab (``run_on_lab``) the loaded model computes every step. In tests (``run_scripted``) the same engine runs
the same experiment on a virtual clock with a scripted cost, so that every countable answer can be checked anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig, build_config
from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.runner import ScriptedRunner, StepBatch
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace, Scheduled, StepTrace, letter
from engine.observe.replay import Phase, PoolState, state_at
from engine.serve.client import EngineClient
from engine.workload.driver import run_offline
from engine.workload.spec import WorkloadSpec, listed

RUN_TIMEOUT = 120.0
"""Seconds after which a run on a lab is given up: ten times what the slowest experiment needs on two cores."""


class RunError(RuntimeError):
    """An experiment did not come to its end; the message is for the reader."""


class Send(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request sent at once. ``prompt``: a text (the chat template is applied) or token ids; ``params``: by name."""

    name: str
    prompt: str | tuple[int, ...]
    params: dict[str, Any] = {}


class Experiment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run: engine settings by name, and either a listed workload or requests to send.

    ``letters``: request name → arrival number whose letter and colour it has on pictures; default its own.
    """

    config: dict[str, Any]
    workload: dict[str, Any] = {}
    sends: tuple[Send, ...] = ()
    letters: dict[str, int] = {}

    @property
    def spec(self) -> WorkloadSpec:
        """The workload, checked."""
        return msgspec.convert(self.workload, WorkloadSpec)

    @property
    def names(self) -> list[str]:
        """Names of the requests that it sends, samples included, in order of arrival."""
        if self.workload:
            return [item.name for item in listed(self.spec)]
        found = []
        for send in self.sends:
            found.append(send.name)
            found += [f"{send.name}#{index}" for index in range(1, int(send.params.get("n", 1)))]
        return found


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request (one sample) of a run. ``number``: its letter and colour on pictures."""

    name: str
    number: int
    trace: RequestTrace
    prompt: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    text: str = ""
    tokens: tuple[TokenEvent, ...] = ()

    @property
    def letter(self) -> str:
        """What pictures call it."""
        return letter(self.number)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run left. Only this is read by values and pictures."""

    config: EngineConfig
    steps: tuple[StepTrace, ...]
    requests: tuple[RequestRecord, ...]
    model: dict[str, Any] = {}
    """What computed it (``ModelInfo`` as plain data); empty for a scripted run."""
    pool_bytes: int = 0
    """Bytes that the engine allocated for the pool of KV blocks."""

    def request(self, name: str) -> RequestRecord:
        """The request of this name.

        Raises:
            KeyError: there is none.
        """
        for request in self.requests:
            if request.name == name:
                return request
        raise KeyError(name)

    @property
    def work(self) -> list[StepTrace]:
        """The steps that computed something."""
        return [step for step in self.steps if step.scheduled]

    @property
    def traces(self) -> list[RequestTrace]:
        """All traces, numbered as on the pictures."""
        return [msgspec.structs.replace(r.trace, number=r.number) for r in self.requests]

    @property
    def numbers(self) -> dict[str, int]:
        """request_id → number on the pictures."""
        return {request.trace.request_id: request.number for request in self.requests}

    def rows(self, name: str) -> list[tuple[StepTrace, Scheduled]]:
        """The steps in which a request computed something, with its row in each; padding is left out."""
        wanted = self.request(name).trace.request_id
        return [
            (step, row)
            for step in self.steps
            for row in step.scheduled
            if row.request_id == wanted and row.kind != "padding"
        ]

    def state(self, step: int, phase: Phase = "during") -> PoolState:
        """Pool, block tables and queues at a step."""
        return state_at(self.steps, step, self.config.num_kv_blocks, phase)

    @property
    def disturbed(self) -> bool:
        """Whether other labs stepped in between, or it ran in slow motion: its times are then not its own."""
        return any(step.wait_time > 0 or step.slow for step in self.steps)


Runs = Mapping[str, RunRecord]
"""Experiment → its newest run."""
Answer = float | str | list[str]
Value = Callable[[Runs], Answer]
"""A pure function from a lesson's runs to something measured. Raises ``KeyError`` while the run it needs is missing."""


def measured(values: Mapping[str, Value], name: str, runs: Runs) -> Answer | None:
    """What the runs say, or None while the run that it needs is missing."""
    try:
        return values[name](runs)
    except KeyError:
        return None


# On the reader's lab ------------------------------------------------------------------------------------------------------


def run_on_lab(client: EngineClient, lab: str, experiment: Experiment, timeout: float = RUN_TIMEOUT) -> RunRecord:
    """Restart the lab's engine with the experiment's settings, run it to its end, and collect what it left.

    Raises:
        RunError: it did not end in time, or a request was refused or failed.
        HostError: the engine refused the settings.
        HostGone: the engine's process is gone.
    """
    config = build_config(experiment.config)
    info = client.reconfigure(lab, msgspec.structs.asdict(config))
    client.control(lab, "run")
    log = client.log(lab)
    deadline = time.monotonic() + timeout
    log.wait_until(lambda log: log.generation == info.generation, timeout)
    if experiment.workload:
        client.start_traffic(lab, experiment.spec)
    ids: list[str] = []
    for send in experiment.sends:
        prompt = send.prompt if isinstance(send.prompt, str) else list(send.prompt)
        ids += client.send(lab, prompt, params=send.params)
    names = experiment.names
    log.wait_until(
        lambda log: len(log.traces(live=False)) >= len(names) or bool(log.traffic and log.traffic.failed),
        max(0.0, deadline - time.monotonic()),
    )
    traces = log.traces(live=False)
    failed = next((trace for trace in traces if trace.finish_reason in ("error", "abort")), None)
    if failed is not None:
        raise RunError(f"request {letter(failed.number)} did not finish: {failed.error or 'it was stopped'}. Run it again")
    if len(traces) < len(names):
        raise RunError(
            f"{len(traces)} of {len(names)} requests finished within {timeout:g} s: the engine is busy or was changed "
            f"meanwhile. Run it again"
        )
    model = client.state.model
    views = [log.request(trace.request_id) for trace in traces]
    requests = [
        RequestRecord(
            name=name,
            number=experiment.letters.get(name, trace.number),
            trace=trace,
            prompt=view.prompt,
            prompt_token_ids=view.prompt_token_ids,
            text=view.text,
            tokens=view.tokens,
        )
        for name, trace, view in zip(_named(traces, names, experiment), traces, views, strict=True)
        if view is not None
    ]
    return RunRecord(
        config=info.config,
        steps=tuple(log.steps()),
        requests=tuple(requests),
        model=msgspec.to_builtins(model) if model else {},
        pool_bytes=info.kv_pool_bytes,
    )


def _named(traces: Sequence[RequestTrace], names: Sequence[str], experiment: Experiment) -> list[str]:
    """Names of traces in order of arrival: a workload's ids end in them, sent ones come in order."""
    if experiment.workload:
        return [trace.request_id.rpartition("-")[2] for trace in traces]
    return list(names[: len(traces)])


# Without a model ----------------------------------------------------------------------------------------------------------


def scripted_cost(batch: StepBatch) -> float:
    """Seconds of a scripted step: 10 ms for reading the weights, 1 ms for each token computed."""
    return 0.010 + 0.001 * sum(len(work.token_ids) for work in batch.work)


class _Recorder:
    """Keeps what an engine tells, for ``run_scripted``."""

    def __init__(self) -> None:
        self.prompts: dict[str, OpenedRequest] = {}
        self.tokens: dict[str, list[TokenEvent]] = {}
        self.ended: dict[str, ClosedRequest] = {}
        self.steps: list[StepTrace] = []

    def opened(self, event: OpenedRequest) -> None:
        self.prompts[event.trace.request_id] = event

    def token(self, event: TokenEvent) -> None:
        self.tokens.setdefault(event.request_id, []).append(event)

    def closed(self, event: ClosedRequest) -> None:
        self.ended[event.trace.request_id] = event

    def stepped(self, step: StepTrace) -> None:
        self.steps.append(step)


def run_scripted(experiment: Experiment, cost: Callable[[StepBatch], float] = scripted_cost) -> RunRecord:
    """Run an experiment on the real engine with a script in the place of a model, on a virtual clock.

    A text counts one token for each byte.
    """
    clock, recorder = VirtualClock(), _Recorder()
    runner = ScriptedRunner(clock=clock, cost=cost)
    engine = Engine(build_config(experiment.config), runner, clock, listener=recorder)
    if experiment.workload:
        run_offline(engine, experiment.spec, lambda text: list(text.encode()))
    for send in experiment.sends:
        ids = list(send.prompt.encode()) if isinstance(send.prompt, str) else list(send.prompt)
        engine.add_request(ids, SamplingParams(**send.params))
    while engine.has_unfinished() or engine.has_pending_events():
        engine.step()
    closed = sorted(recorder.ended.values(), key=lambda event: event.trace.number)
    traces = [event.trace for event in closed]
    requests = [
        RequestRecord(
            name=name,
            number=experiment.letters.get(name, trace.number),
            trace=trace,
            prompt=recorder.prompts[trace.request_id].prompt,
            prompt_token_ids=recorder.prompts[trace.request_id].prompt_token_ids,
            tokens=tuple(recorder.tokens.get(trace.request_id, ())),
        )
        for name, trace in zip(_named(traces, experiment.names, experiment), traces, strict=True)
    ]
    return RunRecord(config=engine.config, steps=tuple(recorder.steps), requests=tuple(requests))
