"""The tiny model: random weights made on the spot. Its text is noise; its steps and blocks are real."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.model.checkpoint import Checkpoint

SEED = 20
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
# The most frequent pairs of English letters: merges that make the noise look like words and prompts a little shorter.
_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne "
    "ea ra ce li ch ll be ma si om ur"
)


def tiny_tokenizer() -> RawTokenizer:
    """A byte-level tokenizer: 256 bytes (any text encodes), then the special tokens, then frequent letter pairs."""
    pairs = [(pair[0], pair[1]) for pair in _PAIRS.split()]
    vocab = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {text: len(vocab) + i for i, text in enumerate(SPECIALS)}
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(pairs)}
    raw = RawTokenizer(BPE(vocab=vocab, merges=pairs))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = ByteLevelDecoder()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return raw


def tiny_checkpoint() -> Checkpoint:
    """The tiny model as a checkpoint in memory; the same weights every time."""
    raw = tiny_tokenizer()
    generator = torch.Generator().manual_seed(SEED)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads, kv_heads, head_dim = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]

    def random(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (spread / columns**0.5)

    tensors = {
        "model.embed_tokens.weight": random(CONFIG["vocab_size"], hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": _readable(random(CONFIG["vocab_size"], hidden, 4.0), raw),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": random(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, heads * head_dim, 2.0),
            f"{prefix}.mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, inner, 2.0),
        }
    special = {"eos_token": SPECIALS[0]}
    return Checkpoint(
        name="tiny",
        title="Tiny random model",
        weights="random weights (its text is noise)",
        folder=None,
        files={
            "config.json": dict(CONFIG),
            "generation_config.json": {"eos_token_id": 256},
            "tokenizer_config.json": special,
        },
        chat_template=CHAT_TEMPLATE,
        raw_tokenizer=raw,
        tensors=tensors,
    )


def _readable(head: torch.Tensor, raw: RawTokenizer) -> torch.Tensor:
    """Give tokens that are not printable ASCII the logit 0, far below the best of the others: noise, but readable noise."""
    for token in range(head.shape[0]):
        text = raw.decode([token], skip_special_tokens=True)
        if not text or not (text.isascii() and text.isprintable()):
            head[token] = 0.0
    return head
