"""The live lab: this session's own, somebody's that the address follows, or a saved run that it names.

Everything on the page is fed by the live view's own stream. ``?view=projector`` shows it in large type, without controls.
"""

import streamlit as st

from app.live.component import live_view
from app.live.routes import FOLLOW
from app.owner import page_is_owner
from app.reading import current_lab
from app.saved import saved_run
from app.session import LabUnknown, hub

run, follow = st.query_params.get("run"), st.query_params.get("follow")
projector = st.query_params.get("view") == "projector"
owner = page_is_owner(hub().owner)

if follow:
    try:
        hub().followed(follow)
        live_view(FOLLOW + follow, projector=projector)
    except LabUnknown as error:
        st.error(f"This link can't be followed: {error}.")
        st.link_button("Open a lab of your own", "/")
elif run:
    try:
        if not owner:
            raise ValueError("saved runs are shown to the owner of this machine only")
        live_view(saved_run(run).token, home=st.session_state.get("lab"))
    except (ValueError, OSError) as error:
        st.error(f"This saved run can't be opened: {error}.")
        st.link_button("Open the lab", "/")
else:
    setup = {part: st.query_params.get(part, "") for part in ("engine", "scene", "traffic")}
    lab = current_lab()
    lab.set_up(setup)
    live_view(lab.token, projector=projector, owner=owner)
