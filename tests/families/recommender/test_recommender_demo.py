"""The family's part of the demo: a training that learns, told beside the biases."""

from dataclasses import replace

import pytest

from hotloop.families.recommender.demo import RECIPE, demo_run
from listener import Listener


@pytest.mark.slow
def test_a_glimpse_learns_and_tells_the_biases_beside_it():
    found = demo_run(Listener(), replace(RECIPE, epochs=12))
    assert len(found["rmse"]) == 13
    assert found["rmse"][0] > 2 > 1.2 > found["rmse"][-1]
    assert 0.85 < found["biases"] < 1
    assert found["users_per_second"] > 0 and found["users"] == 943
