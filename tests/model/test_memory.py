"""How many blocks fit into a share of a GPU's memory, and what is said when it runs out. The numbers are given."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import LLM
from engine.core.config import ConfigError, EngineConfig
from engine.core.runner import ScriptedRunner, StepBatch
from engine.model.errors import ModelError
from engine.model.loader import load_model
from engine.model.memory import (
    MOST_BLOCKS,
    CudaProbe,
    Footprint,
    OutOfMemory,
    blocks_for,
    blocks_that_fit,
    explained,
    fit_pool,
    largest_step,
)
from engine.model.runner import ModelRunner

GIB = 2**30
BLOCK = 2**21
"""Bytes of a block of 16 tokens below: 128 KiB a token."""


class Numbers:
    """A probe that was told what it would measure."""

    def __init__(self, **fields: Any) -> None:
        usual = {"total": 80 * GIB, "others": 2 * GIB, "weights": 15 * GIB, "activations": 3 * GIB, "graphs": GIB}
        self.footprint = Footprint(**{**usual, **fields})
        self.asked: list[EngineConfig] = []

    def measure(self, config: EngineConfig) -> Footprint:
        self.asked.append(config)
        return self.footprint


def model_on(device: str = "cuda") -> Any:
    return SimpleNamespace(
        device=torch.device(device),
        kv_bytes_per_token=BLOCK // 16,
        weight_bytes=15 * GIB,
        spec=SimpleNamespace(vocab_size=64),
    )


def test_without_a_share_nothing_is_measured_or_changed() -> None:
    probe, config = Numbers(), EngineConfig(num_kv_blocks=7)
    assert fit_pool(model_on(), config, probe) is config
    assert fit_pool(model_on("cpu"), config, probe) is config
    assert probe.asked == []


def test_the_pool_takes_what_the_share_leaves() -> None:
    """0.9 of 80 GiB is 72; less 2 + 15 + 3 + 1 leaves 51 GiB: 26,112 blocks of 2 MiB, of which one is the null block."""
    probe = Numbers()
    fitted = fit_pool(model_on(), EngineConfig(gpu_memory_utilization=0.9, num_kv_blocks=3), probe)
    assert fitted.num_kv_blocks == 51 * GIB // BLOCK - 1 == 26_111
    assert fitted == EngineConfig(gpu_memory_utilization=0.9, num_kv_blocks=26_111)
    (asked,) = probe.asked
    assert asked.num_kv_blocks == 2048 // 16, "measured with a pool for one sequence"


@given(st.integers(1, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.floats(0.001, 1.0), st.integers(1, 2**24))
def test_the_pool_never_exceeds_the_share_and_one_block_more_would(
    total: int, weights: int, activations: int, share: float, block: int
) -> None:
    measured = Footprint(total, 0, weights, activations, 0)
    blocks = blocks_that_fit(measured, share, block)
    left = int(share * total) - weights - activations
    assert blocks == 0 or (blocks + 1) * block <= left
    assert (blocks + 2) * block > left


def test_a_pool_of_tiny_blocks_is_bounded() -> None:
    model = model_on()
    model.kv_bytes_per_token = 1
    assert fit_pool(model, EngineConfig(gpu_memory_utilization=0.9), Numbers()).num_kv_blocks == MOST_BLOCKS


def test_too_little_memory_is_told_with_every_number() -> None:
    config = EngineConfig(gpu_memory_utilization=0.3, max_model_len=65_536, max_num_seqs=256, max_num_batched_tokens=8192)
    with pytest.raises(ModelError) as caught:
        fit_pool(model_on(), config, Numbers())
    words = str(caught.value)
    fitting = 3 * GIB // BLOCK - 1
    for part in (
        "gpu_memory_utilization=0.3 of 80.00 GiB is 24.00 GiB",
        "other programs and labs take 2.00 GiB",
        "the weights 15.00 GiB",
        "activations of the largest step 3.00 GiB",
        "CUDA graphs 1.00 GiB",
        "3.00 GiB are left",
        f"KV blocks of {BLOCK:,} bytes each: {fitting:,} fit",
        "max_model_len=65,536 needs 4,096",
        "raise gpu_memory_utilization (now 0.3)",
        f"lower max_model_len to at most {fitting * 16:,}, max_num_batched_tokens (now 8,192) or max_num_seqs (now 256)",
    ):
        assert part in words
    shorter = config.replace(max_model_len=fitting * 16)
    assert fit_pool(model_on(), shorter, Numbers()).num_kv_blocks == fitting, "the advice works"


def test_what_could_not_be_measured_is_not_told_as_a_number() -> None:
    probe = Numbers(activations=0, graphs=0, others=65 * GIB, complete=False)
    with pytest.raises(ModelError, match=r"0\.00 GiB are left.*0 fit") as caught:
        fit_pool(model_on(), EngineConfig(gpu_memory_utilization=1.0), probe)
    assert "could not be measured" in str(caught.value)
    assert "raise gpu_memory_utilization" not in str(caught.value), "1 can't be raised"
    assert re.search(r"lower max_model_len, max_num_batched_tokens", str(caught.value))


def test_on_a_cpu_a_share_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5 .*the CPU computes.*set num_kv_blocks"):
        LLM("tiny", device="cpu", gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="a runner of your own computes"):
        LLM("tiny", device="cpu", gpu_memory_utilization=0.5, runner=ScriptedRunner())


# The largest step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"max_num_batched_tokens": 40, "max_num_seqs": 4}, [32, 6, 1, 1]),
        ({"max_num_batched_tokens": 128, "max_num_seqs": 4}, [32, 32, 32, 32]),
        ({"max_num_batched_tokens": 999, "max_num_seqs": 2}, [32, 32]),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 8}, [1, 1, 1]),
    ],
)
def test_the_largest_step_has_the_whole_budget_at_the_end_of_the_context(fields: dict[str, Any], counts: list[int]) -> None:
    config = EngineConfig(max_model_len=32, block_size=8, **fields)
    batch = largest_step(config, vocab_size=64)
    assert [len(work.token_ids) for work in batch.work] == counts
    assert all(work.context + len(work.token_ids) == 32 for work in batch.work)
    assert all(len(work.samples) == 1 for work in batch.work)
    assert max(max(work.block_table) for work in batch.work) == blocks_for(32, 8)


def test_the_largest_step_runs_on_a_pool_for_one_sequence() -> None:
    model = load_model("tiny", "cpu").transformer
    config = EngineConfig(max_model_len=32, block_size=8, num_kv_blocks=4, max_num_batched_tokens=64, max_num_seqs=3)
    result = ModelRunner(model, config).execute(largest_step(config, model.spec.vocab_size))
    assert len(result.tokens) == 3 and not result.nonfinite
    assert result.logprobs is not None and all(result.logprobs)


# Measuring ----------------------------------------------------------------------------------------------------------------


class FakeCuda:
    """torch's counters of a GPU with 80 GiB: 4 GiB are other programs', 16 GiB the weights' and another lab's."""

    def __init__(self) -> None:
        self.reserved, self.peak, self.outside = 16 * GIB, 0, 4 * GIB
        self.calls: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *args, name=name: self.calls.append(name))
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - self.reserved - self.outside, 80 * GIB))

    def reset(self, device: torch.device) -> None:
        self.peak = self.reserved

    def take(self, count: int) -> None:
        self.reserved += count
        self.peak = max(self.peak, self.reserved)


class FakeRunner:
    """Takes memory as a real one would: pool and graphs when made, a quarter of them the driver's; 3 GiB in a step."""

    def __init__(self, cuda: FakeCuda, config: EngineConfig, fails: Exception | None) -> None:
        self._cuda, self._fails = cuda, fails
        self.kv_pool_bytes, self.graph_bytes = (config.num_kv_blocks + 1) * BLOCK, GIB
        self._cuda.take(self.kv_pool_bytes + 3 * GIB // 4)
        self._cuda.outside += GIB // 4

    def execute(self, batch: StepBatch) -> None:
        if self._fails is not None:
            raise self._fails
        self._cuda.take(3 * GIB)
        self._cuda.outside += GIB // 2  # a library's workspace

    def close(self) -> None:
        self._cuda.reserved = 16 * GIB
        self._cuda.outside -= GIB // 4
        self._cuda.calls.append("closed")


def probe_of(cuda: FakeCuda, fails: Exception | None = None) -> CudaProbe:
    return CudaProbe(model_on(), lambda config: FakeRunner(cuda, config, fails))  # type: ignore[arg-type,return-value]


def test_what_a_step_takes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    measured = probe_of(cuda).measure(EngineConfig(num_kv_blocks=128))
    lab, library, driver = GIB, GIB // 2, GIB // 4
    assert measured == Footprint(80 * GIB, 4 * GIB + lab + library + driver, 15 * GIB, 3 * GIB - driver, GIB)
    assert measured.taken == 4 * GIB + lab + library + 15 * GIB + 3 * GIB + GIB, "all that was in use at the most"
    assert "closed" in cuda.calls and cuda.calls[-1] == "empty_cache"


def test_a_pool_that_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    measured = probe_of(cuda).measure(EngineConfig(num_kv_blocks=60 * GIB // BLOCK))
    assert measured == Footprint(80 * GIB, 5 * GIB, 15 * GIB, 0, 0, complete=False)
    assert "closed" not in cuda.calls


def test_memory_that_runs_out_while_measuring_is_told_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.00 GiB. GPU 0 has a total capacity of …")
    with pytest.raises(OutOfMemory, match=r"being sized: 70\.00 GiB more were wanted.*Lower max_num_batched_tokens \(now"):
        probe_of(cuda, error).measure(EngineConfig(num_kv_blocks=128, gpu_memory_utilization=0.9))
    assert "closed" in cuda.calls
    with pytest.raises(ZeroDivisionError):
        probe_of(cuda, ZeroDivisionError()).measure(EngineConfig(num_kv_blocks=128))


# Running out in a step ----------------------------------------------------------------------------------------------------


class Fails:
    """A runner whose steps raise."""

    def __init__(self, error: Exception, config: EngineConfig | None = None) -> None:
        self.error, self.config = error, config or EngineConfig()
        self.model, self.kv_pool_bytes = model_on("cpu"), 3 * GIB

    @explained
    def execute(self, batch: StepBatch) -> None:
        raise self.error

    @explained
    def collect(self, handle: object) -> None:
        raise self.error


CPU_WORDS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error code 12"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0"), ": 1.20 GiB more were wanted,"),
        (RuntimeError(CPU_WORDS), ": 4000 bytes more were wanted,"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ": "),
        (MemoryError(), ": "),
    ],
)
def test_a_step_that_runs_out_says_how_large_it_was_and_what_to_lower(error: Exception, wanted: str) -> None:
    config = EngineConfig(max_num_seqs=4, num_kv_blocks=1000, max_num_batched_tokens=64)
    with pytest.raises(OutOfMemory) as caught:
        Fails(error, config).execute(largest_step(config, 64))
    words = str(caught.value)
    assert f"ran out in a step of 64 tokens of 4 sequences{wanted}" in words
    assert "the weights take 15.00 GiB, the KV pool 3.00 GiB" in words
    assert "Lower max_num_batched_tokens (now 64) or max_num_seqs (now 4)" in words
    assert "or num_kv_blocks (now 1,000)" in words


def test_with_a_share_the_share_is_what_to_lower_and_a_later_look_at_a_step_is_told_too() -> None:
    failing = Fails(MemoryError(), EngineConfig(gpu_memory_utilization=0.95))
    with pytest.raises(OutOfMemory, match=r"ran out in a step: .*or gpu_memory_utilization \(now 0\.95\)"):
        failing.collect(object())


def test_other_failures_stay_what_they_are() -> None:
    for error in (RuntimeError("shapes differ"), ValueError("no")):
        with pytest.raises(type(error), match=str(error)) as caught:
            Fails(error).execute(StepBatch(0, []))
        assert caught.value is error


def test_a_request_hears_why_its_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the forward pass to the request's own error: the words arrive, without torch's."""
    llm = LLM("tiny", device="cpu", max_model_len=64, num_kv_blocks=16)

    def forward(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(llm.model.transformer, "forward", forward)
    (output,) = llm.generate([[1, 2, 3]])
    (completion,) = output.outputs
    assert completion.finish_reason == "error"
    words = "OutOfMemory: the memory of the machine ran out in a step of 3 tokens of 1 sequence: 9.00 GiB more were wanted"
    assert completion.error.startswith(words)
    llm.check()
