"""The live lab: find this session's lab, show it. Everything on the page is fed by the live view's own stream."""

import streamlit as st

from app.live.component import live_view
from app.session import hub

asked = st.query_params.get("lab") or st.session_state.get("lab")
lab = hub().enter(asked)
st.session_state["lab"] = lab.token
if st.query_params.get("lab") != lab.token:
    st.query_params["lab"] = lab.token
live_view(lab.token)
