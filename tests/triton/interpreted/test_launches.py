"""How many kernels a decoded token costs, counted from the code: whoever adds one learns of it here.

A GPU's own count (torch's profiler, in ``make gpu-check``) stands beside it. Counted is what a graph of one row records:
Triton launches, and torch calls that compute. Views and new tensors cost none.
"""

from dataclasses import replace

import pytest
import torch

from engine.bench.gpu_bench import layer_kernels
from engine.bench.gpu_shapes import LLAMA_3_2_1B, QWEN3_0_6B, SMOLLM2_135M
from engine.core.config import EngineConfig
from engine.core.runner import StepBatch, Work
from engine.model.backend import Backend
from engine.model.random_weights import random_model
from engine.model.runner import ModelRunner
from tests.model.fake_gpu import LateDevice
from tests.model.kit import make_request
from tests.triton.interpreted.recorded import RecordedGraphs, small

CPU = torch.device("cpu")
SPLIT, WHOLE = 32, 16
"""Lengths of sequences whose keys are split in two, and are not, by attention in small tiles."""
MOST_BESIDE = {0.0: 10, 0.6: 10}
"""Kernels of a step outside of its layers (inputs, embedding, head, choosing a token), by temperature, at most."""
COMPOSED = {"aten::isfinite": 4}
"""What torch computes in several kernels on a GPU."""


class Noted(RecordedGraphs):
    """Remembers the calls of the graph that was replayed last."""

    def replay(self, calls):
        self.calls = calls
        super().replay(calls)


def kernels_of(func, args, kwargs, result):
    if not isinstance(func, torch._ops.OpOverload):
        return 1  # a launch of Triton's
    name = func.name().partition(".")[0]
    if "empty" in name:
        return 0
    if func.is_view and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
        return 0
    return COMPOSED.get(name, 1)


def decode_kernels(shape, layers, longest, temperature=0.0):
    """Kernels of a decode step of one row, and the runner that computed it."""
    spec = replace(shape.tiny().spec, num_layers=layers)
    recorded = Noted()
    config = EngineConfig(max_model_len=longest, block_size=8, num_kv_blocks=4, max_num_seqs=1, max_num_batched_tokens=32)
    backend = Backend(small, "interpreted", fused=True, graphs=lambda: recorded)
    runner = ModelRunner(random_model(spec, CPU, torch.bfloat16), config, backend=backend, device=LateDevice())
    request = make_request("a", [7], temperature=temperature)
    runner.execute(StepBatch(0, [Work(request, [7], 0, [1, 2], (request,))]))
    return sum(kernels_of(*call) for call in recorded.calls), runner


@pytest.mark.parametrize(
    ("shape", "longest", "expected"),
    [(SMOLLM2_135M, WHOLE, 9), (SMOLLM2_135M, SPLIT, 10), (LLAMA_3_2_1B, WHOLE, 9), (QWEN3_0_6B, WHOLE, 10)],
    ids=lambda value: getattr(value, "name", value),
)
def test_launches_of_a_layer(shape, longest, expected):
    (one, runner), (two, _) = (decode_kernels(shape, layers, longest) for layers in (1, 2))
    assert two - one == expected == layer_kernels(runner)


@pytest.mark.parametrize("temperature", MOST_BESIDE)
def test_launches_beside_the_layers(temperature):
    count, runner = decode_kernels(SMOLLM2_135M, 1, WHOLE, temperature)
    assert 0 < count - layer_kernels(runner) <= MOST_BESIDE[temperature]


def test_plain_kernels_are_not_counted_from_the_code():
    runner = ModelRunner(random_model(SMOLLM2_135M.tiny().spec, CPU, torch.float32), EngineConfig(num_kv_blocks=4))
    assert layer_kernels(runner) is None
