"""One lesson: the one that the address names (``?lesson=ID``)."""

import streamlit as st

from app.course.learner import current_store
from app.course.page import lesson_page
from lessons.catalogue import catalogue, module_of

asked = st.query_params.get("lesson") or st.session_state.get("lesson")
lesson = catalogue().get(asked or "")
store = current_store()
if lesson is None:
    st.title("Lesson")
    st.info(
        "Choose a lesson on the course map." if not asked else f"There is no lesson “{asked}”. Choose one on the course map."
    )
    st.page_link("screens/lessons.py", label="Open the course map")
else:
    st.session_state["lesson"] = lesson.id
    if st.query_params.get("lesson") != lesson.id:
        st.query_params["lesson"] = lesson.id
    lesson_page(lesson, module_of(lesson.folder), store)
