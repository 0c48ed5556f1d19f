"""Decode graphs without a GPU: a graph that repeats recorded torch calls on fixed addresses, and buffers full of garbage."""

import random
from contextlib import suppress
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.runner import PENDING, StepBatch, Work
from engine.model.attention import Span
from engine.model.graphs import DecodeBuffers, DecodeGraphs, DecodeStep, GraphKey, buckets, kind_of_decode
from engine.model.sampler import Sampler
from engine.model.selfcheck import _graph_difference
from engine.model.state import RequestState
from tests.model.fake_gpu import RecordedGraphs, ResidentSdpa
from tests.model.kit import make_request

BLOCK_SIZE, BLOCKS, LONGEST, MOST = 8, 62, 64, 6


class Lab:
    """The tiny model with contexts already in its pool, and graphs over it."""

    def __init__(self, tiny, capture=True):
        self.model = tiny.transformer
        spec = self.model.spec
        self.attention = ResidentSdpa(
            num_layers=spec.num_layers,
            num_kv_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        self.attention.pool.normal_(generator=torch.Generator().manual_seed(1))
        self.attention.pool[:, 0] = 0
        self.state = RequestState(MOST + 2, LONGEST, BLOCK_SIZE, self.model.device, self.attention.upload)
        self.buffers = DecodeBuffers(MOST, spec.vocab_size, self.model.device)
        self.backend = RecordedGraphs()
        step = DecodeStep(self.model, self.attention, self.state, self.buffers, LONGEST)
        self.graphs = DecodeGraphs(
            step, self.buffers, self.state, self.backend, lambda rows: self.attention.splits_for(rows, LONGEST)
        )
        if capture:
            self.graphs.capture()

    def poison(self, seed):
        """Garbage wherever a step could find something left over: inputs, outputs, and the state of everybody."""
        garbage = np.random.default_rng(seed)
        for tensor in (*self.buffers.tensors, *(part[: self.state.null] for part in self.state.tensors)):
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.from_numpy(garbage.integers(0, 256, flat.shape, dtype=np.uint8)))
        self.graphs.forget_seats()
        self.state.forget()

    def run(self, batch, eagerly=False):
        """A step as the runner goes about it."""
        changes = self.state.plan(batch.work, resident_tokens=True)
        self.state.apply(changes)
        kind = kind_of_decode(batch)
        if eagerly:
            return self.graphs.run_eagerly(changes.seats, kind)
        return self.graphs.run(changes.seats, self.graphs.find(len(batch.work), kind))

    def ordinary(self, batch):
        """Tokens by the ordinary way: a plan of spans, the ordinary sampler; on a pool of its own."""
        rows, requests = batch.work, [work.request for work in batch.work]
        resident = self.attention.pool
        self.attention.pool = resident.clone()
        spans = [Span(place, 1, row.context, row.block_table) for place, row in enumerate(rows)]
        with torch.inference_mode():
            plan = self.attention.plan(spans)
            ids, positions = torch.tensor([[r.token_ids[0] for r in rows], [r.context for r in rows]])
            logits = self.model.logits(self.model.normalise(self.model.forward(ids, positions, self.attention, plan)))
            sampled = Sampler().sample(logits.clone(), requests)
        after, self.attention.pool = self.attention.pool, resident
        return sampled.tokens, logits, after


@pytest.fixture(scope="module")
def lab(tiny):
    return Lab(tiny)


