"""hotloop-native's batch norms, with the sum and the ReLU that follow one, and their gradients against float64."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.layers import native_norm
from native_calls import child, draw

EPSILON = 1e-3  # Keras' for a norm
PIXELS = (0, 1, 2)
FORWARD = ("y", "mean", "variance")
BACKWARD = ("dx", "dscale", "doffset", "dresidual")
ENDINGS = tuple(product((False, True), repeat=2))
"""Whether something is added, and whether there is a ReLU."""


class Norm:
    """A norm with everything that its handlers are given, drawn at random."""

    def __init__(self, shape, has_residual, relu):
        self.x, self.dy, residual = draw(0, shape, shape, shape)
        self.scale, self.offset, self.dmean, self.dvariance = draw(1, *[shape[3:]] * 4)
        self.residual, self.relu = (residual,) if has_residual else (), relu
        # Where rounding decides on which side of the ReLU's kink a number lies, no gradient comes in.
        self.dy[abs(self.before_relu()) < 1e-5] = 0

    def before_relu(self):
        return self.unit() * self.scale + self.offset + sum(map(np.float64, self.residual))

    def deviation(self):
        return np.sqrt(np.float64(self.x).var(PIXELS) + EPSILON)

    def unit(self):
        x = np.float64(self.x)
        return (x - x.mean(PIXELS)) / self.deviation()

    def forward_reference(self):
        x, y = np.float64(self.x), self.before_relu()
        return np.maximum(y, 0) if self.relu else y, x.mean(PIXELS), x.var(PIXELS)

    def passed(self):
        """The gradient of what the ReLU was given."""
        dy = np.float64(self.dy)
        return np.where(self.before_relu() > 0, dy, 0) if self.relu else dy

    def backward_reference(self):
        unit, passed = self.unit(), self.passed()
        dunit, centred = passed * self.scale, np.float64(self.x) - np.float64(self.x).mean(PIXELS)
        standard = dunit - dunit.mean(PIXELS) - unit * (dunit * unit).mean(PIXELS)
        of_statistics = (self.dmean + 2.0 * self.dvariance * centred) / unit[..., 0].size
        dx = standard / self.deviation() + of_statistics
        return dx, (passed * unit).sum(PIXELS), passed.sum(PIXELS), *([passed] if self.residual else [])

    def run(self):
        """Both passes by the handlers; the backward one is given the reference's outputs."""
        y, *statistics = map(np.float32, self.forward_reference())
        parameters = (self.x, self.scale, self.offset)
        saved = (*parameters, *statistics, *([y] if self.residual else []))
        return (
            call_forward(*parameters, *self.residual, relu=self.relu),
            call_backward(self.dy, self.dmean, self.dvariance, *saved, relu=self.relu),
        )


def call_forward(*arrays, relu):
    return native_norm.forward(*map(jnp.asarray, arrays), epsilon=EPSILON, relu=relu)


def call_backward(*arrays, relu):
    return native_norm.backward(*map(jnp.asarray, arrays), epsilon=EPSILON, relu=relu)


def assert_close(ours, expected, what, size=1.0):
    """Channel by channel: of the largest value, and of `size` where that is larger, since a lone sum may cancel."""
    width = expected.shape[-1]
    error, largest = (abs(each).reshape(-1, width).max(0) for each in (ours - expected, expected))
    off = np.max(error / np.maximum(np.maximum(1, size), largest))
    assert off < 1e-5, f"{what} is off by {off:.1e} of the largest value"


def check(norm, forward, backward):
    for what, found, right in zip(FORWARD, forward, norm.forward_reference(), strict=True):
        assert_close(found, right, what)
    passed, unit, slope = norm.passed(), norm.unit(), abs(norm.scale) / norm.deviation()
    sizes = (
        slope * abs(passed).max(PIXELS),
        np.linalg.norm((passed * unit).reshape(-1, slope.size), axis=0),
        np.linalg.norm(passed.reshape(-1, slope.size), axis=0),
        1.0,
    )
    found = zip(BACKWARD[: len(backward)], backward, norm.backward_reference(), strict=True)
    for (what, ours, right), size in zip(found, sizes, strict=False):
        assert_close(ours, right, what, size)


def check_all(shape):
    norms = [Norm(shape, *ending) for ending in ENDINGS]
    run_all = jax.jit(lambda: [norm.run() for norm in norms])
    for norm, found in zip(norms, run_all(), strict=True):
        check(norm, *found)


def shapes(largest):
    pixels = st.integers(1, largest)
    return st.tuples(st.integers(1, 3), pixels, pixels, st.sampled_from((1, 2, 3, 8, 15, 16, 19, 33, 130)))


@settings(max_examples=3)
@given(shapes(9))
def test_every_pass_is_the_mathematics_of_it(shape):
    check_all(shape)


@pytest.mark.slow
@settings(max_examples=100)
@given(shapes(40))
def test_every_pass_is_the_mathematics_of_it_over_many_shapes(shape):
    check_all(shape)


