"""Text to token ids and chat messages to a prompt, without loading transformers (which alone takes seconds)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from engine.model.checkpoint import Checkpoint, token_content
from engine.model.errors import ModelError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Args:
        raw: the ``tokenizers`` object; its own rules (BOS, splitting) are kept.
        special: texts of ``bos_token``, ``eos_token`` and so on, for the template.
        chat_template: a Jinja template, or None.
        add_bos: what tokenizer_config.json says about a leading BOS; None leaves it to ``raw``.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ) -> None:
        self.raw = raw
        self.special = dict(special or {})
        self.chat_template = chat_template
        bos = self.special.get("bos_token")
        self._bos_id = raw.token_to_id(bos) if bos else None
        self._add_bos = add_bos if self._bos_id is not None else None

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can be used."""
        return bool(self.chat_template)

    @cached_property
    def vocab_size(self) -> int:
        """Ids that have a text, added tokens included."""
        return int(self.raw.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are markers, not text."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the leading BOS where the model wants one. A lone surrogate becomes '?'."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        if not add_special_tokens or self._add_bos is None or self._bos_id is None:
            return list(self.raw.encode(clean, add_special_tokens=add_special_tokens).ids)
        ids = list(self.raw.encode(clean, add_special_tokens=self._add_bos).ids)
        return [self._bos_id, *ids] if self._add_bos and ids[:1] != [self._bos_id] else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids`` as a whole."""
        return str(self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation: a list of ``{"role": …, "content": …}``.

        Encode it with ``add_special_tokens=False``: the template writes the markers itself.

        Raises:
            ModelError: there is no template, the messages have another form, or the template refuses them.
        """
        if not self.chat_template:
            raise ModelError("this model has no chat template: send plain text (raw mode), or choose an instruct model")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise ModelError(f"a chat message must be {{'role': ..., 'content': ...}}, not {message!r:.200}")
        return _render(
            self.chat_template, messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, from its tokenizer.json; by way of transformers only where there is none.

    Raises:
        ModelError: it has no tokenizer that can be read.
    """
    settings = checkpoint.files.get("tokenizer_config.json", {})
    named = {**checkpoint.files.get("special_tokens_map.json", {}), **settings}
    special = {key: token_content(named.get(key)) for key in SPECIAL_NAMES if token_content(named.get(key))}
    add_bos = settings.get("add_bos_token")
    return Tokenizer(
        checkpoint.raw_tokenizer or _raw_tokenizer(checkpoint),
        special=special,
        chat_template=checkpoint.chat_template or _template(settings.get("chat_template")),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _raw_tokenizer(checkpoint: Checkpoint) -> RawTokenizer:
    assert checkpoint.folder is not None
    path = checkpoint.folder / "tokenizer.json"
    try:
        raw = RawTokenizer.from_file(str(path)) if path.is_file() else _by_transformers(checkpoint.folder)
    except Exception as error:
        raise ModelError(
            f"model={checkpoint.name!r}: no usable tokenizer in {checkpoint.folder} ({type(error).__name__}: {error}); "
            "a tokenizer.json is needed"
        ) from None
    raw.no_truncation()
    raw.no_padding()
    return raw


def _by_transformers(folder: Path) -> RawTokenizer:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).backend_tokenizer


def _template(value: object) -> str | None:
    """tokenizer_config.json gives one template or a list of named ones, of which "default" is the chat's."""
    if isinstance(value, list):
        by_name = {str(item.get("name")): item.get("template") for item in value if isinstance(item, Mapping)}
        value = by_name.get("default")
    return value if isinstance(value, str) else None


def _render(template: str, **values: Any) -> str:
    from jinja2 import TemplateError
    from jinja2.exceptions import TemplateRuntimeError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateRuntimeError(message)

    def to_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**values)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"the model's chat template can't render these messages: {error}") from None
