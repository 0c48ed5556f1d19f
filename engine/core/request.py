"""A request while the engine works on it."""

from __future__ import annotations

from enum import Enum

from engine.core.outputs import IncrementalDecoder, Logprob
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace


class Status(Enum):
    """Where a request stands. A preempted request is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence: a prompt and the tokens generated so far.

    ::

        tokens:   prompt . . . . . . . . | output . . . .
                  ├── num_computed_tokens ──┤            ├ num_tokens
                  K and V of these are stored

    There is no prefill and no decode state: a request needs ``num_tokens - num_computed_tokens`` more positions computed,
    which is the rest of the prompt at first and 1 later on.
    """

    __slots__ = (
        "block_hashes", "block_table", "cache_salt", "cached_uid", "decoder", "eos_token_ids", "forks", "group",
        "high_water", "logprobs", "max_tokens", "num_cached_blocks", "num_computed_tokens", "num_prompt_tokens", "order",
        "params", "priority", "prompt", "reported_text", "request_id", "sample_index", "seed", "shared", "status", "text",
        "token_ids", "trace", "urgency",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        trace: RequestTrace,
        max_tokens: int,
        order: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        seed: int = 0,
        sample_index: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        decoder: IncrementalDecoder | None = None,
        prompt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.trace = trace
        self.max_tokens = max_tokens
        self.order = order
        """Arrival order; the samples of a request share it."""
        self.urgency: tuple[int, int, int] = (0, order, sample_index)
        """(priority, arrival, sample): smaller is served first. Set by the scheduler: its policy decides about priority."""
        self.priority = priority
        self.cache_salt = cache_salt
        self.seed = seed
        self.sample_index = sample_index
        self.eos_token_ids = eos_token_ids
        self.decoder = decoder
        self.prompt = prompt
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.high_water = 0
        """Most tokens ever computed: what lies below it is recomputed."""
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        """Blocks at the start of the table that the prefix cache knows."""
        self.cached_uid: int | str | None = cache_salt
        """Content identity of the last of them."""
        self.forks: list[Request] = []
        """Samples that wait for this one's prompt to be computed."""
        self.group: list[Request] = []
        """All samples of the request, this one included, when n > 1."""
        self.shared = False
        """Whether a partial block of the table may be shared, so that writing needs a look at the reference count."""
        self.logprobs: list[dict[int, Logprob]] = []
        self.text = ""
        self.reported_text = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The generated token ids (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        done = f"{self.num_computed_tokens}/{self.num_tokens} tokens computed"
        return f"Request({self.request_id!r}, {self.status.value}, {done})"
