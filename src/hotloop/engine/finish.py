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
from jax.sharding import NamedSharding

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
            _check_split(sharding, batch_size)

    def arguments(self, first: int) -> dict[str, Any]:
        """What a call that begins with update `first` must be handed."""
        return {"key": self._key, "first": np.uint32(first)}

    def __call__(self, batch: Batch, arguments: Mapping[str, Any], step: Array) -> Batch:
        """Inside a call: the finished batch of its update number `step`."""
        if self._sharding is not None:
            batch = jax.lax.with_sharding_constraint(batch, self._sharding)  # type: ignore[no-untyped-call]
        if self._transform is None:
            return batch
        update = jnp.asarray(arguments["first"], jnp.uint32) + step
        return self._transform(batch, stream(arguments["key"], "transform", update))


def _check_split(sharding: NamedSharding, batch_size: int) -> None:
    try:
        sharding.shard_shape((batch_size,))
    except ValueError:
        raise DataError(
            f"a batch of {batch_size} cannot be split evenly over {sharding.num_devices} devices: "
            f"take a multiple of {sharding.num_devices}"
        ) from None
