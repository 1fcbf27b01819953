"""The last thing that happens to a batch before the update sees it, the same for every feed.

It is spread over the replicas, then transformed (augmented, densified, cast) with a key of its own that
depends on the seed and the update alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from hotloop.engine.keys import seed_key, stream
from hotloop.errors import DataError

Batch = Any
Transform = Callable[[Batch, Array], Batch]


class Finish:
    """What happens to a batch on the device: it is spread over the replicas and transformed."""

    def __init__(
        self, seed: int, batch_size: int, transform: Transform | None, sharding: NamedSharding | None
    ):
        self._key = seed_key(seed)
        self._transform = transform
        self._sharding = sharding
        if sharding is not None:
            check_split(sharding, batch_size)

    def arguments(self, first: int) -> dict[str, Any]:
        """What a call that begins with update `first` must be handed."""
        return {"key": self._key, "first": np.uint32(first)}

    def __call__(self, batch: Batch, arguments: Mapping[str, Any], step: Array) -> Batch:
        """Inside a call: the finished batch of its update number `step`."""
        batch = spread(batch, self._sharding)
        if self._transform is None:
            return batch
        update = jnp.asarray(arguments["first"], jnp.uint32) + step
        return self._transform(batch, stream(arguments["key"], "transform", update))


def keeps(transform: Transform, batch: Batch, name: str) -> bool:
    """Does the transform hand on the array `name` of a batch as it is?"""
    same = []

    def watched(batch: Any, key: Array) -> Any:
        made = transform(batch, key)
        same.append(isinstance(made, Mapping) and made.get(name) is batch[name])
        return made

    jax.eval_shape(watched, batch, jax.eval_shape(lambda: jax.random.key(0)))
    return same[0]


def spread(batch: Batch, sharding: NamedSharding | None) -> Batch:
    """Inside a call: let each replica work on its share of the batch."""
    return batch if sharding is None else jax.lax.with_sharding_constraint(batch, sharding)  # type: ignore[no-untyped-call]


def on_mesh_of(sharding: NamedSharding | None, axes: tuple[Any, ...]) -> NamedSharding | None:
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
