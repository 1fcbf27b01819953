"""The fully connected layer: parameters and product. It knows nothing of losses, activations or updates."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from hotloop.layers.product import product

Params = dict[str, Array]


def init(key: Array, inputs: int, outputs: int, dtype: DTypeLike = jnp.float32) -> Params:
    """Glorot-uniform kernel [I, O] and a zero bias [O], drawn in float32 and then rounded to `dtype`."""
    limit = (6.0 / (inputs + outputs)) ** 0.5
    kernel = jax.random.uniform(key, (inputs, outputs), jnp.float32, -limit, limit)
    return {"kernel": kernel.astype(dtype), "bias": jnp.zeros(outputs, dtype)}


def dense(params: Params, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
    """`x @ kernel + bias`, summed in float32 (or float64) and rounded once to the type of `x`."""
    return (product(x, params["kernel"]) + params["bias"]).astype(x.dtype)
