"""Loads lessons and checks them: every error names the file, the line and the field.

A ``lesson.md`` is YAML front matter, prose, and fenced directives whose content is YAML (``lessons/README.md``).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from engine.workload.datafile import DataFileError, parse, read_file
from lessons.model import (
    BLOCKS,
    PICTURES,
    AnyBlock,
    Card,
    Check,
    Claims,
    Compare,
    Course,
    Explain,
    Explore,
    Front,
    Lesson,
    LessonError,
    Predict,
    Production,
    Question,
    RunBlock,
    Term,
    Text,
)

FOLDER = Path(__file__).parent
_FENCE = re.compile(r"^```(\w+)(?: +([a-z][a-z0-9-]*))? *$")
_ID = re.compile(r"[a-z][a-z0-9-]*")
TERM = re.compile(r"\[\[([^\[\]|]+)(?:\|([^\[\]|]+))?\]\]")
"""``[[term]]`` or ``[[term|shown words]]``."""
VALUE = re.compile(r"\{([a-z_][a-z0-9_]*)(?::([^{}]*))?\}")
"""``{name}`` or ``{name:format}``."""


# Reading ------------------------------------------------------------------------------------------------------------------


def parse_lesson(text: str, file: str, folder: str = "") -> Lesson:
    """A lesson from the text of its ``lesson.md``.

    Raises:
        LessonError: naming file, line and field.
    """
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.strip() for line in lines[1:]):
        raise LessonError(f"{file}, line 1: begin with the front matter: a line ---, its fields, and a line ---")
    end = next(i for i, line in enumerate(lines[1:], 1) if line.strip() == "---")
    front = _yaml(lines[1:end], 2, file, Front)
    cards: list[Card] = []
    for title, start, body in _sections(lines, end + 1, file):
        cards.append(Card(title=title, blocks=tuple(_blocks(body, start, file))))
    if not cards:
        raise LessonError(f"{file}: has no part: begin each part with a line '## title'")
    lesson = Lesson(front=front, cards=tuple(cards), folder=folder)
    _check_structure(lesson, file)
    return lesson


def _yaml(lines: list[str], first: int, file: str, kind: Any) -> Any:
    """Read YAML that begins at line ``first`` of its file, so that errors name the right line."""
    try:
        return parse("\n" * (first - 1) + "\n".join(lines), file, kind)
    except DataFileError as error:
        raise LessonError(str(error)) from None


def _sections(lines: list[str], start: int, file: str) -> Iterator[tuple[str, int, list[str]]]:
    """(title, number of the first line, lines) of each part."""
    title, first, fenced = "", start + 1, False
    body: list[str] = []
    for number, line in enumerate(lines[start:], start + 1):
        if line.startswith("```"):
            fenced = not fenced
        if line.startswith("## ") and not fenced:
            if title:
                yield title, first, body
            elif any(part.strip() for part in body):
                raise LessonError(f"{file}, line {first}: text before the first heading: begin with a line '## title'")
            title, first, body = line[3:].strip(), number + 1, []
        else:
            body.append(line)
    if fenced:
        raise LessonError(f"{file}: a block that begins with ``` is never closed: end it with a line ```")
    if title:
        yield title, first, body


def _blocks(lines: list[str], first: int, file: str) -> Iterator[AnyBlock]:
    """The blocks of one part; ordinary code fences stay part of the prose."""
    prose: list[str] = []
    place = 0
    while place < len(lines):
        found = _FENCE.match(lines[place])
        if not found or found.group(1) not in BLOCKS:
            if lines[place].startswith("```"):
                if found and found.group(2):
                    raise LessonError(
                        f"{file}, line {first + place}: there is no directive {found.group(1)!r}; "
                        f"the directives are {', '.join(BLOCKS)}"
                    )
                end = _fence_end(lines, place)
                prose.extend(lines[place : end + 1])
                place = end + 1
                continue
            prose.append(lines[place])
            place += 1
            continue
        yield from _prose(prose, first + place)
        prose = []
        end = _fence_end(lines, place)
        yield _directive(found.group(1), found.group(2), lines[place + 1 : end], first + place, file)
        place = end + 1
    yield from _prose(prose, first + place)


def _fence_end(lines: list[str], place: int) -> int:
    return next(i for i in range(place + 1, len(lines)) if lines[i].startswith("```"))


def _prose(lines: list[str], line: int) -> Iterator[Text]:
    text = "\n".join(lines).strip()
    if text:
        yield Text(id=f"text-{line}", line=line, markdown=text)


def _directive(name: str, block_id: str | None, body: list[str], line: int, file: str) -> AnyBlock:
    if not block_id:
        raise LessonError(f"{file}, line {line}: name the block after its kind, as in ```{name} my-name")
    block = _yaml(body, line + 1, file, BLOCKS[name])
    return msgspec.structs.replace(block, id=block_id, line=line)


# Checking -----------------------------------------------------------------------------------------------------------------


def _check_structure(lesson: Lesson, file: str) -> None:
    """What can be said without the lesson's module."""
    seen: set[str] = set()
    predicts: dict[str, Predict] = {}
    ran: set[str] = set()
    for block in lesson.blocks:
        where = f"{file}, line {block.line}, {block.id}"
        if block.id in seen:
            raise LessonError(f"{where}: the id occurs twice: give each block its own")
        seen.add(block.id)
        match block:
            case Predict():
                predicts[block.id] = block
                _check_predict(block, where)
            case RunBlock():
                ran.update(block.experiments)
                _check_pictures((block.picture,), where)
            case Compare():
                if block.predict not in predicts:
                    raise LessonError(f"{where}: there is no predict {block.predict!r} before it")
                if block.timing and not block.samples:
                    raise LessonError(f"{where}: a timing needs samples: the name of the value that counts them")
            case Explain():
                if block.run not in ran:
                    raise LessonError(f"{where}: the experiment {block.run!r} has not run yet: put a run before it")
                _check_pictures(block.pictures, where)
                if not block.frames:
                    raise LessonError(f"{where}: frames is empty: say at least one thing")
            case Explore():
                _check_pictures((block.picture,), where)
                if not 1 <= len(block.knobs) <= 4:
                    raise LessonError(f"{where}: has {len(block.knobs)} knobs; leave one to four free")
            case Check():
                if not 3 <= len(block.questions) <= 5:
                    raise LessonError(f"{where}: has {len(block.questions)} questions; a check has three to five")
                for question in block.questions:
                    _check_question(question, where)
            case _:
                pass


