"""What a lesson is made of: blocks of plain data, read from ``lesson.md`` by ``lessons.catalogue``.

::

    lesson ── cards (one "## heading" each) ── blocks, in order
                                               text        prose
                                               predict     a question, answered before the run and locked
                                               run         experiments on the reader's engine
                                               compare     the prediction beside what the run measured
                                               explain     text and picture, moved together from step to step
                                               explore     a few knobs left free
                                               check       questions with feedback on every option
                                               production  where this is in vLLM and SGLang, and on a GPU
"""

from __future__ import annotations

from typing import Literal

import msgspec

PICTURES = (
    "schedule", "batch", "timeline", "pool", "tables", "life", "tokens", "compute", "seconds", "sizes",
)  # fmt: skip
"""Kinds of pictures that the page can draw from a run (``app.course.pictures``)."""


class LessonError(ValueError):
    """A lesson that can't be used. The message names the file, the line and the field, and says what to change."""


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all blocks have. ``id`` is unique in its lesson; ``line`` is where the block begins in its file."""

    id: str = ""
    line: int = 0


class Text(Block, frozen=True, kw_only=True, tag="text"):
    """Prose. Marks: ``[[term]]`` or ``[[term|shown]]`` links the glossary, ``{name}`` shows a value."""

    markdown: str


class Option(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer to choose. ``right`` and ``feedback`` are for checks; ``value``: the number that the option stands for."""

    id: str
    text: str
    value: float | None = None
    right: bool = False
    feedback: str = ""


class Predict(Block, frozen=True, kw_only=True, tag="predict"):
    """A question that the reader answers before the run.

    ``answer`` names the value that the run measures: a number; for ``choice`` the id of an option; for ``order`` ids in
    order. A number is right when it lies within ``tolerance`` (absolute), or within ``factor`` times more or less.
    """

    question: str
    kind: Literal["number", "choice", "order"] = "number"
    answer: str
    unit: str = ""
    prefix: str = ""
    """A word before the number: 'step' makes "step 3"."""
    tolerance: float = 0.0
    factor: float = 1.0
    options: tuple[Option, ...] = ()
    hints: tuple[str, ...] = ()


class RunBlock(Block, frozen=True, kw_only=True, tag="run"):
    """Experiments to run on the reader's engine, one after the other, and the picture that shows the last of them."""

    experiments: tuple[str, ...]
    text: str = ""
    button: str = "Run it on the engine"
    picture: str = "timeline"
    request: str = ""
    caption: str = ""


class Compare(Block, frozen=True, kw_only=True, tag="compare"):
    """A prediction beside what was measured. ``timing``: it rests on measured times, ``samples`` names how many."""

    predict: str
    right: str
    wrong: str
    timing: bool = False
    samples: str = ""


class Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing said, and the step (a number, or the name of a value) that the picture shows meanwhile."""

    text: str
    step: int | str = 0


class Explain(Block, frozen=True, kw_only=True, tag="explain"):
    """Text that walks through the run; the picture is moved to the step being spoken of."""

    run: str
    frames: tuple[Frame, ...]
    pictures: tuple[str, ...]
    caption: str
    request: str = ""
    """The request that a picture of one request shows, by name."""


class Knob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something left free: a whole number between limits, or one of ``choices``."""

    name: str
    label: str
    default: int | str
    least: int = 0
    most: int = 0
    step: int = 1
    choices: tuple[str, ...] = ()


class Shown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value shown after a free run."""

    value: str
    label: str
    unit: str = ""


class Explore(Block, frozen=True, kw_only=True, tag="explore"):
    """Run again with other settings, as often as the reader likes."""

    text: str
    experiment: str
    knobs: tuple[Knob, ...]
    shows: tuple[Shown, ...]
    picture: str = "timeline"
    caption: str = ""


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question of a check. A number names the value that is right; a choice marks its right option."""

    id: str
    text: str
    kind: Literal["choice", "number"] = "choice"
    options: tuple[Option, ...] = ()
    answer: str = ""
    unit: str = ""
    prefix: str = ""
    tolerance: float = 0.0
    right: str = ""
    wrong: str = ""


class Check(Block, frozen=True, kw_only=True, tag="check"):
    """Three to five questions."""

    questions: tuple[Question, ...]


class Flag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag of a production engine and what it does."""

    engine: str
    flag: str
    text: str


class Production(Block, frozen=True, kw_only=True, tag="production"):
    """Where this is in production engines, and where a GPU behaves differently and why."""

    flags: tuple[Flag, ...]
    text: str


AnyBlock = Text | Predict | RunBlock | Compare | Explain | Explore | Check | Production
BLOCKS: dict[str, type[Block]] = {
    "predict": Predict, "run": RunBlock, "compare": Compare, "explain": Explain, "explore": Explore, "check": Check,
    "production": Production,
}  # fmt: skip
"""Name of a directive → what it is."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a lesson: everything under one heading."""

    title: str
    blocks: tuple[AnyBlock, ...]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A paper or document that a lesson rests on."""

    id: str
    title: str
    where: str
    """Venue, identifier or publisher."""
    url: str


class Front(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The front matter of ``lesson.md``."""

    id: str
    title: str
    minutes: int
    objectives: tuple[str, ...]
    terms: tuple[str, ...]
    """Glossary words that this lesson introduces."""
    sources: tuple[Source, ...]
    prerequisites: tuple[str, ...] = ()
    """Ids of lessons that come before."""
    summary: str


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """A lesson, read and checked."""

    front: Front
    cards: tuple[Card, ...]
    folder: str
    """Name of its folder: its module is ``lessons.<folder>.experiments``."""

    @property
    def id(self) -> str:
        """The lesson's id, as other lessons and the course map name it."""
        return self.front.id

    @property
    def blocks(self) -> list[AnyBlock]:
        """All blocks in order."""
        return [block for card in self.cards for block in card.blocks]

    def block(self, block_id: str) -> AnyBlock:
        """The block of this id.

        Raises:
            KeyError: there is none.
        """
        for block in self.blocks:
            if block.id == block_id:
                return block
        raise KeyError(block_id)


class Term(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the glossary. ``forms``: other spellings that mean the same entry."""

    text: str
    forms: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subject on the course map. ``lesson`` is empty where none exists yet; ``figure`` names a figure of the lab."""

    title: str
    text: str
    lesson: str = ""
    figure: str = ""


class Branch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A branch of the course map."""

    title: str
    nodes: tuple[Node, ...]


class Course(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The course map: ``course.yaml``."""

    branches: tuple[Branch, ...]


class ClaimEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One factual claim of a lesson: where it comes from and what shows it.

    ``source``: the id of a source of the lesson, or ``formula``. ``shown``: ``value:NAME`` (a value that a run measures),
    ``test:NAME`` (a test function) or ``cited`` (not shown here: the source says so).
    """

    claim: str
    source: str
    shown: str


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claims ledger of a lesson: ``claims.yaml``."""

    claims: tuple[ClaimEntry, ...]
