"""The embedded model: its tokenizer's ids, and greedy tokens equal to transformers'."""

from itertools import pairwise

import pytest
import torch

from engine.core.sampling_params import SamplingParams
from engine.llm import LLM
from tests.fixtures import assert_greedy

PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a little robot who",
    "Water boils at a temperature of 100 degrees because",
    "Q: What is the largest planet of the solar system?\nA:",
    "Grüße aus Köln! Ich",
    "The three primary colours are red, green and blue. The opposite of hot is cold. The opposite of up is",
]
TOKENS = 48


@pytest.fixture(scope="module")
def reference(smollm2):
    """Greedy tokens and top-2 gaps of transformers, all prompts in one padded batch with its own cache."""
    from transformers import AutoModelForCausalLM

    from engine.model.checkpoint import find_checkpoint

    model = AutoModelForCausalLM.from_pretrained(str(find_checkpoint("smollm2").folder), dtype=torch.float32)
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in PROMPTS]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=0,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    top = torch.stack(out.logits, 1).topk(2).values
    return prompts, out.sequences[:, width:].tolist(), (top[..., 0] - top[..., 1]).tolist()


def params(tokens=TOKENS):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 0])
def test_greedy_tokens_equal_transformers_in_a_batch(smollm2, reference, chunk):
    prompts, expected, gaps = reference
    llm = LLM(smollm2, num_kv_blocks=64, max_model_len=128, long_prefill_token_threshold=chunk, enable_prefix_caching=False)
    outputs = llm.generate(prompts, params())
    for output, tokens, gap in zip(outputs, expected, gaps, strict=True):
        assert_greedy(output.outputs[0].token_ids, tokens, gap, least=8)
    llm.check()


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 512])
def test_greedy_tokens_equal_transformers_alone(smollm2, reference, chunk):
    prompts, expected, gaps = reference
    llm = LLM(
        smollm2,
        num_kv_blocks=64,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    )
    some = range(8) if chunk == 512 else [{1: 0, 7: 3, 16: 7, 17: 5}[chunk]]
    for i in some:
        output = llm.generate(prompts[i], params())[0]
        assert_greedy(output.outputs[0].token_ids, expected[i], gaps[i], least=8)


def test_references_are_clear_enough(reference):
    """Most of what is compared above must lie before a near tie, or it proves nothing."""
    _, _, gaps = reference
    clear = [next((i for i, gap in enumerate(row) if gap < 1e-3), TOKENS) for row in gaps]
    assert sum(clear) >= 0.75 * TOKENS * len(PROMPTS)


# Ids known from the model's own vocabulary file: special tokens come first, then the printable bytes in order ("!" is 17).
def byte_id(char: str) -> int:
    return 17 + ord(char) - ord("!")


@pytest.mark.parametrize("text", ["0", "7", "12", "345", "1234567890", "007"])
def test_each_digit_is_a_token(smollm2, text):
    assert smollm2.tokenizer.encode(text) == [byte_id(char) for char in text]


def test_numbers_inside_text_and_lists(smollm2):
    tokenizer = smollm2.tokenizer
    space, newline = tokenizer.raw.token_to_id("Ġ"), tokenizer.raw.token_to_id("Ċ")
    assert (space, newline) == (216, 198)
    assert tokenizer.encode("in 2024") == [tokenizer.raw.token_to_id("in"), space, *map(byte_id, "2024")]
    assert tokenizer.encode("1. a") == [byte_id("1"), byte_id("."), tokenizer.raw.token_to_id("Ġa")]
    assert tokenizer.encode("10.\n11.") == [*map(byte_id, "10."), newline, *map(byte_id, "11.")]
    assert tokenizer.encode("a1b2") == [*map(byte_id, "a1b2")]


def merged(tokenizer, word: str) -> list[int]:
    """Byte-pair merging by hand: the independent check of what happens within one piece of text."""
    import json

    model = json.loads(tokenizer.raw.to_str())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    parts = list(word)
    while True:
        pairs = [(ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts))]
        best = min(pairs, default=(1 << 30, 0))
        if best[0] == 1 << 30:
            return [model["vocab"][part] for part in parts]
        i = best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("a   b", ["a", "  ", " b"]),
        ("a\n\n  b", ["a", "\n\n ", " b"]),
        ("x\n", ["x", "\n"]),
        ("don't", ["don", "'t"]),
        ("🙂", ["🙂"]),
        ("日本語 text", ["日本語", " text"]),
        ("price: $5!!", ["price", ":", " $", "5", "!!"]),
        (" 42", [" ", "4", "2"]),
        ("a\t1\n2", ["a", "\t", "1", "\n", "2"]),
        ("½ x²", ["½", " x", "²"]),
    ],
)
def test_pieces_are_split_as_the_model_was_trained(smollm2, text, pieces):
    from tests.fixtures import byte_alphabet

    alphabet = byte_alphabet()
    expected = [i for piece in pieces for i in merged(smollm2.tokenizer, "".join(alphabet[b] for b in piece.encode()))]
    assert smollm2.tokenizer.encode(text) == expected
    assert smollm2.tokenizer.decode(expected) == text


def test_special_tokens_and_the_chat_template(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>") == [1, byte_id("a"), 2, 0]
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi 12"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    assert text.endswith("<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.eos_token_ids == {2}
    assert smollm2.info.has_chat_template and smollm2.info.num_parameters == 134_515_008
