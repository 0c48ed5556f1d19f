"""Judges predictions and answers, and says values in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lessons.catalogue import VALUE
from lessons.model import Predict, Question
from lessons.runs import Answer, Runs, Value, measured


class Verdict(msgspec.Struct, frozen=True):
    """Whether an answer is right, and how far it lies from what was measured, in words."""

    right: bool
    distance: str


def judge(block: Predict | Question, given: Answer, truth: Answer) -> Verdict:
    """Compare an answer with what was measured."""
    if isinstance(given, list) or isinstance(truth, list):
        pairs = zip(_as_list(given), _as_list(truth), strict=False)
        places = sum(a != b for a, b in pairs)
        right = _as_list(given) == _as_list(truth)
        return Verdict(right, "the same order" if right else f"{places} places differ")
    if isinstance(given, str) or isinstance(truth, str):
        right = given == truth
        return Verdict(right, "the same" if right else "not the same")
    return _judge_number(block, float(given), float(truth))


def _as_list(answer: Answer) -> list[str]:
    return answer if isinstance(answer, list) else [str(answer)]


def _judge_number(block: Predict | Question, given: float, truth: float) -> Verdict:
    difference = given - truth
    factor = block.factor if isinstance(block, Predict) else 1.0
    close = abs(difference) <= block.tolerance + 1e-9 * max(1.0, abs(truth))
    if factor > 1.0 and given > 0 and truth > 0:
        times = max(given, truth) / min(given, truth)
        close = close or times <= factor * (1 + 1e-9)
        if difference == 0:
            return Verdict(True, "exactly right")
        return Verdict(close, f"{_excess(times)} too {'high' if difference > 0 else 'low'}")
    if abs(difference) <= 1e-9 * max(1.0, abs(truth)):
        return Verdict(True, "exactly right")
    apart = f"{number(abs(difference))} {_unit(abs(difference), block.unit)}".strip()
    return Verdict(close, f"{apart} too {'high' if difference > 0 else 'low'}")


def _excess(times: float) -> str:
    """A ratio above 1 in words. Near 1 a share says more: 1.002 times would read as once."""
    if times >= 1.1:
        return f"{number(times)} times"
    percent = 100 * (times - 1)
    return f"{number(percent)} %" if percent >= 0.01 else "less than 0.01 %"


def _unit(value: float, unit: str) -> str:
    """The unit as it stands behind a number: 1 step, 2 steps; an abbreviation (ms) stays."""
    return unit.removesuffix("s") if value == 1 and len(unit) > 3 else unit


def right_option(question: Question) -> str:
    """The id of the right option of a choice."""
    return next(option.id for option in question.options if option.right)


def number(value: float) -> str:
    """A number as people write it: whole ones whole, others with three significant digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def say(answer: Answer | None, block: Any = None) -> str:
    """An answer in words; ids of options become their texts."""
    if answer is None:
        return "not measured yet"
    texts = {option.id: option.text for option in getattr(block, "options", ())}
    if isinstance(answer, list):
        return " → ".join(texts.get(item, item) for item in answer)
    if isinstance(answer, str):
        return texts.get(answer, answer)
    value = float(answer)
    return f"{getattr(block, 'prefix', '')} {number(value)} {_unit(value, getattr(block, 'unit', ''))}".strip()


def fill(text: str, values: Mapping[str, Value], runs: Runs) -> str:
    """Put measured values in the place of ``{name}``; what was not measured yet shows as …."""

    def shown(found: Any) -> str:
        answer = measured(values, found.group(1), runs)
        if answer is None:
            return "…"
        return format(answer, found.group(2)) if found.group(2) else say(answer)

    return VALUE.sub(shown, text)
