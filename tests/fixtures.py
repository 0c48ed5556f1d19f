"""Small checkpoints with known behaviour, and the reference they are compared with.

RAND    random Llama-like weights whose greedy choices have clear gaps: equality of tokens is a fair demand
CHAIN   a valid checkpoint whose greedy output is a chosen chain of tokens
TOKB    a byte-level tokenizer without merges, so that every byte is a token

``oracle`` is transformers' forward pass over the whole sequence, without a cache, and argmax.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = 320
FIRST_PIECE = 256
"""Id of the first extra piece of a TOKB tokenizer; bytes come before it, in the order of the byte-level alphabet."""
NEAR_TIE = 1e-3


def byte_alphabet() -> list[str]:
    """Byte → the character that stands for it in a byte-level vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(hidden)) for b in range(256)]


def make_tokb(pieces: Sequence[str] = (), special: Sequence[str] = ()) -> RawTokenizer:
    """Token id = byte value; then ``pieces`` from 256 on; then ``special`` tokens."""
    alphabet = byte_alphabet()
    vocab = {char: byte for byte, char in enumerate(alphabet)}
    for i, piece in enumerate(pieces):
        vocab["".join(alphabet[b] for b in piece.encode())] = FIRST_PIECE + i
    raw = RawTokenizer(BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)
    raw.decoder = ByteLevelDecoder()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return raw


def make_rand(
    path: Path,
    *,
    architecture: str = "llama",
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    seed: int = 2,
    spread: float | None = None,
    eos: int | list[int] | None = None,
    **config: Any,
) -> Path:
    """Save a RAND checkpoint with a TOKB tokenizer. Keyword arguments override its transformers configuration.

    ``spread``: draw every parameter (biases and norms too) anew with this spread.
    """
    import transformers

    family = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    settings = {
        "vocab_size": VOCAB, "hidden_size": 16 * heads, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "initializer_range": 0.2,
        "max_position_embeddings": 512, "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": eos,
        "pad_token_id": None,
    }  # fmt: skip
    if architecture == "mistral":
        settings["sliding_window"] = None
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **config})).float()
    if spread is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(str(path))
    save_tokenizer(path, make_tokb())
    return path


def save_tokenizer(path: Path, raw: RawTokenizer, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json."""
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))


def make_chain(
    path: Path,
    next_map: Mapping[int, int],
    pieces: Sequence[str] = (),
    *,
    special: Sequence[str] = (),
    generation_eos: int | list[int] | None = None,
    config_eos: int | list[int] | None = None,
    tokenizer_eos: str | None = None,
) -> Path:
    """Save a CHAIN checkpoint: after token t greedy decoding gives ``next_map[t]`` (t itself where the map is silent).

    Embedding = identity, attention and MLP contribute nothing, and the head has one 1 in each column.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCAB, "hidden_size": VOCAB, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": config_eos, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(VOCAB):
            model.lm_head.weight[next_map.get(token, token), token] = 1.0
    model.save_pretrained(str(path))
    if generation_eos is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    else:
        (path / "generation_config.json").unlink(missing_ok=True)
    save_tokenizer(path, make_tokb(pieces, special), **({"eos_token": tokenizer_eos} if tokenizer_eos else {}))
    return path


def chain_of(tokens: Sequence[int]) -> dict[int, int]:
    """The map that makes each token follow the one before it; no token may come twice with two successors."""
    result: dict[int, int] = {}
    for a, b in pairwise(tokens):
        assert result.setdefault(a, b) == b, f"token {a} would need two successors"
    return result


def copy_with_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with entries of config.json changed; None removes one."""
    shutil.copytree(source, target)
    data = json.loads((target / "config.json").read_text())
    data.update(changes)
    (target / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return target


@lru_cache(maxsize=32)
def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def oracle_logits(path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits [tokens, vocabulary] of a whole sequence, without a cache."""
    return reference(path)(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def oracle(path: Path, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens by transformers and, for each, the gap between its two best logits."""
    ids, gaps = list(prompt), []
    for _ in range(count):
        top = oracle_logits(path, ids)[-1].topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :], gaps


def assert_greedy(tokens: Sequence[int], expected: Sequence[int], gaps: Sequence[float], *, least: int = 1) -> None:
    """Tokens equal the reference up to its first near tie, which must not come before ``least`` tokens."""
    clear = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), len(gaps))
    assert clear >= least, f"near tie after {clear} tokens: choose another prompt"
    assert list(tokens[:clear]) == list(expected[:clear])
