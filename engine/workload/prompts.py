"""Prompts of a wanted length, cut from real text (``assets/prompts``, written for this project).

A prompt is a numbered page of essays::

    ┌ common prefix (shared by a share of the requests) ┐┌ this request's own text ────────────────────┐
    Guide 1. You are the patient assistant of a public …  17. The harbour wakes before the town does. …

The number comes first, so two requests without a common prefix differ within their first block and never hit the prefix
cache by accident. The same (seed, index) always gives the same text.

Token ids come from the tokenizer, sentence by sentence and kept, so that making a prompt costs no tokenising once the
sentences were seen. The cut may fall inside a word; the text for display then ends at the nearest whole word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

import msgspec

from engine.workload.check import WorkloadError, assets, number, whole
from engine.workload.lengths import MAX_TOKENS

Encode = Callable[[str], list[int]]
TOKENS_PER_WORD = 1.13
"""Tokens of a word of these texts, as SmolLM2's tokenizer makes them: used where no tokenizer is at hand."""


class Corpus(msgspec.Struct, frozen=True):
    """The text that prompts are cut from."""

    sentences: tuple[str, ...]
    guides: tuple[str, ...]
    """Texts of common prefixes, as a service sends them before every request."""
    questions: tuple[str, ...]
    """Short prompts as a person types them."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt. ``token_ids`` is None where no tokenizer was given: then the length is approximate."""

    text: str
    token_ids: tuple[int, ...] | None


@cache
def corpus() -> Corpus:
    """The texts of ``assets/prompts``.

    Raises:
        FileNotFoundError: the installation lacks them.
    """
    folder = assets("prompts")

    def paragraphs(name: str) -> tuple[str, ...]:
        text = (folder / name).read_text(encoding="utf-8")
        return tuple(" ".join(part.split()) for part in text.split("\n\n") if part.strip())

    sentences = tuple(s for part in paragraphs("passages.txt") for s in re.split(r"(?<=[.:?]) (?=[A-Z])", part))
    questions = (folder / "questions.txt").read_text(encoding="utf-8").splitlines()
    return Corpus(sentences, paragraphs("system.txt"), tuple(q.strip() for q in questions if q.strip()))


class PromptMaker:
    """Makes prompts of given lengths.

    Args:
        encode: text → token ids. Tokens that it puts before every text (a beginning-of-sequence token) are kept at the front
            of the prompt, once, and count. None: lengths are approximate.
        seed: another seed begins at other sentences.
        texts: what to cut from; default the project's own.
        tokens_per_word: for approximate lengths.

    Raises:
        WorkloadError: ``encode`` gives no tokens for a text.
    """

    def __init__(
        self,
        encode: Encode | None = None,
        seed: int = 0,
        texts: Corpus | None = None,
        tokens_per_word: float = TOKENS_PER_WORD,
    ) -> None:
        number("tokens_per_word", tokens_per_word, 0.1, 20.0)
        self._encode = encode
        self._seed = seed
        self._texts = texts or corpus()
        self._tokens_per_word = tokens_per_word
        self._known: dict[str, list[int]] = {}
        self._lead = list(encode("")) if encode else []

    def make(self, index: int, tokens: int, prefix_tokens: int = 0, prefix_id: int = 0) -> Prompt:
        """Prompt number ``index`` with ``tokens`` tokens, of which the first ``prefix_tokens`` are prefix ``prefix_id``.

        Raises:
            WorkloadError: a length is out of range, or the prefix fills the whole prompt.
        """
        whole("tokens", tokens, 1, MAX_TOKENS)
        whole("prefix_tokens", prefix_tokens, 0, tokens - 1)
        parts = [(self._own(index), tokens - prefix_tokens)]
        if prefix_tokens:
            parts.insert(0, (self._prefix(prefix_id), prefix_tokens))
        if self._encode is None:
            words = [_take(stream, max(1, round(count / self._tokens_per_word))) for stream, count in parts]
            return Prompt(" ".join(words), None)
        ids: list[int] = []
        texts: list[str] = []
        for stream, count in parts:
            self._fill(stream, count, ids, texts)
        return Prompt(" ".join(texts), tuple(ids))

    def ids_of(self, text: str) -> tuple[int, ...] | None:
        """The tokens of a given text; None without a tokenizer."""
        return tuple(self._encode(text)) if self._encode else None

    def _own(self, index: int) -> Iterator[str]:
        """The pieces of one request, without end: its number, then sentences from a place of its own on."""
        yield f"{index + 1}."
        sentences = self._texts.sentences
        place = self._seed * 61 + index * 37
        while True:
            yield sentences[place % len(sentences)]
            place += 1

    def _prefix(self, prefix_id: int) -> Iterator[str]:
        yield f"Guide {prefix_id + 1}."
        guides = self._texts.guides
        for step in range(len(guides)):
            yield guides[(prefix_id + step) % len(guides)]
        yield from self._own(prefix_id)

    def _fill(self, pieces: Iterator[str], count: int, ids: list[int], texts: list[str]) -> None:
        """Append exactly ``count`` tokens of the pieces to ``ids``, and about their text to ``texts``."""
        end = len(ids) + count
        if not ids:
            ids.extend(self._lead[:count])
        for piece in pieces:
            if len(ids) >= end:
                return
            found = self._tokens(piece if not texts else " " + piece)
            used = found[: end - len(ids)]
            ids.extend(used)
            words = piece.split(" ")
            texts.append(" ".join(words[: max(1, round(len(words) * len(used) / len(found)))]))

    def _tokens(self, piece: str) -> list[int]:
        found = self._known.get(piece)
        if found is None:
            assert self._encode is not None
            found = list(self._encode(piece))
            if self._lead and found[: len(self._lead)] == self._lead:
                found = found[len(self._lead) :]
            if not found:
                raise WorkloadError(f"the tokenizer gives no tokens for {piece[:40]!r}: prompts can't be made with it")
            if len(self._known) < 4096:
                self._known[piece] = found
        return found


def _take(pieces: Iterator[str], words: int) -> str:
    """Exactly ``words`` words of the pieces."""
    taken: list[str] = []
    while len(taken) < words:
        taken.extend(next(pieces).split(" "))
    return " ".join(taken[:words])
