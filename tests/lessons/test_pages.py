"""The course map and every lesson, played through on a real host: wrongly, rightly, and again after a reload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import app
from app.course.progress import Store
from app.session import Hub, install
from engine.serve.client import EngineClient
from lessons.catalogue import catalogue, module_of
from lessons.judge import judge, right_option
from lessons.model import Check, Explain, Lesson, Predict, RunBlock
from tests.lessons.independent import ANSWERS

ROOT = Path(app.__path__[0])
MAIN = str(ROOT / "main.py")


@pytest.fixture(scope="module")
def engine_client() -> Iterator[EngineClient]:
    with EngineClient("scripted:seconds=0.001,kv_bytes=64") as client:
        client.wait_ready(60)
        yield client


@pytest.fixture(autouse=True)
def hub(engine_client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A ready hub, and a data folder of the test's own."""
    monkeypatch.setenv("INFERENCE_LAB_DATA", str(tmp_path))
    made = Hub(engine_client)
    install(made)
    yield made
    for token in made.tokens():
        if engine_client.pid is not None:
            engine_client.close_lab(token)
    install(None)


def open_lesson(lesson_id: str, learner: str = "") -> AppTest:
    page = AppTest.from_file(MAIN, default_timeout=60)
    page.query_params["lesson"] = lesson_id
    if learner:
        page.query_params["learner"] = learner
    page.switch_page(str(ROOT / "screens" / "lesson.py")).run()
    assert not page.exception
    return page


def press(page: AppTest, label: str) -> None:
    button = next(b for b in page.button if b.label == label and not b.disabled)
    button.click().run()
    assert not page.exception, page.exception


def answer(page: AppTest, block, value, key: str) -> None:
    """Fill in one question's inputs."""
    if block.kind == "number":
        page.number_input(key=key).set_value(float(value))
    elif block.kind == "choice":
        page.radio(key=key).set_value(value)
    else:
        page.multiselect(key=key).set_value(value)


def wrong_answer(block, right):
    if block.kind == "number":
        return float(right) + 1000
    if block.kind == "order":
        return list(reversed(right))
    return next(option.id for option in block.options if option.id != right)


def play(page: AppTest, lesson: Lesson, *, rightly: bool) -> None:
    """Do everything that the lesson asks for, in order."""
    for place, card in enumerate(lesson.cards):
        for block in card.blocks:
            match block:
                case Predict():
                    right = ANSWERS[lesson.id][block.id]
                    value = right if rightly else wrong_answer(block, right)
                    answer(page, block, value, f"{lesson.id}-{block.id}")
                    press_key(page, f"lock-{lesson.id}-{block.id}")
                case RunBlock():
                    press_key(page, f"run-{lesson.id}-{block.id}")
                    assert not page.error, [e.value for e in page.error]
                case Explain():
                    for _ in block.frames[1:]:
                        press_key(page, f"forth-{block.id}")
                case Check():
                    for question in block.questions:
                        right = right_option(question)
                        value = right if rightly else wrong_answer(question, right)
                        entry = f"{block.id}/{question.id}"
                        answer(page, question, value, f"{lesson.id}-{entry}")
                        press_key(page, f"submit-{lesson.id}-{entry}")
                case _:
                    pass
        press_key(page, f"continue-{place}")


def press_key(page: AppTest, key: str) -> None:
    page.button(key=key).click().run()
    assert not page.exception, page.exception


def texts(page: AppTest, kind: str) -> list[str]:
    return [element.value for element in getattr(page, kind)]


