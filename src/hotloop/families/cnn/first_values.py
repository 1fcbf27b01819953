"""Initial values of a network: one flat draw, of which Keras' truncated normals are a part.

It adds the truncated normal to `layers.initial`; which layer starts from what is said by the pieces.
"""

from dataclasses import dataclass
from math import erf, prod, sqrt
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from hotloop.layers.initial import Spec, draw

_WITHIN = erf(sqrt(2))  # of a normal's values lie within two standard deviations
_SPREAD = 0.87962566103423978  # standard deviation of a standard normal cut off at two


@dataclass(frozen=True)
class Truncated:
    """Normal values cut off at two standard deviations, of variance 1 / fan-in: Keras' VarianceScaling."""

    shape: tuple[int, ...]

    @property
    def scale(self) -> float:
        """The standard deviation before the cut."""
        return 1 / (sqrt(prod(self.shape[:-1])) * _SPREAD)


Value = Spec | Truncated


def first_values(key: Array, values: Any) -> Any:
    """A tree of float32 arrays for a tree of `Value`s."""
    leaves, tree = jax.tree.flatten(values, is_leaf=lambda leaf: isinstance(leaf, Spec | Truncated))
    size = sum(prod(leaf.shape) for leaf in leaves if isinstance(leaf, Truncated))
    uniform, others = draw(
        key, (Spec((size,), "uniform", _WITHIN), [v for v in leaves if isinstance(v, Spec)])
    )
    flat, rest = _bent(uniform), iter(others)
    if not isinstance(flat, jax.core.Tracer):
        flat = jax.device_get(flat)  # as in `draw`: numpy cuts without compiling
    arrays, used = [], 0
    for leaf in leaves:
        if isinstance(leaf, Spec):
            arrays.append(next(rest))
            continue
        piece = flat[used : used + prod(leaf.shape)].reshape(leaf.shape)
        arrays.append(jax.numpy.asarray(piece * np.float32(leaf.scale)))
        used += prod(leaf.shape)
    return jax.tree.unflatten(tree, arrays)


@jax.jit
def _bent(uniform: Array) -> Array:
    """Uniform values in (-a, a) to the normal values that have that probability between minus and plus them."""
    return np.float32(sqrt(2)) * lax.erf_inv(uniform)
