"""How a graph is recorded, with stand-ins for CUDA: on which stream, in which mode, and what stays when it fails."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.model import graphs

GPU = torch.device("cuda", 0)


class Cuda:
    """torch.cuda, as far as recording needs it; notes what happens on which stream."""

    def __init__(self, patch):
        self.main, self.side = (SimpleNamespace(name=name, wait_stream=lambda other: None) for name in ("main", "side"))
        self.current, self.notes = self.main, []
        patch.setattr(graphs, "_capture_stream", lambda device: self.side)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="replay"))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.notes.append(
            ("begin", pool, capture_error_mode, "inference" if torch.is_inference_mode_enabled() else "ordinary")
        )
        self.current = stream
        yield
        self.notes.append("end")
        self.current = self.main


@pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
def test_work_runs_once_before_it_is_recorded_on_the_same_stream(monkeypatch, inference):
    cuda = Cuda(monkeypatch)
    maker = graphs.CudaGraphs(GPU)
    with torch.inference_mode(inference):
        replay = maker.capture(lambda: cuda.notes.append(cuda.current.name))
    assert replay == "replay"
    # Never in inference mode: torch's own tensors for random numbers must stay writable for later graphs.
    assert cuda.notes == ["side", ("begin", (0, 1), "thread_local", "ordinary"), "side", "end"]
    assert cuda.current is cuda.main


def test_a_recording_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    cuda = Cuda(monkeypatch)
    calls = []

    def work():
        calls.append(cuda.current.name)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.CudaGraphs(GPU).capture(work)
    assert calls == ["side", "side"]
    assert cuda.current is cuda.main
