"""The fast path as a whole, on a CPU: interpreted kernels in a runner with graphs on a device that is late."""

import random

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.config import EngineConfig
from engine.model.backend import Backend
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from tests.model.fake_gpu import LateDevice
from tests.triton.interpreted.recorded import RecordedGraphs, small

SETTINGS = {"max_model_len": 32, "block_size": 8, "num_kv_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 20}


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def generate(tiny, runner=None, **more):
    ids = random.Random(1)
    prompts = [[ids.randrange(3, 250) for _ in range(count)] for count in (15, 6)]
    params = [SamplingParams(temperature=t, seed=2, max_tokens=n, ignore_eos=True) for t, n in ((0, 5), (0.9, 4))]
    llm = LLM(tiny, runner=runner, **SETTINGS, **more)
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    llm.check()
    return outputs, llm


def test_interpreted_kernels_write_the_same_tokens_as_torch(tiny):
    expected, plain = generate(tiny)
    assert plain.stats().preemptions > 0
    recorded = RecordedGraphs()
    backend = Backend(small, "interpreted", fused=True, graphs=lambda: recorded)
    runner = ModelRunner(
        tiny.transformer, EngineConfig(**SETTINGS, async_scheduling=True), backend=backend, device=LateDevice()
    )
    assert runner.graphs is not None
    assert generate(tiny, runner, async_scheduling=True)[0] == expected
    assert recorded.replays > 0


def test_warming_up_stores_nothing_and_meets_every_number_of_splits(tiny, monkeypatch):
    spec = tiny.transformer.spec
    attention = small(
        num_layers=1,
        num_kv_blocks=3,
        block_size=8,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention.pool.fill_(7.0)
    met, attend = [], attention._attend

    def noted(q, pool, block_size, plan):
        met.extend((tiles.shape, tiles.splits) for tiles in plan.launches)
        return attend(q, pool, block_size, plan)

    monkeypatch.setattr(attention, "_attend", noted)
    attention.warm_up(60)
    assert bool((attention.pool == 7.0).all())
    narrow, wide = attention.narrow, attention.wide
    assert met == [(wide, 1), *((narrow, splits) for splits in (1, 2, 4))]
    assert attention.splits_for(1, 60) == 4
