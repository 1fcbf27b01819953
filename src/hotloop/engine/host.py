"""Batches on the host: from random access, in the shuffled order, or from an iterator, in its own.

Also the checks that a data set and every batch of it are what they should be, with errors that name the
array. It must not know about devices or threads.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hotloop.engine.order import Order, Remainder
from hotloop.engine.turns import Ended, Turns
from hotloop.errors import DataError

Fetch = Callable[[np.ndarray[Any, np.dtype[np.uint32]]], Any]


class Shuffled:
    """Batches of a random-access source, in the order of `Order`."""

    def __init__(self, fetch: Fetch, order: Order):
        self._fetch = fetch
        self._order = order
        self.samples = order.samples
        self.position, self.check_position = order.position, order.check_position

    @classmethod
    def of(
        cls, source: Any, batch_size: int, samples: int | None, seed: int, remainder: Remainder
    ) -> "Shuffled":
        """A function of indices (with its number of samples), or whatever takes `source[indices]`."""
        if not callable(source):
            length = common_length(source) if samples is None else samples
            return cls(
                lambda indices: jax.tree.map(lambda leaf: leaf[indices], source),
                Order(length, batch_size, seed, remainder),
            )
        if samples is None:
            raise DataError("a function of indices does not tell how many samples there are: give `samples`")
        return cls(source, Order(samples, batch_size, seed, remainder))

    def example(self) -> Any:
        """A batch whose shapes and types are those of all; its values count for nothing."""
        return next(self.batches(0, 1))

    def batches(self, first: int, count: int) -> Iterator[Any]:
        """The batches of updates first .. first + count - 1."""
        for indices in self._order.indices(self._order.start(first), np.arange(count, dtype=np.uint32)):
            yield self._fetch(indices)


class InTurn(Turns):
    """Batches of one iterator, which must not end before the run does."""

    def __init__(self, iterator: Iterator[Any], batch_size: int):
        _claim(iterator)
        super().__init__(lambda: iterator, batch_size)

    def batches(self, first: int, count: int) -> Iterator[Any]:
        """The batches of updates first .. first + count - 1; DataError where there are fewer."""
        try:
            yield from super().batches(first, count)
        except Ended:
            last = self.drawn
            raise DataError(
                f"the data ended after {last} batches: give more, repeat them, or ask for fewer updates"
            ) from None


_claimed: dict[int, Any] = {}
_OURS = 2  # references to an iterator that nobody else has: of `_claimed`, and of the question itself


def _claim(iterator: Iterator[Any]) -> None:
    """Refuse an iterator that stands where nobody knows: another feed has drawn from it, ahead of what it used."""
    # Held by hand: iterators of Python's own kinds (map, zip) take no weak reference.
    for number in [number for number in _claimed if sys.getrefcount(_claimed[number]) <= _OURS]:
        del _claimed[number]
    if id(iterator) in _claimed:
        raise DataError(
            "another feed has drawn from this iterator: give that feed again, or what can be begun anew"
        )
    _claimed[id(iterator)] = iterator


def common_length(data: Any) -> int:
    """The length of the first axis that all arrays of a data set share."""
    lengths = {path_name(path): _length(path, leaf) for path, leaf in jax.tree.leaves_with_path(data)}
    if not lengths:
        raise DataError("the data set holds no arrays")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"the arrays of a data set must have one length, but they have: {told}")
    return next(iter(lengths.values()))


def form(batch: Any, batch_size: int) -> Any:
    """Shape and type of each array of a batch; DataError where its first axis is not the batch."""
    described = jax.tree.map(_form, batch)
    for path, leaf in jax.tree.leaves_with_path(described):
        if leaf.shape[:1] != (batch_size,):
            raise DataError(
                f"{path_name(path)} of a batch has shape {leaf.shape}: its first axis should be {batch_size}"
            )
    return described


def check_fits_device(data: Any) -> None:
    """Refuse integers of 64 bits that a device would silently cut to 32."""
    for path, leaf in jax.tree.leaves_with_path(data):
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        there = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if there == leaf.dtype:
            continue
        kept = np.iinfo(there)
        for value in (leaf.min(), leaf.max()):
            if not kept.min <= value <= kept.max:
                raise DataError(
                    f"{path_name(path)}: {value} does not fit the device's {there}; give smaller numbers"
                )


def put_into(buffers: Any, step: int, batch: Any, wanted: Any, update: int) -> None:
    """Copy a batch into place `step` of stacked buffers; DataError that names what differs from `wanted`."""
    check_alike(batch, wanted, update)
    check_fits_device(batch)
    for array, buffer in zip(jax.tree.leaves(batch), jax.tree.leaves(buffers), strict=True):
        buffer[step] = array


def check_alike(batch: Any, wanted: Any, number: int, *, or_fewer: bool = False) -> None:
    """Refuse a batch whose arrays are not of `wanted`'s shapes and types; with `or_fewer`, fewer samples will do."""
    here, expected = str(jax.tree.structure(batch)), str(jax.tree.structure(wanted))
    if here != expected:
        raise DataError(f"batch {number} is made of {here}, the first one of {expected}")
    for (path, leaf), array in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(batch), strict=True):
        got, length = _form(array), leaf.shape[:1]
        fits = (0,) < got.shape[:1] <= length if or_fewer else got.shape[:1] == length
        if not fits or got.shape[1:] != leaf.shape[1:] or got.dtype != leaf.dtype:
            raise DataError(
                f"batch {number}: {path_name(path)} is {got.dtype}{list(got.shape)}, "
                f"the first batch had {leaf.dtype}{list(leaf.shape)}"
            )


def _form(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise DataError(f"a batch holds {array.dtype} values: only numbers can go to the device")
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def _length(path: Any, leaf: Any) -> int:
    try:
        return len(leaf)
    except TypeError:
        raise DataError(
            f"{path_name(path)} of a data set is a single value: its first axis should be the samples"
        ) from None


def path_name(path: Any) -> str:
    """A leaf's place in a pytree, for people: `image`, `params/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "data"
