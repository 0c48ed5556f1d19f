"""The KV memory calculator against hand-computed values and against the bytes that an engine really allocates."""

from __future__ import annotations

import json

import msgspec
import pytest

from app.experiments.kv_memory import KNOWN, answer, of_config, of_model, of_text, pool_estimate, size
from engine.core.config import build_config
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.observe.formulas import FormulaError
from engine.serve.detokenizer import Codec

BY_HAND = {
    "Llama-3.1-8B": "128 KiB",
    "Qwen3-0.6B": "112 KiB",
    "Qwen2.5-0.5B": "12 KiB",
    "SmolLM2-135M": "22.5 KiB",
    "Llama-3.2-1B": "32 KiB",
    "Llama-2-7B": "512 KiB",
}


@pytest.mark.parametrize(("name", "expected"), BY_HAND.items())
def test_a_token_in_bf16(name, expected):
    assert size(of_config(KNOWN[name]).bytes_per_token("bfloat16")) == expected


def test_the_textbook_example_and_what_paging_adds():
    shape = of_config(KNOWN["Llama-3.1-8B"])
    settings = {"kv_dtype": "bfloat16", "weight_dtype": "bfloat16", "block_size": 16, "memory": 80e9, "share": 0.9}
    whole = answer(shape, context=4096, **settings)
    assert size(whole.held) == size(whole.stored) == "512 MiB"
    odd = answer(shape, context=4097, **settings)
    assert (odd.blocks, odd.wasted_slots) == (257, 15)
    assert odd.held - odd.stored == 15 * 128 * 1024
    assert odd.fit == int((80e9 * 0.9 - odd.weights) // (257 * 16 * 128 * 1024))


def test_parameters_of_known_models():
    assert of_config(KNOWN["Llama-3.1-8B"]).parameters == 8_030_261_248
    assert of_config(KNOWN["Qwen2.5-0.5B"]).parameters == 494_032_768
    assert of_config(KNOWN["SmolLM2-135M"]).parameters == 134_515_008


def test_weights_that_do_not_fit_leave_nothing():
    shape = of_config(KNOWN["Llama-3.1-8B"])
    found = answer(shape, kv_dtype="float16", weight_dtype="float32", block_size=16, context=100, memory=24e9, share=0.9)
    assert found.memory_for_kv < 0 and found.fit == 0


def test_kinds_of_attention():
    assert of_config(KNOWN["Llama-2-7B"]).kind == "MHA"
    assert of_config(KNOWN["Llama-3.1-8B"]).kind == "GQA"
    assert of_config({**KNOWN["Llama-3.1-8B"], "num_key_value_heads": 1}).kind == "MQA"
    assert of_config(KNOWN["Llama-3.1-8B"]).bytes_per_token("bfloat16", 1) == 16 * 1024


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{\n  'a': 1\n}", "line 2, column 3"),
        ("[]", "object with fields"),
        ("{}", "num_attention_heads is missing"),
        (json.dumps({**KNOWN["Llama-3.1-8B"], "num_hidden_layers": "many"}), "num_hidden_layers='many'"),
        (json.dumps({**KNOWN["Llama-3.1-8B"], "num_key_value_heads": 5}), "multiple of num_kv_heads=5"),
        (json.dumps({**KNOWN["Llama-3.1-8B"], "kv_lora_rank": 512}), "not its"),
        ("[" * 100_000, "nested too deeply"),
        ("x" * 300_000, "at most 200,000"),
    ],
)
def test_a_config_that_makes_no_sense_says_where(text, words):
    with pytest.raises(FormulaError, match=words.replace("(", r"\(")):
        of_text(text)


@pytest.mark.parametrize("changes", [{}, {"block_size": 8}, {"num_kv_blocks": 3}])
def test_the_formula_gives_the_bytes_that_the_engine_allocates(changes):
    loaded = load_model("tiny", "cpu", "float32")
    config = build_config({"num_kv_blocks": 20, "block_size": 16, "max_model_len": 32, **changes})
    runner = ModelRunner(loaded.transformer, config, Codec(loaded.tokenizer))
    shape = of_model(loaded.info)
    estimate = pool_estimate(shape.bytes_per_token(loaded.info.dtype), config.num_kv_blocks, config.block_size)
    assert estimate == runner.kv_pool_bytes
    assert of_model(msgspec.structs.replace(loaded.info, num_layers=0)) is None
