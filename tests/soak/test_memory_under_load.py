"""Memory stays flat while the engine works: the host, and the client that mirrors and records it.

``SOAK_MINUTES`` sets the length (default 30). The slope is fitted to the second half, when all rings are full.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.serve.client import EngineClient
from engine.workload.arrivals import Arrivals
from engine.workload.lengths import Lengths
from engine.workload.spec import Prefix, Stop, WorkloadSpec

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
MOST_MIB_A_MINUTE = 1.0


@pytest.mark.soak
@pytest.mark.timeout(int(MINUTES * 60) + 300)
def test_memory_stays_flat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = WorkloadSpec(
        arrivals=Arrivals(process="closed", in_flight=12),
        prompt=Lengths(distribution="uniform", low=20, high=400),
        output=Lengths(distribution="uniform", low=4, high=60),
        prefix=Prefix(tokens=16, share=0.5),
        stop=Stop(seconds=MINUTES * 60 + 60),
    )
    with EngineClient(model="tiny", recordings=tmp_path) as client:
        client.start()
        client.wait_ready(timeout=60)
        client.open_lab("soak", {"num_kv_blocks": 160, "max_num_seqs": 8, "max_model_len": 512})
        client.start_traffic("soak", spec)
        host, own = psutil.Process(client.pid), psutil.Process()
        samples: list[tuple[float, float, float]] = []
        begun = time.monotonic()
        while (elapsed := time.monotonic() - begun) < MINUTES * 60:
            time.sleep(min(5.0, MINUTES * 2))
            samples.append((elapsed / 60, host.memory_info().rss / 2**20, own.memory_info().rss / 2**20))
        stats = client.log("soak").stats
    table = np.array(samples)
    late = table[table[:, 0] > MINUTES / 2]
    slopes = [float(np.polyfit(late[:, 0], late[:, column], 1)[0]) for column in (1, 2)]
    with capsys.disabled():
        print(  # noqa: T201  (the slope is the result)
            f"\n{MINUTES:g} minutes, {stats.steps:,} steps, {stats.finished:,} requests, {stats.preemptions:,} preemptions: "
            f"host {late[-1, 1]:.0f} MiB, {slopes[0]:+.2f} MiB/min; client {late[-1, 2]:.0f} MiB, {slopes[1]:+.2f} MiB/min"
        )
    assert stats.finished > 10 and stats.failed == 0
    assert max(slopes) < MOST_MIB_A_MINUTE
