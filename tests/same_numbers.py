"""Two trees of numbers that should be the same but for rounding: finite, not zero, close; and controls that are not.

An equality that cannot fail shows nothing. `assert_same_but_for` therefore takes the same computation once more with
one label changed and once more with one weight moved before the first update, and wants both to be seen by far.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

TIMES = 10
"""How many times the bound a control must be away, so that it could not be taken for rounding."""


class TooFarApart(AssertionError):
    """Two trees of one form, finite and not zero, whose numbers are not the same: `share` of the largest apart."""

    def __init__(self, name: str, share: float, within: float):
        super().__init__(f"{name}: {share:.3g} of the largest apart, more than {within:g}")
        self.share, self.within = share, within


def _pairs(found: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    """Leaf by leaf: its name and both sides' numbers, once all of them are known to be finite and some not zero.

    `max` over floats passes over NaN, so that nothing is compared before this.
    """
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = []
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name, one, other = jax.tree_util.keystr(path), np.asarray(one), np.asarray(other)
        assert one.shape == other.shape and one.dtype == other.dtype, name
        if one.dtype.kind not in "iub":
            one, other = one.astype(np.float64), other.astype(np.float64)
            assert np.isfinite(one).all() and np.isfinite(other).all(), name
        pairs.append((name, one, other))
    for tree in (found, wanted):
        assert any(np.any(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree))
    return pairs


def _distance(one: Any, other: Any) -> float:
    """The largest difference of two leaves; counters are equal or infinitely apart."""
    if one.dtype.kind in "iub":
        return 0.0 if np.array_equal(one, other) else np.inf
    return float(np.abs(one - other).max(initial=0))


def _largest(leaf: Any) -> float:
    return float(np.abs(leaf).max(initial=0)) if leaf.dtype.kind not in "iub" else 0.0


def share_apart(found: Any, wanted: Any) -> float:
    """The largest difference of two trees as a share of the largest number of the second, counters aside."""
    pairs = _pairs(found, wanted)
    distance = max(_distance(one, other) for _, one, other in pairs)
    return distance / (max(_largest(other) for _, _, other in pairs) or 1.0)


def assert_same_numbers(found: Any, wanted: Any, within: float) -> None:
    """No element differs by more than `within` of its leaf's largest; counters are equal.

    A NaN or an infinity on either side is a failure, and so are trees of nothing but zeros, which any program gives.
    """
    shares = []
    for name, one, other in _pairs(found, wanted):
        distance = _distance(one, other)
        shares.append((distance / (_largest(other) or 1e-300) if distance else 0.0, name))
    share, name = max(shares)
    if share > within:
        raise TooFarApart(name, share, within)


def assert_close(found: Any, wanted: Any, within: float) -> None:
    """No element differs by more than `within` of the largest of all."""
    share = share_apart(found, wanted)
    if share > within:
        raise TooFarApart("the tree", share, within)


def assert_seen(compare: Callable[[Any], None], *controls: Any) -> None:
    """The comparison fails for each control: because its numbers are others, by far, and for no other reason."""
    for number, control in enumerate(controls):
        try:
            compare(control)
        except TooFarApart as seen:
            assert seen.share > TIMES * seen.within, (number, seen)
        else:
            raise AssertionError(f"control {number} is taken for the same")


def assert_same_but_for(found: Any, wanted: Any, within: float, *, label: Any, weight: Any) -> None:
    """`found` is `wanted` to `within` of the largest; what came of a changed `label` or a moved `weight` is not."""
    assert_close(found, wanted, within)
    assert_seen(lambda control: assert_close(control, wanted, within), label, weight)


def with_other_label(batch: Any, classes: int, place: int = -1, name: str = "label") -> Any:
    """A batch of host arrays in which one sample is said to be of the next class."""
    labels = np.array(batch[name])
    labels[place] = (labels[place] + 1) % classes
    return {**batch, name: labels}


def with_moved_weight(tree: Any, *keys: Any, by: float = 0.01) -> Any:
    """A tree as host arrays in which the first number of the leaf under these keys is moved."""
    moved = leaf = jax.tree.map(np.array, tree)
    for key in keys:
        leaf = getattr(leaf, key) if hasattr(leaf, "_fields") else leaf[key]
    leaf.flat[0] += by
    return moved
