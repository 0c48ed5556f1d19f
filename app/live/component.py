"""The one browser component: a loader that mounts the live view's own modules. Streamlit never redraws what they draw."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.live.routes import build_tag, plotly_address

LOADER = """
const mounted = new WeakMap();

export default function (component) {
  const { parentElement, data } = component;
  const root = parentElement.querySelector(".lab");
  let entry = mounted.get(root);
  if (!entry) {
    entry = { view: null, closed: false };
    mounted.set(root, entry);
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = data.assets + "/live.css";
    root.before(style);
    import(new URL(data.assets + "/main.js", document.baseURI).href).then((view) => {
      if (!entry.closed) entry.view = view.start(root, data);
    });
  }
  return () => {
    entry.closed = true;
    if (entry.view) entry.view.stop();
    mounted.delete(root);
  };
}
"""
HTML = """
<div class="lab" role="application" aria-label="Inference Lab">
  <p class="lab-opening">Opening the lab.</p>
</div>
"""

_component: Any = None


def live_view(lab: str, *, home: str | None = None, projector: bool = False, owner: bool = False) -> None:
    """Mount the live view on the page.

    Args:
        lab: a lab's token, ``follow:TOKEN``, or ``run:NAME``.
        home: the lab to go back to from a saved run.
        projector: large type, no controls.
        owner: whether the machine's owner looks: the model's panel is shown. What the owner may do is checked elsewhere.
    """
    global _component
    if _component is None:
        _component = st.components.v2.component("inference_lab_live", html=HTML, js=LOADER, isolate_styles=False)
    _component(
        key=f"live {lab}{' projector' if projector else ''}",  # another lab, or a saved run, is another view
        data={
            "lab": lab,
            "home": home,
            "projector": projector,
            "owner": owner,
            "assets": f"/lab/assets/{build_tag()}",
            "plotly": plotly_address(),
        },
    )
