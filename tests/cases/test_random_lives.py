"""A short run of the random lives on a real model; ``make soak`` runs a long one."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cases.lives import EVERYTHING, SEEN, Lives


@pytest.mark.timeout(280)
def test_random_lives_on_a_model():
    SEEN.clear()
    run_state_machine_as_test(
        Lives,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
    assert all(SEEN[kind] for kind in EVERYTHING), f"too short to meet everything: {dict(SEEN)}"
