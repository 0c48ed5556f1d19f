"""Colours of both themes: who is who, and the paper they are drawn on.

Eight hues, spread in OKLab so that they stay apart for normal sight, protanopia, deuteranopia and tritanopia; each has
a contrast of at least 4.5 with the paper, so that a letter in the paper's colour reads on a filled cell and a filled cell
stands out from the paper. Requests beyond the eighth reuse the hues: the letter says which is which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

ThemeName = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one theme, as ``#rrggbb``."""

    name: ThemeName
    paper: str
    panel: str
    ink: str
    muted: str
    grid: str
    line: str
    alert: str
    good: str
    hues: tuple[str, ...]

    def hue(self, number: int) -> str:
        """The colour of the ``number``-th request."""
        return self.hues[number % len(self.hues)]

    def tint(self, number: int, share: float = 0.3) -> str:
        """The request's colour thinned to ``share`` on paper: the fill of a decode."""
        return mix(self.hue(number), self.paper, share)


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    panel="#f4f6f9",
    ink="#1c2430",
    muted="#5b6675",
    grid="#e3e7ed",
    line="#8a94a3",
    alert="#b3261e",
    good="#1f7a4d",
    hues=("#3049e6", "#d01a3f", "#236e52", "#7e19b5", "#713b13", "#b84c82", "#017fa2", "#725f05"),
)
DARK = Theme(
    name="dark",
    paper="#0e1117",
    panel="#171c26",
    ink="#eef1f6",
    muted="#a3adbb",
    grid="#2a313d",
    line="#6f7a8a",
    alert="#ff8a80",
    good="#7bd6a4",
    hues=("#30a1fd", "#fd6308", "#88ca97", "#a384c6", "#fbd67a", "#da788c", "#2dddf0", "#c8c006"),
)
THEMES: dict[str, Theme] = {"light": LIGHT, "dark": DARK}


def theme(name: str) -> Theme:
    """The theme of that name; anything unknown is light."""
    return THEMES.get(name, LIGHT)


def rgb(colour: str) -> tuple[float, float, float]:
    """``#rrggbb`` as three numbers from 0 to 1 (sRGB)."""
    return int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255


@lru_cache(maxsize=4096)
def mix(front: str, back: str, share: float) -> str:
    """``share`` of ``front`` over the rest of ``back``."""
    parts = (round(255 * (a * share + b * (1 - share))) for a, b in zip(rgb(front), rgb(back), strict=True))
    return "#{:02x}{:02x}{:02x}".format(*parts)


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
