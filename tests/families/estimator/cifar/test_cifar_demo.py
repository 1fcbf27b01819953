"""The family's part of the demo: a training that is told update by update."""

import pytest

from hotloop.families.estimator.cifar.program import DEMO_POINTS, demo_run


@pytest.mark.slow
def test_a_glimpse_learns():
    found = demo_run()
    assert len(found["accuracy"]) == DEMO_POINTS
    assert found["accuracy"][-1] > found["accuracy"][0] + 0.1
    assert found["test_accuracy"] > 0.25  # 0.41 as measured; chance is 0.1 with a standard error of 0.013
    assert found["images_per_second"] > 0
