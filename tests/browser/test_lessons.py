"""Lessons in a real browser: a whole one by keyboard only, axe without serious findings, reload, narrow screens."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from lessons.catalogue import catalogue
from lessons.judge import right_option
from lessons.model import Check, Explain, Explore, Lesson, Predict, RunBlock
from tests.browser.conftest import OUT, Lab, download
from tests.lessons.independent import ANSWERS

pytestmark = pytest.mark.browser
AXE = "axe-core@4.14.1"
EXPECTED = ("_stcore/health", "_stcore/host-config")
"""Streamlit looks for its base path at these addresses first, below the page's own; a 404 there is its normal course."""


@pytest.fixture(scope="session")
def axe_source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core from npm, fetched for the test."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so axe-core can't be fetched")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run([npm, "pack", AXE], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    packed = next(iter(folder.glob("*.tgz")), None)
    if done.returncode or packed is None:
        pytest.skip(f"axe-core can't be fetched: {done.stderr[-200:]}")
    with tarfile.open(packed) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member
        return member.read().decode()


Visit = Any


@pytest.fixture
def visit(browser: Browser, tiny: Lab) -> Iterator[Visit]:
    """Open a page of the lab; at the end nothing may have been complained about."""
    contexts = []
    complaints: list[str] = []

    def open_page(path: str, width: int = 1280, height: int = 800, theme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda e: complaints.append(f"page error: {e}"))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" and not _known(m.location) else None)
        page.on("request", lambda r: None if _ours(r.url, tiny.port) else complaints.append(f"request to {r.url}"))
        page.goto(f"{tiny.address}/{path}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def _known(location: Any) -> bool:
    return any(part in str(location) for part in EXPECTED)


def _ours(url: str, port: int) -> bool:
    return url.startswith(("data:", "blob:", f"http://localhost:{port}/", f"ws://localhost:{port}/"))


def holder(key: str) -> str:
    """The element that Streamlit gives a key to."""
    return ".st-key-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in key)


def settled(page: Page) -> None:
    """Wait until Streamlit has had nothing to do for a while: a busy server may not have begun when one looks once."""
    page.evaluate("window.restless = performance.now()")
    page.wait_for_function("""() => {
        const state = document.querySelector('[data-testid=stApp]')?.dataset.testScriptState, now = performance.now();
        if (state !== 'notRunning') window.restless = now;
        return now - window.restless > 300;
    }""")


class Keyboard:
    """Uses a page with the keyboard alone: Tab to get somewhere, keys to act there."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.tabs = 0

    def to(self, selector: str, most: int = 80) -> None:
        """Tab until the focus is in (or on) the element."""
        self.page.locator(selector).first.wait_for()
        inside = (
            "s => { const f = document.activeElement; return [...document.querySelectorAll(s)].some(e => e.contains(f)); }"
        )
        for _ in range(most):
            if self.page.evaluate(inside, selector):
                return
            self.page.keyboard.press("Tab")
            self.tabs += 1
        raise AssertionError(f"{selector} is not reached within {most} tabs")

    def press(self, selector: str) -> None:
        """Reach a button and press it."""
        self.to(f"{selector} button")
        self.page.keyboard.press("Enter")
        settled(self.page)

    def choose(self, selector: str, place: int) -> None:
        """Reach a group of radio buttons and choose the one at this place."""
        self.to(f"{selector} input[type=radio]")
        self.page.keyboard.press("Space")
        for _ in range(place):
            self.page.keyboard.press("ArrowDown")
        settled(self.page)

    def pick(self, selector: str, text: str) -> None:
        """Reach a select box and pick an option by typing."""
        self.to(f"{selector} input")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")
        settled(self.page)


def play(keys: Keyboard, lesson: Lesson) -> None:
    """Do the whole lesson, rightly."""
    page = keys.page
    for place, card in enumerate(lesson.cards):
        for block in card.blocks:
            match block:
                case Predict():
                    right = ANSWERS[lesson.id][block.id]
                    field = holder(f"{lesson.id}-{block.id}")
                    if block.kind == "number":
                        keys.to(f"{field} input")
                        page.keyboard.type(f"{right:g}")
                        page.keyboard.press("Enter")
                        settled(page)
                    elif block.kind == "choice":
                        keys.choose(field, [option.id for option in block.options].index(right))
                        keys.press(holder(f"lock-{lesson.id}-{block.id}"))
                case RunBlock():
                    keys.press(holder(f"run-{lesson.id}-{block.id}"))
                    expect(page.locator(holder(f"run-{lesson.id}-{block.id}"))).to_contain_text("Run again", timeout=60_000)
                    settled(page)
                case Explain():
                    for _ in block.frames[1:]:
                        keys.press(holder(f"forth-{block.id}"))
                case Explore():
                    keys.press(holder(f"explore-{lesson.id}-{block.id}-run"))
                    page.locator("table").last.wait_for()
                case Check():
                    for question in block.questions:
                        entry = f"{block.id}/{question.id}"
                        ids = [option.id for option in question.options]
                        keys.choose(holder(f"{lesson.id}-{entry}"), ids.index(right_option(question)))
                        keys.press(holder(f"submit-{lesson.id}-{entry}"))
                case _:
                    pass
        keys.press(holder(f"continue-{place}"))


def test_a_whole_lesson_by_keyboard_only(visit: Visit):
    page = visit("lesson?lesson=continuous-batching")
    page.mouse.move(0, 0)
    page.locator(holder("continue-0")).wait_for(timeout=60_000)
    keys = Keyboard(page)
    play(keys, catalogue()["continuous-batching"])
    expect(page.locator(holder("lesson-done"))).to_contain_text("You finished this lesson")
    assert keys.tabs < 250, f"{keys.tabs} tabs: the focus does not follow what is new"
    page.reload()
    expect(page.locator(holder("lesson-done"))).to_contain_text("You finished this lesson", timeout=30_000)
    assert page.locator("[data-testid=stExpander]").count() >= 7, "every part can be opened again"
    expect(page.locator("[data-testid=stPlotlyChart]").first).to_be_visible()


def findings(page: Page, source: str) -> list[str]:
    """Serious findings of axe, one line each."""
    page.evaluate(source)
    result = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    serious = [violation for violation in result["violations"] if violation["impact"] in ("serious", "critical")]
    return [f"{v['id']}: {node['target']} {node['html'][:160]}" for v in serious for node in v["nodes"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(visit: Visit, axe_source: str, theme: str):
    page = visit("lessons", theme=theme)
    page.get_by_text("All words").wait_for(timeout=60_000)
    settled(page)
    assert not findings(page, axe_source)
    page = visit("lesson?lesson=continuous-batching", theme=theme)
    page.locator(holder("continue-0")).wait_for(timeout=60_000)
    lesson = catalogue()["continuous-batching"]
    keys = Keyboard(page)
    assert not findings(page, axe_source)
    keys.press(holder("continue-0"))
    for name, place in (("who-works", 0), ("join-late", None)):
        field = holder(f"{lesson.id}-{name}")
        if place is None:
            keys.to(f"{field} input")
            page.keyboard.type("4")
            assert not findings(page, axe_source)
            page.keyboard.press("Enter")
            settled(page)
        else:
            keys.choose(field, place)
            keys.press(holder(f"lock-{lesson.id}-{name}"))
    keys.press(holder(f"run-{lesson.id}-run-late"))
    page.locator("[data-testid=stPlotlyChart]").first.wait_for(timeout=60_000)
    settled(page)
    assert not findings(page, axe_source)


def test_the_picture_stays_in_view(visit: Visit):
    page = visit("lesson?lesson=paged-attention")
    keys = Keyboard(page)
    page.locator(holder("paged-attention-together-max")).wait_for(timeout=60_000)
    keys.to(f"{holder('paged-attention-together-max')} input")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    settled(page)
    keys.press(holder("run-paged-attention-run-max"))
    expect(page.locator("[data-testid=stPlotlyChart]").first).to_be_visible(timeout=60_000)
    keys.press(holder("forth-walk-max"))
    box = page.locator("[data-testid=stPlotlyChart]").first.bounding_box()
    assert box
    assert 0 <= box["y"] <= 500, "the picture is on the screen beside the text"
    assert page.locator(holder("forth-walk-max")).bounding_box()["y"] < 800


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_cut_off(visit: Visit, width: int, theme: str):
    page = visit("lesson?lesson=kv-cache", width=width, theme=theme)
    page.locator(holder("continue-0")).wait_for(timeout=60_000)
    settled(page)
    assert page.evaluate("document.querySelector('.stMain').scrollWidth <= window.innerWidth + 1"), "no sideways scrolling"
    OUT.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=Path(OUT) / f"lesson-{width}-{theme}.png")
    page = visit("lessons", width=width, theme=theme)
    page.get_by_text("All words").wait_for(timeout=60_000)
    assert page.evaluate("document.querySelector('.stMain').scrollWidth <= window.innerWidth + 1")


def test_the_resume_link_opens_the_same_progress_elsewhere(visit: Visit):
    page = visit("lesson?lesson=kv-cache")
    page.locator(holder("continue-0")).wait_for(timeout=60_000)
    page.locator(f"{holder('continue-0')} button").click()
    page.locator(holder("kv-cache-work-without")).wait_for()
    learner = page.evaluate("new URL(location.href).searchParams.get('learner')")
    other = visit(f"lesson?lesson=kv-cache&learner={learner}")
    other.locator(holder("kv-cache-work-without")).wait_for(timeout=60_000)
    other = visit(f"lessons?learner={learner}")
    other.get_by_text("Go on with: One request").or_(other.get_by_text("Start: One request")).wait_for(timeout=60_000)
    expect(other.get_by_text("Lesson: part 2 of 7").first).to_be_visible()


def test_a_progress_file_travels_and_a_wrong_one_is_refused(visit: Visit, tmp_path: Path):
    page = visit("lesson?lesson=kv-cache")
    page.locator(f"{holder('continue-0')} button").click()
    page.locator(holder("kv-cache-work-without")).wait_for(timeout=60_000)
    learner = page.evaluate("new URL(location.href).searchParams.get('learner')")
    page = visit(f"lessons?learner={learner}")
    kept = download(page, "Download your progress", tmp_path)
    other = visit("lessons")
    bad = tmp_path / "bad.json"
    bad.write_text('{"lessons": {"alchemy": {}}}')
    other.get_by_text("All words").wait_for(timeout=60_000)
    upload = other.locator("[data-testid=stFileUploaderDropzoneInput]")
    upload.set_input_files(bad)
    expect(other.get_by_text("This file was not taken")).to_be_visible()
    upload.set_input_files(kept)
    expect(other.get_by_text("Lesson: part 2 of 7").first).to_be_visible()
