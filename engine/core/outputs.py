"""What a caller gets back: texts, tokens and metrics of a request; and how text is made from tokens."""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.core.trace import FinishReason, RequestTrace, StepTrace


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One candidate of one output token.

    ``logprob`` is the natural logarithm of its probability under the model, before penalties, temperature and truncation;
    ``rank`` is 1 for the most likely token.
    """

    logprob: float
    rank: int
    decoded_token: str = ""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One sample of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """Generated ids, a final end-of-sequence or stop token included."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per token: candidate id → Logprob, the sampled token included, best first."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the sample; None for end-of-sequence, length, abort and error."""
    error: str = ""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request with all its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTrace
    """Times and counts of the first sample; see ``LLM.request`` for the others."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""
        return self.metrics.cached_tokens


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of an engine, read at one moment between two steps. Blocks and tokens are counts."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    preemptions: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Neither referenced nor holding reusable content."""
    blocks_cached: int = 0
    """Not referenced, content reusable: can be taken at any time."""
    blocks_referenced: int = 0
    """Held by at least one request."""
    tokens_computed: int = 0
    """Positions that went through the model, recomputed ones included, padding not."""
    tokens_cached: int = 0
    """Prompt tokens taken from the prefix cache instead (``prefix_cache_hits`` in vLLM)."""
    tokens_recomputed: int = 0
    """Of ``tokens_computed``, those that had been computed before: the recompute tax, and all history without a KV cache."""
    tokens_lost: int = 0
    """Computed tokens thrown away by preemptions."""
    tokens_resumed: int = 0
    """Thrown-away tokens that a resumed request found again in the prefix cache: never counted as hits."""
    tokens_generated: int = 0
    tokens_padded: int = 0
    """Row-steps of a static batch that computed padding."""
    tokens_wasted: int = 0
    """Of ``tokens_computed``, those of requests that had ended already: ``async_scheduling`` learns it one step late."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_query_blocks: int = 0
    prefix_hit_blocks: int = 0
    evictions: int = 0
    """Cached blocks whose content was given up for new work."""
    kv_reserved_tokens: int = 0
    """Token slots of all blocks or extents held now."""
    kv_stored_tokens: int = 0
    """Token slots of these that hold K and V."""
    largest_hole: int = 0
    """Longest free run of blocks: what a contiguous request can get at most."""

    @property
    def kv_usage(self) -> float:
        """Share of the pool's blocks held by requests, 0 to 1."""
        return self.blocks_referenced / self.blocks_total if self.blocks_total else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Prefix-cache hit rate in tokens, 0 to 1; None before the first query."""
        return self.tokens_cached / self.prefix_queries if self.prefix_queries else None


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One generated token as text."""

    request_id: str
    index: int
    """0 for the first output token."""
    token_id: int
    text: str
    """Text that became certain with this token; '' while a character or a possible stop string is incomplete."""
    step: int
    top: tuple[tuple[int, str, float], ...] = ()
    """Most likely candidates: (token id, text, probability 0 to 1), the sampled one included."""


class OpenedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as it enters the engine."""

    trace: RequestTrace
    prompt: str
    """The text as typed (shortened when very long)."""
    prompt_token_ids: tuple[int, ...]


class ClosedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request (a sample) that ended: its final trace, and the text that had been held back."""

    trace: RequestTrace
    text: str
    """The whole output text."""


class Listener(Protocol):
    """Hears of everything as it happens, on the engine's thread: a host that streams, a file that records."""

    def opened(self, event: OpenedRequest) -> None:
        """A request (or a sample forked from one) entered the engine."""

    def token(self, event: TokenEvent) -> None:
        """A token was sampled."""

    def closed(self, event: ClosedRequest) -> None:
        """A request (a sample) ended."""

    def stepped(self, step: StepTrace) -> None:
        """A step is complete; its tokens and closings were reported before."""


class IncrementalDecoder(Protocol):
    """Turns a growing list of token ids into text without ever showing half a character."""

    def append(self, token_id: int) -> str:
        """Take one more token; return the text that became certain ('' while a character is incomplete)."""
        ...

    def finish(self) -> str:
        """No more tokens come: return what was held back, once."""
        ...


class TextCodec(Protocol):
    """What the engine needs of a tokenizer."""

    def decoder(self, prompt_token_ids: list[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for the tokens that follow ``prompt_token_ids``."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as text, for labels; may hold a replacement character."""
        ...
