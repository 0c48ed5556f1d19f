"""How long prompts and answers are."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from engine.workload.check import WorkloadError, choice, number, whole

MAX_TOKENS = 1_000_000


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of lengths in tokens.

    ``fixed``: always ``tokens``. ``uniform``: each whole number from ``low`` to ``high`` equally often. ``lognormal``:
    median ``tokens``, ln of the length has standard deviation ``sigma``; what falls beyond ``low`` or ``high`` is set to
    that limit (so the limits are a little more frequent, and the median stays).

    Raises:
        WorkloadError: naming the field, its value and the limit.
    """

    distribution: Literal["fixed", "uniform", "lognormal"] = "fixed"
    tokens: int = 64
    sigma: float = 0.5
    low: int = 1
    high: int = 4096

    def __post_init__(self) -> None:
        choice("distribution", self.distribution, ("fixed", "uniform", "lognormal"))
        whole("tokens", self.tokens, 1, MAX_TOKENS)
        number("sigma", self.sigma, 0.0, 5.0)
        whole("low", self.low, 1, MAX_TOKENS)
        whole("high", self.high, 1, MAX_TOKENS)
        if self.distribution != "fixed" and self.low > self.high:
            raise WorkloadError(f"low={self.low:,} is more than high={self.high:,}: lower low or raise high")
        if self.distribution == "lognormal" and not self.low <= self.tokens <= self.high:
            raise WorkloadError(
                f"tokens={self.tokens:,}, the median, lies outside low={self.low:,} to high={self.high:,}: "
                f"change tokens or the limits"
            )

    @property
    def least(self) -> int:
        """The shortest length it can give."""
        return self.tokens if self.distribution == "fixed" else self.low

    @property
    def most(self) -> int:
        """The longest length it can give."""
        return self.tokens if self.distribution == "fixed" else self.high

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        if self.distribution == "fixed":
            return self.tokens
        if self.distribution == "uniform":
            return int(rng.integers(self.low, self.high, endpoint=True))
        drawn = self.tokens * math.exp(self.sigma * float(rng.standard_normal()))
        return int(min(max(round(min(drawn, 1e9)), self.low), self.high))
