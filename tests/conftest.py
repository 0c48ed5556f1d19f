"""What every test gets: a quiet, repeatable environment, set before torch loads."""

import os

import pytest
from hypothesis import HealthCheck, settings

# libgomp reads this once, when torch loads: waiting threads sleep soon, so that tests running side by side don't starve.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores already
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test downloads anything; a hub name that is not in the local cache fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header(config: pytest.Config) -> str:
    """One line on what decides how fast and how random the run is."""
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"threads: {threads}, hypothesis profile: {os.environ.get('HYPOTHESIS_PROFILE', 'default')}"
