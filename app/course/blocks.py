"""The blocks of a lesson on the page: predict, run, compare, explain, explore, check, in production."""

from __future__ import annotations

import html
import time
from typing import Any

import msgspec
import streamlit as st

from app.course import focus
from app.course.view import StoredRuns, View, is_done, next_target
from app.session import Lab, LabUnknown, hub
from engine.core.config import ConfigError
from engine.serve.client import HostError, HostGone
from lessons.judge import judge, right_option, say
from lessons.model import AnyBlock, Check, Compare, Explain, Explore, Knob, Predict, Production, Question, RunBlock, Text
from lessons.runs import Answer, Experiment, RunError, measured, run_on_lab


def draw_block(view: View, block: AnyBlock) -> None:
    """Show one block and react to what the reader does with it."""
    match block:
        case Text():
            st.markdown(view.words(block.markdown))
        case Predict():
            _predict(view, block)
        case RunBlock():
            _run(view, block)
        case Compare():
            _compare(view, block)
        case Explain():
            _explain(view, block)
        case Explore():
            _explore(view, block)
        case Check():
            for question in block.questions:
                _question(view, block, question)
        case Production():
            _production(view, block)


# Predict, run, compare ----------------------------------------------------------------------------------------------------


def _predict(view: View, block: Predict) -> None:
    given = view.mine.answers.get(block.id)
    if given is not None:
        st.markdown(f"**Predict.** {view.words(block.question)}")
        st.markdown(f":material/lock: You said: **{say(given, block)}**")
        return
    with st.form(f"predict-{block.id}", border=True):
        st.markdown(f"**Predict.** {view.words(block.question)}")
        answer = _answer_input(block, f"{view.lesson.id}-{block.id}")
        if st.form_submit_button("Lock in", key=f"lock-{view.lesson.id}-{block.id}"):
            missing = _missing(block, answer)
            if missing or answer is None:
                st.warning(missing)
            else:
                view.mine.answers[block.id] = answer
                view.save()
                view.show_what_follows(block.id)
                focus.ask(next_target(view, block.id))
                st.rerun()
    for place, hint in enumerate(block.hints, 1):
        with st.expander(f"Hint {place}", key=f"hint-{view.lesson.id}-{block.id}-{place}"):
            st.markdown(view.words(hint))


def _answer_input(block: Predict | Question, key: str) -> Answer | None:
    texts = {option.id: option.text for option in block.options}
    if block.kind == "number":
        unit = block.prefix or block.unit
        label = f"Your answer ({unit})" if unit else "Your answer"
        found = st.number_input(label, value=None, key=key, step=None, format="%g")
        return None if found is None else float(found)
    if block.kind == "choice":
        return st.radio("Your answer", list(texts), index=None, format_func=texts.__getitem__, key=key)
    picked = st.multiselect(
        "Pick them one after the other, the first one first", list(texts), format_func=texts.__getitem__, key=key
    )
    return picked or None


def _missing(block: Predict, answer: Answer | None) -> str:
    """What an answer lacks, in words; '' when it can be locked in."""
    if answer is None:
        return "Give an answer first. A guess is fine, it can't be wrong before the run."
    if isinstance(answer, list) and len(answer) < len(block.options):
        left = len(block.options) - len(answer)
        return f"{left} of the {len(block.options)} {'is' if left == 1 else 'are'} not in your order yet. Pick all of them."
    return ""


def _run(view: View, block: RunBlock) -> None:
    if block.text:
        st.markdown(view.words(block.text))
    ran = all(name in view.runs for name in block.experiments)
    if block.id in view.mine.ran:
        st.caption(_ran_words(view, block) if ran else "This run's records are not here. Run it again to see its pictures.")
    key = f"run-{view.lesson.id}-{block.id}"
    first = block.id not in view.mine.ran
    if first and view.lab.log.num_live:
        st.caption(f"Your lab is set up anew for it; its {view.lab.log.num_live} requests are stopped.")
    elif first and not view.mine.ran:
        st.caption("Your lab is set up anew for it. You can set it back at the end of the lesson.")
    clicked = st.button(block.button if first else "Run again", key=key, type="primary" if first else "secondary")
    if clicked and _do_runs(view, [(name, {}) for name in block.experiments]):
        if first:
            view.mine.ran.append(block.id)
        _remember_measured(view)
        view.save()
        view.show(block.id)
        focus.ask(next_target(view, block.id))
        st.rerun()


