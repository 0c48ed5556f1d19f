"""Two journeys through the lab, on a real engine with the random model: a teacher before a class, and a learner alone.

What is asserted is what is drawn: the figures in the page, and the elements on the screen.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Lab, picture
from tests.browser.test_lab import read, send, step_tokens, wait

pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Browser, tiny: Lab) -> Iterator[Page]:
    """The lab in a window of its own; at the end nothing was complained about."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    made = context.new_page()
    made.set_default_timeout(30_000)
    complaints: list[str] = []
    made.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    made.on("pageerror", lambda e: complaints.append(str(e)))
    made.goto(tiny.address)
    made.wait_for_function("window.__lab?.sections.head?.open === true && window.Plotly !== undefined", timeout=120_000)
    yield made
    context.close()
    assert complaints == []


def cells(page: Page, kind: str = "z") -> list[int]:
    """The pool's cells in the order of their blocks."""
    return read(page, f"f.pool.data[0].{kind}.flat()")


def test_a_teacher_shows_a_preemption_and_steps_through_it(page: Page):
    page.select_option("select[aria-label='Slow motion']", "5")
    page.click(".lab-scenes summary")
    page.click(".lab-scenelist [data-scene='small-pool']")
    wait(page, "s.story?.some(e => e.kind === 'preempt')", 60)
    page.locator(".lab").press(" ")
    wait(page, "s.head.mode === 'paused'")
    page.wait_for_timeout(600)  # the last steps before the pause are told
    last = read(page, "s.clock.last")
    page.locator(".lab-head strong").click()
    page.keyboard.press("s")
    wait(page, f"s.clock.last === {last + 1}")
    # Rewind to the preemption by the log, and read what happened there.
    entry = page.locator(".lab-story li[data-kind='preempt'] button").first
    text = entry.inner_text()
    step = int(text.split()[1])
    assert "will be computed again" in text
    entry.hover()
    expect(page.locator(".lab-definition")).to_contain_text("Preemption:")
    entry.click()
    wait(page, f"s.clock.cursor === {step}")
    for name in ("batch", "timeline"):
        wait(page, f"f.{name}.layout.shapes.find(x => x.name === 'cursor').x0 === {step}")
    assert step in read(page, "f.timeline.data.find(t => t.name === 'preempt').x")
    expect(page.locator(".lab-moment")).to_contain_text(f"Step {step}:")
    # The victim waits at this step, and computes its tokens again at a later one: hatched.
    victim = read(page, f"s.story.find(e => e.kind === 'preempt' && e.step === {step}).number")
    state = read(page, f"s.requests.find(r => r.number === {victim})")
    assert state["state"] == "waiting"
    assert victim not in {row["number"] for row in read(page, "s.tables")}
    page.click(f".lab-request[data-id='{state['id']}'] .lab-choose")
    wait(page, f"s.focus?.id === '{state['id']}'")
    # One step on and back by the keyboard: only the cursor moves, the frames stand still.
    frame = read(page, "f.batch.layout.xaxis.range")
    page.locator(".lab-head strong").click()
    page.keyboard.press("ArrowRight")
    wait(page, f"s.clock.cursor === {step + 1} || s.clock.cursor === null")
    page.keyboard.press("ArrowLeft")
    wait(page, f"f.batch.layout.shapes.find(x => x.name === 'cursor').x0 === {step}")
    assert read(page, "f.batch.layout.xaxis.range") == frame
    page.keyboard.press("l")
    page.select_option("select[aria-label='Slow motion']", "")
    page.locator(".lab-head strong").click()
    page.keyboard.press(" ")
    wait(page, "s.head.mode === 'running' && s.clock.cursor === null")
    wait(page, "s.requests.every(r => r.state === 'finished')", 90)
    assert read(page, "s.tiles.gauges.find(g => g.name === 'preemptions').value") > 0


