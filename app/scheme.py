"""Runs a page again when the system changes between light and dark: its pictures are drawn in one theme's colours."""

from __future__ import annotations

from typing import Any

import streamlit as st

SCRIPT = """
export default function (component) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let waits;
  const tell = () => { waits = setTimeout(() => component.setStateValue("dark", dark.matches), 200); };
  dark.addEventListener("change", tell);
  return () => { clearTimeout(waits); dark.removeEventListener("change", tell); };
}
"""
_component: Any = None


def follow_scheme() -> None:
    """Put this at the end of a page whose pictures know their theme."""
    global _component
    if _component is None:
        _component = st.components.v2.component("inference_lab_scheme", html="<span></span>", js=SCRIPT)
    _component(key="scheme-keeper", on_dark_change=_page_runs_again, height=1)


def _page_runs_again() -> None:
    """Streamlit runs the page because the state changed; there is nothing to do before."""
