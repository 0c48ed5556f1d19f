"""The pages as scripts: every view of them, with a ready engine, before it is ready, and with bad input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app
from app.experiments import running
from app.experiments.form import KNOBS
from app.experiments.store import ResultStore
from app.session import Hub, install
from engine.serve.client import EngineClient
from engine.workload.datafile import to_yaml
from tests.experiments.conftest import READY, small

SCREENS = Path(app.__path__[0]) / "screens"


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_LAB_DATA", str(tmp_path))


@pytest.fixture
def hub(engine: EngineClient) -> Iterator[Hub]:
    made = Hub(engine)
    install(made)
    yield made
    for token in made.tokens():
        engine.close_lab(token)
    install(None)


def opened(name: str, **query: str) -> AppTest:
    page = AppTest.from_file(str(SCREENS / f"{name}.py"), default_timeout=30)
    for key, value in query.items():
        page.query_params[key] = value
    return page.run()


def texts(page: AppTest) -> str:
    kinds = (page.markdown, page.caption, page.error, page.info, page.warning, page.subheader, page.header)
    return "\n".join(str(element.value) for kind in kinds for element in kind)


def test_every_ready_made_experiment_has_a_card(hub):
    page = opened("experiments")
    assert not page.exception
    shown = texts(page)
    assert all(experiment.title in shown and experiment.about in shown for experiment in READY.experiments)


def test_an_experiment_runs_and_its_result_is_shown_and_kept(hub):
    page = opened("experiments")
    token = page.session_state["lab"]
    found = running.start(token, small("kv-cache"), hub.client, ResultStore())
    with pytest.raises(ValueError, match="running already"):
        running.start(token, small("kv-cache"), hub.client, ResultStore())
    assert found.runner.wait(60).state == "done"
    page.query_params["lab"] = token
    page.run()
    assert not page.exception
    assert "KV cache off and on" in texts(page)
    assert [saved.name for saved in ResultStore().list()] == [found.saved]
    assert page.query_params["result"] in (found.saved, [found.saved])


@pytest.mark.parametrize("knob", KNOBS)
def test_the_form_makes_a_valid_experiment_of_every_setting(hub, knob):
    page = opened("experiments", view="Your own", x_knob=KNOBS[knob].label)
    assert not page.exception
    assert not page.error, [error.value for error in page.error]
    assert KNOBS[knob].label in texts(page)


def test_values_that_can_t_work_are_told_beside_the_form(hub):
    page = opened("experiments", view="Your own", x_prompt_to="600")
    assert "max_model_len=512" in page.error[0].value


def test_a_file_with_a_mistake_names_the_line(hub):
    page = opened("experiments", view="As a file")
    good = to_yaml(small("kv-cache"))
    page.text_area[0].set_value(good).run()
    assert "It reads well" in texts(page)
    page.text_area[0].set_value(good.replace("max_model_len: 256", "max_model_length: 256", 1)).run()
    assert "experiment.yaml, line" in page.error[0].value and "max_model_length" in page.error[0].value


def test_saved_results_are_listed_and_overlaid_with_a_warning(hub, result):
    store = ResultStore()
    first, second = store.save(result, "first"), store.save(result, "second")
    page = opened("experiments", view="Saved results")
    page.multiselect(key="overlaid").set_value([first, second]).run()
    assert not page.exception
    assert len(page.multiselect(key="overlaid_variants").value) == 4
    assert "output" in texts(page) or not page.warning


def test_what_is_not_clear_can_be_run_again_with_more_repetitions(hub, result):
    page = opened("experiments", result=ResultStore().save(result, "first"))
    assert "Where nothing differs, at most about 5 of 100 experiments call anything clear." in texts(page)
    assert re.search(r"\d+ numbers are not clear", texts(page))
    page.button(key="run more").click().run()
    assert not page.exception
    found = running.of(page.session_state["lab"])
    assert found.runner.experiment.repetitions == 10
    assert found.runner.experiment.workload == result.experiment.workload
    found.runner.cancel()
    found.runner.wait(10)


def test_a_result_that_is_gone_says_so(hub):
    assert "no saved result" in opened("experiments", result="gone").error[0].value


def test_the_pages_before_the_model_is_there():
    install(Hub(EngineClient("scripted")))
    for name in ("experiments", "calculators"):
        page = opened(name)
        assert not page.exception
        assert "when the model is loaded" in texts(page)
    install(None)


def test_the_calculators_choices_are_the_same_before_and_after_the_model_is_loaded(hub):
    """What is chosen by default stands in no address, so the default may not change meanwhile."""
    after = opened("calculators").selectbox(key="c_model")
    install(Hub(EngineClient("scripted")))
    before = opened("calculators").selectbox(key="c_model")
    install(None)
    assert (before.options, before.value) == (after.options, after.value)


def test_the_calculator_of_a_pasted_configuration(hub):
    page = opened("calculators", c_model="A pasted config.json")
    page.text_area[0].set_value('{"num_hidden_layers": 32').run()
    assert "line 1" in page.error[0].value
    page = opened("calculators", c_model="Llama-3.1-8B", c_device="NVIDIA H100 SXM")
    assert not page.exception
    assert "### *128 KiB*" in texts(page)
