import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.workload.check import WorkloadError
from engine.workload.prompts import PromptMaker, corpus
from tests.workload.kit import encode

BOS = 300


def words(text):
    """A tokenizer of about a token a word, with a beginning-of-sequence token."""
    return [BOS, *(sum(word.encode()) % 299 for word in text.split())]


@given(st.integers(0, 500), st.integers(1, 6000), st.data())
def test_a_prompt_has_exactly_the_wanted_tokens_and_prefix(index, tokens, data):
    prefix = data.draw(st.integers(0, tokens - 1))
    tokenizer = data.draw(st.sampled_from([encode, words]))
    maker = PromptMaker(tokenizer)
    made = maker.make(index, tokens, prefix)
    assert len(made.token_ids) == tokens
    assert made == PromptMaker(tokenizer).make(index, tokens, prefix)
    other = maker.make(index + 1, tokens, prefix)
    assert made.token_ids[:prefix] == other.token_ids[:prefix]


def test_prompts_without_a_common_prefix_differ_within_their_first_block():
    maker = PromptMaker(encode)
    starts = {maker.make(index, 64).token_ids[:16] for index in range(1000)}
    assert len(starts) == 1000
    prefixes = {maker.make(0, 64, 32, which).token_ids[:16] for which in range(100)}
    assert len(prefixes) == 100


def test_after_the_prefix_prompts_differ_within_the_next_block():
    maker = PromptMaker(encode)
    tails = {maker.make(index, 200, 96).token_ids[96:112] for index in range(200)}
    assert len(tails) == 200


def test_a_first_token_that_the_tokenizer_adds_comes_once():
    ids = PromptMaker(words).make(3, 400, 100).token_ids
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_there_is_real_text_for_4000_tokens_before_it_repeats():
    texts = corpus()
    assert sum(len(sentence.split()) for sentence in texts.sentences) * 1.13 > 3900
    assert len(set(texts.sentences)) == len(texts.sentences)
    assert len(texts.guides) == 3
    assert len(texts.questions) >= 20
    text = PromptMaker(encode).make(0, 12_000).text
    assert len(set(text.split(". "))) == len(text.split(". "))


def test_the_text_is_what_the_tokens_stand_for():
    made = PromptMaker(encode).make(5, 300)
    assert bytes(made.token_ids).decode().startswith(made.text[:280])
    assert 270 <= len(made.text) <= 320


@given(st.integers(0, 50), st.integers(10, 3000))
def test_without_a_tokenizer_the_length_is_about_right(index, tokens):
    made = PromptMaker(None, tokens_per_word=1.3).make(index, tokens)
    assert made.token_ids is None
    assert len(made.text.split()) == round(tokens / 1.3)


def test_another_seed_begins_elsewhere():
    assert PromptMaker(encode, seed=1).make(0, 100) != PromptMaker(encode, seed=2).make(0, 100)


@pytest.mark.parametrize(("arguments", "match"), [((0, 0), "tokens=0"), ((0, 10, 10), "prefix_tokens=10 must be .* 0 to 9")])
def test_impossible_lengths_are_refused(arguments, match):
    with pytest.raises(WorkloadError, match=match):
        PromptMaker(encode).make(*arguments)


def test_a_tokenizer_that_gives_nothing_is_refused_instead_of_looping():
    with pytest.raises(WorkloadError, match="gives no tokens"):
        PromptMaker(lambda text: []).make(0, 10)
