"""A request while the engine works on it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from engine.core.outputs import IncrementalDecoder, Logprob
from engine.core.sampling_params import SamplingParams
from engine.core.trace import RequestTrace


class Status(Enum):
    """Where a request stands. A preempted request is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence: a prompt and the tokens generated so far.

    ::

        tokens:   prompt . . . . . . . . | output . . . .
                  ├── num_computed_tokens ──┤            ├ num_tokens
                  K and V of these are stored

    There is no prefill and no decode state: a request needs ``num_tokens - num_computed_tokens`` more positions computed,
    which is the rest of the prompt at first and 1 later on. With ``async_scheduling`` the list of tokens ends in ``PENDING``
    while a step that samples for the request is in flight.
    """

    request_id: str
    token_ids: list[int]
    """The prompt (copied when the request is made) and the tokens generated so far."""
    params: SamplingParams
    _: KW_ONLY
    trace: RequestTrace
    max_tokens: int
    order: int = 0
    """Arrival order; the samples of a request share it."""
    priority: int = 0
    cache_salt: str | None = None
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    decoder: IncrementalDecoder | None = None
    prompt: str | None = None
    num_prompt_tokens: int = field(init=False)
    urgency: tuple[int, int, int] = field(init=False)
    """(priority, arrival, sample): smaller is served first. Set by the scheduler: its policy decides about priority."""
    status: Status = field(init=False, default=Status.WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    high_water: int = field(init=False, default=0)
    """Most tokens ever computed: what lies below it is recomputed."""
    block_table: list[int] = field(init=False, default_factory=list)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    num_cached_blocks: int = field(init=False, default=0)
    """Blocks at the start of the table that the prefix cache knows."""
    cached_uid: int | str | None = field(init=False)
    """Content identity of the last of them."""
    forks: list[Request] = field(init=False, default_factory=list)
    """Samples that wait for this one's prompt to be computed."""
    group: list[Request] = field(init=False, default_factory=list)
    """All samples of the request, this one included, when n > 1."""
    in_flight: int = field(init=False, default=0)
    """The last of the computed positions, as many as steps in flight compute: whether K and V are finite isn't known yet."""
    shared: bool = field(init=False, default=False)
    """Whether a partial block of the table may be shared, so that writing needs a look at the reference count."""
    logprobs: list[dict[int, Logprob]] = field(init=False, default_factory=list)
    text: str = field(init=False, default="")
    reported_text: int = field(init=False, default=0)
    """Characters of ``text`` that a stream has shown."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.urgency = (0, self.order, self.sample_index)
        self.cached_uid = self.cache_salt

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, pending ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids (a copy)."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The generated token ids, without pending ones (a copy)."""
        known = self.token_ids[self.num_prompt_tokens :]
        while known and known[-1] < 0:
            known.pop()
        return known

    def __repr__(self) -> str:
        done = f"{self.num_computed_tokens}/{self.num_tokens} tokens computed"
        return f"Request({self.request_id!r}, {self.status.value}, {done})"
