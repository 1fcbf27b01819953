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
from hotloop.layers import conv, grouped_conv, native, native_bernoulli, norm, recurrent, tied
from hotloop.layers.native_recurrent import CELLS
from hotloop.layers.paths import NATIVE, force_path

TOLERANCE = 1e-4  # of a result's largest number
CONVOLUTIONS = (
    {"channels": 64, "filters": 32, "size": 3, "stride": 1, "groups": 1},
    {"channels": 16, "filters": 16, "size": 3, "stride": 2, "groups": 1},
    {"channels": 64, "filters": 64, "size": 3, "stride": 1, "groups": 64},
    {"channels": 32, "filters": 32, "size": 1, "stride": 1, "groups": 4},
    {"channels": 32, "filters": 32, "size": 3, "stride": 1, "groups": 8},
    {"channels": 32, "filters": 32, "size": 3, "stride": 2, "groups": 16},
)
"""Small ones that there are different kernels for, oneDNN's and for groups of 2 and 4 channels our own."""


def try_out() -> None:
    """HotloopError where a kernel gives wrong numbers."""
    for kind in CONVOLUTIONS:
        _try_convolution(**kind)
    _try_endings()
    if native.has_target("hotloop_bernoulli_gradient"):  # an older package has neither
        _try_network()
    if native.has_target("hotloop_tied_forward"):
        _try_tied_layers()
    for cell in CELLS:
        layer, init = getattr(recurrent, cell), getattr(recurrent, f"init_{cell}")
        params, x = init(jax.random.key(0), 24, 40), _noise(5, 3, 24)
        _compare_with_gradients(cell, lambda params, x, layer=layer: layer(params, x)[0], params, x)


def _try_convolution(channels: int, filters: int, size: int, stride: int, groups: int) -> None:
    convolve: Callable[..., Array] = (
        partial(conv.conv2d, stride=stride)
        if groups == 1
        else partial(grouped_conv.grouped_conv2d, groups=groups, stride=stride)
    )
    x, kernel = _noise(2, 14, 14, channels), _noise(size, size, channels // groups, filters)
    name = f"convolution of {x.shape} by {kernel.shape}, stride {stride}"
    _compare_with_gradients(name, convolve, x, kernel)


def _try_endings() -> None:
    """What ends a residual block: a norm or a bias, the sum and the ReLU. Biases are of inference alone."""
    x, residual, vector = _noise(2, 14, 14, 40), _noise(2, 14, 14, 40)[::-1], _noise(40)
    settings: dict[str, Any] = {"stride": 1, "pads": ((1, 1), (1, 1)), "relu": True}
    convolve = partial(conv.conv2d_biased, **settings)
    for added in (None, residual):
        _compare("convolution with a bias", convolve, x, _noise(3, 3, 40, 40), vector, added)
    _compare_with_gradients(
        "norm",
        lambda params, images: norm.batch_norm_joined(images[0], *params, images[1])[0],
        (vector, vector[::-1]),
        (x, residual),
    )


def _try_network() -> None:
    """With Bernoulli outputs: its log-likelihood and the gradient in its input, against automatic differentiation."""
    images, z = (_noise(5, 70) > 0).astype(np.float32), _noise(5, 10)
    inner, outer, bias = _noise(10, 40), _noise(40, 70), _noise(70)

    def likelihood(z: Array) -> Array:
        logits = jax.nn.relu(z @ inner) @ outer + bias
        return (images * logits - jax.nn.softplus(logits)).sum(-1)

    layers = (inner, jax.numpy.zeros(40), inner.T, outer, bias, outer.T)
    found = jax.jit(native_bernoulli.likelihood_and_gradient)(images, z, *layers)
    _check("network", found, (likelihood(z), jax.grad(lambda z: likelihood(z).sum())(z)))


def _try_tied_layers() -> None:
    weights, bias, code, y = _noise(130, 40), _noise(130), _noise(5, 40), _noise(130, 5)
    name, codes = "tied layers", (code, code[::-1], code)
    _compare(name, tied.forward, weights, bias, code)
    _compare(name, partial(tied.refeed, scale=0.1), weights, bias, code, y)
    _compare(name, partial(tied.gradient, scale=0.1), weights, y, y[::-1], *codes)


def _compare_with_gradients(name: str, layer: Callable[..., Array], *arguments: Any) -> None:
    """Outputs and gradients of a layer with two arguments."""

    def loss(*arguments: Any) -> Array:
        return (layer(*arguments) ** 2).sum()

    _compare(name, layer, *arguments)
    _compare(name, jax.grad(loss, (0, 1)), *arguments)


def _compare(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """What the native kernels give and what the layer's own path does."""
    with force_path(NATIVE):
        found = jax.jit(partial(function))(
            *arguments
        )  # a new function: one that jit knows would not be traced again
    with native.use_native(False):
        expected = jax.jit(partial(function))(*arguments)
    _check(name, found, expected)


def _check(name: str, found: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not np.allclose(ours, theirs, rtol=0, atol=TOLERANCE * float(abs(theirs).max())):
            raise HotloopError(f"{name}: wrong numbers on this CPU")


def _noise(*shape: int) -> Array:
    return jax.numpy.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)


if __name__ == "__main__":
    try_out()
