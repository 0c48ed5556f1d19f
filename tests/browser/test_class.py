"""The lab in class, in real browsers: a presenter, a projector, two followers; scenes, traffic, links; no network at all."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.conftest import Lab, picture, start_lab, stop_lab
from tests.browser.test_lab import read, wait

pytestmark = pytest.mark.browser
GRACE = 6.0
Look = Callable[..., Page]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with the tiny model that releases labs soon after their browser is gone."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "data" / "scenes").mkdir(parents=True)
    (folder / "data" / "scenes" / "broken.yaml").write_text("id: broken\ntitel: Oops\n")
    running = start_lab(folder, "tiny", INFERENCE_LAB_GRACE=str(GRACE), INFERENCE_LAB_DATA=str(folder / "data"))
    yield running
    stop_lab(running)


@pytest.fixture
def look(browser: Browser, tiny: Lab) -> Iterator[Look]:
    """Open an address of the lab in a browser of its own, whose every request to another host is cut off and told."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    allowed: list[str] = []

    def open_page(
        address: str = "", width: int = 1280, height: int = 800, ready: bool = True, expect: tuple[str, ...] = ()
    ) -> Page:
        allowed.extend(expect)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
        contexts.append(context)
        ours = re.compile(rf"^(https?|ws)://localhost:{tiny.port}/|^(data|blob):")

        def gate(route) -> None:
            if ours.match(route.request.url):
                route.continue_()
            else:
                complaints.append(f"asked for {route.request.url}")
                route.abort()

        context.route("**/*", gate)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: complaints.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda e: complaints.append(f"page error: {e}"))
        page.goto(address if address.startswith("http") else tiny.address + "/" + address)
        if ready:
            page.wait_for_selector(".lab-head")
            page.wait_for_function("window.__lab?.sections.head?.open === true", timeout=120_000)
            page.wait_for_function("window.Plotly !== undefined")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [text for text in complaints if not any(part in text for part in allowed)]


def finished(page: Page) -> None:
    wait(page, "s.room.traffic && s.room.traffic.ended && s.room.traffic.in_flight === 0", 90)


def share(page: Page) -> str:
    """The follow link, as the page shows it."""
    page.evaluate("document.querySelector('.lab-share').open = true")
    page.click("#lab-follow")
    page.wait_for_selector(".lab-qr")
    return page.input_value("input[aria-label='Follow link']")


def test_a_first_visit_starts_a_scene_with_one_click(look: Look):
    page = look()
    hero = page.locator(".lab-hero")
    expect(hero.locator(".lab-big >> visible=true")).to_have_text("Start: Four prompts share one engine")
    assert hero.locator(".lab-cards button").count() >= 5
    page.wait_for_timeout(400)
    picture(page, "class-first-visit-1280")
    page.click(".lab-hero .lab-big >> visible=true")
    finished(page)
    expect(hero).to_be_hidden()
    expect(page.locator(".lab-scene")).to_contain_text("Watch the newcomers join a batch")
    assert len(read(page, "s.requests")) == 4
    page.click(".lab-scenes summary")
    page.wait_for_selector(".lab-scenelist button")
    expect(page.locator(".lab-problem")).to_contain_text("broken.yaml, line 2")
    page.click("[data-scene='small-pool'] >> visible=true")
    wait(page, "s.room.scene?.id === 'small-pool' && s.pool.total === 24")
    finished(page)
    wait(page, "s.tiles.gauges.find(g => g.name === 'preemptions').value > 0")
    expect(page.locator(".lab-pool")).to_have_class(re.compile("lab-marked"))
    assert "scene=small-pool" in page.url
    page.wait_for_timeout(400)
    picture(page, "class-scene-1280")


def test_traffic_starts_changes_refuses_and_stops(look: Look):
    page = look(expect=("400 (Bad Request)",))
    page.click(".lab-traffic summary")
    page.select_option("#lab-t-process", "constant")
    page.fill("#lab-t-rate", "-2")
    page.click("#lab-t-start")
    message = page.locator(".lab-trafficform .lab-message").first
    expect(message).to_contain_text("rate=-2")
    expect(page.locator(".lab-trafficform [data-for='rate']").first).to_have_class(re.compile("lab-wrong"))
    page.fill("#lab-t-rate", "2")
    page.fill("#lab-t-prompt_tokens", "16")
    page.fill("#lab-t-output_tokens", "4")
    page.click("#lab-t-start")
    wait(page, "s.room.traffic?.completed >= 2")
    expect(message).to_be_empty()
    page.locator("#lab-t-slider").fill("800")
    wait(page, "s.room.traffic.due > 25")
    expect(page.locator(".lab-offered")).to_contain_text("/s")
    expect(page.locator(".lab-achieved")).to_contain_text("/s")
    page.click("#lab-t-stop")
    wait(page, "s.room.traffic.ended")
    page.select_option("#lab-t-process", "closed")
    expect(page.locator("#lab-t-rate")).to_be_hidden()
    page.select_option("#lab-t-unit", "steps")
    page.fill("#lab-t-stop_after", "40")
    page.click("#lab-t-start")
    wait(page, "s.room.traffic.unit === 'steps' && s.room.traffic.ended")
    page.wait_for_timeout(300)
    picture(page, "class-traffic-1280")


