"""Every page in both themes and at three widths, from the running lab with the embedded model: ``make screenshots``.

They go to ``out/screenshots``; the ones that the README shows are copied into ``assets``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import ASSETS, LAB_STARTS, OUT, Lab
from tests.browser.test_lab import wait

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not os.environ.get("INFERENCE_LAB_SCREENSHOTS"), reason="pictures are made by make screenshots"),
]
WIDTHS = {390: 844, 1280: 800, 1920: 1080}
PAGES = {
    "lessons": "/lessons",
    "lesson": "/lesson?lesson=continuous-batching",
    "experiments": "/experiments",
    "runs": "/runs",
    "metrics": "/metrics",
    "calculators": "/calculators",
}
BEST = {"lab-light-1280": "lab", "lab-dark-1280": "lab-dark"}
"""Pictures of the README, by the name that they have there."""


@pytest.fixture(scope="module", params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def page(browser: Browser, lab: Lab, theme: str) -> Iterator[Page]:
    """One window a theme, on a lab that did something."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=theme)
    made = context.new_page()
    made.set_default_timeout(90_000)
    made.goto(lab.address)
    made.wait_for_function("window.__lab?.sections.head?.open === true", timeout=LAB_STARTS * 1000)
    made.wait_for_function("window.Plotly !== undefined")
    yield made
    context.close()


def shoot(page: Page, name: str, theme: str) -> None:
    """The page at every width."""
    OUT.mkdir(parents=True, exist_ok=True)
    for width, height in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(2000)
        file = OUT / f"{name}-{theme}-{width}.png"
        page.screenshot(path=file, full_page=width == 390)
        if file.stem in BEST:
            shutil.copy(file, ASSETS / f"{BEST[file.stem]}.png")


def test_the_lab(page: Page, theme: str):
    shoot(page, "first-visit", theme)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.select_option("select[aria-label='Scale of the batch']", "root")
    page.fill("#lab-max_tokens", "72")
    page.click("#lab-samples")
    wait(page, "s.requests?.length === 4 && s.requests.every(r => r.tokens > 24)", 120)
    page.keyboard.press("Escape")
    page.click(".lab-run")
    wait(page, "s.head.mode === 'paused'", 60)
    page.click(".lab-request .lab-choose >> nth=0")
    wait(page, "s.focus?.tokens.length > 12")
    page.click(".lab-tokens span >> nth=6")
    page.wait_for_selector(".lab-candidates li")
    shoot(page, "lab", theme)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.click(".lab-run")
    wait(page, "s.requests.every(r => r.state === 'finished')", 120)


@pytest.mark.parametrize("name", PAGES)
def test_every_other_page(page: Page, theme: str, lab: Lab, name: str):
    token = page.evaluate("new URLSearchParams(location.search).get('lab')")
    address = lab.address + PAGES[name]
    page.goto(address + ("&" if "?" in address else "?") + f"lab={token}")
    page.wait_for_selector("h1, h2")
    page.wait_for_timeout(2500)
    shoot(page, name, theme)
