"""The Triton backend against plain attention and against the SDPA backend."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.model.attention import triton_backend
from engine.model.attention.sdpa import SdpaAttention
from engine.model.attention.triton_backend import (
    LONGEST_SPLIT,
    MOST_SPLITS,
    TileShape,
    TritonAttention,
    choose_splits,
)
from engine.model.rope import rope_tables, rotate
from engine.model.spec import RopeSpec

_spec = importlib.util.spec_from_file_location("batches", Path(__file__).with_name("batches.py"))
batches = importlib.util.module_from_spec(_spec)
sys.modules["batches"] = batches
_spec.loader.exec_module(batches)
Case = batches.Case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAN = float("nan")


def backend(case, blocks, processors=1, least=None, small=True):
    made = TritonAttention(**case.settings(blocks), processors=processors)
    if small:  # the interpreter pays for every element of a tile: small ones, and more of them
        rows = max(16, made.narrow.rows)
        made.narrow, made.wide = TileShape(rows, 16, 4, 2), TileShape(max(32, rows), 16, 4, 2)
        made.least = least or 16
    return made


def check(case, processors=1, layer=1, stale=NAN, small=True, least=None):
    batch = batches.make(case)
    attention = backend(case, batch.blocks, processors, least, small)
    batches.fill_pool(attention.pool, batch, layer, stale)
    before = attention.pool.clone()
    plan = attention.plan(batch.spans)
    if plan.part is not None:
        plan.part.fill_(NAN)
        plan.lse.fill_(NAN)
    out = attention.attend(layer, batch.q, batch.kv, plan)
    torch.testing.assert_close(out.float(), batches.reference(case, batch), atol=TOLERANCE[case.dtype], rtol=1e-2)
    torch.testing.assert_close(out.float(), by_sdpa(case, batch, layer), atol=TOLERANCE[case.dtype], rtol=1e-2)
    written = stored_slots(batch, case.block_size)
    slots, expected = attention.pool[layer].flatten(0, 1), before[layer].flatten(0, 1)
    for slot, row in written.items():
        expected[slot] = batch.kv[row]
    torch.testing.assert_close(slots, expected, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(attention.pool[1 - layer], before[1 - layer], atol=0, rtol=0, equal_nan=True)
    return plan


def by_sdpa(case, batch, layer):
    """What the SDPA backend gives for the same numbers, in float32."""
    plain = SdpaAttention(**case.settings(batch.blocks) | {"dtype": torch.float32})
    batches.fill_pool(plain.pool, batch, layer, 7.0)
    return plain.attend(layer, batch.q.float(), batch.kv.float(), plain.plan(batch.spans))


def stored_slots(batch, size):
    """Slot → packed row of everything that the step writes."""
    return {
        span.block_table[position // size] * size + position % size: span.start + position - span.context
        for span in batch.spans
        if span.writes
        for position in range(span.context, span.context + span.num_tokens)
    }


@st.composite
def cases(draw):
    block_size = draw(st.one_of(st.sampled_from([8, 16, 32]), st.integers(8, 40)))
    edge = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size])
    sequence = st.one_of(
        st.tuples(edge, st.just(1), st.just(True)),
        st.tuples(st.integers(0, 70), st.just(1), st.just(True)),
        st.tuples(edge, st.integers(2, 12), st.just(True)),
        st.tuples(st.integers(0, 20), st.integers(2, 40), st.just(True)),
        st.just((0, 1, False)),
    )
    return Case(
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([16, 64, 80, 96, 128])),
        block_size=block_size,
        sequences=tuple(draw(st.lists(sequence, min_size=1, max_size=4))),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=18)
@given(case=cases(), processors=st.sampled_from([1, 8, 64]))
@example(case=Case(1, 3, 64, 8, ((40, 1, True), (0, 11, True), (0, 1, False))), processors=16)
def test_any_mix_of_chunks_and_decodes_equals_plain_attention_and_sdpa(case, processors):
    check(case, processors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_shapes_that_run_on_a_gpu_are_right_for_every_head_size_and_number_format(dtype, head_dim):
    case = Case(1, 3, head_dim, 16, ((150, 1, True), (13, 46, True), (0, 1, False)), dtype)
    plan = check(case, processors=4, small=False)
    assert [tiles.splits for tiles in plan.launches] == [1, 2]


@pytest.mark.parametrize("group", [1, 3, 5, 16, 20])
def test_any_group_of_heads_fits_a_tile(group):
    check(Case(1, group, 16, 8, ((9, 1, True), (2, 7, True))))


@pytest.mark.parametrize("splits", [2, 16])
def test_splits_without_keys_leave_no_trace(splits):
    case = Case(1, 2, 16, 8, ((100, 1, True), (16, 1, True), (0, 1, True), (0, 1, False)))
    batch = batches.make(case)
    attention = backend(case, batch.blocks)
    batches.fill_pool(attention.pool, batch, 0, NAN)
    plan = attention.plan(batch.spans)
    plan.launches[0].splits = splits
    plan = attention.plan_from(plan.slots, plan.tables, plan.launches)
    plan.part.fill_(NAN)
    plan.lse.fill_(NAN)
    out = attention.attend(0, batch.q, batch.kv, plan)
    torch.testing.assert_close(out, batches.reference(case, batch), atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_number_that_is_none_shows_in_its_own_request_and_in_no_other(where, splits):
    case = Case(1, 2, 16, 8, ((70, 1, True), (50, 1, True)))
    batch = batches.make(case)
    attention = backend(case, batch.blocks)
    batches.fill_pool(attention.pool, batch, 0, 0.0)
    if where == "q":
        batch.q[0] = NAN
    else:
        batch.kv[0, "kv".index(where)] = NAN
    plan = attention.plan(batch.spans)
    plan.launches[0].splits = splits
    out = attention.attend(0, batch.q, batch.kv, attention.plan_from(plan.slots, plan.tables, plan.launches))
    assert out[0].isnan().any()
    torch.testing.assert_close(out[1], batches.reference(case, batch)[1], atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotating_while_storing_equals_rotating_first(head_dim, dtype):
    case = Case(2, 3, head_dim, 8, ((11, 1, True), (0, 5, True), (0, 1, False)), dtype)
    batch = batches.make(case)
    cos, sin = rope_tables(RopeSpec(10000.0), head_dim, 64, dtype)
    positions = torch.tensor([p for s in batch.spans for p in range(s.context, s.context + s.num_tokens)])
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    qkv = torch.cat([batch.q, batch.kv.flatten(1, 2)], 1)
    turned = qkv.clone()
    rotate(turned[:, : case.heads + case.kv_heads], cos, sin)
    outs, pools = [], []
    for fused in (False, True):
        attention = backend(case, batch.blocks)
        batches.fill_pool(attention.pool, batch, 0, NAN)
        plan = attention.plan(batch.spans)
        if fused:
            outs.append(attention.attend_rotating(0, qkv, cos, sin, plan))
        else:
            outs.append(attention.attend(0, turned[:, : case.heads], turned[:, case.heads :].unflatten(1, (2, 2)), plan))
        pools.append(attention.pool)
    torch.testing.assert_close(outs[1], outs[0], atol=TOLERANCE[dtype], rtol=1e-2)
    torch.testing.assert_close(pools[1], pools[0], atol=TOLERANCE[dtype], rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("rotating", [False, True])
def test_without_a_cache_the_batch_is_its_own_pool(rotating):
    case = Case(2, 3, 64, 8, ((0, 1, True), (0, 9, True), (0, 23, True)))
    batch = batches.make(case, cached=False)
    attention = backend(case, 0)
    plan = attention.plan(batch.spans)
    if rotating:
        still = torch.ones(33, 1, 64), torch.zeros(33, 1, 64)
        out = attention.attend_rotating(0, torch.cat([batch.q, batch.kv.flatten(1, 2)], 1), *still, plan)
    else:
        out = attention.attend(0, batch.q, batch.kv, plan)
    torch.testing.assert_close(out, batches.reference(case, batch), atol=2e-5, rtol=1e-2)


def test_both_backends_agree_on_one_pool():
    case = Case(3, 3, 64, 16, ((33, 1, True), (16, 1, True), (5, 20, True), (0, 3, True)))
    batch = batches.make(case)
    sdpa, triton = SdpaAttention(**case.settings(batch.blocks)), backend(case, batch.blocks)
    for attention in (sdpa, triton):
        batches.fill_pool(attention.pool, batch, 1, 7.0)
    expected = sdpa.attend(1, batch.q, batch.kv, sdpa.plan(batch.spans))
    torch.testing.assert_close(triton.attend(1, batch.q, batch.kv, triton.plan(batch.spans)), expected, atol=2e-5, rtol=1e-4)


def test_a_plan_over_resident_tensors_equals_one_made_from_spans():
    case = Case(2, 3, 64, 8, ((30, 1, True), (7, 1, True), (0, 1, False)))
    batch = batches.make(case)
    attention = backend(case, batch.blocks)
    batches.fill_pool(attention.pool, batch, 0, NAN)
    tables = torch.full((3, 9), 2**30, dtype=torch.int32)
    for row, span in enumerate(batch.spans):
        tables[row, : len(span.block_table)] = torch.tensor(span.block_table)
    tiles = torch.tensor([[row, 1, span.context, row] for row, span in enumerate(batch.spans)], dtype=torch.int32)
    plan = attention.plan_decodes(attention.plan(batch.spans).slots, tables, tiles, splits=4)
    out = attention.attend(0, batch.q, batch.kv, plan)
    torch.testing.assert_close(out, batches.reference(case, batch), atol=2e-5, rtol=1e-2)


def test_long_tiles_come_first():
    case = Case(1, 2, 16, 8, ((0, 40, True), (60, 1, True), (20, 1, True)))
    batch = batches.make(case)
    plan = backend(case, batch.blocks).plan(batch.spans)
    wide, narrow = (tiles.table[:, 1] + tiles.table[:, 2] for tiles in plan.launches)
    assert wide.tolist() == [40, 32, 16]
    assert narrow.tolist() == [61, 21]


def test_keys_are_split_for_few_sequences_and_for_long_ones():
    assert choose_splits(tiles=1, num_kv_heads=8, longest=8192, processors=132, least=128) == 64
    assert choose_splits(tiles=1, num_kv_heads=8, longest=100, processors=132, least=128) == 1
    assert choose_splits(tiles=1, num_kv_heads=8, longest=300, processors=132, least=128) == 4
    assert choose_splits(tiles=256, num_kv_heads=8, longest=1000, processors=132, least=128) == 1
    assert choose_splits(tiles=256, num_kv_heads=8, longest=4 * LONGEST_SPLIT, processors=132, least=128) == 4
    assert choose_splits(tiles=1, num_kv_heads=1, longest=10**6, processors=132, least=128) == MOST_SPLITS


def test_a_launch_is_the_same_kernel_whatever_else_is_in_the_step(monkeypatch):
    """What is compiled depends on the types of all arguments: a new one would stop a step in the middle of a run."""
    types = {}

    class Noted:
        def __getitem__(self, grid):
            return self.note

        def note(self, *arguments, **constants):
            found = types.setdefault((constants["BLOCK_M"], constants["SPLITS"]), set())
            found.add(tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments))

    for name in ("attend_kernel", "merge_kernel", "store_kernel"):
        monkeypatch.setattr(triton_backend, name, Noted() if name == "attend_kernel" else SilentKernel())
    chunk, decodes = (0, 40, True), ((60, 1, True), (20, 1, True))
    for sequences in ((chunk,), decodes, (chunk, *decodes)):
        case = Case(1, 2, 16, 8, sequences, dtype=torch.float16)
        batch = batches.make(case)
        attention = backend(case, batch.blocks, processors=16)
        attention.attend(0, batch.q, batch.kv, attention.plan(batch.spans))
    assert sorted(types) == [(16, 4), (32, 1)]
    assert [len(found) for found in types.values()] == [1, 1]


class SilentKernel:
    def __getitem__(self, grid):
        return lambda *arguments, **constants: None