def test_a_presenter_a_projector_and_two_followers(look: Look):
    presenter = look()
    lab = read(presenter, "new URLSearchParams(location.search).get('lab')")
    link = share(presenter)
    assert lab not in link
    one, other = look(link, expect=("403 (Forbidden)",)), look(link, width=390, height=844)
    projector = look(f"?lab={lab}&view=projector", width=1920, height=1080)
    wait(presenter, "s.room.followers === 2")
    for page in (one, other, projector):
        expect(page.locator(".lab-left")).to_be_hidden()
    assert lab not in one.content()
    presenter.select_option("select[aria-label='Slow motion']", "2")
    presenter.evaluate("document.querySelector('.lab-scenes').open = true")
    presenter.click(".lab-scenelist [data-scene='four-prompts']")
    for page in (presenter, one, other, projector):
        wait(page, "s.requests?.length === 4 && s.clock.last > 12")
        expect(page.locator(".lab-scene")).to_contain_text("Four prompts share one engine")
    one.keyboard.press("Home")
    wait(one, "s.clock.cursor === 0")
    here = read(presenter, "s.clock.last")
    wait(presenter, f"s.clock.last > {here} + 4")
    assert read(one, "s.clock.cursor") == 0, "rewound while the presenter runs on"
    assert read(one, "s.requests.length") == 1
    assert [read(page, "s.clock.cursor") for page in (presenter, other, projector)] == [None, None, None]
    for key in (" ", "s", "X", "d"):
        one.keyboard.press(key)
    one.wait_for_timeout(500)
    assert read(presenter, "s.head.mode") == "running"
    assert read(presenter, "s.requests.length") == 4
    one.wait_for_timeout(300)
    picture(one, "class-follower-1280")
    picture(other, "class-follower-390")
    presenter.select_option("select[aria-label='Slow motion']", "")
    finished(presenter)
    presenter.evaluate("document.activeElement.blur()")
    presenter.keyboard.press("Home")
    wait(projector, "s.clock.cursor === 0")
    expect(projector.locator(".lab-live")).to_have_text("LOOKING BACK")
    presenter.keyboard.press("End")
    wait(projector, "s.clock.cursor === null")
    assert projector.evaluate("document.querySelector('.lab').dataset.theme") == "dark"
    sizes = projector.evaluate(
        """[...document.querySelectorAll('.lab-head, .lab-request .lab-detail, .lab-story button, .lab-gauge b, .lab-scene')]
           .filter(n => n.offsetParent).map(n => parseFloat(getComputedStyle(n).fontSize))"""
    )
    assert min(sizes) >= 22, "readable from the last row"
    assert projector.evaluate("document.documentElement.scrollHeight") <= 1080
    projector.wait_for_timeout(500)
    picture(projector, "class-projector-1920")
    projector.set_viewport_size({"width": 1280, "height": 720})
    projector.wait_for_timeout(500)
    heights = projector.evaluate("[...document.querySelectorAll('.lab-plot')].map(n => n.getBoundingClientRect().height)")
    assert min(heights) > 90, "the same page, smaller: no picture is squeezed by the words around it"
    assert projector.evaluate("document.documentElement.scrollHeight") <= 720
    picture(projector, "class-projector-1280")
    one.keyboard.press("l")
    wait(one, "s.clock.cursor === null")
    presenter.click("text='Stop sharing'")
    expect(one.locator(".lab-trouble")).to_contain_text("ask the presenter for the newest one")


