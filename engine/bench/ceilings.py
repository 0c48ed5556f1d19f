"""What a device can do at best, measured here: copy bandwidth and matrix-multiplication rate.

Both are measured with torch's own kernels, so they bound what an engine built on torch can reach, not what the silicon
could do in a vendor's benchmark. The best of several repeats counts: a busy machine only ever makes a repeat slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device in one number format."""

    device: str
    dtype: str
    threads: int
    """CPU threads torch used; 0 on a GPU."""
    copy_bandwidth: float
    """Bytes read plus bytes written, per second."""
    matmul_rate: float
    """Floating-point operations per second; a multiply-add counts as two."""


def measure_ceilings(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> Ceilings:
    """Measure ``device`` for about ``seconds`` in all.

    Args:
        device: CPU or CUDA device.
        dtype: number format of the matrices; the copy moves plain bytes.
        seconds: time to spend, split between the two measurements.
    """
    return Ceilings(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        copy_bandwidth=_copy_bandwidth(device, seconds / 2),
        matmul_rate=_matmul_rate(device, dtype, seconds / 2),
    )


def _copy_bandwidth(device: torch.device, seconds: float) -> float:
    # Far larger than the last-level cache, or the cache is what gets measured.
    size = 1 << 30 if device.type == "cuda" else 1 << 27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = _best_time(lambda: target.copy_(source), device, seconds)
    return 2 * size / best


def _matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    n = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device=device).manual_seed(0)
    # Random values: a GPU clocks higher on zeros, which no model has.
    left = torch.randn(n, n, device=device, generator=generator).to(dtype)
    right = torch.randn(n, n, device=device, generator=generator).to(dtype)
    out = torch.empty(n, n, device=device, dtype=dtype)
    best = _best_time(lambda: torch.matmul(left, right, out=out), device, seconds)
    return 2 * n**3 / best


def _best_time(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest time of one call, in seconds: at least three calls, and as many as ``seconds`` allow."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    work()
    wait()
    best = float("inf")
    deadline = time.perf_counter() + seconds
    repeats = 0
    while repeats < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
        repeats += 1
    return best
