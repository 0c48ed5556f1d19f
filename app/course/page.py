"""A lesson on the page: one thing to do at a time on the left, the picture it speaks of on the right.

State: what is done comes from the learner's file; what is looked at (which frame, which run) is this session's.
"""

from __future__ import annotations

from types import ModuleType

import streamlit as st

from app.course import focus
from app.course.beside import picture_side
from app.course.blocks import draw_block
from app.course.progress import Store
from app.course.style import style
from app.course.view import StoredRuns, View, is_done
from app.figures.palette import theme as theme_named
from app.reading import current_lab
from app.session import DEFAULT_CONFIG, LabUnknown, hub
from engine.serve.client import HostError, HostGone
from lessons.catalogue import TERM, catalogue, forms, glossary, slug, texts_of
from lessons.model import Card, Lesson


def lesson_page(lesson: Lesson, module: ModuleType, store: Store) -> None:
    """The whole page of one lesson."""
    lab = current_lab()
    theme = theme_named("dark" if st.context.theme.type == "dark" else "light")
    runs = StoredRuns(store, lesson.id, list(module.EXPERIMENTS))
    view = View(lesson, module, store, store.load(), lab, theme, runs)
    st.html(style(theme))
    _head(view)
    left, right = st.columns([5, 6], gap="medium")
    with left:
        _cards(view)
        _end_matter(view)
    with right, st.container(key="lesson-picture"):
        picture_side(view)
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


def _cards(view: View) -> None:
    cards = view.lesson.cards
    current = view.mine.cards
    for place, card in enumerate(cards):
        if place < current:
            with st.expander(f":material/check: {card.title}", key=f"card-{place}"):
                for block in card.blocks:
                    draw_block(view, block)
        elif place == current:
            with st.container(border=True, key=f"card-{place}"):
                st.header(card.title, anchor=False)
                _current_card(view, card, place)
    later = [card.title for card in cards[current + 1 :]]
    if later:
        st.caption("Then: " + " · ".join(later))
    if view.mine.done:
        with st.container(key="lesson-done"):
            st.success("You finished this lesson.")
            if view.lab.open and view.lab.config != DEFAULT_CONFIG:
                st.button("Set my lab back to its first settings", key="reset-lab", on_click=_reset_lab, args=(view,))
            st.page_link("screens/lessons.py", label="Go to the course map")


def _reset_lab(view: View) -> None:
    """The lab leaves the settings of the last experiment."""
    try:
        hub().configure(view.lab, DEFAULT_CONFIG)
    except (HostError, HostGone, LabUnknown) as error:
        st.error(str(error))


def _current_card(view: View, card: Card, place: int) -> None:
    for block in card.blocks:
        with st.container(key=f"block-{block.id}"):
            draw_block(view, block)
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
    view.show_card(place + 1)
    focus.ask("lesson-done" if view.mine.done else f"card-{place + 1}")


def _end_matter(view: View) -> None:
    st.header("Words of this lesson", anchor=False)
    st.html(words_list(view.lesson))
    st.header("What this lesson rests on", anchor=False)
    st.markdown("\n".join(f"- [{s.title}]({s.url}), {s.where}" for s in view.lesson.front.sources))
    st.page_link("screens/lessons.py", label="Course map, progress and resume link")


def words_list(lesson: Lesson) -> str:
    """The glossary lines of every word that the lesson uses, as a definition list with anchors."""
    known = forms(glossary())
    texts = [text for block in lesson.blocks for text in texts_of(block)]
    used = {known[found.group(1).lower()] for text in texts for found in TERM.finditer(text)}
    used |= {known[term.lower()] for term in lesson.front.terms}
    entries = [(name, glossary()[name].text) for name in sorted(used, key=str.lower)]
    lines = "".join(f"<div><dt id='{slug(name)}'>{name}</dt><dd>{text}</dd></div>" for name, text in entries)
    return f"<dl class='lesson-words'>{lines}</dl>"
