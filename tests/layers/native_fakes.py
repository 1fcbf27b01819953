"""A package `hotloop-native` that is not there: its one kernel marks what it computes by a cosine in the program."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hotloop.layers import kernel_table, native
from hotloop.layers.kernel_table import Times
from hotloop.layers.paths import Operation, Rival

MARK = "stablehlo.cosine"


def product(x: jax.Array, w: jax.Array, *, by: float) -> jax.Array:
    return x @ w * by


def marked_product(x: jax.Array, w: jax.Array, *, by: float) -> jax.Array:
    return x @ w * by * jnp.cos(0 * x[0, 0])


def make_operation(
    is_slow: Callable[..., bool] = lambda *arrays, **settings: False, margin: float = kernel_table.MARGIN
) -> Operation:
    rival = Rival("product", "fake_product", marked_product, stacked=(0,), margin=margin, is_slow=is_slow)
    return Operation(product, rival, cpu=("own", product))


def install(
    monkeypatch: pytest.MonkeyPatch, cache: Any, plain_ms: float = 2.0, native_ms: float = 1.0
) -> list[Any]:
    """The package is there, works, and takes this long; the list gets the shapes that were measured."""
    measured: list[Any] = []

    def time_both(plain: Any, rival: Any, forms: Any, margin: float, prepare: Any) -> Times:
        measured.append([form.shape for form in forms])
        return Times(plain_ms, native_ms)

    monkeypatch.setenv("HOTLOOP_CACHE", str(cache))
    monkeypatch.setattr(
        native, "find_package", lambda: SimpleNamespace(VERSION="fake", TARGETS=("fake_product",))
    )
    monkeypatch.setattr(native, "find_fault", lambda: ("", True))
    monkeypatch.setattr(native, "is_loaded", lambda: True)
    monkeypatch.setattr(kernel_table, "time_both", time_both)
    native.warn_once.cache_clear()
    return measured
