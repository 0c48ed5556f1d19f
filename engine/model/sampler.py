"""Choosing tokens from logits, for all sampling rows of a step at once.

The order of operations is vLLM's::

    logits ─ min_tokens ─ penalties ─┬─ greedy: the largest
                                     └─ ÷ temperature ─ min_p ─ top_k ─ top_p ─ draw

min_p, top_k and top_p each keep a number of most likely tokens, so together they come down to one number a row: keep the
k most likely (of equal ones the smaller id). It is found without sorting the vocabulary unless a row needs it.

Drawing inverts the cumulative distribution at one uniform number, which is a hash of (request's seed, index of the
sample, number of tokens generated). So a request's randomness depends on nothing else: not on what shares the batch, not
on preemption, not on where in the batch it sits. The engine has mixed the prompt into ``request.seed``, so one seed gives
different prompts unrelated numbers.

Rows that are plainly greedy pay for nothing but the maximum; every other feature is paid for by the rows that use it.

Two ways lead to a token. ``Sampler`` does it all and reads numbers back in between, so on a GPU the host waits in it.
``choose`` is the part of it that needs no such look: the largest, or a draw at a temperature. Both give the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.core.outputs import Logprob
from engine.core.request import Request

FIRST_LOOK = 1024
"""Most likely tokens looked at before a whole row is sorted for top_p."""


@dataclass(slots=True)
class Sampled:
    """Tokens and candidates of the rows, and which rows had logits that are not numbers (or all −inf, or +inf)."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None] | None
    broken: list[bool]
    on_device: torch.Tensor
    """``tokens`` [rows] int64, where the logits are."""


def needs_sampler(request: Request) -> bool:
    """Whether ``choose`` is not enough: for penalties, candidates, truncation, tokens that are not allowed yet."""
    params = request.params
    truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    early = request.num_output_tokens < params.min_tokens
    return params.logprobs is not None or params.has_penalties or truncates or early


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor | None = None, points: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row without the host looking at anything.

    Args:
        logits: [rows, vocabulary] float32.
        temperatures: [rows] float32, above 0 for every row (its value means nothing where the row is greedy).
        points: [rows] float64 in [0, 1), where ``draw`` inverts the distribution; below 0 for a greedy row. None: all are.

    Returns:
        Tokens [rows] int64, and whether a row's logits were finite [rows] bool; the token is 0 where they were not.
    """
    best, tokens = logits.max(dim=-1)
    finite = torch.isfinite(best)
    if temperatures is not None and points is not None:
        weights = ((logits - best.unsqueeze(1)) / temperatures.unsqueeze(1)).exp_()
        tokens = torch.where(points >= 0, draw(weights, points), tokens)
    return tokens * finite, finite


def draw_of(request: Request) -> tuple[float, float]:
    """Temperature and point of a request's next token, as ``choose`` wants them."""
    if request.params.greedy:
        return 1.0, -1.0
    return request.params.temperature, uniform(request.seed, request.sample_index, request.num_output_tokens)


