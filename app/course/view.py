"""What all parts of a lesson's page need: the lesson, the learner's progress, the runs, and what the picture shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import streamlit as st

from app.course.progress import LessonProgress, Progress, Store
from app.figures.palette import Theme
from app.session import Lab
from lessons.catalogue import TERM, forms, glossary, slug
from lessons.judge import fill
from lessons.model import AnyBlock, Check, Explain, Lesson, Predict, RunBlock
from lessons.runs import RunRecord, Value


@dataclass
class View:
    """Everything that the parts of the page need."""

    lesson: Lesson
    module: ModuleType
    store: Store
    progress: Progress
    lab: Lab
    theme: Theme
    runs: Mapping[str, RunRecord]

    @property
    def mine(self) -> LessonProgress:
        """The progress in this lesson."""
        return self.progress.of(self.lesson.id)

    @property
    def values(self) -> Mapping[str, Value]:
        """What the lesson's runs measure."""
        values: Mapping[str, Value] = self.module.VALUES
        return values

    def reload(self) -> None:
        """Take the newest progress: another window of the same learner may have changed it."""
        self.progress = self.store.load()

    def save(self) -> None:
        """Keep the progress."""
        self.store.save(self.progress)

    def words(self, text: str) -> str:
        """Prose with values filled in and glossary words linked."""
        return link_terms(fill(text, self.values, self.runs))

    def focused(self) -> tuple[str, int | None]:
        """The block whose picture is shown, and its frame."""
        kept: tuple[str, int | None] = st.session_state.get(self._focus_key, ("", None))
        return kept

    def show(self, block_id: str, frame: int | None = None) -> None:
        """Move the picture to a block."""
        st.session_state[self._focus_key] = (block_id, frame)

    def show_what_follows(self, block_id: str) -> None:
        """After a block was done: move the picture to the explanation that appears below it, if its run is there."""
        for card in self.lesson.cards:
            ids = [block.id for block in card.blocks]
            if block_id in ids:
                self._show_first_explanation(card.blocks[ids.index(block_id) + 1 :])

    def show_card(self, place: int) -> None:
        """The same for a part that was just opened."""
        if place < len(self.lesson.cards):
            self._show_first_explanation(self.lesson.cards[place].blocks)

    def _show_first_explanation(self, blocks: Sequence[AnyBlock]) -> None:
        for block in blocks:
            if isinstance(block, Explain) and block.run in self.runs:
                self.show(block.id, self.mine.seen.get(block.id, 0))
                return
            if not is_done(block, self.mine):
                return

    @property
    def _focus_key(self) -> str:
        return f"picture-of-{self.lesson.id}"


class StoredRuns(Mapping[str, RunRecord]):
    """The learner's runs of a lesson, read when they are looked at."""

    def __init__(self, store: Store, lesson_id: str, names: list[str]) -> None:
        self._store, self._lesson_id, self._names = store, lesson_id, names
        self._found: dict[str, RunRecord | None] = {}

    def __getitem__(self, name: str) -> RunRecord:
        if name not in self._found:
            self._found[name] = self._store.load_run(self._lesson_id, name) if name in self._names else None
        record = self._found[name]
        if record is None:
            raise KeyError(name)
        return record

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True


def link_terms(text: str) -> str:
    """``[[term]]`` → a link to the word's line at the end of the page; the line shows on hover, too."""
    known = forms(glossary())

    def link(found: re.Match[str]) -> str:
        name = known[found.group(1).lower()]
        hover = glossary()[name].text.replace('"', "'")
        return f'[{found.group(2) or found.group(1)}](#{slug(name)} "{hover}")'

    return TERM.sub(link, text)


def is_done(block: AnyBlock, mine: LessonProgress) -> bool:
    """Whether the next block may appear."""
    match block:
        case Predict():
            return block.id in mine.answers
        case RunBlock():
            return block.id in mine.ran
        case Explain():
            return mine.seen.get(block.id, 0) >= len(block.frames) - 1
        case Check():
            return all(f"{block.id}/{question.id}" in mine.checks for question in block.questions)
        case _:
            return True


def next_target(view: View, block_id: str) -> str:
    """The key of what follows a block in its part."""
    for place, card in enumerate(view.lesson.cards):
        ids = [block.id for block in card.blocks]
        if block_id in ids:
            following = ids.index(block_id) + 1
            if following == len(ids):
                return f"after-{place}"
            return f"block-{ids[following]}"
    return ""
