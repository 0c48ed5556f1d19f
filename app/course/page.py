"""A lesson on the page: one thing to do at a time on the left, the picture it speaks of on the right.

State: what is done comes from the learner's file; what is looked at (which frame, which run) is this session's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import streamlit as st

from app.course import focus
from app.course.pictures import Picture, Wanted, draw
from app.course.progress import LessonProgress, Progress, Store
from app.figures.palette import Theme
from app.figures.palette import theme as theme_named
from app.reading import current_lab
from app.session import Lab, hub
from engine.core.config import ConfigError
from engine.serve.client import HostError, HostGone
from lessons.catalogue import TERM, catalogue, forms, glossary, slug, texts_of
from lessons.judge import fill, judge, right_option, say
from lessons.model import (
    AnyBlock,
    Card,
    Check,
    Compare,
    Explain,
    Explore,
    Knob,
    Lesson,
    Predict,
    Production,
    Question,
    RunBlock,
    Text,
)
from lessons.runs import Answer, RunError, RunRecord, Value, measured, run_on_lab

STYLE = """
<style>
.st-key-lesson-picture { position: sticky; top: 4.2rem; max-height: calc(100vh - 5rem); overflow-y: auto; }
.st-key-lesson-picture:focus-within { outline: none; }
.lesson-tables table { width: 100%; border-collapse: collapse; font-size: 0.95rem; }
.lesson-tables th, .lesson-tables td { text-align: left; padding: 0.2rem 0.5rem; border-bottom: 1px solid #8884; }
.lesson-tables td { font-variant-numeric: tabular-nums; }
.lesson-tokens ol { display: flex; flex-wrap: wrap; gap: 0.3rem; list-style: none; padding: 0; margin: 0; }
.lesson-tokens li { border: 1px solid #8888; border-radius: 0.3rem; padding: 0.1rem 0.35rem; margin: 0; }
.lesson-tokens li.now { outline: 2px solid currentColor; }
.lesson-tokens li span { display: block; font-family: monospace; white-space: pre; }
.lesson-tokens li small { font-size: 0.72rem; }
.lesson-tokens p { margin: 0 0 0.4rem 0; overflow-wrap: anywhere; }
.lesson-words dt { font-weight: 600; scroll-margin-top: 5rem; }
.lesson-words dd { margin: 0 0 0.4rem 1rem; }
.lesson-words dt:target { outline: 2px solid currentColor; outline-offset: 2px; }
@media (max-width: 640px) { .st-key-lesson-picture { position: static; max-height: none; } }
</style>
"""


@dataclass
class View:
    """Everything that the parts of the page need."""

    lesson: Lesson
    module: ModuleType
    store: Store
    progress: Progress
    lab: Lab
    theme: Theme
    runs: Mapping[str, RunRecord]

    @property
    def mine(self) -> LessonProgress:
        """The progress in this lesson."""
        return self.progress.of(self.lesson.id)

    @property
    def values(self) -> Mapping[str, Value]:
        """What the lesson's runs measure."""
        values: Mapping[str, Value] = self.module.VALUES
        return values

    def reload(self) -> None:
        """Take the newest progress: another window of the same learner may have changed it."""
        self.progress = self.store.load()

    def save(self) -> None:
        """Keep the progress."""
        self.store.save(self.progress)

    def words(self, text: str) -> str:
        """Prose with values filled in and glossary words linked."""
        return link_terms(fill(text, self.values, self.runs))

    def focused(self) -> tuple[str, int | None]:
        """The block whose picture is shown, and its frame."""
        kept: tuple[str, int | None] = st.session_state.get(self._focus_key, ("", None))
        return kept

    def show(self, block_id: str, frame: int | None = None) -> None:
        """Move the picture to a block."""
        st.session_state[self._focus_key] = (block_id, frame)

    @property
    def _focus_key(self) -> str:
        return f"picture-of-{self.lesson.id}"


class StoredRuns(Mapping[str, RunRecord]):
    """The learner's runs of a lesson, read when they are looked at."""

    def __init__(self, store: Store, lesson_id: str, names: list[str]) -> None:
        self._store, self._lesson_id, self._names = store, lesson_id, names
        self._found: dict[str, RunRecord | None] = {}

    def __getitem__(self, name: str) -> RunRecord:
        if name not in self._found:
            self._found[name] = self._store.load_run(self._lesson_id, name) if name in self._names else None
        record = self._found[name]
        if record is None:
            raise KeyError(name)
        return record

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True


def link_terms(text: str) -> str:
    """``[[term]]`` → a link to the word's line at the end of the page; the line shows on hover, too."""
    known = forms(glossary())

    def link(found: re.Match[str]) -> str:
        name = known[found.group(1).lower()]
        hover = glossary()[name].text.replace('"', "'")
        return f'[{found.group(2) or found.group(1)}](#{slug(name)} "{hover}")'

    return TERM.sub(link, text)


def lesson_page(lesson: Lesson, module: ModuleType, store: Store) -> None:
    """The whole page of one lesson."""
    lab = current_lab()
    theme = theme_named("dark" if st.context.theme.type == "dark" else "light")
    runs = StoredRuns(store, lesson.id, list(module.EXPERIMENTS))
    view = View(lesson, module, store, store.load(), lab, theme, runs)
    st.html(STYLE)
    _head(view)
    left, right = st.columns([5, 6], gap="medium")
    with left:
        _cards(view)
        _end_matter(view)
    with right, st.container(key="lesson-picture"):
        _picture_side(view)
    focus.keeper()


def _head(view: View) -> None:
    front = view.lesson.front
    st.title(front.title, anchor=False)
    st.caption(f"{front.summary} About {front.minutes} minutes.")
    if not view.mine.cards:
        before = [catalogue()[name].front.title for name in front.prerequisites if name in catalogue()]
        st.markdown("**You will be able to**\n\n" + "\n".join(f"- {text}" for text in front.objectives))
        if before:
            st.caption(f"Best after: {', '.join(before)}.")
    st.progress(view.mine.cards / len(view.lesson.cards), text=_progress_text(view))


def _progress_text(view: View) -> str:
    total, done = len(view.lesson.cards), view.mine.cards
    if view.mine.done:
        return "Done. Every part can be opened again."
    left = round(view.lesson.front.minutes * (total - done) / total)
    return f"Part {done + 1} of {total}, about {max(left, 1)} minutes left"


# Cards --------------------------------------------------------------------------------------------------------------------


def _cards(view: View) -> None:
    cards = view.lesson.cards
    current = view.mine.cards
    for place, card in enumerate(cards):
        if place < current:
            with st.expander(f":material/check: {card.title}", key=f"card-{place}"):
                for block in card.blocks:
                    _block(view, block)
        elif place == current:
            with st.container(border=True, key=f"card-{place}"):
                st.subheader(card.title, anchor=False)
                _current_card(view, card, place)
    later = [card.title for card in cards[current + 1 :]]
    if later:
        st.caption("Then: " + " · ".join(later))
    if view.mine.done:
        with st.container(key="lesson-done"):
            st.success("You finished this lesson.")
            st.page_link("screens/lessons.py", label="Go to the course map")


def _current_card(view: View, card: Card, place: int) -> None:
    for block in card.blocks:
        with st.container(key=f"block-{block.id}"):
            _block(view, block)
        if not is_done(block, view.mine):
            return
    last = place + 1 == len(view.lesson.cards)
    with st.container(key=f"after-{place}"):
        st.button(
            "Finish the lesson" if last else "Continue",
            type="primary",
            key=f"continue-{place}",
            on_click=_close_card,
            args=(view, place),
        )


def _close_card(view: View, place: int) -> None:
    view.reload()
    view.mine.cards = max(view.mine.cards, place + 1)
    view.mine.done = view.mine.cards == len(view.lesson.cards)
    view.save()
    focus.ask("lesson-done" if view.mine.done else f"card-{place + 1}")


def is_done(block: AnyBlock, mine: LessonProgress) -> bool:
    """Whether the next block may appear."""
    match block:
        case Predict():
            return block.id in mine.answers
        case RunBlock():
            return block.id in mine.ran
        case Explain():
            return mine.seen.get(block.id, 0) >= len(block.frames) - 1
        case Check():
            return all(f"{block.id}/{question.id}" in mine.checks for question in block.questions)
        case _:
            return True


def _next_target(view: View, block_id: str) -> str:
    """The key of what follows a block in its part."""
    for place, card in enumerate(view.lesson.cards):
        ids = [block.id for block in card.blocks]
        if block_id in ids:
            following = ids.index(block_id) + 1
            if following == len(ids):
                return f"after-{place}"
            return f"block-{ids[following]}"
    return ""


def _block(view: View, block: AnyBlock) -> None:
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
            if answer is None:
                st.warning("Give an answer first. A guess is fine, it can't be wrong before the run.")
            else:
                view.mine.answers[block.id] = answer
                view.save()
                focus.ask(_next_target(view, block.id))
                st.rerun()
    for place, hint in enumerate(block.hints, 1):
        with st.expander(f"Hint {place}", key=f"hint-{view.lesson.id}-{block.id}-{place}"):
            st.markdown(view.words(hint))


def _answer_input(block: Predict | Question, key: str) -> Answer | None:
    texts = {option.id: option.text for option in block.options}
    if block.kind == "number":
        label = f"Your answer {block.unit}" if block.unit.startswith("(") else f"Your answer ({block.unit})"
        found = st.number_input(label if block.unit else "Your answer", value=None, key=key, step=None, format="%g")
        return None if found is None else float(found)
    if block.kind == "choice":
        return st.radio("Your answer", list(texts), index=None, format_func=texts.__getitem__, key=key)
    picked = [
        st.selectbox(f"{place}.", list(texts), index=None, format_func=texts.__getitem__, key=f"{key}-{place}")
        for place in range(1, len(texts) + 1)
    ]
    chosen = [item for item in picked if item is not None]
    return chosen if len(set(chosen)) == len(texts) else None


def _run(view: View, block: RunBlock) -> None:
    if block.text:
        st.markdown(view.words(block.text))
    ran = all(name in view.runs for name in block.experiments)
    if block.id in view.mine.ran:
        st.caption(_ran_words(view, block) if ran else "This run's records are not here. Run it again to see its pictures.")
    key = f"run-{view.lesson.id}-{block.id}"
    first = block.id not in view.mine.ran
    if first and view.lab.log.num_live:
        st.caption(f"{view.lab.log.num_live} requests of your lab are stopped for it.")
    clicked = st.button(block.button if first else "Run again", key=key, type="primary" if first else "secondary")
    if clicked and _do_runs(view, [(name, {}) for name in block.experiments]):
        if first:
            view.mine.ran.append(block.id)
        _remember_measured(view)
        view.save()
        view.show(block.id)
        focus.ask(_next_target(view, block.id))
        st.rerun()


def _ran_words(view: View, block: RunBlock) -> str:
    records = [view.runs[name] for name in block.experiments]
    steps = sum(len(record.work) for record in records)
    seconds = sum(record.work[-1].end - record.work[0].start for record in records if record.work)
    title = records[-1].model.get("title", "a script")
    return f"Ran {steps} steps in {seconds:.2f} s on {title}, {records[-1].model.get('device', 'no device')}."


def _do_runs(view: View, wanted: list[tuple[str, dict[str, Any]]]) -> bool:
    """Run experiments on the reader's lab; says what went wrong, if anything did."""
    state = hub().client.state
    if state.state != "ready":
        st.info(f"The model is not ready yet: {state.error or state.stage or state.state}. Try again in a moment.")
        return False
    try:
        with st.spinner("The engine works…"):
            hub().ensure_open(view.lab)
            for name, knobs in wanted:
                experiment = view.module.EXPERIMENTS[name](**knobs)
                record = run_on_lab(hub().client, view.lab.token, experiment)
                view.store.save_run(view.lesson.id, name, record)
    except (RunError, HostError, HostGone, ConfigError) as error:
        st.error(f"The run did not work: {error}")
        return False
    view.runs = StoredRuns(view.store, view.lesson.id, list(view.module.EXPERIMENTS))
    return True


def _remember_measured(view: View) -> None:
    """Keep what the runs measured beside the predictions, for a file that travels without the records."""
    for block in view.lesson.blocks:
        if isinstance(block, Predict) and block.id in view.mine.answers:
            found = measured(view.values, block.answer, view.runs)
            if found is not None:
                view.mine.measured[block.id] = found


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
        columns = st.columns(3)
        for column, name, text in zip(
            columns,
            ("You predicted", "This run measured", "Apart"),
            (say(given, predict), say(truth, predict), verdict.distance),
            strict=True,
        ):
            column.caption(name)
            column.markdown(f"**{text}**")
        (st.success if verdict.right else st.warning)(view.words(block.right if verdict.right else block.wrong))
        if block.samples:
            count = measured(view.values, block.samples, view.runs)
            if count is not None:
                st.caption(f"The measured value rests on {say(count)} samples of this run.")
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
        back, counter, forth = st.columns([2, 2, 3], vertical_alignment="center")
        back.button("Back", key=f"back-{block.id}", disabled=place == 0, on_click=_move, args=(view, block, place - 1))
        counter.caption(f"{place + 1} of {last + 1}")
        words = "Next" if place < last else "Show again from the start"
        forth.button(
            words,
            key=f"forth-{block.id}",
            type="primary" if place < last else "tertiary",
            on_click=_move,
            args=(view, block, place + 1 if place < last else 0),
        )


def _move(view: View, block: Explain, place: int) -> None:
    view.reload()
    view.show(block.id, place)
    done_before = is_done(block, view.mine)
    if place > view.mine.seen.get(block.id, 0):
        view.mine.seen[block.id] = place
        view.save()
    if is_done(block, view.mine) and not done_before:
        focus.ask(_next_target(view, block.id))


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
        label = "Check" if given is None else "Check again"
        submitted = st.form_submit_button(label, key=f"submit-{view.lesson.id}-{entry}")
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
    (st.success if right else st.warning)(("Right. " if right else "Not yet. ") + view.words(text))


def _production(view: View, block: Production) -> None:
    rows = "\n".join(f"| {flag.engine} | `{flag.flag}` | {view.words(flag.text)} |" for flag in block.flags)
    st.markdown(f"| engine | flag | what it is |\n| --- | --- | --- |\n{rows}")
    st.markdown(view.words(block.text))


# The picture, and what stands at the end ----------------------------------------------------------------------------------


def _picture_side(view: View) -> None:
    """The picture of the block that was touched last; else of the last one that has something to show."""
    block, frame = _shown_block(view)
    if block is None:
        with st.container(border=True):
            st.markdown("**The picture**")
            st.caption("Nothing has run in this lesson yet. After the first run your engine's own steps are drawn here.")
        return
    run, kinds, step, caption, request = _spoken_of(view, block, frame)
    wanted = Wanted(
        runs=view.runs, run=run, step=step, request=request, theme=view.theme,
        sizes=_sizes(view), pairs=getattr(view.module, "PAIRS", {}),
    )  # fmt: skip
    for place, kind in enumerate(kinds):
        try:
            _picture(draw(kind, wanted), f"lesson-figure-{place}-{kind}")
        except KeyError:
            st.caption("The records of this run are not here. Run it again to see the picture.")
            return
    if caption:
        st.caption(view.words(caption))
    record = view.runs[run]
    st.caption(f"Drawn from the run “{run}” on {record.model.get('title', 'a script')}: {len(record.work)} steps.")
    st.page_link("screens/lab.py", label="Open the lab: the newest run is there, step by step")


def _sizes(view: View) -> dict[str, dict[str, float]]:
    found = {}
    for name, function in getattr(view.module, "SIZES", {}).items():
        if name in view.runs:
            found[name] = function(view.runs)
    return found


def _shown_block(view: View) -> tuple[AnyBlock | None, int | None]:
    kept, frame = view.focused()
    for block in view.lesson.blocks:
        if block.id == kept and _run_of(block) in view.runs:
            return block, frame
    reached = [block for card in view.lesson.cards[: view.mine.cards + 1] for block in card.blocks]
    shown: AnyBlock | None = None
    for block in reached:
        before = shown is None or _has_been_reached(view, block)
        if before and _run_of(block) in view.runs and _has_been_reached(view, block):
            shown = block
    frame = view.mine.seen.get(shown.id, 0) if isinstance(shown, Explain) else None
    return shown, frame


def _has_been_reached(view: View, block: AnyBlock) -> bool:
    """Whether everything before the block in its part is done."""
    for card in view.lesson.cards:
        if block in card.blocks:
            before = card.blocks[: card.blocks.index(block)]
            return all(is_done(other, view.mine) for other in before)
    return False


def _run_of(block: AnyBlock) -> str:
    match block:
        case RunBlock():
            return block.experiments[-1]
        case Explain():
            return block.run
        case Explore():
            return block.experiment
        case _:
            return ""


def _spoken_of(view: View, block: AnyBlock, frame: int | None) -> tuple[str, tuple[str, ...], int | None, str, str]:
    """(run, kinds of pictures, step, caption, request) of a block at a frame."""
    if isinstance(block, Explain):
        place = max(0, min(frame or 0, len(block.frames) - 1))
        step: Any = block.frames[place].step
        if isinstance(step, str):
            found = measured(view.values, step, view.runs)
            step = int(found) if isinstance(found, (int, float)) else 0
        return block.run, block.pictures, int(step), block.caption, block.request
    assert isinstance(block, (RunBlock, Explore))
    request = block.request if isinstance(block, RunBlock) else ""
    return _run_of(block), (block.picture,), None, block.caption, request


def _picture(picture: Picture, key: str) -> None:
    st.markdown(f"**{picture.title}**")
    if picture.figure:
        st.plotly_chart(picture.figure, key=key, theme=None, config={"displayModeBar": False}, alt=picture.alt)
    else:
        st.html(picture.markup)


def _end_matter(view: View) -> None:
    st.subheader("Words of this lesson", anchor=False)
    st.html(words_list(view.lesson))
    with st.expander("What this lesson rests on", key="lesson-sources"):
        st.markdown("\n".join(f"- [{s.title}]({s.url}), {s.where}" for s in view.lesson.front.sources))
    st.page_link("screens/lessons.py", label="Course map, progress and resume link")


def words_list(lesson: Lesson) -> str:
    """The glossary lines of every word that the lesson uses, as a definition list with anchors."""
    known = forms(glossary())
    texts = [text for block in lesson.blocks for text in texts_of(block)]
    used = {known[found.group(1).lower()] for text in texts for found in TERM.finditer(text)}
    used |= {known[term.lower()] for term in lesson.front.terms}
    entries = [(name, glossary()[name].text) for name in sorted(used, key=str.lower)]
    lines = "".join(f"<dt id='{slug(name)}'>{name}</dt><dd>{text}</dd>" for name, text in entries)
    return f"<dl class='lesson-words'>{lines}</dl>"