def changed(work, **fields):
    new = copy(work)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def make_batch(count, seed, **params):
    """``count`` decodes with shuffled tables, as the engine hands them over."""
    ids = random.Random(seed)
    free = ids.sample(range(1, BLOCKS - 1), BLOCKS - 2)
    work = []
    for number in range(count):
        context = ids.choice([0, 1, 7, 8, 9, 15, 16, ids.randrange(LONGEST - 1), LONGEST - 1])
        table = [free.pop() for _ in range(context // BLOCK_SIZE + 1)]
        request = make_request(f"r{number}", hash_seed=ids.randrange(2**60), output=(5,) * (number + 1), **params)
        work.append(Work(request, [ids.randrange(300)], context, table, (request,)))
    return StepBatch(0, work)


@settings(max_examples=25)
@given(count=st.integers(1, MOST), seed=st.integers(0, 10**6), warm=st.booleans())
def test_a_graph_gives_what_the_ordinary_way_gives(lab, count, seed, warm):
    batch = make_batch(count, seed, temperature=0.8 if warm else 0.0)
    assert kind_of_decode(batch) == ("draw" if warm else "greedy")
    tokens, _, pool = lab.ordinary(batch)
    lab.poison(seed)
    output = lab.run(batch)
    assert output.tokens.tolist() == tokens
    assert output.finite.tolist() == [True] * count
    rows = batch.work
    written = {row.block_table[row.context // BLOCK_SIZE] * BLOCK_SIZE + row.context % BLOCK_SIZE for row in rows}
    untouched = [slot for slot in range((BLOCKS + 1) * BLOCK_SIZE) if slot not in written]
    graph_slots, slots = lab.attention.pool.flatten(1, 2), pool.flatten(1, 2)
    torch.testing.assert_close(graph_slots[:, sorted(written)], slots[:, sorted(written)], atol=1e-5, rtol=1e-5)
    assert not lab.attention.pool[:, 0].any(), "padding wrote to the null block"
    # The ordinary backend clears the blocks it starts; nothing else may differ.
    started = {row.block_table[-1] for row in rows if row.context % BLOCK_SIZE == 0}
    same = [slot for slot in untouched if slot // BLOCK_SIZE not in started]
    assert torch.equal(graph_slots[:, same], slots[:, same])


@pytest.mark.parametrize("place", [1, 3])
def test_greedy_and_drawing_rows_share_a_step(lab, place):
    batch = make_batch(4, 3, temperature=0.9)
    batch.work[place].request.params = make_request(temperature=0).params
    tokens, logits, _ = lab.ordinary(batch)
    assert kind_of_decode(batch) == "draw"
    lab.state.forget()
    assert lab.run(batch).tokens.tolist() == tokens
    assert tokens[place] == int(logits[place].argmax()) and tokens != logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}, {"presence_penalty": 1.0}, {"min_tokens": 10}],
    ids=str,
)
def test_other_wishes_get_logits(lab, params):
    batch = make_batch(3, 8, temperature=1.0, **params)
    assert kind_of_decode(batch) == "logits"
    _, logits, _ = lab.ordinary(batch)
    lab.poison(1)
    before = lab.state.tokens.clone()
    torch.testing.assert_close(lab.run(batch).logits, logits, atol=1e-4, rtol=1e-4)
    told = lab.state.tokens != before
    assert sorted(lab.state.tokens[told].tolist()) == sorted(w.token_ids[0] for w in batch.work), "only the inputs"


def test_what_is_no_plain_decode_is_left_to_the_ordinary_way():
    batch = make_batch(2, 0)
    one, two = batch.work
    assert kind_of_decode(StepBatch(0, [])) is None
    assert kind_of_decode(batch) is not None
    for odd in (
        changed(one, token_ids=[1, 2]),
        changed(one, samples=()),
        changed(one, samples=(one.request, two.request)),
        changed(one, block_table=[]),
    ):
        assert kind_of_decode(StepBatch(0, [odd, two])) is None


def test_padding_of_a_static_batch_is_a_row_that_stores_nothing(lab):
    batch = make_batch(3, 4, temperature=0)
    tokens, _, _ = lab.ordinary(batch)
    batch.work.insert(1, Work(None, [0], 20, [0, 0, 0]))
    before = lab.attention.pool[:, 0].clone()
    output = lab.run(batch)
    assert [output.tokens.tolist()[place] for place in (0, 2, 3)] == tokens
    assert output.finite.all() and torch.equal(lab.attention.pool[:, 0], before)
    assert lab.buffers.inputs.positions[:4].tolist()[1] == 20, "it reads as much as a sequence of that length"


def test_rows_go_on_with_the_tokens_of_the_step_before(lab):
    """Two steps, the second asked for with nothing but seats in another order: as if the host had told all."""
    batch = make_batch(4, 11, temperature=0.9)
    for work in batch.work:
        work.context = max(0, work.context - 1)
    first = lab.run(batch).tokens.tolist()
    for work in batch.work:
        work.context, work.token_ids = work.context + 1, [PENDING]
        work.request.token_ids.append(PENDING)
    order = [2, 0, 3, 1]
    batch.work = [batch.work[place] for place in order]
    changes = lab.state.plan(batch.work, resident_tokens=True)
    assert not changes.counters and not changes.numbers and not changes.tokens[0]
    pool = lab.attention.pool.clone()
    key = lab.graphs.find(4, "draw")
    lab.state.apply(changes)
    found = lab.graphs.run(changes.seats, key).tokens.tolist()
    lab.attention.pool.copy_(pool)
    for work, place in zip(batch.work, order, strict=True):
        work.token_ids = [first[place]]
        work.request.token_ids[-1] = first[place]
    lab.poison(2)
    assert lab.run(batch).tokens.tolist() == found
    strange = make_batch(1, 0)
    strange.work[0].token_ids = [PENDING]
    with pytest.raises(KeyError, match=r"'r0'.* is pending, but the step submitted before doesn't sample for it"):
        lab.state.plan(strange.work, resident_tokens=True)


def test_rotary_tables_that_grow_later_leave_a_graph_its_own(tiny):
    model = copy(tiny.transformer)
    lab = Lab(SimpleNamespace(transformer=model))
    batch = make_batch(3, 7, temperature=0)
    expected = lab.run(batch).tokens.tolist()
    old = model.rotary_tables
    model.prepare_positions(4096)
    assert model.rotary_tables[0].shape[0] == 4096 and model.rotary_tables[0] is not old[0]
    assert lab.graphs._step._held[0] is old[0]
    lab.state.forget()
    assert lab.run(batch).tokens.tolist() == expected


def test_rotary_tables_that_are_too_short_are_refused(tiny):
    model = tiny.transformer
    longer = model.rotary_tables[0].shape[0] + 1
    with pytest.raises(ValueError, match=f"sequences of {longer}: call prepare_positions first"):
        DecodeStep(model, None, None, DecodeBuffers(1, 5, torch.device("cpu")), longer)


def test_graph_equals_its_own_eager_run(lab):
    batch = make_batch(3, 5, temperature=0.7)
    pool = lab.attention.pool.clone()
    eager = lab.run(batch, eagerly=True).tokens.tolist()
    lab.attention.pool.copy_(pool)
    lab.state.forget()
    assert lab.run(batch).tokens.tolist() == eager


def test_broken_rows_are_named_and_hurt_no_other(lab):
    batch = make_batch(3, 6, temperature=0.7)
    batch.work[1] = changed(batch.work[1], context=9, block_table=[BLOCKS - 1, BLOCKS])
    kept = lab.attention.pool.clone()
    lab.attention.pool[:, BLOCKS - 1] = float("nan")
    output = lab.run(batch)
    assert output.finite.tolist() == [True, False, True]
    assert output.tokens.tolist()[1] == 0
    lab.attention.pool.copy_(kept)


def test_capture_order_memory_and_keys(tiny):
    lab = Lab(tiny, capture=False)
    seen = []
    lab.graphs._step = seen.append
    before = lab.attention.pool.clone()
    lab.graphs.capture()
    assert [key.rows for key in seen] == sorted((key.rows for key in seen), reverse=True)
    assert {key.rows for key in seen} == set(buckets(MOST)) == {1, 2, 4, 6}
    assert len(set(seen)) == len(seen) == 12
    assert lab.graphs.graph_bytes == 7 * 12
    assert torch.equal(lab.attention.pool, before)
    assert lab.graphs.key_for(3, "draw") == GraphKey(4, 3, "draw")
    assert lab.graphs.key_for(7, "draw") is None


def test_without_a_captured_graph_there_is_no_answer(tiny):
    assert Lab(tiny, capture=False).graphs.find(2, "greedy") is None


@pytest.mark.parametrize("rows", range(1, MOST + 1))
def test_every_number_of_rows_finds_the_graph_of_its_bucket(tiny, rows):
    lab = Lab(tiny, capture=False)
    lab.graphs._splits_for = lambda bucket: 10 * bucket
    lab.graphs._step = lambda key: None
    lab.graphs.capture()
    bucket = next(size for size in buckets(MOST) if size >= rows)
    assert lab.graphs.find(rows, "draw") == GraphKey(bucket, 10 * bucket, "draw")
    assert lab.graphs.find(MOST + 1, "draw") is None


def test_padding_writes_nowhere_and_reads_one_slot_of_the_null_block(lab):
    batch = make_batch(4, 2, temperature=0.5)
    lab.run(batch)
    batch.work = [changed(batch.work[0], context=20, block_table=[3, 4, 5], token_ids=[7])]
    lab.state.forget()
    before = [part[lab.state.null].clone() for part in lab.state.tensors]
    lab.graphs.run([*lab.state.plan(batch.work, True).seats], GraphKey(4, lab.attention.splits_for(4, LONGEST), "draw"))
    inputs, seat, null = lab.buffers.inputs, lab.buffers.seats[0].item(), lab.state.null
    assert inputs.tiles[1:4].tolist() == [[row, 1, 0, null] for row in (1, 2, 3)], "one token at position 0"
    assert inputs.slots[1:4].tolist() == [-1] * 3 and inputs.positions[1:4].tolist() == [0] * 3
    assert inputs.points[1:4].tolist() == [-1.0] * 3 and inputs.token_ids[1:4].tolist() == [0] * 3
    assert inputs.tiles[0, 3] == seat != null
    assert all(torch.equal(part[null], kept) for part, kept in zip(lab.state.tensors, before, strict=True))


def test_who_takes_part_is_told_only_when_it_changes(lab):
    told, upload = [], lab.state.upload
    lab.state.upload = lambda values, dtype: told.append(list(values)) or upload(values, dtype)
    try:
        batch = make_batch(3, 9, temperature=0.5)
        for place, work in enumerate(batch.work):
            work.context, work.block_table = 16, [*work.block_table[:1], 40, 41 + place]
        lab.run(batch)
        assert len(told) == 2, "what the seats hold, then who sits where"
        for work in batch.work:
            work.context, work.token_ids = work.context + 1, [PENDING]
            work.request.token_ids.append(PENDING)
        lab.run(batch)
        assert len(told) == 2, "nothing new"
        batch.work.reverse()
        for work in batch.work:
            work.context += 1
            work.request.token_ids.append(PENDING)
        lab.run(batch)
        assert len(told) == 3 and len(told[-1]) == 4
    finally:
        lab.state.upload = upload


def test_who_left_takes_no_part_any_more(lab):
    """A row fewer in the same graph: padding sits where the last one sat, though those before it stay."""
    lab.state.forget()
    batch = make_batch(4, 13, temperature=0)
    for work in batch.work:
        work.context = min(work.context, LONGEST - 2)
    lab.run(batch)
    left = lab.buffers.seats[3].item()
    before = [part[left].clone() for part in lab.state.tensors]
    batch.work.pop()
    for work in batch.work:
        work.context, work.token_ids = work.context + 1, [PENDING]
        work.block_table = [*work.block_table, BLOCKS][: work.context // BLOCK_SIZE + 1]
        work.request.token_ids.append(PENDING)
    lab.run(batch)
    assert all(torch.equal(part[left], kept) for part, kept in zip(lab.state.tensors, before, strict=True))


def test_the_check_at_start_notices_inputs_that_never_arrive(tiny, monkeypatch):
    """A replay over what the run before left there looks right, unless garbage was put there first."""
    model, limit = tiny.transformer, 1e-4
    assert _graph_difference(model, BLOCK_SIZE, ResidentSdpa, RecordedGraphs(), False) <= limit

    def run(self, seats, key):
        self._graphs[key]()
        return self._output(len(seats), key.sampling)

    monkeypatch.setattr(DecodeGraphs, "run", run)
    with suppress(IndexError):  # garbage for a token id: no answer is as good as a wrong one
        assert _graph_difference(model, BLOCK_SIZE, ResidentSdpa, RecordedGraphs(), False) > limit


def test_capture_itself_writes_nothing(tiny):
    lab = Lab(tiny, capture=False)
    before = lab.attention.pool.clone()
    lab.graphs.capture()
    assert torch.equal(lab.attention.pool, before)
    assert not any(part.any() for part in lab.state.tensors)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 100, 256])
def test_buckets_hold_every_batch_and_waste_a_third_at_most(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in sizes if size >= rows)
        assert bucket - rows < max(8, bucket / 3 + 1)
