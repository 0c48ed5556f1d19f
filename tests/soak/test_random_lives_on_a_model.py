"""The random lives of tests/cases, longer: as many actions as asked for, in every configuration of the machine."""

import os

import pytest

from tests.cases.lives import ACTIONS, EVERYTHING, SEEN, Lives
from tests.core.test_state_machine import many_actions


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_actions_on_a_model(capsys):
    """MODEL_SOAK_ACTIONS (5,000) random actions; says how many were run and what they met."""
    many_actions(Lives, int(os.environ.get("MODEL_SOAK_ACTIONS", "5000")), ACTIONS, SEEN, capsys, steps=50)
    assert all(SEEN[kind] for kind in EVERYTHING), dict(SEEN)
