"""Choosing tokens from logits, for all sampling rows of a step at once.

The order of operations is vLLM's::

    logits ─ min_tokens ─ penalties ─┬─ greedy: the largest
                                     └─ ÷ temperature ─ min_p ─ top_k ─ top_p ─ draw

min_p, top_k and top_p each keep a number of most likely tokens, so together they come down to one number a row: keep the
k most likely (of equal ones the smaller id).

Drawing inverts the cumulative distribution at one uniform number. A request has a stream of them: SplitMix64 from a state
that is a hash (BLAKE2b) of (request's seed, index of the sample). Its token number n takes the stream's number n, which is
computed without the ones before it, on the host or on the device with the same bits::

    key ───────────────▶ state = key + (n + 1) · 0x9E3779B97F4A7C15 ─ mix ─▶ 64 bits ─ upper 53 · 2⁻⁵³ ─▶ [0, 1)
    once a request

So a request's randomness depends on nothing else: not on what shares the batch, not on preemption, not on where in the
batch it sits. The engine has mixed the prompt into ``request.seed``, so one seed gives different prompts unrelated numbers.

Rows that are plainly greedy pay for nothing but the maximum; every other feature is paid for by the rows that use it.

Two ways lead to a token, and both give the same ones. ``choose`` is the largest or a draw at a temperature, small enough
to be part of a CUDA graph. ``Sampler.submit`` does it all. Neither looks at a number on the device, so on a GPU the host
doesn't wait: what decides which operations are asked for is what the *requests* say. Tokens, and candidates where wanted,
are read when they are needed (``Sampling.read``).

On a CPU a look costs nothing, and it saves work: mostly the 1,024 most likely tokens hold all that top_p keeps. With
``may_look`` they are looked at first; without it the rows that need it are sorted whole.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch

from engine.core.outputs import Logprob
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.model.attention import Upload
from engine.model.penalties import Counted, PenaltyCounts, penalise

FIRST_LOOK = 1024
"""Most likely tokens ranked, where that may be enough, before a whole row is sorted."""
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""What sampling knows of a request as numbers, in the order of ``SamplingMetadata.numbers``' columns."""
TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTIES = 0, 1, 2, 3, slice(4, 7)
LARGEST_TOP_K = 2**53
"""More than any vocabulary, and exact as a float."""

GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's step and the two factors of its mixing (Steele, Lea, Flood 2014; Vigna's splitmix64.c)."""
SHIFTS = 30, 27, 31
UNSIGNED = 2**64 - 1


# ---------------------------------------------------------------------- what a request asks for, as numbers


def numbers_of(params: SamplingParams) -> tuple[float, ...]:
    """``FIELDS`` of a request. The temperature is 0 if and only if it is greedy; top_k is 0 where all tokens are kept."""
    temperature = 0.0 if params.greedy else params.temperature
    top_k = float(min(max(params.top_k, 0), LARGEST_TOP_K))
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return temperature, top_k, params.top_p, params.min_p, *penalties


@lru_cache(maxsize=8192)
def key_of(seed: int, sample_index: int) -> int:
    """Where a request's stream of random numbers starts: signed 64 bits, BLAKE2b of the two."""
    parts = struct.pack("<QQ", seed & UNSIGNED, sample_index)
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little", signed=True)


def uniform(key: int, n: int) -> float:
    """Number ``n`` (from 0) of the stream that starts at ``key``: 53 random bits, in [0, 1). See ``uniforms``."""
    z = (key + (n + 1) * GAMMA) & UNSIGNED
    z = ((z ^ (z >> SHIFTS[0])) * MIX_1) & UNSIGNED
    z = ((z ^ (z >> SHIFTS[1])) * MIX_2) & UNSIGNED
    return ((z ^ (z >> SHIFTS[2])) >> 11) * 2.0**-53


