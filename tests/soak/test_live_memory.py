"""J3: the server's memory stays level while a live page is watched for minutes under load.

``INFERENCE_LAB_SOAK_MINUTES`` sets how long (20 by default; at least 2). It counts once the log is full: what it keeps is
bounded (20,000 steps and what belongs to them), and until then memory grows as it should.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from engine.bench.viewers import serving, watch
from engine.observe.log import MAX_STEPS

pytestmark = pytest.mark.soak
MINUTES = max(2.0, float(os.environ.get("INFERENCE_LAB_SOAK_MINUTES", "20")))
FULL = MAX_STEPS + 1000
LIMIT = 1.0
"""Megabytes a minute."""


@pytest.mark.timeout(60 * (MINUTES + 5))
def test_memory_is_level_while_a_page_is_live(record_property: Callable[[str, object], None]):
    with serving("scripted:seconds=0.004", 1, running=16, blocks=512) as server:
        process = next(child for child in psutil.Process().children() if "app import server" in " ".join(child.cmdline()))
        samples: list[tuple[float, float, int]] = []
        refreshes = 0
        begin = time.monotonic()
        while (minutes := (time.monotonic() - begin) / 60) < MINUTES:
            server.fill(240, 60)  # short answers: what is kept of finished requests is soon full as well
            refreshes += sum(asyncio.run(watch(server.port, viewers=2, looks=2, seconds=4.0)))
            samples.append((minutes, process.memory_info().rss / 1e6, server.last_step()))
        steps = server.last_step()
    kept = np.array([sample for sample in samples if sample[2] > FULL])
    assert len(kept) > len(samples) / 4, f"only {steps:,} steps in {MINUTES:g} minutes: the log was not full for long enough"
    slope = float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0])
    record_property("megabytes_at_the_end", round(samples[-1][1]))
    record_property("megabytes_a_minute", round(slope, 2))
    assert steps > 60 * MINUTES * 10, "the load was there all the time"
    assert refreshes > 60 * MINUTES * 2, "it was watched all the time"
    assert slope < LIMIT, f"{slope:+.2f} MB a minute over {MINUTES:g} minutes and {steps:,} steps"
