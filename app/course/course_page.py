"""The course map: the subject's own tree, what is done, how long the rest takes, and the learner's file."""

from __future__ import annotations

import streamlit as st

from app.course.gauges import FIGURES, Reading
from app.course.progress import MAX_UPLOAD, Progress, ProgressError, Store, check_progress, read_progress
from app.course.style import style
from app.downloads import offer
from app.figures.palette import theme as theme_named
from app.reading import current_lab
from lessons.catalogue import catalogue, course, glossary, slug
from lessons.model import Lesson, Node


def course_page(store: Store) -> None:
    """The whole page."""
    lab = current_lab()
    progress = store.load()
    lessons = catalogue()
    st.html(style(theme_named("dark" if st.context.theme.type == "dark" else "light")))
    st.title("Lessons", anchor=False)
    st.markdown(
        "Each lesson asks you to predict something, runs it on your engine, and shows how far apart you were. "
        "Every number comes from steps that your engine really takes."
    )
    done = sum(progress.of(name).done for name in lessons)
    left = sum(_minutes_left(lesson, progress) for lesson in lessons.values())
    words = f"{done} of {len(lessons)} lessons done, about {left} minutes left" if left else "All lessons done"
    st.progress(done / len(lessons), text=words)
    _next_lesson(lessons, progress)
    reading = Reading(lab.log, lab.client.state.model, lab.config)
    with st.container(key="course-map"):
        columns = st.columns(len(course().branches))
        for column, branch in zip(columns, course().branches, strict=True):
            with column:
                st.header(branch.title, anchor=False)
                for node in branch.nodes:
                    _node(node, lessons, progress, reading)
    st.caption("“In your lab” is what your own lab shows right now. It changes as you work.")
    _progress_file(store, progress, lessons)
    st.header("All words", anchor=False)
    entries = sorted(glossary().items(), key=lambda item: item[0].lower())
    lines = "".join(f"<div><dt id='{slug(name)}'>{name}</dt><dd>{term.text}</dd></div>" for name, term in entries)
    st.html(f"<dl class='lesson-words'>{lines}</dl>")


def _minutes_left(lesson: Lesson, progress: Progress) -> int:
    entry = progress.of(lesson.id)
    return 0 if entry.done else round(lesson.front.minutes * (1 - entry.cards / len(lesson.cards)))


def _next_lesson(lessons: dict[str, Lesson], progress: Progress) -> None:
    following = next((lesson for name, lesson in lessons.items() if not progress.of(name).done), None)
    if following is None:
        return
    begun = progress.of(following.id).cards > 0
    with st.container(key="next-lesson"):
        st.page_link(
            "screens/lesson.py",
            label=f"{'Go on with' if begun else 'Start'}: {following.front.title}",
            query_params={"lesson": following.id},
            icon=":material/arrow_forward:",
        )


def _node(node: Node, lessons: dict[str, Lesson], progress: Progress, reading: Reading) -> None:
    with st.container(border=True):
        lesson = lessons.get(node.lesson)
        if lesson is None:
            st.markdown(f"**{node.title}**")
            st.caption(f"{node.text} Its lesson comes later.")
        else:
            entry = progress.of(lesson.id)
            st.page_link(
                "screens/lesson.py",
                label=node.title,
                query_params={"lesson": lesson.id},
                icon=":material/check_circle:" if entry.done else ":material/school:",
            )
            if entry.done:
                state = "done"
            elif entry.cards:
                state = f"part {entry.cards + 1} of {len(lesson.cards)}"
            else:
                state = f"about {lesson.front.minutes} minutes"
            st.caption(f"{node.text} Lesson: {state}.")
        shown = FIGURES[node.figure](reading) if node.figure else ""
        if shown:
            st.caption(f"In your lab: **{shown}**")


def _progress_file(store: Store, progress: Progress, lessons: dict[str, Lesson]) -> None:
    st.header("Your progress", anchor=False)
    st.markdown(
        "Your progress is kept on this machine under the link below; there is no account. Keep the link to go on later, "
        "or take the file with you to another machine."
    )
    st.code(f"?learner={store.token}", language=None)
    st.caption("Put this behind the page's address, or bookmark the page: the address holds it already.")
    left, right = st.columns(2)
    with left:
        kept = store.path.read_bytes() if store.path.exists() else b'{"inference_lab_progress": 1}'
        offer("Download your progress", kept, "inference-lab-progress.json", "application/json")
    brought = right.file_uploader("Bring a progress file back", type=["json"], max_upload_size=1)
    if brought is not None and st.session_state.get("brought") != brought.file_id:
        try:
            if brought.size > MAX_UPLOAD:
                raise ProgressError(f"the file has {brought.size:,} bytes; a progress file has at most {MAX_UPLOAD:,}")
            found = read_progress(brought.getvalue())
            check_progress(found, lessons)
        except ProgressError as error:
            st.error(f"This file was not taken: {error}. Your progress is as it was.")
            return
        store.save(found)
        st.session_state["brought"] = brought.file_id
        st.rerun()
    if brought is not None:
        st.success("The file was taken. Runs are not in it: run a lesson's experiments again to see their pictures.")