def test_a_learner_finds_where_a_token_lies(page: Page):
    page.keyboard.press("n")
    expect(page.locator("#lab-prompt")).to_be_focused()
    page.fill("#lab-max_tokens", "40")
    page.fill("#lab-prompt", "The first step computes the whole prompt, the others one token each.")
    page.keyboard.press("Enter")
    wait(page, "s.requests?.[0]?.state === 'finished'")
    prompt = read(page, "f.batch.data[0].customdata[0][3]")
    assert step_tokens(page, read(page, "s.clock.first")) == prompt
    page.keyboard.press("Escape")
    page.locator(".lab-head strong").click()
    page.keyboard.press("j")
    wait(page, "s.focus?.tokens.length === 40")
    page.click(".lab-tokens [data-index='17']")
    detail = page.locator(".lab-token")
    expect(detail).to_contain_text("K and V in block")
    words = detail.inner_text()
    block = int(words.split("K and V in block ")[1].split()[0])
    size = read(page, "s.head.config.block_size")
    position = read(page, "s.focus.prompt_tokens") + 17
    assert f"(logical {position // size}), slot {position % size}" in words
    shares = [float(text.split()[-2]) for text in page.locator(".lab-candidates li").all_inner_texts()]
    assert len(shares) >= 2
    assert page.locator(".lab-candidates .lab-taken").count() == 1
    # At that step the pool holds the block for this request, framed.
    page.click(".lab-token .lab-link")
    wait(page, "s.clock.cursor !== null")
    page.keyboard.press("ArrowRight")
    wait(page, "window.__lab.marked !== null")
    assert page.evaluate("window.__lab.marked") == block
    assert block in [cell[0] for cell in read(page, "s.tables[0].cells")]
    assert cells(page)[block - 1] >= 2, "it has its owner's colour"
    assert f"block {block}: A" in cells(page, "hovertext")[block - 1]
    picture(page, "lab-token")


def test_the_keyboard_does_all_of_it(page: Page):
    page.locator(".lab-head strong").click()
    page.keyboard.press("?")
    listed = set(page.locator(".lab-keys kbd").all_inner_texts())
    assert listed >= {"space", "s", "S", "r", "p", "n", "c", "d", "j", "k", "x", "X", "C", "q", "b", "m", "a", "f", "e", "?"}
    page.keyboard.press("r")
    page.keyboard.press("r")
    wait(page, "s.head.rate === 5")
    page.fill("#lab-max_tokens", "600")
    page.locator(".lab-head strong").click()
    page.keyboard.press("c")
    expect(page.locator("#lab-copies")).to_be_focused()
    page.keyboard.type("5")
    page.keyboard.press("Enter")
    wait(page, "s.requests?.length === 5")
    page.locator(".lab-head strong").click()
    page.keyboard.press(" ")
    wait(page, "s.head.mode === 'paused'")
    page.keyboard.press("j")
    wait(page, "s.focus !== null")
    chosen = read(page, "s.focus.id")
    assert read(page, f"s.requests.find(r => r.id === '{chosen}').live")
    page.keyboard.press("x")
    wait(page, f"!s.requests.find(r => r.id === '{chosen}').live")
    page.keyboard.press("q")
    wait(page, "f.pool.data.some(t => t.name === 'queue')")
    page.keyboard.press("b")
    wait(page, "f.batch.layout.yaxis.title.text.includes('√')")
    page.keyboard.press("A")
    wait(page, "s.clock.cursor !== null && s.clock.jumps.admit.includes(s.clock.cursor)")
    page.keyboard.press("X")
    wait(page, "s.requests.every(r => !r.live)")
    page.keyboard.press("C")
    wait(page, "s.requests.length === 0")


def test_reduced_motion_moves_nothing(browser: Browser, tiny: Lab):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.goto(tiny.address)
    page.wait_for_function("window.__lab?.sections.head?.open === true", timeout=120_000)
    send(page, "Anything.", max_tokens=12)
    wait(page, "s.requests?.[0]?.state === 'finished'")
    page.click(".lab-story li button >> nth=-1")
    wait(page, "s.clock.cursor !== null")
    page.wait_for_timeout(400)
    assert page.evaluate("document.getAnimations().filter(a => a.effect?.target?.closest?.('.lab')).length") == 0
    assert read(page, "['batch', 'timeline', 'pool'].every(n => !f[n].layout.transition)")
    context.close()


def test_a_changed_system_theme_changes_every_picture(page: Page):
    send(page, "Colours.", max_tokens=30)
    wait(page, "s.requests?.[0]?.tokens > 3")
    light = read(page, "f.pool.data[0].colorscale.map(c => c[1])")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.querySelector('.lab').dataset.theme === 'dark'")
    wait(page, f"f.pool.data[0].colorscale[8][1] !== '{light[8]}'")
    dark = read(page, "f.pool.data[0].colorscale.map(c => c[1])")
    assert not set(light) & set(dark)
    assert read(page, "f.batch.layout.font.color") == read(page, "f.timeline.layout.font.color")
