"""What an input_fn may give, and the source of batches that is made of it: arrays (with or without labels), the path
of their .npz file, `Arrays` with an order and an augmentation, a feed of the engine, or any iterable of batches. Each
is `{"features": ..., "labels": ...}` then, without labels where there are none; what is wrong with it is named here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.data.content import read_npz
from hotloop.engine import processes
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
    fill_up,
    passes_through,
)
from hotloop.errors import DataError
from hotloop.families.estimator.config import RunConfig, call_with_known, check_value, is_path, is_whole
from hotloop.families.estimator.model import Classes, NamedBatch

RESIDENT_BYTES = (
    2 * 2**30
)  # arrays up to this size are kept on the device; larger ones are sent batch by batch


@dataclass(frozen=True, eq=False)
class FromArrays:
    data: NamedBatch
    samples: int
    batch_size: int
    shuffle: bool
    transform: Any
    length: None = None

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
        return "arrays", str(forms), self.batch_size, self.shuffle, self.transform, self._fits_device()

    def _fits_device(self) -> bool:
        return bool(sum(leaf.nbytes for leaf in jax.tree.leaves(self.data)) <= RESIDENT_BYTES)

    def feed(self, config: RunConfig, mesh: Any, first: int) -> AbstractContextManager[Feed]:
        options = {"seed": config.seed, "transform": self.transform, "sharding": _sharding(mesh)}
        if self._fits_device():
            return nullcontext(Resident(self.data, self.batch_size, shuffled=self.shuffle, **options))
        order = Order(self.samples, self.batch_size, config.seed, "carry", self.shuffle)
        source = ShuffledBatches(lambda at: jax.tree.map(lambda leaf: leaf[at], self.data), order)
        return Streamed(source, self.batch_size, **options)

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
        return batch if self.transform is None else self.transform(batch, jax.random.key(0))


@dataclass(frozen=True, eq=False)
class FromBatches:
    begin: Callable[[], Iterator[NamedBatch]]  # starts a pass
    begun: PushbackIterator  # the first pass
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
        return "feed", getattr(
            self.ready, "signature", id(self.ready)
        )  # without one it is a program of its own

    @contextmanager
    def feed(self, config: RunConfig, mesh: Any, first: int) -> Iterator[Feed]:
        """Itself; its labels are looked at where they have not been."""
        unseen = self.classes is not None and self._labels_on_device() is None
        streamed = unseen and isinstance(self.ready, Streamed) and self.ready.keeps("labels")
        if streamed:
            self.ready.look = partial(_check_labels, self.classes)
        elif unseen:
            check_batch(self.classes, self.ready, first)
        try:
            yield self.ready
        finally:
            if streamed:
                self.ready.look = None

    def _labels_on_device(self) -> Any:
        return self.ready.kept("labels") if isinstance(self.ready, Resident) else None

    def check_labels(self, classes: Classes | None) -> "FromFeed":
        if classes is not None and (labels := self._labels_on_device()) is not None:
            classes.check(labels)
        return replace(self, classes=classes)

    def batches(self) -> Iterator[NamedBatch]:
        raise DataError(
            "a feed shuffles without end: to evaluate or predict, let input_fn give arrays or batches"
        )


Source = FromArrays | FromBatches | FromFeed
"""`example` is the form of a batch as the model sees it, `signature` what a compiled program depends on; `samples` and
`length` (in batches) are None where they are not known. `feed(config, mesh, first)` is to train from update `first`,
`batches()` has every sample once, in order."""


def check_batch(classes: Classes | None, feed: Feed, update: int) -> None:
    """Refuse the labels of one update's batch, as the model sees them."""
    batch = processes.JitTogether(feed.batch)(feed.arguments(update, 1), np.uint32(0))
    _check_labels(classes, batch, update)


def _check_labels(classes: Classes | None, batch: NamedBatch, number: int) -> None:
    if classes is not None:
        classes.check(batch.get("labels"), f" of batch {number}")


