"""Runs, Metrics and saved runs: pages that only read records, in every state a lab can be in."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from streamlit import get_option
from streamlit.testing.v1 import AppTest

import app
from app.live.routes import routes
from app.reading import describe
from app.saved import library, saved_run
from app.server import SETTINGS
from app.session import Hub, Lab
from engine.observe.archive import Archive
from tests.app.kit import call

SCREENS = Path(app.__path__[0]) / "screens"
LIMIT = 20.0


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_LAB_DATA", str(tmp_path / "data"))


@pytest.fixture
def lab(hub: Hub, tmp_path: Path) -> Lab:
    hub.client._recordings = tmp_path / "recordings"
    lab = hub.enter(None)
    assert hub.ensure_open(lab)
    return lab


def work(lab: Lab, requests: int = 3, tokens: int = 12) -> None:
    for number in range(requests):
        lab.client.send(lab.token, f"prompt number {number}", chat=False, params={"max_tokens": tokens, "ignore_eos": True})
    assert lab.log.wait_until(lambda log: log.stats.finished >= requests, LIMIT)


def page(name: str, lab: Lab | None = None, **query: str) -> AppTest:
    test = AppTest.from_file(str(SCREENS.parent / "main.py"), default_timeout=30)
    if lab is not None:
        query["lab"] = lab.token
    for key, value in query.items():
        test.query_params[key] = value
    return test.switch_page(str(SCREENS / name)).run()


def save(lab: Lab, name: str) -> str:
    assert isinstance(lab.log.archive, Archive)
    source = lab.log.archive.file()
    assert source is not None
    return library().save(source, name)


def words(test: AppTest) -> str:
    parts = [*test.markdown, *test.caption, *test.info, *test.success, *test.error, *test.warning, *test.title, *test.header]
    return "\n".join(str(part.value) for part in parts)


def test_metrics_before_any_request(lab: Lab) -> None:
    test = page("metrics.py", lab)
    assert not test.exception
    assert "No request has produced a token" in words(test)
    assert all(row == "n/a" for row in test.dataframe[0].value["p99"])


def test_metrics_when_every_request_was_stopped(lab: Lab) -> None:
    lab.client.control(lab.token, "pause")
    lab.client.send(lab.token, "never started", chat=False, params={"max_tokens": 5}, copies=3)
    lab.client.abort(lab.token)
    assert lab.log.wait_until(lambda log: log.stats.aborted == 3, LIMIT)
    test = page("metrics.py", lab)
    assert not test.exception
    counts = test.dataframe[1].value.set_index("metric").loc["Requests"]
    assert counts["value"] == "3" and "3 aborted" in counts["formula"]


def test_metrics_of_a_busy_lab_agree_with_the_records(lab: Lab) -> None:
    work(lab)
    test = page("metrics.py", lab)
    assert not test.exception
    table = test.dataframe[0].value.set_index("metric")
    traces = lab.log.traces()
    ttfts = [trace.ttft for trace in traces if trace.ttft is not None]
    assert table.loc["TTFT", "samples"] == 3
    assert table.loc["TTFT", "mean"] == f"{1000 * sum(ttfts) / 3:,.1f}"
    assert table.loc["ITL", "samples"] == sum(len(trace.itl) for trace in traces)
    assert table.loc["TTFT", "p99"].endswith("*"), "three samples are too few for a p99"
    assert "TTFT + (N − 1) × TPOT" in words(test)
    tools = test.dataframe[2].value
    assert len(tools) == 7


def test_one_token_has_no_tpot(lab: Lab) -> None:
    work(lab, requests=1, tokens=1)
    test = page("metrics.py", lab)
    assert not test.exception and "not defined (n/a)" in words(test)
    assert test.dataframe[0].value.set_index("metric").loc["TPOT", "mean"] == "n/a"


def test_an_empty_lab_has_nothing_to_save(lab: Lab) -> None:
    test = page("runs.py", lab)
    assert not test.exception and "Nothing is recorded yet" in words(test)


def test_a_run_is_saved_and_listed_and_deleting_asks_first(lab: Lab) -> None:
    work(lab)
    test = page("runs.py", lab)
    assert not test.exception
    test.text_input[0].set_value("my run")
    next(button for button in test.button if button.label == "Save run").click()
    test.run()
    assert not test.exception and "Saved as “my run”" in words(test)
    assert [info.name for info in library().list()] == ["my run"]
    assert "**my run**" in words(test)
    next(button for button in test.button if button.key == "delete my run").click()
    test.run()
    assert not test.exception
    assert any(button.label == "Delete" and button.key is None for button in test.button), "it asks once more"
    assert library().list(), "and deletes nothing before the answer"


def test_a_name_that_is_none_loses_nothing(lab: Lab) -> None:
    work(lab, requests=1)
    test = page("runs.py", lab)
    test.text_input[0].set_value("///")
    next(button for button in test.button if button.label == "Save run").click()
    test.run()
    assert not test.exception and "Not saved" in words(test) and library().list() == []


def test_a_damaged_run_is_listed_with_its_problem(lab: Lab) -> None:
    work(lab)
    path = library().path(save(lab, "broken"))
    path.write_bytes(path.read_bytes()[:-10])
    test = page("runs.py", lab)
    assert not test.exception and "incomplete" in words(test)


def test_metrics_of_a_saved_run_after_the_lab_is_gone(lab: Lab) -> None:
    work(lab)
    save(lab, "kept")
    before = page("metrics.py", lab).dataframe[0].value
    lab.client.close_lab(lab.token)
    lab.client.forget(lab.token)
    test = page("metrics.py", run="kept")
    assert not test.exception and "“kept”" in words(test)
    assert test.dataframe[0].value.equals(before)


def test_a_saved_run_that_is_missing_is_named(lab: Lab) -> None:
    test = page("metrics.py", lab, run="nope")
    assert not test.exception and "nope" in words(test)


def test_a_saved_run_is_shown_but_takes_no_command(lab: Lab) -> None:
    work(lab)
    name = save(lab, "kept")
    asgi = Starlette(routes=routes())
    whole = call(asgi, "GET", f"/lab/api/state?lab=run:{name}").json
    assert whole["head"]["state"] == "saved" and whole["head"]["run"] == "kept"
    last = whole["clock"]["last"]
    assert whole["clock"]["cursor"] == last == lab.log.next_index - 1
    early = call(asgi, "GET", f"/lab/api/state?lab=run:{name}&step=1").json
    assert early["clock"]["cursor"] == 1
    assert sum(row["tokens"] for row in early["requests"]) < sum(row["tokens"] for row in whole["requests"])
    for verb, body in {
        "send": {"prompt": "x"},
        "abort": {},
        "control": {"action": "pause"},
        "clear": {},
        "restart": {},
    }.items():
        refused = call(asgi, "POST", f"/lab/api/{verb}", {"lab": f"run:{name}", **body})
        assert refused.status == 403, verb
    assert call(asgi, "GET", "/lab/api/state?lab=run:../../etc/passwd").status in (400, 403)


def test_of_a_long_run_only_a_window_is_read(lab: Lab, tmp_path: Path) -> None:
    """What a look at a long run decodes does not grow with its length."""
    from engine.observe.runfile import RunWriter, new_header
    from tests.observe.recorded import record

    config, recording = record(4, 3000, batching="continuous", kv_layout="paged", use_kv_cache=True)
    writer = RunWriter(tmp_path / "long.inflab", new_header(config))
    writer.add(
        opened=recording.opened_events, steps=recording.steps, tokens=recording.token_events, closed=recording.closed_events
    )
    writer.close()
    run = saved_run(library().save(tmp_path / "long.inflab", "long"))
    from app.live.moment import Look

    decoded: list[tuple[bytes, int]] = []
    decode = run.log.reader._decode
    run.log.reader._decode = lambda frame: decoded.append((frame.kind, frame.count)) or decode(frame)  # type: ignore[method-assign]
    run.look(Look(step=len(recording.steps) // 2))
    steps = sum(count for kind, count in decoded if kind == b"S")
    assert len(recording.steps) > 10_000 and 0 < steps < 6000


def test_a_run_too_large_to_upload_has_another_way_in(lab: Lab):
    """The page promises no more than the server takes, and says where a larger file goes; a file put there is listed."""
    work(lab)
    name = save(lab, "large")
    test = page("runs.py", lab)
    [uploader] = test.get("file_uploader")
    assert uploader.proto.max_upload_size_mb in (SETTINGS["server.maxUploadSize"], get_option("server.maxUploadSize"))
    assert str(library().folder) in words(test)
    file = library().path(name)
    file.rename(file.with_name("brought by hand" + file.suffix))
    assert "brought by hand" in words(page("runs.py", lab))


@pytest.mark.parametrize("threads", [1, 2, None])
def test_threads_are_counted_in_words(threads: int | None):
    told = describe({"title": "m", "threads": threads})
    assert {1: "· 1 thread (", 2: "· 2 threads (", None: "· threads unknown ("}[threads] in told


@pytest.mark.parametrize("name", ["lessons.py", "experiments.py", "runs.py", "metrics.py", "calculators.py"])
def test_pages_with_pictures_of_one_theme_follow_the_systems_change(lab: Lab, name: str):
    """Else a page that is open when the system turns dark keeps dark letters on dark paper."""
    keepers = [element.proto.id for element in page(name, lab).get("bidi_component")]
    assert any(keeper.endswith("scheme-keeper") for keeper in keepers)
