"""Checks shared by the workload's data: each error names the field, its value, the limit and the way out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


class WorkloadError(ValueError):
    """Something about a workload that cannot work. The message names field, value, limit and way out."""


def whole(name: str, value: object, least: int, most: int) -> None:
    """Demand a whole number within limits.

    Raises:
        WorkloadError: it is none, or lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise WorkloadError(f"{name}={value!r} must be a whole number from {least:,} to {most:,}")


def number(name: str, value: object, least: float, most: float, *, above: bool = False) -> None:
    """Demand a finite number within limits (``above``: greater than ``least``, not equal).

    Raises:
        WorkloadError: it is none, or lies outside.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most or (above and value == least):  # type: ignore[operator]
        raise WorkloadError(f"{name}={value!r} must be a number {'above' if above else 'from'} {least:g} up to {most:,g}")


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Demand one of the named values.

    Raises:
        WorkloadError: it is another.
    """
    if value not in choices:
        raise WorkloadError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def label(name: str, value: object, longest: int, *, empty: bool = False) -> None:
    """Demand a text of bounded length.

    Raises:
        WorkloadError: it is none, too long, or empty where it may not be.
    """
    if not isinstance(value, str) or len(value) > longest or (not empty and not value.strip()):
        shown = repr(value) if not isinstance(value, str) or len(value) <= 40 else f"a text of {len(value):,} characters"
        raise WorkloadError(f"{name} is {shown}; it must be a text of {0 if empty else 1} to {longest:,} characters")


def assets(folder: str) -> Path:
    """Where a folder of ``assets/`` lies: beside the packages in a checkout, inside the app package in an install.

    Raises:
        FileNotFoundError: it lies in neither place.
    """
    root = Path(__file__).resolve().parents[2]
    for place in (root / "assets" / folder, root / "app" / "assets" / folder):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"the folder assets/{folder} is missing: the installation is not complete")
