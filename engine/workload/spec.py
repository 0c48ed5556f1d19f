"""A workload as data: what is asked of an engine, by whom, when, and until when.

Three kinds, by what is filled in:

* **generated** (the default): arrivals, lengths, prefix and priorities drawn from ``seed``;
* **listed**: ``requests`` says each one, for lessons that must come out exactly;
* **replayed**: ``trace`` names a recorded pattern of arrivals and lengths.

Each property has random numbers of its own: changing the output lengths leaves arrivals and prompts as they were.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from engine.core.config import EngineConfig
from engine.core.sampling_params import SamplingParams
from engine.workload.arrivals import Arrivals, ArrivalStream
from engine.workload.check import WorkloadError, label, number, whole
from engine.workload.lengths import MAX_TOKENS, Lengths
from engine.workload.traces import TraceRef, replayed

MAX_REQUESTS = 100_000
MAX_SECONDS = 24 * 3600.0
MAX_STEPS = 10_000_000
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_GENERATED_ID = re.compile(r"r\d+")
_ARRIVALS, _PROMPTS, _OUTPUTS, _PREFIXES = range(4)
_NOT_HERE = {
    "max_tokens": "output says how many tokens are generated",
    "ignore_eos": "it is a field of the workload itself",
    "n": "a workload's requests have one sample each",
}


class Prefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text that a share of the requests begins with.

    The prefix is part of the prompt's length. A share of 0.25 means exactly every fourth request. With ``variants`` > 1
    the sharing requests use one of that many prefixes, at random.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    tokens: int = 0
    share: float = 1.0
    variants: int = 1

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, 0, MAX_TOKENS)
        number("share", self.share, 0.0, 1.0)
        whole("variants", self.variants, 1, 1000)


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When no more requests come: whatever is reached first. Requests under way run to their end.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    requests: int | None = None
    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.requests is not None:
            whole("requests", self.requests, 1, MAX_REQUESTS)
        if self.seconds is not None:
            number("seconds", self.seconds, 0.0, MAX_SECONDS, above=True)
        if self.steps is not None:
            whole("steps", self.steps, 1, MAX_STEPS)


class ListedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request (or ``copies`` of it, ``every`` seconds or steps apart) of a listed workload.

    Either ``prompt`` is its text, or ``prompt_tokens`` says how long a text to make.

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    at: float = 0.0
    """When it is due: seconds from the start, or the step."""
    prompt: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 32
    prefix_tokens: int = 0
    """The first tokens of the prompt that it shares with all requests of the same ``prefix_id``."""
    prefix_id: int = 0
    priority: int = 0
    cache_salt: str | None = None
    id: str = ""
    """A name for claims and pictures; with copies a number is appended."""
    copies: int = 1
    every: float = 0.0

    def __post_init__(self) -> None:
        number("at", self.at, 0.0, float(MAX_STEPS))
        number("every", self.every, 0.0, MAX_SECONDS)
        whole("output_tokens", self.output_tokens, 1, MAX_TOKENS)
        whole("copies", self.copies, 1, 1000)
        whole("priority", self.priority, -(2**31), 2**31)
        whole("prefix_id", self.prefix_id, 0, 999)
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise WorkloadError("a request needs either prompt (a text) or prompt_tokens (a length), one of the two")
        if self.prompt is not None:
            label("prompt", self.prompt, 1_000_000)
            if self.prefix_tokens:
                raise WorkloadError(f"prefix_tokens={self.prefix_tokens} needs prompt_tokens: a given text is sent as it is")
        else:
            whole("prompt_tokens", self.prompt_tokens, 1, MAX_TOKENS)
            whole("prefix_tokens", self.prefix_tokens, 0, (self.prompt_tokens or 1) - 1)
        if self.cache_salt is not None:
            label("cache_salt", self.cache_salt, 200)
        if self.id and (not _ID.fullmatch(self.id) or _GENERATED_ID.fullmatch(self.id)):
            raise WorkloadError(
                f"id={self.id!r} must begin with a letter, hold letters, digits and _ only, at most 32 of them, and not "
                f"look like r0, r1 …, the names of requests without one"
            )


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of an engine; see the module. Immutable, validated when built.

    Raises:
        WorkloadError: naming the field, its value, the limit and the way out.
    """

    arrivals: Arrivals = Arrivals()
    prompt: Lengths = Lengths(tokens=64)
    """Length of the prompts, common prefix included."""
    output: Lengths = Lengths(tokens=32)
    """Tokens to generate (``max_tokens``)."""
    prefix: Prefix = Prefix()
    priorities: tuple[int, ...] = (0,)
    """Taken in turn, request after request; smaller is served first under ``scheduling_policy='priority'``."""
    sampling: dict[str, Any] = {}
    """SamplingParams by name, without ``max_tokens``. Greedy unless it sets a temperature."""
    ignore_eos: bool = True
    """Generate exactly the wanted number of tokens, whatever the model would like. False: the model may stop earlier."""
    seed: int = 0
    stop: Stop = Stop()
    requests: tuple[ListedRequest, ...] = ()
    trace: TraceRef | None = None

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0, 2**32 - 1)
        if not 1 <= len(self.priorities) <= 1000:
            raise WorkloadError(f"priorities has {len(self.priorities)} entries; it must have 1 to 1,000")
        for priority in self.priorities:
            whole("priorities", priority, -(2**31), 2**31)
        if not isinstance(self.ignore_eos, bool):
            raise WorkloadError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        self._check_sampling()
        if self.requests and self.trace:
            raise WorkloadError("requests and trace are both given: a workload is either listed or replayed, remove one")
        if self.requests:
            self._check_requests()
        elif self.trace is None:
            self._check_generated()

    def _check_sampling(self) -> None:
        for name, reason in _NOT_HERE.items():
            if name in self.sampling:
                raise WorkloadError(f"sampling holds {name}, but {reason}: remove it")
        unknown = sorted(set(self.sampling) - set(SamplingParams.__struct_fields__))
        if unknown:
            raise WorkloadError(
                f"sampling has no setting {unknown[0]!r}; the settings are {', '.join(SamplingParams.__struct_fields__)}"
            )
        try:
            self.params(1)
        except (ValueError, TypeError) as error:
            raise WorkloadError(f"sampling: {error}") from None

    def _check_requests(self) -> None:
        count = sum(request.copies for request in self.requests)
        if count > MAX_REQUESTS:
            raise WorkloadError(f"requests holds {count:,} with all copies; at most {MAX_REQUESTS:,} are possible")
        names: set[str] = set()
        for request in self.requests:
            for copy in range(request.copies):
                name = _name(request, copy)
                if name and name in names:
                    raise WorkloadError(f"id={name!r} occurs twice in requests: give each its own, or none")
                names.add(name)
            last = request.at + request.every * (request.copies - 1)
            if self.arrivals.unit == "steps" and (request.at != int(request.at) or request.every != int(request.every)):
                raise WorkloadError(
                    f"at={request.at:g}, every={request.every:g}: arrivals in steps are whole numbers; "
                    f"round them, or set arrivals.unit='seconds'"
                )
            if self.arrivals.unit == "seconds" and last > MAX_SECONDS:
                raise WorkloadError(f"at={last:g} seconds is beyond a day ({MAX_SECONDS:,.0f} s): shorten the list")

    def _check_generated(self) -> None:
        if self.stop == Stop():
            raise WorkloadError(
                "stop is empty, so requests would come for ever: set stop.requests, stop.seconds or stop.steps"
            )
        if self.prefix.tokens and self.prefix.share and self.prefix.tokens >= self.prompt.least:
            raise WorkloadError(
                f"prefix.tokens={self.prefix.tokens:,} must be less than the shortest prompt, {self.prompt.least:,} tokens: "
                f"shorten the prefix or lengthen the prompts"
            )

    @property
    def kind(self) -> str:
        """'listed', 'replayed' or 'generated'."""
        return "listed" if self.requests else "replayed" if self.trace else "generated"

    @property
    def closed(self) -> bool:
        """Whether requests wait for answers of earlier ones."""
        return self.kind == "generated" and self.arrivals.process == "closed"

    def params(self, output_tokens: int) -> SamplingParams:
        """The sampling settings of a request that generates ``output_tokens``."""
        settings = {"temperature": 0.0, **self.sampling}
        if isinstance(settings.get("stop"), list):
            settings["stop"] = tuple(settings["stop"])
        return SamplingParams(**settings, max_tokens=output_tokens, ignore_eos=self.ignore_eos)


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload, ready to be made into a prompt and sent."""

    index: int
    name: str
    """The listed id, or r0, r1 … by index."""
    due: float
    """Seconds from the start, or the step (a whole number)."""
    prompt_tokens: int
    """Wanted length; 0 where ``prompt`` is given."""
    output_tokens: int
    prefix_tokens: int = 0
    prefix_id: int = 0
    priority: int = 0
    cache_salt: str | None = None
    prompt: str | None = None


class RequestSource:
    """The requests of a generated workload, in order, without their due times."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self._rngs = {stream: np.random.default_rng([spec.seed, stream]) for stream in (_PROMPTS, _OUTPUTS, _PREFIXES)}
        self.count = 0

    def next(self, due: float) -> PlannedRequest:
        """The next request, due then."""
        spec, index = self._spec, self.count
        self.count += 1
        prefix = spec.prefix
        variant = int(self._rngs[_PREFIXES].integers(prefix.variants)) if prefix.variants > 1 else 0
        shares = prefix.tokens > 0 and math.floor((index + 1) * prefix.share + 1e-9) > math.floor(
            index * prefix.share + 1e-9
        )
        return PlannedRequest(
            index=index,
            name=f"r{index}",
            due=whole_step(due) if spec.arrivals.unit == "steps" else due,
            prompt_tokens=spec.prompt.draw(self._rngs[_PROMPTS]),
            output_tokens=spec.output.draw(self._rngs[_OUTPUTS]),
            prefix_tokens=prefix.tokens if shares else 0,
            prefix_id=variant if shares else 0,
            priority=spec.priorities[index % len(spec.priorities)],
        )


