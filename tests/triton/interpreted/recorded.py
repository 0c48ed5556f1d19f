"""CUDA graphs in the interpreter, and attention in tiles small enough for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from engine.model.attention.triton_backend import TileShape, TritonAttention


class Recorder(TorchDispatchMode):
    """Notes every torch call and every kernel launch, with what they returned."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraphs:
    """Like CUDA: what ran once runs again on the same addresses, without Python. A ``broken`` one runs nothing."""

    def __init__(self, broken=False):
        self.broken = broken
        self.replays = 0

    def capture(self, work):
        recorder = Recorder()

        def launch(executor, *args, **kwargs):
            def run():
                with _disable_current_modes():  # the interpreter's own work is no part of the graph
                    ordinary(executor, *args, **kwargs)

            run()
            recorder.calls.append((run, (), {}, None))

        ordinary, GridExecutor.__call__ = GridExecutor.__call__, launch
        try:
            with recorder:
                work()
        finally:
            GridExecutor.__call__ = ordinary
        calls = [] if self.broken else recorder.calls
        return lambda: self.replay(calls)

    @torch.inference_mode()
    def replay(self, calls):
        self.replays += 1
        for func, args, kwargs, result in calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)

    def allocated_bytes(self):
        return 0


def small(**settings):
    attention = TritonAttention(**settings, processors=4)
    attention.narrow, attention.wide, attention.least = TileShape(16, 16, 4, 2), TileShape(32, 16, 4, 2), 16
    return attention
