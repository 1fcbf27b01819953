"""Iterators that are given to more than one call: each call goes on with the next batch, and none is lost.

An iterator cannot be begun again, and batches are drawn ahead of their use. So those that were seen are known again,
with the batches that were drawn from them and not used.

What an input_fn may give, brought into one form: batches `{"features": ..., "labels": ...}`.
"""

import sys
from collections import deque
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
    ShuffledBatches,
    check_alike,
    common_length,
    describe_batch,
)
from hotloop.engine.device import REPLICA
from hotloop.engine.feed import Feed, Resident, Streamed, passes_through
from hotloop.engine.order import Order
from hotloop.errors import DataError
from hotloop.families.estimator.config import RunConfig, call_with_known, is_whole
from hotloop.families.estimator.labels import Classes


class PushbackIterator(Iterator[Any]):
    """An iterator that takes back what was drawn and not used."""

    def __init__(self, iterator: Iterator[Any]):
        self.iterator = iterator
        self.trained = False
        """Has it been trained with? Then its next batch is the one to go on with."""
        self._back: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._back.popleft() if self._back else next(self.iterator)

    def give_back(self, batches: Iterable[Any]) -> None:
        """The next ones to come, in this order."""
        self._back.extendleft(reversed(list(batches)))


_known: dict[int, PushbackIterator] = {}


def wrap_iterator(value: Iterable[Any]) -> PushbackIterator:
    """The one of an iterator that was seen before, or a new one."""
    iterator = iter(value)
    if iterator is not value:
        return PushbackIterator(iterator)  # begun right now: nobody can give it again
    _forget_the_unreachable()
    # It is held, so that no other has its number meanwhile; few kinds of iterators take a weak reference.
    return _known.setdefault(id(iterator), PushbackIterator(iterator))


def _forget_the_unreachable() -> None:
    """Let go of iterators that nobody but this module has: they cannot be given again, and they hold data."""
    for number in [number for number, each in _known.items() if sys.getrefcount(each.iterator) == _OURS]:
        del _known[number]


_OURS = 2  # references to an iterator: of its Continued, and of the question itself

NamedBatch = dict[str, Any]
RESIDENT_BYTES = 2 * 2**30
"""Arrays up to this size are kept on the device; larger ones are sent batch by batch."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays with a common first axis, in batches: shuffled pass after pass, or as they lie.

    They keep their types on the device (bytes stay bytes); `transform(batch, key)` may widen and augment there.
    """

    features: Any
    labels: Any = None
    batch_size: int | None = None
    shuffle: bool = True
    transform: Callable[[NamedBatch, Any], NamedBatch] | None = None


@dataclass(frozen=True, eq=False)
class FromArrays:
    """Arrays, ready to use."""

    data: NamedBatch
    batch_size: int
    shuffle: bool
    transform: Any

    @property
    def samples(self) -> int:
        """How many there are."""
        return common_length(self.data)

    @property
    def example(self) -> NamedBatch:
        """The form of a batch as the model sees it."""
        batch: NamedBatch = jax.tree.map(
            lambda leaf: _struct((self.batch_size, *leaf.shape[1:]), leaf.dtype), self.data
        )
        if self.transform is None:
            return batch
        return _transformed(self.transform, batch)

    @property
    def signature(self) -> Any:
        """What a compiled program depends on."""
        forms = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), self.data)
        return "arrays", str(forms), self.batch_size, self.shuffle, self.transform, self.fits

    @property
    def fits(self) -> bool:
        """Small enough for the device."""
        size: int = sum(leaf.nbytes for leaf in jax.tree.leaves(self.data))
        return size <= RESIDENT_BYTES

    def feed(self, config: RunConfig, mesh: Any, first: int) -> AbstractContextManager[Feed]:
        """On the device, or streamed."""
        options = {"seed": config.seed, "transform": self.transform, "sharding": _over(mesh)}
        if self.fits:
            return nullcontext(Resident(self.data, self.batch_size, shuffled=self.shuffle, **options))
        order = Order(self.samples, self.batch_size, config.seed, "carry", self.shuffle)
        source = ShuffledBatches(lambda at: jax.tree.map(lambda leaf: leaf[at], self.data), order)
        return Streamed(source, self.batch_size, **options)

    def passed_over(self, first: int) -> int:
        """None: their place is a number."""
        return 0

    def check_labels(self, classes: Classes | None) -> "FromArrays":
        """Refuse labels that the model has no class for; of those that the transform makes, in the first batch."""
        if classes is None or "labels" not in self.data:
            return self
        if self.transform is None or passes_through(self.transform, self.data, "labels"):
            classes.check(self.data["labels"])
        else:
            first = jax.tree.map(lambda leaf: leaf[: self.batch_size], self.data)
            classes.check(jax.jit(self.seen)(first)["labels"], " of the first batch, transformed,")
        return self

    def batches(self) -> Iterator[NamedBatch]:
        """Every sample once, as they lie; the last batch may be smaller."""
        for start in range(0, self.samples, self.batch_size):
            batch = jax.tree.map(lambda leaf: leaf[start : start + self.batch_size], self.data)  # noqa: B023
            yield self.seen(batch)

    def seen(self, batch: NamedBatch) -> NamedBatch:
        """A batch as evaluation sees it: where there is a transform, with one key for all."""
        return batch if self.transform is None else self.transform(batch, jax.random.key(0))


