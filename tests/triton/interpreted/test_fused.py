"""The fused kernels give what plain torch gives, up to the last bit of the number format."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.fused import add_rms_norm, norm_heads, rms_norm, silu_mul

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place, relative.
STEP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
sizes = st.sampled_from([8, 96, 100, 576, 1024])


def close(kernel, plain):
    torch.testing.assert_close(kernel, plain, rtol=STEP[plain.dtype], atol=1e-6)


@settings(max_examples=20)
@given(rows=st.integers(1, 4), size=sizes, dtype=st.sampled_from(TYPES), seed=st.integers(0, 99))
def test_norm_of_the_sum(rows, size, dtype, seed):
    torch.manual_seed(seed)
    x, added = (torch.randn(rows, size).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(size) / 4).to(dtype)
    sums = x.clone(), x.clone()
    plain, kernel = (add_rms_norm(sums[i], added, weight, 1e-5, kernels=bool(i)) for i in range(2))
    close(kernel, plain)
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[1], x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norm_of_a_slice_of_wider_rows(dtype):
    wide = torch.randn(3, 200).to(dtype)
    before, weight = wide.clone(), torch.randn(80).to(dtype)
    close(rms_norm(wide[:, 40:120], weight, 1e-6, kernels=True), rms_norm(wide[:, 40:120], weight, 1e-6, kernels=False))
    assert torch.equal(wide, before)


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    size=st.sampled_from([64, 80, 96, 128]),
    dtype=st.sampled_from(TYPES),
    gap=st.sampled_from([0, 16, 7]),
    seed=st.integers(0, 99),
)
def test_norm_of_query_and_key_heads_in_place(tokens, kv_heads, group, size, dtype, gap, seed):
    torch.manual_seed(seed)
    heads = group * kv_heads
    width = (heads + 2 * kv_heads) * size
    wide = (3 * torch.randn(tokens, width + gap)).to(dtype)
    ways = [wide.clone(), wide.clone()]
    query_weight, key_weight = (torch.randn(size).to(dtype) for _ in range(2))
    for kernels, memory in enumerate(ways):
        qkv = memory[:, :width].view(tokens, -1, size)
        norm_heads(qkv, query_weight, key_weight, heads, 1e-6, kernels=bool(kernels))
    plain, kernel = ways
    close(kernel, plain)
    keys_end = (heads + kv_heads) * size
    assert torch.equal(kernel[:, keys_end:], wide[:, keys_end:])
    of_queries, of_keys = plain[0, :size], plain[0, heads * size :][:size]
    assert torch.equal(of_queries, rms_norm(wide[0:1, :size], query_weight, 1e-6, kernels=False)[0])
    assert torch.equal(of_keys, rms_norm(wide[0:1, heads * size :][:, :size], key_weight, 1e-6, kernels=False)[0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [5, 64, 1500])
def test_silu_mul(size, dtype):
    gate_up = (3 * torch.randn(3, 2 * size)).to(dtype)
    close(silu_mul(gate_up, kernels=True), silu_mul(gate_up, kernels=False))


def test_infinity_and_nan_come_through():
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 64)
        x[0, 3] = bad
        normed = rms_norm(x, torch.ones(64), 1e-6, kernels=True)
        assert normed[0].isnan().any() and normed[1].isfinite().all()
        assert not silu_mul(x, kernels=True)[0].isfinite().all()
