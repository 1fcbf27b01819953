"""The highest values of rows: by top_k and by a sort the same, of equals the first."""

import jax
import numpy as np
import pytest

from hotloop.layers.highest import SORTED, highest
from hotloop.layers.paths import force_path


@pytest.mark.parametrize("path", ["default", SORTED])
def test_the_highest_come_first_and_of_equals_the_first_place(path):
    x = np.array([[1.0, 3.0, 3.0, -np.inf, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    with force_path(path):
        values, places = jax.jit(lambda x: highest(x, k=3))(x)
    assert values.tolist() == [[3, 3, 2], [0, 0, 0]]
    assert places.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert places.dtype == np.int32
