"""What an input_fn may give, and the source of batches that is made of it.

Arrays (with or without labels), `Arrays` with an order and an augmentation, a feed of the engine, or any iterable of
batches: a list, a generator, a torch or grain loader. A batch is then `{"features": ..., "labels": ...}`, the labels
left out where there are none. What is wrong with a batch or its labels is named here, wherever it came from.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine.batch_sources import (
    IterableBatches,
    PushbackIterator,
    ShuffledBatches,
    Streamed,
    find_iterator,
)
from hotloop.engine.device import REPLICA
from hotloop.engine.feed import (
    Feed,
    Order,
    Resident,
    check_alike,
    common_length,
    describe_batch,
    passes_through,
)
from hotloop.errors import DataError
from hotloop.families.estimator.build import Classes
from hotloop.families.estimator.config import RunConfig, call_with_known, check_value, is_whole

NamedBatch = dict[str, Any]
RESIDENT_BYTES = 2 * 2**30
"""Arrays up to this size are kept on the device; larger ones are sent batch by batch."""


@dataclass(frozen=True, eq=False)
class FromArrays:
    """Arrays with a common first axis; their place in training is the number of the update."""

    data: NamedBatch
    batch_size: int
    shuffle: bool
    transform: Any
    length: None = None

    @property
    def samples(self) -> int:
        return common_length(self.data)

    @property
    def example(self) -> NamedBatch:
        batch: NamedBatch = jax.tree.map(
            lambda leaf: _struct((self.batch_size, *leaf.shape[1:]), leaf.dtype), self.data
        )
        if self.transform is None:
            return batch
        try:
            found = jax.eval_shape(self.transform, batch, jax.eval_shape(lambda: jax.random.key(0)))
        except Exception as error:  # whatever a user's function throws
            reason = str(error).strip().split("\n")[0]
            raise DataError(f"Arrays: transform failed: {type(error).__name__} {reason}") from error
        if not isinstance(found, Mapping) or "features" not in found:
            raise DataError(
                f"Arrays: transform gives a {type(found).__name__}: it must give a batch "
                "{'features': ..., 'labels': ...}"
            )
        return dict(found)

    @property
    def signature(self) -> Any:
        forms = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), self.data)
        return "arrays", str(forms), self.batch_size, self.shuffle, self.transform, self._fits_device

    @property
    def _fits_device(self) -> bool:
        size: int = sum(leaf.nbytes for leaf in jax.tree.leaves(self.data))
        return size <= RESIDENT_BYTES

    def feed(self, config: RunConfig, mesh: Any, first: int) -> AbstractContextManager[Feed]:
        options = {"seed": config.seed, "transform": self.transform, "sharding": _sharding(mesh)}
        if self._fits_device:
            return nullcontext(Resident(self.data, self.batch_size, shuffled=self.shuffle, **options))
        order = Order(self.samples, self.batch_size, config.seed, "carry", self.shuffle)
        source = ShuffledBatches(lambda at: jax.tree.map(lambda leaf: leaf[at], self.data), order)
        return Streamed(source, self.batch_size, **options)

    def count_skipped(self, first: int) -> int:
        return 0

    def check_labels(self, classes: Classes | None) -> "FromArrays":
        """All of them; of those that the transform makes, the first batch's."""
        if classes is None or "labels" not in self.data:
            return self
        if self.transform is None or passes_through(self.transform, self.data, "labels"):
            classes.check(self.data["labels"])
        else:
            first = jax.tree.map(lambda leaf: leaf[: self.batch_size], self.data)
            seen = jax.jit(self.transform_for_evaluation)(first)
            classes.check(seen["labels"], " of the first batch, transformed,")
        return self

    def batches(self) -> Iterator[NamedBatch]:
        for start in range(0, self.samples, self.batch_size):
            batch = jax.tree.map(lambda leaf: leaf[start : start + self.batch_size], self.data)  # noqa: B023
            yield self.transform_for_evaluation(batch)

    def transform_for_evaluation(self, batch: NamedBatch) -> NamedBatch:
        """A batch as evaluation sees it: where there is a transform, with one key for all."""
        return batch if self.transform is None else self.transform(batch, jax.random.key(0))


