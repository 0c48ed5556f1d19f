"""CUDA tensors without a GPU and without contents: torch's fake tensors, which know their device, shape and format.

What they show where no GPU is: tensors of two devices in one call, looks at numbers, shapes and formats that don't fit, in
all of the path that only a GPU takes. Triton kernels are not run; their arguments are checked.
"""

import inspect
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from engine.model import runner
from engine.model.transformer import Transformer
from engine.model.weights import ModelWeights
from tests.model.fake_gpu import Refuses

CUDA = torch.device("cuda", 0)
FORMATS = {
    "seats": torch.int64, "slots": torch.int64, "tiles": torch.int32, "tables": torch.int32, "counters": torch.int64,
    "temperatures": torch.float32, "points": torch.float64, "token_ids": torch.int64, "positions": torch.int64,
    "state_tokens": torch.int64, "outcome": torch.int64, "spans": torch.int64, "ids": torch.int64, "lse": torch.float32,
    "numbers": torch.float64,
}  # fmt: skip
"""Number formats of kernels' arguments, by the name before ``_ptr``."""
UNUSED = {"lse", "temperatures", "points"}
"""Which a kernel doesn't read where there is nothing to split or to draw; anything may stand in for them then."""


BY_HAND = {
    "copy_": lambda self, source: torch.ops.aten.copy_.default(self, source),
    "contiguous": lambda self: self if self.is_contiguous() else torch.ops.aten.clone.default(self),
    "__invert__": lambda self: torch.ops.aten.bitwise_not.default(self),
    "long": lambda self: torch.ops.aten._to_copy.default(self, dtype=torch.int64),
    "int": lambda self: torch.ops.aten._to_copy.default(self, dtype=torch.int32),
    "float": lambda self: torch.ops.aten._to_copy.default(self, dtype=torch.float32),
    "double": lambda self: torch.ops.aten._to_copy.default(self, dtype=torch.float64),
}
"""Methods of tensors that ask for a driver before torch's dispatcher is reached."""


def indexed(tensor, index):
    """``tensor[index]`` by calls of torch's: indexing from Python asks for a driver. Returns a view where torch does."""
    parts, tensors, dim = index if isinstance(index, tuple) else (index,), [], 0
    for part in parts:
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(part, int):
            tensor = torch.ops.aten.select.int(tensor, dim, part)
        elif isinstance(part, slice):
            start, stop, step = part.indices(tensor.shape[dim])
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, stop), step), dim + 1
        elif isinstance(part, torch.Tensor):
            assert part.dtype in (torch.int64, torch.int32), "a mask makes the host count"
            tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
        else:
            raise AssertionError(f"an index {part!r} is made into a tensor on the host, and waits on its way to the GPU")
    return torch.ops.aten.index.Tensor(tensor, tensors) if tensors else tensor


class Late:
    """Copies of what lies on the pretended device: zeros."""

    def __init__(self, source):
        assert source.device == CUDA
        self.shape, self.dtype = tuple(source.shape), source.dtype

    def wait(self):
        with unset_fake_temporarily():
            return torch.zeros(self.shape, dtype=self.dtype)


class Uploads:
    """Numbers on their way to the device: their shape arrives."""

    def __init__(self, device, where):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *raised):
        pass

    def put(self, values, dtype):
        return torch.empty(np.asarray(values).shape, dtype=dtype, device=CUDA)


class PretendedDevice:
    """A ``Device`` that is never waited for."""

    asynchronous, last_work = True, None

    def event(self):
        return SimpleNamespace(record=lambda: None, wait=lambda: None, seconds_since=lambda earlier: 0.0)

    def fetch(self, source):
        return Late(source)

    def scope(self):
        return nullcontext()

    def finish(self):
        pass


class Calls:
    """In place of CUDA graphs: what is captured is called again."""

    def __init__(self):
        self.captured = 0

    def capture(self, work):
        self.captured += 1
        work()
        return work

    def allocated_bytes(self):
        return 0


def checked_launch(kernel, launched):
    """What takes the place of a kernel's ``run``."""
    names = list(inspect.signature(kernel.fn).parameters)

    def run(*args, grid, warmup, num_warps=4, num_stages=3, **constants):
        given = dict(zip(names, args, strict=False)) | constants
        assert list(given) and set(given) == set(names), f"{kernel.fn.__name__}: {set(names) ^ set(given)}"
        assert all(isinstance(size, int) and size > 0 for size in grid), f"{kernel.fn.__name__}: grid {grid}"
        for name, value in given.items():
            what = name.removesuffix("_ptr")
            if name == what:
                assert isinstance(value, int | float), f"{name}: {value!r}"
                continue
            assert isinstance(value, FakeTensor) and value.device == CUDA, f"{name} of {kernel.fn.__name__}: {value!r}"
            if what in FORMATS and what not in UNUSED and not (what == "tokens" and "numbers_ptr" not in given):
                assert value.dtype == FORMATS[what], f"{name} of {kernel.fn.__name__}: {value.dtype}"
            if what not in ("x", "q", "kv", "pool", "last", "logits", "cos", "sin", "added"):
                assert value.is_contiguous() or value.dim() == 2, f"{name} of {kernel.fn.__name__}: {value.stride()}"
        assert num_warps & (num_warps - 1) == 0
        launched.append(kernel.fn.__name__)

    return run


@contextmanager
def pretended_cuda(monkeypatch, kernels=()):
    """In which tensors on ``CUDA`` can be made; yields the names of kernels launched."""
    launched = []
    for kernel in kernels:
        monkeypatch.setattr(kernel, "run", checked_launch(kernel, launched))
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(runner, "Uploads", Uploads)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (140 << 30, 141 << 30))
    ordinary = torch.Tensor.__getitem__
    store = torch.Tensor.__setitem__

    def get(self, index):
        return indexed(self, index) if isinstance(self, FakeTensor) else ordinary(self, index)

    def put(self, index, value):
        if not isinstance(self, FakeTensor):
            return store(self, index, value)
        assert isinstance(value, torch.Tensor), "a number put into a tensor of the GPU's: use fill_"
        return indexed(self, index).copy_(value)

    monkeypatch.setattr(torch.Tensor, "__getitem__", get)
    monkeypatch.setattr(torch.Tensor, "__setitem__", put)
    for name, call in BY_HAND.items():
        monkeypatch.setattr(torch.Tensor, name, call)
    with FakeTensorMode(allow_non_fake_inputs=True), Refuses():
        yield launched


def pretended_model(spec, meta):
    """A transformer on ``CUDA`` with the shapes of ``meta``, weights on the meta device. Call it in ``pretended_cuda``."""

    def there(value):
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=CUDA)
        return value

    layers = [
        type(layer)(**{part.name: there(getattr(layer, part.name)) for part in fields(layer)}) for layer in meta.layers
    ]
    embedding = there(meta.embedding)
    weights = ModelWeights(embedding, layers, there(meta.final_norm), embedding if meta.tied else there(meta.head))
    return Transformer(spec, weights)
