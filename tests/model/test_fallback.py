"""Whatever compiler and driver raise before the first step: torch computes, and the reason is told."""

import subprocess
from dataclasses import replace

import pytest
import torch

from engine.core.config import EngineConfig
from engine.model import backend as backends
from engine.model import runner as runners
from engine.model.attention.sdpa import SdpaAttention
from engine.model.backend import Backend, choose_backend, describe_backend, verdict_on, working
from engine.model.errors import ModelError, in_one_line
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from tests.model.fake_gpu import LateDevice, ResidentSdpa


class CompilationError(Exception):
    """As Triton's: no RuntimeError, and its message begins with source text."""

    def __str__(self):
        return "at 7:11:\n    x = tl.load(at)\n        ^\nno such intrinsic"


class OutOfResources(Exception):
    pass


ERRORS = {
    CompilationError(): "CompilationError: no such intrinsic",
    OutOfResources("out of resource: shared memory, Required: 230000"): "OutOfResources: out of resource: shared memory",
    ImportError("libcuda.so.1: no such file"): "ImportError: libcuda.so.1: no such file",
    subprocess.CalledProcessError(1, ["gcc"]): "CalledProcessError: Command '['gcc']' returned non-zero exit status 1.",
    RuntimeError(
        "CUDA error: no kernel image\nCompile with TORCH_USE_CUDA_DSA"
    ): "RuntimeError: CUDA error: no kernel image",
    AssertionError(): "AssertionError",
}
FAST = Backend(dict, "fast", fused=True, graphs=lambda: None)


@pytest.fixture
def model():
    return load_model("tiny", attention_backend="sdpa").transformer


@pytest.mark.parametrize(("error", "words"), ERRORS.items(), ids=lambda value: type(value).__name__)
def test_a_backend_that_fails_while_it_is_built_gives_way_to_torch(error, words):
    tried = []

    def build(backend):
        tried.append(backend)
        if backend is FAST:
            raise error
        return "built"

    used, built = working(FAST, build)
    assert built == "built" and tried == [FAST, used]
    assert (used.make_attention, used.name, used.fused, used.graphs) == (SdpaAttention, SdpaAttention.name, False, None)
    assert words in used.reason and "torch's own kernels compute instead" in used.reason
    assert used.reason.count("\n") == 0
    with pytest.raises(ModelError, match="attention_backend='triton' can't be used here: The fast kernels failed"):
        working(FAST, build, required=True)


def test_what_was_known_before_stays_part_of_the_reason():
    def build(backend):
        if backend.make_attention is dict:
            raise OutOfResources("shared memory")

    used, _ = working(replace(FAST, reason="Graphs are off."), build)
    assert used.reason.startswith("Graphs are off. The fast kernels failed")


def test_a_backend_that_works_is_kept():
    assert working(FAST, lambda backend: 7) == (FAST, 7)


@pytest.mark.parametrize("error", [ModelError("too long"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_what_no_other_kernel_would_mend_is_raised(error):
    def build(backend):
        raise error

    with pytest.raises(type(error)):
        working(FAST, build)


def test_torch_failing_is_no_reason_to_try_torch():
    tried = []

    def build(backend):
        tried.append(backend)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        working(Backend(SdpaAttention, "torch"), build)
    assert len(tried) == 1


@pytest.mark.parametrize("error", ERRORS, ids=lambda value: type(value).__name__)
def test_a_check_at_start_that_breaks_down_lets_nothing_through(model, monkeypatch, error):
    def check(model, block_size):
        raise error

    monkeypatch.setattr(backends, "self_check", check)
    verdict = verdict_on(model, 16)
    assert (verdict.triton, verdict.fused, verdict.graphs) == (False, False, False)
    chosen = choose_backend(model)
    assert chosen.make_attention is SdpaAttention and not chosen.fused and chosen.graphs is None
    assert ERRORS[error] in chosen.reason and "check at start broke down" in chosen.reason
    assert describe_backend(model).reason == chosen.reason
    with pytest.raises(ModelError, match="can't be used here: The fast way is off"):
        choose_backend(model, attention_backend="triton")


def test_tritons_own_errors_are_told_by_their_cause():
    errors = pytest.importorskip("triton.compiler.errors")
    runtime = pytest.importorskip("triton.runtime.errors")
    import ast

    node = ast.parse("def kernel(x):\n    y = nothing(x)\n").body[0].body[0]
    found = errors.CompilationError("def kernel(x):\n    y = nothing(x)\n", node, "NameError('nothing is not defined')")
    assert in_one_line(found) == "CompilationError: NameError('nothing is not defined')"
    assert not isinstance(found, RuntimeError) and not isinstance(runtime.OutOfResources(2, 1, "shared"), RuntimeError)
    assert in_one_line(runtime.OutOfResources(2, 1, "shared memory")).startswith("OutOfResources: out of resource: shared")


SMALL = {"max_model_len": 32, "block_size": 8, "num_kv_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 20}


class Broken(SdpaAttention):
    """Kernels that don't compile."""

    name = "broken"

    def warm_up(self, longest):
        raise CompilationError


def test_a_lab_whose_kernels_do_not_compile_computes_with_torch_and_says_why(model, monkeypatch):
    monkeypatch.setattr(runners, "choose_backend", lambda *arguments: Backend(Broken, "fast", True, lambda: None))
    lab = ModelRunner(model, EngineConfig(**SMALL), device=LateDevice())
    info = lab.describe_backend()
    assert info.name == SdpaAttention.name and not info.fused and not info.graphs and lab.graphs is None
    assert "CompilationError: no such intrinsic" in info.reason
    assert not lab.state.kernels
    with pytest.raises(ModelError, match="no such intrinsic"):
        ModelRunner(model, EngineConfig(**SMALL), device=LateDevice(), attention_backend="triton")


def test_a_graph_that_cannot_be_recorded_for_whatever_reason_is_done_without(model):
    class Recorder:
        def capture(self, work):
            raise OutOfResources("ptxas")

        def allocated_bytes(self):
            return 0

    backend = Backend(ResidentSdpa, "fast", False, Recorder)
    lab = ModelRunner(model, EngineConfig(**SMALL), device=LateDevice(), backend=backend)
    assert lab.graphs is None and "recording them failed (OutOfResources: ptxas)" in lab.describe_backend().reason
