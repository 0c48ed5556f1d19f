"""Speeds and ceilings: the arithmetic, on steps made up so that every result is known."""

import subprocess
import sys

import pytest
import torch

from engine.bench import gpu_check
from engine.bench.ceilings import Ceilings
from engine.bench.speed import Case, Speed, counted, summarise, table
from engine.core.trace import Scheduled, StepTrace


def step(
    kind: str, tokens: int, *, seconds: float = 0.1, forward: float = 0.08, bytes_: float = 0.0, flops: float = 0.0
) -> StepTrace:
    row = Scheduled("r", kind, tokens, 0)
    return StepTrace(
        index=0, start=1.0, end=1.0 + seconds, forward_time=forward, scheduled=(row,), bytes=bytes_, flops=flops
    )


def test_a_step_that_moves_much_is_bound_by_bandwidth():
    steps = [step("decode", 4, bytes_=4e9, flops=1e9)] * 2
    speed = summarise("decode", steps, bandwidth=100e9, matmul_rate=1e12)
    assert speed.tokens == 8
    assert speed.tokens_per_second == pytest.approx(40)
    assert speed.step_ms == pytest.approx(100)
    assert speed.bandwidth == pytest.approx(50e9)
    assert speed.bound == "bandwidth"
    assert speed.share == pytest.approx(0.5)


def test_a_step_that_computes_much_is_bound_by_arithmetic():
    speed = summarise("prefill", [step("prefill", 512, bytes_=1e9, flops=60e9)], bandwidth=100e9, matmul_rate=1e12)
    assert speed.bound == "arithmetic"
    assert speed.rate == pytest.approx(750e9)
    assert speed.share == pytest.approx(0.75)


def test_only_the_steps_of_the_phase_count():
    mixed = StepTrace(index=0, start=0.0, scheduled=(Scheduled("a", "decode", 1, 9), Scheduled("b", "prefill", 8, 0)))
    steps = [step("prefill", 8), mixed, step("decode", 1), StepTrace(index=3, start=0.0)]
    assert counted(Case("", 1, 8, 1, "prefill"), steps) == steps[:2]
    assert counted(Case("", 1, 8, 1, "decode"), steps) == [steps[2]]


def test_no_step_is_an_error_with_the_cases_name():
    with pytest.raises(ValueError, match="decode: no step"):
        summarise("decode", [], 1.0, 1.0)


def test_the_table_names_ceilings_and_the_binding_one():
    text = table(
        [Speed("decode", 2, 8, 40.0, 100.0, 50e9, 1e9, "bandwidth", 0.5)], Ceilings("cpu", "float32", 2, 100e9, 1e12)
    )
    assert "copy 100.0 GB/s" in text
    assert "| decode | 40.0 | 100.0 | 50.0 | 1 | bandwidth | 50 % |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run make gpu-check")
def test_without_a_gpu_the_check_says_so_and_succeeds():
    done = subprocess.run(
        [sys.executable, "-m", "engine.bench.gpu_check"], cwd=gpu_check.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: nothing was checked" in done.stdout


def test_results_become_a_page_and_a_document(tmp_path):
    ceilings = {"device": "cuda:0", "dtype": "bfloat16", "threads": 0, "copy_bandwidth": 4e12, "matmul_rate": 7e14}
    speed = {
        "name": "decode", "steps": 2, "tokens": 8, "tokens_per_second": 40.0, "step_ms": 1.0, "bandwidth": 2e12,
        "rate": 1e12, "bound": "bandwidth", "share": 0.5,
    }  # fmt: skip
    runs = [
        {"model": "tiny", "dtype": "bfloat16", "ceilings": ceilings, "speeds": [speed]},
        {"model": "smollm2", "dtype": "bfloat16", "error": "RuntimeError: out of memory"},
    ]
    gpu_check.write({"gpu": "A GPU", "torch": "2.13.0", "cuda": "13.0", "tests": "passed", "runs": runs}, tmp_path)
    page = (tmp_path / "gpu_check.md").read_text()
    assert "# GPU check: A GPU" in page
    assert "copy 4000.0 GB/s" in page
    assert "Failed: RuntimeError: out of memory" in page
    assert (tmp_path / "gpu_check.json").exists()
