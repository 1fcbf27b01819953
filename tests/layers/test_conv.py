"""The convolution with its own backward pass: values, gradients, and the layout that stays fast in a loop."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from hotloop.errors import OptionError
from hotloop.layers import conv, native
from hotloop.layers.conv import LAYOUT, conv2d, conv2d_biased, conv2d_padded
from hotloop.layers.grouped_conv import grouped_conv2d
from hotloop.layers.paths import force_path


def built_in(x, kernel, stride, padding):
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=LAYOUT)


def arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def compare_with_built_in(batch, height, width, inputs, outputs, kh, kw, stride, padding, path="canonical"):
    with jax.enable_x64(True), force_path(path):
        x, kernel = arrays(0, (batch, height, width, inputs), (kh, kw, inputs, outputs))
        shape = jax.eval_shape(lambda x, k: built_in(x, k, stride, padding), x, kernel).shape
        (dy,) = arrays(1, shape)

        def value_and_gradients(convolve, x, kernel, dy):
            y, back = jax.vjp(convolve, x, kernel)
            return y, *back(dy)

        def ours(x, k):
            return conv2d(x, k, stride=stride, padding=padding)

        def theirs(x, k):
            return built_in(x, k, stride, padding)

        both = jax.jit(lambda *a: (value_and_gradients(ours, *a), value_and_gradients(theirs, *a)))
        for mine, yours in zip(*both(x, kernel, dy), strict=True):
            np.testing.assert_allclose(mine, yours, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("kh", "kw", "stride"), [(1, 1, 1), (1, 1, 2), (2, 2, 1), (3, 3, 1), (3, 3, 2), (4, 2, 3), (7, 7, 2)]
)
def test_values_and_gradients_equal_the_built_in_ones(kh, kw, stride, padding):
    compare_with_built_in(2, 8, 11, 3, 4, kh, kw, stride, padding)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(5, 9), width=st.integers(5, 9), kh=st.integers(1, 5), kw=st.integers(1, 5),
    stride=st.integers(1, 4), padding=st.sampled_from(["SAME", "VALID"]),
)  # fmt: skip
def test_any_geometry_has_the_built_in_gradients(height, width, kh, kw, stride, padding):
    compare_with_built_in(1, height, width, 2, 3, kh, kw, stride, padding)


def compare_gradients(shape, kernel_shape, stride, pads):
    """With given padding, also such that cuts the image, against the built-in gradients in float64."""
    with jax.enable_x64(True), force_path("canonical"):
        x, kernel = arrays(0, shape, kernel_shape)
        (dy,) = arrays(1, built_in(x, kernel, stride, pads).shape)
        back = [
            jax.jit(lambda x, kernel, dy, convolve=convolve: jax.vjp(convolve, x, kernel)[1](dy))
            for convolve in (
                lambda x, kernel: conv2d_padded(x, kernel, stride, pads),
                lambda x, kernel: built_in(x, kernel, stride, pads),
            )
        ]
        for mine, yours in zip(*(each(x, kernel, dy) for each in back), strict=True):
            np.testing.assert_allclose(mine, yours, rtol=1e-11, atol=1e-11)
            assert np.abs(yours).max() > 0


@pytest.mark.parametrize(
    ("kernel", "stride", "pads"),
    [((3, 3), 2, ((0, 3), (2, 0))), ((3, 2), 2, ((-1, 1), (1, -2))), ((2, 3), 4, ((1, 0), (0, 0)))],
)
def test_uneven_padding_and_padding_that_cuts_has_the_built_in_gradients(kernel, stride, pads):
    compare_gradients((2, 7, 8, 3), (*kernel, 3, 4), stride, pads)


PADS = st.tuples(st.integers(-2, 3), st.integers(-2, 3))


@pytest.mark.parametrize(
    ("form", "images", "stride", "pads", "cache"),
    [
        ("_dw_in_parts", 16, 1, ((-1, 2), (0, 1)), 32_000),  # eight parts
        ("_dw_in_parts", 17, 1, ((1, 1), (1, 1)), 45_000),  # images that no 8 to 15 parts can share
        ("_dw_of_taps", 2, 2, ((0, 1), (1, 0)), 6_000),
        ("_dw_of_taps", 1, 3, ((-1, 2), (0, 1)), 2_000),
    ],
)
def test_where_no_cache_holds_the_copies_another_form_has_the_same_gradient(
    form, images, stride, pads, cache, monkeypatch
):
    used = mock.Mock(wraps=getattr(conv, form))
    monkeypatch.setattr(conv, form, used)
    monkeypatch.setattr(conv, "CACHE_BYTES", cache)
    compare_gradients((images, 6, 7, 16), (3, 2, 16, 2), stride, pads)
    assert used.call_count == 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    images=st.integers(1, 3), size=st.tuples(st.integers(5, 9), st.integers(5, 9)), stride=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)), pads=st.tuples(PADS, PADS),
)  # fmt: skip
def test_any_padding_has_the_built_in_gradients(images, size, kernel, stride, pads):
    assume(all(side + sum(pad) >= k for side, k, pad in zip(size, kernel, pads, strict=True)))
    compare_gradients((images, *size, 2), (*kernel, 2, 3), stride, pads)


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_a_strided_gradient_in_sixteen_bits_rounds_the_result_not_the_sum(dtype, limit):
    x, kernel, dy = (
        each.astype(dtype) for each in arrays(0, (1, 6, 6, 2), (5, 5, 2, 8), (1, 3, 3, 8), dtype=np.float32)
    )
    with force_path("canonical"):
        found = jax.vjp(lambda x: conv2d(x, kernel, stride=2), x)[1](dy)[0]
    wide = [each.astype(jnp.float32) for each in (x, kernel, dy)]
    exact = jax.vjp(lambda x: built_in(x, wide[1], 2, "SAME"), wide[0])[1](wide[2])[0]
    assert found.dtype == dtype
    assert float(jnp.abs(found - exact).max()) <= limit * float(jnp.abs(exact).max())


def test_rows_that_no_window_reaches_get_zero_gradient():
    x, kernel = arrays(0, (1, 8, 8, 1), (3, 3, 1, 1), dtype=np.float32)
    dx = jax.grad(lambda x: conv2d(x, kernel, stride=3, padding="VALID").sum())(x)
    assert not dx[:, 6:].any() and not dx[:, :, 6:].any()
    assert dx[:, :6, :6].all()


def test_updates_inside_a_scan_equal_updates_outside():
    x, kernel = arrays(0, (2, 6, 6, 3), (3, 3, 3, 3), dtype=np.float32)

    def update(kernel, _):
        return kernel - 0.01 * jax.grad(lambda k: (conv2d(x, k) ** 2).mean())(kernel), None

    inside = jax.lax.scan(update, kernel, length=3)[0]
    for _ in range(3):
        kernel = jax.jit(update)(kernel, None)[0]
    np.testing.assert_allclose(inside, kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a matter of XLA:CPU")
def test_in_a_loop_every_convolution_has_the_layout_of_the_fast_kernel():
    x, kernel = arrays(0, (4, 8, 8, 8), (3, 3, 8, 8), dtype=np.float32)

    def layouts(convolve):
        def update(kernel, _):
            loss = lambda k: (convolve(convolve(x, k), k) ** 2).mean()  # noqa: E731
            return kernel - 0.01 * jax.grad(loss)(kernel), None

        program = jax.jit(lambda kernel: jax.lax.scan(update, kernel, length=5)[0])
        with native.use_native(False):
            text = program.lower(kernel).compile().as_text()
        return set(re.findall(r"dim_labels=(\S+?)[,\s]", text))

    assert layouts(conv2d) == {"b01f_01io->b01f"}
    assert layouts(lambda x, k: built_in(x, k, 1, "SAME")) != {"b01f_01io->b01f"}, (
        "XLA has learnt it: drop this path"
    )


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_sixteen_bits_round_the_result_not_the_sum(dtype, limit):
    x, kernel = arrays(0, (2, 6, 6, 32), (3, 3, 32, 4), dtype=np.float32)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    y = conv2d(x, kernel)
    assert y.dtype == dtype
    exact = built_in(x.astype(jnp.float32), kernel.astype(jnp.float32), 1, "SAME")
    assert float(jnp.abs(y - exact).max()) <= limit * float(jnp.abs(exact).max())


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("height", "width", "k"), [(12, 14, 7), (11, 13, 7), (9, 10, 5)])
def test_folding_pixels_into_channels_changes_no_value(height, width, k, padding):
    """Of wide kernels two pixels apart over few channels: a GPU's first convolution."""
    compare_with_built_in(2, height, width, 3, 4, k, k, 2, padding, path="folded")


