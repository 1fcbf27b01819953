"""Two trees of numbers that should be the same but for rounding: finite, not zero, and close."""

from typing import Any

import jax
import numpy as np


def assert_same_numbers(found: Any, wanted: Any, within: float) -> None:
    """No element differs by more than `within` of its leaf's largest; counters are equal.

    A NaN or an infinity on either side is a failure, and so are trees of nothing but zeros, which any program gives.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name, one, other = jax.tree_util.keystr(path), np.asarray(one), np.asarray(other)
        assert one.shape == other.shape and one.dtype == other.dtype, name
        if one.dtype.kind in "iub":
            np.testing.assert_array_equal(one, other, err_msg=name)
            continue
        one, other = one.astype(np.float64), other.astype(np.float64)
        assert np.isfinite(one).all() and np.isfinite(other).all(), name
        largest = np.abs(other).max(initial=0)
        assert np.abs(one - other).max(initial=0) <= within * largest, (
            name,
            np.abs(one - other).max(),
            largest,
        )
    for tree in (found, wanted):
        assert any(np.any(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree))