@dataclass(frozen=True, eq=False)
class FromBatches:
    """An iterable of batches; `begin` starts a pass over it."""

    begin: Callable[[], Iterator[NamedBatch]]
    begun: PushbackIterator
    """The first pass."""
    example: NamedBatch
    batch_size: int
    length: int | None
    classes: Classes | None = None
    samples: None = None

    @property
    def signature(self) -> Any:
        """What a compiled program depends on."""
        return "batches", str(self.example)

    @contextmanager
    def feed(self, config: RunConfig, mesh: Any, first: int) -> Iterator[Feed]:
        """Streamed from where update `first` stands; what is not used goes back."""
        source = IterableBatches(self.begin, self.batch_size, first, drop=self.passed_over(first))
        self.begun.trained = True
        feed = Streamed(source, self.batch_size, seed=config.seed, sharding=_over(mesh))
        feed.look = partial(_look, self.classes)
        try:
            with feed:
                yield feed
        finally:
            self.begun.give_back(source.unused(max(first, feed.sent)))

    def passed_over(self, first: int) -> int:
        """How many batches come before that of update `first`: none where an iterator stands there already."""
        return 0 if self.begun.trained else first

    def check_labels(self, classes: Classes | None) -> "FromBatches":
        """Check each batch as it comes."""
        return replace(self, classes=classes)

    def batches(self) -> Iterator[NamedBatch]:
        """One pass; each batch is like the first one, or smaller."""
        for number, batch in enumerate(self.begin()):
            check_alike(batch, self.example, number, or_fewer=True)
            common_length(batch)
            _look(self.classes, batch, number)
            yield batch


@dataclass(frozen=True, eq=False)
class FromFeed:
    """A feed of the engine, used as it is."""

    ready: Any
    classes: Classes | None = None
    length: None = None

    @property
    def batch_size(self) -> int:
        """Its own."""
        size: int = self.ready.batch_size
        return size

    @property
    def samples(self) -> int | None:
        """How many there are, if it knows."""
        known: int | None = self.ready.samples
        return known

    @property
    def example(self) -> NamedBatch:
        """The form of a batch."""
        made = jax.eval_shape(self.ready.batch, self.ready.like(1), _struct((), np.uint32))
        if not isinstance(made, Mapping) or "features" not in made:
            raise DataError(
                'the feed gives batches without names: make it of {"features": ..., "labels": ...}'
            )
        return dict(made)

    @property
    def signature(self) -> Any:
        """What a compiled program depends on; a feed of another kind is its own program."""
        return "feed", getattr(self.ready, "signature", id(self.ready))

    @contextmanager
    def feed(self, config: RunConfig, mesh: Any, first: int) -> Iterator[Feed]:
        """Itself; its labels are looked at where they have not been."""
        if self.classes is None or self._whole_labels() is not None:
            yield self.ready
        elif isinstance(self.ready, Streamed) and self.ready.keeps("labels"):
            self.ready.look = partial(_look, self.classes)
            try:
                yield self.ready
            finally:
                self.ready.look = None
        else:
            check_batch(self.classes, self.ready, first)
            yield self.ready

    def _whole_labels(self) -> Any:
        """All labels, where they lie on the device as the model sees them."""
        return self.ready.kept("labels") if isinstance(self.ready, Resident) else None

    def passed_over(self, first: int) -> int:
        """None: their place is a number."""
        return 0

    def check_labels(self, classes: Classes | None) -> "FromFeed":
        """Refuse labels on the device that the model has no class for; others are looked at as they come."""
        if classes is not None and (labels := self._whole_labels()) is not None:
            classes.check(labels)
        return replace(self, classes=classes)

    def batches(self) -> Iterator[NamedBatch]:
        """A feed has no end."""
        raise DataError(
            "a feed shuffles without end: to evaluate or predict, let input_fn give arrays or batches"
        )


