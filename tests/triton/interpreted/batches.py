"""Random paged batches, and attention over them written the plain way: one token, one head, one softmax at a time."""

from dataclasses import dataclass

import torch

from engine.model.attention import Span


@dataclass(frozen=True)
class Case:
    """A pool's shape, and its sequences as (context, new tokens, whether they write)."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    sequences: tuple[tuple[int, int, bool], ...]
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def settings(self, blocks: int) -> dict:
        return {
            "num_layers": 2,
            "num_kv_blocks": blocks,
            "block_size": self.block_size,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "device": torch.device("cpu"),
        }


@dataclass
class Batch:
    """Spans over a shuffled pool; ``stored`` holds K and V of the contexts, one [context, 2, Hkv, D] a sequence."""

    spans: list[Span]
    q: torch.Tensor
    kv: torch.Tensor
    stored: list[torch.Tensor]
    blocks: int


def make(case: Case, cached: bool = True) -> Batch:
    """Blocks are dealt out in random order; padding (a sequence that doesn't write) has the null block alone."""
    random = torch.Generator().manual_seed(case.seed)
    needed = [-(-(context + new) // case.block_size) if writes and cached else 0 for context, new, writes in case.sequences]
    free = (torch.randperm(sum(needed), generator=random) + 1).tolist()
    spans, stored, start = [], [], 0
    for (context, new, writes), count in zip(case.sequences, needed, strict=True):
        table = [free.pop() for _ in range(count)] if count else [0] if cached else []
        spans.append(Span(start, new, context, table, writes))
        stored.append(torch.randn(context, 2, case.kv_heads, case.head_dim, generator=random).to(case.dtype))
        start += new
    q = torch.randn(start, case.heads, case.head_dim, generator=random).to(case.dtype)
    kv = torch.randn(start, 2, case.kv_heads, case.head_dim, generator=random).to(case.dtype)
    return Batch(spans, q, kv, stored, max(1, sum(needed)) if cached else 0)


def fill_pool(pool: torch.Tensor, batch: Batch, layer: int, stale: float) -> None:
    """Everything but the contexts and the null block holds ``stale``."""
    pool.fill_(stale)
    pool[:, 0] = 0
    slots = pool[layer].flatten(0, 1)
    size = pool.shape[2]
    for span, kept in zip(batch.spans, batch.stored, strict=True):
        for position in range(span.context):
            slots[span.block_table[position // size] * size + position % size] = kept[position]


def reference(case: Case, batch: Batch) -> torch.Tensor:
    """[T, H · D] float32. Padding attends to the null block's first slot: zeros."""
    out = torch.zeros(batch.q.shape[0], case.heads, case.head_dim)
    for span, kept in zip(batch.spans, batch.stored, strict=True):
        own = batch.kv[span.start : span.start + span.num_tokens]
        keys, values = torch.cat([kept, own if span.writes else own * 0]).double().unbind(1)
        for offset in range(span.num_tokens):
            stop = span.context + offset + 1
            for head in range(case.heads):
                q = batch.q[span.start + offset, head].double()
                scores = keys[:stop, head // case.group] @ q / case.head_dim**0.5
                out[span.start + offset, head] = (scores.softmax(0) @ values[:stop, head // case.group]).float()
    return out.flatten(1)
