"""The command for vLLM holds flags that vLLM has, the settings' values, and a word on what has no flag."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest

from app.figures.vllm import vllm_command
from engine.core.config import build_config

FLAGS = {
    "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--block-size", "--num-gpu-blocks-override",
    "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--async-scheduling", "--no-async-scheduling", "--scheduling-policy", "--long-prefill-token-threshold", "--seed",
    "--gpu-memory-utilization",
}  # fmt: skip
"""From ``vllm serve --help=all`` of vLLM 0.32."""


def words(command: str) -> list[str]:
    """The command as a shell reads it; comments are left out."""
    return shlex.split(command, comments=True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 64, "scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_model_len": 512},
        {"batching": "static", "max_model_len": 256},
        {"kv_layout": "contiguous", "max_model_len": 256},
        {"use_kv_cache": False, "max_model_len": 256, "seed": None},
        {"block_size": 8},
        {"async_scheduling": True},
        {"gpu_memory_utilization": 0.85},
    ],
)
def test_only_flags_that_exist_with_the_settings_values(fields: dict[str, Any]):
    config = build_config(fields)
    command = vllm_command(config, "a model's name")
    said = words(command)
    assert said[:3] == ["vllm", "serve", "a model's name"]
    assert {word for word in said if word.startswith("--")} <= FLAGS
    values = dict(pairwise(said))
    assert values["--max-num-batched-tokens"] == str(config.token_budget)
    share = config.gpu_memory_utilization
    assert values.get("--num-gpu-blocks-override") == (str(config.num_kv_blocks) if share is None else None)
    assert values.get("--gpu-memory-utilization") == (None if share is None else f"{share:g}")
    assert values["--block-size"] == str(config.block_size)
    assert ("--enable-prefix-caching" in said) == config.prefix_caching
    assert ("--no-enable-chunked-prefill" in said) == (not config.chunked_prefill)
    assert ("--long-prefill-token-threshold" in said) == bool(config.long_prefill_token_threshold)
    assert ("--async-scheduling" in said) == config.async_scheduling
    assert ("--no-async-scheduling" in said) == (not config.async_scheduling)  # vLLM schedules ahead unless told not to
    assert ("--seed" in said) == (config.seed is not None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batching": "static"}, "batching='static'"),
        ({"kv_layout": "contiguous"}, "kv_layout='contiguous'"),
        ({"use_kv_cache": False}, "use_kv_cache=False"),
        ({"block_size": 4}, "block_size=4"),
    ],
)
def test_what_has_no_flag_is_said_in_a_comment(fields: dict[str, Any], said: str):
    first, *_ = vllm_command(build_config({"max_model_len": 256, **fields}), "m").splitlines()
    assert first.startswith("# ")
    assert said in first


def test_the_default_needs_no_comment():
    assert vllm_command(build_config({}), "m").startswith("vllm serve m")
