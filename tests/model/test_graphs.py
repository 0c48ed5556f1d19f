"""Decode graphs without a GPU: a graph that repeats recorded torch calls on fixed addresses, and buffers full of garbage."""

import random
from contextlib import suppress
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.runner import PENDING, StepBatch, Work
from engine.model.attention import Span
from engine.model.graphs import DecodeBuffers, DecodeGraphs, DecodeRow, DecodeStep, GraphKey, buckets, decode_rows
from engine.model.sampler import Sampler
from engine.model.selfcheck import _graph_difference
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
        self.buffers = DecodeBuffers(MOST, LONGEST, BLOCK_SIZE, spec.vocab_size, self.model.device)
        self.backend = RecordedGraphs()
        step = DecodeStep(self.model, self.attention, self.buffers)
        self.graphs = DecodeGraphs(step, self.buffers, self.backend, lambda rows: self.attention.splits_for(rows, LONGEST))
        if capture:
            self.graphs.capture()

    def poison(self, seed):
        """Garbage wherever a step could find something left over: inputs, outputs, the spare memory on the host."""
        garbage = np.random.default_rng(seed)
        flat = torch.from_numpy(garbage.integers(0, 256, self.buffers.flat.numel(), dtype=np.uint8))
        self.buffers.flat.copy_(flat)
        self.buffers.tokens.fill_(-(2**40))
        self.buffers.finite.copy_(torch.from_numpy(garbage.integers(0, 2, MOST)))
        self.buffers.logits.fill_(float("nan"))
        for staging in self.buffers._staging:
            used = {place: table for place, table in enumerate(staging.tables) if table}
            kept = {place: staging.fields["tables"][place, : len(table)].copy() for place, table in used.items()}
            staging.flat.copy_(torch.flip(flat, (0,)))
            for place, table in kept.items():  # what the staging remembers having written stays written
                staging.fields["tables"][place, : len(table)] = table

    def ordinary(self, rows, requests):
        """Tokens by the ordinary way: a plan of spans, the ordinary sampler; on a pool of its own."""
        resident = self.attention.pool
        self.attention.pool = resident.clone()
        spans = [Span(place, 1, row.context, row.block_table) for place, row in enumerate(rows)]
        with torch.inference_mode():
            plan = self.attention.plan(spans)
            ids, positions = torch.tensor([[r.token_id for r in rows], [r.context for r in rows]])
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
    rows, sampling = decode_rows(batch, {})
    assert sampling == ("draw" if warm else "greedy")
    tokens, _, pool = lab.ordinary(rows, [work.request for work in batch.work])
    lab.poison(seed)
    output = lab.graphs.run(rows, sampling)
    assert output.tokens.tolist() == tokens
    assert output.finite.tolist() == [True] * count
    written = {row.block_table[row.context // BLOCK_SIZE] * BLOCK_SIZE + row.context % BLOCK_SIZE for row in rows}
    untouched = [slot for slot in range((BLOCKS + 1) * BLOCK_SIZE) if slot not in written]
    graph_slots, slots = lab.attention.pool.flatten(1, 2), pool.flatten(1, 2)
    torch.testing.assert_close(graph_slots[:, sorted(written)], slots[:, sorted(written)], atol=1e-5, rtol=1e-5)
    assert not lab.attention.pool[:, 0].any(), "padding wrote to the null block"
    # The ordinary backend clears the blocks it starts; nothing else may differ.
    started = {row.block_table[-1] for row in rows if row.context % BLOCK_SIZE == 0}
    same = [slot for slot in untouched if slot // BLOCK_SIZE not in started]
    assert torch.equal(graph_slots[:, same], slots[:, same])


def test_greedy_and_drawing_rows_share_a_step(lab):
    batch = make_batch(4, 3, temperature=0.9)
    batch.work[1].request.params = make_request(temperature=0).params
    rows, sampling = decode_rows(batch, {})
    tokens, logits, _ = lab.ordinary(rows, [work.request for work in batch.work])
    assert sampling == "draw"
    assert lab.graphs.run(rows, sampling).tokens.tolist() == tokens
    assert tokens[1] == int(logits[1].argmax()) and tokens != logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}, {"presence_penalty": 1.0}, {"min_tokens": 10}],
    ids=str,
)
def test_other_wishes_get_logits(lab, params):
    batch = make_batch(3, 8, temperature=1.0, **params)
    rows, sampling = decode_rows(batch, {})
    assert sampling == "logits"
    _, logits, _ = lab.ordinary(rows, [work.request for work in batch.work])
    lab.poison(1)
    torch.testing.assert_close(lab.graphs.run(rows, sampling).logits, logits, atol=1e-4, rtol=1e-4)


def test_what_is_no_plain_decode_is_left_to_the_ordinary_way():
    batch = make_batch(2, 0)
    one, two = batch.work
    assert decode_rows(StepBatch(0, []), {}) is None
    assert decode_rows(batch, {}) is not None
    for odd in (
        changed(one, token_ids=[1, 2]),
        changed(one, samples=()),
        changed(one, samples=(one.request, two.request)),
        changed(one, block_table=[]),
    ):
        assert decode_rows(StepBatch(0, [odd, two]), {}) is None


def test_padding_of_a_static_batch_is_a_row_that_stores_nothing(lab):
    batch = make_batch(3, 4, temperature=0)
    tokens, _, _ = lab.ordinary(decode_rows(batch, {})[0], [work.request for work in batch.work])
    batch.work.insert(1, Work(None, [0], 20, [0, 0, 0]))
    rows, sampling = decode_rows(batch, {})
    before = lab.attention.pool[:, 0].clone()
    output = lab.graphs.run(rows, sampling)
    assert [output.tokens.tolist()[place] for place in (0, 2, 3)] == tokens
    assert output.finite.all() and torch.equal(lab.attention.pool[:, 0], before)


def test_rows_go_on_with_the_tokens_of_the_step_before(lab):
    batch = make_batch(4, 11, temperature=0)
    rows, sampling = decode_rows(batch, {})
    expected = lab.graphs.run(rows, sampling).tokens.tolist()
    places = {work.request: place for work, place in zip(batch.work, (3, 0, 5, 1), strict=True)}
    lab.poison(2)
    for work in (batch.work[0], batch.work[2], batch.work[3]):
        lab.buffers.tokens[places[work.request]] = work.token_ids[0]
        work.token_ids = [PENDING]
    rows, sampling = decode_rows(batch, places)
    assert [row.source for row in rows] == [3, -1, 5, 1]
    assert lab.graphs.run(rows, sampling).tokens.tolist() == expected
    with pytest.raises(KeyError, match=r"'r0'.* is pending, but the step submitted before doesn't sample for it"):
        decode_rows(batch, {})


def test_rotary_tables_that_grow_later_leave_a_graph_its_own(tiny):
    model = copy(tiny.transformer)
    lab = Lab(SimpleNamespace(transformer=model))
    rows, sampling = decode_rows(make_batch(3, 7, temperature=0), {})
    expected = lab.graphs.run(rows, sampling).tokens.tolist()
    old = model.rotary_tables
    model.prepare_positions(4096)
    assert model.rotary_tables[0].shape[0] == 4096 and model.rotary_tables[0] is not old[0]
    assert lab.graphs._step._held[0] is old[0]
    assert lab.graphs.run(rows, sampling).tokens.tolist() == expected


def test_rotary_tables_that_are_too_short_are_refused(tiny):
    model = tiny.transformer
    longer = model.rotary_tables[0].shape[0] + 1
    with pytest.raises(ValueError, match=f"sequences of {longer}: call prepare_positions first"):
        DecodeStep(model, None, DecodeBuffers(1, longer, 8, 5, torch.device("cpu")))


def test_graph_equals_its_own_eager_run(lab):
    rows, sampling = decode_rows(make_batch(3, 5, temperature=0.7), {})
    pool = lab.attention.pool.clone()
    eager = lab.graphs.run_eagerly(rows, sampling).tokens.tolist()
    lab.attention.pool.copy_(pool)
    assert lab.graphs.run(rows, sampling).tokens.tolist() == eager


def test_broken_rows_are_named_and_hurt_no_other(lab):
    rows, sampling = decode_rows(make_batch(3, 6, temperature=0.7), {})
    rows[1] = replace(rows[1], context=9, block_table=[BLOCKS - 1, BLOCKS])
    kept = lab.attention.pool.clone()
    lab.attention.pool[:, BLOCKS - 1] = float("nan")
    output = lab.graphs.run(rows, sampling)
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
    lab = Lab(tiny, capture=False)
    rows, sampling = decode_rows(make_batch(2, 0, temperature=0), {})
    assert lab.graphs.run(rows, sampling) is None


