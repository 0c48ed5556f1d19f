"""Navigation only: each page is a thin file in ``screens/``."""

from pathlib import Path

import streamlit as st

from app.owner import page_is_owner
from app.scheme import follow_scheme
from app.session import hub

ICON = Path(__file__).parent / "live" / "static" / "icon.svg"

# Streamlit writes white on its primary colour, which the dark theme's bright accent can't carry. Themes follow the system.
# Every page but the lab, which fills the window, has the same margins and headings, so that nothing jumps between them.
READABLE = """<style>@media (prefers-color-scheme: dark) {
  :is([data-testid="stBaseButton-primary"], [data-testid="stBaseButton-primaryFormSubmit"]) :is(p, span) { color: #0e1117; }
}
.stMainBlockContainer { padding: 4.5rem 2rem 4rem 2rem; }
[data-testid="stHeading"] h1 { font-size: 2rem; padding: 0 0 0.25rem 0; }
[data-testid="stHeading"] h2 { font-size: 1.3rem; padding: 0.25rem 0 0.5rem 0; }
[data-testid="stHeading"] h3 { font-size: 1.15rem; padding: 0.25rem 0; }
.stApp .stMain { scroll-padding-top: 4.5rem; }
@media (max-width: 640px) { .stMainBlockContainer { padding: 4rem 0.75rem 3rem 0.75rem; } }
</style>"""

st.set_page_config(page_title="Inference Lab", page_icon=str(ICON), layout="wide")
st.html(READABLE)
OWNER = page_is_owner(hub().owner)
PAGES = [
    st.Page("screens/lab.py", title="Lab", default=True),
    st.Page("screens/lessons.py", title="Lessons"),
    st.Page("screens/lesson.py", title="Lesson", visibility="hidden"),
    # Saved runs and experiments are the owner's files.
    *([st.Page("screens/experiments.py", title="Experiments")] if OWNER else []),
    *([st.Page("screens/runs.py", title="Runs")] if OWNER else []),
    st.Page("screens/metrics.py", title="Metrics"),
    st.Page("screens/calculators.py", title="Calculators"),
]
page = st.navigation(PAGES, position="top")
page.run()
if page.title != "Lab":  # the lab draws itself anew
    follow_scheme()
