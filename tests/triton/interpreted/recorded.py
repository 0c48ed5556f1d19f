"""CUDA graphs in the interpreter, and attention in tiles small enough for it."""

from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from engine.model.attention.triton_backend import TileShape, TritonAttention
from tests.model import fake_gpu


class RecordedGraphs(fake_gpu.RecordedGraphs):
    """With the launches of kernels among the calls. A ``broken`` one runs nothing again."""

    def __init__(self, broken=False):
        super().__init__()
        self.broken = broken

    def record(self, work, recorder):
        def launch(executor, *args, **kwargs):
            def run():
                with _disable_current_modes():  # the interpreter's own work is no part of the graph
                    ordinary(executor, *args, **kwargs)

            run()
            recorder.calls.append((run, (), {}, None))

        ordinary, GridExecutor.__call__ = GridExecutor.__call__, launch
        try:
            super().record(work, recorder)
        finally:
            GridExecutor.__call__ = ordinary

    def replay(self, calls):
        super().replay([] if self.broken else calls)


def small(**settings):
    attention = TritonAttention(**settings, processors=4)
    attention.narrow, attention.wide, attention.least = TileShape(16, 16, 4, 2), TileShape(32, 16, 4, 2), 16
    return attention
