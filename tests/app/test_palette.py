"""The colours read in both themes, and stay apart for people with each kind of colour blindness."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import app.live
from app.figures.palette import DARK, LIGHT, Theme, contrast, rgb

CSS = (Path(app.live.__file__).parent / "static" / "live.css").read_text(encoding="utf-8")
# Severity 1.0 matrices of Machado, Oliveira and Fernandes (2009), for linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def oklab(linear: np.ndarray) -> np.ndarray:
    lms = (
        np.array(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ]
        )
        @ linear
    )
    return np.array(
        [
            [0.2104542553, 0.793617785, -0.0040720468],
            [1.9779984951, -2.428592205, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.808675766],
        ]
    ) @ np.cbrt(np.clip(lms, 0, None))


def linear(colour: str) -> np.ndarray:
    values = np.array(rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
class TestThemes:
    def test_a_letter_reads_on_its_hue_and_the_hue_on_paper(self, theme: Theme):
        assert min(contrast(hue, theme.paper) for hue in theme.hues) >= 4.5

    def test_texts_read_on_paper_and_panel(self, theme: Theme):
        for colour in (theme.ink, theme.muted, theme.alert, theme.good):
            assert contrast(colour, theme.paper) >= 4.5
            assert contrast(colour, theme.panel) >= 4.5

    def test_ink_reads_on_the_light_fill_of_a_decode(self, theme: Theme):
        assert min(contrast(theme.ink, theme.tint(number, 0.4)) for number in range(8)) >= 4.5

    @pytest.mark.parametrize("sight", BLINDNESS)
    def test_hues_stay_apart(self, theme: Theme, sight: str):
        seen = [oklab(np.clip(BLINDNESS[sight] @ linear(hue), 0, 1)) for hue in theme.hues]
        assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) >= 0.06

    def test_the_style_sheet_has_the_same_colours(self, theme: Theme):
        blocks = re.findall(r"\.lab(?:\[data-theme=\"dark\"\])? \{([^}]*--paper[^}]*)\}", CSS)
        block = blocks[theme.name == "dark"]
        found = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
        assert [found[f"hue-{i}"] for i in range(8)] == list(theme.hues)
        for name in ("paper", "panel", "ink", "muted", "line", "alert", "good"):
            assert found[name] == getattr(theme, name), name
        assert contrast(found["on-accent"], found["accent"]) >= 4.5
        assert contrast(found["accent"], found["paper"]) >= 3
