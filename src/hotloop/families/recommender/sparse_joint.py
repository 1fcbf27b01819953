"""Joint re-feeding on a CPU with sparse ratings: the loss of `model` and its gradient, written out.

Of the eleven products with all items that an update makes by automatic differentiation, two have the ratings for an
operand, which are a four-hundredth full, and four are parts of one weight gradient. Here the ratings stay sparse
and the other parts are one product over both passes. The middle layers are differentiated as usual. It knows the
network's shape and nothing of optimisers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.families.recommender import autoencoder
from hotloop.families.recommender.batches import Entries, SparseBatch
from hotloop.layers.dense import column_sums, product, with_bias

Params = Any
SPARSE_SHARE = 0.01
"""The share of rated places up to which a sparse product beats the dense one."""


def joint_gradient(
    params: Params, ratings: SparseBatch, keeps: Sequence[Array | float], scale: float
) -> tuple[Params, tuple[Array, Array]]:
    """What `jax.grad` of the joint loss times `scale` gives, for a SELU network; loss and masked error unscaled."""
    into = params["encoder"][0]["w"]
    tied = "w" not in params["decoder"][-1]
    out_of = into.T if tied else params["decoder"][-1]["w"]
    y, y_code, y_back = _through(params, _rated_product(ratings, into), out_of, keeps[0])
    z, z_code, z_back = _through(params, product(y, into), out_of, keeps[1])
    rated = jnp.maximum(ratings.total, 1)
    masked, dense = _squared_error(ratings, y) / rated, jnp.square(z - y).mean()

    apart = (2 * scale / y.size) * (z - y)
    dz = apart * autoencoder.selu_slope(z)
    inner_z, dz_first = z_back(product(dz, out_of.T))
    dy = _with_errors(ratings, product(dz_first, into.T) - apart, y, 2 * scale / rated)
    dy = dy * autoencoder.selu_slope(y)
    inner_y, dy_first = y_back(product(dy, out_of.T))
    last = {"b": column_sums(dz) + column_sums(dy)}
    if tied:
        d_into = _weights((dz, y, dy), (z_code, dz_first, y_code))
    else:
        d_into = _weights((y,), (dz_first,))
        last["w"] = _weights((z_code, y_code), (dz, dy))
    inner = jax.tree.map(jnp.add, inner_z, inner_y)
    d_first = {"w": _with_outer(ratings, d_into, dy_first), "b": inner["first_bias"]}
    gradients = {"encoder": (d_first, *inner["encoder"]), "decoder": (*inner["decoder"], last)}
    return gradients, (masked + dense, masked)


def _through(
    params: Params, before: Array, out_of: Array, keep: Array | float
) -> tuple[Array, Array, Callable[[Array], Any]]:
    """From the first layer's product to the predictions: these, what the last layer was given, and the way back.

    The way back gives the gradients of all but the widest weights, and that of `before`.
    """

    def middle(inner: Params, before: Array) -> Array:
        x = autoencoder.selu(with_bias(before, inner["first_bias"]))
        return autoencoder.run_layers(inner["encoder"], inner["decoder"], x, keep, autoencoder.selu)

    own = params["encoder"][1:], params["decoder"][:-1]
    inner = {"first_bias": params["encoder"][0]["b"], "encoder": own[0], "decoder": own[1]}
    code, back = jax.vjp(middle, inner, before)
    return autoencoder.selu(product(code, out_of) + params["decoder"][-1]["b"]), code, back


def _weights(inputs: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """The sum of the weight gradients of several uses, as one product."""
    return jnp.concatenate(inputs).T @ jnp.concatenate(gradients)


def _rated_product(ratings: SparseBatch, weights: Array) -> Array:
    """ratings @ weights."""

    def add(total: Array, chunk: Entries) -> Array:
        mine = chunk.row == jnp.arange(len(ratings.users), dtype=jnp.int32)[:, None]
        return total + jnp.where(mine, chunk.value, 0) @ weights[chunk.column]

    return ratings.fold(add, jnp.zeros((len(ratings.users), weights.shape[1]), weights.dtype))


def _squared_error(ratings: SparseBatch, predictions: Array) -> Array:
    def add(total: Array, chunk: Entries) -> Array:
        errors = predictions[chunk.row, chunk.column] - chunk.value
        return total + jnp.where(chunk.inside, jnp.square(errors), 0).sum()

    return ratings.fold(add, jnp.zeros((), predictions.dtype))


def _with_errors(ratings: SparseBatch, into: Array, predictions: Array, factor: Array) -> Array:
    """`into` with the errors times a factor added where there are ratings."""

    def add(into: Array, chunk: Entries) -> Array:
        errors = predictions[chunk.row, chunk.column] - chunk.value
        return into.at[chunk.row, chunk.column].add(jnp.where(chunk.inside, factor * errors, 0))

    return ratings.fold(add, into)


def _with_outer(ratings: SparseBatch, into: Array, dy: Array) -> Array:
    """`into` + ratings.T @ dy."""

    def add(into: Array, chunk: Entries) -> Array:
        return into.at[chunk.column].add(chunk.value[:, None] * dy[chunk.row])

    return ratings.fold(add, into)
