"""Who is learning: the token in the address, and the files behind it."""

from __future__ import annotations

import streamlit as st

from app.course.progress import TOKEN, Store, new_token


def current_store() -> Store:
    """The learner's files; the token goes into the address, so that a reload or a bookmark finds it again."""
    asked = st.query_params.get("learner") or st.session_state.get("learner")
    token = asked if asked and TOKEN.fullmatch(asked) else new_token()
    if asked and token != asked:
        st.warning("The resume link is damaged, so a new record of your progress begins. Bring a saved file back below.")
    st.session_state["learner"] = token
    if st.query_params.get("learner") != token:
        st.query_params["learner"] = token
    return Store(token)