@pytest.mark.parametrize("rows", range(1, MOST + 1))
def test_every_number_of_rows_finds_the_graph_of_its_bucket(tiny, rows):
    lab = Lab(tiny, capture=False)
    lab.graphs._splits_for = lambda bucket: 10 * bucket
    lab.graphs._step = lambda key: None
    lab.graphs.capture()
    staged = lab.graphs.stage([DecodeRow(1, 0, [1])] * rows, "draw")
    bucket = next(size for size in buckets(MOST) if size >= rows)
    assert (staged.key, staged.count) == (GraphKey(bucket, 10 * bucket, "draw"), rows)


def test_padding_writes_nowhere_and_reads_one_slot_of_the_null_block():
    buffers = DecodeBuffers(4, 64, 8, 5, torch.device("cpu"))
    buffers.fill([DecodeRow(7, 20, [3, 4, 5], 0.5, 0.25)] * 4, 4)
    buffers.fill([DecodeRow(7, 20, [3, 4, 5], 0.5, 0.25)], 4)
    assert buffers.slots.tolist() == [44, -1, -1, -1]
    assert buffers.tiles.tolist() == [[0, 1, 20, 0], *([row, 1, 0, row] for row in (1, 2, 3))], "one token at position 0"
    assert buffers.positions.tolist() == [20, 0, 0, 0]
    assert buffers.tables[:, 0].tolist() == [3, 0, 0, 0]
    assert buffers.points.tolist() == [0.25, -1.0, -1.0, -1.0]


def test_the_check_at_start_notices_inputs_that_never_arrive(tiny, monkeypatch):
    """A replay over what the run before left there looks right, unless garbage was put there first."""
    model, limit = tiny.transformer, 1e-4
    assert _graph_difference(model, BLOCK_SIZE, ResidentSdpa, RecordedGraphs(), False) <= limit

    def launch(self, staged):
        self._graphs[staged.key]()
        return self._output(staged.count, staged.key.sampling)

    monkeypatch.setattr(DecodeGraphs, "launch", launch)
    with suppress(IndexError):  # garbage for a token id: no answer is as good as a wrong one
        assert _graph_difference(model, BLOCK_SIZE, ResidentSdpa, RecordedGraphs(), False) > limit


def test_capture_itself_writes_nothing(tiny):
    lab = Lab(tiny, capture=False)
    before = lab.attention.pool.clone()
    lab.graphs.capture()
    assert torch.equal(lab.attention.pool, before)


def test_tables_that_grow_shrink_and_change_arrive_whole():
    buffers = DecodeBuffers(2, 64, 8, 5, torch.device("cpu"))
    ids = random.Random(1)
    table = [1]
    for _ in range(60):
        match ids.randrange(3):
            case 0:
                table = table[: ids.randrange(1, len(table) + 1)]
            case 1 if len(table) < 8:
                table = [*table, ids.randrange(99)]
            case _:
                table = [ids.randrange(99) for _ in range(ids.randrange(1, 9))]
        buffers.fill([DecodeRow(1, len(table) * 8 - 1, table)], 2)
        assert buffers.tables[0, : len(table)].tolist() == table
        assert buffers.tables[1, 0] == 0
        assert buffers.slots.tolist() == [table[-1] * 8 + 7, -1]


@pytest.mark.parametrize(("rows", "bucket", "message"), [(3, 2, "3 rows"), (1, 9, "the buffers hold 4")])
def test_too_many_rows_are_refused(rows, bucket, message):
    buffers = DecodeBuffers(4, 64, 8, 5, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        buffers.fill([DecodeRow(1, 0, [1])] * rows, bucket)


def test_a_table_that_is_too_wide_is_refused():
    buffers = DecodeBuffers(4, 64, 8, 5, torch.device("cpu"))
    with pytest.raises(ValueError, match="9 blocks, but the buffers hold 8"):
        buffers.fill([DecodeRow(1, 0, list(range(9)))], 4)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 100, 256])
def test_buckets_hold_every_batch_and_waste_a_third_at_most(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in sizes if size >= rows)
        assert bucket - rows < max(8, bucket / 3 + 1)
