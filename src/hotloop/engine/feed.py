"""Where a compiled call gets its batches from: which samples make up which update, and data that lives on the device.

Update n takes the places n*B .. n*B + B - 1 of an endless stream of shuffled passes. Where a place lies (its pass, and
how far into it) is worked out in Python integers for a call's first update and in 32-bit arithmetic from there on, by
the same code on the host and inside a compiled program, bit for bit. What streams to the device is in batch_sources.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from hotloop.engine import processes
from hotloop.engine.device import platform
from hotloop.engine.keys import seed_key, stream
from hotloop.errors import CheckpointError, DataError

Remainder = Literal["carry", "drop"]
ROUNDS = 24
LARGEST = 2**31 - 1  # sums of two positions must fit 32 bits
_GOLDEN = np.uint32(0x9E3779B9)


def permute(positions: ArrayLike, n: int, seed: int | ArrayLike, epoch: ArrayLike) -> Any:
    """The samples at `positions` (uint32 below 2n) of the pass named by seed and epoch, and of the next.

    Position n is the first of epoch + 1, so that a batch may straddle two passes. `seed` is a whole number or
    its two words (`seed_words`), so that it may be an argument of a compiled program; `epoch` is one number
    or an array that broadcasts against `positions`. Returns uint32 below n, by numpy for a numpy array and by
    jax for a jax array.

    Evaluated only where it is asked for, without state, sort or index array: swap-or-not (Hoang, Morris, Rogaway,
    CRYPTO 2012). Each round pairs every x with `pivot - x (mod n)` and swaps the pair when a hash of it says so. Both
    members of a pair take the same decision, so each round is a bijection for any n, and 24 rounds mix well.
    """
    check_size(n)
    xp: Any = jnp if isinstance(positions, Array) else np
    if n == 1:  # besides being simple: XLA's GPU compiler fails on shuffles of one
        return xp.zeros_like(positions)
    size = np.uint32(n)
    over = positions >= size
    epoch = xp.asarray(epoch).astype(np.uint32)
    words = xp.asarray(seed_words(seed) if isinstance(seed, int) else seed)
    # Never a scalar: numpy warns when a scalar wraps around, and wrapping is the point.
    epochs = xp.stack([epoch, epoch + np.uint32(1)])[None]
    low, high = (word.reshape((1,) * epochs.ndim) for word in (words[:1], words[1:]))
    root = _mix(low ^ _mix(high + _GOLDEN))
    first, second = _mix(root + epochs), _mix(_mix(root + _GOLDEN) ^ epochs)
    counter = xp.arange(2 * ROUNDS, dtype=np.uint32).reshape(-1, *(1,) * (epochs.ndim - 1))
    drawn = _mix(_mix(first + counter * _GOLDEN) ^ second)
    pivots, salts = (
        drawn[:ROUNDS] % size,
        drawn[ROUNDS:],
    )  # [rounds, 2, *epoch.shape]: this epoch's, the next one's

    def swap_or_not(r: Any, x: Any) -> Any:
        partner = xp.where(over, pivots[r][1], pivots[r][0]) + (size - x)
        partner = xp.where(partner >= size, partner - size, partner)
        salt = xp.where(over, salts[r][1], salts[r][0])
        return xp.where(_mix(xp.maximum(x, partner) ^ salt) & np.uint32(1) != 0, partner, x)

    x = xp.where(over, positions - size, positions)
    if xp is np:
        for r in range(ROUNDS):
            x = swap_or_not(r, x)
        return x
    # Compiled for a CPU, four rounds a trip run as fast as all 24 in a row and compile in half the time; an accelerator
    # wants one fused kernel.
    return jax.lax.fori_loop(0, ROUNDS, swap_or_not, x, unroll=4 if platform() == "cpu" else ROUNDS)


def seed_words(seed: int) -> np.ndarray:
    """A seed of up to 64 bits as two uint32 words, low word first."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def check_size(n: int) -> None:
    """Refuse what 32-bit positions cannot count."""
    if not 1 <= n <= LARGEST:
        raise DataError(f"a data set of {n} samples cannot be shuffled: it must have 1 to {LARGEST} samples")


