"""Text as it streams: whole characters, no lost space, nothing of a stop string, always the beginning of the full text."""

import json
import random
import shutil

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from engine import LLM, SamplingParams
from tests.cases.kit import Ear, Model, assert_idle, assert_oracle, drain, greedy, outputs_of, prompt_of
from tests.fixtures import FIRST_PIECE, byte_alphabet, chain_of, make_chain, save_tokenizer

pytestmark = pytest.mark.timeout(120)


def stream(path, start, params, **config):
    """(deltas, sample) of one request on a checkpoint."""
    ear = Ear()
    llm = LLM(path, device="cpu", max_model_len=64, num_kv_blocks=32, listener=ear, **config)
    (output,) = llm.generate([start], params)
    assert ear.texts[output.request_id] == output.outputs[0].text
    return ear.deltas[output.request_id], output.outputs[0]


TEXTS = {
    "emoji": "🙂", "accent": "é", "CJK": "世", "mixed": "aé世🙂z", "family": "👩\u200d🔬", "flag": "🇺🇳",
    "combining": "e\u0301", "last plane": "\U0010fffd",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_characters_of_several_tokens_come_whole_or_not_yet(tmp_path, text):
    """Every way to cut the output: whole characters only, and one replacement character where the cut is inside one."""
    path, runs = chain_over(tmp_path, text.encode())
    for count in range(1, len(runs) + 1):
        emitted = b"".join(runs[:count])
        deltas, sample = stream(path, [FIRST_PIECE], greedy(count))
        whole = emitted.decode("utf-8", "ignore")
        cut = emitted.decode("utf-8", "replace") != whole
        assert sample.text == whole + "\ufffd" * cut
        assert "".join(deltas) == sample.text
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", count)
        assert all("\ufffd" not in delta for delta in deltas[:-1])
    assert sample.text == text


def chain_over(path, data):
    """A chain from token 256 that emits ``data`` byte by byte; where a byte comes again, a run of bytes is one token."""
    runs: list[bytes] = []
    while data:
        size = next((n for n in range(1, len(data)) if data[:n] not in runs), len(data))
        runs.append(data[:size])
        data = data[size:]
    if runs[-1] in runs[:-1]:
        runs[-2:] = [runs[-2] + runs[-1]]
    ids = [run[0] if len(run) == 1 else FIRST_PIECE + 1 + i for i, run in enumerate(runs)]
    make_chain(path, chain_of([FIRST_PIECE, *ids]), ["start"])
    raw = json.loads((path / "tokenizer.json").read_text())
    alphabet = byte_alphabet()
    raw["model"]["vocab"] |= {"".join(alphabet[byte] for byte in run): i for run, i in zip(runs, ids, strict=True)}
    (path / "tokenizer.json").write_text(json.dumps(raw))
    return path, runs


def test_a_stop_string_never_shows_and_a_near_miss_comes_late_but_whole(tmp_path):
    pieces = ["DEF", "HI", "start"]
    start = FIRST_PIECE + 2
    hit = make_chain(tmp_path / "hit", chain_of([start, 256, ord("G"), 257, ord("J"), ord("K")]), pieces)
    deltas, sample = stream(hit, [start], greedy(9, stop="DEFGHIJ"))
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("", "stop", "DEFGHIJ")
    assert len(sample.token_ids) == 4 and "".join(deltas) == ""
    deltas, sample = stream(hit, [start], greedy(9, stop="DEFGHIJ", include_stop_str_in_output=True))
    assert sample.text == "".join(deltas) == "DEFGHIJ"
    miss = make_chain(tmp_path / "miss", chain_of([start, 256, ord("G"), ord("X")]), pieces)
    deltas, sample = stream(miss, [start], greedy(3, stop="DEFGHIJ"))
    assert deltas == ["", "", "DEFGX"] and sample.text == "DEFGX"
    deltas, sample = stream(hit, [start], greedy(2, stop="DEFGHIJ"))
    assert (sample.text, "".join(deltas), sample.finish_reason) == ("DEFG", "DEFG", "length"), "the end resolves it too"


def test_every_stop_string_of_a_text_at_every_place(tmp_path):
    """Tokens of one, two and three characters; each substring as the stop string: cut where it begins, never shown."""
    pieces = ["bc", "def", "gh", "start"]
    text = "abcdefghi"
    path = make_chain(tmp_path, chain_of([FIRST_PIECE + 3, ord("a"), 256, 257, 258, ord("i")]), pieces)
    model = Model.load(path)
    ends = [1, 3, 6, 8, 9]
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            ear = Ear()
            stops = (text[begin:end], "zzz", text[begin:end] + "never")
            (output,) = model.llm(listener=ear).generate([[FIRST_PIECE + 3]], greedy(5, stop=stops))
            (sample,) = output.outputs
            assert (sample.text, sample.finish_reason, sample.stop_reason) == (text[:begin], "stop", text[begin:end])
            assert len(sample.token_ids) == next(i for i, place in enumerate(ends, 1) if place >= end)
            assert "".join(ear.deltas[output.request_id]) == sample.text


def test_min_tokens_lets_a_stop_string_pass(tmp_path):
    path = make_chain(tmp_path, chain_of([65, 66, 67, 68, 69, 66 + 32]))
    _, sample = stream(path, [65], greedy(6, stop="C", min_tokens=3))
    assert sample.text.startswith("BCDE") and sample.finish_reason == "length"
    _, sample = stream(path, [65], greedy(6, stop="E", min_tokens=3))
    assert (sample.text, sample.finish_reason) == ("BCD", "stop")


# ------------------------------------------------------------------ other vocabularies


WORDS = ["\u2581Hello", "\u2581world", "!", "\u2581", "wo", "rld", *(f"<0x{byte:02X}>" for byte in range(256))]


def metaspace(path):
    """Put a Metaspace vocabulary with byte fallback in the place of a checkpoint's tokenizer."""
    vocab = [("<unk>", 0.0), *((word, -float(i)) for i, word in enumerate(WORDS))]
    raw = RawTokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    raw.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    save_tokenizer(path, raw)
    return path


def test_the_space_before_a_word_is_not_lost(tmp_path):
    """The marker of the first word is a space after a prompt, and only the sign of a beginning where nothing came before."""
    hello, world, mark, bos = 1, 2, 3, len(WORDS) + 1
    path = metaspace(make_chain(tmp_path, chain_of([bos, hello, world, mark]) | {300: hello}))
    for start, first in (([300], " Hello"), ([world, 300], " Hello"), ([bos], "Hello")):
        for count in (1, 2, 3):
            deltas, sample = stream(path, start, greedy(count))
            assert deltas == [first, " world", "!"][:count]
            assert sample.text == "".join(deltas)
    whole = Model.load(path).loaded.tokenizer.decode([bos, hello, world, mark])
    assert whole == sample.text == "Hello world!"


@pytest.mark.parametrize("kind", ["TOKB", "Metaspace"])
def test_random_tokens_harm_nobody_and_stream_the_full_text(rand, tmp_path, kind):
    """200 sequences of 64 random ids (ids without a token among them) beside healthy requests."""
    path = shutil.copytree(rand.path, tmp_path / "copy")
    if kind == "Metaspace":
        metaspace(path)
    model, ear, source = Model.load(path), Ear(), random.Random(1)
    llm = model.llm(
        max_num_seqs=64, num_kv_blocks=512, max_num_batched_tokens=1024, listener=ear, max_num_queued_requests=500
    )
    noise = SamplingParams(temperature=1e6, max_tokens=64, ignore_eos=True)
    names = [llm.add_request(prompt_of(source.randrange(1, 9), i), noise) for i in range(200)]
    healthy = [llm.add_request(prompt_of(7, 300 + i), greedy(40)) for i in range(3)]
    drain(llm)
    assert len({tuple(llm.output(name).outputs[0].token_ids) for name in names}) == 200
    for name in names:
        (sample,) = llm.output(name).outputs
        assert sample.finish_reason == "length" and len(sample.token_ids) == 64
        assert "".join(ear.deltas[name]) == sample.text
        if kind == "TOKB":
            full = llm.tokenizer.decode([token for token in sample.token_ids if token < 256])
            assert sample.text == full
    assert_oracle(model, outputs_of(llm, healthy), count=40)
    assert_idle(llm)
