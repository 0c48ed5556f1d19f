"""The runner: a step's work in, sampled tokens out. Everything about tensors and devices lies behind it.

::

    StepBatch ─ prepare ─▶ flat token ids, positions, spans, plan of attention
                forward ─▶ hidden states of the last position of each piece of work ─ finite? ─▶ logits of those that sample
                sample  ─▶ StepResult
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.core.config import EngineConfig
from engine.core.outputs import TextCodec
from engine.core.runner import StepBatch, StepResult
from engine.model.attention import Plan, Span
from engine.model.attention.sdpa import SdpaAttention
from engine.model.errors import ModelError
from engine.model.sampler import Sampled, Sampler
from engine.model.transformer import Transformer


@dataclass(slots=True)
class _Prepared:
    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: Plan
    last_rows: torch.Tensor
    """Packed row of the last position of each piece of work."""
    sampling: list[int]
    """For each sampling request, in packed order, the index of its work."""


class ModelRunner:
    """Runs a transformer for an engine (``engine.core.runner.Runner``); owns the KV pool.

    Args:
        model: weights and shapes; may be shared with other runners.
        config: the engine's configuration: pool size, block size, whether there is a KV cache.
        codec: names the candidate tokens of logprobs; None leaves them without text.

    Raises:
        ModelError: ``max_model_len`` exceeds what the model computes exactly, or the pool doesn't fit into memory.
    """

    def __init__(self, model: Transformer, config: EngineConfig, codec: TextCodec | None = None) -> None:
        spec = model.spec
        if config.max_model_len > spec.context_limit:
            raise ModelError(
                f"max_model_len={config.max_model_len} is more than the {spec.context_limit} positions of this model: "
                f"set max_model_len to at most {spec.context_limit}"
            )
        self.model = model
        self.config = config
        num_blocks = config.num_kv_blocks if config.use_kv_cache else 0
        check_pool_memory(model, num_blocks, config.block_size)
        model.prepare_positions(config.max_model_len)
        self.attention = SdpaAttention(
            num_layers=spec.num_layers,
            num_kv_blocks=num_blocks,
            block_size=config.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self.sampler = Sampler(codec.token_text if codec is not None else None)

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool, the null block included."""
        return self.attention.kv_pool_bytes

    def close(self) -> None:
        """Give the pool's memory back; the runner can't be used any more."""
        self.attention.pool = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        """Store K and V of the batch's tokens and sample where asked; see ``Runner``."""
        begin = time.perf_counter()
        self.attention.zero_blocks(batch.scrub)
        self.attention.copy_blocks(batch.copies)
        if not batch.work:
            return StepResult([])
        prepared = self._prepare(batch)
        ready = self._now()
        hidden = self.model.forward(prepared.token_ids, prepared.positions, self.attention, prepared.plan)
        last = self.model.normalise(hidden.index_select(0, prepared.last_rows))
        finite = torch.isfinite(last).all(-1)
        logits = self._logits(last, prepared.sampling) if prepared.sampling else None
        computed = self._now()
        requests = [request for work in batch.work for request in work.samples]
        sampled = self.sampler.sample(logits, requests) if logits is not None else Sampled([], None, [])
        broken = {r.request_id for r, bad in zip(requests, sampled.broken, strict=True) if bad}
        for work, fine in zip(batch.work, finite.tolist(), strict=True):
            if not fine and work.request is not None:
                broken |= {work.request.request_id, *(request.request_id for request in work.samples)}
        flops, moved = count_work(self.model, batch, with_cache=self.config.use_kv_cache)
        return StepResult(
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            nonfinite=frozenset(broken),
            prepare_time=ready - begin,
            forward_time=computed - ready,
            sample_time=self._now() - computed,
            flops=flops,
            bytes=moved,
        )

    def _prepare(self, batch: StepBatch) -> _Prepared:
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        sampling: list[int] = []
        for index, work in enumerate(batch.work):
            count = len(work.token_ids)
            spans.append(Span(len(token_ids), count, work.context, work.block_table, work.request is not None))
            token_ids += work.token_ids
            positions += range(work.context, work.context + count)
            sampling += [index] * len(work.samples)
        last_rows = [span.start + span.num_tokens - 1 for span in spans]
        packed = torch.tensor([token_ids, positions], dtype=torch.int64).to(self.model.device, non_blocking=True)
        rows = torch.tensor(last_rows, dtype=torch.int64).to(self.model.device, non_blocking=True)
        return _Prepared(packed[0], packed[1], self.attention.plan(spans), rows, sampling)

    def _logits(self, last: torch.Tensor, sampling: list[int]) -> torch.Tensor:
        """Logits of the sampling requests. Forks of one prompt share a row, which is multiplied once."""
        distinct = list(dict.fromkeys(sampling))
        rows = last if len(distinct) == last.shape[0] else last[torch.tensor(distinct, device=last.device)]
        logits = self.model.logits(rows)
        if len(distinct) == len(sampling):
            return logits
        place = {index: row for row, index in enumerate(distinct)}
        return logits[torch.tensor([place[index] for index in sampling], device=last.device)]

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


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
