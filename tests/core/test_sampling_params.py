"""Sampling settings are refused by field, value and range; the limits themselves are accepted."""

from __future__ import annotations

import math

import pytest

from engine.core.sampling_params import SamplingParams

REFUSED = {
    "n": [0, -1, 65, 1.0, True, None],
    "temperature": [-0.1, math.nan, math.inf, "hot", None, True],
    "top_k": [-2, 1.5, None],
    "top_p": [0.0, -0.1, 1.01, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, math.inf],
    "presence_penalty": [-2.1, 2.1, "much"],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [1.5, 2**64, -(2**63) - 1, True],
    "max_tokens": [0, -1, 1.5, "5", True],
    "min_tokens": [-1, 17, None],
    "logprobs": [-2, 0.5, True],
    "ignore_eos": [1, None],
    "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [0],
    "stop": ["", ("a", ""), ("a", 5), 5, b"x"],
    "stop_token_ids": [(-1,), (1.5,), ("a",), 5],
}
ACCEPTED = {
    "n": [1, 64],
    "temperature": [0, 0.0, 1e-9, 2],
    "top_k": [-1, 0, 1, 10**6],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 1],
    "repetition_penalty": [0.1, 2],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 2.0],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [1, None, 10**9],
    "min_tokens": [0, 16],
    "logprobs": [None, -1, 0, 20],
    "stop": [(), None, "x", ["x", "y"]],
    "stop_token_ids": [(), None, [3, 4]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_invalid_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError) as refused:
        SamplingParams(**{field: value})
    assert str(refused.value).startswith(f"{field}=")


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in ACCEPTED.items() for value in values])
def test_the_limits_themselves_are_accepted(field, value):
    SamplingParams(**{field: value})


def test_messages_hold_value_and_range():
    with pytest.raises(ValueError, match=r"top_p=1\.5 must be above 0 up to 1"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="min_tokens=9 must be from 0 to 8"):
        SamplingParams(max_tokens=8, min_tokens=9)
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        SamplingParams(max_tokens=0)


def test_tiny_temperatures_are_greedy_and_stops_are_tuples():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert not SamplingParams().has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties
