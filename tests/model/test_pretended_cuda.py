"""The path of a GPU on pretended CUDA tensors: nothing of it may lie on the wrong device, look at numbers, or not fit."""

import random

import pytest
import torch

from engine.bench.gpu_shapes import QWEN3_0_6B, SMOLLM2_135M
from engine.core.config import EngineConfig
from engine.core.runner import PENDING, StepBatch, Work
from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import Backend
from engine.model.random_weights import random_weights
from engine.model.runner import ModelRunner
from tests.model.kit import make_request
from tests.model.pretended_cuda import CUDA, Calls, PretendedDevice, pretended_cuda, pretended_model

SETTINGS = {"max_model_len": 64, "block_size": 8, "num_kv_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 64}
KINDS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 9},
    {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 0, "logprobs": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"min_tokens": 5, "stop_token_ids": (4,)},
]


def triton_kernels():
    pytest.importorskip("triton", reason="triton is not installed (it comes with torch's CUDA build, on Linux)")
    from engine.model import fused_kernels, state_kernels
    from engine.model.attention import triton_kernels as attention

    found = [item for module in (fused_kernels, state_kernels, attention) for item in vars(module).values()]
    return {id(item): item for item in found if hasattr(item, "fn") and hasattr(item, "run")}.values()


def drive(runner, kinds):
    """A prompt in chunks with forks, then mixed steps and decodes ahead of the tokens, in every company."""
    ids = random.Random(0)
    requests = [make_request(str(i), [ids.randrange(3, 99) for _ in range(20)], **kind) for i, kind in enumerate(kinds)]
    tables = {request: list(range(1 + 8 * place, 9 + 8 * place)) for place, request in enumerate(requests)}
    fork = make_request("fork", requests[0].prompt_token_ids, sample_index=1, **kinds[0])
    tables[fork] = list(range(52, 60))
    everybody, flights = [*requests, fork], []

    def step(works, **more):
        flights.append(runner.submit(StepBatch(len(flights), works, **more)))
        sampling = [request for work in works for request in work.samples]
        for request in everybody:
            if request.token_ids[-1] == PENDING:
                request.token_ids[-1] = 5  # by now the host knows it
        for request in sampling:
            request.token_ids.append(PENDING)

    def decode(company):
        return [Work(r, r.token_ids[-1:], r.num_tokens - 1, tables[r], (r,)) for r in company]

    first = [Work(r, r.token_ids[:7], 0, tables[r]) for r in requests]
    step(first, scrub=[3, 4])
    rest = [Work(r, r.token_ids[7:], 7, tables[r], (r,)) for r in requests]
    rest[0].samples = (requests[0], fork)
    step(rest)
    for company in (everybody, everybody[:1], everybody[:2], everybody[::-1], everybody):
        step(decode(company), copies=[(1, 60), (2, 59)])
    step([Work(None, [0], 9, [0] * 8), *decode(everybody[1:])])
    for flight in flights:
        assert runner.collect(flight) is not None
    return len(flights)


@pytest.mark.parametrize("way", ["triton", "triton, torch between", "sdpa"])
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [(SMOLLM2_135M, KINDS[:1] * 2), (SMOLLM2_135M, KINDS[:2]), (SMOLLM2_135M, KINDS), (QWEN3_0_6B, KINDS)],
    ids=["greedy", "draws", "all", "qwen3"],
)
def test_every_step_stays_on_the_device(monkeypatch, shape, kinds, way):
    kernels = triton_kernels() if way != "sdpa" else ()
    spec = shape.tiny().spec
    meta = random_weights(spec, torch.device("meta"), torch.bfloat16)
    with pretended_cuda(monkeypatch, kernels) as launched:
        backend, calls = Backend(SdpaAttention, "sdpa"), Calls()
        if way != "sdpa":
            from engine.model.attention.triton_backend import TritonAttention

            backend = Backend(TritonAttention, "triton", fused=way == "triton", graphs=lambda: calls)
        model = pretended_model(spec, meta)
        runner = ModelRunner(model, EngineConfig(**SETTINGS), backend=backend, device=PretendedDevice())
        assert runner.backend.name == backend.name and not runner.describe_backend().reason, runner.describe_backend().reason
        assert (runner.graphs is not None) == (way != "sdpa")
        assert runner.attention.pool.device == CUDA
        drive(runner, kinds)
    assert bool(launched) == (way != "sdpa") and bool(calls.captured) == (way != "sdpa")


FAULTS = {
    "an index made on the host": (lambda x: x.index_select(0, torch.tensor([0, 1])), "lift_fresh|at least two devices"),
    "a tensor on the CPU": (lambda x: x + torch.zeros(3), "at least two devices"),
    "a list as an index": (lambda x: x[[0, 1]], "made into a tensor on the host"),
    "a mask": (lambda x: x[x > 0], "makes the host count"),
    "a look": (lambda x: int(x.sum()), "makes the host wait|data-dependent|DataDependent|not linked"),
    "where with a number": (lambda x: torch.where(x > 0, x, 1.0), "makes the host wait"),
    "a number put in": (lambda x: x.__setitem__(0, 1.0), "use fill_"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_on_a_gpu_goes_wrong_here(monkeypatch, fault):
    call, words = FAULTS[fault]
    with pretended_cuda(monkeypatch):
        x = torch.empty(4, 3, device=CUDA)
        with pytest.raises(Exception, match=words):
            call(x)