def _ran_words(view: View, block: RunBlock) -> str:
    records = [view.runs[name] for name in block.experiments]
    steps = sum(len(record.work) for record in records)
    seconds = sum(record.work[-1].end - record.work[0].start for record in records if record.work)
    title = records[-1].model.get("title", "a script")
    return f"Ran {steps} steps in {seconds:.2f} s on {title}, {records[-1].model.get('device', 'no device')}."


def _do_runs(view: View, wanted: list[tuple[str, dict[str, Any]]]) -> bool:
    """Run experiments on the reader's lab; says what went wrong, if anything did."""
    if not _engine_ready():
        return False
    try:
        with st.spinner("The engine works…", show_time=True):
            hub().ensure_open(view.lab)
            for name, knobs in wanted:
                experiment = within_quota(view.module.EXPERIMENTS[name](**knobs), view.lab)
                record = run_on_lab(hub().client, view.lab.token, experiment)
                view.lab.config = record.config
                view.store.save_run(view.lesson.id, name, record)
    except (RunError, HostError, HostGone, ConfigError, LabUnknown) as error:
        st.error(f"The run did not work: {error}")
        return False
    view.runs = StoredRuns(view.store, view.lesson.id, list(view.module.EXPERIMENTS))
    return True


def _engine_ready() -> bool:
    """Wait for a model that is on its way, and tell how far it is; says so if there is none to wait for."""
    client, told = hub().client, st.empty()
    while (state := client.state).state in ("starting", "loading"):
        told.info(f"The run begins as soon as the model is loaded. Now: {state.stage or state.state}.")
        time.sleep(0.2)
    told.empty()
    if state.state == "ready":
        return True
    why = state.error or "its process ended"
    st.error(
        f"The engine is not running: {why}. Open the Lab, press “Restart the engine”, and come back: your answers stay."
    )
    return False


def within_quota(experiment: Experiment, lab: Lab) -> Experiment:
    """The experiment with a queue as long as a session may have."""
    config = {"max_num_queued_requests": lab.limits.queued, **experiment.config}
    return msgspec.structs.replace(experiment, config=config)


def _remember_measured(view: View) -> None:
    """Keep what the runs measured beside the predictions, for a file that travels without the records."""
    for block in view.lesson.blocks:
        if isinstance(block, Predict) and block.id in view.mine.answers:
            found = measured(view.values, block.answer, view.runs)
            if found is not None:
                view.mine.measured[block.id] = found


def _compare_table(given: str, truth: str, distance: str, source: str) -> str:
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in (given, truth, distance))
    heads = "".join(f"<th scope='col'>{text}</th>" for text in ("You predicted", source, "Apart"))
    return f"<table class='lesson-compare'><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"


def _compare(view: View, block: Compare) -> None:
    predict = view.lesson.block(block.predict)
    assert isinstance(predict, Predict)
    given = view.mine.answers.get(predict.id)
    truth = measured(view.values, predict.answer, view.runs)
    if truth is None:
        truth = view.mine.measured.get(predict.id)
    if given is None or truth is None:
        return
    verdict = judge(predict, given, truth)
    with st.container(border=True):
        st.markdown(f"**Compare.** {view.words(predict.question)}")
        needs_no_run = measured(view.values, predict.answer, {}) is not None
        source = "The formula gives" if needs_no_run else "This run measured"
        st.html(_compare_table(say(given, predict), say(truth, predict), verdict.distance, source))
        (st.success if verdict.right else st.warning)(view.words(block.right if verdict.right else block.wrong))
        if block.samples:
            count = measured(view.values, block.samples, view.runs)
            if count is not None:
                st.caption(f"The measured value rests on {say(count)} sample{'' if count == 1 else 's'} of this run.")
        if block.timing and any(record.disturbed for record in view.runs.values()):
            st.warning("Something else used the engine during this run, so the times are not its own. Run it again.")


# Explain, explore, check, production --------------------------------------------------------------------------------------


