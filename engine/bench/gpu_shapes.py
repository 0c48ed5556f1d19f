"""What is measured on a GPU: shapes of real models, and loads of fixed size.

The shapes are those of the models' published ``config.json``; the weights are random (``engine.model.random_weights``).
Each shape has a tiny twin of the same kind (grouping, rotary positions, norms, tied head) for runs that take a second.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from engine.model.spec import ModelSpec, read_spec

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Shape:
    """A model's shape."""

    name: str
    config: dict[str, Any]
    """What its ``config.json`` says of the shape."""
    parameters: int
    """The published total, a tied head counted once; 0 for a twin that nobody published."""

    @property
    def spec(self) -> ModelSpec:
        """The shape as the transformer wants it."""
        return read_spec(self.config, self.name)

    def tiny(self) -> Shape:
        """A twin of two small layers with the same heads' size, grouping and features."""
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        small = {
            "hidden_size": 32 * group,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2 * group,
            "num_key_value_heads": 2,
            "head_dim": self.spec.head_dim,
            "vocab_size": 512,
        }
        return replace(self, name=f"tiny twin of {self.name}", config=self.config | small, parameters=0)


def _llama(**facts: Any) -> dict[str, Any]:
    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    # Ends of texts are ignored in every measure, so no shape has an end token.
    return common | {"bos_token_id": None, "eos_token_id": None} | facts


LLAMA_3_1_8B = Shape(
    "Llama-3.1-8B",
    _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=LLAMA_3_ROPE | {"factor": 8.0},
        tie_word_embeddings=False,
    ),
    8_030_261_248,
)
LLAMA_3_2_1B = Shape(
    "Llama-3.2-1B",
    _llama(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling=LLAMA_3_ROPE | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    1_235_814_400,
)
SMOLLM2_135M = Shape(
    "SmolLM2-135M",
    _llama(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    134_515_008,
)
QWEN3_0_6B = Shape(
    "Qwen3-0.6B",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    596_049_920,
)
SHAPES = (LLAMA_3_1_8B, LLAMA_3_2_1B, SMOLLM2_135M, QWEN3_0_6B)


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens each of them gets."""

    prompts: list[list[int]]
    output_tokens: list[int]

    def first(self, count: int) -> Load:
        """The first ``count`` requests of it."""
        return Load(self.prompts[:count], self.output_tokens[:count])

    def cut(self, output_tokens: int) -> Load:
        """The same prompts with few output tokens: enough to have been through everything once."""
        return Load(self.prompts, [min(output_tokens, tokens) for tokens in self.output_tokens])

    @property
    def total(self) -> int:
        """Output tokens in all."""
        return sum(self.output_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, output included."""
        return max(len(prompt) + more for prompt, more in zip(self.prompts, self.output_tokens, strict=True))

    def blocks(self, block_size: int) -> int:
        """KV blocks that hold all sequences at their full length."""
        pairs = zip(self.prompts, self.output_tokens, strict=True)
        return sum(-(-(len(prompt) + more) // block_size) for prompt, more in pairs)


def nano_vllm_load(requests: int, lengths: tuple[int, int], vocab_size: int) -> Load:
    """The load of nano-vllm's bench: lengths in and out uniform in ``lengths``, drawn as there, from the same seed.

    With 256 requests of 100 to 1,024 tokens it is the very same load: 142,827 tokens in, 133,966 out.
    """
    draw = random.Random(0)
    highest = min(10_000, vocab_size - 1)
    prompts = [[draw.randint(0, highest) for _ in range(draw.randint(*lengths))] for _ in range(requests)]
    return Load(prompts, [draw.randint(*lengths) for _ in range(requests)])


def even_load(requests: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int = 0) -> Load:
    """Prompts of random ids, all of one length, all with as many output tokens."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(requests)]
    return Load(prompts, [output_tokens] * requests)


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Tokens, requests, repeats, seconds."""

    repeats: int = 3
    load_repeats: int = 2
    """Of a whole load, which is a thousand steps or more: the one is much like the other."""
    ceilings_seconds: float = 3.0
    decode_prompt: int = 128
    decode_tokens: int = 200
    prefill_tokens: int = 8192
    slope_batch: int = 8
    slope_contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 12_288)
    slope_tokens: int = 32
    load_requests: int = 256
    load_lengths: tuple[int, int] = (100, 1024)
    load_budget: int = 16_384
    """Token budget of a step; nano-vllm's own."""
    full_batch: int = 256
    full_prompt: int = 128
    full_tokens: int = 96
    peer_shares: tuple[tuple[int, int], ...] = ((256, 1024), (256, 256), (256, 128), (128, 128), (64, 128), (32, 64))
    """Requests of the load that a peer may get, and tokens that each gets at most: most work first, the probe last."""
    peer_tokens: int = 64
    profile_steps: int = 8
    gain_batch: int = 16
    gain_context: int = 4096
    long_context: int = 4000
    """Of one sequence whose keys may be split, and which is short enough not to be split anyway."""


QUICK = Sizes(
    repeats=2,
    load_repeats=1,
    ceilings_seconds=0.05,
    decode_prompt=8,
    decode_tokens=8,
    prefill_tokens=48,
    slope_batch=2,
    slope_contexts=(16, 32, 64),
    slope_tokens=4,
    load_requests=4,
    load_lengths=(4, 10),
    load_budget=64,
    full_batch=4,
    full_prompt=6,
    full_tokens=6,
    peer_shares=((4, 8), (2, 4)),
    peer_tokens=4,
    profile_steps=2,
    gain_batch=2,
    gain_context=20,
    long_context=40,
)
"""Enough to drive every line, on the tiny twins."""
