"""Every file is offered in the one way whose button can't hang."""

import re
from pathlib import Path

from streamlit.testing.v1 import AppTest

APP = Path(__file__).parents[2] / "app"


def test_no_page_offers_a_file_in_another_way():
    offered = [path.name for path in APP.rglob("*.py") if re.search(r"\bdownload_button\(", path.read_text())]
    assert offered == ["downloads.py"]


def test_a_click_does_not_run_the_page_again():
    def page():
        import streamlit as st

        from app.downloads import offer

        st.session_state["runs"] = st.session_state.get("runs", 0) + 1
        offer("Take it", lambda: "made when asked for", "it.txt")
        offer("That too", b"here already", "that.bin")

    test = AppTest.from_function(page).run()
    assert not test.exception
    buttons = [element.proto for element in test.get("download_button")]
    assert [button.label for button in buttons] == ["Take it", "That too"]
    assert all(button.ignore_rerun for button in buttons)
    assert bool(buttons[0].deferred_file_id) and not buttons[1].deferred_file_id
