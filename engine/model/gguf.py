"""Converting a GGUF file into a safetensors folder, with transformers doing the unpacking.

The tokenizer that transformers builds from such a file forgets how the text is split before the merges (the file only
names the rule, in ``tokenizer.ggml.pre``). Without SmolLM2's rule "12" may become one token where the model was trained
on "1", "2". So the pre-tokenizer is put back by that name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from engine.model.errors import ModelError

if TYPE_CHECKING:
    from engine.model.checkpoint import Progress

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _regex_split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "gpt-2": BYTE_LEVEL,
    "default": BYTE_LEVEL,
    "llama-bpe": _regex_split(_WORDS % r"\p{N}{1,3}"),
    "llama3": _regex_split(_WORDS % r"\p{N}{1,3}"),
    "qwen2": _regex_split(_WORDS % r"\p{N}"),
}
"""``tokenizer.ggml.pre`` → the pre-tokenizer in tokenizer.json's form."""


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write ``gguf`` as a checkpoint into the empty ``folder``: float32 weights, configuration, repaired tokenizer.

    Raises:
        ModelError: the file is damaged, or its tokenizer splits text by a rule that is not known.
        OSError: the folder can't be written.
    """
    first = f"converting {gguf.name} (first use only)"
    progress(first, 0.0)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    pre = _pre_rule(gguf)
    progress(f"{first}: loading the converter", 0.1)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(
            f"{gguf.name}: converting needs transformers, gguf and accelerate ({error}); pip install them"
        ) from None
    logging.disable_progress_bar()
    try:
        progress(f"{first}: tokenizer", 0.25)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        progress(f"{first}: weights", 0.4)
        packing = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, quantization_config=packing)
    except Exception as error:
        raise ModelError(
            f"{gguf} can't be converted ({type(error).__name__}: {error}); give a safetensors checkpoint"
        ) from None
    progress(f"{first}: writing the copy", 0.8)
    try:
        tokenizer.save_pretrained(str(folder))
        model.save_pretrained(str(folder))
        repair_tokenizer(folder / "tokenizer.json", pre)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    progress(first, 1.0)


def repair_tokenizer(path: Path, pre: str | None) -> None:
    """Put the pre-tokenizer named ``pre`` back into a tokenizer.json; None leaves it as it is (SentencePiece has none)."""
    if pre is None:
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    data["pre_tokenizer"] = PRE_TOKENIZERS[pre]
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _pre_rule(gguf: Path) -> str | None:
    """The rule's name, None for tokenizers that are not byte-level BPE."""
    try:
        from gguf import GGUFReader

        fields = GGUFReader(str(gguf)).fields
    except ImportError as error:
        raise ModelError(f"{gguf.name}: reading it needs the gguf package ({error}); pip install gguf") from None
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{gguf} is not a GGUF file, or it is damaged ({error}); download it again") from None
    model = fields.get("tokenizer.ggml.model")
    if model is None or model.contents() != "gpt2":
        return None
    rule = fields.get("tokenizer.ggml.pre")
    pre = str(rule.contents()) if rule is not None else "default"
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{gguf}: its tokenizer splits text by the rule {pre!r}, which is not known here "
            f"(known: {', '.join(PRE_TOKENIZERS)}); give the safetensors checkpoint of this model"
        )
    return pre
