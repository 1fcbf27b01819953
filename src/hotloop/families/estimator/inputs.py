"""What an input_fn may give, and the source that is made of it.

Arrays (with or without labels), `Arrays` with an order and an augmentation, a feed of the engine, or any iterable of
batches: a list, a generator, a torch or grain loader. Everything is checked here, and what is wrong is named.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from hotloop.engine.batch_sources import PushbackIterator, find_iterator
from hotloop.engine.feed import common_length, describe_batch
from hotloop.errors import DataError
from hotloop.families.estimator.checks import check_value, is_whole
from hotloop.families.estimator.config import RunConfig, call_with_known
from hotloop.families.estimator.sources import FromArrays, FromBatches, FromFeed, NamedBatch, Source


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays with a common first axis, in batches: shuffled pass after pass, or as they lie.

    They keep their types on the device (bytes stay bytes); `transform(batch, key)` may widen and augment there.

    >>> import numpy as np
    >>> from hotloop import Arrays
    >>> images, labels = np.zeros((100, 32, 32, 3), np.uint8), np.zeros(100, np.int32)
    >>> def widen(batch, key):
    ...     return {**batch, "features": batch["features"] / 255}
    >>> Arrays(images, labels, batch_size=20, transform=widen).shuffle
    True
    """

    features: Any
    labels: Any = None
    batch_size: int | None = None
    """None: that of the run config."""
    shuffle: bool = True
    transform: Callable[[NamedBatch, Any], NamedBatch] | None = None


def read_input(input_fn: Any, run: RunConfig, **known: Any) -> Source:
    """The source of an input_fn, or of its value; a function is called with those of `known` that it names."""
    begin: Callable[[], Any] = (
        partial(call_with_known, "input_fn", input_fn, **known) if callable(input_fn) else lambda: input_fn
    )
    value = begin()
    if isinstance(value, Arrays):
        return _from_arrays(value, run)
    if hasattr(value, "arguments") and hasattr(value, "longest_call"):
        return FromFeed(value, value.batch_size, value.samples)
    if _is_arrays(value):
        batch = name_batch(value)
        return _from_arrays(Arrays(batch["features"], batch.get("labels")), run)
    if isinstance(value, Iterable):
        return _from_batches(value, begin)
    raise DataError(
        f"input_fn gives a {type(value).__name__}: it may give arrays (features, labels), Arrays, a feed, or an "
        "iterable of batches"
    )


def _is_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_array(leaf) for leaf in jax.tree.leaves(dict(value)))
    if isinstance(value, tuple) and len(value) == 2:
        return all(_is_array(leaf) for leaf in jax.tree.leaves(value))
    return _is_array(value)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _from_arrays(given: Arrays, config: RunConfig) -> FromArrays:
    size, transform = given.batch_size, given.transform
    for name, value, wanted, fits in (
        ("batch_size", size, "a whole number from 1", size is None or (is_whole(size) and size > 0)),
        ("shuffle", given.shuffle, "True or False", isinstance(given.shuffle, bool)),
        ("transform", transform, "a function of a batch and a key", transform is None or callable(transform)),
    ):
        check_value(f"Arrays: {name}", value, wanted, fits, DataError)
    data = name_batch((given.features, given.labels))
    if not common_length(data):
        raise DataError("input_fn gives no samples: its arrays are empty")
    return FromArrays(data, int(size or config.batch_size), given.shuffle, transform)


def _from_batches(value: Any, begin: Callable[[], Any]) -> FromBatches:
    """The first batch is looked at, and stays the next one; after the first pass `begin` makes each anew."""
    iterator = iter(value)
    # One that was given before goes on; one that is begun right now nobody can give again.
    begun = find_iterator(iterator) if iterator is value else PushbackIterator(iterator)
    first = next(begun, None)
    if first is None:
        raise DataError(
            "input_fn gives no batches: the input is empty, or an iterator that has ended already"
        )
    begun.give_back([first])
    batch = name_batch(first)
    size = common_length(batch)
    not_begun = [begun]

    def passes() -> Iterator[NamedBatch]:
        return map(name_batch, not_begun.pop() if not_begun else iter(begin()))

    length = len(value) if hasattr(value, "__len__") else None
    return FromBatches(passes, begun, describe_batch(batch, size), size, length)


def name_batch(batch: Any) -> NamedBatch:
    """A batch by name: a pair is features and labels, a dict with features is itself, all else is features."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        features, labels = batch
        return {"features": _to_host(features)} | ({} if labels is None else {"labels": _to_host(labels)})
    if isinstance(batch, Mapping) and "features" in batch and set(batch) <= {"features", "labels"}:
        return {name: _to_host(value) for name, value in batch.items()}
    return {"features": _to_host(batch)}


def _to_host(tree: Any) -> Any:
    """Arrays that numpy understands; a torch tensor lends its memory."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "detach"):
            return leaf.detach().cpu().numpy()
        return leaf if _is_array(leaf) else np.asarray(leaf)

    return jax.tree.map(convert, tree)