def uniform(seed: int, sample_index: int, num_output_tokens: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on the three arguments alone (BLAKE2b)."""
    key = struct.pack("<QQQ", seed & 0xFFFFFFFFFFFFFFFF, sample_index, num_output_tokens)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class Sampler:
    """Samples one token for each row. It remembers token counts of requests with penalties from step to step.

    Args:
        token_text: a token as text, for candidates; None leaves them without.
    """

    def __init__(self, token_text: Callable[[int], str] | None = None) -> None:
        self._token_text = token_text or (lambda token: "")
        self._history = _History()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Sample.

        Args:
            logits: [rows, vocabulary] float32; changed in place where rows ask for something.
            requests: one a row.
        """
        raw = logits.clone() if any(r.params.logprobs is not None and _changes_logits(r) for r in requests) else logits
        logits = self._adjust(logits, requests)
        best, tokens = logits.max(dim=-1)
        broken = ~torch.isfinite(best)
        drawing = [row for row, request in enumerate(requests) if not request.params.greedy]
        if drawing:
            tokens = self._draw(logits, tokens, broken, requests, drawing)
        chosen: list[int] = tokens.tolist()
        logprobs = self._logprobs(raw, requests, chosen) if any(r.params.logprobs is not None for r in requests) else None
        return Sampled(chosen, logprobs, broken.tolist(), tokens)

    def forget(self) -> None:
        """Drop token counts: this step has no request with penalties."""
        self._history.clear()

    def _adjust(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        for row, request in enumerate(requests):
            banned = _banned(request)
            if banned:
                allowed = [token for token in banned if token < logits.shape[1]]
                logits[row, torch.tensor(allowed, dtype=torch.int64, device=logits.device)] = float("-inf")
        penalised = [row for row, request in enumerate(requests) if request.params.has_penalties]
        if penalised:
            self._penalise(logits, requests, penalised)
        else:
            self._history.clear()
        return logits

    def _penalise(self, logits: torch.Tensor, requests: Sequence[Request], rows: list[int]) -> None:
        chosen = [requests[row] for row in rows]
        seen, counts = self._history.gather(chosen, logits.shape[1], logits.device)
        part = logits[rows]

        def column(name: str) -> torch.Tensor:
            return part.new_tensor([[getattr(request.params, name)] for request in chosen])

        repetition = column("repetition_penalty")
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= column("frequency_penalty") * counts + column("presence_penalty") * (counts > 0)
        logits[rows] = part

    def _draw(
        self,
        logits: torch.Tensor,
        greedy: torch.Tensor,
        broken: torch.Tensor,
        requests: Sequence[Request],
        rows: list[int],
    ) -> torch.Tensor:
        index = torch.tensor(rows, device=logits.device)
        chosen = [requests[row] for row in rows]
        part = logits if len(rows) == len(requests) else logits[index]
        part = torch.where(broken[index].unsqueeze(1), torch.zeros_like(part), part) if bool(broken.any()) else part
        temperature = part.new_tensor([request.params.temperature for request in chosen]).unsqueeze(1)
        weights = ((part - part.amax(-1, keepdim=True)) / temperature).exp_()
        truncated = [i for i, request in enumerate(chosen) if _truncates(request, logits.shape[1])]
        if truncated:
            weights[truncated] = truncate(weights[truncated], [chosen[i] for i in truncated])
        points = [uniform(r.seed, r.sample_index, r.num_output_tokens) for r in chosen]
        drawn = draw(weights, torch.tensor(points, dtype=torch.float64, device=logits.device))
        return greedy.index_copy(0, index, drawn)

    def _logprobs(
        self, raw: torch.Tensor, requests: Sequence[Request], tokens: list[int]
    ) -> list[dict[int, Logprob] | None]:
        rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        part = raw if len(rows) == len(requests) else raw[rows]
        logprobs = part.log_softmax(-1)
        picked = torch.tensor([tokens[row] for row in rows], device=raw.device).unsqueeze(1)
        own = logprobs.gather(1, picked)
        ranks = ((part > part.gather(1, picked)).sum(-1) + 1).tolist()
        vocabulary = raw.shape[1]
        wanted = [
            vocabulary if p == -1 else min(p or 0, vocabulary) for p in (requests[row].params.logprobs for row in rows)
        ]
        values, ids = logprobs.topk(max(wanted), dim=-1) if max(wanted) else (logprobs[:, :0], picked[:, :0])
        result: list[dict[int, Logprob] | None] = [None] * len(requests)
        columns = zip(rows, wanted, values.tolist(), ids.tolist(), own[:, 0].tolist(), ranks, strict=True)
        for row, count, top_values, top_ids, own_value, own_rank in columns:
            result[row] = self._candidates(tokens[row], own_value, own_rank, top_ids[:count], top_values[:count])
        return result

    def _candidates(
        self, token: int, logprob: float, rank: int, top_ids: list[int], top_values: list[float]
    ) -> dict[int, Logprob]:
        ranked = sorted(zip(top_ids, top_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found = {i: Logprob(value, place, self._token_text(i)) for place, (i, value) in enumerate(ranked, 1)}
        if token not in found:
            found[token] = Logprob(logprob, rank, self._token_text(token))
        return found


def truncate(weights: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Set all but the tokens that min_p, top_k and top_p keep to 0.

    Args:
        weights: [rows, vocabulary], probabilities up to a factor; the largest of a row is 1.
        requests: one a row, for their parameters.
    """
    keep = _kept(weights, requests)
    threshold = weights.topk(int(keep.max()), dim=-1).values.gather(1, keep.unsqueeze(1) - 1)
    above = weights > threshold
    tied = weights == threshold
    room = keep.unsqueeze(1) - above.sum(-1, keepdim=True)
    return weights * (above | (tied & (tied.cumsum(-1) <= room)))


def _kept(weights: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """How many most likely tokens each row keeps, [rows] int64."""
    vocabulary = weights.shape[1]
    top_k = [r.params.top_k if 0 < r.params.top_k < vocabulary else vocabulary for r in requests]
    keep = torch.tensor(top_k, device=weights.device)
    if any(r.params.min_p > 0 for r in requests):
        floor = weights.new_tensor([r.params.min_p for r in requests]).unsqueeze(1)
        keep = torch.minimum(keep, (weights >= floor).sum(-1))
    if any(r.params.top_p < 1 for r in requests):
        keep = torch.minimum(keep, _nucleus(weights, keep, requests))
    return keep.clamp_(min=1)


def _nucleus(weights: torch.Tensor, keep: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Size of the smallest set of most likely tokens, among the ``keep`` most likely, whose share reaches top_p."""
    vocabulary = weights.shape[1]
    share = torch.tensor([[r.params.top_p] for r in requests], dtype=torch.float64, device=weights.device)
    look = min(FIRST_LOOK, vocabulary)
    while True:
        sums = weights.topk(look, dim=-1).values.double().cumsum(-1)
        last = keep.clamp(max=look).unsqueeze(1) - 1
        total = torch.where(keep.unsqueeze(1) < vocabulary, sums.gather(1, last), weights.double().sum(-1, keepdim=True))
        reached = sums >= share * total * (1 - 1e-12)
        known = reached.any(-1) & (keep <= look) | reached.any(-1) & (keep == vocabulary) | (share[:, 0] >= 1)
        if look == vocabulary or bool(known.all()):
            first = torch.where(reached.any(-1), reached.int().argmax(-1) + 1, keep)
            return torch.where(share[:, 0] >= 1, keep, torch.minimum(first, keep))
        look = vocabulary


def draw(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at a point in [0, 1): the first token whose share exceeds it."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(points.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _banned(request: Request) -> set[int]:
    """Tokens that would end the output before ``min_tokens``."""
    if request.num_output_tokens >= request.params.min_tokens:
        return set()
    return {*request.eos_token_ids, *request.params.stop_token_ids}


def _changes_logits(request: Request) -> bool:
    return request.params.has_penalties or bool(_banned(request))


def _truncates(request: Request, vocabulary: int) -> bool:
    params = request.params
    return 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0


@dataclass(slots=True)
class _Counted:
    """What a request has said so far. Holding the request keeps its identity from being reused."""

    request: Request
    length: int
    seen: torch.Tensor
    counts: torch.Tensor


class _History:
    """Token counts of the requests of the last step, brought up to date by the new tokens only.

    A request that leaves for a while (preemption) is counted again from its tokens when it comes back.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Counted] = {}

    def clear(self) -> None:
        self._known.clear()

    def gather(
        self, requests: Sequence[Request], vocabulary: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each token occurred in prompt or output [rows, vocabulary] bool, and how often in the output (float32)."""
        fresh: dict[int, _Counted] = {}
        for request in requests:
            known = self._known.get(id(request))
            if known is None or known.length > request.num_tokens:
                known = self._start(request, vocabulary, device)
            self._update(known, vocabulary, device)
            fresh[id(request)] = known
        self._known = fresh
        kept = [fresh[id(request)] for request in requests]
        return torch.stack([item.seen for item in kept]), torch.stack([item.counts for item in kept])

    @staticmethod
    def _start(request: Request, vocabulary: int, device: torch.device) -> _Counted:
        seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        seen[torch.tensor(request.prompt_token_ids, dtype=torch.int64, device=device)] = True
        return _Counted(request, request.num_prompt_tokens, seen, torch.zeros(vocabulary, device=device))

    @staticmethod
    def _update(known: _Counted, vocabulary: int, device: torch.device) -> None:
        tokens = known.request.token_ids[known.length :]
        if tokens:
            ids = torch.tensor(tokens, dtype=torch.int64, device=device)
            known.seen[ids] = True
            known.counts.index_add_(0, ids, torch.ones(len(tokens), device=device))
            known.length += len(tokens)
