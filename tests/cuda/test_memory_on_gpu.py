"""A pool sized by a share of a real GPU's memory, and what the GPU says of itself."""

from __future__ import annotations

import pytest
import torch

from engine import LLM
from engine.model.errors import ModelError
from engine.model.memory import MOST_BLOCKS, largest_step
from engine.model.runner import ModelRunner
from engine.serve.gpu_figures import NoFigures, NvmlReader
from engine.serve.loaded import gpu_name

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SLACK = 256 * 2**20
"""Bytes: what the allocator rounds up, and what libraries take after the measurement."""


def used() -> tuple[int, int]:
    """(bytes in use by everybody, bytes of the device)."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free, total


def test_a_share_of_the_memory_is_filled_and_not_exceeded_by_the_largest_step() -> None:
    before, total = used()
    share = before / total + 0.2
    if share > 0.95:
        pytest.skip("the GPU is in use")
    llm = LLM("tiny", device="cuda:0", dtype="bfloat16", block_size=256, max_num_seqs=64, gpu_memory_utilization=share)
    filled, _ = used()
    assert filled <= share * total + SLACK
    assert filled >= (share - 0.05) * total or llm.config.num_kv_blocks == MOST_BLOCKS
    runner = llm.engine._runner
    assert isinstance(runner, ModelRunner)
    runner.execute(largest_step(llm.config, llm.model.transformer.spec.vocab_size))
    most, _ = used()
    assert most <= share * total + SLACK
    (output,) = llm.generate([[1, 2, 3]])
    assert output.outputs[0].finish_reason in ("length", "stop")
    runner.close()
    after, _ = used()
    assert after <= before + SLACK + 2**30


def test_too_small_a_share_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"of .* GiB is .*KV blocks of [\d,]+ bytes each: 0 fit"):
        LLM("tiny", device="cuda:0", gpu_memory_utilization=1e-5)


def test_the_gpu_that_computes_is_the_one_that_is_asked() -> None:
    name = gpu_name(torch.device("cuda", 0))
    assert name is not None and (name.uuid or name.pci_bus_id)
    try:
        reader = NvmlReader(name)
    except NoFigures as reason:
        pytest.skip(str(reason))
    try:
        sample = reader.read()
    finally:
        reader.close()
    total = torch.cuda.mem_get_info(0)[1]
    assert sample.memory_total is None or abs(sample.memory_total - total) < 0.1 * total
    assert sample.utilisation is None or 0 <= sample.utilisation <= 1
    assert sample.power is None or 0 < sample.power < 5000
