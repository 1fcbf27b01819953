"""The demo's glimpse of the cnn family."""

import pytest

from hotloop.families.cnn.demo import CALLS, demo_run


@pytest.mark.slow
def test_a_glimpse_learns():
    found = demo_run()
    assert len(found["training"]) == len(found["validation"]) == CALLS
    assert found["training"][-1] > found["training"][0] + 0.2
    assert (
        found["validation"][-1] > 0.4
    )  # as measured: above 0.6; chance is 0.1 with a standard error of 0.013
    assert found["images_per_second"] > 0