def _mix(x: Any) -> Any:
    """A 32-bit hash (C. Wellons' low-bias constants): each output bit depends on every input bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@dataclass(frozen=True)
class Order:
    """The order of `samples` samples in batches of `batch_size`, named by a seed of up to 64 bits.

    Where the batch size does not divide the number of samples, "carry" lets a batch begin in one pass and end
    in the next (every sample exactly once a pass), and "drop" leaves the last samples of each pass out, so
    that every pass begins with a batch (which samples are left out differs from pass to pass).
    """

    samples: int
    batch_size: int
    seed: int = 0
    remainder: Remainder = "carry"
    shuffled: bool = True
    """Without it every pass takes the samples as they lie."""

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise DataError("the data set is empty: there is nothing to train on")
        check_size(self.samples)
        if self.batch_size < 1:
            raise DataError(f"batch size {self.batch_size}: must be at least 1")
        if self.batch_size > self.samples:
            raise DataError(
                f"batch size {self.batch_size} is larger than the data set of {self.samples} samples: "
                f"take a batch of at most {self.samples}"
            )

    @property
    def period(self) -> int:
        """Places of the stream that one pass fills."""
        dropped = self.samples % self.batch_size if self.remainder == "drop" else 0
        return self.samples - dropped

    @property
    def longest_call(self) -> int:
        """Updates of one call for which 32-bit places suffice."""
        return int((2**32 - self.samples) // self.batch_size) - 1

    def start(self, update: int) -> dict[str, Any]:
        """Small scalars that say where an update begins: the arguments of `indices`."""
        epoch, offset = divmod(update * self.batch_size, self.period)
        return {"seed": seed_words(self.seed), "epoch": np.uint32(epoch), "offset": np.uint32(offset)}

    def indices(self, start: Mapping[str, Any], steps: ArrayLike) -> Any:
        """The samples of the updates `steps` (uint32) after `start`, of shape [*steps.shape, batch_size].

        The same numbers by numpy for a numpy array and by jax for a jax array.
        """
        xp: Any = jnp if isinstance(steps, Array) else np
        begin = start["offset"] + steps[..., None] * np.uint32(self.batch_size)  # type: ignore[index]
        period = np.uint32(self.period)
        places = begin % period + xp.arange(self.batch_size, dtype=np.uint32)
        if not self.shuffled:
            return places % period
        return permute(places, self.samples, start["seed"], start["epoch"] + begin // period)

    def position(self, update: int) -> dict[str, Any]:
        """What a checkpoint keeps of the data's place."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "remainder": self.remainder,
            **({} if self.shuffled else {"shuffled": False}),
            "update": update,
        }

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Refuse to go on from a checkpoint whose batches were drawn in another order."""
        check_same(self.position(0), saved)


def check_same(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare two positions, all but the update they stand at."""
    for name, value in here.items():
        if name != "update" and saved.get(name) != value:
            label = name.replace("_", " ")
            raise CheckpointError(
                f"the checkpoint was made with {label} {saved.get(name)}, this run has {value}: "
                f"resume with {label} {saved.get(name)}, or start a new run"
            )


Batch = Any
Gather = Callable[[Any, Array], Batch]
Transform = Callable[[Batch, Array], Batch]


class Feed(Protocol):
    """What a compiled call needs of a feed."""

    batch_size: int
    any_count: bool  # do the arguments of a call have the same shapes for every number of updates?
    longest_call: int  # the most updates that one call may take

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


class SourceFeed:
    """Batches of a source that are spread over the replicas, then transformed by a key of the seed and the update."""

    def __init__(
        self,
        source: Any,
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

    def finish_arguments(self, first: int) -> dict[str, Any]:
        return {"key": self._key, "first": np.uint32(first)}

    def finish(self, batch: Batch, arguments: Mapping[str, Any], step: Array) -> Batch:
        batch = spread_batch(batch, self._sharding)
        if self._transform is None:
            return batch
        update = jnp.asarray(arguments["first"], jnp.uint32) + step
        return self._transform(batch, stream(arguments["key"], "transform", update))

    def sees_unchanged(self, batch: Batch, name: str) -> bool:
        """Does the update see the array `name` of a batch as it comes?"""
        if not isinstance(batch, Mapping) or name not in batch:
            return False
        return self._transform is None or passes_through(self._transform, batch, name)


def gather_rows(data: Any, indices: Array) -> Batch:
    """The rows `indices` of every array of a data set."""
    return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), data)


