"""The random lives of tests/cases, longer: as many actions as asked for, in every configuration of the machine."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cases.lives import ACTIONS, EVERYTHING, SEEN, Lives


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_actions_on_a_model(capsys):
    """MODEL_SOAK_ACTIONS (5,000) random actions; says how many were run and what they met."""
    goal = int(os.environ.get("MODEL_SOAK_ACTIONS", "5000"))
    ACTIONS.clear()
    SEEN.clear()
    while ACTIONS.total() < goal:
        examples = max(1, min(200, (goal - ACTIONS.total()) // 50))
        run_state_machine_as_test(
            Lives,
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                derandomize=False,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert all(SEEN[kind] for kind in EVERYTHING), dict(SEEN)
    with capsys.disabled():
        for title, counts in (("actions run on a model", ACTIONS), ("seen on the way", SEEN)):
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
            total = f" {counts.total():,}" if counts is ACTIONS else ""
            sys.stdout.write(f"\n{title}:{total} ({kinds})")
