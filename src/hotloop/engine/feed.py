"""Where a compiled call gets its batches from: data that lives on the device, or data that streams to it.

`Resident` gathers batches inside the loop; `Streamed` prepares the next call's on a thread while the device works. For
the same data, batch size and seed both give the same batches. A batch is whatever pytree the data set is made of.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine.batch_sources import (
    Fetch,
    IterableBatches,
    IteratorBatches,
    Prefetch,
    ShuffledBatches,
    check_alike,
    check_fits_device,
    common_length,
    describe_batch,
)
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.order import Order, Remainder
from hotloop.errors import DataError

Batch = Any
Gather = Callable[[Any, Array], Batch]
Transform = Callable[[Batch, Array], Batch]


class Feed(Protocol):
    """What a compiled call needs of a feed."""

    batch_size: int
    any_count: bool  # do the arguments of a call have the same shapes for every number of updates?

    @property
    def longest_call(self) -> int:
        """The most updates that one call may take."""

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """What the call of updates first .. first + count - 1 is handed; `following` are likely to come next."""

    def like(self, count: int) -> Any:
        """What the compiler must know of the arguments of `count` updates: shapes, types, places."""

    def batch(self, arguments: Any, step: Array) -> Batch:
        """Inside the call: the batch of its update number `step` (uint32, 0 for the first)."""

    def position(self, update: int) -> dict[str, Any]:
        """What a checkpoint after `update` updates keeps of the feed."""

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Raise CheckpointError when this feed would not go on where the saved one stopped."""


class _SourceFeed:
    """Batches of a source that are spread over the replicas, then transformed by a key of the seed and the update."""

    def __init__(
        self,
        source: Order | ShuffledBatches | IterableBatches,
        batch_size: int,
        seed: int,
        transform: Transform | None,
        sharding: NamedSharding | None,
    ):
        self.samples, self.batch_size = source.samples, batch_size
        self.position, self.check_position = source.position, source.check_position
        self._key, self._transform, self._sharding = seed_key(seed), transform, sharding
        if sharding is not None:
            check_split(sharding, batch_size)

    def _finish_arguments(self, first: int) -> dict[str, Any]:
        return {"key": self._key, "first": np.uint32(first)}

    def _finish(self, batch: Batch, arguments: Mapping[str, Any], step: Array) -> Batch:
        batch = spread_batch(batch, self._sharding)
        if self._transform is None:
            return batch
        update = jnp.asarray(arguments["first"], jnp.uint32) + step
        return self._transform(batch, stream(arguments["key"], "transform", update))

    def _passes_through(self, batch: Batch, name: str) -> bool:
        """Does the update see the array `name` of a batch as it comes?"""
        if not isinstance(batch, Mapping) or name not in batch:
            return False
        return self._transform is None or passes_through(self._transform, batch, name)


def gather_rows(data: Any, indices: Array) -> Batch:
    """The rows `indices` of every array of a data set."""
    return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), data)