def test_the_same_lab_from_its_link(look: Look):
    page = look()
    page.click(".lab-engine summary")
    page.fill("#lab-knob-num_kv_blocks", "48")
    page.fill("#lab-knob-max_model_len", "512")
    page.click("#lab-apply")
    wait(page, "s.pool.total === 48")
    page.click(".lab-traffic summary")
    page.select_option("#lab-t-unit", "steps")
    page.fill("#lab-t-rate", "0.2")
    page.fill("#lab-t-seed", "7")
    page.fill("#lab-t-stop_after", "60")
    page.click("#lab-t-start")
    finished(page)
    page.locator(".lab-slider").evaluate("n => { n.value = 20; n.dispatchEvent(new Event('input')); }")
    wait(page, "s.clock.cursor === 20")
    page.evaluate("document.querySelector('.lab-share').open = true")
    page.click("#lab-copy")
    link = page.input_value("input[aria-label='Link to a lab like this one']")
    token = read(page, "new URLSearchParams(location.search).get('lab')")
    assert token not in link
    before = read(page, "f.batch.data.map(t => [t.x, t.y])")
    elsewhere = look(link)
    wait(elsewhere, "s.pool?.total === 48 && s.room?.prepared")
    assert read(elsewhere, "new URLSearchParams(location.search).get('lab')") != token
    expect(elsewhere.locator(".lab-hero")).to_contain_text("This link brought its settings and its traffic")
    elsewhere.evaluate("document.querySelector('.lab-traffic').open = true")
    expect(elsewhere.locator("#lab-t-seed")).to_have_value("7")
    elsewhere.click("#lab-t-start")
    finished(elsewhere)
    elsewhere.locator(".lab-slider").evaluate("n => { n.value = 20; n.dispatchEvent(new Event('input')); }")
    wait(elsewhere, "s.clock.cursor === 20")
    elsewhere.wait_for_timeout(400)
    assert read(elsewhere, "f.batch.data.map(t => [t.x, t.y])") == before, "the same seed in steps: the same picture"
    broken = look("?engine=num_kv_blocks:zero&traffic={&scene=nowhere")
    expect(broken.locator(".lab-notice")).to_contain_text("num_kv_blocks='zero' must be a whole number")
    expect(broken.locator(".lab-notice")).to_contain_text("not valid JSON")
    expect(broken.locator(".lab-notice")).to_contain_text("nowhere")
    assert read(broken, "s.head.open") is True
    nobody = look("?follow=" + "x" * 24, ready=False)
    expect(nobody.locator("body")).to_contain_text("This link can't be followed")


def test_reload_within_and_after_the_grace_time(look: Look, tiny: Lab):
    page = look()
    page.click(".lab-hero .lab-big >> visible=true")
    finished(page)
    page.reload()
    page.wait_for_function("window.__lab !== undefined")
    wait(page, "s.requests?.length === 4")
    address = page.url
    page.context.close()
    time.sleep(1.0)
    back = look(address)
    wait(back, "s.requests?.length === 4")
    back.context.close()
    time.sleep(GRACE + 8)
    late = look(address)
    assert read(late, "s.requests.length") == 0, "the lab was released"
    wait(late, "s.room?.prepared && s.room.scene?.id === 'four-prompts'")
    expect(late.locator(".lab-hero .lab-big >> visible=true")).to_have_text("Start: Four prompts share one engine")


def test_a_hidden_tab_keeps_its_lab(look: Look):
    page = look()
    page.click(".lab-hero .lab-big >> visible=true")
    finished(page)
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout((GRACE + 7) * 1000)
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    wait(page, "s.requests.length === 4")
    page.keyboard.press("Home")
    wait(page, "s.clock.cursor === 0")


def test_the_owner_changes_the_model_and_a_learner_is_told(look: Look):
    owner, learner = look(), look()
    learner.click(".lab-engine summary")
    learner.fill("#lab-knob-num_kv_blocks", "60")
    learner.click("#lab-apply")
    wait(learner, "s.pool.total === 60")
    owner.evaluate("document.querySelector('.lab-modelpanel').open = true")
    owner.fill("#lab-model-name", "tiny")
    owner.select_option("#lab-model-dtype", "bfloat16")
    owner.click("#lab-model-load")
    wait(learner, "s.room.notice.includes('changed the model to tiny') && s.head.open")
    expect(learner.locator(".lab-notice")).to_contain_text("your settings stay")
    wait(learner, "s.head.model?.dtype === 'bfloat16' && s.pool.total === 60")
    assert read(owner, "s.room.notice") == ""


def test_nothing_of_the_server_or_the_engine_calls_out(tiny: Lab, tmp_path: Path):
    """The page's requests are cut off by every test here; this looks at the sockets of the processes themselves."""
    listing = subprocess.run(
        ["cat", f"/proc/{tiny.process.pid}/net/tcp"], capture_output=True, text=True, check=False
    ).stdout
    if not listing:
        pytest.skip("this system has no /proc/net/tcp")
    inodes: set[str] = set()
    for pid in (tiny.process.pid, tiny.host_pid):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry) if entry.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    remote = [line.split()[2] for line in listing.splitlines()[1:] if line.split()[9] in inodes]
    assert {place.split(":")[0] for place in remote} <= {"0100007F", "00000000"}, "only this machine"
