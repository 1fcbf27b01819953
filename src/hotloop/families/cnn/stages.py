"""A network in stages: which layers each stage has, what crosses into it, and how it is run.

A stage begins at a named layer and ends before the next one's. Any number of values may cross: all that earlier layers
made and later ones read, by their names. It knows no device and no schedule.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
from jax import Array

from hotloop.engine.precision import Policy
from hotloop.families.cnn.network import INPUT, Network, Params, Statistics, fold_norms
from hotloop.layers.norm import ReplicaGroups

Values = dict[str, Array]


class Stage(NamedTuple):
    """The layers `start` to `stop` of a network, and where within them activations are computed again."""

    start: int
    stop: int
    inner: tuple[int, ...] = ()

    def train(
        self,
        network: Network,
        params: Params,
        values: Values,
        groups: ReplicaGroups | None = None,
        frozen: Statistics | None = None,
    ) -> tuple[Values, Statistics]:
        """What crosses its end, and the statistics of the batch (of those of a group of replicas, where there are
        `groups`); each of its inner parts is recomputed when needed. The `frozen`
        norms go by these statistics."""
        found = Statistics()
        for start, stop in pairwise((self.start, *self.inner, self.stop)):
            run = partial(network.run, start=start, stop=stop, train=True, groups=groups, frozen=frozen)
            values, more = (jax.checkpoint(run) if self.inner else run)(params, {}, values)
            found |= more
        return values, found

    def infer(
        self, network: Network, policy: Policy, params: Params, statistics: Statistics, values: Values
    ) -> Values:
        """What crosses its end, norms by their statistics.

        Those are folded into the convolutions before them, but for one whose convolution another stage has.
        """
        folded, left = fold_norms(network, params, statistics)
        return network.run(policy.to_compute(folded), left, values, self.start, self.stop, train=False)[0]


def cut(network: Network, splits: Sequence[str], recomputed: Sequence[str] = ()) -> tuple[Stage, ...]:
    """The stages that begin at the layers `splits`; activations are recomputed from the layers `recomputed` on, where
    one of them lies inside a stage."""
    places = {node.name: number for number, node in enumerate(network.nodes)}
    ends = (0, *(places[name] for name in splits), len(places))
    again = [places[name] for name in recomputed]
    return tuple(
        Stage(start, stop, tuple(place for place in again if start < place < stop))
        for start, stop in pairwise(ends)
    )


def layers_by_stage(network: Network, splits: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each stage the names of its layers: the keys of its parameters and statistics."""
    return tuple(
        tuple(node.name for node in network.nodes[stage.start : stage.stop]) for stage in cut(network, splits)
    )


def crossing_values(network: Network, position: int) -> int:
    """How many numbers of one image cross into the layer at `position`."""
    shapes: dict[str, Any] = {INPUT: network.shape, **{node.name: node.shape for node in network.nodes}}
    return sum(prod(shapes[name]) for name in network.crossing(position))
