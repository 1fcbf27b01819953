"""Where the chains lie: evenly spread over several devices by their axis, or all on one, which needs no word of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from hotloop.engine.device import platform
from hotloop.errors import DeviceError, OptionError
from hotloop.mcmc import random_bits
from hotloop.mcmc.kernel import State
from hotloop.mcmc.loops import Draws, Numbers, WarmUp

CHAINS = "chains"


class Spread(NamedTuple):
    """Places of arrays by which of their axes is that of the chains; all None on one device."""

    everywhere: NamedSharding | None = None
    first: NamedSharding | None = None
    second: NamedSharding | None = None
    third: NamedSharding | None = None

    def compile_for(self, function: Callable[..., Any], given: Any, found: Any, **options: Any) -> Any:
        """`jax.jit` with the places of what the function is given and gives."""
        if self.everywhere is None:
            return jax.jit(function, **options)
        return jax.jit(function, in_shardings=given, out_shardings=found, **options)

    def numbers(self) -> Numbers:
        """The same random numbers for any number of devices: each makes all and takes those of its chains, which costs
        less than to pass them around."""
        everywhere = self.everywhere
        if everywhere is None:
            return random_bits.momenta_and_uniforms
        devices = everywhere.mesh.size

        def of_all(words: Array, draw: Array, size: int, chains: int, dtype: Any) -> tuple[Array, Array]:
            own = chains // devices

            def of_one(words: Array, draw: Array) -> tuple[Array, Array]:
                momentum, uniform = random_bits.momenta_and_uniforms(words, draw, size, chains, dtype)
                start = lax.axis_index(CHAINS) * own
                return (
                    lax.dynamic_slice_in_dim(momentum, start, own, 1),
                    lax.dynamic_slice_in_dim(uniform, start, own, 0),
                )

            places = P(None, CHAINS), P(CHAINS)  # type: ignore[no-untyped-call]
            spread = jax.shard_map(of_one, mesh=everywhere.mesh, in_specs=P(), out_specs=places)  # type: ignore[no-untyped-call]
            return spread(words, draw)

        return of_all

    def state(self) -> State:
        return State(self.second, self.first, self.second)  # type: ignore[arg-type]

    def warm_up(self) -> WarmUp:
        """What the chains have taught is everywhere."""
        return WarmUp(self.state(), *[self.everywhere] * 4)  # type: ignore[arg-type]

    def arranged(self) -> tuple[Any, Draws]:
        """Draws that begin with the chains; there are no positions left beside the samples."""
        return self.first, Draws(self.everywhere, *[self.first] * 3)  # type: ignore[arg-type]


def put(array: Array, place: Sharding) -> Array:
    """The array where a compiled program takes it. One that lies there stays as it is: jax would not use the draws of
    a single device beside arrays of another one if it had been put there."""
    return array if array.sharding.is_equivalent_to(place, array.ndim) else jax.device_put(array, place)


def spread_chains(chains: int, devices: int) -> Spread:
    """So many chains over the first of this process's devices; DeviceError or OptionError where that cannot be."""
    if devices == 1:
        return Spread()
    here = jax.local_devices(backend=platform())
    if devices > len(here):
        raise DeviceError(f"devices is {devices}: here are {len(here)} of {platform()}; use at most that")
    if chains % devices:
        near = max(devices, round(chains / devices) * devices)
        raise OptionError(
            f"chains is {chains} and devices is {devices}: each takes equally many chains; give {near} chains, say"
        )
    mesh = Mesh(np.array(here[:devices], dtype=object), (CHAINS,), axis_types=(AxisType.Auto,))
    axes = (), (CHAINS,), (None, CHAINS), (None, None, CHAINS)
    return Spread(*(NamedSharding(mesh, P(*each)) for each in axes))  # type: ignore[no-untyped-call]
