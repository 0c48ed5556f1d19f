"""The check at start lets right kernels through and catches broken ones. Kernels run in Triton's interpreter."""

import math
from functools import partial

import pytest
import torch

from engine.model import fused, selfcheck, state_kernels
from engine.model.attention import triton_backend
from engine.model.attention.triton_backend import TritonAttention
from engine.model.loader import load_model
from engine.model.selfcheck import self_check
from tests.model.fake_gpu import ResidentSdpa
from tests.triton.interpreted.recorded import RecordedGraphs, small


@pytest.fixture(scope="module")
def model():
    return load_model("tiny").transformer


def verdict(model, make=small, backend=None):
    return self_check(model, 8, longest=50, make_attention=make, graph_backend=backend or RecordedGraphs())


def test_right_kernels_pass(model):
    found = verdict(model)
    assert (found.triton, found.fused, found.graphs) == (True, True, True), [str(check) for check in found.checks]
    assert found.reason == ""
    assert [check.name for check in found.checks] == ["attention", "fused kernels", "CUDA graph"]
    assert all(0 <= check.difference <= check.allowed == 1e-4 for check in found.checks)
    assert found.seconds > 0


class Unscaled(TritonAttention):
    def _attend(self, q, pool, block_size, plan):
        return super()._attend(q * 1.01, pool, block_size, plan)


class Stale(TritonAttention):
    """Reads one key too many."""

    def plan(self, spans):
        plan = super().plan(spans)
        for tiles in plan.launches:
            tiles.table[:, 2] += 1
        return plan


class Misplaced(TritonAttention):
    def _launch_store(self, x, angles, pool, slots, num_q):
        super()._launch_store(x, angles, pool, slots.roll(1), num_q)


class Padded(TritonAttention):
    """Padding writes to the null block."""

    def _launch_store(self, x, angles, pool, slots, num_q):
        super()._launch_store(x, angles, pool, slots.clamp(min=0), num_q)


class Unturned(TritonAttention):
    """Forgets to rotate."""

    def attend_rotating(self, layer, qkv, cos, sin, plan):
        return super().attend_rotating(layer, qkv, torch.ones_like(cos), torch.zeros_like(sin), plan)


class Spoiled(TritonAttention):
    """Padding reads what nobody wrote."""

    def _attend(self, q, pool, block_size, plan):
        out = super()._attend(q, pool, block_size, plan)
        out[-1] = math.nan
        return out


class Refused(TritonAttention):
    def _attend(self, q, pool, block_size, plan):
        raise RuntimeError("out of resource: shared memory, Required: 230000, Hardware limit: 101376")


@pytest.mark.parametrize("kind", [Unscaled, Stale, Misplaced, Padded, Unturned])
def test_wrong_attention_is_found_out(model, kind):
    found = verdict(model, lambda **settings: kind(**settings, processors=8))
    assert not found.triton and not found.graphs and found.fused
    assert found.checks[0].difference > found.checks[0].allowed
    assert "attention: WRONG" in found.reason and "torch's own kernels" in found.reason


def test_padding_that_is_no_number_is_found_out(model):
    with torch.inference_mode():
        difference = selfcheck._attention_difference(model, 8, 20, lambda **settings: Spoiled(**settings, processors=1))
    assert difference == math.inf


def test_a_kernel_that_does_not_run_is_no_crash(model):
    found = verdict(model, lambda **settings: Refused(**settings, processors=8))
    assert not found.triton and not found.graphs
    assert "RuntimeError: out of resource: shared memory" in found.reason
    assert math.isnan(found.checks[0].difference)


def test_a_graph_that_computes_nothing_is_found_out(model):
    found = verdict(model, backend=RecordedGraphs(broken=True))
    assert found.triton and not found.graphs
    assert "CUDA graph" in found.reason


def test_a_wrong_fused_kernel_is_found_out(model, monkeypatch):
    right = fused._launch_silu_mul
    monkeypatch.setattr(fused, "_launch_silu_mul", lambda gate_up: right(gate_up.flip(1)))
    # Attention that does not run spares the check of graphs.
    found = verdict(model, lambda **settings: Refused(**settings, processors=8))
    assert not found.fused
    assert "fused kernels: WRONG" in found.reason


