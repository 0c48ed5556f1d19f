"""What a GPU remembers of every request, so that a step's inputs are made where they are needed.

The host decides who takes part in a step. What follows from that (token, position, slot, temperature, random number of each
row) the GPU works out by itself: it sampled the tokens, and a length grows by what was computed::

    host     mirror of each seat   ──plan──▶  only what differs from it: a new block, a new request      one copy, or none
    GPU      seat     token  length  generated  key  writes   temperature …   block table
               0        44     17        3       …     1          0.6         [ 7  3  9  · ]
               1       301     64       40       …     1          0           [ 2  5  8 11 ]
              null       0      0        0       0     0          0           [ 0  0  0  0 ]      padding of graphs sits here

    inputs   seats [1, 0]  ──▶  token ids [301, 44]  positions [64, 17]  slots …   and both lengths grow by 1
    commit   seats [1, 0], tokens just sampled  ──▶  tokens and numbers generated of both seats

A decode in which nobody starts a block, with the same rows as the step before, needs nothing from the host but a launch.

``Seat`` is the host's mirror. It is compared with the engine's own lists for each step, and whatever differs (a request that
was preempted, a block copied on write) is sent: nobody has to tell this module what happened. The host may run ahead: the
stream's order makes a seat that is given to another request safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.core.request import Request
from engine.core.runner import PENDING, Work
from engine.model.attention import Upload
from engine.model.errors import ModelError
from engine.model.sampler import FIELDS, SamplingMetadata, choose, key_of, numbers_of, uniforms

LENGTH, GENERATED, KEY, WRITES = range(4)
"""Columns of ``RequestState.counters``."""
UNKNOWN = -2
"""In ``Seat.token``: the device holds nothing of use."""
GREEDY = (0.0,) * len(FIELDS)


@dataclass(slots=True)
class Row:
    """All that a seat holds."""

    length: int
    """Positions whose K and V are stored: that of the next token."""
    block_table: list[int]
    token: int = 0
    """The newest token, at position ``length``."""
    generated: int = 0
    """Tokens generated so far, which numbers the next random number."""
    key: int = 0
    """Of the request's random numbers (``engine.model.sampler.key_of``)."""
    numbers: tuple[float, ...] = GREEDY
    """What it wants of the sampler (``engine.model.sampler.FIELDS``); a temperature of 0 is greedy."""
    writes: bool = True
    """Whether K and V are stored; padding stores nothing."""


@dataclass(slots=True)
class Changes:
    """What a step has to tell the device before it can start, and where its rows sit."""

    seats: list[int] = field(default_factory=list)
    """One for each piece of work."""
    sampling: list[int] = field(default_factory=list)
    """One for each sampling request, forks after their parent."""
    counters: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Seat, then its row of ``RequestState.counters``."""
    numbers: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    """Seat, then its row of ``RequestState.numbers``."""
    entries: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Entries of all block tables laid end to end, and blocks."""
    tokens: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Seats, and tokens that the device doesn't know."""


@dataclass(slots=True, eq=False)
class Seat:
    """The host's mirror of a seat, as it will be once everything asked for so far is done."""

    index: int
    holder: Hashable = None
    turn: int = 0
    """Number of the newest step that it took part in."""
    sampled: int = 0
    """Number of the newest step that samples for it."""
    length: int = -1
    generated: int = -1
    block_table: list[int] = field(default_factory=list)
    token: int = UNKNOWN
    """The newest token on the device; PENDING while only the device knows it."""
    position: int = -1
    """Of that token."""
    known: bool = False
    """Whether the device has the holder's wishes."""


