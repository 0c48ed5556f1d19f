"""When an output ends: stop strings over token boundaries never leak, near misses are delivered, stop ids and min_tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.stop import find_stop, held_back
from tests.core.kit import add, assert_idle, drain, make, tokens_of


class PieceDecoder:
    """Each token is a piece of text; nothing is ever incomplete unless ``hold`` says so."""

    def __init__(self, pieces, hold):
        self.pieces, self.hold, self.kept = pieces, hold, ""

    def append(self, token):
        text = self.kept + self.pieces[token]
        self.kept = text[len(text) - self.hold :] if self.hold else ""
        return text[: len(text) - len(self.kept)]

    def finish(self):
        text, self.kept = self.kept, ""
        return text


class Pieces:
    """A codec whose vocabulary is a list of texts; ``hold`` characters are held back, as half a character would be."""

    def __init__(self, pieces, hold=0):
        self.pieces, self.hold = pieces, hold

    def decoder(self, prompt_token_ids, skip_special_tokens):
        return PieceDecoder(self.pieces, self.hold)

    def token_text(self, token):
        return self.pieces[token]


class Recorder:
    """What a stream would show, and when."""

    def __init__(self):
        self.deltas, self.closed_text = [], None

    def opened(self, event): ...
    def stepped(self, step): ...
    def token(self, event):
        self.deltas.append(event.text)

    def closed(self, event):
        self.closed_text = event.text


def generate(pieces, *, hold=0, eos=(), max_tokens=None, **params):
    """Emit ``pieces`` in order; returns (output, deltas)."""
    recorder = Recorder()
    engine = make(codec=Pieces(pieces, hold), listener=recorder, eos=eos)
    engine.runner.script = lambda request: request.num_output_tokens
    identity = add(engine, 3, max_tokens or len(pieces), **params)
    drain(engine)
    output = engine.output(identity).outputs[0]
    assert recorder.closed_text == output.text
    assert "".join(recorder.deltas) == output.text
    assert len(recorder.deltas) == len(output.token_ids)
    return output, recorder.deltas


def test_a_stop_string_over_four_tokens_leaks_nothing():
    output, deltas = generate(["DEF", "G", "HI", "J", "K"], stop="DEFGHIJ")
    assert (output.text, output.finish_reason, output.stop_reason, len(output.token_ids)) == ("", "stop", "DEFGHIJ", 4)
    assert deltas == ["", "", "", ""]


def test_a_near_miss_is_delivered_when_the_ambiguity_ends():
    output, deltas = generate(["DEF", "G", "X"], stop="DEFGHIJ")
    assert (output.text, output.finish_reason) == ("DEFGX", "length")
    assert deltas == ["", "", "DEFGX"]
    output, deltas = generate(["DEF", "G", "X", "Y"], stop="DEFGHIJ")
    assert deltas == ["", "", "DEFGX", "Y"]


def splits(text):
    """Every way to cut a text into pieces."""
    for mask in range(1 << (len(text) - 1)):
        cuts = [0, *(i + 1 for i in range(len(text) - 1) if mask >> i & 1), len(text)]
        yield [text[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "shown"), [("abSTOPc", "STOP", "ab"), ("ababac", "abac", "ab"), ("xaaab", "aab", "xa")]
)
def test_all_splits_of_a_stop_string(text, stop, shown, include):
    for pieces in splits(text):
        output, deltas = generate(pieces, stop=stop, include_stop_str_in_output=include)
        assert output.text == shown + (stop if include else "")
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        seen = ""
        for delta in deltas:
            seen += delta
            assert (shown + stop).startswith(seen) if include else shown.startswith(seen)
        position, used = 0, 0
        while position < len(shown + stop):
            position += len(pieces[used])
            used += 1
        assert len(output.token_ids) == used  # it stops with the token that completed the string


@pytest.mark.parametrize("text", ["abSTOXc", "abSTO", "SSTO", "ababaab"])
def test_all_splits_of_a_near_miss_are_delivered_in_full(text):
    for pieces in splits(text):
        output, deltas = generate(pieces, stop=("STOP", "abac"))
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "length", None)
        assert "".join(deltas) == text


def test_several_stop_strings_the_earliest_in_the_text_wins():
    output, _ = generate(["one two", " three"], stop=("three", "two", "ne t"))
    assert (output.text, output.stop_reason) == ("o", "ne t")
    output, deltas = generate(["A", "B", "C", "X", "D"], stop=("ABCD", "BC"))
    assert (output.text, output.stop_reason, deltas) == ("A", "BC", ["", "", "A"])
    output, _ = generate(["A", "B", "C", "D"], stop=("ABCD", "CD"))
    assert (output.text, output.stop_reason) == ("", "ABCD")


def test_a_stop_string_inside_one_token_cuts_the_token():
    output, deltas = generate(["hello wor", "ld! and more"], stop="!")
    assert (output.text, deltas) == ("hello world", ["hello wor", "ld"])
    output, _ = generate(["hello wor", "ld! and more"], stop="!", include_stop_str_in_output=True)
    assert output.text == "hello world!"


@pytest.mark.parametrize("hold", [0, 1, 2])
def test_text_that_the_decoder_holds_back_still_stops(hold):
    output, _ = generate(["ab", "STOP"], hold=hold, stop="STOP")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "STOP")
    output, _ = generate(["ab", "cd"], hold=hold)
    assert (output.text, output.finish_reason) == ("abcd", "length")


@pytest.mark.parametrize("min_tokens", range(6))
def test_min_tokens_delays_stop_strings_stop_ids_and_end_of_sequence(min_tokens):
    pieces = ["a", "S", "b", "S", "c", "S"]
    output, _ = generate(pieces, stop="S", min_tokens=min_tokens)
    expected = next((n for n in (2, 4, 6) if n > min_tokens), None)
    assert len(output.token_ids) == expected
    assert output.text == "".join(pieces[: expected - 1])
    engine = make(eos=[2])
    engine.runner.script = lambda request: request.num_output_tokens % 3
    identity = add(engine, 3, 9, min_tokens=min_tokens)
    drain(engine)
    assert len(tokens_of(engine, identity)) == next(n for n in (3, 6, 9) if n > min_tokens)
    identity = add(engine, 3, 9, min_tokens=min_tokens, ignore_eos=True, stop_token_ids=(1,))
    drain(engine)
    assert len(tokens_of(engine, identity)) == next(n for n in (2, 5, 8) if n > min_tokens)


def test_stop_ids_and_end_of_sequence_are_counted_and_not_shown():
    output, deltas = generate(["a", "b", "<eos>"], eos=[2])
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("ab", [0, 1, 2], "stop", None)
    assert deltas == ["a", "b", ""]
    output, _ = generate(["a", "b", "<end>", "c"], stop_token_ids=(2,))
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("ab", [0, 1, 2], "stop", 2)
    output, _ = generate(["a", "<eos>", "b"], eos=[1], ignore_eos=True)
    assert (output.text, output.finish_reason) == ("a<eos>b", "length")


@pytest.mark.parametrize("eos", [[2], [3], [4], [2, 3, 4]])
def test_any_of_several_end_of_sequence_ids_ends_the_output(eos):
    output, _ = generate(["a", "b", "2", "3", "4"], eos=eos)
    assert output.token_ids[-1] == min(eos)
    assert output.finish_reason == "stop"


def test_the_last_token_may_both_stop_and_reach_the_length():
    output, _ = generate(["a", "S"], stop="S")
    assert (output.text, output.finish_reason) == ("a", "stop")
    output, _ = generate(["a", "x"], eos=[1])
    assert output.finish_reason == "stop"


def test_an_aborted_request_keeps_the_text_that_was_held_back():
    recorder = Recorder()
    engine = make(codec=Pieces(["ab", "ST", "x"], 1), listener=recorder)
    engine.runner.script = lambda request: request.num_output_tokens
    identity = add(engine, 3, 3, stop="STOP")
    engine.step()
    engine.step()
    engine.abort(identity)
    assert engine.output(identity).outputs[0].text == "abST"
    assert recorder.closed_text == "abST"
    assert_idle(engine)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_held_back_is_the_longest_end_that_could_become_a_stop_string(text, stops):
    count = held_back(text, tuple(stops))
    candidates = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) and n < len(s) for s in stops)]
    assert count == max(candidates)


@given(
    st.text("ab", max_size=12), st.integers(0, 12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_the_stop_string_found_is_the_earliest_that_is_new(text, new_from, stops):
    found = find_stop(text, new_from, tuple(stops))
    places = [(i, s) for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > new_from]
    if not places:
        assert found is None
    else:
        assert found in places
        assert found[0] == min(place for place, _ in places)
