"""Batches that stream to the device: from random access, in the shuffled order, or from iterables, in their own.

`Streamed` prepares the next call's batches on a thread while the device works; for the same data, batch size and seed
they are those of a `Resident`. Of several processes each reads its own rows of every batch.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from hotloop.engine import feed, processes
from hotloop.engine.feed import Batch, Order, Remainder, SourceFeed, Transform
from hotloop.errors import DataError

Fetch = Callable[[np.ndarray[Any, np.dtype[np.uint32]]], Any]
BUFFER_BYTES = 256 * 2**20  # of batches that a call gets at most, or one batch


class InputEnded(DataError):
    """There is no further batch; `left` of those asked for are still there."""

    def __init__(self, left: int):
        super().__init__("the input has ended")
        self.left = left


class IterableBatches:
    """Batches in the order of an iterable that may end; `begin` makes a new pass over it.

    Update n takes batch n of the endless row of passes, so that a run that is resumed goes on where it stopped: what
    came before is drawn and dropped. A run that reaches the end of a pass stops there (`InputEnded`); the next one
    begins a new pass.
    """

    samples = None

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        batch_size: int,
        first: int = 0,
        *,
        drop: int | None = None,
        may_end: bool = True,
    ):
        """Update `first` is the first to come; `drop` batches lie before it (none given: one for each update)."""
        self._begin, self._batch_size, self._first, self._may_end = begin, batch_size, first, may_end
        self._kept: deque[Any] = deque()
        self._dropped = first if drop is None else drop
        self._iterator, left = begin(), self._dropped
        while left:
            passed = sum(1 for _ in islice(self._iterator, left))
            if not passed:
                raise self._ended(left, begun=left < self._dropped)
            left -= passed
            self._iterator = begin() if left else self._iterator

    def _ended(self, left: int, begun: bool) -> DataError:
        return DataError(
            f"the input has ended {left} batches before the one to go on with: give what can be begun again"
            if begun
            else "the input has no batches: give at least one"
        )

    def example(self) -> Any:
        """The first batch to come; it stays."""
        if not self._draw(1):
            self._iterator = self._begin()  # the input ended right here: a new pass begins
            if not self._draw(1):
                raise self._ended(0, begun=self._dropped > 0)
        return self._kept[0]

    def batches(self, first: int, count: int, rows: slice = slice(None)) -> Iterator[Any]:
        """The batches of updates first .. first + count - 1, or these rows of them; earlier ones are dropped."""
        if first < self._first:
            raise DataError(f"an iterator cannot go back to batch {first}: it stands at batch {self._first}")
        while self._first < first and self._draw(1):
            self._kept.popleft()
            self._first += 1
        if self._first < first or not self._draw(count):
            if self._may_end:
                raise InputEnded(len(self._kept))
            last = self._first + len(self._kept)
            raise DataError(
                f"the data ended after {last} batches: give more, repeat them, or ask for fewer updates"
            )
        for batch in islice(self._kept, count):
            yield batch if rows == slice(None) else jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)

    def unused(self, update: int) -> list[Any]:
        """What is drawn already of the batches from `update` on."""
        return list(islice(self._kept, update - self._first, None))

    def _draw(self, wanted: int) -> bool:
        """Have so many batches at hand; says whether there are."""
        self._kept.extend(islice(self._iterator, max(0, wanted - len(self._kept))))
        return len(self._kept) >= wanted

    def position(self, update: int) -> dict[str, Any]:
        return {"batch_size": self._batch_size, "update": update}

    def check_position(self, saved: Mapping[str, Any]) -> None:
        feed.check_same(self.position(0), saved)


class ShuffledBatches:
    """Batches of a random-access source, in the order of `Order`."""

    def __init__(self, fetch: Fetch, order: Order):
        self._fetch, self._order, self.samples = fetch, order, order.samples
        self.position, self.check_position = order.position, order.check_position

    def example(self) -> Any:
        """A batch whose shapes and types are those of all; its values count for nothing."""
        return next(self.batches(0, 1))

    def batches(self, first: int, count: int, rows: slice = slice(None)) -> Iterator[Any]:
        """The batches of updates first .. first + count - 1, or these rows of them."""
        for indices in self._order.indices(self._order.start(first), np.arange(count, dtype=np.uint32)):
            yield self._fetch(indices[rows])


@dataclass(eq=False)
class PushbackIterator(Iterator[Any]):
    """An iterator that takes back what was drawn ahead and not used."""

    iterator: Iterator[Any]
    claimed: bool = False
    """Does it belong to a feed, which may have drawn ahead of what it used?"""
    trained: bool = False
    """Has it been trained with? Then its next batch is the one to go on with."""
    _back: deque[Any] = field(default_factory=deque)

    def __next__(self) -> Any:
        return self._back.popleft() if self._back else next(self.iterator)

    def give_back(self, batches: Iterable[Any]) -> None:
        """The next ones to come, in this order."""
        self._back.extendleft(reversed(list(batches)))


_known: dict[int, PushbackIterator] = {}
_OURS = (
    2  # references to an iterator that only we hold: its PushbackIterator's, and that of the question itself
)


def find_iterator(iterator: Iterator[Any]) -> PushbackIterator:
    """What is known of an iterator: always the same object, as long as the iterator is held elsewhere too."""
    # Held by hand, so that no other gets its number: iterators of Python's own kinds (map, zip) take no weak reference.
    for number in [number for number, each in _known.items() if sys.getrefcount(each.iterator) <= _OURS]:
        del _known[number]
    return _known.setdefault(id(iterator), PushbackIterator(iterator))


class Streamed(SourceFeed, AbstractContextManager["Streamed"]):
    """Batches from the host, stacked for a whole call and sent to the device by a thread that is one call ahead.

    `source` is a pytree of arrays or of anything that takes `source[indices]` (a memory map, an archive), a
    function of indices that returns a batch (then say how many `samples` there are), a ready `ShuffledBatches` or
    `IterableBatches` with an order of its own, or an iterator of batches, which is taken as it comes: resuming draws
    and drops what came before. For the last two seed and remainder play no part in the order. No call gets more than
    `buffer_bytes` of batches; two such buffers exist at a time.

    >>> import jax, numpy as np
    >>> from hotloop import Program, Streamed
    >>> def read(indices):  # from files, say
    ...     return {"x": indices.astype(np.float32)}
    >>> def update(total, batch, key):
    ...     return total + batch["x"].sum(), {"loss": batch["x"].mean()}
    >>> with Streamed(read, batch_size=4, samples=12) as feed:
    ...     total, _ = Program(update, feed, 3, jax.random.key(0))(jax.numpy.zeros(()), first=0, count=3)
    >>> float(total)
    66.0
    """

    any_count = False

    def __init__(
        self,
        source: Any | Fetch | ShuffledBatches | IterableBatches | Iterator[Batch],
        batch_size: int,
        *,
        seed: int = 0,
        remainder: Remainder = "carry",
        samples: int | None = None,
        transform: Transform | None = None,
        sharding: NamedSharding | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        if isinstance(source, ShuffledBatches | IterableBatches):
            self._source: ShuffledBatches | IterableBatches = source
        elif isinstance(source, Iterator):
            found = find_iterator(source)
            if found.claimed:  # its place is unknown: the other feed has drawn ahead of what it used
                raise DataError(
                    "another feed has drawn from this iterator: give that feed again, or what can be begun anew"
                )
            found.claimed = True
            self._source = IterableBatches(lambda: source, batch_size, may_end=False)
        elif not callable(source):
            length = feed.common_length(source) if samples is None else samples
            self._source = ShuffledBatches(
                lambda indices: jax.tree.map(lambda leaf: leaf[indices], source),
                Order(length, batch_size, seed, remainder),
            )
        elif samples is not None:
            self._source = ShuffledBatches(source, Order(samples, batch_size, seed, remainder))
        else:
            raise DataError("a function of indices does not tell how many samples there are: give `samples`")
        super().__init__(self._source, batch_size, seed, transform, sharding)
        self._rows = processes.own_rows(sharding, batch_size)
        self._form = feed.describe_batch(self._source.example(), batch_size)
        size: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._form))
        self.longest_call = max(1, buffer_bytes // max(1, size))
        self._placement = feed.placement_like(sharding, (None, *sharding.spec) if sharding else ())
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotloop-feed")
        self._next: tuple[tuple[int, int], Future[Batch]] | tuple[None, None] = None, None
        self.sent = 0
        """The number of the update after the last one whose batch was handed out."""
        self.look: Callable[[Batch, int], None] | None = None
        """Sees each batch, and the number of its update, before it is sent; it may refuse one."""

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """The batches of a call, stacked on the device; those of the `following` updates are begun on the thread. Never
        more than one piece is in the making and one in use. What goes wrong there is raised here."""
        (place, future), self._next = self._next, (None, None)
        if future is None or place != (first, count):
            if future is not None:
                future.cancel()
            future = self._pool.submit(self._stack, first, count)
        batches = self._agree_on_end(future, count)
        self.sent = first + count
        if following:
            self._next = ((self.sent, following), self._pool.submit(self._stack, self.sent, following))
        return {"batches": batches, "finish": self.finish_arguments(first)}

    def _agree_on_end(self, future: Future[Batch], count: int) -> Batch:
        """What the thread has made. An input that ends in one process has ended for all: where it ends first."""
        if self._sharding is None or not processes.spans_processes(self._sharding):
            return future.result()
        ended = isinstance(self._source, IterableBatches)
        try:
            batches, left = future.result(), count
        except InputEnded as end:
            left = end.left
        if ended and (left := min(processes.gathered(left))) < count:
            raise InputEnded(left)
        return batches

    def like(self, count: int) -> Any:
        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((count, *leaf.shape), dtype, sharding=self._placement)  # type: ignore[no-untyped-call]

        return {"batches": jax.tree.map(stacked, self._form), "finish": self.finish_arguments(0)}

    def batch(self, arguments: Any, step: Array) -> Batch:
        batch = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, step, keepdims=False), arguments["batches"]
        )
        return self.finish(batch, arguments["finish"], step)

    @property
    def signature(self) -> Any:
        return feed.describe_forms(self._form), self.longest_call, self._transform, self._sharding

    def keeps(self, name: str) -> bool:
        """Does the update see the array `name` of a batch as it comes?"""
        return self.sees_unchanged(self._form, name)

    def close(self) -> None:
        """Drop what is prepared and end the thread."""
        self._next = None, None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stack(self, first: int, count: int) -> Batch:
        rows, form = self._rows, self._form
        if rows != slice(None):
            own = rows.stop - rows.start
            form = jax.tree.map(lambda leaf: leaf.update(shape=(own, *leaf.shape[1:])), form)
        buffers = jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), form)
        for step, batch in enumerate(self._source.batches(first, count, rows)):
            feed.check_alike(batch, form, first + step)
            feed.check_fits_device(batch)
            for array, buffer in zip(jax.tree.leaves(batch), jax.tree.leaves(buffers), strict=True):
                buffer[step] = array
            if self.look is not None:
                self.look(batch, first + step)
        return processes.place_rows(buffers, self._placement, self.batch_size, axis=1)
