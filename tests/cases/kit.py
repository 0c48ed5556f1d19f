"""Tools of the black-box cases: loaded checkpoints, the oracle for many outputs at once, short ways to drive an ``LLM``.

The oracle here is transformers' forward pass over prompt *and* output, without a cache. A causal model's logits at a
position depend on the tokens up to it alone, so one pass tells for every position which token greedy decoding must give
there: if all of them agree, the output is the greedy output, token by token. Outputs share a padded batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.core.outputs import ClosedRequest, CompletionOutput, OpenedRequest, RequestOutput, TokenEvent
from engine.core.trace import StepTrace
from engine.model.loader import LoadedModel, load_model
from tests.fixtures import NEAR_TIE, reference

MOST_STEPS = 3000
"""A drain that takes more steps than this hangs."""


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, for the oracle, and the same one loaded, shared by all engines of a session."""

    path: Path
    loaded: LoadedModel

    @classmethod
    def load(cls, path: Path, dtype: str = "float32") -> Model:
        return cls(path, load_model(path, "cpu", dtype))

    def llm(self, **config: Any) -> LLM:
        """An engine of its own on the shared weights."""
        config.setdefault("max_model_len", 256)
        config.setdefault("num_kv_blocks", 64)
        return LLM(self.loaded, **config)


def prompt_of(length: int, seed: int = 0, below: int = 256) -> list[int]:
    """``length`` token ids; another seed gives another prompt, from the first token on."""
    source = random.Random(f"{seed}/{length}")
    return [seed % below, *(source.randrange(below) for _ in range(length - 1))]


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


# ------------------------------------------------------------------ the oracle


@torch.inference_mode()
def oracle_logits_of(
    path: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """transformers' logits [tokens, vocabulary] of each sequence; the padding on the right is behind every real position."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
    logits = reference(path, dtype)(ids, use_cache=False).logits
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences, strict=True)]


def assert_oracle(model: Model, outputs: Iterable[RequestOutput], *, count: int | None = None) -> None:
    """Every token of every sample of every (greedy) output is what the oracle gives after the tokens before it.

    Where the oracle's two best logits lie closer than ``NEAR_TIE``, either of them will do; what follows is compared again,
    with the oracle going on from the token that was taken. There must be few such places.

    Args:
        model: the checkpoint.
        outputs: outputs of greedy requests, finished or not.
        count: how many tokens each must have; None: whatever it has.
    """
    pairs = [(output.prompt_token_ids, sample.token_ids) for output in outputs for sample in output.outputs]
    ties = total = 0
    for start in range(0, len(pairs), 64):
        part = pairs[start : start + 64]
        logits = oracle_logits_of(model.path, [[*prompt, *tokens] for prompt, tokens in part])
        for (prompt, tokens), rows in zip(part, logits, strict=True):
            if count is not None:
                assert len(tokens) == count
            rows = rows[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
            best, second = rows.topk(2, dim=-1).values.unbind(-1)
            taken = rows[range(len(tokens)), tokens]
            wrong = (best - taken >= NEAR_TIE).nonzero().flatten().tolist()
            assert not wrong, (
                f"prompt {prompt[:6]} … of {len(prompt)} tokens: output tokens {wrong} of {tokens} are not greedy"
            )
            ties, total = ties + int((best - second < NEAR_TIE).sum()), total + len(tokens)
    assert total, "nothing to compare"
    assert ties <= max(1, total // 20), f"{ties} near ties in {total} tokens: choose other prompts"


def oracle_logprobs(model: Model, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """The oracle's log-probabilities [output tokens, vocabulary] at the positions that sampled ``output``."""
    (logits,) = oracle_logits_of(model.path, [[*prompt, *output]])
    return logits[len(prompt) - 1 : len(prompt) + len(output) - 1].log_softmax(-1)


def logprobs_of(sample: CompletionOutput, vocabulary: int = 320) -> torch.Tensor:
    """The engine's log-probabilities [output tokens, vocabulary], from ``logprobs=-1``."""
    assert sample.logprobs is not None
    rows = []
    for candidates in sample.logprobs:
        assert set(candidates) == set(range(vocabulary))
        rows.append([candidates[token].logprob for token in range(vocabulary)])
    return torch.tensor(rows)


def assert_logprobs(model: Model, output: RequestOutput, tolerance: float = 1e-4) -> None:
    """All log-probabilities of an output made with ``logprobs=-1`` equal the oracle's."""
    for sample in output.outputs:
        found = logprobs_of(sample, model.loaded.transformer.spec.vocab_size)
        wanted = oracle_logprobs(model, output.prompt_token_ids, sample.token_ids)
        assert (found - wanted).abs().max() < tolerance


# ------------------------------------------------------------------ driving


def drain(llm: LLM, limit: int = MOST_STEPS) -> list[StepTrace]:
    """Step until nothing is left; every invariant holds after every step, and the budget is kept."""
    steps: list[StepTrace] = []
    while llm.has_unfinished():
        assert len(steps) < limit, f"not done after {limit} steps"
        steps.append(checked_step(llm))
    assert_idle(llm)
    return steps


def checked_step(llm: LLM) -> StepTrace:
    step = llm.step()
    llm.check()
    assert step.num_tokens <= llm.config.token_budget
    assert step.seats <= llm.config.max_num_seqs
    return step


def steps_of(llm: LLM, count: int) -> list[StepTrace]:
    return [checked_step(llm) for _ in range(count)]


def assert_idle(llm: LLM) -> None:
    """Everything was returned: free and cached blocks are the whole pool, each once, and no request is left."""
    llm.check()
    stats, state = llm.stats(), llm.engine.snapshot()
    assert (stats.running, stats.waiting, stats.blocks_referenced, stats.kv_stored_tokens) == (0, 0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert sorted(state.free) == list(range(1, stats.blocks_total + 1))
    assert (state.tables, state.waiting, state.running) == ({}, (), ())


def assert_alive(llm: LLM, model: Model) -> None:
    """A new request is answered rightly and soon."""
    begin = time.monotonic()
    (output,) = llm.generate([prompt_of(6, 77)], greedy(5))
    assert time.monotonic() - begin < 10
    assert output.outputs[0].finish_reason == "length"
    assert_oracle(model, [output], count=5)
    assert_idle(llm)


def outputs_of(llm: LLM, names: Iterable[str]) -> list[RequestOutput]:
    return [llm.output(name) for name in names]


class Ear:
    """A listener that keeps what it heard: the deltas of each request, and the texts at their ends."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[str]] = {}
        self.texts: dict[str, str] = {}
        self.steps: list[StepTrace] = []

    def opened(self, event: OpenedRequest) -> None:
        self.deltas[event.trace.request_id] = []

    def token(self, event: TokenEvent) -> None:
        self.deltas[event.request_id].append(event.text)

    def closed(self, event: ClosedRequest) -> None:
        self.texts[event.trace.request_id] = event.text

    def stepped(self, step: StepTrace) -> None:
        self.steps.append(step)


def assert_hits_follow_fills(steps: Iterable[StepTrace]) -> None:
    """A block is shared only after a step that offered it has finished, and not after it was evicted."""
    known: set[int] = set()
    for step in steps:
        for event in step.events:
            if event.op == "hit":
                assert set(event.blocks) <= known, f"step {step.index} shares blocks {set(event.blocks) - known} too early"
            if event.op == "evict":
                known -= set(event.blocks)
        for event in step.events_after:
            if event.op == "cache":
                known |= set(event.blocks)
            if event.op == "evict":
                known -= set(event.blocks)
