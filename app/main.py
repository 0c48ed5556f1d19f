"""Navigation only: each page is a thin file in ``screens/``."""

from pathlib import Path

import streamlit as st

ICON = Path(__file__).parent / "live" / "static" / "icon.svg"

st.set_page_config(page_title="Inference Lab", page_icon=str(ICON), layout="wide")
PAGES = [
    st.Page("screens/lab.py", title="Lab", default=True),
    st.Page("screens/lessons.py", title="Lessons"),
    st.Page("screens/lesson.py", title="Lesson", visibility="hidden"),
    st.Page("screens/runs.py", title="Runs"),
    st.Page("screens/metrics.py", title="Metrics"),
]
st.navigation(PAGES, position="top").run()
