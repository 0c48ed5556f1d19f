"""The check at start lets right kernels through and catches broken ones. Kernels run in Triton's interpreter."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from engine.model import fused, selfcheck
from engine.model.attention import triton_backend
from engine.model.attention.triton_backend import TileShape, TritonAttention
from engine.model.loader import load_model
from engine.model.selfcheck import self_check


class Recorder(TorchDispatchMode):
    """Notes every torch call and every kernel launch, with what they returned."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraphs:
    """Like CUDA: what ran once runs again on the same addresses, without Python. A ``broken`` one runs nothing."""

    def __init__(self, broken=False):
        self.broken = broken

    def capture(self, work):
        recorder = Recorder()

        def launch(executor, *args, **kwargs):
            def run():
                with _disable_current_modes():  # the interpreter's own work is no part of the graph
                    ordinary(executor, *args, **kwargs)

            run()
            recorder.calls.append((run, (), {}, None))

        ordinary, GridExecutor.__call__ = GridExecutor.__call__, launch
        try:
            with recorder:
                work()
        finally:
            GridExecutor.__call__ = ordinary
        calls = [] if self.broken else recorder.calls
        return lambda: self.replay(calls)

    @torch.inference_mode()
    def replay(self, calls):
        for func, args, kwargs, result in calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)

    def allocated_bytes(self):
        return 0


def small(**settings):
    attention = TritonAttention(**settings, processors=4)
    attention.narrow, attention.wide, attention.least = TileShape(16, 16, 4, 2), TileShape(32, 16, 4, 2), 16
    return attention


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


class Refused(TritonAttention):
    def _attend(self, q, pool, block_size, plan):
        raise RuntimeError("out of resource: shared memory, Required: 230000, Hardware limit: 101376")


@pytest.mark.parametrize("kind", [Unscaled, Stale, Misplaced, Padded, Unturned])
def test_wrong_attention_is_found_out(model, kind):
    found = verdict(model, lambda **settings: kind(**settings, processors=8))
    assert not found.triton and not found.graphs and found.fused
    assert found.checks[0].difference > found.checks[0].allowed
    assert "attention: WRONG" in found.reason and "torch's own kernels" in found.reason


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