def test_only_wide_kernels_over_few_channels_are_folded():
    x, thin, wide = (np.ones(shape, np.float32) for shape in ((1, 8, 8, 3), (7, 7, 3, 2), (3, 3, 3, 2)))
    with force_path("folded"):
        texts = [
            jax.jit(lambda x, k: conv2d(x, k, stride=2)).lower(x, kernel).as_text() for kernel in (thin, wide)
        ]
    assert "4x4x12x2" in texts[0] and "12x2" not in texts[1]


@pytest.mark.parametrize("path", ["default", "canonical"])
@pytest.mark.parametrize(
    ("with_residual", "relu"), [(False, True), (True, True), (False, False), (True, False)]
)
def test_one_with_its_bias_sum_and_relu_equals_them_one_by_one(path, with_residual, relu):
    shapes = [(2, 6, 5, 3), (3, 2, 3, 4), (4,), *([(2, 3, 3, 4)] if with_residual else [])]
    pads = ((0, 1), (1, 0))

    def joined(x, kernel, bias, residual=None):
        return conv2d_biased(x, kernel, bias, residual, stride=2, pads=pads, relu=relu)

    def textbook(x, kernel, bias, residual=0.0):
        total = built_in(x, kernel, 2, pads) + bias + residual
        return jax.nn.relu(total) if relu else total

    with jax.enable_x64(True), force_path(path):
        given, (dy,) = arrays(0, *shapes), arrays(1, (2, 3, 3, 4))
        for found, wanted in zip(
            *((y, *back(dy)) for y, back in (jax.vjp(f, *given) for f in (joined, textbook))), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_kernel_gradients_in_parts_are_each_devices_own_where_the_mapped_axes_are_checked():
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, kernel = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((256, 56, 56, 64), (2, 3, 3, 64, 64)))

    def gradient(x, kernel):
        return jax.grad(lambda kernel: conv2d(x, kernel[0]).sum())(kernel)

    with mock.patch.object(conv, "_dw_in_parts", wraps=conv._dw_in_parts) as in_parts:
        own = jax.shard_map(
            gradient, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec("rows")
        )
        assert jax.eval_shape(own, x, kernel).shape == kernel.shape
    assert in_parts.called


