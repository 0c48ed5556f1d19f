"""Sampling: a seeded request depends on nothing but itself, and every distribution is the one the oracle's logits give."""

import itertools
from collections import Counter

import numpy as np
import pytest

from engine import SamplingParams
from tests.cases.kit import Model, assert_idle, assert_oracle, drain, greedy, oracle_logits_of, prompt_of, steps_of
from tests.fixtures import FIRST_PIECE, chain_of, make_chain

pytestmark = pytest.mark.timeout(120)
SEEDED = SamplingParams(seed=42, temperature=0.8, max_tokens=16)
PROMPT = prompt_of(20, 33)
NEIGHBOURS = {
    "none": None,
    "unseeded": SamplingParams(temperature=0.8, max_tokens=24),
    "seed 7": SamplingParams(seed=7, temperature=0.8, max_tokens=24),
    "greedy": greedy(24),
}


@pytest.fixture(scope="module")
def alone(rand):
    (output,) = rand.llm().generate([PROMPT], SEEDED)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("admitted_at", [0, 5])
def test_a_seeded_request_does_not_depend_on_its_neighbours(rand, alone, neighbour, place, admitted_at):
    llm = rand.llm(enable_prefix_caching=False)
    params = NEIGHBOURS[neighbour]

    def neighbours(seeds):
        return [llm.add_request(prompt_of(15 + seed, seed), params) for seed in seeds if params]

    early = neighbours([1, 2]) if admitted_at or place == "last" else []
    steps_of(llm, admitted_at)
    name = llm.add_request(PROMPT, SEEDED)
    late = neighbours([3, 4]) if place == "first" or not early else []
    drain(llm)
    assert llm.output(name).outputs[0].token_ids == alone
    assert len(alone) == 16 and len(set(alone)) > 4
    if neighbour == "greedy":
        assert_oracle(rand, [llm.output(other) for other in early + late], count=24)


@pytest.mark.parametrize(
    "config",
    [
        {"num_kv_blocks": 5, "max_model_len": 80},
        {"num_kv_blocks": 20, "block_size": 4, "max_model_len": 80},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"scheduling_policy": "priority", "num_kv_blocks": 6, "max_model_len": 80},
        {"enable_chunked_prefill": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 5, "max_model_len": 80},
        {"batching": "static"},
        {"kv_layout": "contiguous"},
        {"kv_layout": "contiguous", "reserve": "request", "num_kv_blocks": 8, "max_model_len": 80},
        {"use_kv_cache": False, "max_num_batched_tokens": 300},
        {"seed": 99},
        {"seed": None},
    ],
    ids=lambda config: " ".join(f"{key}={value}" for key, value in config.items()),
)
def test_a_mixed_batch_in_every_arrangement(rand, alone, config):
    """Seeded, penalised, truncated and greedy requests side by side: each the same in any engine, preempted or not."""
    params = [
        SEEDED,
        greedy(20),
        SamplingParams(seed=1, temperature=1.5, top_k=20, max_tokens=20),
        SamplingParams(seed=2, temperature=1.0, top_p=0.8, min_p=0.01, max_tokens=18, frequency_penalty=0.7),
        SamplingParams(seed=3, temperature=0.0, repetition_penalty=1.3, max_tokens=17),
    ]
    prompts = [PROMPT, *(prompt_of(12 + i, 70 + i) for i in range(4))]
    separate = [
        rand.llm().generate([prompt], one)[0].outputs[0].token_ids for prompt, one in zip(prompts, params, strict=True)
    ]
    assert separate[0] == alone
    llm = rand.llm(**config)
    for order in (range(5), (4, 2, 0, 3, 1)):
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert [output.outputs[0].token_ids for output in outputs] == [separate[i] for i in order]
    if config.get("num_kv_blocks", 64) < 8:
        assert llm.stats().preemptions > 0
    assert_idle(llm)


def test_an_unseeded_request_repeats_with_the_engines_seed_only(rand):
    def texts(seed):
        params = SamplingParams(temperature=1.0, max_tokens=12)
        return [output.outputs[0].token_ids for output in rand.llm(seed=seed).generate([PROMPT] * 3, params)]

    assert texts(5) == texts(5) != texts(6)
    assert texts(None) != texts(None)
    assert len({tuple(tokens) for tokens in texts(5)}) == 3, "equal prompts without a seed draw apart"


