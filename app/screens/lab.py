"""The live lab, or a saved run that the address names. Everything on the page is fed by the live view's own stream."""

import streamlit as st

from app.live.component import live_view
from app.reading import current_lab
from app.saved import saved_run

name = st.query_params.get("run")
if name:
    try:
        live_view(saved_run(name).token, st.session_state.get("lab"))
    except (ValueError, OSError) as error:
        st.error(f"This saved run can't be opened: {error}")
        st.page_link("screens/runs.py", label="All saved runs")
else:
    live_view(current_lab().token)
