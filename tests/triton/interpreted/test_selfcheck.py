"""The check at start lets right kernels through and catches broken ones. Kernels run in Triton's interpreter."""

import math

import pytest
import torch

from engine.model import fused, selfcheck
from engine.model.attention import triton_backend
from engine.model.attention.triton_backend import TritonAttention
from engine.model.loader import load_model
from engine.model.selfcheck import self_check
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


def test_without_a_gpu_it_says_so(model):
    found = self_check(model, 16)
    assert (found.triton, found.fused, found.graphs, found.checks) == (False, False, False, ())
    assert found.reason == "The fast kernels need an NVIDIA GPU; torch computes instead."


def test_bfloat16_has_its_own_allowance(model):
    assert selfcheck.ALLOWED[torch.bfloat16] > selfcheck.ALLOWED[torch.float16] > selfcheck.ALLOWED[torch.float32]
    assert triton_backend.MOST_SPLITS >= 2
