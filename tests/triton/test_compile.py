"""Every kernel compiles for GPUs that are not here, and keeps its values in registers.

At the end pytest shows registers, spilled bytes and shared memory of each kernel (``conftest.py``).
"""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed (it comes with torch's CUDA build, on Linux)")

# ruff: noqa: E402
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.model.attention.triton_backend import narrow_shape, power_of_two, wide_shape
from engine.model.attention.triton_kernels import attend_kernel, merge_kernel, store_kernel
from engine.model.fused import HEADS_A_PROGRAM
from engine.model.fused_kernels import head_norm_kernel, rms_norm_kernel, silu_mul_kernel
from engine.model.state_kernels import chunk_inputs_kernel, decode_inputs_kernel, finish_kernel, survey_kernel
from tests.triton.conftest import RESOURCES

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Shared memory that a program may have on the smallest GPUs of compute capability 8 and later, in bytes.
LEAST_SHARED_LIMIT = 99 * 1024
# On these GPUs a program of 4 warps with more registers than that has the processor for itself.
REGISTERS = 255


@dataclass(frozen=True)
class Used:
    registers: int
    spilled: int
    shared: int


def compile_for(arch: int, kernel, types: dict[str, str], constants: dict[str, object], warps=4, stages=3) -> Used:
    """Types of all run-time arguments, values of all compile-time ones; pointers and strides are multiples of 16."""
    names = kernel.arg_names
    assert set(names) == set(types) | set(constants)
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [i for i, n in enumerate(names) if signature[n][0] == "*" or n in ("q_stride", "kv_stride", "x_stride")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "num_stages": stages})
    return measure(compiled.asm["cubin"], compiled.metadata.shared)


def measure(cubin: bytes, dynamic_shared: int) -> Used:
    path = Path(triton.knobs.cache.dir) / f"{abs(hash(cubin))}.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack, shared, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", shown).groups())
    return Used(registers, stack + local, shared + dynamic_shared)


