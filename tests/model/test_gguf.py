"""The same weights as safetensors and as a GGUF file give the same logits, configuration and token ids."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.model.checkpoint import converted
from engine.model.errors import ModelError
from engine.model.loader import load_model
from tests.fixtures import byte_alphabet, make_rand
from tests.model.kit import make_attention, packed_logits

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head in llama.cpp's order: the two halves that rotate together become neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(source, target, pre="gpt-2"):
    from gguf import GGUFWriter

    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    words = [*byte_alphabet(), "12", *(f"<unused{i}>" for i in range(config["vocab_size"] - 257))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([f"{byte_alphabet()[0x31]} {byte_alphabet()[0x32]}"])
    writer.add_eos_token_id(300)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFERENCE_LAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_logits_and_configuration_are_the_same(tmp_path, kv_heads):
    source = make_rand(tmp_path / "rand", kv_heads=kv_heads, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    stages = []
    original = load_model(source)
    loaded = load_model(write_gguf(source, tmp_path / "m.gguf"), progress=lambda stage, part: stages.append((stage, part)))
    spec, expected = loaded.transformer.spec, original.transformer.spec
    assert (spec.rope.theta, spec.num_kv_heads, spec.tied, spec.head_dim) == (
        5000.0,
        kv_heads,
        expected.tied,
        expected.head_dim,
    )
    assert spec.norm_eps == pytest.approx(expected.norm_eps)
    logits = [packed_logits(model, make_attention(model), [(IDS, 0, [1])]) for model in (original, loaded)]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    assert loaded.eos_token_ids == {300}
    fractions = [part for _, part in stages if part is not None]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert loaded.info.weights == "GGUF weights, dequantised"


def test_a_tokenizers_rule_is_put_back_or_refused(tmp_path):
    source = make_rand(tmp_path / "rand")
    merged = load_model(write_gguf(source, tmp_path / "plain.gguf")).tokenizer.encode("12")
    split = load_model(write_gguf(source, tmp_path / "digits.gguf", pre="smollm")).tokenizer.encode("12")
    assert (merged, split) == ([256], [0x31, 0x32])
    with pytest.raises(ModelError, match="rule 'deepseek-llm', which is not known"):
        converted(write_gguf(source, tmp_path / "other.gguf", pre="deepseek-llm"))
