"""How much memory the machine has left for KV pools."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_memory() -> int:
    """Bytes that new allocations can take: what the system calls available, within the container's limit if it has one."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _read(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
