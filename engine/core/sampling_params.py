"""How one request wants its tokens chosen and when it ends."""

from __future__ import annotations

import math

import msgspec

GREEDY_BELOW = 1e-5
"""Temperatures under this behave as greedy: dividing logits by them only adds rounding."""
MAX_SAMPLES = 64
"""Most samples (``n``) of one request."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings with vLLM's names and defaults; immutable, validated when built.

    A seeded request depends on its seed, its prompt and the index of the sample alone, never on what shares the batch
    or on preemption. So one ``SamplingParams`` with a seed, used for a batch, gives equal prompts equal texts and
    unrelated noise to different prompts, and ``n`` samples of one request differ.

    Raises:
        ValueError: naming the field, the value and the allowed range.
    """

    n: int = 1
    """Samples of the prompt; they share its KV blocks."""
    temperature: float = 1.0
    """0 (or anything under 1e-5) is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 or -1: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """> 1 divides (positive) or multiplies (negative) the logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was generated."""
    seed: int | None = None
    max_tokens: int | None = 16
    """Most tokens to generate. None: as many as context and pool allow."""
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop string before this many tokens."""
    stop: str | tuple[str, ...] = ()
    """Strings that end the text; they are not part of it and never appear in a stream."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output. The token is kept in ``token_ids`` and counted, as an end-of-sequence token is."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Candidates to report for each token beside the sampled one. -1: the whole vocabulary."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, MAX_SAMPLES)
        _number("temperature", self.temperature, 0.0, 1e6)
        _whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, exclusive_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, -1, None)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        self._normalise_stops()

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop, "a text or a list of texts")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop={text!r} must be a text of at least one character")
        ids = _sequence("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in ids:
            _whole("stop_token_ids", token, 0, None)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        assert not isinstance(self.stop, str)
        return self.stop

    @property
    def has_penalties(self) -> bool:
        """Whether tokens already seen change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _sequence(name: str, value: object, wanted: str) -> tuple:
    if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return tuple(value or ())


def _whole(name: str, value: object, least: int | None, most: int | None) -> None:
    limits = f"at least {least}" if most is None else f"from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number {limits}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name}={value} must be {limits}")


def _number(name: str, value: object, low: float, high: float, exclusive_low: bool = False) -> None:
    limits = f"{'above' if exclusive_low else 'from'} {low:g} up to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a number {limits}")
    if value < low or value > high or (exclusive_low and value == low):
        raise ValueError(f"{name}={value:g} must be {limits}")
