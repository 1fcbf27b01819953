"""Batch-norm statistics, merged over micro-batches and replicas and moved once a weight update.

Every part (a micro-batch on a replica) hands in its means and biased variances, all of equally many values.
With the `spread` rule the differences between the parts' means count, so that any split of a batch gives the
undivided batch's statistics. The `seed` rule counts them between replicas but not between accumulated micro-batches, as
the program before this one did. The variance that is kept is the unbiased one, N / (N - 1) with N the values
merged, as in Keras' fused batch norm. It knows nothing of gradients.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hotloop.engine.batch import Batch
from hotloop.families.cnn.network import Network, Statistics
from hotloop.families.cnn.pieces import BatchNorm

Rule = Literal["spread", "seed"]


class Running(NamedTuple):
    """The parts seen so far, and their statistics merged."""

    parts: Array
    merged: Statistics


def start(like: Statistics) -> Running:
    """Nothing seen; for the layers of `like`."""
    return Running(jnp.int32(0), jax.tree.map(jnp.zeros_like, like))


def add(running: Running, part: Statistics, rule: Rule = "spread") -> Running:
    """One more micro-batch (Chan, Golub and LeVeque, 1979): no squares of means, so nothing cancels."""
    parts = running.parts + 1

    def layer(old: dict[str, Array], new: dict[str, Array]) -> dict[str, Array]:
        share = 1 / parts.astype(old["mean"].dtype)
        apart = new["mean"] - old["mean"]
        spread = (1 - share) * jnp.square(apart) if rule == "spread" else 0
        return {
            "mean": old["mean"] + share * apart,
            "variance": old["variance"] + share * (new["variance"] - old["variance"] + spread),
        }

    return Running(parts, {name: layer(old, part[name]) for name, old in running.merged.items()})


def finish(running: Running, axis: str | None = None) -> Statistics:
    """Means and biased variances of all parts; with the name of a mapped axis, of all replicas along it."""
    if axis is None:
        return running.merged
    means = {name: layer["mean"] for name, layer in running.merged.items()}
    centres = _mean_over(axis, means)
    spread = {
        name: layer["variance"] + jnp.square(layer["mean"] - centres[name])
        for name, layer in running.merged.items()
    }
    variances = _mean_over(axis, spread)
    return {name: {"mean": centres[name], "variance": variances[name]} for name in means}


def _mean_over(axis: str, leaves: dict[str, Array]) -> dict[str, Array]:
    means: dict[str, Array] = lax.pmean(leaves, axis)  # type: ignore[no-untyped-call]
    return means


def merge(parts: Statistics, rule: Rule = "spread") -> Statistics:
    """The same for parts in hand: every leaf stacked as [accumulation, C] or [accumulation, replicas, C]."""

    def layer(part: dict[str, Array]) -> dict[str, Array]:
        if rule == "seed":
            part = {name: leaf.mean(0, keepdims=True) for name, leaf in part.items()}
        axes = tuple(range(part["mean"].ndim - 1))
        centre = part["mean"].mean(axes)
        return {"mean": centre, "variance": (part["variance"] + jnp.square(part["mean"] - centre)).mean(axes)}

    return {name: layer(part) for name, part in parts.items()}


def counts(network: Network, batch: Batch, rule: Rule = "spread") -> dict[str, int]:
    """How many values of a channel each batch norm merges in one weight update: samples times positions."""
    samples = batch.global_ if rule == "spread" else batch.micro * batch.replicas
    return {
        placed.name: samples * prod(placed.shape[:-1])
        for placed in network.placed
        if isinstance(placed.piece, BatchNorm)
    }


def moved(
    statistics: Statistics, merged: Statistics, momentum: float, counts: Mapping[str, int]
) -> Statistics:
    """m moving + (1 - m) merged, the variance unbiased first; once a weight update."""

    def layer(old: dict[str, Array], new: dict[str, Array], values: int) -> dict[str, Array]:
        unbiased = values / max(values - 1, 1)
        return {
            "mean": momentum * old["mean"] + (1 - momentum) * new["mean"],
            "variance": momentum * old["variance"] + (1 - momentum) * unbiased * new["variance"],
        }

    return {name: layer(old, merged[name], counts[name]) for name, old in statistics.items()}