def _explain(view: View, block: Explain) -> None:
    last = len(block.frames) - 1
    kept, frame = view.focused()
    place = frame if kept == block.id and frame is not None else view.mine.seen.get(block.id, 0)
    place = max(0, min(place, last))
    with st.container(border=True, key=f"frame-{block.id}"):
        st.markdown(view.words(block.frames[place].text))
        if not last:
            return
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Back", key=f"back-{block.id}", disabled=place == 0, on_click=_move, args=(view, block, place - 1))
            st.button(
                "Next" if place < last else "Show again from the start",
                key=f"forth-{block.id}",
                type="primary" if place < last else "tertiary",
                on_click=_move,
                args=(view, block, place + 1 if place < last else 0),
            )
            st.caption(f"{place + 1} of {last + 1}", width="content")


def _move(view: View, block: Explain, place: int) -> None:
    view.reload()
    view.show(block.id, place)
    done_before = is_done(block, view.mine)
    if place > view.mine.seen.get(block.id, 0):
        view.mine.seen[block.id] = place
        view.save()
    if is_done(block, view.mine) and not done_before:
        focus.ask(next_target(view, block.id))


def _explore(view: View, block: Explore) -> None:
    st.markdown(view.words(block.text))
    key = f"explore-{view.lesson.id}-{block.id}"
    with st.form(key, border=True):
        knobs = {knob.name: _knob(knob, f"{key}-{knob.name}") for knob in block.knobs}
        clicked = st.form_submit_button("Run with these settings", key=f"{key}-run")
    history: list[dict[str, Any]] = st.session_state.setdefault(f"{key}-history", [])
    if clicked and _do_runs(view, [(block.experiment, knobs)]):
        row: dict[str, Any] = {knob.label: str(knobs[knob.name]) for knob in block.knobs}
        for shown in block.shows:
            found = measured(view.values, shown.value, view.runs)
            row[f"{shown.label} ({shown.unit})" if shown.unit else shown.label] = say(found)
        history.append(row)
        del history[:-6]
        view.show(block.id)
    if history:
        st.table(history[::-1])
        st.caption("Newest run first. The picture shows it.")


def _knob(knob: Knob, key: str) -> int | str:
    if knob.choices:
        place = knob.choices.index(str(knob.default))
        return st.selectbox(knob.label, list(knob.choices), index=place, key=key)
    return int(
        st.number_input(
            knob.label,
            min_value=knob.least,
            max_value=knob.most,
            value=int(knob.default),
            step=knob.step,
            key=key,
            help=f"From {knob.least} to {knob.most}.",
        )
    )


def _question(view: View, block: Check, question: Question) -> None:
    entry = f"{block.id}/{question.id}"
    given = view.mine.checks.get(entry)
    with st.form(f"check-{view.lesson.id}-{entry}", border=True):
        st.markdown(f"**{view.words(question.text)}**")
        answer = _answer_input(question, f"{view.lesson.id}-{entry}")
        submitted = st.form_submit_button("Check", key=f"submit-{view.lesson.id}-{entry}")
        if submitted and answer is not None and not isinstance(answer, list):
            view.mine.checks[entry] = given = answer
            view.save()
        elif submitted:
            st.warning("Choose an answer first.")
        if given is not None:
            _feedback(view, question, given)


def _feedback(view: View, question: Question, given: float | str) -> None:
    if question.kind == "choice":
        option = next((o for o in question.options if o.id == given), None)
        if option is None:
            return
        right, text = option.id == right_option(question), option.feedback
    else:
        truth = measured(view.values, question.answer, view.runs)
        if truth is None:
            st.info("This question needs a run from above that is not here any more. Run it again.")
            return
        right = judge(question, given, truth).right
        text = question.right if right else question.wrong
    (st.success if right else st.warning)(("" if right else "Not yet. ") + view.words(text))


def _production(view: View, block: Production) -> None:
    rows = "\n".join(f"| {flag.engine} | `{flag.flag}` | {view.words(flag.text)} |" for flag in block.flags)
    st.markdown(f"| engine | flag | what it is |\n| --- | --- | --- |\n{rows}")
    st.markdown(view.words(block.text))