def whole_step(due: float) -> float:
    """The step in which a moment falls (a hair before a whole number is rounding, and counts as it)."""
    return float(math.floor(due + 1e-9)) if math.isfinite(due) else due


def arrival_stream(spec: WorkloadSpec) -> ArrivalStream:
    """The due times of a generated open-loop workload."""
    return ArrivalStream(spec.arrivals, np.random.default_rng([spec.seed, _ARRIVALS]))


def listed(spec: WorkloadSpec) -> list[PlannedRequest]:
    """The requests of a listed or replayed workload, by due time; equal ones in the order of the list."""
    items = list(_items(spec))
    if spec.stop.requests is not None:
        items = sorted(items, key=lambda item: item.due)[: spec.stop.requests]
    limit = spec.stop.steps if spec.arrivals.unit == "steps" else spec.stop.seconds
    if limit is not None:
        items = [item for item in items if item.due < limit]
    items.sort(key=lambda item: item.due)
    return [msgspec.structs.replace(item, index=index, name=item.name or f"r{index}") for index, item in enumerate(items)]


def _items(spec: WorkloadSpec) -> Iterator[PlannedRequest]:
    steps = spec.arrivals.unit == "steps"
    if spec.trace is not None:
        for row in replayed(spec.trace):
            yield PlannedRequest(
                index=0,
                name="",
                due=whole_step(row.arrival) if steps else row.arrival,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
            )
    for request in spec.requests:
        for copy in range(request.copies):
            yield PlannedRequest(
                index=0,
                name=_name(request, copy),
                due=request.at + copy * request.every,
                prompt_tokens=request.prompt_tokens or 0,
                output_tokens=request.output_tokens,
                prefix_tokens=request.prefix_tokens,
                prefix_id=request.prefix_id,
                priority=request.priority,
                cache_salt=request.cache_salt,
                prompt=request.prompt,
            )


