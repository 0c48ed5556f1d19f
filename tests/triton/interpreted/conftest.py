"""What the interpreter lacks: it keeps bfloat16 as raw bits and multiplies those. Its matrix product gets float32 here."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

_create_dot = InterpreterBuilder.create_dot


def _wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(_convert_float(handle.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32)


def _dot(self, a, b, *rest):
    return _create_dot(self, _wide(a), _wide(b), *rest)


InterpreterBuilder.create_dot = _dot
torch.set_num_threads(1)
