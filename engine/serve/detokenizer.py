"""Token ids to text as they arrive: never half a character, never a lost space, a bounded amount of work a token.

Decoding each token alone is wrong twice: a character may be spread over several tokens (an emoji is four bytes), and some
decoders strip the space of the first token they see. Decoding everything again for each token is right and quadratic. So
there is one decoder for each family of vocabularies::

    byte level      token → bytes → incremental UTF-8                       GPT-2, Llama 3, Qwen, SmolLM2
    Metaspace       token → text with ▁ as a space; <0xE4> bytes collected  Llama 2, Mistral 7B
    anything else   decode a short window twice and take the difference

The text pieces of a decoder, joined, equal the tokenizer's decoding of the whole (after a prompt: without the stripping that
only a text's beginning gets).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from engine.core.outputs import IncrementalDecoder
from engine.model.tokenizer import Tokenizer

__all__ = ["Codec", "Tokenizer"]

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
MOST_HELD_BYTES = 128
"""Byte tokens a Metaspace decoder holds back at most, waiting for the run's end."""
MOST_HELD_TOKENS = 12
"""Tokens a window decoder holds back at most, waiting for a character to become whole."""


class Codec:
    """What the engine needs of a tokenizer (``engine.core.outputs.TextCodec``): decoders and labels."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.raw: RawTokenizer = tokenizer.raw
        self._decoder = json.loads(self.raw.decoder.__getstate__()) if self.raw.decoder is not None else None
        self._bytes: dict[int, bytes] = {}

    def decoder(self, prompt_token_ids: list[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for the tokens that follow ``prompt_token_ids``."""
        hidden = self.tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._family == "bytes":
            return ByteDecoder(self.token_bytes, hidden)
        at_start = all(token in self.tokenizer.special_ids for token in prompt_token_ids)
        if self._family == "metaspace":
            return MetaspaceDecoder(
                self.raw.id_to_token, hidden, self._marker, strip=at_start and self._strips, joins_bytes=self._joins_bytes
            )
        context = [token for token in prompt_token_ids[-MOST_HELD_TOKENS:] if token not in hidden]
        return WindowDecoder(lambda ids: self.raw.decode(ids, skip_special_tokens=False), hidden, context)

    def token_text(self, token_id: int) -> str:
        """One token as text, for labels; special tokens by their name, part of a character as a replacement character."""
        if self._family == "bytes":
            return self.token_bytes(token_id).decode("utf-8", "replace")
        token = self.raw.id_to_token(token_id)
        if token is None:
            return ""
        if self._family != "metaspace":
            return str(self.raw.decode([token_id], skip_special_tokens=False))
        byte = BYTE_TOKEN.match(token) if self._joins_bytes else None
        return bytes([int(byte[1], 16)]).decode("utf-8", "replace") if byte else str(token).replace(self._marker, " ")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token of a byte-level vocabulary stands for; none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.raw.id_to_token(token_id) or ""
            codes = [BYTE_OF_CHAR.get(char) for char in token]
            known = bytes(c for c in codes if c is not None) if None not in codes else token.encode()
            self._bytes[token_id] = known
        return known

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        decoder = self._decoder or {}
        return list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]

    @cached_property
    def _family(self) -> str:
        kinds = {step.get("type") for step in self._steps}
        if kinds == {"ByteLevel"}:
            return "bytes"
        if kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"} and self._marker and self._strip_is_plain:
            return "metaspace"
        return "other"

    @cached_property
    def _marker(self) -> str:
        """The character that stands for a space; '' where the decoder has none that is understood."""
        for step in self._steps:
            if step.get("type") == "Metaspace":
                return str(step.get("replacement", "\u2581"))
            if step.get("type") == "Replace" and step.get("content") == " ":
                return str(step.get("pattern", {}).get("String", ""))
        return ""

    @cached_property
    def _strip_is_plain(self) -> bool:
        """Whether the decoder strips at most one leading space."""
        plain = {"content": " ", "start": 1, "stop": 0}
        return all({k: s.get(k) for k in plain} == plain for s in self._steps if s.get("type") == "Strip")

    @cached_property
    def _joins_bytes(self) -> bool:
        """Whether tokens like <0xE4> are bytes of text."""
        return any(step.get("type") == "ByteFallback" for step in self._steps)

    @cached_property
    def _strips(self) -> bool:
        for step in self._steps:
            if step.get("type") == "Strip":
                return True
            if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                return True
        return False


class ByteDecoder:
    """Byte-level vocabularies: exact, because each token is a fixed run of bytes. Holds at most 3 bytes back."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        """Take one more token; return the text that became certain."""
        if token_id in self._hidden:
            return ""
        text = self._utf8.decode(self._token_bytes(token_id))
        held = self._utf8.getstate()[0]
        if (
            len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0
        ):  # Python waits for the end of a surrogate; no text has one
            text += self.finish()
        return text

    def finish(self) -> str:
        """What was held back: at most one replacement character."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class MetaspaceDecoder:
    """SentencePiece-style vocabularies: a marker stands for a space, and rare characters come as runs of byte tokens.

    The whole decoding turns a run of byte tokens into text if it is valid UTF-8 and into one replacement character a byte
    if not, so a run is held back until it ends (or grows beyond any character's need).
    """

    def __init__(
        self, token_of: Callable[[int], str | None], hidden: frozenset[int], marker: str, strip: bool, joins_bytes: bool
    ) -> None:
        self._token_of = token_of
        self._hidden = hidden
        self._marker = marker
        self._strip = strip
        self._joins_bytes = joins_bytes
        self._run = bytearray()

    def append(self, token_id: int) -> str:
        """Take one more token; return the text that became certain."""
        token = None if token_id in self._hidden else self._token_of(token_id)
        if token is None:
            return ""
        byte = BYTE_TOKEN.match(token) if self._joins_bytes else None
        if byte:
            self._run.append(int(byte[1], 16))
            return self._started(self._whole_characters()) if len(self._run) >= MOST_HELD_BYTES else ""
        return self._started(self._end_run() + token.replace(self._marker, " "))

    def finish(self) -> str:
        """What was held back; a character cut short gives one replacement character."""
        try:
            return self._started(self._end_run(cut=True))
        finally:
            self._run.clear()

    def _end_run(self, cut: bool = False) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError as error:
            if cut and error.reason == "unexpected end of data":
                return run[: error.start].decode("utf-8") + REPLACEMENT
            return REPLACEMENT * len(run)

    def _whole_characters(self) -> str:
        text, used = codecs.utf_8_decode(bytes(self._run), "replace", False)
        del self._run[:used]
        return text

    def _started(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDecoder:
    """Any other decoder: the text a token adds is what decoding a short window gains by it."""

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int], context: list[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window = list(context)
        self._read = len(context)
        self._shown = decode(self._window) if context else ""

    def append(self, token_id: int) -> str:
        """Take one more token; return the text that became certain."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and waiting < MOST_HELD_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """What was held back; a cut character gives one replacement character."""
        if len(self._window) == self._read:
            return ""
        text = self._emit(self._decode(self._window))
        kept = text.rstrip(REPLACEMENT)
        return kept + REPLACEMENT if kept != text else text

    def _emit(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._read :] or self._window
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return new


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet, inverted: printable bytes are themselves, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


BYTE_OF_CHAR = _byte_of_char()
