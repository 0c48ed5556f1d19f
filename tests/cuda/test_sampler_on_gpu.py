"""The sampler on the GPU at hand; skipped without one. torch itself raises there when the host would have to wait."""

import pytest
import torch

from engine.core.runner import PENDING
from engine.model.device import device_of
from engine.model.sampler import Sampler, key_of, uniform, uniforms
from engine.model.staging import Uploads
from tests.model.kit import make_request
from tests.model.test_sampler import KINDS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCABULARY = 3000


@pytest.fixture
def never_waits():
    """Turns what makes the host wait into an error, where it is entered."""

    class Watch:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *raised):
            torch.cuda.set_sync_debug_mode("default")

    return Watch()


def test_nothing_waits_and_the_tokens_are_those_of_a_cpu(never_waits):
    """Six steps of all kinds of requests, each submitted before the host knows the tokens of the one before."""
    where = torch.device("cuda", torch.cuda.current_device())
    uploads = Uploads(device_of(where), where)
    on_gpu, on_cpu = Sampler(upload=uploads.put, may_look=False), Sampler()
    requests = [make_request(name, hash_seed=place, **params) for place, (name, params) in enumerate(KINDS.items())]
    pending: list[int] = []
    for step in range(6):
        # Logits far apart: what arithmetic in another order changes doesn't decide.
        logits = torch.randn(len(requests), VOCABULARY, generator=torch.Generator().manual_seed(step)).mul(4).round()
        there = logits.to(where)
        torch.cuda.synchronize()
        with uploads:
            if step == 0:
                sampling = on_gpu.submit(there, requests)  # memory is set up, kernels are loaded
            else:
                with never_waits:
                    sampling = on_gpu.submit(there, requests)
        for request, token in zip(requests, pending, strict=False):
            request.token_ids[-1] = token
        expected, sampled = on_cpu.sample(logits, requests), sampling.read()
        assert sampled.tokens == expected.tokens
        assert sampled.broken == expected.broken
        for token, found, wanted in zip(sampled.tokens, sampled.logprobs, expected.logprobs, strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                assert found[token].rank == wanted[token].rank
                assert found[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)
        pending = expected.tokens
        for request in requests:
            request.token_ids.append(PENDING)


def test_random_numbers_have_the_same_bits():
    keys = [key_of(seed, sample) for seed in range(50) for sample in range(4)]
    counts = list(range(200))
    points = uniforms(torch.tensor(keys, device="cuda"), torch.tensor(counts, device="cuda"))
    assert points.tolist() == [uniform(key, n) for key, n in zip(keys, counts, strict=True)]
