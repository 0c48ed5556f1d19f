"""The sampler against slow, independent arithmetic in numpy."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.model.sampler import Sampler, draw, truncate, uniform
from tests.model.kit import make_request

V = 50


def logits_of(seed=0, rows=1, vocabulary=V, spread=2.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def expected_distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Brute force, one token at a time, in the documented order."""
    x = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = [i for i in order if p[i] >= min_p * p.max() - 1e-12]
    if top_k > 0:
        order = order[:top_k]
    total, reached, nucleus = sum(p[i] for i in order), 0.0, []
    for i in order:
        nucleus.append(i)
        reached += p[i] / total
        if reached >= top_p - 1e-9:
            break
    result = np.zeros(len(p))
    result[nucleus] = p[nucleus]
    return result / result.sum()


@pytest.mark.parametrize("top_k", [0, 1, 7, 49, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_kept_tokens_and_their_shares(top_k, top_p, min_p, temperature):
    logits = logits_of(seed=3)
    request = make_request(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    weights = ((logits - logits.max()) / temperature).exp()
    kept = truncate(weights, [request])[0].numpy()
    wanted = expected_distribution(logits[0].numpy(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(kept / kept.sum(), wanted, atol=1e-6)


def test_a_flat_nucleus_wider_than_the_first_look():
    weights = torch.ones(2, 5000)
    requests = [make_request(top_p=0.9), make_request(top_p=0.001)]
    assert truncate(weights, requests).count_nonzero(-1).tolist() == [4500, 5]


def test_top_k_keeps_exactly_k_of_equals_smallest_ids_first():
    weights = torch.tensor([[1.0, 0.5, 1.0, 1.0, 0.5]])
    assert truncate(weights, [make_request(top_k=2)])[0].tolist() == [1.0, 0, 1.0, 0, 0]
    assert truncate(weights, [make_request(top_k=4)])[0].tolist() == [1.0, 0.5, 1.0, 1.0, 0]


def test_drawing_inverts_the_cumulative_distribution():
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(6, -1)
    points = torch.tensor([0.0, 0.499, 0.5, 0.749, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, points).tolist() == [1, 1, 3, 3, 4, 4]


def test_frequencies_follow_the_distribution():
    logits = logits_of(seed=1, spread=1.5)
    n = 4000
    requests = [make_request(temperature=0.8, top_k=12, top_p=0.95, hash_seed=i, max_tokens=5) for i in range(n)]
    drawn = Counter(Sampler().sample(logits.expand(n, -1).clone(), requests).tokens)
    wanted = expected_distribution(logits[0].numpy(), temperature=0.8, top_k=12, top_p=0.95)
    for token, p in enumerate(wanted):
        assert abs(drawn[token] - n * p) < 5 * math.sqrt(n * p * (1 - p) + 1e-9) + 1e-6


def test_uniform_is_stateless_and_spread():
    values = [uniform(seed, sample, n) for seed in range(20) for sample in range(5) for n in range(20)]
    assert len(set(values)) == len(values) and min(values) >= 0 and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.03 and abs(np.var(values) - 1 / 12) < 0.01
    assert uniform(7, 1, 3) == uniform(7, 1, 3)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@pytest.mark.parametrize("vocabulary", [V, 3000])
def test_a_row_does_not_depend_on_what_shares_the_batch(vocabulary):
    mine = logits_of(seed=8, vocabulary=vocabulary)
    others = logits_of(seed=9, rows=5, vocabulary=vocabulary)
    for params in (
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.01},
    ):
        results = set()
        for place in range(6):
            company = [
                make_request("g", temperature=0),
                make_request("p", top_p=0.99),
                make_request("k", top_k=40, presence_penalty=1.0, output=(3,)),
                make_request("l", logprobs=3),
                make_request("r", temperature=2.0, hash_seed=5),
            ]
            rows = [row.unsqueeze(0) for row in others]
            request = make_request("me", hash_seed=42, output=(4, 5), **params)
            company.insert(place, request)
            rows.insert(place, mine)
            results.add(Sampler().sample(torch.cat(rows), company).tokens[place])
        results.add(Sampler().sample(mine.clone(), [request]).tokens[0])
        assert len(results) == 1


def test_greedy_and_tiny_temperatures_take_the_largest():
    logits = logits_of(rows=4)
    requests = [make_request(temperature=t, top_k=3, top_p=0.5) for t in (0.0, 1e-6, 1e-5, 2e-5)]
    assert Sampler().sample(logits.clone(), requests).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e6])
def test_extreme_temperatures_and_logits_stay_finite(temperature):
    logits = torch.tensor([[3e38, -3e38, 0.0, float("-inf")], [1e-30, 0.0, -1e-30, float("-inf")]])
    requests = [make_request(temperature=temperature, hash_seed=i) for i in range(2)]
    sampled = Sampler().sample(logits, requests)
    assert sampled.broken == [False, False] and all(0 <= token < 3 for token in sampled.tokens)


def test_rows_that_are_no_numbers_are_told_and_harm_nobody():
    logits = logits_of(rows=5)
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    logits[3, 1] = float("inf")
    requests = [make_request(temperature=0.7, top_p=0.9, hash_seed=i, logprobs=1) for i in range(5)]
    sampled = Sampler().sample(logits.clone(), requests)
    assert sampled.broken == [False, True, True, True, False]
    for row in (0, 4):
        assert sampled.tokens[row] == Sampler().sample(logits[row : row + 1].clone(), [requests[row]]).tokens[0]


def penalised(logits, prompt, output, repetition=1.0, presence=0.0, frequency=0.0):
    x = logits.double().numpy().copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(output).items():
        x[token] -= presence + frequency * count
    return x


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.7},
     {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 2.0}],
)  # fmt: skip
def test_penalties_step_after_step(penalties):
    """One sampler over a growing output must agree with counting everything again."""
    short = {name.split("_")[0]: value for name, value in penalties.items()}
    sampler, prompt = Sampler(), [1, 2, 2, 30]
    request = make_request(prompt=prompt, temperature=0, max_tokens=99, **penalties)
    plain = make_request("plain", temperature=0)
    for step in range(30):
        logits = logits_of(seed=step % 3, rows=2)
        expected = penalised(logits[1], prompt, request.output_token_ids, **short)
        tokens = sampler.sample(logits.clone(), [plain, request]).tokens
        assert tokens[0] == int(logits[0].argmax())
        assert tokens[1] == int(expected.argmax())
        request.token_ids.append(tokens[1])
        if step == 11:
            sampler.sample(logits_of(), [plain])  # the request is away for a step


