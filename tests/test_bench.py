"""Speeds and ceilings: the arithmetic, on steps made up so that every result is known."""

import pytest

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
