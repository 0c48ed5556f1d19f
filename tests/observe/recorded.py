"""Engines that record what they do, for tests of everything that reads records."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig
from engine.core.engine import Engine
from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
from engine.core.runner import ScriptedRunner
from engine.core.sampling_params import SamplingParams
from engine.core.trace import Keyframe, StepTrace


class Recording:
    """A listener that keeps everything, and the engine's own state after each step."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.opened_events: list[OpenedRequest] = []
        self.token_events: list[TokenEvent] = []
        self.closed_events: list[ClosedRequest] = []
        self.steps: list[StepTrace] = []
        self.states: list[Keyframe] = []

    def opened(self, event: OpenedRequest) -> None:
        self.opened_events.append(event)

    def token(self, event: TokenEvent) -> None:
        self.token_events.append(event)

    def closed(self, event: ClosedRequest) -> None:
        self.closed_events.append(event)

    def stepped(self, step: StepTrace) -> None:
        self.steps.append(step)
        assert self.engine is not None
        self.states.append(self.engine.snapshot())


KINDS: list[dict[str, Any]] = [
    {},
    {"batching": "static"},
    {"batching": "static", "kv_layout": "contiguous", "reserve": "request"},
    {"kv_layout": "contiguous", "reserve": "request"},
    {"use_kv_cache": False},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": False},
    {"scheduling_policy": "priority"},
    {"long_prefill_token_threshold": 5},
    {"max_num_batched_tokens": 16},
]


def record(seed: int, num_actions: int = 300, **config: Any) -> tuple[EngineConfig, Recording]:
    """A random busy life of an engine: arrivals, samples, aborts, preemptions."""
    rng = random.Random(seed)
    settings = {"num_kv_blocks": rng.choice([8, 12, 30]), "max_model_len": 100, "max_num_seqs": rng.choice([1, 3, 8])}
    settings.update(rng.choice(KINDS))
    settings.update(config)
    engine_config = EngineConfig(**settings)
    clock = VirtualClock()
    recording = Recording()
    engine = Engine(engine_config, ScriptedRunner(clock=clock), clock, listener=recording)
    recording.engine = engine
    for _ in range(num_actions):
        if rng.random() < 0.35:
            params = SamplingParams(max_tokens=rng.randint(1, 40), n=rng.choice([1, 1, 1, 2, 3]))
            with contextlib.suppress(ValueError):
                engine.add_request([rng.choice([1, 2])] * rng.randint(1, 60), params, priority=rng.randint(0, 3))
        live = [e.trace.request_id for e in recording.opened_events][-6:]
        if rng.random() < 0.05 and live:
            engine.abort(rng.choice(live))
        engine.step()
    while engine.has_unfinished() or engine.has_pending_events():
        engine.step()
    engine.check()
    return engine_config, recording
