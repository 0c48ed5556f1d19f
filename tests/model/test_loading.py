"""What is loaded, and what is refused by name with a way out."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model import checkpoint as checkpoint_module
from engine.model.errors import ModelError
from engine.model.loader import load_model
from engine.model.spec import read_spec
from engine.model.tokenizer import Tokenizer
from tests.fixtures import copy_with_config, make_chain, make_rand, make_tokb, oracle_logits, save_tokenizer
from tests.model.kit import make_attention, packed_logits

IDS = [3, 141, 59, 26, 53, 58, 97, 93]


def logits_of(model):
    return packed_logits(model, make_attention(model), [(IDS, 0, [1])])


# ---------------------------------------------------------------- heads, tied and not


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory):
    return make_rand(tmp_path_factory.mktemp("tied"), tied=True)


def test_tied_without_a_head(tied_dir):
    assert "lm_head.weight" not in load_file(tied_dir / "model.safetensors")
    model = load_model(tied_dir)
    assert model.transformer.weights.tied
    assert model.info.num_parameters == sum(t.numel() for t in load_file(tied_dir / "model.safetensors").values())
    assert (logits_of(model) - oracle_logits(tied_dir, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_tied_with_a_head_too(tied_dir, tmp_path, factor):
    path = copy_with_config(tied_dir, tmp_path / "both")
    tensors = load_file(path / "model.safetensors")
    size = sum(t.numel() for t in tensors.values())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * factor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(path)
    assert model.info.num_parameters == size + (0 if factor == 1.0 else tensors["lm_head.weight"].numel())
    assert (logits_of(model) - oracle_logits(path, IDS)).abs().max() < 1e-4


def test_untied_head_is_its_own(rand_dir, tmp_path):
    path = copy_with_config(rand_dir, tmp_path / "untied")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(path)
    assert model.info.num_parameters == sum(t.numel() for t in tensors.values())
    assert (logits_of(model) - oracle_logits(path, IDS)).abs().max() < 1e-4


# ---------------------------------------------------------------- end-of-sequence ids


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([2, 3], None, "<|four|>", {2, 3, 256}),
        (2, 5, "<|four|>", {2, 5, 256}),
        (None, [7], None, {7}),
        (None, None, "<|four|>", {256}),
        (None, None, None, set()),
    ],
)
def test_every_eos_counts(tmp_path, generation, config, tokenizer, expected):
    path = make_chain(
        tmp_path, {}, special=["<|four|>"], generation_eos=generation, config_eos=config, tokenizer_eos=tokenizer
    )
    assert load_model(path).eos_token_ids == expected


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM is not supported.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "differ between layers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
        ({"hidden_size": 128}, r"shape \[320, 64\], config.json asks for \[320, 128\]"),
        ({"num_hidden_layers": 1}, "9 tensors have no place"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(rand_dir, tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(copy_with_config(rand_dir, tmp_path / "x", **changes))


def test_a_sliding_window_limits_the_context():
    config = {
        "architectures": ["MistralForCausalLM"], "vocab_size": 9, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32768,
    }  # fmt: skip
    assert read_spec({**config, "sliding_window": 4096}).context_limit == 4096
    assert read_spec({**config, "sliding_window": 4096}).max_position == 32768
    assert read_spec({**config, "sliding_window": None}).context_limit == 32768
    qwen = {**config, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert read_spec({**qwen, "use_sliding_window": False}).context_limit == 32768
    assert read_spec({**qwen, "use_sliding_window": True}).context_limit == 4096


def test_old_rope_settings_are_understood(rand_dir):
    config = json.loads((rand_dir / "config.json").read_text())
    config.pop("rope_parameters")
    spec = read_spec({**config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}})
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (5e5, "linear", 4.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "no such folder or file.*hub name"),
        ("./no/such/folder", "no such folder"),
        ("nobody/no-such-model", "no such folder here, and the hub could not give it"),
        ("", "no such folder"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    if name == "":
        name = "/nonexistent"
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_broken_folders(rand_dir, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path / "empty")
    torch_only = copy_with_config(rand_dir, tmp_path / "bin")
    (torch_only / "model.safetensors").rename(torch_only / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model\.safetensors \(weights found: pytorch_model\.bin\)"):
        load_model(torch_only)
    damaged = copy_with_config(rand_dir, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="is damaged"):
        load_model(damaged)
    (damaged / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(damaged)
    unspeaking = copy_with_config(rand_dir, tmp_path / "mute")
    (unspeaking / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_model(unspeaking)
    some_file = tmp_path / "notes.txt"
    some_file.write_text("hello")
    with pytest.raises(ModelError, match="is a file"):
        load_model(some_file)
    not_gguf = tmp_path / "notes.gguf"
    not_gguf.write_text("hello, this is no model at all, only text")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(not_gguf)


def test_devices_and_dtypes(rand_dir):
    for device in ("tpu", "cuda:x", "cpu:0:1"):
        with pytest.raises(ModelError, match="not supported"):
            load_model(rand_dir, device=device)
    with pytest.raises(ModelError, match=r"sees .* CUDA devices"):
        load_model(rand_dir, device="cuda:99")
    with pytest.raises(ModelError, match="dtype='int8'"):
        load_model(rand_dir, dtype="int8")
    assert load_model(rand_dir, device="cpu", dtype="bf16").info.dtype == "bfloat16"


def test_sharded_checkpoints(rand_dir, tmp_path):
    path = copy_with_config(rand_dir, tmp_path / "shards")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, path / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (logits_of(load_model(path)) - oracle_logits(rand_dir, IDS)).abs().max() < 1e-4
    (path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        load_model(path)


# ---------------------------------------------------------------- the cache of converted models


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    import engine.model.gguf

    monkeypatch.setenv("INFERENCE_LAB_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    calls = []

    def convert(source, folder, progress):
        (folder / "config.json").write_text("{}")
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.model.gguf, "convert", convert)
    with pytest.raises(ModelError, match=r"No space left.*MiB are free.*INFERENCE_LAB_CACHE"):
        checkpoint_module.converted(gguf)
    assert list((tmp_path / "cache").iterdir()) == []
    first = checkpoint_module.converted(gguf)
    assert checkpoint_module.converted(gguf) == first and len(calls) == 2
    assert list((tmp_path / "cache").iterdir()) == [first]
    old = tmp_path / "cache" / "x.partial-1-a"
    old.mkdir()
    os.utime(old, (0, 0))
    gguf.write_bytes(b"GGUF2")
    checkpoint_module.converted(gguf)
    assert not old.exists()


# ---------------------------------------------------------------- tokenizer and templates


def test_bos_follows_the_settings(rand_dir, tmp_path):
    for wanted in (True, False, None):
        path = copy_with_config(rand_dir, tmp_path / str(wanted))
        extra = {} if wanted is None else {"add_bos_token": wanted}
        save_tokenizer(path, make_tokb(special=["<s>"]), bos_token={"content": "<s>"}, **extra)
        tokenizer = load_model(path).tokenizer
        assert tokenizer.encode("A") == ([256, 65] if wanted else [65])
        assert tokenizer.encode("A", add_special_tokens=False) == [65]


def test_templates():
    raw = make_tokb()
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "[{{ m['content'] }}]{% endfor %}{{ eos_token }}"
    )
    tokenizer = Tokenizer(raw, special={"eos_token": "</s>"}, chat_template=template)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "é"}]) == "[é]</s>"
    with pytest.raises(ModelError, match="no tools"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(ModelError, match="chat message must be"):
        tokenizer.apply_chat_template(["hello"])
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(raw).apply_chat_template([{"role": "user", "content": "x"}])
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ModelError, match="can't render"):
        Tokenizer(raw, chat_template=attack).apply_chat_template([{"role": "user", "content": "x"}])


def test_strange_text_encodes(tiny):
    tokenizer = tiny.tokenizer
    assert tokenizer.decode(tokenizer.encode("\x00\x1b[31m \u202e\ud800x")) == "\x00\x1b[31m \u202e?x"
    text = "All work and no play. " * 50_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_ordinary_start_loads_no_transformers():
    """transformers takes seconds to import; a second start must not need it."""
    program = (
        "import sys; from engine import LLM, SamplingParams; llm = LLM('tiny');"
        "llm.chat([{'role': 'user', 'content': 'x'}], SamplingParams(max_tokens=2));"
        "print('transformers' in sys.modules, 'streamlit' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False False\n"
    )


def test_tiny_is_the_same_every_time(tiny):
    other = load_model("tiny")
    assert torch.equal(other.transformer.weights.head, tiny.transformer.weights.head)
    assert tiny.info.has_chat_template and tiny.transformer.spec.group_size == 3 and tiny.context_limit == 8192
