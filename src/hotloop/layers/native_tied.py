"""The passes of a tied layer by the handlers of `hotloop-native`, in the arguments of the operations of `tied.py`."""

import jax
import numpy as np
from jax import Array

from hotloop.layers import native
from hotloop.layers.native import like
from hotloop.layers.paths import Rival


def forward(weights: Array, bias: Array, code: Array) -> tuple[Array, Array]:
    y, following = native.call(
        "hotloop_tied_forward", (_output(weights, code), like(code)), weights, bias, code
    )
    return y, following


def refeed(weights: Array, bias: Array, code: Array, y: Array, *, scale: float) -> tuple[Array, Array, Array]:
    results = (like(y), like(code), jax.ShapeDtypeStruct((), y.dtype))  # type: ignore[no-untyped-call]
    z, back, squares = native.call(
        "hotloop_tied_refeed", results, weights, bias, code, y, scale=np.float32(scale)
    )
    return z, back, squares


def gradient(
    weights: Array, y: Array, z: Array, y_code: Array, z_code: Array, d_following: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    d_bias = jax.ShapeDtypeStruct(weights.shape[:1], weights.dtype)  # type: ignore[no-untyped-call]
    operands = (weights, y, z, y_code, z_code, d_following)
    d_weights, d_bias, back = native.call(
        "hotloop_tied_gradient", (like(weights), d_bias, like(y_code)), *operands, scale=np.float32(scale)
    )
    return d_weights, d_bias, back


def _output(weights: Array, code: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(weights), len(code)), weights.dtype)  # type: ignore[no-untyped-call]


FORWARD = Rival("tied forward", "hotloop_tied_forward", forward)
REFEED = Rival("tied refeed", "hotloop_tied_refeed", refeed)
GRADIENT = Rival("tied gradient", "hotloop_tied_gradient", gradient)
