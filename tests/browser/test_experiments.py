"""Experiments in the browser: run an A/B, cancel another, open a run's step, take it out and in again, the same figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.conftest import Lab, download, picture

pytestmark = pytest.mark.browser
WAIT = 120_000
STREAMLIT_PROBES = ("/_stcore/health", "/_stcore/host-config")
"""Streamlit asks for these below the page's own path first, and gets a 404 there: not ours to answer."""

FILE = """\
version: 1
id: long
title: A long one
repetitions: 100
variants:
  - {name: a, config: {max_num_seqs: 1, max_model_len: 128, num_kv_blocks: 32}}
  - {name: b, config: {max_num_seqs: 4, max_model_len: 128, num_kv_blocks: 32}}
workload:
  arrivals: {unit: steps}
  stop: {requests: 16}
  output: {tokens: 32}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,100,20\n2023-11-16 18:17:04.97,many,20\n"


@pytest.fixture
def page(browser: Browser, tiny: Lab) -> Iterator[Page]:
    """A page on the experiments, with nothing to complain about at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    made, complaints = watched(context)
    made.goto(f"{tiny.address}/experiments")
    expect(made.get_by_role("heading", name="Experiments", exact=True)).to_be_visible(timeout=WAIT)
    yield made
    context.close()
    assert complaints == []


def watched(context: BrowserContext) -> tuple[Page, list[str]]:
    complaints: list[str] = []
    made = context.new_page()
    made.set_default_timeout(30_000)
    made.on("pageerror", lambda e: complaints.append(f"page error: {e}"))
    made.on(
        "response",
        lambda r: (
            complaints.append(f"{r.status} {r.url}") if r.status >= 400 and not r.url.endswith(STREAMLIT_PROBES) else None
        ),
    )
    return made, complaints


def figures(page: Page) -> list:
    """Data and layout of all drawn plots, without what depends on the window."""
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length >= 6")
    page.wait_for_function("[...document.querySelectorAll('.js-plotly-plot')].every(p => p.data)")
    return json.loads(
        page.evaluate(
            "JSON.stringify([...document.querySelectorAll('.js-plotly-plot')].map(p =>"
            " p.data.map(t => [t.type, t.name, t.x, t.y])))"
        )
    )


def run_ready_made(page: Page, experiment_id: str) -> None:
    page.locator(f".st-key-run-{experiment_id} button").click(timeout=WAIT)
    expect(page.get_by_text("Time for all requests, s")).to_be_visible(timeout=WAIT)


def test_an_a_b_from_run_to_report_and_back(page: Page, browser: Browser, tiny: Lab, tmp_path: Path):
    run_ready_made(page, "static-continuous")
    expect(page.get_by_text("Expected by counting: 4 of 4 hold")).to_be_visible()
    drawn = figures(page)
    picture(page, "experiment")
    assert "result=" in page.url

    # one slider moves both
    plot = page.locator(".js-plotly-plot").first
    before = plot.locator(".annotation-text").all_text_contents()
    plot.locator(".updatemenu-button").filter(has_text="Play").click()
    assert before and all("not begun" in text for text in before)
    expect(plot.locator(".annotation-text").filter(has_text="done: ")).to_have_count(len(before), timeout=WAIT)

    # a step of a run
    page.get_by_label("Step, 0 to").fill("20")
    page.get_by_label("Step, 0 to").press("Enter")
    expect(page.get_by_role("button", name="Open in the lab")).to_be_visible()

    # out, and in again
    result = download(page, "Result", tmp_path)
    report = download(page, "HTML report", tmp_path)
    notebook = download(page, "Notebook", tmp_path)
    assert json.loads(notebook.read_text())["nbformat"] == 4
    link = page.url
    page.get_by_role("button", name="All experiments").click()
    page.get_by_text("Saved results", exact=True).click()
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(result)
    expect(page.get_by_text("Time for all requests, s")).to_be_visible(timeout=WAIT)
    assert page.url != link
    assert figures(page) == drawn

    # the report, without any network
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    alone, complaints = watched(context)
    alone.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    alone.goto(report.as_uri())
    alone.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 6")
    assert alone.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(p => p.data.length > 0)") == [True] * 6
    assert alone.evaluate("document.querySelectorAll('#differences tr').length") > 10
    context.close()
    assert complaints == []

    # every step in the lab
    page.get_by_role("button", name="Open in the lab").click()
    page.wait_for_selector(".lab-head", timeout=WAIT)
    assert "run=" in page.url