SHAPES = {
    "one pixel of one channel": (1, 1, 1, 1),
    "one pixel": (1, 1, 1, 19),
    "fewer channels than a vector has": (2, 5, 4, 3),
    "no whole vectors": (2, 7, 6, 19),
    "several vectors and a rest": (2, 5, 5, 130),
    "more pixels than are summed in floats": (2, 17, 19, 5),
    "rows that threads cannot share evenly": (1, 57, 101, 19),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_end_within_a_vector_a_sum_or_a_threads_part(name):
    check_all(SHAPES[name])


def test_the_reference_is_what_jax_derives():
    for ending in ENDINGS:
        norm = Norm((2, 4, 3, 5), *ending)

        def plain(x, scale, offset, *residual, relu=norm.relu):
            mean, variance = x.mean(PIXELS), x.var(PIXELS)
            y = (x - mean) / jnp.sqrt(variance + EPSILON) * scale + offset + sum(residual)
            return jax.nn.relu(y) if relu else y, mean, variance

        with jax.enable_x64(True):
            given_to_it = map(np.float64, (norm.x, norm.scale, norm.offset, *norm.residual))
            outputs, back = jax.vjp(plain, *given_to_it)
            gradients = back(tuple(map(np.float64, (norm.dy, norm.dmean, norm.dvariance))))
        expected = (*norm.forward_reference(), *norm.backward_reference())
        for ours, theirs in zip(expected, (*outputs, *gradients), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def normalise(x, *residual, relu=False):
    ones = np.ones(x.shape[3], np.float32)
    return call_forward(x, ones, 0 * ones, *residual, relu=relu)


def test_a_large_common_offset_leaves_the_variance_its_digits():
    x = draw(0, (2, 30, 30, 19))[0] + np.float32(1e3)
    y, mean, variance = normalise(x)
    exact = np.float64(x)
    right = exact.mean(PIXELS), exact.var(PIXELS)
    np.testing.assert_allclose(mean, right[0], rtol=1e-7)
    np.testing.assert_allclose(variance, right[1], rtol=1e-5)
    # A mean in float32 is half a spacing off at most, and so is each of the outputs by it.
    expected = (exact - right[0]) / np.sqrt(right[1] + EPSILON)
    assert abs(y - expected).max() < np.spacing(np.float32(1e3))


def test_corners_that_are_far_from_the_other_pixels_leave_the_variance_its_digits():
    x = draw(0, (2, 40, 40, 19))[0] + np.float32(1e3)
    x[:, 0, 0] = 0
    np.testing.assert_allclose(normalise(x)[2], np.float64(x).var(PIXELS), rtol=1e-5)


@pytest.mark.parametrize("relu", [False, True])
def test_what_is_no_number_stays_none(relu):
    x, residual = draw(0, (2, 3, 3, 19), (2, 3, 3, 19))
    x[0, 1, 2, 17] = residual[1, 2, 0, 4] = np.nan
    y, mean, variance = normalise(x, residual, relu=relu)
    expected = np.zeros(x.shape, bool)
    expected[..., 17] = expected[1, 2, 0, 4] = True
    np.testing.assert_array_equal(np.isnan(y), expected)
    for moment in (mean, variance):
        np.testing.assert_array_equal(np.isnan(moment), np.arange(19) == 17)


def test_the_same_images_have_the_same_bits_every_time():
    norm = Norm((2, 56, 50, 19), has_residual=True, relu=True)
    run = jax.jit(norm.run)
    first = run()
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(), first)


def call(target, results, *operands):
    found = jax.ffi.ffi_call(
        f"hotloop_norm_{target}", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    )
    arrays = (jnp.zeros(shape) for shape in operands)
    return found(*arrays, epsilon=np.float32(EPSILON), relu=True)


IMAGES, CHANNELS, NONE = (2, 3, 3, 5), (5,), (0,)
OPERANDS = {
    "forward": ((IMAGES, CHANNELS, CHANNELS), (IMAGES, CHANNELS, CHANNELS, IMAGES)),
    "backward": (
        (IMAGES, IMAGES, CHANNELS, CHANNELS),
        (IMAGES, IMAGES, IMAGES, *[CHANNELS] * 6),
    ),
}


def refused(match, target, results, operands):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as caught:
        jax.block_until_ready(call(target, results, *operands))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("target", OPERANDS)
def test_sizes_that_do_not_agree_are_refused(target):
    results, operands = OPERANDS[target]
    jax.block_until_ready(call(target, results, *operands))
    other = {IMAGES: (2, 3, 4, 5), CHANNELS: (6,)}
    for i, shape in enumerate(results):
        refused("do not agree", target, (*results[:i], other[shape], *results[i + 1 :]), operands)
    for i, shape in enumerate(operands):
        refused("do not agree", target, results, (*operands[:i], other[shape], *operands[i + 1 :]))


@pytest.mark.parametrize("target", OPERANDS)
@pytest.mark.parametrize("empty", [(0, 3, 3, 5), (2, 0, 3, 5), (2, 3, 3, 0)])
def test_no_images_are_refused(target, empty):
    results, operands = OPERANDS[target]
    refused("no images", target, results, [empty if shape == IMAGES else shape for shape in operands])


OLDER = """
import test_native_norm as t
for shape in t.SHAPES.values():
    t.check_all(shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_older_processors_have_the_same_mathematics(isa):
    child(OLDER, HOTLOOP_NATIVE_ISA=isa)