@pytest.mark.parametrize("lesson_id", list(catalogue()))
def test_a_lesson_played_rightly_and_resumed(lesson_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lesson = catalogue()[lesson_id]
    page = open_lesson(lesson_id)
    with caplog.at_level(logging.WARNING):
        play(page, lesson, rightly=True)
    learner = page.session_state["learner"]
    kept = Store(learner, tmp_path / "progress").load().of(lesson_id)
    assert kept.done
    assert kept.cards == len(lesson.cards)
    exact = [b for b in lesson.blocks if isinstance(b, Predict) and not timed(lesson, b)]
    for block in exact:
        assert judge(block, kept.answers[block.id], kept.measured[block.id]).right, block.id
    good, total = (
        len(texts(page, "success")),
        len(exact) + sum(len(b.questions) for b in lesson.blocks if isinstance(b, Check)),
    )
    assert good >= total, "every countable answer and every check is praised"
    press_key(page, "reset-lab")
    assert page.session_state["lab"]
    assert not [b for b in page.button if b.key == "reset-lab"], "the lab has its first settings again"
    again = open_lesson(lesson_id, learner)
    assert any("finished this lesson" in text for text in texts(again, "success"))
    assert [e.label for e in again.expander if lesson.cards[1].title in e.label], "parts that are done can be opened again"
    assert not [b for b in again.button if b.label == "Lock in"]
    complaints = [r.getMessage() for r in caplog.records if "ScriptRunContext" not in r.getMessage()]
    assert not [text for text in complaints if "lesson" in text.lower()]


def timed(lesson: Lesson, block: Predict) -> bool:
    """Whether the answer is a time of the run, which the scripted model decides."""
    return any(getattr(b, "predict", "") == block.id and b.timing for b in lesson.blocks)


@pytest.mark.parametrize("lesson_id", list(catalogue()))
def test_a_lesson_played_wrongly_is_told_so_and_goes_on(lesson_id: str, tmp_path: Path):
    lesson = catalogue()[lesson_id]
    page = open_lesson(lesson_id)
    play(page, lesson, rightly=False)
    kept = Store(page.session_state["learner"], tmp_path / "progress").load().of(lesson_id)
    assert kept.done
    for block in lesson.blocks:
        if isinstance(block, Predict) and not timed(lesson, block):
            assert not judge(block, kept.answers[block.id], kept.measured[block.id]).right, block.id
    assert sum(text.startswith("Not yet.") for text in texts(page, "warning")) >= 3


def test_a_prediction_is_needed_and_stays_locked():
    page = open_lesson("continuous-batching")
    press_key(page, "continue-0")
    assert not [b for b in page.button if b.label == "Run it on the engine"], "no run before the predictions"
    press_key(page, "lock-continuous-batching-who-works")
    assert any("Give an answer first" in text for text in texts(page, "warning"))
    page.radio(key="continuous-batching-who-works").set_value("full")
    press_key(page, "lock-continuous-batching-who-works")
    again = open_lesson("continuous-batching", page.session_state["learner"])
    assert any("B stays until the others are done" in text for text in texts(again, "markdown"))
    assert "continuous-batching-who-works" not in [r.key for r in again.radio]


def test_the_picture_moves_with_the_text():
    lesson = catalogue()["continuous-batching"]
    page = open_lesson(lesson.id)
    press_key(page, "continue-0")
    for name in ("who-works", "join-late"):
        block = lesson.block(name)
        answer(page, block, ANSWERS[lesson.id][name], f"{lesson.id}-{name}")
        press_key(page, f"lock-{lesson.id}-{name}")
    press_key(page, f"run-{lesson.id}-run-late")
    seen = []
    for _ in range(4):
        press_key(page, "forth-walk-late")
        charts = page.get("plotly_chart")
        assert len(charts) == 2
        seen.append(charts[0].proto.spec)
    assert len(set(seen)) == 4, "each step frames another column"


def test_an_order_with_parts_missing_says_how_many():
    lesson = catalogue()["one-request"]
    page = open_lesson(lesson.id)
    press_key(page, "continue-0")
    answer(page, lesson.block("steps"), 24, "one-request-steps")
    press_key(page, "lock-one-request-steps")
    for picked, words in (
        ([], "Give an answer first"),
        (["tokenise", "queue"], "3 of the 5 are not"),
        (["queue"], "4 of the 5 are"),
    ):
        answer(page, lesson.block("order"), picked, "one-request-order")
        press_key(page, "lock-one-request-order")
        assert any(text.startswith(words) for text in texts(page, "warning")), words
    assert not [b for b in page.button if b.label == "Run it on the engine"]


def test_the_picture_follows_to_an_explanation_of_an_older_run():
    """What is explained after an answer, or at the start of a part, is what the picture shows."""
    lesson = catalogue()["one-request"]
    page = open_lesson(lesson.id)
    play_until(page, lesson, "latency")
    assert "**Request B on a time axis**" in texts(page, "markdown")
    answer(page, lesson.block("latency"), 99, "one-request-latency")
    press_key(page, "lock-one-request-latency")
    assert "**Request A on a time axis**" in texts(page, "markdown")


def test_a_value_without_a_run_is_not_called_measured():
    lesson = catalogue()["kv-cache"]
    page = open_lesson(lesson.id)
    play_until(page, lesson, "example")
    answer(page, lesson.block("example"), 512, "kv-cache-example")
    press_key(page, "lock-kv-cache-example")
    tables = [element.proto.body for element in page.get("html") if "lesson-compare" in element.proto.body]
    assert ["The formula gives" in table for table in tables] == ["512 MiB" in table for table in tables]
    assert any("512 MiB" in table for table in tables)


def test_a_free_run_shows_its_numbers():
    page = open_lesson("continuous-batching")
    lesson = catalogue()["continuous-batching"]
    play_until(page, lesson, "play")
    page.selectbox(key="explore-continuous-batching-play-batching").set_value("static")
    press_key(page, "explore-continuous-batching-play-run")
    assert page.table
    shown = page.table[0].value
    assert int(shown["Rows of padding"].iloc[0]) > 0
    assert shown["Batching"].iloc[0] == "static"


def play_until(page: AppTest, lesson: Lesson, block_id: str) -> None:
    """Play rightly until the part that holds the block."""
    cards = []
    for card in lesson.cards:
        if any(block.id == block_id for block in card.blocks):
            break
        cards.append(card)
    import msgspec

    play(page, msgspec.structs.replace(lesson, cards=tuple(cards)), rightly=True)


def test_the_course_map_before_and_after():
    page = AppTest.from_file(MAIN, default_timeout=60)
    page.switch_page(str(ROOT / "screens" / "lessons.py")).run()
    assert not page.exception
    assert {"Execution", "Scheduling", "Memory", "Performance"} <= set(texts(page, "header"))
    learner = page.session_state["learner"]
    press_key(open_lesson("continuous-batching", learner), "continue-0")
    again = AppTest.from_file(MAIN, default_timeout=60)
    again.query_params["learner"] = learner
    again.switch_page(str(ROOT / "screens" / "lessons.py")).run()
    assert any(learner in element.value for element in again.code), "the resume link is shown"
    assert any("In your lab" in text for text in texts(again, "caption"))
    assert any("Lesson: part 2 of 7" in text for text in texts(again, "caption"))


def test_an_unknown_lesson_and_a_damaged_link_say_what_to_do():
    page = AppTest.from_file(MAIN, default_timeout=60)
    page.query_params["lesson"] = "no-such"
    page.query_params["learner"] = "../../etc"
    page.switch_page(str(ROOT / "screens" / "lesson.py")).run()
    assert not page.exception
    assert any("no lesson “no-such”" in text for text in texts(page, "info"))
    assert any("resume link is damaged" in text for text in texts(page, "warning"))


def test_a_run_without_an_engine_says_so():
    install(Hub(EngineClient("scripted")))
    page = open_lesson("paged-attention")
    lesson = catalogue()["paged-attention"]
    block = lesson.block("together-max")
    answer(page, block, 4, "paged-attention-together-max")
    press_key(page, "lock-paged-attention-together-max")
    press_key(page, "run-paged-attention-run-max")
    assert any("Open the Lab, press “Restart the engine”" in text for text in texts(page, "error"))
    assert "run-max" not in Store(page.session_state["learner"]).load().of("paged-attention").ran


def test_a_run_that_is_asked_for_too_early_waits_for_the_model():
    client = EngineClient("scripted")
    install(Hub(client))
    page = open_lesson("paged-attention")
    answer(page, catalogue()["paged-attention"].block("together-max"), 4, "paged-attention-together-max")
    press_key(page, "lock-paged-attention-together-max")
    client.start()
    try:
        assert client.state.state == "starting"
        press_key(page, "run-paged-attention-run-max")
        assert not texts(page, "error")
        assert "run-max" in Store(page.session_state["learner"]).load().of("paged-attention").ran
    finally:
        client.close()


def test_every_module_has_experiments_and_values():
    for lesson in catalogue().values():
        assert module_of(lesson.folder).EXPERIMENTS
        assert module_of(lesson.folder).VALUES