def take_own_rows(sharding: NamedSharding | None, batch_size: int, batch: NamedBatch) -> NamedBatch:
    """Of a batch that every process has, what lies on this one's devices; all of it where there is one process."""
    own = processes.own_rows(sharding, fill_up(sharding, batch_size))
    rows: NamedBatch = jax.tree.map(lambda leaf: leaf[own], batch)
    return rows


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
    batch_size: int | None = None  # none: that of the run config
    shuffle: bool = True
    transform: Callable[[NamedBatch, Any], NamedBatch] | None = None


def read_input(input_fn: Any, run: RunConfig, **known: Any) -> Source:
    """The source of an input_fn, or of its value; a function is called with those of `known` that it names."""
    begin: Callable[[], Any] = (
        partial(call_with_known, "input_fn", input_fn, **known) if callable(input_fn) else lambda: input_fn
    )
    value = begin()
    if is_path(value):
        value = read_arrays(Path(value))
    if hasattr(value, "arguments") and hasattr(value, "longest_call"):
        return FromFeed(value, value.batch_size, value.samples)
    leaves = [value]
    if isinstance(value, Mapping) or (isinstance(value, tuple) and len(value) == 2):
        leaves = jax.tree.leaves(dict(value) if isinstance(value, Mapping) else value)
    if all(map(_is_array, leaves)):
        batch = name_batch(value)
        value = Arrays(batch["features"], batch.get("labels"))
    if isinstance(value, Arrays):
        size, augment = value.batch_size, value.transform
        for name, given, wanted, fits in (
            ("batch_size", size, "a whole number from 1", size is None or (is_whole(size) and size > 0)),
            ("shuffle", value.shuffle, "True or False", isinstance(value.shuffle, bool)),
            ("transform", augment, "a function of a batch and a key", augment is None or callable(augment)),
        ):
            check_value(f"Arrays: {name}", given, wanted, fits, DataError)
        data = name_batch((value.features, value.labels))
        if not (samples := common_length(data)):
            raise DataError("input_fn gives no samples: its arrays are empty")
        return FromArrays(data, samples, int(size or run.batch_size), value.shuffle, augment)
    if not isinstance(value, Iterable):
        raise DataError(
            f"input_fn gives a {type(value).__name__}: it may give arrays (features, labels), the path of their .npz "
            "file, Arrays, a feed, or an iterable of batches"
        )
    # The first batch is looked at, and stays the next one; after the first pass `begin` makes each anew.
    iterator = iter(value)
    # One that was given before goes on; one that is begun right now cannot be given again.
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

    length = len(value) if isinstance(value, Sized) else None
    return FromBatches(passes, begun, describe_batch(batch, size), size, length)


def read_arrays(path: Path) -> NamedBatch:
    """The arrays of an .npz file: `features`, and `labels` where they are there."""
    if path.suffix != ".npz":
        raise DataError(f"input_fn gives the path {path}: it may be that of an .npz file")
    arrays = read_npz(path)
    if "features" not in arrays or not set(arrays) <= {"features", "labels"}:
        raise DataError(
            f"{path} has {', '.join(sorted(arrays)) or 'nothing'}: it must have features, and may have labels"
        )
    return dict(arrays)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def name_batch(batch: Any) -> NamedBatch:
    """A batch by name: a pair is features and labels, a dict with features is itself, all else is features."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        named = {"features": batch[0]} | ({} if batch[1] is None else {"labels": batch[1]})
    elif isinstance(batch, Mapping) and "features" in batch and set(batch) <= {"features", "labels"}:
        named = dict(batch)
    else:
        named = {"features": batch}

    def to_host(leaf: Any) -> Any:
        if hasattr(leaf, "detach"):  # a torch tensor lends its memory
            return leaf.detach().cpu().numpy()
        return leaf if _is_array(leaf) else np.asarray(leaf)

    found: NamedBatch = jax.tree.map(to_host, named)
    return found