@pytest.mark.parametrize("length", [3, 16, 40])
def test_samples_of_one_seed_differ_and_repeat(rand, length):
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=20)
    runs = [[s.token_ids for s in rand.llm(block_size=size).generate([prompt_of(length, 5)], params)[0].outputs]
            for size in (16, 16, 4)]  # fmt: skip
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_one_seeded_setting_for_a_batch(rand):
    """The rule: equal prompts get equal texts, different prompts unrelated ones; they do not share one noise vector."""
    params = SamplingParams(seed=7, temperature=1.5, max_tokens=20)
    for _ in range(2):
        equal = [output.outputs[0].token_ids for output in rand.llm().generate([PROMPT] * 4, params)]
        assert equal == [equal[0]] * 4
    prompts = [[i, *PROMPT] for i in range(16)]
    hot = SamplingParams(seed=7, temperature=1e6, max_tokens=3)
    first = [tuple(output.outputs[0].token_ids) for output in rand.llm().generate(prompts, hot)]
    assert len(set(first)) == 16, "uniform draws of 16 prompts with one seed: shared noise would make them all equal"


def test_first_tokens_follow_the_oracles_distribution(rand):
    """3,200 seeded draws of one token, counted against the oracle's probabilities: chi-square far inside its tail."""
    prompt = prompt_of(14, 8)
    (logits,) = oracle_logits_of(rand.path, [prompt])
    for params in ({"temperature": 1.0}, {"temperature": 2.0, "top_k": 12}, {"temperature": 3.0, "top_p": 0.7}):
        probabilities = numpy_probabilities(logits[-1].double().numpy(), **params)
        llm = rand.llm(max_num_seqs=64, block_size=4)
        counts: Counter[int] = Counter()
        for seed in range(50):
            (output,) = llm.generate([prompt], SamplingParams(n=64, seed=seed, max_tokens=1, **params))
            counts.update(sample.token_ids[0] for sample in output.outputs)
        draws = counts.total()
        assert draws == 3200
        assert all(probabilities[token] > 0 for token in counts)
        common = [token for token in range(320) if probabilities[token] * draws >= 10]
        rare = draws - sum(counts[token] for token in common)
        rare_share = 1 - sum(probabilities[token] for token in common)
        chi = sum((counts[t] - draws * probabilities[t]) ** 2 / (draws * probabilities[t]) for t in common)
        chi += (rare - draws * rare_share) ** 2 / (draws * rare_share) if rare_share > 1e-9 else rare
        freedom = len(common)
        assert freedom >= 4
        assert chi < freedom + 5 * np.sqrt(2 * freedom)


