"""Every kind of kernel that `hotloop-native` has, tried out on small arrays and compared with the layers' own paths.

Run as a module, in a process that may die of it: a CPU may report instructions that it faults on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from hotloop.errors import HotloopError
from hotloop.layers import conv, grouped_conv, native, recurrent
from hotloop.layers.native_recurrent import CELLS
from hotloop.layers.paths import NATIVE, force_path

TOLERANCE = 1e-4  # of a result's largest number
CONVOLUTIONS = (
    {"channels": 64, "filters": 32, "size": 3, "stride": 1, "groups": 1},
    {"channels": 16, "filters": 16, "size": 3, "stride": 2, "groups": 1},
    {"channels": 64, "filters": 64, "size": 3, "stride": 1, "groups": 64},
    {"channels": 32, "filters": 32, "size": 1, "stride": 1, "groups": 4},
)
"""Small ones that oneDNN has different kernels for."""


def try_out() -> None:
    """HotloopError where a kernel gives wrong numbers."""
    for kind in CONVOLUTIONS:
        groups, stride, size = kind["groups"], kind["stride"], kind["size"]
        convolve: Callable[..., Array] = (
            partial(conv.conv2d, stride=stride)
            if groups == 1
            else partial(grouped_conv.grouped_conv2d, groups=groups, stride=stride)
        )
        x, kernel = (
            _noise(2, 14, 14, kind["channels"]),
            _noise(size, size, kind["channels"] // groups, kind["filters"]),
        )
        _compare(f"convolution {kind}", convolve, x, kernel)
    for cell in CELLS:
        layer, init = getattr(recurrent, cell), getattr(recurrent, f"init_{cell}")
        params, x = init(jax.random.key(0), 24, 40), _noise(5, 3, 24)
        _compare(cell, lambda params, x, layer=layer: layer(params, x)[0], params, x)


def _compare(name: str, layer: Callable[..., Array], *arguments: Any) -> None:
    """Outputs and gradients by the native kernels and by the layer's own path; of a layer with two arguments."""

    def loss(*arguments: Any) -> Array:
        return (layer(*arguments) ** 2).sum()

    for function in (layer, jax.grad(loss, (0, 1))):
        with force_path(NATIVE):
            found = jax.jit(function)(*arguments)
        with native.use_native(False):
            expected = jax.jit(function)(*arguments)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if not np.allclose(ours, theirs, rtol=0, atol=TOLERANCE * float(abs(theirs).max())):
                raise HotloopError(f"{name}: wrong numbers on this CPU")


def _noise(*shape: int) -> Array:
    return jax.numpy.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)


if __name__ == "__main__":
    try_out()