@dataclass(frozen=True, eq=False)
class FromBatches:
    """An iterable of batches; `begin` starts a pass over it, the first of which is `begun`."""

    begin: Callable[[], Iterator[NamedBatch]]
    begun: PushbackIterator
    example: NamedBatch
    batch_size: int
    length: int | None
    classes: Classes | None = None
    samples: None = None

    @property
    def signature(self) -> Any:
        return "batches", str(self.example)

    @contextmanager
    def feed(self, config: RunConfig, mesh: Any, first: int) -> Iterator[Feed]:
        """Streamed from where update `first` stands; what is not used goes back."""
        source = IterableBatches(self.begin, self.batch_size, first, drop=self.count_skipped(first))
        self.begun.trained = True
        feed = Streamed(source, self.batch_size, seed=config.seed, sharding=_sharding(mesh))
        feed.look = partial(_check_labels, self.classes)
        try:
            with feed:
                yield feed
        finally:
            self.begun.give_back(source.unused(max(first, feed.sent)))

    def count_skipped(self, first: int) -> int:
        """None where an iterator stands at update `first` already."""
        return 0 if self.begun.trained else first

    def check_labels(self, classes: Classes | None) -> "FromBatches":
        return replace(self, classes=classes)

    def batches(self) -> Iterator[NamedBatch]:
        for number, batch in enumerate(self.begin()):
            check_alike(batch, self.example, number, or_fewer=True)
            common_length(batch)
            _check_labels(self.classes, batch, number)
            yield batch


@dataclass(frozen=True, eq=False)
class FromFeed:
    """A feed of the engine, used as it is."""

    ready: Any
    batch_size: int
    samples: int | None
    classes: Classes | None = None
    length: None = None

    @property
    def example(self) -> NamedBatch:
        batch = jax.eval_shape(self.ready.batch, self.ready.like(1), _struct((), np.uint32))
        if not isinstance(batch, Mapping) or "features" not in batch:
            raise DataError(
                'the feed gives batches without names: make it of {"features": ..., "labels": ...}'
            )
        return dict(batch)

    @property
    def signature(self) -> Any:
        """A feed of a kind that has no signature is a program of its own."""
        return "feed", getattr(self.ready, "signature", id(self.ready))

    @contextmanager
    def feed(self, config: RunConfig, mesh: Any, first: int) -> Iterator[Feed]:
        """Itself; its labels are looked at where they have not been."""
        if self.classes is None or self._labels_on_device() is not None:
            yield self.ready
        elif isinstance(self.ready, Streamed) and self.ready.keeps("labels"):
            self.ready.look = partial(_check_labels, self.classes)
            try:
                yield self.ready
            finally:
                self.ready.look = None
        else:
            check_batch(self.classes, self.ready, first)
            yield self.ready

    def _labels_on_device(self) -> Any:
        """All labels, where they lie on the device as the model sees them."""
        return self.ready.kept("labels") if isinstance(self.ready, Resident) else None

    def count_skipped(self, first: int) -> int:
        return 0

    def check_labels(self, classes: Classes | None) -> "FromFeed":
        if classes is not None and (labels := self._labels_on_device()) is not None:
            classes.check(labels)
        return replace(self, classes=classes)

    def batches(self) -> Iterator[NamedBatch]:
        raise DataError(
            "a feed shuffles without end: to evaluate or predict, let input_fn give arrays or batches"
        )


Source = FromArrays | FromBatches | FromFeed
"""All of them have:

* `batch_size`; `samples` and `length` (in batches), None where they are not known;
* `example`, the form of a batch as the model sees it, and `signature`, what a compiled program depends on;
* `feed(config, mesh, first)`, to train from update `first`, and `count_skipped(first)`, the batches dropped before it;
* `check_labels(classes)`: refuses labels that the model has no class for, and returns the source to go on with;
* `batches()`: every sample once, in order; the last batch may be smaller.
"""


def check_batch(classes: Classes | None, feed: Feed, update: int) -> None:
    """Refuse the labels of one update's batch, as the model sees them."""
    batch = jax.jit(feed.batch)(feed.arguments(update, 1), np.uint32(0))
    _check_labels(classes, batch, update)


def _check_labels(classes: Classes | None, batch: NamedBatch, number: int) -> None:
    if classes is not None:
        classes.check(batch.get("labels"), f" of batch {number}")


def _sharding(mesh: Any) -> NamedSharding | None:
    return NamedSharding(mesh, PartitionSpec(REPLICA)) if mesh is not None else None  # type: ignore[no-untyped-call]


def _struct(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))  # type: ignore[no-untyped-call]


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
