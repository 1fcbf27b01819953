"""hotloop-native's convolutions and their gradients against float64, over shapes that layers may have."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from native_calls import Convolution, child, draw

KERNELS = (1, 3, 5, 7)


def assert_close(ours, expected, what):
    # Of the largest value, and of one product of two drawn numbers where that is larger: a lone sum may cancel.
    error = np.max(np.abs(ours - expected)) / max(1, np.max(np.abs(expected)))
    assert error < 1e-5, f"{what} is off by {error:.1e} of the largest value"


def check_all(conv, x_shape, kernel_shape):
    dy_shape = conv.size_of_result(x_shape, kernel_shape)
    x, kernel, dy, bias, residual = draw(0, x_shape, kernel_shape, dy_shape, kernel_shape[3:], dy_shape)
    y, dx, dkernel = conv.reference(x, kernel, dy)

    @jax.jit
    def every_pass(x, kernel, dy, bias, residual):
        biased = (conv.bias(x, kernel, bias, relu) for relu in (False, True))
        sums = (conv.bias_sum(x, kernel, bias, residual, relu) for relu in (False, True))
        return conv.forward(x, kernel), *biased, *sums, *conv.gradients(x, kernel, dy)

    endings = (
        total
        for added in (bias, np.float64(bias) + residual)
        for total in (y + added, np.maximum(y + added, 0))
    )
    for what, ours, right in zip(
        ("y", "y + b", "relu", "y + b + r", "relu of the sum", "dx", "dkernel"),
        every_pass(x, kernel, dy, bias, residual),
        (y, *endings, dx, dkernel),
        strict=True,
    ):
        assert_close(ours, right, what)


@st.composite
def cases(draw_from):
    """A convolution with the shapes of its image and kernel; every result has a pixel at least."""
    kernel = [draw_from(st.sampled_from(KERNELS)) for _ in range(2)]
    pads = [draw_from(st.integers(0, kernel[i // 2])) for i in range(4)]
    smallest = [max(1, k - pads[2 * i] - pads[2 * i + 1]) for i, k in enumerate(kernel)]
    size = [draw_from(st.integers(least, least + 13)) for least in smallest]
    groups = draw_from(st.sampled_from((1, 1, 2, 3, 8, 16, 32)))
    inputs, outputs = (draw_from(st.sampled_from((1, 1, 2, 3, 4, 8, 16, 17))) for _ in range(2))
    strides = (draw_from(st.integers(1, 3)), draw_from(st.integers(1, 3)))
    x_shape = (draw_from(st.integers(1, 3)), *size, groups * inputs)
    return Convolution(strides, tuple(pads), groups), x_shape, (*kernel, inputs, groups * outputs)


@settings(max_examples=3)
@given(cases())
def test_every_pass_is_the_mathematics_of_it(case):
    check_all(*case)


@pytest.mark.slow
@settings(max_examples=150)
@given(cases())
def test_every_pass_is_the_mathematics_of_it_over_many_shapes(case):
    check_all(*case)


SAME = (1, 1, 1, 1)
LAYERS = {
    "dense 3x3": (Convolution(pads=SAME), (2, 9, 8, 16), (3, 3, 16, 32)),
    "stride and uneven pads": (Convolution((2, 2), (0, 1, 0, 1)), (2, 8, 8, 16), (3, 3, 16, 32)),
    "first of a ResNet": (Convolution((2, 2), (2, 3, 2, 3)), (2, 20, 20, 3), (7, 7, 3, 16)),
    "shortcut": (Convolution((2, 2)), (2, 8, 8, 16), (1, 1, 16, 32)),
    "depthwise": (Convolution(pads=SAME, groups=64), (1, 12, 12, 64), (3, 3, 1, 64)),
    "depthwise of no whole vectors": (Convolution(pads=SAME, groups=19), (1, 9, 9, 19), (3, 3, 1, 19)),
    "depthwise, two filters each": (Convolution(pads=SAME, groups=16), (1, 9, 9, 16), (3, 3, 1, 32)),
    "groups of 4": (Convolution(pads=SAME, groups=8), (2, 9, 9, 32), (3, 3, 4, 32)),
    "groups of 4, rows that threads cannot share": (
        Convolution(pads=SAME, groups=32),
        (1, 27, 29, 128),
        (3, 3, 4, 128),
    ),
    "groups of 4, stride and uneven pads": (
        Convolution((2, 3), (0, 2, 3, 1), 8),
        (2, 20, 33, 32),
        (3, 5, 4, 32),
    ),
    "groups of 2, few columns": (Convolution((1, 1), (1, 0, 2, 2), 16), (3, 4, 5, 32), (2, 5, 2, 32)),
    "groups, 5x5": (Convolution((1, 1), (2, 2, 2, 2), 4), (2, 9, 9, 16), (5, 5, 4, 32)),
    "groups, 7x7, stride": (Convolution((2, 2), (3, 3, 3, 3), 2), (2, 13, 13, 32), (7, 7, 16, 32)),
    "one pixel": (Convolution(), (1, 1, 1, 1), (1, 1, 1, 1)),
    "more padding than kernel": (Convolution((1, 1), (3, 2, 2, 4)), (1, 4, 4, 8), (1, 1, 8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_networks_have(name):
    check_all(*LAYERS[name])


@example((Convolution((2, 3), (2, 0, 1, 3), 2), (2, 7, 8, 4), (3, 5, 2, 6)))
@settings(max_examples=1)
@given(cases())
def test_the_reference_is_what_lax_computes(case):
    conv, x_shape, kernel_shape = case
    x, kernel, dy = draw(0, x_shape, kernel_shape, conv.size_of_result(x_shape, kernel_shape))
    top, bottom, left, right = conv.pads

    def lax_conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            conv.strides,
            ((top, bottom), (left, right)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=conv.groups,
        )

    with jax.enable_x64(True):
        y, back = jax.vjp(lax_conv, *map(np.float64, (x, kernel)))
        theirs = (y, *back(np.float64(dy)))
    for ours, right in zip(conv.reference(x, kernel, dy), theirs, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-12, atol=1e-12)


def test_gradients_inside_a_scan_use_the_carried_values():
    conv = Convolution(pads=SAME)
    x, kernel = draw(0, (2, 6, 6, 8), (3, 3, 8, 8))

    def turn(kernel, _):
        y = conv.forward(x, kernel)
        return kernel - 0.01 * conv.gradients(x, kernel, y)[1], y

    last, _ = jax.jit(lambda k: jax.lax.scan(turn, k, length=3))(kernel)
    expected = np.float64(kernel)
    for _ in range(3):
        y = conv.reference(x, expected, np.zeros((2, 6, 6, 8)))[0]
        expected = expected - 0.01 * conv.reference(x, expected, y)[2]
    assert_close(last, expected, "the kernel after three steps")


OLDER = """
import test_native_convolution as tests

for name in tests.LAYERS:
    if name.startswith("groups of"):
        tests.check_all(*tests.LAYERS[name])
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_small_groups_have_the_same_mathematics_on_older_processors(isa):
    child(OLDER, HOTLOOP_NATIVE_ISA=isa)