class RequestState:
    """The state of up to ``num_seats`` requests on a device, and its mirror on the host.

    Args:
        num_seats: most requests in a step.
        max_model_len: longest sequence; with ``block_size`` it gives the width of the block tables.
        block_size: of the KV pool.
        where: the device.
        upload: brings numbers there.
        kernels: inputs are made by one Triton kernel instead of a dozen torch calls.
    """

    def __init__(
        self, num_seats: int, max_model_len: int, block_size: int, where: torch.device, upload: Upload, kernels: bool = False
    ) -> None:
        self.num_seats, self.block_size, self.width = num_seats, block_size, -(-max_model_len // block_size)
        self.upload, self.kernels = upload, kernels
        rows = num_seats + 1
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=where)
        self.counters = torch.zeros((rows, 4), dtype=torch.int64, device=where)
        """Length, tokens generated, key of the random numbers, whether K and V are stored; [seats + 1, 4] int64."""
        self.numbers = torch.zeros((rows, len(FIELDS)), dtype=torch.float64, device=where)
        """What the sampler is asked for; [seats + 1, ``FIELDS``] float64."""
        self.tables = torch.zeros((rows, self.width), dtype=torch.int32, device=where)
        """Block tables; entries behind a sequence's last block may be anything. [seats + 1, blocks] int32."""
        self._seats = [Seat(index) for index in range(num_seats)]
        self._held: dict[Hashable, Seat] = {}
        self._turn = 0

    @property
    def null(self) -> int:
        """The seat of padding: it writes nowhere and never changes."""
        return self.num_seats

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that lies on the device."""
        return [self.tokens, self.counters, self.numbers, self.tables]

    @property
    def num_bytes(self) -> int:
        """Device memory of the state."""
        return sum(tensor.nbytes for tensor in self.tensors)

    # ------------------------------------------------------------------ on the host

    def plan(self, works: Sequence[Work], resident_tokens: bool) -> Changes:
        """Compare a step with the mirror; returns what must be sent (``apply``) and brings the mirror up to date.

        Args:
            works: the step.
            resident_tokens: whether each row's token will be read from its seat; otherwise the host sends token ids anyway,
                and only pending ones are read there.

        Raises:
            KeyError: a token is pending of a request that no step in flight sampled for.
            ModelError: more requests than seats.
            ValueError: a block table is wider than ``max_model_len`` allows.
        """
        self._turn += 1
        seats = self._seats_of(works)
        changes = Changes()
        for work, seat in zip(works, seats, strict=False):
            self._compare(work, seat, changes, resident_tokens)
        forks = iter(seats[len(works) :])
        for work, seat in zip(works, seats, strict=False):
            for request in work.samples:
                sampling = seat if request is work.request else next(forks)
                if sampling is not seat:  # its table is told when it takes part itself
                    self._tell(sampling, request, seat.length, request.num_output_tokens, changes)
                sampling.generated, sampling.sampled = request.num_output_tokens + 1, self._turn
                sampling.token, sampling.position = PENDING, seat.length
                changes.sampling.append(sampling.index)
        changes.seats = [seat.index for seat in seats[: len(works)]]
        return changes

    def learn(self, turn: int, seats: Iterable[int], tokens: Iterable[int]) -> None:
        """The host knows by now what step number ``turn`` sampled."""
        for index, token in zip(seats, tokens, strict=True):
            seat = self._seats[index]
            if seat.sampled == turn:
                seat.token = token

    @property
    def turn(self) -> int:
        """Number of the newest step planned."""
        return self._turn

    def distrust(self) -> None:
        """A step failed half way: what the device holds of its members, apart from tokens of earlier steps, is unknown."""
        for seat in self._seats:
            seat.length, seat.known, seat.block_table = -1, False, []
            if seat.turn == self._turn:
                seat.token = UNKNOWN

    def forget(self) -> None:
        """Let go of all requests."""
        self._seats = [Seat(index) for index in range(self.num_seats)]
        self._held = {}

    def _seats_of(self, works: Sequence[Work]) -> list[Seat]:
        """Seats of the works, then of the forks that sample from them; who has none gets the one that idles longest."""
        holders: list[Hashable] = [work.request or number for number, work in enumerate(works)]
        holders += [request for work in works for request in work.samples if request is not work.request]
        held, turn, missing = self._held, self._turn, []
        for holder in holders:
            seat = held.get(holder)
            if seat is None:
                missing.append(holder)
            else:
                seat.turn = turn
        if missing:
            self._place(missing, len(holders))
        return [held[holder] for holder in holders]

    def _place(self, missing: list[Hashable], wanted: int) -> None:
        free = sorted((seat for seat in self._seats if seat.turn != self._turn), key=lambda seat: seat.turn)
        if len(missing) > len(free):
            raise ModelError(f"a step of {wanted} requests, but max_num_seqs is {self.num_seats}")
        for holder, old in zip(missing, free, strict=False):
            self._held.pop(old.holder, None)
            self._seats[old.index] = self._held[holder] = Seat(old.index, holder, self._turn)

    def _compare(self, work: Work, seat: Seat, changes: Changes, resident_tokens: bool) -> None:
        request, token = work.request, work.token_ids[-1]
        generated = request.num_output_tokens if request is not None else 0
        if seat.length != work.context or seat.generated != generated or not seat.known:
            self._tell(seat, request, work.context, generated, changes)
        if seat.block_table != work.block_table:
            self._tell_table(seat, work.block_table, changes)
        last = work.context + len(work.token_ids) - 1
        if token == PENDING:
            if seat.token == UNKNOWN or seat.position != last:
                raise KeyError(f"a token of {request!r} is pending, but the step submitted before doesn't sample for it")
        elif resident_tokens and request is not None and (seat.token != token or seat.position != last):
            changes.tokens[0].append(seat.index)
            changes.tokens[1].append(token)
        seat.length = last + 1

    def _tell(self, seat: Seat, request: Request | None, length: int, generated: int, changes: Changes) -> None:
        key = key_of(request.seed, request.sample_index) if request is not None else 0
        changes.counters.append((seat.index, length, generated, key, int(request is not None)))
        if not seat.known:
            changes.numbers.append((seat.index, numbers_of(request.params) if request is not None else GREEDY))
        seat.length, seat.generated, seat.known = length, generated, True

    def _tell_table(self, seat: Seat, table: list[int], changes: Changes) -> None:
        """Mostly a table has grown by a block; any other change sends it whole."""
        if len(table) > self.width:
            raise ValueError(f"a block table of {len(table)} blocks, but the buffers hold {self.width}: raise max_model_len")
        same = len(seat.block_table)
        if table[:same] != seat.block_table:
            same, seat.block_table = 0, []
        start, new = seat.index * self.width, table[same:]
        changes.entries[0].extend(range(start + same, start + len(table)))
        changes.entries[1].extend(new)
        seat.block_table.extend(new)

    # ------------------------------------------------------------------ on the device

    def write(self, rows: dict[int, Row]) -> None:
        """Set whole seats, without the mirror: for checks and tests."""
        changes = Changes()
        for index, row in rows.items():
            changes.counters.append((index, row.length, row.generated, row.key, int(row.writes)))
            changes.numbers.append((index, row.numbers))
            changes.entries[0].extend(range(index * self.width, index * self.width + len(row.block_table)))
            changes.entries[1].extend(row.block_table)
            changes.tokens[0].append(index)
            changes.tokens[1].append(row.token)
        self.apply(changes)

    def apply(self, changes: Changes) -> None:
        """Send what changed, in one copy."""
        counters, numbers = changes.counters, changes.numbers
        parts = [
            np.array([row[0] for row in counters], np.int64),
            np.array([row[1:] for row in counters], np.int64).ravel(),
            np.array([seat for seat, _ in numbers], np.int64),
            np.array([row for _, row in numbers], np.float64).ravel().view(np.int64),
            *(np.array(part, np.int64) for part in (*changes.entries, *changes.tokens)),
        ]
        sizes = [part.size for part in parts]
        if not any(sizes):
            return
        sent = self.upload(np.concatenate(parts), torch.int64).split(sizes)  # type: ignore[arg-type]
        counted, counts, wished, wishes, entries, blocks, seats, tokens = sent
        if sizes[0]:
            self.counters.index_copy_(0, counted, counts.view(-1, 4))
        if sizes[2]:
            self.numbers.index_copy_(0, wished, wishes.view(torch.float64).view(-1, len(FIELDS)))
        if sizes[4]:
            self.tables.view(-1).index_copy_(0, entries, blocks.int())
        if sizes[6]:
            self.tokens.index_copy_(0, seats, tokens)

    def warm_up(self) -> None:
        """Compile what steps without a graph need, on nothing."""
        span = self.upload([[0, 0, self.null]], torch.int64)
        self.chunk_inputs(span, self.tokens[:0] if not self.kernels else self.tokens[:1])

    def decode_inputs(self, seats: torch.Tensor, into: DecodeInputs, draws: bool) -> None:
        """Inputs of a step with one token a seat; the seats' lengths grow by one.

        Args:
            seats: [rows] int64; ``null`` for padding.
            into: rows to write.
            draws: whether temperatures and points are needed.
        """
        if self.kernels:
            from engine.model.state_kernels import launch_decode_inputs

            launch_decode_inputs(self, seats, into)
            return
        counters = self.counters.index_select(0, seats)
        length, writes = counters[:, LENGTH], counters[:, WRITES] != 0
        into.positions.copy_(length)
        into.slots.copy_(self._slots(seats, length).masked_fill_(~writes, -1))
        into.token_ids.copy_(self.tokens.index_select(0, seats) * writes)
        rows = torch.arange(seats.shape[0], device=seats.device)
        into.tiles.copy_(torch.stack((rows, torch.ones_like(rows), length, seats), 1))
        if draws:
            temperatures, points = self.draws(seats)
            into.temperatures.copy_(temperatures)
            into.points.copy_(points)
        self.counters[:, LENGTH].index_add_(0, seats, (seats != self.null).long())

    def chunk_inputs(self, spans: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of a step with any number of tokens a seat; the seats' lengths grow by it.

        Args:
            spans: [works, 3] int64: first packed row, number of rows, seat. They lie side by side, in order.
            token_ids: [T] int64 from the host; PENDING is replaced by the seat's token.

        Returns:
            Token ids, positions and slots, [T] int64; the slot is −1 where nothing is stored.
        """
        if self.kernels:
            from engine.model.state_kernels import launch_chunk_inputs

            return launch_chunk_inputs(self, spans, token_ids)
        start, count, seat = spans.unbind(1)
        rows = torch.arange(token_ids.shape[0], device=seat.device)
        of = torch.searchsorted(start.contiguous(), rows, right=True) - 1
        seats = seat.index_select(0, of)
        counters = self.counters.index_select(0, seats)
        positions = counters[:, LENGTH] + rows - start.index_select(0, of)
        slots = self._slots(seats, positions).masked_fill_(counters[:, WRITES] == 0, -1)
        ids = torch.where(token_ids == PENDING, self.tokens.index_select(0, seats), token_ids)
        self.counters[:, LENGTH].index_add_(0, seat, count)
        return ids, positions, slots

    def _slots(self, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size = self.block_size
        entries = seats * self.width + positions.div(size, rounding_mode="floor")
        return self.tables.view(-1).index_select(0, entries).long() * size + positions.remainder(size)

    def draws(self, seats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperatures [rows] float32 and points [rows] float64 of the seats' next tokens, as ``choose`` wants them."""
        wanted = self.metadata(seats)
        temperatures = wanted.numbers[:, 0]
        greedy = temperatures <= 0
        return temperatures.masked_fill(greedy, 1.0).float(), wanted.points.masked_fill(greedy, -1.0)

    def metadata(self, seats: torch.Tensor) -> SamplingMetadata:
        """What the seats want of the sampler, and the random numbers of their next tokens."""
        counters = self.counters.index_select(0, seats)
        return SamplingMetadata(self.numbers.index_select(0, seats), uniforms(counters[:, KEY], counters[:, GENERATED]))

    def commit(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` [rows] int64 are the newest of ``seats`` [rows], none of which is ``null``."""
        self.tokens.index_copy_(0, seats, tokens)
        self.counters[:, GENERATED].index_add_(0, seats, torch.ones_like(seats))

    def finish_decodes(
        self,
        seats: torch.Tensor,
        logits: torch.Tensor,
        inputs: DecodeInputs | None,
        last: torch.Tensor,
        outcome: torch.Tensor,
        commit: bool,
    ) -> None:
        """Choose a token a row, as ``engine.model.sampler.choose`` does, and ``commit`` it unless others are to be chosen.

        Args:
            seats: [rows] int64; ``null`` for padding.
            logits: [rows, vocabulary], in any number format.
            inputs: temperatures and points of the rows; None: all are greedy.
            last: [rows, hidden]; a row that isn't finite has not been either.
            outcome: [2, rows] int64, written: whether all was finite (1 or 0), and the token.
            commit: whether the seats keep the tokens.
        """
        if self.kernels:
            from engine.model.state_kernels import launch_finish

            launch_finish(self, seats, logits, inputs, last, outcome, commit)
            return
        tokens, finite = choose(logits.float(), *(() if inputs is None else (inputs.temperatures, inputs.points)))
        outcome[0].copy_(finite & torch.isfinite(last).all(-1))
        outcome[1].copy_(tokens)
        if commit:
            real = seats != self.null
            self.tokens.index_copy_(0, seats, tokens * real)
            self.counters[:, GENERATED].index_add_(0, seats, real.long())


class DecodeInputs:
    """Inputs of a step with one token a row, at addresses that never change.

    Args:
        rows: most of them.
        where: the device.
    """

    def __init__(self, rows: int, where: torch.device) -> None:
        self.token_ids, self.positions, self.slots = (torch.zeros(rows, dtype=torch.int64, device=where) for _ in range(3))
        self.tiles = torch.zeros((rows, 4), dtype=torch.int32, device=where)
        """Row, 1, position, seat: see ``engine.model.attention.triton_kernels.attend_kernel``."""
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=where)
        self.points = torch.zeros(rows, dtype=torch.float64, device=where)
        """In [0, 1) a row draws; below 0 it is greedy."""

    def __getitem__(self, rows: slice) -> DecodeInputs:
        """The same memory, some of the rows."""
        part = object.__new__(DecodeInputs)
        for name, tensor in vars(self).items():
            setattr(part, name, tensor[rows])
        return part
