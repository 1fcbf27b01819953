"""Grouped convolutions as sums that a GPU's compiler fuses: their values, and where they are taken."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hotloop.layers import depthwise
from hotloop.layers.grouped_conv import SMALL_IMAGES, grouped_conv2d

# images, height, width, groups, channels and filters of a group, kernel, stride
SHAPES = [
    (2, 9, 8, 4, 1, 1, 3, 1),
    (2, 9, 8, 4, 2, 3, 3, 2),
    (1, 7, 7, 3, 1, 2, 5, 2),
    (1, 6, 5, 2, 4, 4, 3, 1),
]


def case(n, h, w, groups, inputs, outputs, size, stride):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, h, w, groups * inputs))
    kernel = rng.standard_normal((size, size, inputs, groups * outputs))
    pads = tuple(lax.padtype_to_pads((h, w), (size, size), (stride, stride), "SAME"))
    return x, kernel, {"groups": groups, "stride": stride, "pads": pads}


def exact(x, kernel, groups, stride, pads):
    """Output, cotangent and both gradients, by XLA's own convolution in float64."""
    with jax.enable_x64(True):

        def convolve(x, kernel):
            return lax.conv_general_dilated(
                x,
                kernel,
                (stride, stride),
                pads,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        y, back = jax.vjp(convolve, jnp.asarray(x), jnp.asarray(kernel))
        dy = np.random.default_rng(1).standard_normal(y.shape)
        return jax.tree.map(np.asarray, (y, dy, *back(jnp.asarray(dy))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(jnp.float32, 1e-6), (jnp.float16, 2e-3), (jnp.bfloat16, 1.6e-2)],
    ids=["float32", "float16", "bfloat16"],
)
def test_values_and_gradients_are_those_of_float64(shape, dtype, bound):
    x, kernel, settings = case(*shape)
    y, dy, dx, dk = exact(x, kernel, **settings)
    x16, kernel16, dy16 = (jnp.asarray(array, dtype) for array in (x, kernel, dy))

    @jax.jit
    def run(x, kernel, dy):
        return (
            depthwise.forward(x, kernel, **settings),
            depthwise.input_gradient(x, kernel, dy, **settings),
            depthwise.kernel_gradient(x, kernel, dy, **settings),
        )

    found = run(x16, kernel16, dy16)
    for ours, theirs in zip(found, (y, dx, dk), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert np.linalg.norm(np.asarray(ours, np.float64) - theirs) < bound * np.linalg.norm(theirs)


def convolutions(images, inputs=1, groups=64, gradients=False):
    """How many are left in a program for NVIDIA's GPUs."""
    x = jax.ShapeDtypeStruct((images, 56, 56, groups * inputs), jnp.float16)
    kernel = jax.ShapeDtypeStruct((3, 3, inputs, groups * inputs), jnp.float16)

    def forward(x, kernel):
        return grouped_conv2d(x, kernel, groups).astype(jnp.float32).sum()

    program = jax.grad(forward, (0, 1)) if gradients else forward
    text = jax.jit(program).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    # By its numbering of the dimensions: a gradient as jax derives it has the output beside it, which nothing reads.
    of_gradients = r"stablehlo\.convolution.*(x\[0, 1, o, i\]|= \[f, 0, 1, b\])"
    return len(re.findall(of_gradients if gradients else r"stablehlo\.convolution", text))


def test_a_gpu_takes_them_for_small_images_of_few_channels():
    assert convolutions(1) == 0
    assert convolutions(1, gradients=True) == 0
    assert convolutions(1, inputs=4, groups=16) == 0
    assert (
        convolutions(1, inputs=4, groups=16, gradients=True) == 2
    )  # of groups of four the library's are faster
    assert convolutions(1, inputs=8, groups=8) == 1
    assert convolutions(SMALL_IMAGES // (56 * 56 * 64) + 1) == 1


def test_a_batch_of_any_size_can_be_exported():
    kernel = jnp.ones((3, 3, 1, 4))
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8, 8, 4), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: grouped_conv2d(x, kernel, 4)), platforms=["cpu", "cuda"])(
        x
    )
    assert exported.call(jnp.ones((3, 8, 8, 4))).shape == (3, 8, 8, 4)


def test_no_images_give_no_results():
    y = jax.jit(lambda x: grouped_conv2d(x, jnp.ones((3, 3, 1, 4)), 4))(jnp.zeros((0, 8, 8, 4)))
    assert y.shape == (0, 8, 8, 4)
