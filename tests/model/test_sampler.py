"""The sampler against slow, independent arithmetic in numpy; and that it looks at nothing on the device."""

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from engine.core.runner import PENDING
from engine.core.sampling_params import SamplingParams
from engine.model.sampler import (
    FIELDS,
    FIRST_LOOK,
    Sampler,
    choose,
    draw,
    draw_of,
    key_of,
    metadata_of,
    needs_sampler,
    numbers_of,
    truncate,
    uniform,
    uniforms,
)
from tests.model.fake_gpu import Refuses
from tests.model.kit import make_request

V = 50
LOOKS = pytest.mark.parametrize("may_look", [True, False])
INT64 = st.integers(-(2**63), 2**63 - 1)


def truncated(weights, requests, may_look=True):
    params = [request.params for request in requests]
    numbers = torch.tensor([numbers_of(p) for p in params], dtype=torch.float64)
    return truncate(weights, numbers, params, may_look)


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
@LOOKS
def test_kept_tokens_and_their_shares(top_k, top_p, min_p, temperature, may_look):
    logits = logits_of(seed=3)
    request = make_request(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    weights = ((logits - logits.max()) / temperature).exp()
    kept = truncated(weights, [request], may_look)[0].numpy()
    wanted = expected_distribution(logits[0].numpy(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_allclose(kept / kept.sum(), wanted, atol=1e-6)


@LOOKS
def test_a_flat_nucleus_wider_than_the_first_look(may_look):
    weights = torch.ones(2, 5000)
    requests = [make_request(top_p=0.9), make_request(top_p=0.001)]
    assert truncated(weights, requests, may_look).count_nonzero(-1).tolist() == [4500, 5]


@LOOKS
def test_top_k_keeps_exactly_k_of_equals_smallest_ids_first(may_look):
    weights = torch.tensor([[1.0, 0.5, 1.0, 1.0, 0.5]])
    assert truncated(weights, [make_request(top_k=2)], may_look)[0].tolist() == [1.0, 0, 1.0, 0, 0]
    assert truncated(weights, [make_request(top_k=4)], may_look)[0].tolist() == [1.0, 0.5, 1.0, 1.0, 0]


TRUNCATIONS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, -1, 1, 3, 40, FIRST_LOOK, FIRST_LOOK + 1, 1500, 10**30]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
        "min_p": st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([5, 50, FIRST_LOOK + 1, 2000]),
    levels=st.sampled_from([1, 2, 7, 1000]),
    asked=st.lists(TRUNCATIONS, min_size=1, max_size=4),
)
def test_what_is_kept_does_not_depend_on_looking(seed, vocabulary, levels, asked):
    """Few levels make many equal weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, levels + 1, (len(asked), vocabulary), generator=generator) / levels
    weights = (weights.log() * 3).exp()
    weights /= weights.amax(-1, keepdim=True)
    requests = [make_request(**params) for params in asked]
    kept = truncated(weights, requests, True)
    assert torch.equal(kept, truncated(weights, requests, False))
    assert (kept.amax(-1) == 1).all()


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


def test_numbers_of_requests_are_spread():
    values = [uniform(key_of(seed, sample), n) for seed in range(20) for sample in range(5) for n in range(20)]
    assert len(set(values)) == len(values) and min(values) >= 0 and max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.03 and abs(np.var(values) - 1 / 12) < 0.01
    assert key_of(-1, 0) == key_of(2**64 - 1, 0)
    bits = hashlib.blake2b((7).to_bytes(8, "little") + (3).to_bytes(8, "little"), digest_size=8).digest()
    assert key_of(7, 3) == np.frombuffer(bits, "<i8")[0]


def splitmix64(state):
    """One state after another, in numpy's unsigned numbers."""
    with np.errstate(over="ignore"):
        while True:
            state = state + np.uint64(0x9E3779B97F4A7C15)
            z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            yield int(z ^ (z >> np.uint64(31)))


def test_the_stream_is_splitmix64():
    """The first numbers from state 1234567, as they are published for those who write the generator anew."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [uniform(1234567, n) for n in range(5)] == [(number >> 11) / 2**53 for number in published]
    for key in (0, 1, -1, 2**63 - 1, -(2**63), key_of(42, 1)):
        stream = splitmix64(np.uint64(key % 2**64))
        assert [uniform(key, n) for n in range(50)] == [(next(stream) >> 11) / 2**53 for _ in range(50)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(INT64, st.integers(0, 2**31)), min_size=1, max_size=9))
@example([(2**63 - 1, 0), (-(2**63), 0), (-1, 2**31), (0, 0)])
def test_the_device_has_the_same_numbers(pairs):
    keys, counts = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    points = uniforms(keys, counts)
    assert points.dtype == torch.float64
    assert points.tolist() == [uniform(key, n) for key, n in pairs]


def test_numbers_of_a_request():
    params = SamplingParams(
        temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=2.0
    )
    assert dict(zip(FIELDS, numbers_of(params), strict=True)) == {
        "temperature": 0.7, "top_k": 0.0, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 2.0,
    }  # fmt: skip
    assert numbers_of(SamplingParams(temperature=9e-6))[0] == 0.0
    assert numbers_of(SamplingParams(top_k=10**400))[1] > 1e12
    request = make_request(temperature=0.7, hash_seed=9, sample_index=2, output=(1, 1, 1))
    metadata = metadata_of([request, make_request(temperature=0)], lambda values, dtype: torch.tensor(values, dtype=dtype))
    assert metadata.numbers.tolist() == [list(numbers_of(request.params)), list(numbers_of(SamplingParams(temperature=0)))]
    assert metadata.points[0].item() == uniform(key_of(9, 2), 3) == draw_of(request)[1]


def test_choosing_and_sampling_give_the_same_tokens():
    logits = logits_of(rows=60)
    requests = [make_request(temperature=i % 3 / 2, hash_seed=i, output=(1,) * (i % 5)) for i in range(60)]
    temperatures, points = zip(*map(draw_of, requests), strict=True)
    tokens, _ = choose(logits, torch.tensor(temperatures), torch.tensor(points, dtype=torch.float64))
    assert Sampler(may_look=False).sample(logits.clone(), requests).tokens == tokens.tolist()


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


def test_min_tokens_needs_the_sampler_until_they_are_there():
    requests = [make_request(output=(1,) * count, temperature=0, min_tokens=2) for count in range(4)]
    assert list(map(needs_sampler, requests)) == [True, True, False, False]


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
    alone = Sampler().sample(logits.clone(), [request]).logprobs[0]
    assert [(i, c.rank, round(c.logprob, 4)) for i, c in alone.items()] == [
        (i, c.rank, round(c.logprob, 4)) for i, c in found.items()
    ]


def test_more_candidates_than_words():
    sampled = Sampler().sample(logits_of(), [make_request(temperature=0, logprobs=10_000)])
    assert len(sampled.logprobs[0]) == V


# ---------------------------------------------------------------------- pending tokens, and steps that fail


@pytest.mark.parametrize("seed", range(6))
def test_pending_tokens_count_as_known_ones(seed):
    """Requests come, go, change places and return; one sampler learns tokens one step late, the other at once."""
    generator = np.random.default_rng(seed)
    late, early = Sampler(may_look=False), Sampler()
    kinds = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5, "temperature": 0.7}, {"frequency_penalty": -0.7}, {}]
    requests = [
        make_request(str(i), [i, 7, 7, 30], **{"temperature": 0, **kinds[i % 4]}, hash_seed=i, output=(9,) * (i % 3))
        for i in range(8)
    ]
    running, pending = requests[:3], []
    for step in range(40):
        logits = logits_of(seed=100 * seed + step, rows=len(running), spread=0.5)
        asked = late.submit(logits.clone(), running)
        for request, token in pending:  # the step before is collected after this one was asked for
            request.token_ids[request.token_ids.index(PENDING)] = token
        known = early.sample(logits.clone(), running).tokens
        assert asked.tokens.tolist() == known == asked.read().tokens
        pending = list(zip(running, known, strict=True))
        for request in running:
            request.token_ids.append(PENDING)
        away = [request for request in requests if request not in running]
        change = generator.integers(6)
        if change == 0:
            running = [*running[1:], away[0]]
        elif change == 1 and len(running) > 1:
            running = running[::-1][1:]
        elif change == 2 and len(running) < 7:
            running = [away[-1], *running]
        elif change == 3:
            running = running[::-1]
        for request, token in pending:
            if request not in running:  # not in the next step: collected before it may come back
                request.token_ids[-1] = token
        pending = [(request, token) for request, token in pending if request in running]


def test_a_pending_token_that_nobody_sampled_is_refused():
    request = make_request(presence_penalty=1.0, output=(4, PENDING))
    with pytest.raises(KeyError, match="is pending, but the step submitted before doesn't sample for it"):
        Sampler().submit(logits_of(), [request])
    sampler = Sampler()
    sampler.submit(logits_of(), [make_request("other", presence_penalty=1.0)])
    with pytest.raises(KeyError):
        sampler.submit(logits_of(), [request])


@LOOKS
def test_a_step_that_failed_half_way_or_was_thrown_away_counts_nothing(monkeypatch, may_look):
    sampler = Sampler(may_look=may_look)
    request = make_request(temperature=0, frequency_penalty=0.5)
    logits = torch.full((1, V), -9.0)
    logits[0, [9, 4]] = torch.tensor([1.2, 0.4])

    def fail(*args):
        raise RuntimeError("out of memory")

    tokens = []
    for step in range(6):
        if step % 2:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "isfinite", fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    sampler.submit(logits.clone(), [request])
        else:
            sampler.sample(logits.clone(), [request])  # its token goes nowhere
        tokens += sampler.sample(logits.clone(), [request]).tokens
        request.token_ids.append(tokens[-1])
    assert tokens == [9, 9, 4, 9, 4, 9]  # 1.2 against 0.4, less 0.5 each time
    request.token_ids[-1] = 20  # what the host says goes, should it differ from what was sampled
    logits[0, 20] = 0.1  # counted once: −0.4, and the 9 thrice: −0.3
    assert sampler.sample(logits.clone(), [request]).tokens == [9]


def test_the_same_requests_in_another_order():
    sampler = Sampler()
    a, b = (make_request(name, temperature=0, presence_penalty=0.5, output=(token,)) for name, token in (("a", 9), ("b", 4)))
    logits = torch.full((2, V), -9.0)
    logits[:, 9], logits[:, 4] = 1.2, 1.0
    assert sampler.sample(logits.clone(), [a, b]).tokens == [4, 9]
    a.token_ids.append(20), b.token_ids.append(20)
    assert sampler.sample(logits.clone(), [b, a]).tokens == [9, 4]


@LOOKS
def test_a_step_thrown_away_twice_counts_nothing(may_look):
    sampler = Sampler(may_look=may_look)
    request = make_request(temperature=0, frequency_penalty=0.5, output=(9,))
    logits = torch.full((1, V), -9.0)
    logits[0, [9, 4]] = torch.tensor([1.2, 0.4])
    assert [sampler.sample(logits.clone(), [request]).tokens for _ in range(3)] == [[9]] * 3


# ---------------------------------------------------------------------- nothing looks


class Queue:
    """Brings numbers to a device that tells nothing: tensors without contents. Notes what is brought."""

    def __init__(self):
        self.brought = []

    def __call__(self, values, dtype):
        self.brought.append(np.asarray(values).tolist())
        return torch.empty(np.shape(values), dtype=dtype)


GUARDS = (AssertionError, DataDependentOutputException, DynamicOutputShapeException)
KINDS = {
    "greedy": {"temperature": 0},
    "draws": {"temperature": 0.8},
    "top_k": {"top_k": 20},
    "wide top_k": {"top_k": FIRST_LOOK + 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.2, "temperature": 0},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "candidates": {"logprobs": 3},
    "own candidate": {"logprobs": 0, "temperature": 0, "frequency_penalty": 1.0},
    "whole vocabulary": {"logprobs": -1},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (3, 4)},
}
MIXES = [*([kind] for kind in KINDS), ["greedy", "draws"], ["top_p", "top_k", "greedy"], [*KINDS], [*KINDS][::-1]]


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
@pytest.mark.parametrize("resident", [False, True])
def test_nothing_is_looked_at(mix, resident):
    """Three steps, each asked for before the tokens of the one before are known; then one request leaves, one comes."""
    upload = Queue()
    sampler = Sampler(upload=upload, may_look=False)
    requests = [make_request(name, **KINDS[name]) for name in mix]
    later = make_request("later", presence_penalty=1.0, top_p=0.8)
    with FakeTensorMode(), Refuses():
        for step in range(5):
            logits = torch.empty(len(requests), 2 * FIRST_LOOK)
            metadata = metadata_of(requests, upload) if resident else None
            upload.brought.clear()
            sampling = sampler.submit(logits, requests, metadata)
            assert sampling.tokens.shape == (len(requests),) and sampling.tokens.dtype == torch.int64
            assert all(number.shape[0] in (2, len(mix), *range(len(mix))) for number in sampling.numbers)
            # metadata, bans, four sets of rows, newest tokens, tokens of a request that comes, rows that move
            assert len(upload.brought) <= 9
            indices = [str(values) for values in upload.brought]
            assert len(set(indices)) == len(indices), "the same rows were brought twice"
            for request in requests:
                request.token_ids[-1:] = [5] if request.token_ids[-1] == PENDING else request.token_ids[-1:]
                request.token_ids.append(PENDING)
            if step == 2:
                requests = [*requests[1:], later]


def test_plainly_greedy_rows_bring_nothing_to_the_device():
    upload = Queue()
    with FakeTensorMode(), Refuses():
        Sampler(upload=upload, may_look=False).submit(torch.empty(2, V), [make_request(temperature=0)] * 2)
    assert upload.brought == []


LOOKING = {
    "int": lambda x, i: int(x.max()),
    "bool": lambda x, i: bool((x > 0).any()),
    "tolist": lambda x, i: x.tolist(),
    "if": lambda x, i: 1 if x[0, 0] > 0 else 2,
    "equal": lambda x, i: torch.equal(x, x + 1),
    "mask": lambda x, i: x[x > 0],
    "put by mask": lambda x, i: x.nonzero(),
    "tensor": lambda x, i: torch.tensor([1, 2], device=x.device),
    "new_tensor": lambda x, i: x.new_tensor([1.0]),
    "list as index": lambda x, i: x[[1, 2]],
    "put by list": lambda x, i: x.__setitem__([1, 2], 0.0),
    "where with a number": lambda x, i: torch.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("look", LOOKING)
def test_the_guard_sees_looks(look):
    with FakeTensorMode(), Refuses():
        x = torch.empty(4, 8)
        with pytest.raises(GUARDS):
            LOOKING[look](x, Queue()([1, 2], torch.int64))


@pytest.mark.parametrize("kind", ["top_p", "min_p"])
def test_looking_early_is_seen_by_the_guard(kind):
    """What a CPU does is not for a GPU."""
    requests = [make_request(**{**KINDS[kind], "top_k": 2 * FIRST_LOOK - 1})]
    with FakeTensorMode(), Refuses(), pytest.raises(GUARDS):
        Sampler(upload=Queue(), may_look=True).submit(torch.empty(1, 2 * FIRST_LOOK), requests)
    with FakeTensorMode(), Refuses(), pytest.raises(GUARDS):
        Sampler(upload=Queue(), may_look=False).sample(torch.empty(1, 2 * FIRST_LOOK), requests)


def test_numbers_may_be_read_from_copies():
    logits = logits_of(rows=3)
    requests = [make_request(logprobs=2, temperature=0), make_request(), make_request(logprobs=0, hash_seed=4)]
    sampling = Sampler(lambda token: f"<{token}>").submit(logits, requests)
    copies = [number.clone() for number in sampling.numbers]
    found, again = sampling.read(copies), sampling.read()
    assert (found.tokens, found.logprobs, found.broken) == (again.tokens, again.logprobs, again.broken)
    assert [None if row is None else len(row) for row in found.logprobs] == [2, None, 1]
    assert found.on_device is sampling.tokens
