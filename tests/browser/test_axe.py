"""Accessibility: axe-core finds nothing serious on any page, in both themes, empty and busy.

axe-core comes with the package ``axe-playwright-python``, so that nothing is loaded from elsewhere. Parts that Streamlit
draws and styles alone are left out by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import Lab

pytestmark = pytest.mark.browser
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
STREAMLITS = (
    ".stAppHeader",
    '[data-testid="stTooltipIcon"]',
    '[data-testid="stElementToolbar"]',
    '[data-testid="stDataFrame"]',
)
"""Parts that Streamlit draws and styles alone."""
PAGES = {
    "lessons": "/lessons",
    "runs": "/runs",
    "metrics": "/metrics",
    "calculators": "/calculators",
    "experiments": "/experiments",
}


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page in the theme that the test names."""
    theme = request.node.callspec.params.get("theme", "light") if hasattr(request.node, "callspec") else "light"
    width = request.node.callspec.params.get("width", 1280) if hasattr(request.node, "callspec") else 1280
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
    made = context.new_page()
    made.set_default_timeout(60_000)
    yield made
    context.close()


def findings(page: Page) -> list[dict[str, Any]]:
    """Serious and critical findings: rule, what it says, and the elements."""
    page.evaluate(AXE)
    options = {
        "resultTypes": ["violations"],
        "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]},
    }
    context = {"exclude": [[part] for part in STREAMLITS]}
    found = page.evaluate(f"axe.run({json.dumps(context)}, {json.dumps(options)})")
    return [
        {"rule": v["id"], "says": v["help"], "where": [(n["target"], n["failureSummary"]) for n in v["nodes"]]}
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]


def open_lab(page: Page, lab: Lab) -> None:
    page.goto(lab.address)
    page.wait_for_function("window.__lab?.sections.head?.open === true && window.Plotly !== undefined", timeout=120_000)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_lab_on_a_first_visit(page: Page, tiny: Lab, theme: str):
    open_lab(page, tiny)
    page.wait_for_timeout(500)
    assert findings(page) == []


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_the_lab_with_everything_open(page: Page, tiny: Lab, theme: str, width: int):
    open_lab(page, tiny)
    page.fill("#lab-max_tokens", "40")
    page.fill("#lab-copies", "12")
    page.click("#lab-send")
    page.wait_for_function("window.__lab.sections.requests?.some(r => r.tokens > 4)")
    page.click(".lab-request .lab-choose >> nth=0")
    page.wait_for_function("window.__lab.sections.focus?.tokens.length > 3")
    page.click(".lab-tokens span >> nth=1")
    page.wait_for_selector(".lab-candidates li")
    page.evaluate("document.querySelectorAll('.lab details').forEach(d => d.open = true)")
    page.click(".lab-queue")
    page.wait_for_timeout(500)
    assert findings(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_every_other_page(page: Page, tiny: Lab, name: str, theme: str):
    page.goto(tiny.address + PAGES[name])
    page.wait_for_selector("h1, h2", timeout=60_000)
    page.wait_for_timeout(1500)
    assert findings(page) == []


def test_what_axe_would_find(page: Page, tiny: Lab):
    open_lab(page, tiny)
    page.evaluate("document.querySelector('.lab-send').insertAdjacentHTML('beforeend', '<input id=\"nameless\">')")
    assert "label" in {finding["rule"] for finding in findings(page)}, "the check itself works"
