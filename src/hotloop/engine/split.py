"""A global batch over replicas and parts: every replica works on its share, part after part.

Means are over the whole batch, however it is split, and random keys belong to samples by their place in it. It knows
neither models nor losses: a family hands in a function of some samples.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from hotloop.engine import precision
from hotloop.engine.device import REPLICA
from hotloop.engine.keys import sample_keys

EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(REPLICA)  # type: ignore[no-untyped-call]
Means = Any
Carry = TypeVar("Carry")


def on_replicas(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """`fn(axis, batch, *others)` as a function of batch and others; with a mesh, each replica has its share of batch.

    `axis` is the name to reduce over, or None; what `fn` returns must be the same on every replica.
    """
    if mesh is None:
        return partial(fn, None)

    def run(batch: Any, *others: Any) -> Any:
        return jax.shard_map(
            partial(fn, REPLICA),
            mesh=mesh,
            in_specs=(SPLIT, *[EVERYWHERE] * len(others)),
            out_specs=EVERYWHERE,
            check_vma=False,
        )(batch, *others)

    return run


def mean_of_parts(
    fn: Callable[[Carry, Any, Array], tuple[Means, Carry]],
    carry: Carry,
    batch: Any,
    key: Array,
    count: int,
    axis: str | None = None,
    *,
    repeated: bool = False,
) -> tuple[Means, Carry]:
    """Of the means that `fn(carry, part, keys)` gives for `count` equal parts of this replica's share, the mean.

    The carry goes from part to part. Several parts are averaged in float32. With `repeated` the share is one part that
    stands for all.
    """
    size = jax.tree.leaves(batch)[0].shape[0] // (1 if repeated else count)
    first = 0 if axis is None else lax.axis_index(axis) * (count * size)

    def part(carry: Carry, number: Array | int) -> tuple[Means, Carry]:
        start = 0 if repeated else number * size
        taken = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), batch)
        return fn(carry, taken, sample_keys(key, first + number * size, size))

    if count == 1:
        return part(carry, 0)
    share = 1 / count

    def add(held: tuple[Carry, Means], number: Array) -> tuple[tuple[Carry, Means], None]:
        means, carry = part(held[0], number)
        return (carry, jax.tree.map(lambda a, b: a + share * b.astype(jnp.float32), held[1], means)), None

    forms, _ = jax.eval_shape(part, carry, 0)
    zeros = jax.tree.map(lambda form: jnp.zeros(form.shape, jnp.float32), forms)
    (carry, means), _ = lax.scan(add, (carry, zeros), jnp.arange(count))
    return means, carry


def average_replicas(means: Means, axis: str | None) -> Means:
    """The mean over replicas, in float32: a sum of 16-bit gradients may leave their range."""
    return means if axis is None else lax.pmean(precision.cast(means, precision.FLOAT32), axis)  # type: ignore[no-untyped-call]
