"""Penalties for tokens that a request has had before, counted where the logits are.

One matrix holds what the penalised requests of the newest step have had, a request a row::

    seen    [rows, vocabulary] bool      is the token in the prompt or the output?
    counts  [rows, vocabulary] float32   how often is it in the output?

A step adds the tokens that the step before sampled. Those are on the device already, so a request can be penalised whose
newest token the host doesn't know yet (``PENDING``). While the same requests come in the same order the matrix stays as it
is; else its rows are moved, and a request that isn't among them is counted from its tokens: a new one, and one that comes
back after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.request import Request
from engine.core.runner import PENDING
from engine.model.attention import Upload


@dataclass(frozen=True, slots=True)
class Counted:
    """What the requests had when the step began: each one's tokens up to its length then."""

    requests: Sequence[Request]
    """Held, so that no other request can be taken for one of them."""
    lengths: Sequence[int]
    """``num_tokens`` of each."""
    seen: torch.Tensor
    """[rows, vocabulary] bool."""
    counts: torch.Tensor
    """[rows, vocabulary] float32."""


class PenaltyCounts:
    """Remembers from step to step what penalised requests have had.

    A step goes: ``count``, penalise, sample, ``keep``. A step that fails in between is not kept: all is counted again then.
    """

    def __init__(self) -> None:
        self._before: tuple[Counted, torch.Tensor] | None = None
        """The step before, and what it sampled for each of its rows, [rows] int64."""

    def clear(self) -> None:
        """Give the memory back: no request of the next step goes on from here."""
        self._before = None

    def keep(self, counted: Counted, sampled: torch.Tensor) -> None:
        """The step is over: it sampled ``sampled`` [rows] int64 for the rows of ``counted``, and nobody writes there."""
        self._before = counted, sampled

    def count(self, requests: Sequence[Request], vocabulary: int, device: torch.device, upload: Upload) -> Counted:
        """What each of these requests has had, pending tokens included.

        Raises:
            KeyError: a token is pending of a request that the step before didn't sample for.
        """
        before, self._before = self._before, None
        rows = _rows_going_on(before[0], requests) if before is not None else {}
        if before is None or not rows:
            return _started(requests, vocabulary, device, upload)
        old, sampled = before
        _add_newest(old, sampled, rows, upload)
        lengths = [request.num_tokens for request in requests]
        if [rows.get(request) for request in requests] == list(range(len(old.requests))):
            return Counted(requests, lengths, old.seen, old.counts)
        counted = _started(requests, vocabulary, device, upload, leave_out=rows)
        moves = [(row, rows[request]) for row, request in enumerate(requests) if request in rows]
        to, where = upload(list(zip(*moves, strict=True)), torch.int64)
        counted.seen.index_copy_(0, to, old.seen.index_select(0, where))
        counted.counts.index_copy_(0, to, old.counts.index_select(0, where))
        return counted


def penalise(logits: torch.Tensor, counted: Counted, penalties: torch.Tensor) -> torch.Tensor:
    """Logits after the three penalties, in vLLM's order: repetition, frequency, presence.

    Args:
        logits: [rows, vocabulary] float32.
        counted: the requests' tokens, a row each.
        penalties: [rows, 3] float32: repetition, presence and frequency penalty.
    """
    repetition, presence, frequency = penalties.split(1, dim=1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    result = torch.where(counted.seen, scaled, logits)
    result -= frequency * counted.counts + presence * (counted.counts > 0)
    return result


def _rows_going_on(old: Counted, requests: Sequence[Request]) -> dict[Request, int]:
    """Row of each request that has had exactly one more token since."""
    lengths = {request: (row, length) for row, (request, length) in enumerate(zip(old.requests, old.lengths, strict=True))}
    found = ((request, lengths.get(request)) for request in requests)
    return {request: known[0] for request, known in found if known is not None and known[1] + 1 == request.num_tokens}


def _add_newest(old: Counted, sampled: torch.Tensor, rows: dict[Request, int], upload: Upload) -> None:
    """Add each request's newest token: the host's where it knows it, else the sampled one. Other rows are left to spoil."""
    newest = [PENDING] * len(old.requests)
    for request, row in rows.items():
        newest[row] = request.token_ids[-1]
    known = upload(newest, torch.int64)
    tokens = torch.where(known < 0, sampled, known).unsqueeze(1)
    old.seen.scatter_(1, tokens, True)
    old.counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=old.counts.dtype))


def _started(
    requests: Sequence[Request],
    vocabulary: int,
    device: torch.device,
    upload: Upload,
    leave_out: dict[Request, int] | None = None,
) -> Counted:
    """Count from the host's tokens; rows of requests to leave out are zero."""
    prompts: list[int] = []
    outputs: list[int] = []
    for row, request in enumerate(requests):
        if leave_out is not None and request in leave_out:
            continue
        if request.token_ids[-1] == PENDING:
            raise KeyError(f"a token of {request!r} is pending, but the step submitted before doesn't sample for it")
        start = row * vocabulary
        prompts += (start + token for token in {*request.prompt_token_ids} if token < vocabulary)
        outputs += (start + token for token in request.output_token_ids if token < vocabulary)
    seen = torch.zeros((len(requests), vocabulary), dtype=torch.bool, device=device)
    counts = torch.zeros((len(requests), vocabulary), dtype=torch.float32, device=device)
    if prompts or outputs:
        places = upload(prompts + outputs, torch.int64)
        seen.view(-1).index_fill_(0, places, True)
        said = places[len(prompts) :]
        counts.view(-1).index_add_(0, said, torch.ones_like(said, dtype=counts.dtype))
    return Counted(requests, [request.num_tokens for request in requests], seen, counts)
