"""Every knob is validated by name, with value, limit and a way out; every forbidden combination is refused."""

from __future__ import annotations

import msgspec
import pytest

from engine.core.config import ConfigError, EngineConfig, build_config, require_gpu


@pytest.mark.parametrize(
    "field", ["max_model_len", "max_num_seqs", "block_size", "num_kv_blocks", "max_num_queued_requests"]
)
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", None, True])
def test_counts_must_be_whole_and_positive(field, value):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{field: value})
    message = str(refused.value)
    assert message.startswith(f"{field}={value!r}" if not isinstance(value, int) or value is True else f"{field}={value}")
    assert "at least 1" in message


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_num_batched_tokens", 0, "at least 1"),
        ("max_num_batched_tokens", 2.5, "at least 1"),
        ("long_prefill_token_threshold", -1, "at least 0"),
        ("long_prefill_token_threshold", None, "at least 0"),
        ("seed", -1, "at least 0"),
        ("seed", "lucky", "at least 0"),
        ("scheduling_policy", "lifo", "'fcfs', 'priority'"),
        ("batching", "dynamic", "'continuous', 'static'"),
        ("kv_layout", ["paged"], "'paged', 'contiguous'"),
        ("reserve", "all", "'max_model_len', 'request'"),
        ("use_kv_cache", 1, "True or False"),
        ("enable_prefix_caching", "yes", "True or False"),
        ("enable_chunked_prefill", 0, "True or False"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_limit(field, value, limit):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{field: value})
    assert str(refused.value).startswith(f"{field}={value!r}")
    assert limit in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_kv_cache": False, "batching": "static"}, ["use_kv_cache=False", "batching='continuous'"]),
        ({"use_kv_cache": False, "kv_layout": "contiguous"}, ["kv_layout='contiguous'", "use_kv_cache=True"]),
        ({"use_kv_cache": False, "enable_chunked_prefill": True}, ["enable_chunked_prefill=True", "use_kv_cache"]),
        ({"use_kv_cache": False, "enable_prefix_caching": True}, ["enable_prefix_caching=True", "use_kv_cache"]),
        ({"batching": "static", "enable_chunked_prefill": True}, ["enable_chunked_prefill=True", "batching"]),
        ({"batching": "static", "enable_prefix_caching": True}, ["enable_prefix_caching=True", "batching"]),
        ({"kv_layout": "contiguous", "enable_prefix_caching": True}, ["enable_prefix_caching=True", "kv_layout"]),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            ["long_prefill_token_threshold=8", "enable_chunked_prefill=False"],
        ),
        ({"batching": "static", "long_prefill_token_threshold": 8}, ["long_prefill_token_threshold=8"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_model_len": 101},
            ["max_num_batched_tokens=100", "max_model_len=101", "at least 101", "at most 100"],
        ),
        (
            {"batching": "static", "max_num_batched_tokens": 100, "max_model_len": 101},
            ["max_num_batched_tokens=100", "max_model_len=101", "batching='static'"],
        ),
        (
            {"use_kv_cache": False, "max_num_batched_tokens": 100, "max_model_len": 101},
            ["max_num_batched_tokens=100", "max_model_len=101", "use_kv_cache=False"],
        ),
        (
            {"kv_layout": "contiguous", "max_model_len": 129, "num_kv_blocks": 8, "block_size": 16},
            ["129", "num_kv_blocks=8", "128", "raise num_kv_blocks to 9", "reserve='request'"],
        ),
    ],
)
def test_forbidden_combinations_name_both_sides_and_a_way_out(fields, words):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**fields)
    for word in words:
        assert word in str(refused.value)


def test_the_neighbours_of_the_limits_are_accepted():
    EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=101, max_model_len=101)
    EngineConfig(kv_layout="contiguous", max_model_len=128, num_kv_blocks=8, block_size=16)
    EngineConfig(kv_layout="contiguous", reserve="request", max_model_len=129, num_kv_blocks=8, block_size=16)
    EngineConfig(seed=None)
    EngineConfig(long_prefill_token_threshold=0, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("fields", "budget", "chunked", "cached"),
    [
        ({}, 512, True, True),
        ({"max_num_seqs": 600}, 600, True, True),
        ({"enable_chunked_prefill": False}, 2048, False, True),
        ({"enable_chunked_prefill": False, "max_model_len": 64}, 512, False, True),
        ({"batching": "static"}, 2048, False, False),
        ({"kv_layout": "contiguous"}, 512, True, False),
        ({"use_kv_cache": False}, 2048, False, False),
        ({"enable_prefix_caching": False}, 512, True, False),
        ({"max_num_batched_tokens": 7}, 7, True, True),
    ],
)
def test_none_is_resolved_when_the_configuration_is_built(fields, budget, chunked, cached):
    config = EngineConfig(**fields)
    assert (config.max_num_batched_tokens, config.enable_chunked_prefill, config.enable_prefix_caching) == (
        budget,
        chunked,
        cached,
    )
    assert (config.token_budget, config.chunked_prefill, config.prefix_caching) == (budget, chunked, cached)
    values = msgspec.structs.asdict(config)
    assert [name for name, value in values.items() if value is None] == ["gpu_memory_utilization"]
    assert build_config(values) == config


def test_configuration_is_immutable_and_replaced_by_copies():
    config = EngineConfig(num_kv_blocks=8)
    with pytest.raises(AttributeError):
        config.num_kv_blocks = 9
    assert config.replace(num_kv_blocks=9).num_kv_blocks == 9
    assert config.num_kv_blocks == 8
    assert config.kv_capacity == 128
    with pytest.raises(ConfigError, match="num_kv_blocks=0"):
        config.replace(num_kv_blocks=0)


def test_unknown_settings_list_the_known_ones_and_vllms_name_is_understood():
    with pytest.raises(ConfigError, match=r"'max_seqs'.*max_num_seqs"):
        build_config({"max_seqs": 3})
    assert build_config({"num_gpu_blocks_override": 5}).num_kv_blocks == 5


def test_a_share_of_the_gpus_memory_is_above_0_and_at_most_1():
    assert EngineConfig().gpu_memory_utilization is None
    for share in (0.9, 1, 1e-9):
        assert EngineConfig(gpu_memory_utilization=share).gpu_memory_utilization == share
    for wrong in (0, 0.0, -0.1, 1.01, float("nan"), float("inf"), "0.9", True):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization=.* above 0 and at most 1.*num_kv_blocks"):
            EngineConfig(gpu_memory_utilization=wrong)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5 .*use_kv_cache=False"):
        EngineConfig(gpu_memory_utilization=0.5, use_kv_cache=False)


def test_where_there_is_no_gpu_a_share_of_its_memory_is_refused_with_a_way_out():
    require_gpu(EngineConfig(), "the CPU")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.9 .*the CPU computes.*set num_kv_blocks"):
        require_gpu(EngineConfig(gpu_memory_utilization=0.9), "the CPU")
