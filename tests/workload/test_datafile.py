import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.workload.datafile import DataFileError, parse, read_file, scalar, to_json, to_yaml


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: float = 0.0
    name: str = ""
    on: bool = False


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()
    extra: dict[str, object] = {}
    maybe: float | None = None

    def __post_init__(self):
        if self.title == "bad":
            raise ValueError("title='bad' is a bad title: choose another")


TEXT = st.text(max_size=40)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
INNER = st.builds(Inner, at=st.floats(allow_nan=False, allow_infinity=False), name=TEXT, on=st.booleans())
OUTER = st.builds(
    Outer,
    title=TEXT.filter(lambda text: text != "bad"),
    inner=INNER,
    items=st.lists(INNER, max_size=3).map(tuple),
    extra=st.dictionaries(TEXT, PLAIN, max_size=3),
    maybe=st.none() | st.floats(-1e300, 1e300),
)


@given(OUTER, st.sampled_from([("a.yaml", to_yaml), ("a.json", to_json)]))
def test_what_is_written_reads_back_equal(value, form):
    name, write = form
    assert parse(write(value), name, Outer) == value


@pytest.mark.parametrize(
    "word",
    [
        "1e3",
        "on",
        "off",
        "yes",
        "no",
        "null",
        "~",
        "true",
        "1_000",
        "0x10",
        "010",
        ".5",
        "1.",
        "",
        "-",
        "12:30",
        "=",
        "<<",
        "\x85",
        "a\x85 b",
    ],
)
def test_words_that_look_like_something_else_stay_texts(word):
    value = Outer(title=word, extra={word: word})
    assert parse(to_yaml(value), "a.yaml", Outer) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12), ("-3", -3), ("1_000", 1000), ("0", 0), ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("2.", 2.0),
        ("true", True), ("False", False), ("null", None), ("~", None), ("on", "on"), ("off", "off"), ("no", "no"),
        ("010", "010"), ("0x1F", "0x1F"), ("12:30", "12:30"), ("2026-01-05", "2026-01-05"), ("nan", "nan"), ("e5", "e5"),
        (".", "."), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_what_an_unquoted_word_means(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


YAML_ERRORS = [
    ("", None, "", "the file is empty"),
    ("title: a\ntitel: b\n", 2, "titel", "there is no such setting"),
    ("title: a\nitems:\n  - at: 1\n  - at: soon\n", 4, "items[1].at", "must be a number, but is a text"),
    ("title: a\ninner: {on: yes}\n", 2, "inner.on", "must be true or false, but is a text; write true or false"),
    ("title: a\nitems:\n  - name: x\n    att: 1\n", 4, "items[0].att", "no such setting"),
    ("items: []\n", 1, "", "the field title is missing"),
    ("title: a\ntitle: b\n", 2, "title", "occurs twice"),
    ("title: bad\n", 1, "", "choose another"),
    ("title: [1\n", 2, "", "no valid YAML"),
    ("title: a\n b: c\n", 2, "", "no valid YAML"),
    ("title: &x a\nextra: {y: *x}\n", 1, "", "anchors"),
    ("title: a\nextra: *x\n", 2, "", "anchors"),
    ("title: !!python/object:os.system a\n", 1, "", "tag"),
    ("title: a\nextra: {? [1] : 2}\n", 2, "extra", "a name in a mapping must be a text"),
    ("title: a\n---\ntitle: b\n", 3, "", "second document"),
    ("- a\n", 1, "", "must be a mapping (name: value), but is a list"),
    ("title: a\nextra: {x: 1e999}\n", None, "", "too large"),
    ("title: \x00a\n", None, "", "no valid YAML"),
    ("title: a\nextra: " + "[" * 60 + "]" * 60, 2, "", "nested more than 24 deep"),
]


@pytest.mark.parametrize(("text", "line", "field", "words"), YAML_ERRORS)
def test_a_bad_yaml_file_names_file_line_and_field(text, line, field, words):
    with pytest.raises(DataFileError) as caught:
        parse(text, "mine.yaml", Outer)
    error = caught.value
    assert (error.line, error.field) == (line, field)
    assert words in error.reason
    assert str(error).startswith("mine.yaml" + (f", line {line}" if line else "") + (f", {field}" if field else "") + ": ")


JSON_ERRORS = [
    ('{"title": "a",\n "items": [{"at": "x"}]}', 2, "items[0].at", "must be a number"),
    ('{"title": "a",\n\t"on": 1}', 2, "on", "no such setting"),
    ('{"title": "a"\n "b": 1}', 2, "", "no valid JSON"),
    ('{"title": "a", "title": "b"}', None, "", "occurs twice"),
    ('{"title": "a", "maybe": NaN}', None, "", "no number that a file may hold"),
    ('{"title": ' + "[" * 100_000, None, "", "nested too deeply"),
    ("", 1, "", "no valid JSON"),
]


@pytest.mark.parametrize(("text", "line", "field", "words"), JSON_ERRORS)
def test_a_bad_json_file_names_file_line_and_field(text, line, field, words):
    with pytest.raises(DataFileError) as caught:
        parse(text, "mine.json", Outer)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert words in caught.value.reason


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(DataFileError, match="can't be read"):
        read_file(tmp_path / "none.yaml", Outer)
    (tmp_path / "bytes.yaml").write_bytes(b"title: \xff\xfe")
    with pytest.raises(DataFileError, match="no UTF-8"):
        read_file(tmp_path / "bytes.yaml", Outer)
    with pytest.raises(DataFileError, match=r"at most 1,048,576 are read"):
        parse("title: " + "a" * 1_100_000, "big.yaml", Outer)


@given(st.text(max_size=200) | st.text("{}[]:,-&*!|>'\"\n ab1", max_size=60), st.sampled_from(["a.yaml", "a.json"]))
def test_no_text_gives_anything_but_an_object_or_a_clear_error(text, name):
    error = None
    try:
        parse(text, name, Outer)
    except DataFileError as caught:
        error = caught
    assert error is None or str(error).startswith(name)
