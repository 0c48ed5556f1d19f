import pytest

from engine.model.loader import LoadedModel, load_model
from tests.fixtures import make_rand


@pytest.fixture(scope="session")
def rand_dir(tmp_path_factory):
    return make_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="session")
def rand(rand_dir) -> LoadedModel:
    return load_model(rand_dir)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2")