def uniforms(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``uniform`` for many requests, on the device and with the same bits.

    Args:
        keys: [rows] int64, ``key_of`` each request.
        counts: [rows] int64, tokens that each has generated.

    Returns:
        [rows] float64 in [0, 1).
    """
    z = keys + (counts + 1) * _signed(GAMMA)
    z = (z ^ _shifted(z, SHIFTS[0])) * _signed(MIX_1)
    z = (z ^ _shifted(z, SHIFTS[1])) * _signed(MIX_2)
    return _shifted(z ^ _shifted(z, SHIFTS[2]), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    """The signed 64-bit number with the same bits."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shifted right with zeros coming in; torch's own shift repeats the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def point_of(request: Request) -> float:
    """Where in [0, 1) the request's next token inverts the distribution."""
    return uniform(key_of(request.seed, request.sample_index), request.num_output_tokens)


def draw_of(request: Request) -> tuple[float, float]:
    """Temperature and point of a request's next token, as ``choose`` wants them."""
    if request.params.greedy:
        return 1.0, -1.0
    return request.params.temperature, point_of(request)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the rows of a step ask for, where the logits are."""

    numbers: torch.Tensor
    """[rows, 7] float64, ``FIELDS`` of each row."""
    points: torch.Tensor
    """[rows] float64 in [0, 1), where a row's distribution is inverted; means nothing where the row is greedy."""


def metadata_of(requests: Sequence[Request], upload: Upload) -> SamplingMetadata:
    """``SamplingMetadata`` made on the host, and brought to the device as one piece."""
    rows = [(*numbers_of(r.params), 0.0 if r.params.greedy else point_of(r)) for r in requests]
    table = upload(rows, torch.float64)
    return SamplingMetadata(table[:, : len(FIELDS)], table[:, len(FIELDS)])


# ---------------------------------------------------------------------- the part that a graph holds


def needs_sampler(request: Request) -> bool:
    """Whether ``choose`` is not enough: for penalties, candidates, truncation, tokens that are not allowed yet."""
    params = request.params
    truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    early = request.num_output_tokens < params.min_tokens
    return params.logprobs is not None or params.has_penalties or truncates or early


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor | None = None, points: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row, the largest or drawn.

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


def draw(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at a point in [0, 1): the first token whose share exceeds it."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(points.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


# ---------------------------------------------------------------------- everything


@dataclass(slots=True)
class Sampled:
    """Tokens and candidates of the rows, and which rows had logits that are not numbers (or all −inf, or +inf)."""

    tokens: list[int]
    """0 where the row is broken."""
    logprobs: list[dict[int, Logprob] | None] | None
    broken: list[bool]
    on_device: torch.Tensor
    """``tokens`` [rows] int64, where the logits are."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What was asked of the device for a step's rows: the tokens there, and what the host will read of it."""

    tokens: torch.Tensor
    """[rows] int64, on the device; 0 where the row's logits are not finite."""
    numbers: tuple[torch.Tensor, ...]
    """What ``read`` needs; nobody writes to these tensors any more. First whether each row is finite (1 or 0) and its token,
    [2, rows] int64; where candidates are wanted, log probabilities [asking rows, 1 + candidates] float32 and ranks and ids,
    likewise, int64: of the row's token (log probability, rank) and then of the most likely ones (log probability, id)."""
    candidates: Sequence[int | None]
    """Most likely tokens to report of each row, at most the vocabulary; None where nobody asks."""
    token_text: Callable[[int], str] = field(repr=False)

    def read(self, fetched: Sequence[torch.Tensor] | None = None) -> Sampled:
        """Tokens and candidates as the host wants them.

        Args:
            fetched: ``numbers``, copied to the host; None: the tensors themselves, which waits for the device.
        """
        chosen, *found = self.numbers if fetched is None else fetched
        finite, tokens = chosen.tolist()
        logprobs = self._logprobs(tokens, found[0].tolist(), found[1].tolist()) if found else None
        return Sampled(tokens, logprobs, [not good for good in finite], self.tokens)

    def _logprobs(
        self, tokens: list[int], values: list[list[float]], ids: list[list[int]]
    ) -> list[dict[int, Logprob] | None]:
        result: list[dict[int, Logprob] | None] = [None] * len(tokens)
        asking = [(row, count) for row, count in enumerate(self.candidates) if count is not None]
        for (row, count), (own_value, *top_values), (own_rank, *top_ids) in zip(asking, values, ids, strict=True):
            top = list(zip(top_ids[:count], top_values[:count], strict=True))
            result[row] = self._named(tokens[row], own_value, own_rank, top)
        return result

    def _named(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> dict[int, Logprob]:
        ranked = sorted(top, key=lambda pair: (-pair[1], pair[0]))
        found = {i: Logprob(value, place, self.token_text(i)) for place, (i, value) in enumerate(ranked, 1)}
        if token not in found:
            found[token] = Logprob(logprob, rank, self.token_text(token))
        return found


class Sampler:
    """Samples one token for each row. It remembers what requests with penalties have had from step to step.

    Args:
        token_text: a token as text, for candidates; None leaves them without.
        upload: brings numbers to the device without waiting; None: torch makes a tensor there, which on a GPU waits.
        may_look: whether the host may look at numbers on the way, because it computes them itself.
    """

    def __init__(
        self,
        token_text: Callable[[int], str] | None = None,
        upload: Upload | None = None,
        may_look: bool = True,
    ) -> None:
        self._token_text = token_text or (lambda token: "")
        self._upload = upload
        self._may_look = may_look
        self._penalties = PenaltyCounts()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """``submit`` and read at once."""
        return self.submit(logits, requests).read()

    @torch.inference_mode()
    def submit(
        self, logits: torch.Tensor, requests: Sequence[Request], metadata: SamplingMetadata | None = None
    ) -> Sampling:
        """Ask for a token a row, and for candidates where wanted.

        A request's newest token may be ``PENDING`` if the submission before sampled for it: its value is taken from there.

        Args:
            logits: [rows, vocabulary] float32; changed in place where rows ask for something.
            requests: one a row.
            metadata: the rows' numbers where they are on the device already; None: brought there from the requests.

        Raises:
            KeyError: a token is pending of a request with penalties that the submission before didn't sample for.
        """
        upload = self._upload or partial(_made_there, logits.device)
        rows = _Rows(upload)
        drawing = [row for row, request in enumerate(requests) if not request.params.greedy]
        penalised = [row for row, request in enumerate(requests) if request.params.has_penalties]
        asking = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if metadata is None and (drawing or penalised):
            metadata = metadata_of(requests, upload)
        raw = rows.take(logits, asking) if asking else logits
        if raw is logits and any(_changes_logits(requests[row]) for row in asking):
            raw = logits.clone()
        _ban(logits, requests, upload)
        counted = None
        if penalised and metadata is not None:
            logits, counted = self._penalise(logits, metadata, requests, penalised, rows)
        else:
            self._penalties.clear()
        best, tokens = logits.max(dim=-1)
        finite = torch.isfinite(best)
        if drawing and metadata is not None:
            drawn = self._draw(logits, best, metadata, requests, drawing, rows)
            tokens = rows.put(tokens, drawing, drawn)
        tokens = tokens * finite
        if counted is not None:
            self._penalties.keep(counted, rows.take(tokens, penalised))
        chosen = torch.stack((finite.long(), tokens))
        counts = [_wanted(request.params.logprobs, logits.shape[1]) for request in requests]
        found = _candidates(raw, rows.take(tokens, asking), max(counts[row] or 0 for row in asking)) if asking else ()
        return Sampling(tokens, (chosen, *found), counts, self._token_text)

    def forget(self) -> None:
        """Drop token counts: this step has no request with penalties."""
        self._penalties.clear()

    def _penalise(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        requests: Sequence[Request],
        penalised: list[int],
        rows: _Rows,
    ) -> tuple[torch.Tensor, Counted]:
        chosen = [requests[row] for row in penalised]
        counted = self._penalties.count(chosen, logits.shape[1], logits.device, rows.upload)
        penalties = rows.take(metadata.numbers, penalised)[:, PENALTIES].to(logits.dtype)
        return rows.put(logits, penalised, penalise(rows.take(logits, penalised), counted, penalties)), counted

    def _draw(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        metadata: SamplingMetadata,
        requests: Sequence[Request],
        drawing: list[int],
        rows: _Rows,
    ) -> torch.Tensor:
        """A token for each of the rows that draw; any where the row is not finite."""
        numbers, points = rows.take(metadata.numbers, drawing), rows.take(metadata.points, drawing)
        largest = rows.take(best, drawing).unsqueeze(1)
        temperatures = numbers[:, TEMPERATURE, None].to(logits.dtype)
        weights = ((rows.take(logits, drawing) - largest) / temperatures).exp_()
        chosen = [requests[row].params for row in drawing]
        cut = [place for place, params in enumerate(chosen) if _truncates(params, logits.shape[1])]
        if cut:
            kept = truncate(rows.take(weights, cut), rows.take(numbers, cut), [chosen[i] for i in cut], self._may_look)
            weights = rows.put(weights, cut, kept)
        return draw(weights, points)


class _Rows:
    """Some of a step's rows; each list of them goes to the device once. A list as long as the tensor means all rows."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        key = tuple(rows)
        if key not in self._known:
            self._known[key] = self.upload(key, torch.int64)
        return self._known[key]

    def take(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """A copy of the rows; the tensor itself where they are all."""
        return tensor if len(rows) == tensor.shape[0] else tensor.index_select(0, self._index(rows))

    def put(self, tensor: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> torch.Tensor:
        """The tensor with its rows replaced, in place; ``part`` itself where they are all."""
        return part if len(rows) == tensor.shape[0] else tensor.index_copy_(0, self._index(rows), part)


def _made_there(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# ---------------------------------------------------------------------- truncation


def truncate(
    weights: torch.Tensor, numbers: torch.Tensor, params: Sequence[SamplingParams], may_look: bool = True
) -> torch.Tensor:
    """Set all but the tokens that min_p, top_k and top_p keep to 0.

    Args:
        weights: [rows, vocabulary], probabilities up to a factor; the largest of a row is 1.
        numbers: [rows, 7] float64, see ``numbers_of``.
        params: one a row: what is asked of them at all.
        may_look: see ``Sampler``.
    """
    vocabulary = weights.shape[1]
    floor = numbers[:, MIN_P, None].to(weights.dtype)
    most = max(p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params)
    nuclear = any(p.top_p < 1 for p in params)
    if most == vocabulary and not nuclear and not any(0 < p.top_k < vocabulary for p in params):
        return weights.masked_fill(weights < floor, 0.0)
    top_k = numbers[:, TOP_K].long()
    keep = top_k.masked_fill(top_k == 0, vocabulary).clamp_(max=vocabulary)
    if any(p.min_p > 0 for p in params):
        keep = torch.minimum(keep, (weights >= floor).sum(-1)).clamp_(min=1)
    if not nuclear:
        return _keep_most_likely(weights, _ranked(weights, int(keep.max()) if may_look else most), keep)
    share = numbers[:, TOP_P, None]
    if may_look and most > FIRST_LOOK:
        ranked = _ranked(weights, FIRST_LOOK)
        nucleus, certain = _nucleus(weights, ranked, keep, share)
        widest = int(nucleus.max()) if bool(certain.all()) else vocabulary
        if widest <= FIRST_LOOK:
            return _keep_most_likely(weights, ranked, nucleus)
    ranked = _ranked(weights, most)
    nucleus, _ = _nucleus(weights, ranked, keep, share)
    return _keep_most_likely(weights, ranked, nucleus)


def _ranked(weights: torch.Tensor, most: int) -> torch.Tensor:
    """The largest weights of each row in descending order, [rows, most]."""
    if most < weights.shape[1]:
        return weights.topk(most, dim=-1).values
    return weights.sort(dim=-1, descending=True, stable=True).values


def _nucleus(
    weights: torch.Tensor, ranked: torch.Tensor, keep: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Size of the smallest set of most likely tokens, among the ``keep`` most likely, whose share reaches top_p.

    Args:
        weights: [rows, vocabulary].
        ranked: [rows, look], the largest of them.
        keep: [rows] int64, at least 1.
        share: [rows, 1] float64, top_p.

    Returns:
        Sizes [rows] int64, and for which rows ``ranked`` was long enough to tell [rows] bool.
    """
    vocabulary, look = weights.shape[1], ranked.shape[1]
    sums = ranked.double().cumsum(-1)
    last = keep.clamp(max=look).unsqueeze(1) - 1
    total = torch.where(keep.unsqueeze(1) < vocabulary, sums.gather(1, last), weights.double().sum(-1, keepdim=True))
    reached = sums >= share * total * (1 - 1e-12)
    reaches, everything = reached.any(-1), share[:, 0] >= 1
    first = torch.where(reaches, reached.int().argmax(-1) + 1, keep)
    size = torch.where(everything, keep, torch.minimum(first, keep))
    return size, reaches & ((keep <= look) | (keep == vocabulary)) | everything


def _keep_most_likely(weights: torch.Tensor, ranked: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Set all but the ``keep`` [rows] most likely of each row to 0, of equal ones the smaller ids; ``ranked`` holds them."""
    threshold = ranked.gather(1, keep.unsqueeze(1) - 1)
    above = weights > threshold
    tied = weights == threshold
    room = keep.unsqueeze(1) - above.sum(-1, keepdim=True)
    return weights * (above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room)))


def _truncates(params: SamplingParams, vocabulary: int) -> bool:
    return 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0


# ---------------------------------------------------------------------- min_tokens and candidates


def _ban(logits: torch.Tensor, requests: Sequence[Request], upload: Upload) -> None:
    """Set tokens that would end an output before ``min_tokens`` to −inf, for all rows at once."""
    vocabulary = logits.shape[1]
    banned = [(row, token) for row, request in enumerate(requests) for token in _banned(request) if token < vocabulary]
    if banned:
        rows, tokens = upload(list(zip(*banned, strict=True)), torch.int64)
        logits.index_put_((rows, tokens), logits.new_full((), float("-inf")))


def _banned(request: Request) -> set[int]:
    """Tokens that would end the output before ``min_tokens``."""
    if request.num_output_tokens >= request.params.min_tokens:
        return set()
    return {*request.eos_token_ids, *request.params.stop_token_ids}


def _changes_logits(request: Request) -> bool:
    return request.params.has_penalties or bool(_banned(request))


def _wanted(logprobs: int | None, vocabulary: int) -> int | None:
    """Candidates to report: −1 means the whole vocabulary."""
    return None if logprobs is None else vocabulary if logprobs == -1 else min(logprobs, vocabulary)


def _candidates(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens [rows] and of the ``count`` most likely what ``Sampling.numbers`` says."""
    logprobs = logits.log_softmax(-1)
    picked = tokens.unsqueeze(1)
    own = logprobs.gather(1, picked)
    ranks = (logits > logits.gather(1, picked)).sum(-1, keepdim=True) + 1
    if count == 0:
        return own, ranks
    values, ids = logprobs.topk(count, dim=-1)
    return torch.cat((own, values), 1), torch.cat((ranks, ids), 1)
