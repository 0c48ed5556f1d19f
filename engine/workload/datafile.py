"""Small data files that people write (YAML or JSON), read strictly: an error names the file, the line and the field.

Only the plain part of YAML: mappings, lists, texts, numbers, ``true``/``false``, ``null``. Anchors, aliases and tags are
refused, so that a small file can't unfold into a large one or make objects; ``yes``, ``on`` and ``off`` are texts; a name
that occurs twice in a mapping is an error. Size and depth are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import yaml  # type: ignore[import-untyped]

MAX_YAML = 1024 * 1024
"""Longest YAML text, characters."""
MAX_JSON = 16 * 1024 * 1024
"""Longest JSON text, characters."""
MAX_DEPTH = 24

T = TypeVar("T")
Where = tuple[str | int, ...]
"""The way to a field: names and list positions."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "Null": None, "~": None, "": None}
_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`")
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
# libyaml's loader where it is there: the same events, ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DataFileError(ValueError):
    """A data file that can't be used.

    Attributes:
        file: its name. line: the line, 1 is the first; None where none can be named. field: the field as ``a.b[0]``, or ''.
        reason: what is wrong and what to change.
    """

    def __init__(self, file: str, reason: str, line: int | None = None, field: str = "") -> None:
        self.file, self.reason, self.line, self.field = file, reason, line, field
        place = file + (f", line {line}" if line else "") + (f", {field}" if field else "")
        super().__init__(f"{place}: {reason}")


def read_file(path: Path, kind: type[T]) -> T:
    """Read one object of ``kind`` (a msgspec Struct) from a file.

    Raises:
        DataFileError: unreadable, too large, no YAML or JSON, unknown or wrong fields.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise DataFileError(path.name, f"the file has {path.stat().st_size:,} bytes; at most {MAX_JSON:,} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataFileError(path.name, f"can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataFileError(path.name, f"is no UTF-8 text (byte {error.start}): save it as UTF-8") from None
    return parse(text, path.name, kind)


def parse(text: str, name: str, kind: type[T]) -> T:
    """Make one object of ``kind`` from YAML or JSON text; ``name`` is what errors call the file.

    Raises:
        DataFileError: too large, no YAML or JSON, unknown or wrong fields.
    """
    as_json = name.endswith(".json") or text.lstrip()[:1] == "{"
    limit = MAX_JSON if as_json else MAX_YAML
    if len(text) > limit:
        raise DataFileError(name, f"the text has {len(text):,} characters; at most {limit:,} are read")
    data, lines = (_from_json(text, name), {}) if as_json else _from_yaml(text, name)
    try:
        return msgspec.convert(data, kind, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        if as_json:
            lines = _lines_of_json(text)
        raise _located(name, str(error), lines) from None


def plain(value: Any) -> Any:
    """``value`` as plain data for a file: structs become mappings without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        shown = {}
        for field in _fields(type(value)):
            content = getattr(value, field.name)
            if content != _default(field) or field.required:
                shown[field.encode_name] = plain(content)
        return shown
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def to_yaml(value: Any) -> str:
    """A file's text for ``value``: what ``parse`` reads back to an equal object."""
    return cast(str, yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def to_json(value: Any) -> str:
    """The same as JSON."""
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=2).decode() + "\n"


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT


def _located(name: str, message: str, lines: dict[Where, int]) -> DataFileError:
    """Turn ``… - at `$.a.b[0]``` into a field and its line; without a known line, that of what holds it."""
    found = _PATH.search(message)
    where: Where = ()
    if found:
        parts = _PART.findall(found.group(1))
        where = tuple(int(index) if index else key for key, index in parts if key or index)
        message = message[: found.start()]
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if unknown:
        where = (*where, unknown.group(1))
        message = "there is no such setting; look for a spelling mistake"
    known = where
    while known and known not in lines:
        known = known[:-1]
    return DataFileError(name, _plainer(message), lines.get(known), spell(where))


def spell(where: Where) -> str:
    """The way to a field as people write it: ``workload.requests[2].at``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")


_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "object": "a mapping (name: value)", "array": "a list", "null": "nothing",
}  # fmt: skip


def _plainer(message: str) -> str:
    """Words of msgspec for kinds, in the words of a data file."""
    found = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", message)
    if found:
        wanted, got = (" or ".join(_KINDS.get(kind, kind) for kind in side.split(" | ")) for side in found.groups())
        hint = "; write true or false" if "bool" in found.group(1) else ""
        return f"must be {wanted}, but is {got}{hint}"
    found = re.fullmatch(r"Object missing required field `([^`]*)`", message)
    return f"the field {found.group(1)} is missing" if found else message


# JSON ---------------------------------------------------------------------------------------------------------------------


def _from_json(text: str, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise DataFileError(name, f"the name {twice!r} occurs twice in one object: remove one")
        return made

    def refuse(word: str) -> Any:
        raise DataFileError(name, f"{word} is no number that a file may hold: write a finite one")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise DataFileError(name, f"no valid JSON: {error.msg} at column {error.colno}", error.lineno) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(name, "is nested too deeply, or holds a number that is too long") from None


def _lines_of_json(text: str) -> dict[Where, int]:
    """Lines of the fields of a JSON text, where the YAML reader can follow it (it can, up to tabs and size)."""
    if len(text) > MAX_YAML:
        return {}
    try:
        return _from_yaml(text.replace("\t", " "), "")[1]
    except DataFileError:
        return {}


# YAML ---------------------------------------------------------------------------------------------------------------------


def _from_yaml(text: str, name: str) -> tuple[Any, dict[Where, int]]:
    """Plain data, and the line of each field (1 is the first)."""
    lines: dict[Where, int] = {}
    try:
        events = _checked(yaml.parse(text, Loader=_Loader), name)
        first = next(events, None)
        if first is None:
            raise DataFileError(name, "the file is empty")
        data = _node(first, events, (), lines, name)
        extra = next(events, None)
        if extra is not None:
            raise DataFileError(name, "a second document begins here (---): keep one a file", extra.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(part) for part in (error.problem, error.context) if part)
        raise DataFileError(name, f"no valid YAML: {what}", mark.line + 1 if mark else None) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, DataFileError):
            raise
        raise DataFileError(name, f"no valid YAML: {str(error).splitlines()[0]}") from None
    return data, lines


def _checked(events: Iterable[Any], name: str) -> Iterator[Any]:
    """The events that carry content; refuses what the plain part of YAML doesn't have."""
    depth = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise DataFileError(name, "anchors (&) and aliases (*) are not read: write the value out, or quote it", line)
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None):
            raise DataFileError(name, f"the tag {event.tag} is not read here: remove it", line)
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > MAX_DEPTH:
                raise DataFileError(name, f"is nested more than {MAX_DEPTH} deep", line)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        if isinstance(event, (yaml.NodeEvent, yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            yield event


def _node(event: Any, events: Iterator[Any], where: Where, lines: dict[Where, int], name: str) -> Any:
    line = event.start_mark.line + 1
    lines.setdefault(where, line)
    if isinstance(event, yaml.ScalarEvent):
        return event.value if event.style else scalar(event.value)
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Any] = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_node(item, events, (*where, len(items)), lines, name))
        return items
    made: dict[str, Any] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        key_line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarEvent):
            raise DataFileError(name, "a name in a mapping must be a text", key_line, spell(where))
        if key.value in made:
            raise DataFileError(name, "occurs twice: remove one", key_line, spell((*where, key.value)))
        lines[(*where, key.value)] = key_line
        made[key.value] = _node(next(events), events, (*where, key.value), lines, name)
    return made


def scalar(text: str) -> Any:
    """What an unquoted word of a YAML file means."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        value = float(text.replace("_", ""))
        if abs(value) == float("inf"):
            raise ValueError(f"{text} is too large for a number")
        return value
    return text


class _Dumper(yaml.SafeDumper):
    """Writes so that ``scalar`` reads it back: words that would become something else, and rare line ends, are quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    try:
        safe = isinstance(scalar(text), str) and text.replace("\n", "").isprintable()
    except ValueError:
        safe = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if safe else '"')


def _represent_float(dumper: _Dumper, value: float) -> Any:
    text = repr(value)
    if "." not in text:  # 1e-05: YAML 1.1 wants a point in every fraction
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