class Resident(_SourceFeed):
    """A data set kept on the device, in its own types; batches are gathered inside the compiled loop.

    `data` is a pytree of arrays with a common first axis. For anything else (ragged rows, say) give the
    number of `samples` and a pure `gather(data, indices)`. `transform(batch, key)` augments or widens a
    batch; its key depends on the seed and the update alone. With a `sharding` over the batch axis the data is
    copied to all its devices and each works on its share of the batch.

    >>> import numpy as np
    >>> from hotloop import Resident
    >>> feed = Resident({"x": np.arange(6)}, batch_size=2, seed=1)
    >>> epoch = [feed.batch(feed.arguments(update, 1), np.uint32(0))["x"] for update in range(3)]
    >>> sorted(np.concatenate(epoch).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    any_count = True

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int = 0,
        remainder: Remainder = "carry",
        shuffled: bool = True,
        samples: int | None = None,
        gather: Gather = gather_rows,
        transform: Transform | None = None,
        sharding: NamedSharding | None = None,
    ):
        self.order = Order(
            common_length(data) if samples is None else samples, batch_size, seed, remainder, shuffled
        )
        super().__init__(self.order, batch_size, seed, transform, sharding)
        self._gather = gather
        check_fits_device(data)
        self._data = jax.device_put(data, placement_like(sharding, ()))

    @property
    def longest_call(self) -> int:
        return self.order.longest_call

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """The data set itself and where in its stream the call begins."""
        return {"data": self._data, "start": self.order.start(first), "finish": self._finish_arguments(first)}

    def like(self, count: int) -> Any:
        return self.arguments(0, count)

    def batch(self, arguments: Any, step: Array) -> Batch:
        indices = self.order.indices(arguments["start"], step)
        return self._finish(self._gather(arguments["data"], indices), arguments["finish"], step)

    @property
    def signature(self) -> Any:
        """What a compiled call depends on besides its arguments: feeds for which it is equal share a program."""
        order = replace(self.order, seed=0)
        return _forms(self._data), order, self._gather, self._transform, self._sharding

    def kept(self, name: str) -> Array | None:
        """The whole array of a name, where batches hold rows of it as they are; None elsewhere."""
        as_it_is = self._gather is gather_rows and self._passes_through(self._data, name)
        return self._data[name] if as_it_is else None


def _forms(data: Any) -> str:
    return str(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), data))


class Streamed(_SourceFeed):
    """Batches from the host, stacked for a whole call and sent to the device by a thread that is one call
    ahead.

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
        buffer_bytes: int = 256 * 2**20,
    ):
        if isinstance(source, ShuffledBatches | IterableBatches):
            self._source: ShuffledBatches | IterableBatches = source
        elif isinstance(source, Iterator):
            self._source = IteratorBatches(source, batch_size)
        else:
            self._source = ShuffledBatches.of(source, batch_size, samples, seed, remainder)
        super().__init__(self._source, batch_size, seed, transform, sharding)
        self._form = describe_batch(self._source.example(), batch_size)
        self._buffer_bytes = buffer_bytes
        self._placement = placement_like(sharding, (None, *sharding.spec) if sharding else ())
        self._ahead = Prefetch(self._stack)
        self.sent = 0
        """The number of the update after the last one whose batch was handed out."""
        self.look: Callable[[Batch, int], None] | None = None
        """Sees each batch, and the number of its update, before it is sent; it may refuse one."""

    @property
    def longest_call(self) -> int:
        """As many updates as the buffer holds, and at least one."""
        size: int = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._form))
        return max(1, self._buffer_bytes // max(1, size))

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """The batches of a call, stacked on the device; those of the `following` updates are begun."""
        batches = self._ahead.take(first, count, following)
        self.sent = first + count
        return {"batches": batches, "finish": self._finish_arguments(first)}

    def like(self, count: int) -> Any:
        """Nothing is read for it."""

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((count, *leaf.shape), dtype, sharding=self._placement)  # type: ignore[no-untyped-call]

        return {"batches": jax.tree.map(stacked, self._form), "finish": self._finish_arguments(0)}

    def batch(self, arguments: Any, step: Array) -> Batch:
        batch = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, step, keepdims=False), arguments["batches"]
        )
        return self._finish(batch, arguments["finish"], step)

    @property
    def signature(self) -> Any:
        """As that of `Resident`."""
        return _forms(self._form), self.longest_call, self._transform, self._sharding

    def keeps(self, name: str) -> bool:
        """Does the update see the array `name` of a batch as it comes?"""
        return self._passes_through(self._form, name)

    def close(self) -> None:
        """End the thread."""
        self._ahead.close()

    def __enter__(self) -> "Streamed":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stack(self, first: int, count: int) -> Batch:
        buffers = jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), self._form)
        for step, batch in enumerate(self._source.batches(first, count)):
            check_alike(batch, self._form, first + step)
            check_fits_device(batch)
            for array, buffer in zip(jax.tree.leaves(batch), jax.tree.leaves(buffers), strict=True):
                buffer[step] = array
            if self.look is not None:
                self.look(batch, first + step)
        return jax.device_put(buffers, self._placement)


def passes_through(transform: Transform, batch: Batch, name: str) -> bool:
    """Does the transform hand on the array `name` of a batch as it is?"""
    same = []

    def watched(batch: Any, key: Array) -> Any:
        made = transform(batch, key)
        same.append(isinstance(made, Mapping) and made.get(name) is batch[name])
        return made

    jax.eval_shape(watched, batch, jax.eval_shape(lambda: jax.random.key(0)))
    return same[0]


def spread_batch(batch: Batch, sharding: NamedSharding | None) -> Batch:
    """Inside a call: let each replica work on its share of the batch."""
    return batch if sharding is None else jax.lax.with_sharding_constraint(batch, sharding)  # type: ignore[no-untyped-call]


def placement_like(sharding: NamedSharding | None, axes: tuple[Any, ...]) -> NamedSharding | None:
    """The placement over the devices of `sharding` that splits `axes`; () copies to every device."""
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def check_split(sharding: NamedSharding, batch_size: int) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    try:
        sharding.shard_shape((batch_size,))
    except ValueError:
        raise DataError(
            f"a batch of {batch_size} cannot be split evenly over {sharding.num_devices} devices: "
            f"take a multiple of {sharding.num_devices}"
        ) from None