def forgetful(right, state, spans, token_ids):
    before = state.counters.clone()
    made = right(state, spans, token_ids)
    state.counters.copy_(before)
    return made


def one_round(right, state, spans, token_ids):
    """Later rounds of the kernel's loop give what the first one gave."""
    made = right(state, spans, token_ids)
    for part in made:
        part[128 : 2 * 128] = part[: part[128 : 2 * 128].shape[0]]
    return made


def pending_left(right, state, spans, token_ids):
    _, *places = right(state, spans, token_ids)
    return token_ids.clone(), *places


def misplaced(right, *arguments):
    ids, positions, slots = right(*arguments)
    return ids, positions, slots.roll(1)


@pytest.mark.parametrize(
    "wrong", [None, forgetful, one_round, pending_left, misplaced], ids=lambda wrong: str(wrong and wrong.__name__)
)
def test_wrong_inputs_of_a_mixed_step_are_found_out(monkeypatch, wrong):
    if wrong is not None:
        monkeypatch.setattr(state_kernels, "launch_chunk_inputs", partial(wrong, state_kernels.launch_chunk_inputs))
    assert selfcheck._same_inputs(torch.device("cpu")) == (wrong is None)


def unaware(right, state, seats, logits, inputs, last, *rest):
    """Takes what is no number for small ones."""
    right(state, seats, logits.nan_to_num(nan=-9.0, posinf=-9.0), inputs, last, *rest)


def half_blind(right, state, seats, logits, inputs, last, *rest):
    right(state, seats, logits, inputs, torch.zeros_like(last), *rest)


def greedy_only(right, state, seats, logits, inputs, *rest):
    right(state, seats, logits, None, *rest)


@pytest.mark.parametrize("wrong", [None, unaware, half_blind, greedy_only])
def test_wrong_ends_are_found_out(model, monkeypatch, wrong):
    if wrong is not None:
        monkeypatch.setattr(state_kernels, "launch_finish", partial(wrong, state_kernels.launch_finish))
    assert selfcheck._same_ends(model) == (wrong is None)


def uncommitted(right, *arguments):
    right(*arguments[:-1], False)


def committed(right, *arguments):
    right(*arguments[:-1], True)


def other_tokens(right, state, seats, logits, inputs, last, outcome, commit):
    right(state, seats, logits, inputs, last, outcome, commit)
    outcome[1].copy_((outcome[1] + 1) % logits.shape[1])


def padding_grows(right, state, seats, into):
    right(state, seats, into)
    state.counters[state.null, 0].add_(1)


def padding_stores(right, state, seats, into):
    right(state, seats, into)
    into.slots.clamp_(min=0)


@pytest.mark.parametrize(
    ("launch", "wrong"),
    [
        ("launch_finish", uncommitted),
        ("launch_finish", committed),
        ("launch_finish", other_tokens),
        ("launch_decode_inputs", padding_grows),
        ("launch_decode_inputs", padding_stores),
    ],
)
def test_a_wrong_start_or_end_of_a_graph_is_found_out(model, monkeypatch, launch, wrong):
    monkeypatch.setattr(state_kernels, launch, partial(wrong, getattr(state_kernels, launch)))
    with torch.inference_mode():
        assert selfcheck._graph_difference(model, 8, ResidentSdpa, RecordedGraphs(), fused=True) == math.inf


def test_without_a_gpu_it_says_so(model):
    found = self_check(model, 16)
    assert (found.triton, found.fused, found.graphs, found.checks) == (False, False, False, ())
    assert found.reason == "The fast kernels need an NVIDIA GPU; torch computes instead."


def test_bfloat16_has_its_own_allowance(model):
    assert selfcheck.ALLOWED[torch.bfloat16] > selfcheck.ALLOWED[torch.float16] > selfcheck.ALLOWED[torch.float32]
    assert triton_backend.MOST_SPLITS >= 2
