"""The live lab in a real browser, on the real engine with the embedded model: what a newcomer does in the first minutes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Lab, Open, picture

pytestmark = pytest.mark.browser


def read(page: Page, expression: str) -> Any:
    """Read from the data that the page drew."""
    return page.evaluate(f"(() => {{ const s = window.__lab.sections, f = window.__lab.figures; return {expression}; }})()")


def wait(page: Page, expression: str, seconds: float = 45) -> None:
    """Wait until the data that the page drew fulfils a condition."""
    body = f"(() => {{ const s = window.__lab.sections, f = window.__lab.figures; return {expression}; }})()"
    page.wait_for_function(body, timeout=seconds * 1000)


def kinds(page: Page) -> set[str]:
    """Kinds of all pieces in the batch picture."""
    return set(read(page, "f.batch.data.flatMap(t => (t.customdata || []).map(c => c[1]))"))


def step_tokens(page: Page, step: int) -> int:
    """Tokens of one bar, cached ones left out."""
    pieces = read(page, "f.batch.data.flatMap(t => t.x.map((x, i) => [x, t.customdata[i][1], t.customdata[i][3]]))")
    return sum(tokens for x, kind, tokens in pieces if x == step and kind != "cached")


def send(page: Page, prompt: str, max_tokens: int = 24, copies: int = 1) -> None:
    page.fill("#lab-prompt", prompt)
    page.fill("#lab-max_tokens", str(max_tokens))
    page.fill("#lab-copies", str(copies))
    page.click("#lab-send")


def owners(page: Page) -> set[int]:
    """Hues of owners among the blocks of the pool."""
    return set(read(page, "f.pool.data[0].z.flat().filter(v => v !== null && v >= 2).map(v => (v - 2) % 8)"))


def test_a_first_visit_four_prompts_share_the_engine(visit: Open):
    page = visit()
    hero = page.locator(".lab-hero")
    expect(hero).to_be_visible()
    expect(page.locator(".lab-head")).to_contain_text("SmolLM2-135M-Instruct")
    expect(page.locator(".lab-head")).to_contain_text("Q4_1")
    for part in (".lab-device", ".lab-dtype", ".lab-threads", ".lab-omp"):
        expect(page.locator(part)).not_to_be_empty()
    assert read(page, "f.batch.data.every(t => t.x.length === 0)")
    page.select_option("select[aria-label='Scale of the batch']", "root")
    wait(page, "f.batch.layout.yaxis.title.text.includes('√')")
    page.fill("#lab-max_tokens", "48")
    page.click(".lab-hero .lab-big >> visible=true")
    wait(page, "s.requests.length === 4 && s.requests.every(r => r.state === 'decode')")
    expect(hero).to_be_hidden()
    assert kinds(page) >= {"prefill", "decode"}
    wait(page, "new Set(f.pool.data[0].z.flat().filter(v => v !== null && v > 1)).size === 4")
    assert owners(page) == {0, 1, 2, 3}
    assert len(read(page, "s.tables")) == 4
    wait(page, "s.requests.every(r => r.tokens > 6)")
    page.click(".lab-request[data-id] .lab-choose >> nth=0")
    wait(page, "s.focus && s.focus.tokens.length > 6")
    page.wait_for_timeout(500)
    picture(page, "lab")
    for name in ("batch", "timeline", "pool"):
        box = page.locator(f".lab-{name} .lab-chart").bounding_box()
        assert box
        assert box["y"] + box["height"] <= 800, f"{name} is seen without scrolling"
    wait(page, "s.requests.every(r => r.state === 'finished')")
    rows = {row["name"]: row for row in read(page, "s.tiles.latency")}
    assert rows["ttft"]["count"] == 4
    assert rows["e2e"]["p50"] > rows["ttft"]["p50"] > 0
    assert {g["name"] for g in read(page, "s.tiles.gauges")} >= {"prompt", "generation", "running", "waiting", "kv"}
    tokens = read(page, "s.requests.reduce((n, r) => n + r.tokens, 0)")
    assert rows["itl"]["count"] == tokens - 4
    assert page.locator(".lab-story li").count() >= 8


def test_a_typed_prompt_streams_without_flicker(visit: Open):
    page = visit()
    page.evaluate("document.querySelector('.lab-pool .lab-chart').mark = 'the same'")
    send(page, "Count from one to ten in words.", max_tokens=30)
    lengths = []
    for _ in range(30):
        lengths.append(read(page, "s.requests?.[0]?.text?.length || 0"))
        if read(page, "s.requests?.[0]?.state === 'finished'"):
            break
        page.wait_for_timeout(200)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= 4, f"it comes piece by piece: {lengths}"
    assert page.evaluate("document.querySelector('.lab-pool .lab-chart').mark") == "the same"
    assert page.evaluate("window.__lab.streams") == 1
    assert page.locator(".lab-pool .main-svg").count() >= 1
    frames = {tuple(read(page, f"f.{name}.layout.yaxis.range")) for name in ("timeline", "pool")}
    send(page, "Say hello.", max_tokens=4)
    wait(page, "s.requests.length === 2")
    assert {tuple(read(page, f"f.{name}.layout.yaxis.range")) for name in ("timeline", "pool")} == frames


def test_pause_step_rewind_resume_and_stop(visit: Open):
    page = visit()
    page.click(".lab-run")
    wait(page, "s.head.mode === 'paused'")
    send(page, "Tell me about rivers and about mountains.", max_tokens=200, copies=2)
    wait(page, "s.requests?.length === 2")
    assert read(page, "s.clock.last") == -1
    page.click(".lab-step")
    wait(page, "s.clock.last === 0")
    assert step_tokens(page, 0) == sum(read(page, "s.tables.map(t => t.tokens)"))
    page.keyboard.press("s")
    wait(page, "s.clock.last === 1")
    page.wait_for_timeout(600)
    assert read(page, "s.clock.last") == 1, "one press, one step"
    page.click("text='Step 10'")
    wait(page, "s.clock.last === 11")
    page.click(".lab-story li:last-child button")
    wait(page, "s.clock.cursor === 0")
    assert read(page, "s.requests.every(r => r.tokens <= 1)")
    assert read(page, "f.batch.layout.shapes.find(x => x.name === 'cursor').x0") == 0
    page.click("text='Step 10' >> visible=true")
    wait(page, "s.clock.last === 21 && s.clock.cursor === null")
    expect(page.locator(".lab-live")).to_have_attribute("aria-pressed", "true")
    page.click(".lab-run")
    wait(page, "s.head.mode === 'running' && s.clock.last > 23")
    first = read(page, "s.requests[0].id")
    page.click(f".lab-request[data-id='{first}'] .lab-stop")
    wait(page, f"s.requests.find(r => r.id === '{first}').state === 'finished'")
    assert read(page, "s.requests.filter(r => r.live).length") == 1
    assert any("is stopped" in entry["text"] for entry in read(page, "s.story"))
    page.click("text='Stop all'")
    wait(page, "s.requests.every(r => !r.live)")
    assert all(row["slow"] for row in read(page, "s.requests")), "stepped ones are marked"


def test_select_a_token_and_find_its_block(visit: Open):
    page = visit()
    send(page, "What is the capital of France?", max_tokens=20)
    wait(page, "s.requests?.[0]?.tokens > 4")
    page.click(".lab-choose")
    wait(page, "s.focus && s.focus.tokens.length > 4 && s.requests[0].state === 'finished'")
    page.click(".lab-tokens span >> nth=2")
    detail = page.locator(".lab-token")
    expect(detail).to_contain_text("K and V in block")
    expect(detail).to_contain_text("ITL")
    expect(page.locator(".lab-candidates li")).not_to_have_count(0)
    shares = [float(text.split()[-2]) for text in page.locator(".lab-candidates li").all_inner_texts()]
    assert all(0 <= share <= 100 for share in shares)
    page.click(".lab-token .lab-link")
    wait(page, "s.clock.cursor !== null")
    wait(page, "s.focus.tokens.length === 3")


def test_settings_apply_and_bad_ones_say_why(visit: Open):
    page = visit(expect=("400 (Bad Request)",))
    page.click(".lab-engine summary")
    before = read(page, "s.head.generation")
    page.fill("#lab-knob-max_num_batched_tokens", "32")
    page.uncheck("#lab-knob-enable_chunked_prefill")
    page.click("#lab-apply")
    message = page.locator(".lab-engineform .lab-message")
    expect(message).to_contain_text("max_num_batched_tokens=32 is less than max_model_len=1024")
    expect(page.locator("#lab-knob-max_num_batched_tokens")).to_have_value("32")
    assert read(page, "s.head.generation") == before
    page.check("#lab-knob-enable_chunked_prefill")
    wanted = {"max_num_seqs": 2, "block_size": 8, "num_kv_blocks": 64, "max_model_len": 256}
    for name, value in wanted.items():
        page.fill(f"#lab-knob-{name}", str(value))
    page.click("#lab-apply")
    wait(page, "s.head.config.block_size === 8 && s.pool.total === 64")
    expect(message).to_be_empty()
    assert read(page, "s.head.state") == "ready", "the weights stay loaded"
    send(page, "One two three four five six seven eight nine ten, and what comes after that?", max_tokens=12, copies=3)
    wait(page, "s.requests.length === 3 && s.requests.some(r => r.detail.includes('max_num_seqs'))")
    assert step_tokens(page, 0) == 32, "the budget holds"
    wait(page, "s.requests.every(r => r.state === 'finished')")
    page.fill("#lab-knob-num_kv_blocks", "")
    page.click("#lab-apply")
    expect(message).to_contain_text("num_kv_blocks=None must be a whole number of at least 1")


def test_bad_prompts_are_answered_and_nothing_is_executed(visit: Open):
    page = visit(expect=("400 (Bad Request)", "413"))
    message = page.locator(".lab-send .lab-message")
    send(page, "   ")
    expect(message).to_contain_text("The prompt is empty")
    send(page, "word " * 3000)
    expect(message).to_contain_text("max_model_len")
    expect(message).to_contain_text("1,024")
    page.evaluate("document.querySelector('#lab-prompt').value = 'x'.repeat(1_000_000)")
    page.click("#lab-send")
    expect(message).to_contain_text("1,000,000")
    send(page, "hello", max_tokens=0)
    expect(message).to_contain_text("max_tokens=0 must be at least 1")
    send(page, "<img src=x onerror='window.hacked = 1'>\u0007 Hi", max_tokens=3)
    wait(page, "s.requests.length === 1 && s.requests[0].state === 'finished'")
    expect(message).to_be_empty()
    assert page.locator(".lab img").count() == 0
    assert page.evaluate("window.hacked") is None
    expect(page.locator(".lab-request .lab-prompt")).to_contain_text("<img src=x", use_inner_text=False)


SIZES = [(1280, 800, "dark"), (390, 844, "light"), (390, 844, "dark"), (1920, 1080, "light")]


@pytest.mark.parametrize(("width", "height", "theme"), SIZES)
def test_every_width_and_theme_fits(visit: Open, width: int, height: int, theme: str):
    page = visit(width, height, theme)
    page.fill("#lab-max_tokens", "12")
    page.click("#lab-samples")
    wait(page, "s.requests?.length === 4 && s.requests.every(r => r.tokens > 2)")
    assert page.evaluate("document.querySelector('.lab').dataset.theme") == theme
    assert page.evaluate("document.querySelector('.lab').scrollWidth") <= width, "nothing sticks out"
    parts = ("text", "list", "batch", "pool", "latency")
    order = [page.evaluate(f"document.querySelector('.lab-{part}').getBoundingClientRect().top") for part in parts]
    if width < 1100:
        assert order == sorted(order), "text, requests, batch, pool, latency"
    picture(page, f"lab-{theme}-{width}")


def test_a_killed_engine_is_told_and_comes_back(visit: Open, lab: Lab):
    page = visit()
    send(page, "Tell me a very long story.", max_tokens=400)
    wait(page, "s.requests?.[0]?.tokens > 3")
    os.kill(lab.host_pid, signal.SIGKILL)
    wait(page, "s.head.state === 'stopped'")
    hero = page.locator(".lab-hero")
    expect(hero).to_contain_text("The engine is not running")
    assert read(page, "s.head.error")
    assert read(page, "s.requests[0].tokens") > 3, "what was made is still there"
    page.click(".lab-restart")
    wait(page, "s.head.open === true", 90)
    expect(hero).to_be_visible()
    send(page, "Hello again.", max_tokens=4)
    wait(page, "s.requests.length === 1 && s.requests[0].state === 'finished'")
