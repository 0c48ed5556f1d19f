"""The picture beside the text: that of the block which was touched last, at the step being spoken of."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.course.pictures import Picture, Wanted, draw
from app.course.view import View, is_done
from lessons.model import AnyBlock, Explain, Explore, RunBlock
from lessons.runs import measured


def picture_side(view: View) -> None:
    """The picture of the block that was touched last; else of the last one that has something to show."""
    block, frame = _shown_block(view)
    if block is None:
        with st.container(border=True):
            st.markdown("**The picture**")
            st.caption("Nothing has run in this lesson yet. After the first run your engine's own steps are drawn here.")
        return
    run, kinds, step, caption, request = _spoken_of(view, block, frame)
    wanted = Wanted(
        runs=view.runs, run=run, step=step, request=request, theme=view.theme,
        sizes=_sizes(view), pairs=getattr(view.module, "PAIRS", {}),
    )  # fmt: skip
    for place, kind in enumerate(kinds):
        try:
            _picture(draw(kind, wanted), f"lesson-figure-{place}-{kind}")
        except KeyError:
            st.caption("The records of this run are not here. Run it again to see the picture.")
            return
    if caption:
        st.caption(view.words(caption))
    record = view.runs[run]
    st.caption(f"Drawn from this run's {len(record.work)} steps on {record.model.get('title', 'a script')}.")
    st.page_link("screens/lab.py", label="Open the lab: the newest run is there, step by step")


def _sizes(view: View) -> dict[str, dict[str, float]]:
    found = {}
    for name, function in getattr(view.module, "SIZES", {}).items():
        if name in view.runs:
            found[name] = function(view.runs)
    return found


def _shown_block(view: View) -> tuple[AnyBlock | None, int | None]:
    kept, frame = view.focused()
    for block in view.lesson.blocks:
        if block.id == kept and _run_of(block) in view.runs:
            return block, frame
    reached = [block for card in view.lesson.cards[: view.mine.cards + 1] for block in card.blocks]
    shown: AnyBlock | None = None
    for block in reached:
        before = shown is None or _has_been_reached(view, block)
        if before and _run_of(block) in view.runs and _has_been_reached(view, block):
            shown = block
    frame = view.mine.seen.get(shown.id, 0) if isinstance(shown, Explain) else None
    return shown, frame


def _has_been_reached(view: View, block: AnyBlock) -> bool:
    """Whether everything before the block in its part is done."""
    for card in view.lesson.cards:
        if block in card.blocks:
            before = card.blocks[: card.blocks.index(block)]
            return all(is_done(other, view.mine) for other in before)
    return False


def _run_of(block: AnyBlock) -> str:
    match block:
        case RunBlock():
            return block.experiments[-1]
        case Explain():
            return block.run
        case Explore():
            return block.experiment
        case _:
            return ""


def _spoken_of(view: View, block: AnyBlock, frame: int | None) -> tuple[str, tuple[str, ...], int | None, str, str]:
    """(run, kinds of pictures, step, caption, request) of a block at a frame."""
    if isinstance(block, Explain):
        place = max(0, min(frame or 0, len(block.frames) - 1))
        step: Any = block.frames[place].step
        if isinstance(step, str):
            found = measured(view.values, step, view.runs)
            step = int(found) if isinstance(found, (int, float)) else 0
        return block.run, block.pictures, int(step), block.caption, block.request
    assert isinstance(block, (RunBlock, Explore))
    request = block.request if isinstance(block, RunBlock) else ""
    return _run_of(block), (block.picture,), None, block.caption, request


def _picture(picture: Picture, key: str) -> None:
    st.markdown(f"**{picture.title}**")
    if picture.figure:
        st.plotly_chart(picture.figure, key=key, theme=None, config={"displayModeBar": False}, alt=picture.alt)
    else:
        st.html(picture.markup)