def _check_pictures(names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in PICTURES:
            raise LessonError(f"{where}: there is no picture {name!r}; the pictures are {', '.join(PICTURES)}")


def _check_predict(block: Predict, where: str) -> None:
    if block.kind == "number" and block.options:
        raise LessonError(f"{where}: a number has no options: remove them, or set kind to choice or order")
    if block.kind != "number" and len(block.options) < 2:
        raise LessonError(f"{where}: a {block.kind} needs at least two options")
    if block.factor < 1 or block.tolerance < 0:
        raise LessonError(f"{where}: factor must be at least 1 and tolerance at least 0")
    _check_ids(block.options, where)


def _check_ids(options: tuple[Any, ...], where: str) -> None:
    ids = [option.id for option in options]
    if len(set(ids)) < len(ids):
        raise LessonError(f"{where}: two options have the same id")


def _check_question(question: Question, where: str) -> None:
    place = f"{where}, {question.id}"
    _check_ids(question.options, place)
    if question.kind == "choice":
        if sum(option.right for option in question.options) != 1:
            raise LessonError(f"{place}: exactly one option must be right")
        for option in question.options:
            if not option.feedback:
                raise LessonError(f"{place}, option {option.id}: every option needs feedback")
    elif not (question.answer and question.right and question.wrong):
        raise LessonError(f"{place}: a number needs answer (the name of a value), right and wrong (feedback)")


def check_links(lesson: Lesson, module: ModuleType, terms: Mapping[str, Term]) -> None:
    """Every experiment, value, knob and glossary word that the lesson names must exist.

    Raises:
        LessonError: naming file, line and what is missing.
    """
    file = f"{lesson.folder}/lesson.md"
    experiments: Mapping[str, Callable[..., Any]] = module.EXPERIMENTS
    values: Mapping[str, Any] = module.VALUES
    known = forms(terms)
    for block in lesson.blocks:
        where = f"{file}, line {block.line}, {block.id}"
        for name in _experiments_of(block):
            if name not in experiments:
                raise LessonError(f"{where}: there is no experiment {name!r}; there are {', '.join(experiments)}")
        for name in _values_of(block):
            if name not in values:
                raise LessonError(f"{where}: there is no value {name!r}; there are {', '.join(values)}")
        for text in texts_of(block):
            for found in TERM.finditer(text):
                if found.group(1).lower() not in known:
                    raise LessonError(f"{where}: the glossary has no entry {found.group(1)!r}: add it to glossary.yaml")
    for term in lesson.front.terms:
        if term.lower() not in known:
            raise LessonError(f"{file}, front matter: the glossary has no entry {term!r}: add it to glossary.yaml")


def _experiments_of(block: AnyBlock) -> list[str]:
    match block:
        case RunBlock():
            return list(block.experiments)
        case Explain():
            return [block.run]
        case Explore():
            return [block.experiment]
        case _:
            return []


def _values_of(block: AnyBlock) -> list[str]:
    names = [found.group(1) for text in texts_of(block) for found in VALUE.finditer(text)]
    match block:
        case Predict():
            names.append(block.answer)
        case Compare():
            names += [block.samples] if block.samples else []
        case Explain():
            names += [frame.step for frame in block.frames if isinstance(frame.step, str)]
        case Explore():
            names += [shown.value for shown in block.shows]
        case Check():
            names += [question.answer for question in block.questions if question.answer]
        case _:
            pass
    return names


def texts_of(block: AnyBlock) -> list[str]:
    """Every text of a block that a reader sees, in order."""
    match block:
        case Text():
            return [block.markdown]
        case Predict():
            return [block.question, *(option.text for option in block.options), *block.hints]
        case RunBlock():
            return [block.text, block.caption]
        case Compare():
            return [block.right, block.wrong]
        case Explain():
            return [*(frame.text for frame in block.frames), block.caption]
        case Explore():
            return [block.text, block.caption]
        case Check():
            found: list[str] = []
            for question in block.questions:
                found.append(question.text)
                for option in question.options:
                    found += [option.text, option.feedback]
                found += [question.right, question.wrong]
            return found
        case Production():
            return [*(flag.text for flag in block.flags), block.text]


def forms(terms: Mapping[str, Term]) -> dict[str, str]:
    """Every spelling, lower case → the entry's name."""
    return {form.lower(): name for name, term in terms.items() for form in (name, *term.forms)}


# The catalogue ------------------------------------------------------------------------------------------------------------


def folders() -> list[str]:
    """Folders of lessons, in the order of their numbers."""
    return sorted(path.parent.name for path in FOLDER.glob("[0-9][0-9]_*/lesson.md"))


def module_of(folder: str) -> ModuleType:
    """The lesson's experiments and values.

    Raises:
        LessonError: it has none, or lacks EXPERIMENTS or VALUES.
    """
    name = f"lessons.{folder}.experiments"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise LessonError(f"{folder}: experiments.py is missing ({error})") from error
    for wanted in ("EXPERIMENTS", "VALUES"):
        if not hasattr(module, wanted):
            raise LessonError(f"{folder}/experiments.py: {wanted} is missing: a dict of names to functions")
    return module


def load_lesson(folder: str) -> Lesson:
    """Read and check one lesson.

    Raises:
        LessonError: naming the file, the line and what is wrong.
    """
    path = FOLDER / folder / "lesson.md"
    file = f"{folder}/lesson.md"
    lesson = parse_lesson(path.read_text(encoding="utf-8"), file, folder)
    check_links(lesson, module_of(folder), glossary())
    return lesson


@cache
def catalogue() -> dict[str, Lesson]:
    """All lessons by id, in order.

    Raises:
        LessonError: one of them can't be used.
    """
    found: dict[str, Lesson] = {}
    for folder in folders():
        lesson = load_lesson(folder)
        if lesson.id in found:
            raise LessonError(f"{folder}/lesson.md: the id {lesson.id!r} is that of {found[lesson.id].folder} already")
        found[lesson.id] = lesson
    return found


@cache
def glossary() -> dict[str, Term]:
    """The glossary, by name.

    Raises:
        LessonError: the file can't be read, or two entries share a spelling.
    """
    terms = _file("glossary.yaml", dict[str, Term])
    spelled: dict[str, str] = {}
    for name, term in terms.items():
        for form in (name, *term.forms):
            if spelled.setdefault(form.lower(), name) != name:
                raise LessonError(f"glossary.yaml: {form!r} stands for both {spelled[form.lower()]!r} and {name!r}")
    return terms


@cache
def course() -> Course:
    """The course map."""
    return _file("course.yaml", Course)


def claims(folder: str) -> Claims:
    """The claims ledger of a lesson."""
    return _file(f"{folder}/claims.yaml", Claims)


def _file(name: str, kind: Any) -> Any:
    try:
        return read_file(FOLDER / name, kind)
    except DataFileError as error:
        raise LessonError(f"{name}: {error}") from None


def slug(term: str) -> str:
    """The anchor of a glossary entry: ``KV cache`` → ``term-kv-cache``."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")