def numpy_probabilities(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The textbook: divide, keep, renormalise."""
    weights = np.exp((logits - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities, kind="stable")
    keep = np.zeros(len(logits), bool)
    kept = order[probabilities[order] >= min_p * probabilities.max()]
    kept = kept[:top_k] if top_k else kept
    shares = probabilities[kept] / probabilities[kept].sum()
    keep[kept[: int(np.searchsorted(shares.cumsum(), top_p - 1e-12)) + 1]] = True
    probabilities = np.where(keep, probabilities, 0)
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"frequency_penalty": -0.5, "presence_penalty": -1.0, "repetition_penalty": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "config", [{}, {"num_kv_blocks": 5, "max_model_len": 80}, {"max_num_batched_tokens": 5, "max_num_seqs": 3}]
)
def test_penalties_are_numpys_on_the_oracles_logits(rand, params, config):
    prompts = [[*prompt_of(18, seed), 7, 7] for seed in (1, 2, 3)]
    llm = rand.llm(**config)
    outputs = llm.generate(prompts, greedy(30, **params))
    changed = 0
    for output in outputs:
        tokens = output.outputs[0].token_ids
        (logits,) = oracle_logits_of(rand.path, [[*output.prompt_token_ids, *tokens]])
        rows = logits[len(output.prompt_token_ids) - 1 :].double().numpy()
        for i, token in enumerate(tokens):
            expected = penalised(rows[i], output.prompt_token_ids, tokens[:i], **params)
            assert expected.max() - expected[token] < 1e-3, f"token {i} of {tokens}"
            changed += token != rows[i].argmax()
    assert changed > 3, "the penalties never mattered"
    if "num_kv_blocks" in config:
        assert llm.stats().preemptions > 0


def penalised(logits, prompt, output, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    logits = logits.copy()
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= presence_penalty + frequency_penalty * count
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.9, 5.0])
@pytest.mark.parametrize("asked", [0, 1, 5, -1])
def test_logprobs_are_the_models_own(rand, temperature, asked):
    """Before penalties, temperature and truncation; the sampled token included; ranks, order and sum are right."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=10, logprobs=asked, top_k=50, frequency_penalty=0.5)
    llm = rand.llm(max_num_batched_tokens=9, max_num_seqs=3)
    plain = llm.add_request(prompt_of(11, 2), greedy(12))
    name = llm.add_request(PROMPT, params)
    drain(llm)
    (sample,) = llm.output(name).outputs
    assert llm.output(plain).outputs[0].logprobs is None
    (logits,) = oracle_logits_of(rand.path, [[*PROMPT, *sample.token_ids]])
    expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert sample.logprobs is not None and len(sample.logprobs) == 10
    for token, found, row in zip(sample.token_ids, sample.logprobs, expected, strict=True):
        wanted = 320 if asked == -1 else asked
        assert len(found) == wanted + (found[token].rank > wanted)
        values = [candidate.logprob for candidate in found.values()]
        assert values == sorted(values, reverse=True)
        for candidate, entry in found.items():
            assert entry.logprob == pytest.approx(float(row[candidate]), abs=1e-4)
            assert abs(int((row > row[candidate] + 1e-4).sum()) + 1 - entry.rank) <= int(
                ((row - row[candidate]).abs() <= 1e-4).sum()
            )
        assert sorted(entry.rank for entry in found.values())[:wanted] == list(range(1, wanted + 1))
        if asked == -1:
            assert sum(np.exp(values)) == pytest.approx(1, abs=1e-5)


# ------------------------------------------------------------------ the end of an output


EOS_PLACES = list(itertools.product([[2, 3], 2, None], [3, [2, 7], None], ["<|four|>", None]))


@pytest.mark.parametrize(("generation", "config", "tokenizer"), EOS_PLACES, ids=str)
def test_every_end_token_that_any_file_names_ends_the_text(tmp_path, generation, config, tokenizer):
    """Ids in generation_config.json, config.json and the tokenizer join; the marker is counted and never shown."""
    chain = chain_of([65, 66, 2]) | chain_of([70, 71, 3]) | chain_of([75, 76, FIRST_PIECE]) | chain_of([80, 81, 7])
    path = make_chain(
        tmp_path, chain, special=["<|four|>"], generation_eos=generation, config_eos=config, tokenizer_eos=tokenizer
    )
    named = {FIRST_PIECE} if tokenizer else set()
    for value in (generation, config):
        named |= set(value if isinstance(value, list) else [value]) - {None}
    llm = Model.load(path).llm()
    outputs = llm.generate([[65], [70], [75], [80]], greedy(6))
    ignoring = llm.generate([[65], [70], [75], [80]], greedy(6, ignore_eos=True))
    least = llm.generate([[65], [70], [75], [80]], greedy(6, min_tokens=4))
    for start, end, output, ignored, later in zip(
        (65, 70, 75, 80), (2, 3, FIRST_PIECE, 7), outputs, ignoring, least, strict=True
    ):
        (sample,) = output.outputs
        if end in named:
            assert (sample.finish_reason, sample.token_ids, sample.text) == ("stop", [start + 1, end], chr(start + 1))
            assert sample.stop_reason is None
            assert later.outputs[0].token_ids[1] != end, "banned before min_tokens"
        else:
            assert (sample.finish_reason, sample.token_ids) == ("length", [start + 1, *[end] * 5])
        assert output.metrics.output_tokens == len(sample.token_ids)
        assert ignored.outputs[0].token_ids == [start + 1, *[end] * 5]


def test_end_tokens_of_a_request_of_its_own(tmp_path):
    llm = Model.load(make_chain(tmp_path, chain_of([65, 66, 67, 68]))).llm()
    for stop, kept in (((67,), [66, 67]), ((68, 66), [66]), ((9,), [66, 67, 68, 68, 68])):
        (output,) = llm.generate([[65]], greedy(5, stop_token_ids=stop))
        (sample,) = output.outputs
        assert sample.token_ids == kept
        assert sample.finish_reason == ("length" if stop == (9,) else "stop")
        assert sample.stop_reason == (None if stop == (9,) else kept[-1])
        assert sample.text == "".join(chr(token) for token in kept if token not in stop)