def test_a_cancelled_one_leaves_nothing_and_another_can_run(page: Page):
    page.get_by_text("As a file", exact=True).click()
    area = page.get_by_label("Experiment", exact=True)
    area.fill(FILE.replace("max_num_seqs: 4", "max_num_seqs: 0"))
    area.press("Control+Enter")
    expect(page.get_by_text("experiment.yaml, line 7, variants[1]: max_num_seqs=0 must be at least 1")).to_be_visible()
    area.fill(FILE)
    area.press("Control+Enter")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_text("of 202 runs").first).to_be_visible()
    expect(page.get_by_text(re.compile(r"repetition \d+ of 100")).first).to_be_visible(timeout=WAIT)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The experiment was cancelled")).to_be_visible()
    page.get_by_text("Ready-made", exact=True).click()
    run_ready_made(page, "kv-cache")


def test_a_link_reproduces_the_form_and_a_bad_trace_names_its_line(page: Page, tiny: Lab, tmp_path: Path):
    page.get_by_text("Your own", exact=True).click()
    requests = page.get_by_label("Requests", exact=True)
    requests.fill("23")
    requests.press("Enter")
    expect(page.get_by_text("Seats (max_num_seqs): 1 against 8")).to_be_visible()
    page.wait_for_url("**x_requests=23**")
    link = page.url
    page.goto(f"{tiny.address}/experiments")
    page.goto(link)
    expect(page.get_by_label("Requests", exact=True)).to_have_value("23", timeout=WAIT)
    page.get_by_text("a trace", exact=True).click()
    bad = tmp_path / "bad.csv"
    bad.write_text(TRACE)
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(bad)
    expect(page.get_by_text("bad.csv, line 3: contexttokens 'many' must be a whole number")).to_be_visible()
    good = tmp_path / "good.csv"
    good.write_text(TRACE.replace("many", "200"))
    page.get_by_test_id("stFileUploaderDropzoneInput").set_input_files(good)
    expect(page.get_by_text("good.csv: 2 requests over 1 s")).to_be_visible()


def test_the_calculator_shows_estimate_and_allocation_side_by_side(page: Page, tiny: Lab):
    page.goto(f"{tiny.address}/calculators")
    expect(page.get_by_text("allocated by the engine")).to_be_visible(timeout=WAIT)
    line = page.get_by_text("allocated by the engine").inner_text()
    allocated, estimate = (line.split(word)[0].split()[-2:] for word in (" allocated", " by the formula"))
    assert allocated == estimate
    page.get_by_label("Model").click()
    page.get_by_text("Llama-3.1-8B", exact=True).click()
    expect(page.get_by_text("128 KiB").first).to_be_visible()
    expect(page).to_have_url(re.compile("c_model=Llama-3.1-8B"))


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_pages_fit_the_window(browser: Browser, tiny: Lab, width: int, theme: str):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme)
    made, complaints = watched(context)
    for place in ("experiments", "experiments?view=Your own", "calculators"):
        made.goto(f"{tiny.address}/{place}")
        expect(made.locator("h1").first).to_be_visible(timeout=WAIT)
        made.wait_for_timeout(1500)
        assert made.evaluate("document.documentElement.scrollWidth") <= width
        picture(made, f"{place.split('?')[0]}-{width}-{theme}")
    context.close()
    assert complaints == []
