"""One weight update by a global batch: every replica works on its share of it, part after part.

Means are over the whole batch, however it is split, and random keys belong to samples by their place in it. It knows
no models: a family hands in its loss as a function of some samples.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

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
Loss = Callable[[Any, Any, Any, Array], tuple[Array, tuple[Any, dict[str, Array]]]]
"""`loss(params, carry, samples, keys)` -> mean loss, (carry for the next samples, mean figures)."""


class Trained(NamedTuple):
    """What a weight update changes; `kept` is what a model has beside its weights, such as moving averages."""

    params: Any
    optimiser: Any
    kept: Any
    scale: precision.ScaleState


def update_weights(
    loss: Loss,
    old: Trained,
    batch: Any,
    sample_key: Array,
    rounding_key: Array,
    *,
    policy: precision.Policy,
    optimiser: Any,
    scale: precision.StaticScale | precision.AutoScale,
    mesh: Mesh | None,
    accumulation: int,
    repeated: bool = False,
    begin: Callable[[Any], Any] = lambda kept: kept,
    finish: Callable[[Any, Any, str | None], Any] = lambda kept, carry, axis: average_replicas(carry, axis),
    **extra: Any,
) -> tuple[Trained, dict[str, Array]]:
    """One step by the gradient of the mean loss, and the figures' means; left out where a loss scale overflowed.

    `begin(kept)` is the carry of each replica's first part, `finish(kept, carry, axis)` what is kept after its last;
    `extra` goes to the optimiser.
    """

    def average(axis: str | None, batch: Any, params: Any, kept: Any, factor: Any, key: Array) -> Any:
        def part(carry: Any, samples: Any, keys: Array) -> Any:
            def scaled(params: Any) -> Any:
                mean, found = loss(params, carry, samples, keys)
                return precision.scale_loss(factor, mean), found

            gradients, (carry_on, figures) = jax.grad(scaled, has_aux=True)(params)
            return (gradients, figures), carry_on

        means, carry = mean_of_parts(part, begin(kept), batch, key, accumulation, axis, repeated=repeated)
        return average_replicas(means, axis), finish(kept, carry, axis)

    (gradients, figures), kept = on_replicas(average, mesh)(
        batch, policy.to_compute(old.params), old.kept, old.scale, sample_key
    )
    gradients = precision.unscale(old.scale, gradients)
    params, slots = precision.optimise(
        policy, optimiser, gradients, old.optimiser, old.params, rounding_key, **extra
    )
    usable, factor = scale.judge(old.scale, gradients)
    new = Trained(params, slots, kept, factor)
    if isinstance(scale, precision.AutoScale):
        new = precision.choose(usable, new, old._replace(scale=factor))
    return new, figures


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
