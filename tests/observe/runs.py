"""Runs of the real engine with a scripted runner and a virtual clock: records for tests of everything that reads records."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig
from engine.core.engine import Engine, RequestRefused
from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.runner import ScriptedRunner, StepBatch, StepResult
from engine.core.sampling_params import SamplingParams
from engine.core.trace import FinishReason, RequestTrace, StepTrace


class Run:
    """A listener that keeps everything: all requests (running ones too), all steps, and the refusals."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestTrace] = {}
        self.steps: list[StepTrace] = []
        self.log: list[OpenedRequest | ClosedRequest | StepTrace] = []
        """What a listener hears, in order."""
        self.refused = 0
        self.ended: set[str] = set()

    def opened(self, event: OpenedRequest) -> None:
        self.requests[event.trace.request_id] = event.trace
        self.log.append(event)

    def token(self, event: TokenEvent) -> None: ...

    def closed(self, event: ClosedRequest) -> None:
        self.requests[event.trace.request_id] = event.trace
        self.ended.add(event.trace.request_id)
        self.log.append(event)

    def stepped(self, step: StepTrace) -> None:
        self.steps.append(step)
        self.log.append(step)

    @property
    def traces(self) -> list[RequestTrace]:
        return list(self.requests.values())


class UnevenRunner(ScriptedRunner):
    """Scripted tokens; a step takes a fixed time and some for each token; now and then the device fails, or a row is NaN."""

    def __init__(self, clock: VirtualClock, rng: random.Random, failures: bool) -> None:
        super().__init__(clock=clock, cost=lambda batch: (2 + sum(len(work.token_ids) for work in batch.work)) / 64)
        self._rng, self._failures = rng, failures

    def execute(self, batch: StepBatch) -> StepResult:
        if self._failures and self._rng.random() < 0.03:
            raise RuntimeError("the device is gone")
        result = super().execute(batch)
        result.flops = 1e9 * sum(len(work.token_ids) for work in batch.work)
        result.bytes = 2e9
        if self._failures and self._rng.random() < 0.05:
            result.nonfinite = frozenset(r.request_id for work in batch.work[:1] for r in work.samples)
        return result


def random_run(seed: int, *, failures: bool = True, drain: bool = True, requests: int = 12) -> Run:
    """Requests arrive, share prefixes, fork, are aborted, refused, preempted and fail; times are multiples of 1/64 s."""
    rng = random.Random(seed)
    clock = VirtualClock(rng.choice((0.0, 3.0)))
    kind = rng.choice(("continuous", "continuous", "continuous", "static", "no cache"))
    config = EngineConfig(
        max_model_len=64,
        max_num_batched_tokens=rng.choice((16, 32)) if kind == "continuous" else 128,
        max_num_seqs=rng.choice((2, 4)),
        block_size=4,
        num_kv_blocks=rng.choice((16, 18, 24)),
        batching="static" if kind == "static" else "continuous",
        use_kv_cache=kind != "no cache",
    )
    run = Run()
    engine = Engine(config, UnevenRunner(clock, rng, failures), clock, listener=run)
    left = requests
    steps = 0
    while left or (drain and not all(r in run.ended for r in run.requests)):
        if left and rng.random() < 0.5:
            left -= 1
            _send(engine, clock, run, rng)
        if failures and run.requests and rng.random() < 0.06:
            engine.abort(rng.choice(list(run.requests)))
        if rng.random() < 0.2:
            clock.advance(rng.randrange(8) / 64)
        engine.step(slow=rng.random() < 0.02)
        steps += 1
        assert steps < 5000, "the run does not end"
    if drain:
        engine.step()  # carries what happened after the last forward pass
    for request_id in set(run.requests) - run.ended:
        run.requests[request_id] = engine.request(request_id)
    return run


def _send(engine: Engine, clock: VirtualClock, run: Run, rng: random.Random) -> None:
    shared = list(range(rng.choice((0, 4, 9))))
    prompt = shared + [100 + rng.randrange(50) for _ in range(rng.randrange(1, 20))]
    params = SamplingParams(max_tokens=rng.choice((1, 2, 7, 20, 60)), n=rng.choice((1, 1, 1, 2)), ignore_eos=True)
    due = max(0.0, clock.now() - rng.randrange(4) / 64)
    try:
        engine.add_request(prompt, params, arrival=due, tokenised=clock.now())
    except RequestRefused:
        run.refused += 1


def trace(
    request_id: str = "a",
    arrival: float = 0.0,
    tokens: Sequence[float] = (),
    finished: float | None = None,
    reason: FinishReason | None = "length",
    **fields: object,
) -> RequestTrace:
    """A request by hand: it is tokenised, queued and scheduled on arrival unless ``fields`` say otherwise."""
    defaults: dict[str, object] = {"tokenised": arrival, "queued": arrival, "first_scheduled": arrival, "prompt_tokens": 8}
    end = finished if finished is not None else (tokens[-1] if tokens and reason is not None else -1.0)
    return RequestTrace(
        request_id=request_id,
        arrival=arrival,
        token_times=list(tokens),
        token_steps=list(range(len(tokens))),
        finished=end,
        finish_reason=reason,
        **{**defaults, **fields},  # type: ignore[arg-type]
    )