class Resident(SourceFeed):
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
        self.longest_call = self.order.longest_call
        self._gather = gather
        check_fits_device(data)
        self._data = processes.place(data, placement_like(sharding, ()))

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """The data set itself and where in its stream the call begins."""
        return {"data": self._data, "start": self.order.start(first), "finish": self.finish_arguments(first)}

    def like(self, count: int) -> Any:
        return self.arguments(0, count)

    def batch(self, arguments: Any, step: Array) -> Batch:
        indices = self.order.indices(arguments["start"], step)
        return self.finish(self._gather(arguments["data"], indices), arguments["finish"], step)

    @property
    def signature(self) -> Any:
        """What a compiled call depends on besides its arguments: feeds for which it is equal share a program."""
        order = replace(self.order, seed=0)
        return describe_forms(self._data), order, self._gather, self._transform, self._sharding

    def kept(self, name: str) -> Array | None:
        """The whole array of a name, where batches hold rows of it as they are; None elsewhere."""
        as_it_is = self._gather is gather_rows and self.sees_unchanged(self._data, name)
        return self._data[name] if as_it_is else None


def describe_forms(data: Any) -> str:
    return str(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), data))


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


def place_everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """A tree that lies on the host, or on one device, copied to every device of a mesh; None: as it is."""
    if mesh is None:
        return tree
    return processes.place(tree, NamedSharding(mesh, PartitionSpec()))  # type: ignore[no-untyped-call]


def check_split(sharding: NamedSharding, batch_size: int) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    try:
        sharding.shard_shape((batch_size,))
    except ValueError:
        raise DataError(
            f"a batch of {batch_size} cannot be split evenly over {sharding.num_devices} devices: "
            f"take a multiple of {sharding.num_devices}"
        ) from None


def fill_up(sharding: NamedSharding | None, batch_size: int) -> int:
    """The least batch from `batch_size` on that the devices can share evenly."""
    if sharding is None:
        return batch_size
    devices = sharding.num_devices
    parts: int = devices // sharding.shard_shape((devices,))[0]  # other axes of the mesh hold copies
    return -(-batch_size // parts) * parts


def common_length(data: Any) -> int:
    """The length of the first axis that all arrays of a data set share."""
    lengths = {}
    for path, leaf in jax.tree.leaves_with_path(data):
        try:
            lengths[path_name(path)] = len(leaf)
        except TypeError:
            raise DataError(
                f"{path_name(path)} of a data set is a single value: its first axis should be the samples"
            ) from None
    if not lengths:
        raise DataError("the data set holds no arrays")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"the arrays of a data set must have one length, but they have: {found}")
    return next(iter(lengths.values()))


def describe_batch(batch: Any, batch_size: int) -> Any:
    """Shape and type of each array of a batch; DataError where its first axis is not the batch."""
    described = jax.tree.map(_describe_leaf, batch)
    for path, leaf in jax.tree.leaves_with_path(described):
        if leaf.shape[:1] != (batch_size,):
            raise DataError(
                f"{path_name(path)} of a batch has shape {leaf.shape}: its first axis should be {batch_size}"
            )
    return described


def check_fits_device(data: Any) -> None:
    """Refuse integers of 64 bits that a device would silently cut to 32."""
    for path, leaf in jax.tree.leaves_with_path(data):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.size:
            there = jax.dtypes.canonicalize_dtype(leaf.dtype)
            for value in (leaf.min(), leaf.max()) if there != leaf.dtype else ():
                if not np.iinfo(there).min <= value <= np.iinfo(there).max:
                    raise DataError(
                        f"{path_name(path)}: {value} does not fit the device's {there}; give smaller numbers"
                    )


def check_alike(batch: Any, wanted: Any, number: int, *, or_fewer: bool = False) -> None:
    """Refuse a batch whose arrays are not of `wanted`'s shapes and types; with `or_fewer`, fewer samples will do."""
    here, expected = str(jax.tree.structure(batch)), str(jax.tree.structure(wanted))
    if here != expected:
        raise DataError(f"batch {number} is made of {here}, the first one of {expected}")
    for (path, leaf), array in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(batch), strict=True):
        got, length = _describe_leaf(array), leaf.shape[:1]
        fits = (0,) < got.shape[:1] <= length if or_fewer else got.shape[:1] == length
        if not fits or got.shape[1:] != leaf.shape[1:] or got.dtype != leaf.dtype:
            raise DataError(
                f"batch {number}: {path_name(path)} is {got.dtype}{list(got.shape)}, "
                f"the first batch had {leaf.dtype}{list(leaf.shape)}"
            )


def _describe_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise DataError(f"a batch holds {array.dtype} values: only numbers can go to the device")
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def path_name(path: Any) -> str:
    """A leaf's place in a pytree, for people: `image`, `params/0/w`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "data"
