"""When an operation takes the kernel of another library, seen in what it is lowered to."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from native_fakes import MARK, install, make_operation

from hotloop import rehearsal
from hotloop.layers import conv2d, kernel_table, native
from hotloop.layers.native import use_native
from hotloop.layers.paths import force_path

X, W = jnp.ones((4, 3)), jnp.ones((3, 3))
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="kernels for the CPU")


def is_native(function: Any, *arguments: Any) -> bool:
    return MARK in jax.jit(function).lower(*arguments).as_text()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    measured = install(monkeypatch, tmp_path)
    with use_native(True):
        yield measured


def test_the_faster_kernel_is_taken_and_measured_once_for_each_shape(there: list[Any]) -> None:
    operation = make_operation()
    assert is_native(lambda x, w: operation(x, w, by=2.0), X, W)
    assert is_native(lambda x, w: operation(operation(x, w, by=2.0), w, by=2.0), X, W)
    assert there == [[(4, 3), (3, 3)]]
    assert is_native(lambda x, w: operation(x, w, by=2.0), X[:2], W)
    assert there == [[(4, 3), (3, 3)], [(2, 3), (3, 3)]]


@pytest.mark.parametrize(("plain_ms", "taken"), [(1.09, False), (1.11, True)])
def test_a_kernel_must_be_faster_by_ten_per_cent(monkeypatch, tmp_path, plain_ms: float, taken: bool) -> None:
    install(monkeypatch, tmp_path, plain_ms, 1.0)
    operation = make_operation()
    with use_native(True):
        assert is_native(lambda x, w: operation(x, w, by=2.0), X, W) is taken


def test_only_float32_and_arrays_with_something_in_them_go_there(there: list[Any]) -> None:
    operation = make_operation()
    for dtype in (jnp.bfloat16, jnp.float16):
        assert not is_native(lambda x, w: operation(x, w, by=2.0), X.astype(dtype), W.astype(dtype))
    assert not is_native(lambda x, w: operation(x, w, by=2.0), X[:0], W)
    assert there == []


def test_it_is_switched_off_by_the_environment_and_in_the_program(there: list[Any], monkeypatch) -> None:
    operation = make_operation()
    function = jax.jit(lambda x, w: operation(x, w, by=2.0))
    assert MARK in function.lower(X, W).as_text()
    with use_native(False):
        assert MARK not in function.lower(X, W).as_text()
    for word, wanted in (("0", False), ("off", False), ("1", True), ("", True)):
        monkeypatch.setenv("HOTLOOP_NATIVE", word)
        with native._SWITCHED(None):
            assert native.is_wanted() is wanted


def test_a_forced_path_is_taken_whatever_was_measured(there: list[Any]) -> None:
    operation = make_operation()
    with force_path("own"):
        assert not is_native(lambda x, w: operation(x, w, by=2.0), X, W)
    with use_native(False), force_path("native"):
        assert is_native(lambda x, w: operation(x, w, by=2.0), X, W)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cuda",)])
def test_an_export_never_has_it_even_of_a_function_that_was_traced_before(there, platforms) -> None:
    operation = make_operation()
    function = jax.jit(lambda x, w: operation(x, w, by=2.0))
    assert MARK in function.lower(X, W).as_text()
    assert "cosine" not in export.export(function, platforms=platforms)(X, W).mlir_module()


def test_another_platform_never_has_it(there: list[Any]) -> None:
    operation = make_operation()
    traced = jax.jit(lambda x, w: operation(x, w, by=2.0)).trace(X, W)
    assert MARK in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert MARK not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_inside_loops_and_with_gradients_it_computes_the_same(there: list[Any]) -> None:
    operation = make_operation()

    def loss(x: Any, w: Any) -> Any:
        def turn(x: Any, _: Any) -> Any:
            return operation(x, w, by=0.5), None

        return jax.lax.scan(turn, x, None, length=3)[0].var()

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, W)
    assert is_native(loss, x, W)
    with use_native(False):
        expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize("axes", [(0, None), (1, None), (None, 0), (0, 0)])
def test_rows_that_are_mapped_are_one_call_where_they_are_independent(there: list[Any], axes: Any) -> None:
    operation = make_operation()
    random = np.random.default_rng(0)

    def noise(shape: tuple[int, ...], axis: int | None) -> Any:
        drawn = random.standard_normal((5, *shape))
        return jnp.asarray(drawn[0] if axis is None else np.moveaxis(drawn, 0, axis), jnp.float32)

    x, w = noise((4, 3), axes[0]), noise((3, 3), axes[1])
    mapped = jax.vmap(lambda x, w: operation(x, w, by=2.0), axes)
    assert is_native(mapped, x, w) is (axes[1] is None)
    assert there == ([[(20, 3), (3, 3)]] if axes[1] is None else [])
    with force_path("default"):
        expected = mapped(x, w)
    np.testing.assert_allclose(jax.jit(mapped)(x, w), expected, rtol=1e-6)


def test_arrays_that_are_spread_over_devices_keep_xlas_own_path(there: list[Any]) -> None:
    operation = make_operation()
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, everywhere = PartitionSpec("rows"), PartitionSpec()

    def function(x: Any, w: Any) -> Any:
        return operation(x, w, by=2.0)

    x, w = jax.device_put((X, W), (NamedSharding(mesh, rows), NamedSharding(mesh, everywhere)))
    assert not is_native(function, x, w)
    for check in (True, False):  # here each device has its own part
        parts = jax.shard_map(
            function, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows, check_vma=check
        )
        assert is_native(parts, x, w)
        np.testing.assert_allclose(jax.jit(parts)(x, w), function(X, W))
    assert there == [[(2, 3), (3, 3)]]


def test_a_rehearsal_measures_nothing(there: list[Any]) -> None:
    operation = make_operation()
    rehearsal.rehearse(lambda: jax.jit(lambda x, w: operation(x, w, by=2.0)).lower(X, W))
    assert there == []


def test_a_package_that_faults_here_is_not_used_and_one_line_says_so(there, monkeypatch, caplog) -> None:
    monkeypatch.setattr(native, "find_fault", lambda: ("it ends by signal 4 on this CPU", True))
    operation = make_operation()
    for rows in (4, 3):
        assert not is_native(lambda x, w: operation(x, w, by=2.0), X[:rows], W)
    assert caplog.messages == ["hotloop-native is not used: it ends by signal 4 on this CPU"]
    table = kernel_table.Table(kernel_table.table_for("fake").path, {})
    assert (table.fault, there) == ("it ends by signal 4 on this CPU", [])


@pytest.mark.parametrize("slow", [True, False])
def test_without_the_package_one_line_names_it_in_a_slow_case(
    monkeypatch, tmp_path, caplog, slow: bool
) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "find_package", lambda: None)
    caplog.set_level(logging.INFO)
    operation = make_operation(is_slow=lambda x, w, *, by: slow)
    with use_native(True):
        for _ in range(2):
            assert not is_native(lambda x, w: operation(x, w, by=2.0), X, W)
        with use_native(False):
            jax.jit(lambda x, w: operation(x, w, by=2.0)).lower(X, W)
    assert ["pip install 'hotloop[native]'" in line for line in caplog.messages] == [True] * slow


def test_a_convolution_for_any_number_of_rows_is_exported_where_the_package_is_not_there(
    monkeypatch, tmp_path
) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "find_package", lambda: None)
    images = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 28, 28, 1"), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 1, 8), jnp.float32)
    with use_native(True):
        found = export.export(jax.jit(conv2d))(images, kernel)
    assert str(found.in_avals[0].shape[0]) == "rows"
