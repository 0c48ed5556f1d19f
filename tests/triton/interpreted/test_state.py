"""The kernels that make a step's inputs and choose its tokens, interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.sampler import choose
from engine.model.state import DecodeInputs, RequestState
from tests.model.state_lives import live, upload

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(6))
def test_kernels_make_the_inputs_that_the_host_would_send(seed):
    met = live(seed, steps=25, kernels=True)
    assert met["decodes"] and met["chunks"]


def chosen(logits, temperatures=None, points=None):
    """Tokens, and whether the rows are finite, by the kernels; every seat keeps its own."""
    rows = len(logits)
    state = RequestState(rows, 8, 8, CPU, upload, kernels=True)
    inputs, seats, outcome = DecodeInputs(rows, CPU), torch.arange(rows).flip(0), torch.zeros((2, rows), dtype=torch.int64)
    if points is not None:
        inputs.temperatures.copy_(temperatures)
        inputs.points.copy_(points)
    state.finish_decodes(seats, logits, None if points is None else inputs, torch.zeros(rows, 3), outcome, commit=True)
    assert torch.equal(state.tokens[:rows].flip(0), outcome[1])
    return outcome[1], outcome[0].bool()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    vocabulary=st.sampled_from([1, 7, 300, 4095, 4096, 4097, 9000]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([1e-5, 0.6, 1.0, 50.0]),
    kept=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_a_token_is_chosen_as_torch_chooses_it(rows, vocabulary, spread, temperature, kept, dtype, seed):
    ids = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=ids) * spread).to(dtype)
    if kept is not None:  # all others are banned: whole chunks without any weight
        allowed = torch.randint(0, vocabulary, (kept,), generator=ids)
        banned = torch.full_like(logits, float("-inf"))
        logits = banned.index_copy(1, allowed, logits.index_select(1, allowed))
    points = torch.rand(rows, generator=ids, dtype=torch.float64)
    points[0] = [points[0], 0.0, 1 - 2**-53, -1.0][seed % 4]
    temperatures = torch.full((rows,), temperature)
    greedy, fine = chosen(logits)
    assert torch.equal(greedy, choose(logits.float())[0]) and fine.all()
    tokens, fine = chosen(logits, temperatures, points)
    expected = choose(logits.float(), temperatures, points)[0]
    assert fine.all() and (logits.gather(1, tokens.unsqueeze(1)) > float("-inf")).all()
    # At the very end of the sum rounding may decide between the last tokens that have any weight.
    same = (tokens == expected) | (points > 1 - 1e-9)
    assert same.all()


@pytest.mark.parametrize("place", [0, 4096, 5000])
@pytest.mark.parametrize("strange", [float("nan"), float("inf")], ids=str)
def test_a_row_that_is_no_number_is_told(strange, place):
    logits = torch.randn(3, 5001, generator=torch.Generator().manual_seed(0))
    logits[1, place] = strange
    for draws in ((), (torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))):
        tokens, fine = chosen(logits, *draws)
        assert fine.tolist() == [True, False, True] and tokens[1] == 0
        assert torch.equal(tokens, choose(logits, *draws)[0])
    assert not chosen(torch.full((1, 5001), float("-inf")))[1].any()
