"""Loss and metric of an update are means over all its samples, however they are split."""

import jax
import numpy as np
import pytest

from metrics_toy import SAMPLES, SPLITS, losses_and_metrics


@pytest.mark.parametrize(("split", "stages"), [*((split, 1) for split in SPLITS), ((2, 2, 2), 2)])
def test_the_toys_loss_and_metric_are_three_and_a_half(split, stages):
    if split[1] * stages > jax.device_count():
        pytest.skip(f"{split[1] * stages} devices")
    assert losses_and_metrics(split, stages) == [[3.5] * 3] * 2
    # One changed sample and a moved weight are seen, and where they should be.
    changed = np.where(SAMPLES == 5, 6, SAMPLES).astype(np.float32)
    assert losses_and_metrics(split, stages, samples=changed) == [[3.625] * 3] * 2
    assert losses_and_metrics(split, stages, scale=1.5) == [[5.25] * 3, [3.5] * 3]
