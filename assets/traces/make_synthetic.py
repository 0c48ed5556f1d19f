"""Makes synthetic-chat.csv: run ``python assets/traces/make_synthetic.py`` in the project's folder.

Something like an hour at a chat service, made up and drawn from a fixed seed. Arrivals: a Poisson process whose rate swings
with the minute of the hour, and now and then a clump of requests from one client. Prompts: log-normal, longer in the course
of a conversation; answers: log-normal and independent of them. Nothing in it comes from a recording.
"""

from __future__ import annotations

import csv
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

ROWS = 500
SECONDS = 3600.0
START = datetime(2026, 1, 5, 9, 0, 0)


def make() -> list[tuple[str, int, int]]:
    """The rows: time stamp, prompt tokens, output tokens."""
    rng = np.random.default_rng(20260105)
    moments: list[float] = []
    now = 0.0
    while len(moments) < ROWS:
        rate = 0.75 * ROWS / SECONDS * (1.0 + 0.6 * np.sin(2 * np.pi * now / SECONDS))
        now += float(rng.exponential(1.0 / rate))
        clump = 1 + (int(rng.integers(2, 9)) if rng.random() < 0.04 else 0)
        moments.extend(now + float(delay) for delay in np.sort(rng.uniform(0.0, 1.5, clump)))
    rows = []
    for moment in sorted(moments[:ROWS]):
        turn = int(rng.geometric(0.45))
        prompt = int(np.clip(rng.lognormal(np.log(180.0 + 220.0 * (turn - 1)), 0.7), 4, 6000))
        output = int(np.clip(rng.lognormal(np.log(140.0), 0.8), 1, 1500))
        stamp = (START + timedelta(seconds=moment)).strftime("%Y-%m-%d %H:%M:%S.%f")
        rows.append((stamp, prompt, output))
    return rows


def main() -> None:
    """Write the file beside this script."""
    path = Path(__file__).with_name("synthetic-chat.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows(make())


if __name__ == "__main__":
    main()