def _name(request: ListedRequest, copy: int) -> str:
    return f"{request.id}{copy}" if request.id and request.copies > 1 else request.id


def plan(spec: WorkloadSpec) -> list[PlannedRequest]:
    """Every request of an open-loop workload with its due time; the same spec gives the same list.

    A stop in the other unit (seconds for arrivals in steps, or the reverse) is for the run to see and not applied here.

    Raises:
        WorkloadError: a closed loop (its due times follow the answers), or no stop in requests or the arrivals' own unit.
    """
    if spec.kind != "generated":
        return listed(spec)
    if spec.closed:
        raise WorkloadError(
            "process='closed' can't be planned: a request is due when an earlier one is answered. Run it instead"
        )
    limit = spec.stop.steps if spec.arrivals.unit == "steps" else spec.stop.seconds
    if limit is None and spec.stop.requests is None:
        raise WorkloadError(
            f"arrivals in {spec.arrivals.unit} need stop.requests or stop.{spec.arrivals.unit} to be planned"
        )
    stream, source = arrival_stream(spec), RequestSource(spec)
    planned: list[PlannedRequest] = []
    while spec.stop.requests is None or len(planned) < spec.stop.requests:
        due = stream.pop()
        if limit is not None and due >= limit:
            break
        if len(planned) >= MAX_REQUESTS:
            raise WorkloadError(
                f"stop.{spec.arrivals.unit}={limit:g} at rate={spec.arrivals.rate:g} gives more than {MAX_REQUESTS:,} "
                f"requests: lower the rate or stop earlier"
            )
        planned.append(source.next(due))
    return planned


def check_fits(spec: WorkloadSpec, config: EngineConfig) -> None:
    """Refuse a workload with a request that this engine would refuse; a given prompt text counts as one token.

    Raises:
        WorkloadError: with the lengths, the limit and the way out.
    """
    if spec.kind == "generated":
        longest = [(spec.prompt.most, spec.output.most, "the longest request")]
    else:
        longest = [(item.prompt_tokens or 1, item.output_tokens, f"request {item.name}") for item in listed(spec)]
    for prompt, output, who in longest:
        if prompt + output > config.max_model_len:
            raise WorkloadError(
                f"{who} has {prompt:,} prompt and {output:,} output tokens, together {prompt + output:,}, but "
                f"max_model_len={config.max_model_len:,}: shorten it or raise max_model_len"
            )
        blocks = -(-(prompt + output - 1) // config.block_size)
        if config.use_kv_cache and blocks > config.num_kv_blocks:
            raise WorkloadError(
                f"{who} needs {blocks:,} KV blocks, but the pool has num_kv_blocks={config.num_kv_blocks:,}: "
                f"shorten it or raise num_kv_blocks"
            )
