"""Driving transformer, attention and runner by hand."""

from __future__ import annotations

import torch

from engine.core.request import Request
from engine.core.runner import StepBatch, StepResult, Work
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace
from engine.model.attention import Span
from engine.model.attention.sdpa import SdpaAttention
from engine.model.loader import LoadedModel
from engine.model.runner import ModelRunner


def make_attention(model: LoadedModel, num_blocks: int = 64, block_size: int = 16, poison: bool = True) -> SdpaAttention:
    """A pool full of NaN, but for the null block: whatever is read without having been written shows."""
    spec = model.transformer.spec
    attention = SdpaAttention(
        num_layers=spec.num_layers,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.transformer.dtype,
        device=model.transformer.device,
    )
    if poison and attention.pool is not None:
        attention.pool[:, 1:] = float("nan")
    return attention


def packed_logits(
    model: LoadedModel, attention: SdpaAttention, pieces: list[tuple[list[int], int, list[int]]]
) -> torch.Tensor:
    """Logits [T, vocabulary] of one step; each piece is (token ids, context, block table)."""
    ids, positions, spans = [], [], []
    for tokens, context, table in pieces:
        spans.append(Span(len(ids), len(tokens), context, table))
        ids += tokens
        positions += range(context, context + len(tokens))
    transformer = model.transformer
    with torch.inference_mode():
        plan = attention.plan(spans)
        hidden = transformer.forward(torch.tensor(ids), torch.tensor(positions), attention, plan)
        return transformer.logits(transformer.normalise(hidden))


def chunked_logits(
    model: LoadedModel, attention: SdpaAttention, ids: list[int], table: list[int], chunk: int, context: int = 0
) -> torch.Tensor:
    """Logits of ``ids[context:]``, computed ``chunk`` tokens a step."""
    starts = range(context, len(ids), chunk)
    return torch.cat([packed_logits(model, attention, [(ids[start : start + chunk], start, table)]) for start in starts])


def make_request(name: str = "a", prompt: list[int] | None = None, output: tuple[int, ...] = (), **params) -> Request:
    seed = params.pop("hash_seed", 0)
    sample_index = params.pop("sample_index", 0)
    eos = params.pop("eos", frozenset())
    request = Request(
        name,
        prompt or [1, 2, 3],
        SamplingParams(**params),
        trace=RequestTrace(request_id=name),
        max_tokens=10_000,
        seed=seed,
        sample_index=sample_index,
        eos_token_ids=eos,
    )
    request.token_ids += output
    return request


class Sequence:
    """One request driven by hand through a runner: its table, its context."""

    def __init__(self, request: Request, table: list[int]) -> None:
        self.request, self.table, self.context = request, table, 0

    def work(self, count: int | None = None, sample: bool | None = None) -> Work:
        left = self.request.num_tokens - self.context
        count = left if count is None else min(count, left)
        ids = self.request.token_ids[self.context : self.context + count]
        samples = (self.request,) if (count == left if sample is None else sample) else ()
        return Work(self.request, ids, self.context, self.table, samples)


def run_step(runner: ModelRunner, sequences: list[Sequence], count: int | None = None) -> StepResult:
    """One step for all sequences; sampled tokens are appended."""
    works = [sequence.work(count) for sequence in sequences]
    result = runner.execute(StepBatch(0, works))
    tokens = iter(result.tokens)
    for sequence, work in zip(sequences, works, strict=True):
        sequence.context += len(work.token_ids)
        for request in work.samples:
            request.token_ids.append(next(tokens))
    return result
