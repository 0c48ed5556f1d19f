"""The engine's knobs, with the field's names, and the rules that hold between them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

DEFAULT_TOKEN_BUDGET = 512


class ConfigError(ValueError):
    """A knob, or a combination of knobs, that cannot work. The message names field, value, limit and way out."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine configuration: immutable, validated when built, the same names as vLLM where vLLM has the knob.

    Fields left at ``None`` are resolved when the object is built, so a constructed ``EngineConfig`` holds
    no ``None`` except ``seed`` and ``gpu_memory_utilization``. Units: lengths and budgets are tokens, sizes are blocks.

    Raises:
        ConfigError: (a ``ValueError``) naming the field, its value, the limit and what to change.
    """

    max_model_len: int = 2048
    """Longest sequence, prompt plus generated tokens, of one request."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step. None: 512, or ``max_model_len`` where prompts can't be split."""
    max_num_seqs: int = 16
    """Seats: how many requests can run at once."""
    block_size: int = 16
    """Tokens whose K and V one KV block holds."""
    num_kv_blocks: int = 512
    """Usable KV blocks in the pool (the null block 0 comes on top). vLLM: ``num_gpu_blocks_override``."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU's memory that the lab may fill: ``num_kv_blocks`` is then sized from what is free after weights,
    activations and graphs, when the engine is made. None: ``num_kv_blocks`` as given. Refused on a CPU."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Who is served first and who is preempted last: arrival order, or (priority, arrival)."""
    enable_chunked_prefill: bool | None = None
    """Split a long prompt over several steps. None: on wherever it is possible."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in one step while others exist. 0: no threshold."""
    enable_prefix_caching: bool | None = None
    """Reuse full blocks of a shared prefix. None: on wherever it is possible."""
    batching: Literal["continuous", "static"] = "continuous"
    """Requests join and leave every step, or a padded batch runs until its last member is done."""
    kv_layout: Literal["paged", "contiguous"] = "paged"
    """Blocks anywhere in the pool, or one contiguous extent a request."""
    reserve: Literal["max_model_len", "request"] = "max_model_len"
    """How much a contiguous extent reserves: the limit of any request, or this one's prompt + max_tokens."""
    use_kv_cache: bool = True
    """False: every step computes the whole sequence again."""
    async_scheduling: bool = False
    """Schedule each step while the one before it is still computed, so that the device need not wait for the host."""
    max_num_queued_requests: int = 1024
    """Longest waiting queue; a request beyond it is refused."""
    seed: int | None = 0
    """Seed of requests that bring none. None: a fresh one from the operating system."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "block_size", "num_kv_blocks", "max_num_queued_requests"):
            _require_int(name, getattr(self, name), 1)
        _require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _require_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _require_choice("batching", self.batching, ("continuous", "static"))
        _require_choice("kv_layout", self.kv_layout, ("paged", "contiguous"))
        _require_choice("reserve", self.reserve, ("max_model_len", "request"))
        _require_bool("use_kv_cache", self.use_kv_cache)
        _require_bool("async_scheduling", self.async_scheduling)
        if self.seed is not None:
            _require_int("seed", self.seed, 0)
        if self.gpu_memory_utilization is not None:
            self._check_memory_share(self.gpu_memory_utilization)
        self._resolve_combinations()
        self._check_token_budget()
        if self.kv_layout == "contiguous" and self.reserve == "max_model_len" and self.kv_capacity < self.max_model_len:
            raise ConfigError(
                f"reserve='max_model_len' reserves {self.max_model_len} tokens for each request, but the pool holds "
                f"num_kv_blocks={self.num_kv_blocks} x block_size={self.block_size} = {self.kv_capacity}: raise "
                f"num_kv_blocks to {-(-self.max_model_len // self.block_size)}, lower max_model_len, or set "
                f"reserve='request'"
            )

    def _check_memory_share(self, share: object) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={share!r} must be above 0 and at most 1: 0.9 lets the lab fill nine tenths of the "
                f"GPU's memory; leave it out to set num_kv_blocks instead"
            )
        if not self.use_kv_cache:
            raise ConfigError(
                f"gpu_memory_utilization={share:g} sizes the KV pool, and use_kv_cache=False has none: leave "
                f"gpu_memory_utilization out or set use_kv_cache=True"
            )

    def _resolve_combinations(self) -> None:
        if not self.use_kv_cache:
            if self.batching == "static":
                raise ConfigError(
                    "use_kv_cache=False runs with batching='continuous' only: set batching='continuous' or use_kv_cache=True"
                )
            if self.kv_layout == "contiguous":
                raise ConfigError(
                    "kv_layout='contiguous' needs a KV cache to lay out: set use_kv_cache=True or kv_layout='paged'"
                )
        obstacle = self._whole_prompt_reason()
        if obstacle and self.async_scheduling:
            raise ConfigError(
                f"async_scheduling=True can't work with {obstacle}, which decides a step by the tokens of the one before: "
                f"set async_scheduling=False or change {obstacle.split('=')[0]}"
            )
        self._resolve_switch("enable_chunked_prefill", obstacle)
        if not obstacle and self.kv_layout == "contiguous":
            obstacle = "kv_layout='contiguous'"
        self._resolve_switch("enable_prefix_caching", obstacle)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} splits prompts, which "
                "enable_chunked_prefill=False forbids: set the threshold to 0 or turn chunked prefill on"
            )

    def _resolve_switch(self, name: str, obstacle: str) -> None:
        value = getattr(self, name)
        if value is None:
            msgspec.structs.force_setattr(self, name, not obstacle)
            return
        _require_bool(name, value)
        if value and obstacle:
            raise ConfigError(f"{name}=True can't work with {obstacle}: set {name}=False or change {obstacle.split('=')[0]}")

    def _whole_prompt_reason(self) -> str:
        """The setting because of which a prompt is computed whole in every step, or ''."""
        if self.batching == "static":
            return "batching='static'"
        return "" if self.use_kv_cache else "use_kv_cache=False"

    def _check_token_budget(self) -> None:
        whole = not self.enable_chunked_prefill
        if self.max_num_batched_tokens is None:
            budget = max(DEFAULT_TOKEN_BUDGET, self.max_model_len) if whole else DEFAULT_TOKEN_BUDGET
            msgspec.structs.force_setattr(self, "max_num_batched_tokens", max(budget, self.max_num_seqs))
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if whole and self.token_budget < self.max_model_len:
            reason = self._whole_prompt_reason() or "enable_chunked_prefill=False"
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_model_len={self.max_model_len}, "
                f"but with {reason} a whole sequence must fit one step: raise max_num_batched_tokens to at least "
                f"{self.max_model_len}, lower max_model_len to at most {self.max_num_batched_tokens}, "
                f"or allow chunked prefill"
            )

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, resolved: tokens a step may compute."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    @property
    def prefix_caching(self) -> bool:
        """``enable_prefix_caching``, resolved."""
        return bool(self.enable_prefix_caching)

    @property
    def chunked_prefill(self) -> bool:
        """``enable_chunked_prefill``, resolved."""
        return bool(self.enable_chunked_prefill)

    @property
    def kv_capacity(self) -> int:
        """Tokens whose K and V the pool can hold."""
        return self.num_kv_blocks * self.block_size

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with ``changes`` applied and validated; the switches are kept as they were resolved.

        Raises:
            ConfigError: for an unknown field or an impossible value.
        """
        return build_config({**msgspec.structs.asdict(self), **changes})


def require_gpu(config: EngineConfig, device: str) -> None:
    """Refuse settings that only a GPU can follow.

    Args:
        config: the settings.
        device: what computes instead, for the message.

    Raises:
        ConfigError: saying what to set instead.
    """
    if config.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization={config.gpu_memory_utilization:g} sizes the KV pool from a GPU's memory, but here "
            f"{device} computes: leave gpu_memory_utilization out and set num_kv_blocks"
        )


def build_config(fields: dict[str, Any]) -> EngineConfig:
    """Build a configuration from plain data, turning an unknown name into an error that lists the known ones."""
    fields = dict(fields)
    if "num_gpu_blocks_override" in fields:
        fields["num_kv_blocks"] = fields.pop("num_gpu_blocks_override")
    unknown = sorted(set(fields) - set(EngineConfig.__struct_fields__))
    if unknown:
        raise ConfigError(
            f"unknown engine setting {unknown[0]!r}; the settings are {', '.join(EngineConfig.__struct_fields__)}"
        )
    return EngineConfig(**fields)


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
