"""How a workload that runs stands: plain data, without what it takes to run one."""

from __future__ import annotations

from typing import Literal

import msgspec


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for and what came of it. Rates are requests per ``unit`` (a second, or a step).

    ``offered_rate`` is (due − 1) / (last due − first due), None for a closed loop and for fewer than two moments.
    ``achieved_rate`` is completed / (last completion − first due), None before a completion.
    """

    unit: Literal["seconds", "steps"]
    closed: bool
    due: int
    completed: int
    failed: int
    """Refused, aborted, or ended by an error."""
    in_flight: int
    offered_rate: float | None
    achieved_rate: float | None
    ended: bool
    """No more requests come."""
