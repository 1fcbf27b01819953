"""Grouped convolutions as one kernel on a Hopper card: its products against float64, and when a program takes it.

Pallas' interpreter takes a place before an array's first for one counted from its end, so kernels run in it on images
with their first zeros around them; the card's own tests are in test_bundled_card.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from hotloop.layers import bundled, paths
from hotloop.layers.bundled import BUNDLE, PARTS
from hotloop.layers.bundled_job import Job
from hotloop.layers.grouped_conv import grouped_conv2d

LAYOUT = ("NHWC", "HWIO", "NHWC")
SAME = ((1, 1), (1, 1))
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX, reason="kernels are built with jax 0.11.2 or later"
)


class Card:
    def __init__(self, capability="9.0"):
        self.compute_capability, self.core_count = capability, 132


def case(images, height, width, channels, inputs, size=(3, 3)):
    """Numbers that float16 has, in float64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, height, width, channels))
    kernel = rng.standard_normal((*size, inputs, channels)) / 6
    return x.astype(np.float16).astype(np.float64), kernel.astype(np.float16).astype(np.float64)


def exact(x, kernel, pads, dtype=jnp.float16):
    """Output, a cotangent of numbers that `dtype` has, and the input's gradient in float64."""
    with jax.enable_x64(True):
        groups = x.shape[3] // kernel.shape[2]
        y, back = jax.vjp(
            lambda x: lax.conv_general_dilated(
                x,
                jnp.asarray(kernel),
                (1, 1),
                pads,
                dimension_numbers=LAYOUT,
                feature_group_count=groups,
            ),
            jnp.asarray(x),
        )
        dy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
        return jax.tree.map(np.asarray, (y, dy, *back(jnp.asarray(dy, jnp.float64))))


