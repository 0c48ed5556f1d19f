"""Random lives of requests over a ``RequestState``, with everything that it makes compared with the engine's own lists."""

import random

import torch

from engine.core.runner import PENDING, Work
from engine.model.sampler import FIELDS, choose, key_of, uniform
from engine.model.state import DecodeInputs, RequestState
from tests.model.kit import make_request

SEATS, LONGEST, BLOCK_SIZE = 4, 40, 4


def upload(values, dtype):
    return torch.tensor(values, dtype=dtype)


class Lives:
    """Requests come, compute chunks, decode, fork, are preempted, change blocks, end; steps fail; the host learns late."""

    def __init__(self, seed, kernels=False, where="cpu"):
        self.ids, self.made = random.Random(seed), 0
        self.where = torch.device(where)
        self.state = RequestState(SEATS, LONGEST, BLOCK_SIZE, self.where, self.upload, kernels)
        self.inputs = DecodeInputs(SEATS + 1, self.where)
        self.live, self.context, self.tables = [], {}, {}
        self.truth = {}
        """All tokens of a request, known to the host or not."""
        self.unknown = []
        """Steps whose tokens the host does not know: (turn, seats, requests, places, tokens)."""
        self.seen = {"decodes": 0, "chunks": 0, "nothing sent": 0, "pending": 0}

    def upload(self, values, dtype):
        return torch.tensor(values, dtype=dtype, device=self.where)

    def step(self):
        ids = self.ids
        while len(self.live) < SEATS + 1 and ids.random() < 0.5:
            self._arrive()
        for request in list(self.live):
            self._happen(request)
        members = ids.sample(self.live, min(len(self.live), ids.randint(1, SEATS)))
        if ids.random() < 0.6:
            members = [request for request in members if self.context[request] == request.num_tokens - 1]
        works = [self._work(request) for request in members]
        if works and ids.random() < 0.3 and len(works) < SEATS:
            padding = Work(None, [0], ids.randrange(LONGEST), [0] * (LONGEST // BLOCK_SIZE))
            works.insert(ids.randrange(len(works) + 1), padding)
        if works:
            self._compute(works)
        while len(self.unknown) > ids.randint(0, 1):
            self._learn()

    def _arrive(self):
        ids, self.made = self.ids, self.made + 1
        prompt = [ids.randrange(1, 99) for _ in range(ids.randint(1, 12))]
        kinds = ({"temperature": 0}, {"temperature": ids.choice([0.5, 2.0])}, {"top_k": 3, "top_p": 0.5, "min_p": 0.25})
        request = make_request(str(self.made), prompt, hash_seed=ids.randrange(2**63), **ids.choice(kinds))
        request.sample_index = ids.randrange(3)
        self._enter(request)

    def _enter(self, request):
        self.live.append(request)
        self.context[request], self.tables[request] = 0, []
        self.truth[request] = list(request.token_ids)

    def _happen(self, request):
        """Whatever befalls a request between two steps."""
        chance, table = self.ids.random(), self.tables[request]
        if chance < 0.04 or request.num_tokens >= LONGEST - 1:
            self.live.remove(request)
        elif chance < 0.1 and request.token_ids[-1] != PENDING:
            self.context[request], self.tables[request] = 0, []  # preempted
        elif chance < 0.2 and table:
            table[self.ids.randrange(len(table))] = self.ids.randrange(1, 90)  # copied on write
        elif chance < 0.25:
            self.tables[request] = list(table)

    def _work(self, request):
        context = self.context[request]
        left = request.num_tokens - context
        count = self.ids.randint(1, left)
        table = self.tables[request]
        while len(table) * BLOCK_SIZE < context + count:
            table.append(self.ids.randrange(1, 90))
        samples = (request,) if count == left else ()
        return Work(request, request.token_ids[context : context + count], context, table, samples)

    def _compute(self, works):
        decode = all(len(work.token_ids) == 1 and work.samples == (work.request,) for work in works if work.request)
        if not decode and self.ids.random() < 0.5:
            self._fork(works)
        state = self.state
        if self.ids.random() < 0.05:  # a step that fails: on the host, or after it was asked for half of it
            changes = state.plan(works, resident_tokens=decode)
            if self.ids.random() < 0.5:
                state.apply(changes)
                self._make_inputs(works, changes, decode)
            state.distrust()
            self._end_of_failure(works)
            return
        changes = state.plan(works, resident_tokens=decode)
        assert len(set(changes.seats + changes.sampling)) == len(
            {work.request or number for number, work in enumerate(works)} | {r for w in works for r in w.samples}
        )
        sent = changes.counters or changes.numbers or changes.entries[0] or changes.tokens[0]
        state.apply(changes)
        self._check_inputs(works, decode, *self._make_inputs(works, changes, decode))
        self._check_metadata(works, changes)
        self._sample(works, changes, decode)
        self.seen["decodes" if decode else "chunks"] += 1
        self.seen["nothing sent"] += not sent
        self.seen["pending"] += sum(work.token_ids[-1] == PENDING for work in works)
        self._check_null()

    def _fork(self, works):
        for work in works:
            if work.samples and len(work.token_ids) > 1 and len(works) + len(self.live) <= SEATS:
                params = {"hash_seed": 5, "sample_index": 1, "temperature": 0.5}
                fork = make_request(f"{work.request.request_id}#1", work.request.prompt_token_ids, **params)
                if work.request.num_output_tokens == 0:
                    self._enter(fork)
                    work.samples = (work.request, fork)
                return

    def _end_of_failure(self, works):
        while self.unknown:  # the engine collects the step before it schedules the next one
            self._learn()
        ended = {r for work in works for r in (work.request, *work.samples) if self.ids.random() < 0.5}  # others try again
        self.live = [request for request in self.live if request not in ended]

    def _make_inputs(self, works, changes, decode):
        state = self.state
        if decode:
            rows = len(works) + 1
            inputs = self.inputs[:rows]
            seats = self.upload([*changes.seats, state.null], torch.int64)
            state.decode_inputs(seats, inputs, draws=True)
            assert [inputs.temperatures.tolist(), inputs.points.tolist()] == [part.tolist() for part in state.draws(seats)]
            assert inputs.tiles[:, :2].tolist() == [[row, 1] for row in range(rows)]
            assert inputs.tiles[:, 3].tolist() == [*changes.seats, state.null]
            assert inputs.tiles[:, 2].tolist() == inputs.positions.tolist()
            last = [part[-1].item() for part in (inputs.token_ids, inputs.positions, inputs.slots, inputs.points)]
            assert last == [0, 0, -1, -1.0]
            return inputs.token_ids[:-1], inputs.positions[:-1], inputs.slots[:-1]
        spans, ids = [], []
        for work, seat in zip(works, changes.seats, strict=True):
            spans.append([len(ids), len(work.token_ids), seat])
            ids += work.token_ids
        return state.chunk_inputs(self.upload(spans, torch.int64), self.upload(ids, torch.int64))

    def _check_inputs(self, works, decode, ids, positions, slots):
        expected = [[], [], []]
        for work in works:
            where = range(work.context, work.context + len(work.token_ids))
            tokens = [self.truth[work.request][p] for p in where] if work.request else [0]
            table = work.block_table
            expected[0] += tokens
            expected[1] += where
            expected[2] += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE if work.request else -1 for p in where]
        assert [part.tolist() for part in (ids, positions, slots)] == expected

    def _check_metadata(self, works, changes):
        requests = [request for work in works for request in work.samples]
        found = self.state.metadata(self.upload(changes.sampling, torch.int64))
        temperatures, points = self.state.draws(self.upload(changes.sampling, torch.int64))
        for row, request in enumerate(requests):
            point = uniform(key_of(request.seed, request.sample_index), request.num_output_tokens)
            greedy = request.params.greedy
            wanted = dict(zip(FIELDS, found.numbers[row].tolist(), strict=True))
            assert wanted == {name: getattr(request.params, name) for name in FIELDS}
            assert found.points[row].item() == point
            assert points[row].item() == (-1.0 if greedy else point)
            assert temperatures[row].item() == (1.0 if greedy else request.params.temperature)

    def _sample(self, works, changes, decode):
        """The device samples; the host appends placeholders and moves on."""
        state = self.state
        requests = [request for work in works for request in work.samples]
        tokens = [self.ids.randrange(1, 99) for _ in requests]
        if decode:
            tokens = [token for work, token in zip(works, self._finish(works, changes), strict=True) if work.request]
        elif requests:
            state.commit(self.upload(changes.sampling, torch.int64), self.upload(tokens, torch.int64))
        for work in works:
            if work.request:
                self.context[work.request] = work.context + len(work.token_ids)
                for fork in work.samples[1:]:
                    self.context[fork], self.tables[fork] = self.context[work.request], list(work.block_table)
        places = [request.num_tokens for request in requests]
        for request, token in zip(requests, tokens, strict=True):
            self.truth[request].append(token)
            request.token_ids.append(PENDING)
        self.unknown.append((state.turn, changes.sampling, requests, places, tokens))

    def _finish(self, works, changes):
        """Tokens of a decode step, chosen on the device; some rows are no numbers."""
        ids, rows = self.ids, len(works) + 1
        logits = torch.randn(rows, ids.choice([20, 4999]), generator=torch.Generator().manual_seed(ids.randrange(2**31))) * 2
        logits, last = logits.to(self.where), torch.zeros((rows, 5), device=self.where)
        outcome = torch.full((2, rows), -9, device=self.where)
        strange = ids.choice([float("nan"), float("inf"), -float("inf")])
        sick, where = ids.choice([None, ids.randrange(len(works))]), ids.choice([last, logits])
        if sick is not None:
            where[sick, ids.randrange(5) if where is last or strange > 0 or strange != strange else slice(None)] = strange
        inputs = ids.choice([None, self.inputs[:rows]])
        expected = choose(logits, *(() if inputs is None else (inputs.temperatures, inputs.points)))[0].tolist()
        seats = self.upload([*changes.seats, self.state.null], torch.int64)
        commit = ids.random() < 0.7
        self.state.finish_decodes(seats, logits, inputs, last, outcome, commit)
        assert outcome[1].tolist() == expected
        assert outcome[0].tolist() == [int(row != sick) for row in range(rows)]
        if not commit:  # somebody else chooses
            chosen = [row for row, work in enumerate(works) if work.request]
            self.state.commit(upload(changes.sampling, torch.int64), outcome[1, chosen])
        return expected[:-1]

    def _learn(self):
        turn, seats, requests, places, tokens = self.unknown.pop(0)
        self.state.learn(turn, seats, tokens)
        for request, place, token in zip(requests, places, tokens, strict=True):
            request.token_ids[place] = token

    def _check_null(self):
        null = self.state.null
        assert not any(part[null].any() for part in self.state.tensors)


def live(seed, steps=60, kernels=False, where="cpu"):
    """A number of steps; returns what was met."""
    lives = Lives(seed, kernels, where)
    for _ in range(steps):
        lives.step()
    return lives.seen
