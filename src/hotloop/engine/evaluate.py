"""Exact evaluation: every sample once, for any batch size, in one compiled loop.

A family's function gives values for each sample of a batch; here they are added up over the whole data set.
The last batch is filled up with samples that are then left out of the sums, so the result does not depend on
the batch size but for the order in which floats are added (counts are exact). It must not know what is
evaluated.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from hotloop.engine.feed import (
    Batch,
    Gather,
    check_split,
    common_length,
    gather_rows,
    placement_like,
    spread_batch,
)
from hotloop.engine.progress import compiling
from hotloop.errors import DataError, HotloopError
from hotloop.rehearsal import begin_work

PerSample = Callable[[Any, Batch], Mapping[str, Array]]
Sums = dict[str, Any]


class Evaluation:
    """A data set and what to compute for its samples, compiled once and called with state after state.

    `fn(state, batch)` returns a dict of arrays whose first axis is the batch: a correct answer as a bool, a
    squared error, a number of ratings, a log-likelihood, or a row for each sample. `evaluation(state)` is
    the sum of each over all samples, and their number under `samples`; booleans and integers are counted
    exactly, and batch sums of floats are added in float64. `data`, `samples`, `gather` and `sharding` are as
    for `feed.Resident`.

    >>> import numpy as np
    >>> from hotloop import Evaluation
    >>> data = {"x": np.arange(5, dtype=np.float32)}
    >>> evaluation = Evaluation(lambda state, batch: {"error": abs(batch["x"] - state)}, data, batch_size=2)
    >>> evaluation(1.0)
    {'error': 7.0, 'samples': 5}
    >>> evaluation.means(1.0)
    {'error': 1.4, 'samples': 5}
    """

    def __init__(
        self,
        fn: PerSample,
        data: Any,
        batch_size: int,
        *,
        samples: int | None = None,
        gather: Gather = gather_rows,
        sharding: NamedSharding | None = None,
    ):
        self.samples = common_length(data) if samples is None else samples
        if self.samples == 0:
            raise DataError("the data set is empty: there is nothing to evaluate")
        if batch_size < 1:
            raise DataError(f"batch size {batch_size}: must be at least 1")
        if sharding is not None:
            check_split(sharding, batch_size)
        self.batch_size = batch_size if sharding else min(batch_size, self.samples)
        self.lower_seconds = 0.0
        self.compile_seconds = 0.0
        self.compiled: Any = None
        self._fn, self._gather, self._sharding = fn, gather, sharding
        self._data = jax.device_put(data, placement_like(sharding, ()))

    def over(self, data: Any) -> "Evaluation":
        """The same computation over other data of the same shapes and types: nothing is compiled again."""
        other = copy(self)
        other._data = jax.device_put(data, placement_like(self._sharding, ()))
        return other

    def compile(self, state: Any) -> None:
        """Compile ahead of the first call, if that is still to do."""
        if self.compiled is not None:
            return
        begin_work("compiling the evaluation")
        started = time.perf_counter()
        with compiling():
            lowered = jax.jit(self._sums_of_batches).lower(state, self._data)
            self.lower_seconds = time.perf_counter() - started
            self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - started - self.lower_seconds

    def __call__(self, state: Any) -> Sums:
        """Every sum, and the number of samples."""
        self.compile(state)
        return _add_batches(self.compiled(state, self._data), self.samples)

    def means(self, state: Any) -> dict[str, Any]:
        """The mean of each over all samples: figures for `validate`."""
        return means_of(self(state))

    def _sums_of_batches(self, state: Any, data: Any) -> Mapping[str, Array]:
        def one(start: Array) -> Mapping[str, Array]:
            places = start + jnp.arange(self.batch_size)
            batch = spread_batch(self._gather(data, jnp.minimum(places, self.samples - 1)), self._sharding)
            return masked_sums(self._fn(state, batch), places < self.samples)

        sums: Mapping[str, Array] = jax.lax.map(one, jnp.arange(0, self.samples, self.batch_size))
        return sums


def means_of(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of each sum over the samples, and their number under `samples` again."""
    samples = sums["samples"]
    return {name: value / samples for name, value in sums.items() if name != "samples"} | {"samples": samples}


def evaluate_batches(fn: PerSample, state: Any, batches: Iterable[Batch], batch_size: int) -> Sums:
    """Sums over batches from the host, each of `batch_size` samples or fewer; `fn` is compiled once."""
    sums: list[Mapping[str, Any]] = []
    samples = 0
    for batch in batches:
        count = common_length(batch)
        if count > batch_size:
            raise DataError(f"a batch of {count} samples: at most {batch_size} were announced")
        padded = pad_batch(batch, batch_size)
        with nullcontext() if sums else compiling():
            sums.append(_masked_sums_of(fn, state, padded, np.int32(count)))
        samples += count
    if not samples:
        raise DataError("there was no batch to evaluate")
    stacked = {name: np.stack([np.asarray(each[name]) for each in sums]) for name in sums[0]}
    return _add_batches(stacked, samples)


def masked_sums(values: Mapping[str, Array], real: Array) -> Mapping[str, Array]:
    """The sum of each array over its first axis, taken where `real` says so (NaN elsewhere does no harm)."""
    for name, value in values.items():
        if jnp.shape(value)[:1] != real.shape:
            needed = f"it needs one value for each of {len(real)} samples"
            raise HotloopError(f"evaluation gives {name} of shape {jnp.shape(value)}: {needed}")

    def masked_sum(value: Array) -> Array:
        counted = value.dtype == jnp.bool_ or jnp.issubdtype(value.dtype, jnp.integer)
        wide = jnp.int32 if counted else jnp.promote_types(value.dtype, jnp.float32)
        kept = jnp.where(real.reshape(-1, *(1,) * (value.ndim - 1)), value, 0)
        return jnp.sum(kept.astype(wide), axis=0)

    return {name: masked_sum(jnp.asarray(value)) for name, value in values.items()}


@partial(jax.jit, static_argnums=0)
def _masked_sums_of(fn: PerSample, state: Any, batch: Batch, count: Array) -> Mapping[str, Array]:
    length = jax.tree.leaves(batch)[0].shape[0]
    return masked_sums(fn(state, batch), jnp.arange(length) < count)


def pad_batch(batch: Batch, length: int) -> Batch:
    """A batch from the host with its last sample repeated until it has `length` of them."""

    def fill(leaf: Any) -> Any:
        if len(leaf) == length:
            return leaf
        return np.asarray(leaf)[np.minimum(np.arange(length), len(leaf) - 1)]

    return jax.tree.map(fill, batch)


def _add_batches(sums: Mapping[str, Any], samples: int) -> Sums:
    """Batch sums [batches, ...] added up on the host, where there are 64 bits to do it in."""
    wide = {name: np.asarray(value) for name, value in sums.items()}
    totals = {
        name: np.sum(value, axis=0, dtype=np.int64 if value.dtype.kind in "iu" else np.float64)
        for name, value in wide.items()
    }
    return {
        **{name: total.item() if total.ndim == 0 else total for name, total in totals.items()},
        "samples": samples,
    }
