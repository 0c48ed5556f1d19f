"""Tools of the workload's tests: an engine on a virtual clock, and the shipped data run on it."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.clock import VirtualClock
from engine.core.config import EngineConfig, build_config
from engine.core.engine import Engine
from engine.core.runner import ScriptedRunner, StepBatch
from engine.workload.claims import Run
from engine.workload.driver import OfflineRun, run_offline
from engine.workload.spec import WorkloadSpec


def encode(text: str) -> list[int]:
    """A tokenizer whose tokens are bytes."""
    return list(text.encode())


def tokens_of(batch: StepBatch) -> float:
    """10 ms a step and 1 ms a token."""
    return 0.010 + 0.001 * sum(len(work.token_ids) for work in batch.work)


def make(config: EngineConfig | None = None, cost: Callable[[StepBatch], float] = tokens_of, **fields: object) -> Engine:
    """An engine whose steps take the virtual time that ``cost`` says."""
    clock = VirtualClock(100.0)
    return Engine(config or build_config({"max_model_len": 512, **fields}), ScriptedRunner(clock=clock, cost=cost), clock)


def run(spec: WorkloadSpec, config: EngineConfig | None = None, **fields: object) -> OfflineRun:
    """A workload run to its end; the engine is checked and idle afterwards."""
    engine = make(config, **fields)
    result = run_offline(engine, spec, encode)
    engine.check()
    assert not engine.has_unfinished()
    return result


def records(result: OfflineRun) -> Run:
    """The records as claims count over them."""
    return Run(result.requests, result.steps)
