"""Grouped convolution: both CPU paths against the built-in one, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.layers import grouped_conv, native
from hotloop.layers.conv import LAYOUT, padding_of
from hotloop.layers.grouped_conv import grouped_conv2d
from hotloop.layers.paths import force_path

CPU_PATH = "taps or bundles"


def built_in(x, kernel, groups, stride):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups
    )


def arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def compare_with_built_in(size, groups, inputs, outputs, k, stride):
    """`inputs` and `outputs` are channels a group."""
    with jax.enable_x64(True), force_path(CPU_PATH):
        x, kernel = arrays(0, (2, *size, groups * inputs), (k, k, inputs, groups * outputs))
        (dy,) = arrays(1, (2, *(-(-side // stride) for side in size), groups * outputs))

        def value_and_gradients(convolve, x, kernel, dy):
            y, back = jax.vjp(lambda x, kernel: convolve(x, kernel, groups, stride), x, kernel)
            return y, *back(dy)

        both = jax.jit(
            lambda *a: (value_and_gradients(grouped_conv2d, *a), value_and_gradients(built_in, *a))
        )
        for ours, theirs in zip(*both(x, kernel, dy), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


TAPS = [
    ((7, 9), 8, 1, 1, 3, 1),  # depthwise
    ((12, 9), 4, 1, 1, 4, 3),  # depthwise, even kernel, stride
    ((6, 8), 4, 4, 4, 3, 1),
    ((7, 9), 8, 1, 2, 3, 2),  # more filters out than in
    ((10, 11), 3, 2, 4, 2, 3),
    ((9, 6), 2, 4, 2, 1, 2),
]
BUNDLES = [
    ((6, 5), 2, 8, 8, 3, 1),
    ((7, 7), 4, 4, 4, 5, 1),  # wide kernels, several groups a bundle
    ((10, 10), 4, 4, 4, 5, 3),
    ((7, 8), 4, 8, 4, 3, 2),  # groups of 8 go two to a bundle
    ((5, 5), 3, 6, 2, 2, 1),  # a number of groups that bundles cannot share evenly
    ((5, 4), 1, 16, 4, 1, 1),
    ((8, 8), 2, 4, 16, 3, 3),
    ((9, 8), 8, 2, 6, 7, 2),
]


@pytest.mark.parametrize(
    ("size", "groups", "inputs", "outputs", "k", "stride"),
    [
        *TAPS[:3],
        *BUNDLES[:4],
        *[pytest.param(*each, marks=pytest.mark.slow) for each in TAPS[3:] + BUNDLES[4:]],
    ],
)
def test_values_and_gradients_equal_the_built_in_ones(size, groups, inputs, outputs, k, stride):
    compare_with_built_in(size, groups, inputs, outputs, k, stride)


@pytest.mark.parametrize(("cases", "taps"), [(TAPS, True), (BUNDLES, False)])
def test_the_cases_reach_the_path_that_they_are_meant_for(cases, taps):
    for _, groups, inputs, outputs, k, _ in cases:
        x, kernel = jnp.zeros((1, k, k, groups * inputs)), jnp.zeros((k, k, inputs, groups * outputs))
        with force_path(CPU_PATH):
            traced = str(jax.make_jaxpr(partial(grouped_conv2d, groups=groups))(x, kernel))
        assert ("conv_general_dilated" in traced) != taps


def test_the_kernel_gradient_of_bundles_sums_over_nothing_but_pixels():
    """A sum over a bundle's groups goes to YNNPACK for wide kernels, and that ends the process on some CPUs."""
    x, kernel, dy = arrays(0, (1, 7, 7, 16), (5, 5, 4, 16), (1, 7, 7, 16), dtype=np.float32)
    pads = padding_of(x, kernel, 1, "SAME")
    with force_path(CPU_PATH), native.use_native(False):
        gradient = jax.jit(partial(grouped_conv.kernel_gradient, groups=4, stride=1, pads=pads))
        text = gradient.trace(x, kernel, dy).lower(lowering_platforms=("cpu",)).as_text()
    assert "dot_general" in text
    assert "reduce" not in text


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    height=st.integers(3, 8), width=st.integers(3, 8), groups=st.integers(1, 5), inputs=st.integers(1, 3),
    outputs=st.integers(1, 3), k=st.integers(1, 3), stride=st.integers(1, 3),
)  # fmt: skip
def test_any_geometry_equals_the_built_in_one(height, width, groups, inputs, outputs, k, stride):
    compare_with_built_in((height, width), groups, inputs, outputs, k, stride)


def test_updates_inside_a_scan_equal_updates_outside():
    x, kernel = arrays(0, (2, 6, 6, 8), (3, 3, 2, 8), dtype=np.float32)

    def update(kernel, _):
        return kernel - 0.01 * jax.grad(lambda k: (grouped_conv2d(x, k, 4) ** 2).mean())(kernel), None

    inside = jax.lax.scan(update, kernel, length=3)[0]
    for _ in range(3):
        kernel = jax.jit(update)(kernel, None)[0]
    np.testing.assert_allclose(inside, kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 32])
@pytest.mark.parametrize(("dtype", "limit"), [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_sixteen_bits_round_the_result_not_the_sum(groups, dtype, limit):
    x, kernel = arrays(0, (1, 6, 6, 32), (3, 3, 32 // groups, 32), dtype=np.float32)
    x, kernel = x.astype(dtype), kernel.astype(dtype)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradient(convolve, x, kernel):
        y, back = jax.vjp(lambda kernel: convolve(x, kernel, groups, 1), kernel)
        return y, *back(jnp.ones_like(y))

    wide = (x.astype(jnp.float32), kernel.astype(jnp.float32))
    results = zip(
        value_and_gradient(grouped_conv2d, x, kernel), value_and_gradient(built_in, *wide), strict=True
    )
    for ours, exact in results:
        assert ours.dtype == dtype
        scale = float(jnp.abs(exact).max())
        assert float(jnp.abs(ours - exact).max()) <= limit * scale
