"""Moves the keyboard's focus and the view to what became new; else a reader without a mouse starts at the top again."""

from __future__ import annotations

from typing import Any

import streamlit as st

SCRIPT = """
export default function (component) {
  const { target, count } = component.data;
  if (!target || window.__lessonFocus === count) return;
  window.__lessonFocus = count;
  const look = (left) => {
    const found = document.querySelector(".st-key-" + target);
    if (!found) { if (left) setTimeout(() => look(left - 1), 50); return; }
    const first = found.querySelector("input:not([disabled]), button:not([disabled]), [tabindex='0'], summary");
    const place = first || found;
    if (!first) found.setAttribute("tabindex", "-1");
    place.focus({ preventScroll: true });
    const box = found.getBoundingClientRect();
    if (box.top < 70 || box.bottom > window.innerHeight) {
      const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      const block = box.height > window.innerHeight - 90 ? "start" : "nearest";
      found.scrollIntoView({ block, behavior: calm ? "auto" : "smooth" });
    }
  };
  setTimeout(() => look(40), 30);
}
"""
_component: Any = None


def ask(target: str) -> None:
    """Wish for the focus on the container of this key once the page is drawn."""
    st.session_state["lesson-focus"] = (target, st.session_state.get("lesson-focus", ("", 0))[1] + 1)


def keeper() -> None:
    """Put this at the end of a page."""
    global _component
    if _component is None:
        _component = st.components.v2.component("inference_lab_focus", html="<span></span>", js=SCRIPT, isolate_styles=False)
    target, count = st.session_state.get("lesson-focus", ("", 0))
    _component(key="lesson-focus-keeper", data={"target": target, "count": count}, height=1)
