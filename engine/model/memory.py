"""A GPU's memory: how many KV blocks fit into a share of it, and what to say when it runs out.

::

    0                                                            share · total         total
    ├─ others ─┬─ weights ─┬─ activations ─┬─ graphs ─┬─ KV blocks ────┤ kept free ───────┤
      other programs,        of the largest  captured   as many as fit
      labs, the driver       step, measured  decodes

Nothing but the weights is worked out from shapes: a runner with a small pool computes the largest step that the settings
allow, and the device says what that took.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from engine.core.config import EngineConfig, require_gpu
from engine.core.request import Request
from engine.core.runner import Runner, StepBatch, Work
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace
from engine.model.errors import ModelError

if TYPE_CHECKING:
    from engine.model.transformer import Transformer

MOST_BLOCKS = 2**19
"""Blocks of a pool that was sized by memory: beyond it, keeping book of them costs more than they give."""
GIB = 2**30
Execute = TypeVar("Execute", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Footprint:
    """Where a device's memory goes beside the KV pool, bytes."""

    total: int
    """Of the device."""
    others: int
    """Other programs, other labs, and what driver and libraries keep for themselves."""
    weights: int
    activations: int
    """Most that the largest step needs at once."""
    graphs: int
    """Of all captured CUDA graphs."""
    complete: bool = True
    """Whether the step was computed; False where not even the pool of one sequence fits, so activations are not known."""

    @property
    def taken(self) -> int:
        """All but the pool."""
        return self.others + self.weights + self.activations + self.graphs


class Probe(Protocol):
    """Measures a device. ``CudaProbe`` on a GPU; tests bring numbers."""

    def measure(self, config: EngineConfig) -> Footprint:
        """What a runner with ``config`` takes beside its pool while it computes the largest step.

        Raises:
            OutOfMemory: memory ran out meanwhile.
        """
        ...


class OutOfMemory(ModelError):
    """Memory ran out while something was computed; the message says what takes it and what to lower."""


def fit_pool(model: Transformer, config: EngineConfig, probe: Probe) -> EngineConfig:
    """``config`` with ``num_kv_blocks`` sized such that the lab fills ``gpu_memory_utilization`` of the GPU's memory.

    Unchanged when that is None. A pool is never sized above ``MOST_BLOCKS``.

    Args:
        model: device, and bytes of a token's K and V.
        config: the settings; its ``num_kv_blocks`` is replaced.
        probe: measures what everything else takes.

    Raises:
        ConfigError: the model is not on a GPU.
        ModelError: too little memory for one sequence of ``max_model_len``; with all numbers.
    """
    share = config.gpu_memory_utilization
    if share is None:
        return config
    if model.device.type != "cuda":
        require_gpu(config, f"the {model.device.type.upper()}")
    needed = blocks_for(config.max_model_len, config.block_size)
    measured = probe.measure(config.replace(num_kv_blocks=needed))
    block_bytes = config.block_size * model.kv_bytes_per_token
    fitting = blocks_that_fit(measured, share, block_bytes)
    if fitting < needed:
        raise ModelError(_too_little(config, measured, block_bytes, fitting, needed))
    return config.replace(num_kv_blocks=min(fitting, MOST_BLOCKS))


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold K and V of ``tokens``."""
    return -(-tokens // block_size)


def blocks_that_fit(measured: Footprint, share: float, block_bytes: int) -> int:
    """Usable blocks in what is left of ``share`` of the memory, after one for the null block; 0 when nothing is."""
    return max(0, (int(share * measured.total) - measured.taken) // block_bytes - 1)


def _too_little(config: EngineConfig, measured: Footprint, block_bytes: int, fitting: int, needed: int) -> str:
    share = config.gpu_memory_utilization or 0.0
    left = max(0, int(share * measured.total) - measured.taken)
    shorter = fitting * config.block_size
    lower = [f"max_model_len to at most {shorter:,}"] if shorter and measured.complete else ["max_model_len"]
    lower += [f"max_num_batched_tokens (now {config.token_budget:,})", f"max_num_seqs (now {config.max_num_seqs:,})"]
    steps = (
        f"activations of the largest step {_gib(measured.activations)}, CUDA graphs {_gib(measured.graphs)}"
        if measured.complete
        else "activations and CUDA graphs an amount that could not be measured any more"
    )
    higher = "" if share >= 1 else f"raise gpu_memory_utilization (now {share:g}), "
    return (
        f"gpu_memory_utilization={share:g} of {_gib(measured.total)} is {_gib(int(share * measured.total))}. Of it other "
        f"programs and labs take {_gib(measured.others)}, the weights {_gib(measured.weights)}, {steps}; {_gib(left)} are "
        f"left for KV blocks of {block_bytes:,} bytes each: "
        f"{fitting:,} fit, but one sequence of max_model_len={config.max_model_len:,} needs {needed:,}, and the null block "
        f"comes on top. To make it fit, {higher}close what else uses the GPU, or lower {', '.join(lower[:-1])} or "
        f"{lower[-1]}"
    )


def largest_step(config: EngineConfig, vocab_size: int) -> StepBatch:
    """The step that needs the most memory: the whole budget, as many rows as can sample, all at the end of the context.

    All rows share one block table, so that a pool for a single sequence is enough; what they read there means nothing.
    """
    rows = min(config.max_num_seqs, config.token_budget)
    table = list(range(1, blocks_for(config.max_model_len, config.block_size) + 1))
    tokens = [1 + place % (vocab_size - 1) for place in range(config.max_model_len)]
    work, left = [], config.token_budget
    for row in range(rows):
        count = min(config.max_model_len, left - (rows - row - 1))
        left -= count
        context = config.max_model_len - count
        # What is counted for penalties is brought to the device once, when a request first samples: a longest prompt and,
        # for all others, what this very step computes. More at once would need as many prompts to end in one step.
        request = _request(row, tokens if row == 0 else tokens[context:])
        work.append(Work(request, tokens[context:], context, table, samples=(request,)))
    return StepBatch(index=0, work=work)


def _request(row: int, tokens: list[int]) -> Request:
    """A request that asks for everything that costs memory when its token is chosen."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1, max_tokens=1)
    name = f"largest step, row {row}"
    return Request(name, tokens, params, trace=RequestTrace(request_id=name), max_tokens=1)