@pytest.mark.parametrize("groups", [1, 4])
def test_a_kernel_that_all_devices_share_has_the_sum_of_their_gradients(groups):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(4, 6, 6, 8)), jnp.float32)
    kernel = jnp.asarray(draw.normal(size=(3, 3, 8 // groups, 8)), jnp.float32)

    def loss(x, kernel):
        y = conv2d(x, kernel) if groups == 1 else grouped_conv2d(x, kernel, groups)
        return (y**2).sum()

    spread = PartitionSpec("rows")
    own = jax.shard_map(
        jax.grad(loss, (0, 1)),
        mesh=mesh,
        in_specs=(spread, PartitionSpec()),
        out_specs=(spread, PartitionSpec()),
    )
    for found, wanted in zip(jax.jit(own)(x, kernel), jax.grad(loss, (0, 1))(x, kernel), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 3, 0, 8), (3, 3, 8, 0), (0, 3, 8, 8)])
def test_a_kernel_of_nothing_is_one_line(shape):
    with pytest.raises(OptionError, match="nothing to convolve with"):
        conv2d(jnp.zeros((1, 6, 6, shape[2]), jnp.float32), jnp.zeros(shape, jnp.float32))
    with pytest.raises(OptionError, match="nothing to convolve with"):
        grouped_conv2d(jnp.zeros((1, 6, 6, 2 * shape[2]), jnp.float32), jnp.zeros(shape, jnp.float32), 2)


@pytest.mark.parametrize("groups", [0, 3, 16])
def test_channels_that_do_not_fall_into_groups_are_one_line(groups):
    with pytest.raises(OptionError, match=f"groups={groups}: 8 channels"):
        grouped_conv2d(jnp.zeros((1, 6, 6, 8), jnp.float32), jnp.zeros((3, 3, 4, 8), jnp.float32), groups)
