"""Streamed text equals the decoding of the whole, whatever the tokens."""

import random
import time

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from engine.model.tokenizer import Tokenizer
from engine.serve.detokenizer import Codec
from tests.fixtures import make_tokb

TEXT = "Grüße, 世界! 🙂👩‍👩‍👧 é \n\n  tabs\tand   spaces\r\n1234567890 ﷽ ok\x00\x07"


def metaspace(sequence: bool) -> Tokenizer:
    """A SentencePiece-like vocabulary: words with ▁, the alphabet, and byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁Hello", "▁world", "!", "▁", "Hello", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    if sequence:
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Metaspace()
    raw.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return Tokenizer(raw)


def wordpiece() -> Tokenizer:
    raw = RawTokenizer(
        models.WordPiece({"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3, "story": 4, "!": 5}, unk_token="[UNK]")
    )
    raw.decoder = decoders.WordPiece()
    return Tokenizer(raw)


def stream(tokenizer, ids, prompt=(), skip=True):
    decoder = Codec(tokenizer).decoder(list(prompt), skip)
    return [decoder.append(token) for token in ids], decoder.finish()


TOKB = Tokenizer(make_tokb(special=["<|end|>"]))


def test_no_half_characters():
    for char in ("🙂", "é", "世"):
        ids = list(char.encode())
        deltas, rest = stream(TOKB, ids)
        assert deltas == [""] * (len(ids) - 1) + [char] and rest == ""


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_cut_character_is_one_replacement_at_the_end(keep):
    deltas, rest = stream(TOKB, [65, *"🙂".encode()[:keep]])
    assert "".join(deltas) == "A" and rest == "\ufffd"


def test_finish_tells_once():
    decoder = Codec(TOKB).decoder([], True)
    decoder.append(0xF0)
    assert decoder.finish() == "\ufffd" and decoder.finish() == ""


@pytest.mark.parametrize("skip", [True, False])
def test_text_with_everything_streams_whole(tiny, smollm2, skip):
    for tokenizer in (TOKB, tiny.tokenizer, smollm2.tokenizer):
        ids = tokenizer.encode(TEXT)
        deltas, rest = stream(tokenizer, ids, skip=skip)
        assert "".join(deltas) == TEXT and rest == ""
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["tokb", "tiny", "smollm2", "metaspace", "llama-style"])
def test_random_tokens_never_raise_and_equal_the_whole(name, skip, request):
    tokenizer = {"tokb": lambda: TOKB, "metaspace": lambda: metaspace(False), "llama-style": lambda: metaspace(True)}.get(
        name, lambda: request.getfixturevalue(name).tokenizer
    )()
    generator, known = random.Random(7), tokenizer.vocab_size
    for _ in range(200):
        ids = [generator.randrange(known + 2) for _ in range(64)]
        deltas, rest = stream(tokenizer, ids, skip=skip)
        whole = tokenizer.decode([i for i in ids if tokenizer.raw.id_to_token(i) is not None], skip_special_tokens=skip)
        held = len(rest)
        assert whole.startswith("".join(deltas))
        if name != "llama-style":  # a cut run of byte tokens ends in one replacement there, not in one a byte
            assert "".join(deltas) + rest == whole and held <= 1


@pytest.mark.parametrize("sequence", [True, False])
def test_a_metaspace_vocabulary_keeps_its_spaces(sequence):
    tokenizer = metaspace(sequence)
    hello, world, bang = (tokenizer.raw.token_to_id(piece) for piece in ("▁Hello", "▁world", "!"))
    assert stream(tokenizer, [hello, world, bang])[0] == ["Hello", " world", "!"]
    assert stream(tokenizer, [world, bang], prompt=[hello])[0] == [" world", "!"]
    assert stream(tokenizer, [hello, world], prompt=[tokenizer.raw.token_to_id("<s>")])[0] == ["Hello", " world"]
    assert tokenizer.decode([hello, world, bang]) == "Hello world!"


def test_byte_tokens_of_a_metaspace_vocabulary_wait_for_their_character():
    tokenizer = metaspace(True)
    ids = [tokenizer.raw.token_to_id(f"<0x{b:02X}>") for b in "🙂".encode()]
    bang = tokenizer.raw.token_to_id("!")
    assert stream(tokenizer, [bang, *ids, bang]) == (["!", "", "", "", "", "🙂!"], "")
    assert stream(tokenizer, [bang, *ids]) == (["!", "", "", "", ""], "🙂")
    assert stream(tokenizer, [bang, *ids[:2]]) == (["!", "", ""], "\ufffd")
    long = stream(tokenizer, ids * 40)
    assert "".join(long[0]) + long[1] == "🙂" * 40 and "".join(long[0])


def test_any_other_decoder_streams_by_a_window():
    deltas, rest = stream(wordpiece(), [1, 2, 3, 4, 5])
    assert "".join(deltas) + rest == wordpiece().decode([1, 2, 3, 4, 5]) == "unbelievable story!"


def test_special_tokens_are_hidden_or_shown():
    ids = [65, 256, 66]
    assert stream(TOKB, ids)[0] == ["A", "", "B"]
    assert stream(TOKB, ids, skip=False)[0] == ["A", "<|end|>", "B"]


def test_labels():
    codec = Codec(TOKB)
    assert (codec.token_text(65), codec.token_text(32), codec.token_text(256), codec.token_text(999)) == (
        "A",
        " ",
        "<|end|>",
        "",
    )
    assert codec.token_text(0xF0) == "\ufffd"
    assert Codec(metaspace(True)).token_text(3 + 256) == " Hello"


@pytest.mark.parametrize("make", [lambda: TOKB, lambda: metaspace(True), wordpiece])
def test_the_cost_of_a_token_does_not_grow(make):
    tokenizer = make()
    decoder = Codec(tokenizer).decoder([], True)
    generator = random.Random(1)
    ids = [generator.randrange(tokenizer.vocab_size) for _ in range(20_000)]
    times = []
    for part in range(4):
        begin = time.perf_counter()
        for token in ids[part * 5000 : part * 5000 + 5000]:
            decoder.append(token)
        times.append(time.perf_counter() - begin)
    assert times[-1] < 5 * min(times[:2]) + 0.05