Source = FromArrays | FromBatches | FromFeed


def read_input(input_fn: Any, run: RunConfig, **known: Any) -> Source:
    """What an input_fn (or its value) gives, brought into form."""
    begin: Callable[[], Any] = (
        partial(call_with_known, "input_fn", input_fn, **known) if callable(input_fn) else lambda: input_fn
    )
    value = begin()
    if isinstance(value, Arrays):
        return _arrays(value, run)
    if hasattr(value, "arguments") and hasattr(value, "longest_call"):
        return FromFeed(value)
    if _is_arrays(value):
        batch = name_batch(value)
        return _arrays(Arrays(batch["features"], batch.get("labels")), run)
    if isinstance(value, Iterable):
        return _batches(value, begin)
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


def _transformed(transform: Any, batch: NamedBatch) -> NamedBatch:
    """The form of what a transform makes of a batch."""
    try:
        made = jax.eval_shape(transform, batch, jax.eval_shape(lambda: jax.random.key(0)))
    except Exception as error:  # whatever a user's function throws
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"Arrays: transform failed: {type(error).__name__} {reason}") from error
    if not isinstance(made, Mapping) or "features" not in made:
        raise DataError(
            f"Arrays: transform gives a {type(made).__name__}: it must give a batch "
            "{'features': ..., 'labels': ...}"
        )
    return dict(made)


def _check_fields(given: Arrays) -> None:
    """That each field is what it is said to be."""
    size = given.batch_size
    if size is not None and not (is_whole(size) and size > 0):
        raise DataError(f"Arrays: batch_size={size!r} must be a whole number from 1")
    if not isinstance(given.shuffle, bool):
        raise DataError(f"Arrays: shuffle={given.shuffle!r} must be True or False")
    if given.transform is not None and not callable(given.transform):
        raise DataError(f"Arrays: transform={given.transform!r} must be a function of a batch and a key")


def _arrays(given: Arrays, config: RunConfig) -> FromArrays:
    _check_fields(given)
    data = (
        name_batch((given.features, given.labels))
        if given.labels is not None
        else {"features": _host(given.features)}
    )
    if not common_length(data):
        raise DataError("input_fn gives no samples: its arrays are empty")
    return FromArrays(data, int(given.batch_size or config.batch_size), given.shuffle, given.transform)


def _batches(value: Any, begin: Callable[[], Any]) -> FromBatches:
    """The first batch is looked at, and stays the next one; after the first pass input_fn makes each anew."""
    begun = wrap_iterator(value)
    first = next(begun, None)
    if first is None:
        raise DataError(
            "input_fn gives no batches: the input is empty, or an iterator that has ended already"
        )
    begun.give_back([first])
    seen = name_batch(first)
    size = common_length(seen)
    kept = [begun]

    def passes() -> Iterator[NamedBatch]:
        source = kept.pop() if kept else iter(begin())
        return map(name_batch, source)

    length = len(value) if hasattr(value, "__len__") else None
    return FromBatches(passes, begun, describe_batch(seen, size), size, length)


def name_batch(batch: Any) -> NamedBatch:
    """A batch by name: a pair is features and labels, a dict with features is itself, all else is features."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        features, labels = batch
        return {"features": _host(features)} | ({} if labels is None else {"labels": _host(labels)})
    if isinstance(batch, Mapping) and "features" in batch and set(batch) <= {"features", "labels"}:
        return {name: _host(value) for name, value in batch.items()}
    return {"features": _host(batch)}


def _host(tree: Any) -> Any:
    """Arrays that numpy understands; a torch tensor lends its memory."""
    return jax.tree.map(
        lambda leaf: leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else _array(leaf), tree
    )


def _array(leaf: Any) -> Any:
    return leaf if _is_array(leaf) else np.asarray(leaf)


def check_batch(classes: Classes | None, feed: Feed, update: int) -> None:
    """Refuse the labels of one update's batch, as the model sees them."""
    batch = jax.jit(feed.batch)(feed.arguments(update, 1), np.uint32(0))
    _look(classes, batch, update)


def _look(classes: Classes | None, batch: NamedBatch, number: int) -> None:
    if classes is not None:
        classes.check(batch.get("labels"), f" of batch {number}")


def _over(mesh: Any) -> NamedSharding | None:
    return NamedSharding(mesh, PartitionSpec(REPLICA)) if mesh is not None else None  # type: ignore[no-untyped-call]


def _struct(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))  # type: ignore[no-untyped-call]
