"""Convolutions by the installed package `hotloop-native`, against the plain paths; skipped where there is none."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, PartitionSpec

from hotloop.errors import HotloopError
from hotloop.layers import conv, kernel_table, native, native_probe, norm, tied
from hotloop.layers.conv import conv2d
from hotloop.layers.grouped_conv import grouped_conv2d
from hotloop.layers.kernel_table import Times
from hotloop.layers.native import use_native
from hotloop.layers.paths import NATIVE, force_path

pytestmark = [
    pytest.mark.skipif(find_spec("hotloop_native") is None, reason="hotloop-native is not installed"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU"),
]
CALLS = ["hotloop_conv_forward", "hotloop_conv_input_gradient", "hotloop_conv_kernel_gradient"]


def noise(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Every shape was measured to be faster by the package, which need not be tried out again."""
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "find_fault", lambda: ("", True))
    monkeypatch.setattr(kernel_table, "time_both", lambda *_: Times(2.0, 1.0))
    with use_native(True):
        yield


def gradients(convolve: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda x, w: (convolve(x, w) ** 2).sum(), (0, 1)))


def called(function: Any, *arguments: Any) -> list[str]:
    text = function.lower(*arguments).as_text()
    return [name for name in CALLS for _ in range(text.count(f"@{name}("))]


@pytest.mark.parametrize(("stride", "padding"), [(1, "SAME"), (2, "SAME"), (2, "VALID")])
def test_a_convolution_and_its_gradients_equal_the_plain_ones(
    always: None, stride: int, padding: Any
) -> None:
    x, w = noise(2, 9, 8, 5), noise(3, 3, 5, 6)

    def compute() -> Any:
        return gradients(lambda x, w: conv2d(x, w, stride=stride, padding=padding))

    assert called(compute(), x, w) == CALLS
    found = compute()(x, w)
    with force_path("canonical"):
        expected = compute()(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), found, expected)


@pytest.mark.parametrize("groups", [2, 8])
def test_a_grouped_convolution_and_its_gradients_equal_the_plain_ones(always: None, groups: int) -> None:
    x, w = noise(2, 7, 6, 8), noise(3, 3, 8 // groups, 16)

    def compute() -> Any:
        return gradients(lambda x, w: grouped_conv2d(x, w, groups))

    assert called(compute(), x, w) == CALLS
    found = compute()(x, w)
    with force_path("default"):
        expected = compute()(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), found, expected)


def test_it_runs_in_a_loop_under_vmap_and_as_each_devices_part(always: None) -> None:
    x, w = noise(4, 6, 6, 3), noise(3, 3, 3, 3)

    def looped(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(conv2d(x, w)), x)

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, everywhere = PartitionSpec("rows"), PartitionSpec()
    parts = jax.shard_map(looped, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows, check_vma=False)
    mapped = jax.vmap(lambda x, w: looped(x[None], w)[0], (0, None))
    with force_path("canonical"):
        expected = jax.jit(looped)(x, w)
    for each in map(jax.jit, (looped, parts, mapped)):
        assert called(each, x, w) == CALLS[:1]
        np.testing.assert_allclose(each(x, w), expected, rtol=1e-5, atol=1e-5)


def test_an_export_has_no_call_of_it(always: None) -> None:
    x, w = noise(2, 6, 6, 3), noise(3, 3, 3, 3)
    function = gradients(lambda x, w: conv2d(x, w, stride=2))
    assert called(function, x, w) == CALLS
    for platforms in (("cpu",), ("cpu", "cuda", "tpu")):
        assert "hotloop_" not in export.export(function, platforms=platforms)(x, w).mlir_module()


def test_every_kind_of_kernel_is_right_here(always: None) -> None:
    native_probe.try_out()


@pytest.mark.parametrize(
    "operation",
    [conv.biased, norm.join, norm.join_gradient, tied.forward, tied.refeed, tied.gradient],
    ids=lambda each: each.rival.name,
)
def test_wrong_numbers_of_what_ends_a_block_or_of_tied_layers_are_found(
    always: None, monkeypatch: pytest.MonkeyPatch, operation: Any
) -> None:
    def slightly_wrong(*arrays: Any, **settings: Any) -> Any:
        return jax.tree.map(lambda leaf: 1.001 * leaf, operation.rival.implementation(*arrays, **settings))

    monkeypatch.setitem(operation._paths, NATIVE, slightly_wrong)
    monkeypatch.setattr(native_probe, "CONVOLUTIONS", ())
    with pytest.raises(HotloopError, match="wrong numbers"):
        native_probe.try_out()


@pytest.mark.slow
def test_a_machine_tries_the_package_out_and_measures_for_itself(monkeypatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path))
    x, w = noise(1, 28, 28, 32), noise(3, 3, 1, 32)
    with use_native(True):
        jax.jit(lambda x, w: grouped_conv2d(x, w, 32)).lower(x, w)
        table = native.table()
    assert table is not None
    assert table.fault == ""
    (key,) = table.kernels
    assert key == "conv forward: 1x28x28x32 3x3x1x32 groups=32 pads=((1,1),(1,1)) stride=1"
    assert min(table.kernels[key].plain_ms, table.kernels[key].native_ms) > 0