class CudaProbe:
    """Measures a CUDA device by running the largest step on it.

    Args:
        model: on the device.
        make_runner: makes a runner of it, which has ``kv_pool_bytes``, ``close`` and perhaps ``graph_bytes``.
    """

    def __init__(self, model: Transformer, make_runner: Callable[[EngineConfig], Runner]) -> None:
        self._model = model
        self._make_runner = make_runner

    def measure(self, config: EngineConfig) -> Footprint:
        """See ``Probe``."""
        model, device = self._model, self._model.device
        self._tidy()
        before = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        smallest = (config.num_kv_blocks + 1) * config.block_size * model.kv_bytes_per_token
        if smallest > free:
            return Footprint(total, max(0, total - free - model.weight_bytes), model.weight_bytes, 0, 0, complete=False)
        try:
            pool, graphs, outside = self._run(config)
        except torch.OutOfMemoryError as error:
            doing = "while the KV pool was being sized"
            raise OutOfMemory(_words(config, device, model.weight_bytes, smallest, doing, error)) from None
        peak = torch.cuda.max_memory_reserved(device) - before - pool
        self._tidy()
        others = max(0, outside + before - model.weight_bytes)
        return Footprint(total, others, model.weight_bytes, max(0, peak - graphs), graphs)

    def _run(self, config: EngineConfig) -> tuple[int, int, int]:
        """Compute the largest step; returns bytes of the pool, of graphs, and of all that is not torch's."""
        device = self._model.device
        runner: Any = self._make_runner(config)
        try:
            self._tidy()  # what only making the runner took (a check of the kernels, recording graphs) is no part of a step
            torch.cuda.reset_peak_memory_stats(device)
            runner.execute(largest_step(config, self._model.spec.vocab_size))
            torch.cuda.synchronize(device)
            # Other programs, driver, libraries; read while the runner lives, since the driver keeps memory for its graphs.
            free, total = torch.cuda.mem_get_info(device)
            outside = total - free - torch.cuda.memory_reserved(device)
            return int(runner.kv_pool_bytes), int(getattr(runner, "graph_bytes", 0)), int(outside)
        finally:
            runner.close()

    def _tidy(self) -> None:
        """Give cached memory back, so that what is counted is in use."""
        torch.cuda.synchronize(self._model.device)
        gc.collect()
        torch.cuda.empty_cache()


def explained(execute: Execute) -> Execute:
    """Make a runner's method say what to lower when memory runs out; a runner has ``model``, ``config``, ``kv_pool_bytes``.

    Raises:
        OutOfMemory: instead of torch's own error.
    """

    @functools.wraps(execute)
    def with_words(self: Any, *args: Any) -> Any:
        try:
            return execute(self, *args)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            batch = args[0] if args and isinstance(args[0], StepBatch) else None
            doing = "in a step" if batch is None else f"in a step of {_step_words(batch)}"
            model = self.model
            raise OutOfMemory(
                _words(self.config, model.device, model.weight_bytes, self.kv_pool_bytes, doing, error)
            ) from None

    return cast(Execute, with_words)


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU torch says so in words only."""
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def _step_words(batch: StepBatch) -> str:
    tokens = sum(len(work.token_ids) for work in batch.work)
    count = len(batch.work)
    return f"{tokens:,} token{'s' * (tokens != 1)} of {count:,} sequence{'s' * (count != 1)}"


def _words(config: EngineConfig, device: torch.device, weights: int, pool: int, doing: str, error: BaseException) -> str:
    """What ran out, what takes the memory, and what to lower."""
    asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
    wanted = f" {asked.group(1)} more were wanted," if asked else ""
    free, total = _free_and_total(device)
    where = str(device) if device.type == "cuda" else "the machine"
    room = "num_kv_blocks" if config.gpu_memory_utilization is None else "gpu_memory_utilization"
    now = f"{getattr(config, room):,}"
    return (
        f"the memory of {where} ran out {doing}:{wanted} {_gib(free)} of {_gib(total)} are free; the weights take "
        f"{_gib(weights)}, the KV pool {_gib(pool)}. Lower max_num_batched_tokens (now {config.token_budget:,}) or "
        f"max_num_seqs (now {config.max_num_seqs:,}) for smaller steps, or {room} (now {now}) to leave them more room"
    )


def _free_and_total(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    import psutil  # here, because a GPU can be checked on a machine that lacks it

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _gib(count: int) -> str:
    return f"{count / GIB:,.2f} GiB"