def attend(arch, dtype, head_dim, shape, splits, group=3, block_size=16):
    element = "*" + NAMES[dtype]
    types = dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), element) | {"part_ptr": "*fp32", "lse_ptr": "*fp32"}
    types |= {"tiles_ptr": "*i32", "tables_ptr": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("q_stride", "kv_stride", "table_stride"), "i32")
    constants = {"NUM_KV": 8, "GROUP": group, "HEAD_DIM": head_dim, "WIDTH": power_of_two(head_dim), "LEAST": 128}
    constants |= {"BLOCK_SIZE": block_size, "BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "SPLITS": splits}
    return compile_for(arch, attend_kernel, types, constants, shape.warps, shape.stages)


@pytest.fixture(scope="module", autouse=True)
def _one_parses_at_a_time():
    """Two threads in ast.parse make Python 3.11 raise "AST constructor recursion depth mismatch" once in a while."""
    parse, turn = JITFunction.parse, Lock()

    def in_turn(self):
        with turn:
            return parse(self)

    JITFunction.parse = in_turn
    yield
    JITFunction.parse = parse


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
    yield
    triton.knobs.cache.dir = before


@pytest.fixture(scope="module")
def workers():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", list(NAMES), ids=NAMES.get)
def test_attention_keeps_to_registers_and_shared_memory(arch, dtype, workers, record_property):
    launches = {"decode, split": (narrow_shape(dtype, 3), 16), "prefill": (wide_shape(dtype, 3, hopper=arch == 90), 1)}
    # 80 and 96 are widened to 128, and the two half-precision formats compile alike.
    head_dims = (64, 80, 96, 128) if dtype == torch.bfloat16 else (80, 128) if dtype == torch.float16 else (64, 96)
    if dtype == torch.bfloat16:
        launches["decode"] = (narrow_shape(dtype, 3), 1)
    started = {
        (head_dim, name): workers.submit(attend, arch, dtype, head_dim, shape, splits)
        for head_dim in head_dims
        for name, (shape, splits) in launches.items()
    }
    used = {key: future.result() for key, future in started.items()}
    report = [
        f"sm_{arch} {NAMES[dtype]} head {head_dim:3d} {name:14s} {u.registers:3d} registers, {u.spilled} bytes spilled, "
        f"{u.shared:,} bytes shared"
        for (head_dim, name), u in used.items()
    ]
    record_property(RESOURCES, report)
    assert all(0 < u.registers <= REGISTERS for u in used.values())
    assert not [line for line, u in zip(report, used.values(), strict=True) if u.spilled]
    assert not [line for line, u in zip(report, used.values(), strict=True) if u.shared > LEAST_SHARED_LIMIT]


@pytest.mark.parametrize("block_size", [1, 24])
def test_any_block_size_compiles(block_size):
    used = attend(90, torch.bfloat16, 128, narrow_shape(torch.bfloat16, 4), 16, group=4, block_size=block_size)
    assert used.spilled == 0


@pytest.mark.parametrize(("arch", "dtype"), [(80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32)], ids=str)
def test_the_small_kernels_keep_to_registers(arch, dtype, workers, record_property):
    element = "*" + NAMES[dtype]
    store = dict.fromkeys(("x_ptr", "cos_ptr", "sin_ptr", "pool_ptr"), element)
    store |= {"slots_ptr": "*i64", "x_stride": "i32", "pool_stride": "i32"}
    started = {}
    for head_dim in (80, 128):
        sizes = {"NUM_Q": 32, "NUM_KV": 8, "HEAD_DIM": head_dim, "HALF": power_of_two(head_dim // 2)}
        sizes |= {"BLOCK_H": 16, "ROTATE": True}
        started[f"store {head_dim}"] = workers.submit(compile_for, arch, store_kernel, store, sizes)
    merge = {"out_ptr": element, "part_ptr": "*fp32", "lse_ptr": "*fp32", "tiles_ptr": "*i32"}
    sizes = {"NUM_KV": 8, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128, "BLOCK_M": 16, "SPLITS": 64}
    started["merge 64 × 128"] = workers.submit(compile_for, arch, merge_kernel, merge, sizes, 2)
    norm = dict.fromkeys(("x_ptr", "added_ptr", "weight_ptr", "out_ptr"), element)
    norm |= {"x_stride": "i32", "eps": "fp32"}
    for size in (4096, 8192):
        sizes = {"SIZE": size, "BLOCK": size, "ADD": True}
        started[f"norm {size}"] = workers.submit(compile_for, arch, rms_norm_kernel, norm, sizes, size // 512)
    heads = dict.fromkeys(("x_ptr", "query_weight_ptr", "key_weight_ptr"), element) | {"x_stride": "i32", "eps": "fp32"}
    for size in (80, 128):
        sizes = {"NUM_Q": 16, "NUM_KV": 8, "SIZE": size, "WIDTH": 128, "BLOCK_H": HEADS_A_PROGRAM}
        started[f"head norm {size}"] = workers.submit(compile_for, arch, head_norm_kernel, heads, sizes)
    silu = {"x_ptr": element, "out_ptr": element, "x_stride": "i32"}
    sizes = {"SIZE": 14336, "BLOCK": 1024}
    started["silu·mul"] = workers.submit(compile_for, arch, silu_mul_kernel, silu, sizes)
    used = {name: future.result() for name, future in started.items()}
    report = [
        f"sm_{arch} {NAMES[dtype]} {name:15s} {u.registers:3d} registers, {u.spilled} bytes spilled, "
        f"{u.shared:,} bytes shared"
        for name, u in used.items()
    ]
    record_property(RESOURCES, report)
    assert not [line for line, u in zip(report, used.values(), strict=True) if u.spilled]


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_of_the_requests_state_keep_to_registers(arch, workers, record_property):
    state = {"state_tokens_ptr": "*i64", "counters_ptr": "*i64", "tables_ptr": "*i32"}
    written = dict.fromkeys(("token_ids_ptr", "positions_ptr", "slots_ptr"), "*i64")
    table = {"WIDTH": 8192, "BLOCK_SIZE": 16}
    decode = state | written | {"seats_ptr": "*i64", "numbers_ptr": "*fp64", "tiles_ptr": "*i32", "null_seat": "i32"}
    decode |= {"temperatures_ptr": "*fp32", "points_ptr": "*fp64"}
    chunk = state | written | {"spans_ptr": "*i64", "ids_ptr": "*i64"}
    survey = {"logits_ptr": "*bf16", "temperatures_ptr": "*fp32", "numbers_ptr": "*fp64", "tokens_ptr": "*i64"}
    survey |= {"logits_stride": "i32"}
    finish = survey | {"seats_ptr": "*i64", "points_ptr": "*fp64", "last_ptr": "*bf16", "outcome_ptr": "*i64"}
    finish |= {"state_tokens_ptr": "*i64", "counters_ptr": "*i64"}
    finish |= dict.fromkeys(("null_seat", "last_stride", "outcome_stride"), "i32")
    chunks = {"VOCABULARY": 151_936, "CHUNKS": 38, "BLOCK": 4096, "DRAWS": True}
    sizes = chunks | {"CHUNKS_2": 64, "SIZE": 8192, "SIZE_2": 8192, "COMMIT": True}
    started = {
        "decode inputs": workers.submit(compile_for, arch, decode_inputs_kernel, decode, {"FIELDS": 7, **table}, 1),
        "chunk inputs": workers.submit(compile_for, arch, chunk_inputs_kernel, chunk, {"BLOCK": 128, **table}, 1),
        "survey": workers.submit(compile_for, arch, survey_kernel, survey, chunks, 4),
        "finish": workers.submit(compile_for, arch, finish_kernel, finish, sizes, 8),
    }
    used = {name: future.result() for name, future in started.items()}
    report = [f"sm_{arch} {name:15s} {u.registers:3d} registers, {u.spilled} bytes spilled" for name, u in used.items()]
    record_property(RESOURCES, report)
    assert not [line for line, u in zip(report, used.values(), strict=True) if u.spilled]
