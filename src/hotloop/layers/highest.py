"""The k highest values of each row and their places, the highest first, of equals the first.

With a batch of any size `lax.top_k` becomes an operation that readers of older StableHLO do not know (TensorFlow 2.21);
`force_path("sorted")` gives the same by a sort, which everybody has.
"""

import jax.numpy as jnp
from jax import Array, lax

from hotloop.layers.paths import Operation

SORTED = "sorted"


def _by_top_k(x: Array, *, k: int) -> tuple[Array, Array]:
    values, places = lax.top_k(x, k)
    return values, places


def _by_sort(x: Array, *, k: int) -> tuple[Array, Array]:
    places = jnp.argsort(x, axis=-1, stable=True, descending=True)[..., :k].astype(jnp.int32)
    return jnp.take_along_axis(x, places, axis=-1), places


highest = Operation(_by_top_k)
highest.register(SORTED, None, _by_sort)
