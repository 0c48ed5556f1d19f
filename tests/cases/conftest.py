"""Checkpoints that the cases share: made and loaded once a session."""

import pytest

from tests.cases.kit import Model
from tests.fixtures import make_rand

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Rotary scaling with a short original context, so that a prompt of some tens of tokens reaches every branch of it."""
FAMILIES = {
    "llama": {},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "mistral": {"architecture": "mistral"},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
}
_loaded: dict[str, Model] = {}


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Name of an architecture → its random checkpoint."""

    def load(name: str) -> Model:
        if name not in _loaded:
            _loaded[name] = Model.load(make_rand(tmp_path_factory.mktemp(name), **FAMILIES[name]))
        return _loaded[name]

    return load


@pytest.fixture(scope="session")
def rand(family) -> Model:
    return family("llama")
