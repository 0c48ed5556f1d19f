"""The kernels that make a step's inputs, interpreted, over random lives of requests."""

import pytest

from tests.model.state_lives import live


@pytest.mark.parametrize("seed", range(6))
def test_kernels_make_the_inputs_that_the_host_would_send(seed):
    met = live(seed, steps=25, kernels=True)
    assert met["decodes"] and met["chunks"]
