"""Lessons are read strictly, and everything that they name exists."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from app.course.gauges import FIGURES
from app.course.pictures import DRAWN
from lessons.catalogue import (
    TERM,
    VALUE,
    catalogue,
    check_links,
    course,
    folders,
    forms,
    glossary,
    parse_lesson,
    slug,
    texts_of,
)
from lessons.judge import fill, judge, number, right_option, say
from lessons.model import (
    PICTURES,
    Check,
    Explain,
    Explore,
    Lesson,
    LessonError,
    Option,
    Predict,
    Production,
    RunBlock,
    Term,
)

FRONT = """---
id: x
title: X
minutes: 5
summary: Short.
objectives: [one]
terms: [step]
sources: []
---
"""
GOOD = (
    FRONT
    + """
## First

A [[step]] makes {made}.

```predict p
question: How many?
answer: made
hints: [none]
```

```run r
experiments: [go]
```

```compare c
predict: p
right: yes
wrong: no
```
"""
)


def test_a_small_lesson_is_read():
    lesson = parse_lesson(GOOD, "x/lesson.md", "x")
    assert [block.id for block in lesson.blocks][1:] == ["p", "r", "c"]
    assert lesson.block("p").line == 15
    module = SimpleNamespace(EXPERIMENTS={"go": None}, VALUES={"made": None})
    check_links(lesson, module, {"step": Term(text="a step")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("---\nid", "id"), "line 1.*front matter"),
        (("minutes: 5", "minutes: five"), r"line 4, minutes: must be a whole number"),
        (("title: X", "title: X\ncolour: red"), "line 4, colour: there is no such setting"),
        (("## First\n", "First\n"), "has no part"),
        (("## First\n", "First\n\n## Second\n"), "before the first heading"),
        (("```predict p", "```predict"), "line 15: name the block"),
        (("```predict p", "```predictt p"), "no directive 'predictt'"),
        (("answer: made\n", ""), r"line 1\d.*answer is missing"),
        (("hints: [none]", "kind: choice"), "line 15, p: a choice needs at least two options"),
        (("hints: [none]", "tolerance: -1"), "p: factor must be at least 1"),
        (("hints: [none]", "options: [{id: a, text: a}]"), "a number has no options"),
        (("```run r", "```run p"), "the id occurs twice"),
        (("predict: p\n", "predict: q\n"), "no predict 'q' before it"),
        (("wrong: no\n", "wrong: no\ntiming: true\n"), "a timing needs samples"),
        (("experiments: [go]", "experiments: [go]\npicture: film"), "no picture 'film'"),
        (("wrong: no\n```", "wrong: no\n"), "never closed"),
        (("wrong: no\n```\n", "wrong: no\n```\n\n```check k\nquestions: []\n```\n"), "three to five"),
        (("wrong: no\n```\n", "wrong: no\n```\n\n```explain e\nrun: other\npictures: []\ncaption: x\nframes: []\n```\n"),
         "'other' has not run yet"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(change, message):
    assert change[0] in GOOD
    with pytest.raises(LessonError, match=r"x/lesson\.md.*" + message):
        parse_lesson(GOOD.replace(*change), "x/lesson.md")


@pytest.mark.parametrize(
    ("experiments", "values", "terms", "message"),
    [
        ({}, {"made": None}, {"step": Term(text="")}, "no experiment 'go'"),
        ({"go": None}, {}, {"step": Term(text="")}, "no value 'made'"),
        ({"go": None}, {"made": None}, {}, "glossary has no entry 'step'"),
    ],
)
def test_what_a_lesson_names_must_exist(experiments, values, terms, message):
    lesson = parse_lesson(GOOD, "x/lesson.md", "x")
    with pytest.raises(LessonError, match=message):
        check_links(lesson, SimpleNamespace(EXPERIMENTS=experiments, VALUES=values), terms)


def test_all_lessons_load_in_order():
    assert list(catalogue()) == ["one-request", "kv-cache", "continuous-batching", "paged-attention"]
    assert [lesson.folder for lesson in catalogue().values()] == folders()


def test_the_form_of_each_lesson(lesson):
    kinds = [type(block).__name__ for block in lesson.blocks]
    for needed in ("Predict", "RunBlock", "Compare", "Explain", "Explore", "Check", "Production"):
        assert needed in kinds, needed
    assert 10 <= lesson.front.minutes <= 40
    assert 2 <= len(lesson.front.objectives) <= 4
    assert len(lesson.front.sources) >= 3
    for block in lesson.blocks:
        if isinstance(block, Predict):
            compared = [b for b in lesson.blocks if getattr(b, "predict", "") == block.id]
            assert len(compared) == 1, f"{block.id} is compared once"
    for source in lesson.front.sources:
        assert re.fullmatch(r"https://[a-z0-9.-]+/\S*", source.url)
    for before in lesson.front.prerequisites:
        assert list(catalogue()).index(before) < list(catalogue()).index(lesson.id)


def test_every_picture_has_a_caption_and_somebody_who_draws_it(lesson):
    assert set(PICTURES) == set(DRAWN)
    for block in lesson.blocks:
        if isinstance(block, RunBlock | Explain | Explore):
            assert block.caption, f"{block.id} has a picture without a caption"


def test_a_prediction_comes_before_the_run_that_answers_it(lesson):
    """Nothing measured is told before it is asked: values in a text belong to runs above it."""
    ran: set[str] = set()
    for block in lesson.blocks:
        if isinstance(block, RunBlock):
            ran |= set(block.experiments)
        if isinstance(block, Predict):
            assert not [v for v in VALUE.findall(block.question) if v[0] == block.answer], f"{block.id} tells its answer"


def test_no_term_before_it_is_linked(lesson):
    """The first time that a reader meets a word which the lesson introduces, it is a link to its meaning."""
    texts = [text for block in lesson.blocks if not isinstance(block, Production) for text in texts_of(block)]
    joined = "\n".join(texts)
    for term in lesson.front.terms:
        spellings = sorted({term, *glossary()[forms(glossary())[term.lower()]].forms}, key=len, reverse=True)
        pattern = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, spellings)) + r")(?![\w-])", re.IGNORECASE)
        first = pattern.search(joined)
        assert first, f"{term!r} never occurs"
        marked = [m for m in TERM.finditer(joined) if m.start() <= first.start() < m.end()]
        assert marked, f"{term!r} is used before it is linked: …{joined[max(0, first.start() - 40) : first.end() + 20]}…"


def test_terms_of_earlier_lessons_or_of_this_one(lesson):
    """A linked word was introduced in this lesson or in one that comes before, or has its own line in the glossary."""
    for block in lesson.blocks:
        for text in texts_of(block):
            for found in TERM.finditer(text):
                assert found.group(1).lower() in forms(glossary())


def test_the_glossary_has_short_lines_and_anchors_of_their_own():
    anchors = [slug(name) for name in glossary()]
    assert len(set(anchors)) == len(anchors)
    for name, term in glossary().items():
        assert len(term.text) <= 130, name
        assert term.text.endswith("."), name
    used = {forms(glossary())[f.group(1).lower()] for lesson in catalogue().values() for b in lesson.blocks
            for t in texts_of(b) for f in TERM.finditer(t)}  # fmt: skip
    assert used == set(glossary()), "every line is used by a lesson"


def test_the_course_map_opens_every_lesson_and_shows_known_figures():
    nodes = [node for branch in course().branches for node in branch.nodes]
    assert {node.lesson for node in nodes if node.lesson} == set(catalogue())
    assert {node.figure for node in nodes if node.figure} <= set(FIGURES)
    assert [branch.title for branch in course().branches] == ["Execution", "Scheduling", "Memory", "Performance"]


def test_prose_is_plain(lesson):
    for block in lesson.blocks:
        for text in texts_of(block):
            assert "!" not in text, f"{block.id}: no exclamation marks"
            prose = "\n".join("" if line.startswith(("|", "- ", "1", "**M")) else line for line in text.splitlines())
            for paragraph in prose.split("\n\n"):
                for sentence in re.split(r"(?<=[.:?])\s", re.sub(r"\s+", " ", paragraph)):
                    assert len(sentence.split()) <= 38, f"{block.id}: a long sentence: {sentence[:80]}"


def test_numbers_and_words_of_answers():
    block = Predict(question="?", kind="choice", answer="a", options=(Option(id="a", text="Yes"), Option(id="b", text="No")))
    assert say("a", block) == "Yes"
    assert say(["b", "a"], block) == "No → Yes"
    assert say(None) == "not measured yet"
    assert [number(x) for x in (3.0, 2080, 0.1234, 123.4, 1e6)] == ["3", "2,080", "0.123", "123", "1,000,000"]
    assert say(4.0, Predict(question="?", answer="a", prefix="step")) == "step 4"
    assert (
        fill("{a} and {b:.1f}, {c}", {"a": lambda r: 2.0, "b": lambda r: 2.55, "c": lambda r: r["no"]}, {}) == "2 and 2.5, …"
    )


def test_a_number_is_judged_by_tolerance_or_by_factor():
    exact = Predict(question="?", answer="a")
    loose = Predict(question="?", answer="a", tolerance=2, unit="rows")
    times = Predict(question="?", answer="a", factor=2)
    assert judge(exact, 3, 3).distance == "exactly right"
    assert not judge(exact, 3, 4).right
    assert judge(loose, 6, 4).right
    assert judge(loose, 7, 4).distance == "3 rows too high"
    assert judge(times, 20, 10).right
    assert judge(times, 5, 10).right
    assert judge(times, 21, 10).distance == "2.1 times too high"
    assert not judge(times, 0, 10).right
    assert not judge(times, -5, 10).right


@pytest.mark.parametrize(
    ("unit", "given", "truth", "words"),
    [
        ("steps", 25, 24, "1 step too high"),
        ("steps", 26, 24, "2 steps too high"),
        ("ms", 23, 24, "1 ms too low"),
        ("", 23, 24, "1 too low"),
        ("%", 23, 24, "1 % too low"),
    ],
)
def test_distances_count_in_the_right_number(unit: str, given: float, truth: float, words: str):
    block = Predict(question="?", answer="v", unit=unit)
    assert judge(block, given, truth).distance == words
    assert say(1.0, block) == f"1 {unit.removesuffix('s') if len(unit) > 3 else unit}".strip()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3470, "0.0779 % too high"),
        (3467.3001, "less than 0.01 % too high"),
        (3300, "5.07 % too low"),
        (7000, "2.02 times too high"),
    ],
)
def test_a_close_guess_is_not_called_once_too_high(given: float, words: str):
    block = Predict(question="?", answer="v", unit="ms", factor=1.02)
    assert judge(block, given, 3467.3).distance == words


@pytest.mark.parametrize("lesson", catalogue().values(), ids=list(catalogue()))
def test_the_place_of_the_right_option_gives_nothing_away(lesson: Lesson):
    """A reader who always picks the same place is wrong more often than right."""
    questions = [q for block in lesson.blocks if isinstance(block, Check) for q in block.questions if q.kind == "choice"]
    places = [[option.id for option in q.options].index(right_option(q)) for q in questions]
    assert max(places.count(place) for place in places) <= len(places) / 2, places
    for question in questions:
        values = [option.value for option in question.options if option.value is not None]
        assert values == sorted(values) or len(values) < len(question.options), f"{question.id}: numbers stand in order"