def relative(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def job_of(shape, inputs, size=(3, 3), edge=(1, 1), parts=PARTS, bundle=BUNDLE, dtype=jnp.float16):
    return Job(*shape, size, edge, bundle, parts, jnp.dtype(dtype))


def run_interpreted(run, job, x, bundles):
    """The kernel, on an image with the zeros that lie before it."""
    from hotloop.layers.persistent_chain import plgpu

    widened = jnp.pad(x, ((0, 0), *((before, 0) for before in job.edge), (0, 0)))
    return run(job._replace(edge=(0, 0)), widened, bundles, interpret=plgpu.InterpretGPUParams())


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "inputs", "size", "parts", "dtype"),
    [
        ((1, 5, 14, 32), 4, (3, 3), 1, jnp.float16),
        ((2, 3, 7, 64), 4, (3, 3), 2, jnp.bfloat16),
        pytest.param((1, 2, 56, 64), 8, (3, 3), 1, jnp.float16, marks=pytest.mark.slow),
        pytest.param((1, 3, 70, 32), 2, (3, 3), 2, jnp.float16, marks=pytest.mark.slow),
        pytest.param((1, 4, 9, 32), 16, (5, 2), 1, jnp.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernel_gives_what_float64_gives(shape, inputs, size, parts, dtype):
    """More rows than a block has, rows that no warpgroup's pixels end with, an image in two halves."""
    from hotloop.layers.bundled_kernel import run

    x, kernel = case(*shape, inputs, size)
    around = tuple((k - 1) // 2 for k in size)
    pads = tuple((before, k - 1 - before) for before, k in zip(around, size, strict=True))
    if dtype == jnp.bfloat16:
        x, kernel = (np.asarray(jnp.asarray(array, dtype), np.float64) for array in (x, kernel))
    expected = exact(x, kernel, pads)[0]
    bundles = bundled.join_kernels(jnp.asarray(kernel, dtype), shape[3] // inputs, BUNDLE)
    job = job_of(shape, inputs, size, edge=around, parts=parts, dtype=dtype)
    found = run_interpreted(run, job, jnp.asarray(x, dtype), bundles)
    assert found.dtype == dtype and found.shape == expected.shape
    assert relative(found, expected) < {jnp.float16: 5e-4, jnp.bfloat16: 4e-3}[dtype]


@needs_mosaic
@pytest.mark.parametrize(
    ("pads", "dtype"),
    [
        (SAME, jnp.float16),
        (SAME, jnp.bfloat16),
        (((0, 0), (0, 0)), jnp.float16),
        (((2, 0), (0, 1)), jnp.float16),
    ],
    ids=["same", "same in bfloat16", "valid", "uneven"],
)
def test_the_kernel_gives_the_input_gradient_of_float64(monkeypatch, pads, dtype):
    from hotloop.layers import bundled_kernel

    monkeypatch.setattr(bundled_kernel, "run", partial(run_interpreted, bundled_kernel.run))
    x, kernel = (np.asarray(jnp.asarray(array, dtype), np.float64) for array in case(1, 6, 9, 64, 4))
    _, dy, dx = exact(x, kernel, pads, dtype)
    given = (jnp.asarray(array, dtype) for array in (x, kernel, dy))
    found = bundled.input_gradient(*given, groups=16, stride=1, pads=pads)
    assert found.dtype == dtype and found.shape == dx.shape
    assert relative(found, dx) < {jnp.float16: 5e-4, jnp.bfloat16: 4e-3}[dtype]


def stand_in(job, x, bundles):
    """What the kernel is to give, by XLA's dense convolutions."""
    high = (
        (job.height + job.size[0] - 1 - x.shape[1] - job.edge[0]),
        (job.width + job.size[1] - 1 - x.shape[2] - job.edge[1]),
    )
    pads = tuple(zip(job.edge, high, strict=True))
    parts = [
        lax.conv_general_dilated(
            x[..., n * job.bundle : (n + 1) * job.bundle].astype(jnp.float32),
            taps.swapaxes(1, 2).reshape(*job.size, job.bundle, job.bundle).astype(jnp.float32),
            (1, 1),
            pads,
            dimension_numbers=LAYOUT,
        )
        for n, taps in enumerate(bundles)
    ]
    return jnp.concatenate(parts, 3).astype(x.dtype)


@needs_mosaic
@pytest.mark.parametrize("inputs", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("pads", [SAME, ((0, 0), (0, 0)), ((2, 0), (0, 1))], ids=["same", "valid", "uneven"])
def test_the_kernel_is_given_what_outputs_and_input_gradients_need(monkeypatch, inputs, pads):
    monkeypatch.setattr("hotloop.layers.bundled_kernel.run", stand_in)
    x, kernel = case(2, 6, 5, 64, inputs)
    y, dy, dx = exact(x, kernel, pads)
    x16, kernel16, dy16 = (jnp.asarray(array, jnp.float16) for array in (x, kernel, dy))
    settings = {"groups": 64 // inputs, "stride": 1, "pads": pads}
    assert relative(bundled.forward(x16, kernel16, **settings), y) < 5e-4
    assert relative(bundled.input_gradient(x16, kernel16, dy16, **settings), dx) < 5e-4


@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    parts=st.integers(1, 8),
)
def test_blocks_cover_an_image_and_fetch_what_the_copy_engine_can(height, width, size, parts):
    job = job_of((1, height, width, 64), 4, size, parts=parts)
    bundles, across, down, images = job.grid
    assert (bundles, images) == (2, 1)
    assert (across - 1) * job.columns < width <= across * job.columns
    assert (down - 1) * job.rows < height <= down * job.rows
    rows, columns, channels = job.fetched
    assert job.columns + size[1] - 1 <= columns <= 64 and 64 % columns == 0
    assert rows == job.rows + size[0] - 1
    assert columns * channels * 2 % 128 == 0  # a copy's bytes, and where it begins
    # The last warpgroup's last tap: no further than the row behind those that were fetched.
    assert parts * 64 + (size[0] - 1) * columns + size[1] - 1 <= (rows + 1) * columns
    assert job.share == height * width / (across * down * parts * 64) <= 1


def lowered(monkeypatch, card, images=4, side=56, channels=128, inputs=4, dtype=jnp.float16, **other):
    height, width = other.get("image", (side, side))
    monkeypatch.setattr(paths, "_local_cards", lambda: [card] if card else [])
    jax.clear_caches()
    size, stride = other.get("size", 3), other.get("stride", 1)
    x = jax.ShapeDtypeStruct((images, height, width, channels), dtype)
    kernel = jax.ShapeDtypeStruct((size, size, inputs, other.get("outputs", channels)), dtype)

    def both(x, kernel):
        y, back = jax.vjp(lambda x: grouped_conv2d(x, kernel, channels // inputs, stride), x)
        return y, back(y)

    return jax.jit(both).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("side", [56, 28, 14, 112])
def test_output_and_input_gradient_are_a_kernel_each_on_a_hopper_card(monkeypatch, dtype, side):
    text = lowered(monkeypatch, Card(), side=side, dtype=dtype)
    assert text.count("@mosaic_gpu") == 2
    assert "stablehlo.convolution" not in text


@needs_mosaic
@pytest.mark.parametrize("width", [2, 3, 13, 30, 57, 61, 62, 63, 79, 111, 142, 189, 223, 276])
def test_every_width_is_lowered_or_keeps_the_plain_path(monkeypatch, width):
    """Mosaic refuses to lay out rows by eights where an image has no whole number of them: 63 in two halves of 32."""
    text = lowered(monkeypatch, Card(), image=(64, width))
    assert text.count("@mosaic_gpu") == (2 if job_of((4, 64, width, 128), 4).share >= 0.5 else 0)


@pytest.mark.parametrize("card", [None, Card("8.0"), Card("10.0")], ids=["none", "Ampere", "Blackwell"])
def test_other_cards_get_the_plain_path(monkeypatch, card):
    assert "mosaic" not in lowered(monkeypatch, card)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": jnp.float32},
        {"inputs": 1},
        {"inputs": 8},
        {"channels": 48},
        {"channels": 32},
        {"stride": 2},
        {"size": 5},
        {"outputs": 256},
        {"side": 7},
        {"image": (1, 60)},
        {"image": (60, 1)},
        {"image": (2, 60)},
    ],
    ids=str,
)
def test_other_convolutions_get_the_plain_path(monkeypatch, other):
    assert "mosaic" not in lowered(monkeypatch, Card(), **other)


def test_no_images_get_the_plain_path(monkeypatch):
    monkeypatch.setattr(paths, "_local_cards", lambda: [Card()])
    x = jnp.zeros((0, 8, 8, 64), jnp.float16)
    traced = jax.jit(lambda x: grouped_conv2d(x, jnp.ones((3, 3, 4, 64), jnp.float16), 16)).trace(x)
    assert "mosaic" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_an_exported_program_has_the_plain_path_and_takes_any_batch(monkeypatch):
    monkeypatch.setattr(paths, "_local_cards", lambda: [Card()])
    jax.clear_caches()
    (rows,) = jax.export.symbolic_shape("rows")
    kernel = jnp.ones((3, 3, 4, 64), jnp.float16)
    for images in (4, rows):
        x = jax.ShapeDtypeStruct((images, 8, 8, 64), jnp.float16)
        exported = jax.export.export(jax.jit(lambda x: grouped_conv2d(x, kernel, 16)), platforms=["cuda"])(x)
        assert "mosaic" not in exported.mlir_module()
