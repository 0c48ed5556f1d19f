"""Which of torch's attention kernels may run."""

import pytest
import torch
import torch.nn.functional as F

from engine.model.attention.sdpa import SdpaAttention, without_cudnn


def attention(device):
    return SdpaAttention(
        num_layers=1,
        num_kv_blocks=2,
        block_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device(device),
    )


@pytest.fixture(params=[True, False], ids=["on", "off"])
def cudnn(request):
    """Whether torch may use cuDNN's kernel everywhere else."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_is_off_during_the_call_and_as_before_afterwards(cudnn, monkeypatch):
    seen = []

    def noting(query, key, value, **options):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), options))
        if len(seen) == 2:
            raise RuntimeError("no kernel")
        return value

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    three = [torch.ones(1, 1, 2, 8) * place for place in range(3)]
    assert without_cudnn(*three, is_causal=True) is three[2]
    with pytest.raises(RuntimeError, match="no kernel"):
        without_cudnn(*three)
    assert seen == [(False, {"is_causal": True}), (False, {})]
    assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn


def test_a_cpu_calls_torch_directly():
    assert attention("cpu")._kernel is F.scaled_dot_product_attention
