"""What the interpreter lacks: it keeps bfloat16 as raw bits, multiplies those, and cuts numbers off instead of rounding.

Here its matrix product gets bfloat16 as float32, and float32 turns into bfloat16 as on a GPU: to the nearest, ties to even.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

_create_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(_convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def _dot(self, a, b, *rest):
    return _create_dot(self, _wide(a), _wide(b), *rest)


def _rounding_cast(self, source, target):
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return TensorHandle(rounded.reshape(np.shape(source.data)), tl.bfloat16)


InterpreterBuilder.create_dot = _dot
InterpreterBuilder.cast_impl = _rounding_cast
torch.set_num_threads(1)
