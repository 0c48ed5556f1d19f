"""Files to take away: one way to offer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import streamlit as st


def offer(
    label: str,
    data: str | bytes | Callable[[], str | bytes],
    file_name: str,
    mime: str | None = None,
    width: Literal["content", "stretch"] = "content",
) -> None:
    """A button that downloads a file.

    A click does not run the page again, as Streamlit's buttons do by default: the run can drop the server's answer to a
    file that is made when it is asked for, and the button would show a spinner for ever.

    Args:
        label: on the button.
        data: the file, or what makes it when it is asked for.
        file_name: under which the browser saves it.
        mime: its kind; None: text or bytes.
        width: of the button.
    """
    st.download_button(label, data, file_name=file_name, mime=mime, width=width, on_click="ignore")