def test_a_new_request_inherits_no_counts():
    sampler = Sampler()
    for _ in range(50):
        request = make_request("same id", prompt=[1], temperature=0, presence_penalty=2.0, output=(9,) * 3)
        logits = torch.zeros(1, V)
        logits[0, 9], logits[0, 4] = 1.0, 0.5
        assert sampler.sample(logits.clone(), [request]).tokens == [4]
        fresh = make_request("same id", prompt=[1], temperature=0, presence_penalty=2.0)
        del request
        assert sampler.sample(logits.clone(), [fresh]).tokens == [9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_ending(temperature):
    logits = torch.zeros(1, V)
    logits[0, [5, 6, 7]] = torch.tensor([90.0, 80.0, 70.0])
    params = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (6,), "eos": frozenset({5, 10_000})}
    for output, wanted in (((), 7), ((1,), 7), ((1, 2), 5)):
        assert Sampler().sample(logits.clone(), [make_request(output=output, **params)]).tokens == [wanted]


@pytest.mark.parametrize("count", [0, 1, 5, -1])
def test_logprobs_are_the_models_own(count):
    logits = logits_of(seed=4)
    request = make_request(
        temperature=3.0, hash_seed=12, logprobs=count, frequency_penalty=1.0, output=(1, 1), min_tokens=9, eos=frozenset({2})
    )
    rows = logits.repeat(2, 1)
    sampled = Sampler(lambda token: f"<{token}>").sample(rows, [make_request(temperature=0), request])
    assert sampled.logprobs[0] is None
    found, token = sampled.logprobs[1], sampled.tokens[1]
    x = logits[0].double().numpy()
    log_p = x - np.log(np.exp(x).sum())
    order = sorted(range(V), key=lambda i: -log_p[i])
    best = order[: V if count == -1 else count]
    assert set(found) == {*best, token}
    assert [i for i in found if i in best] == best
    for i, candidate in found.items():
        assert candidate.logprob == pytest.approx(log_p[i], abs=1e-5)
        assert candidate.rank == order.index(i) + 1 and candidate.decoded_token == f"<{i}>"


def test_more_candidates_than_words():
    sampled = Sampler().sample(logits_of(), [make_request(temperature=0, logprobs=10_000)])
    assert len(sampled.logprobs[0]) == V
