"""Where to cut a network into stages: by the time that its layers take, beside the old rule by their parameters.

The slowest stage sets the pace, so the best cut is the one whose slowest stage is fastest; of those within a hundredth
of it, the one over which the fewest values cross. Times are measured for runs of layers between places where one value
alone crosses, forward and backward as a stage computes them; without a measurement FLOPs stand for time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.pipeline_table import SCHEDULES, make_table
from hotloop.engine.precision import Policy
from hotloop.errors import OptionError
from hotloop.families.cnn.network import BATCH_NORM, INPUT, Network
from hotloop.families.cnn.stages import crossing_values, cut
from hotloop.rehearsal import begin_work

SLACK = 1.01  # how much slower a stage may be for fewer values over the cuts
TIMED_CALLS = 3
MICRO_BATCHES = (4, 16, 64)


@dataclass(frozen=True)
class Advice:
    """Splits by one rule (`time`, `FLOPs` or `parameters`), and what each stage then has."""

    rule: str
    splits: tuple[str, ...]
    shares: tuple[float, ...]  # of the time, or of FLOPs
    parameters: tuple[int, ...]
    crossing: tuple[int, ...]  # numbers of one image that cross into each stage; 0 for the first

    def as_dict(self, size: int) -> dict[str, Any]:
        """The facts, with bytes of values of `size` bytes each."""
        rows = zip(self.shares, self.parameters, self.crossing, strict=True)
        return {
            "rule": self.rule,
            "splits": list(self.splits),
            "stages": [
                {"share": share, "parameters": parameters, "bytes_crossing": size * values}
                for share, parameters, values in rows
            ],
        }


def check_stages(network: Network, stages: int) -> None:
    """An OptionError where there are fewer layers than stages."""
    if not 1 <= stages <= len(network.nodes):
        raise OptionError(
            f"--stages {stages}: {network.model} has {len(network.nodes)} layers; give 1 to {len(network.nodes)}"
        )


def advise(network: Network, stages: int, costs: Sequence[float], rule: str) -> Advice:
    """The cut into so many stages whose dearest is cheapest, `costs` being those of each layer."""
    cheap = [place for place in range(1, len(network.nodes)) if network.may_split(place)]
    places = cheap if len(cheap) >= stages - 1 else list(range(1, len(network.nodes)))
    return _describe(network, _cut_evenly(network, stages, costs, places), costs, rule)


def advise_by_parameters(network: Network, stages: int, costs: Sequence[float]) -> Advice | None:
    """The old program's rule: a stage begins where the weights so far, moving averages among them, first reach its
    share of all. None where it names the first layer or one twice, as it may."""
    held = [node.weights + (2 * node.shape[-1] if node.kind == BATCH_NORM else 0) for node in network.nodes]
    so_far = list(accumulate(held))
    shares = (number * so_far[-1] / stages for number in range(1, stages))
    places = [next(place for place, total in enumerate(so_far) if total >= share) for share in shares]
    if sorted({0, *places}) != [0, *places]:
        return None
    return _describe(network, places, costs, "parameters")


def _describe(network: Network, places: Sequence[int], costs: Sequence[float], rule: str) -> Advice:
    splits = tuple(network.nodes[place].name for place in places)
    stages, whole = cut(network, splits), sum(costs) or 1
    return Advice(
        rule,
        splits,
        tuple(sum(costs[each.start : each.stop]) / whole for each in stages),
        tuple(sum(node.weights for node in network.nodes[each.start : each.stop]) for each in stages),
        tuple(crossing_values(network, each.start) if each.start else 0 for each in stages),
    )


def _cut_evenly(network: Network, stages: int, costs: Sequence[float], places: Sequence[int]) -> list[int]:
    """Those of `places` at which stages begin: first the least that the dearest can cost, then, of the cuts that cost
    hardly more, the one with the fewest values over it."""
    totals = [0.0, *accumulate(costs)]
    ends = [0, *places, len(costs)]
    least = [totals[end] for end in ends]  # the dearest of so many stages up to each end
    for _ in range(stages - 1):
        least = [
            min((max(least[j], totals[ends[i]] - totals[ends[j]]) for j in range(i)), default=inf)
            for i in range(len(ends))
        ]
    bound = SLACK * least[-1]
    fewest: list[tuple[float, tuple[int, ...]]] = [
        (0 if total <= bound else inf, ()) for total in (totals[end] for end in ends)
    ]
    fewest[0] = (inf, ())  # a stage has at least one layer
    crossing = [crossing_values(network, end) if 0 < end < len(costs) else 0 for end in ends]
    for _ in range(stages - 1):
        fewest = [
            min(
                (
                    (fewest[j][0] + crossing[j], (*fewest[j][1], ends[j]))
                    for j in range(i)
                    if totals[ends[i]] - totals[ends[j]] <= bound
                ),
                default=(inf, ()),
            )
            for i in range(len(ends))
        ]
    return list(fewest[-1][1])


def measure_layers(network: Network, policy: Policy, samples: int) -> list[float]:
    """Seconds of each layer for a micro-batch of `samples`, forward and backward.

    Layers between two places where one value crosses are timed together, alike ones once; within them time goes by
    FLOPs, or evenly where there are none.
    """
    begin_work("measuring layers")
    ends = [
        0, *(place for place in range(1, len(network.nodes)) if network.may_split(place)), len(network.nodes)
    ]  # fmt: skip
    # On the host: a network that is to be cut need not fit on the device.
    params = policy.to_compute(network.init_on_host(jax.random.key(0))[0])
    known: dict[Any, float] = {}
    found: list[float] = []
    for start, stop in pairwise(ends):
        nodes = network.nodes[start:stop]
        alike = tuple((node.kind, node.shape, node.weights, node.flops) for node in nodes)
        key = crossing_values(network, start), alike
        if key not in known:
            known[key] = _time(network, policy, params, samples, start, stop)
        flops = sum(node.flops for node in nodes)
        found += [known[key] * (node.flops / flops if flops else 1 / len(nodes)) for node in nodes]
    return found


def _time(network: Network, policy: Policy, params: Any, samples: int, start: int, stop: int) -> float:
    """Seconds of layers `start` to `stop` forward and backward: the fastest of a few calls."""
    (entering,) = network.crossing(start)
    shapes = {INPUT: network.shape, **{node.name: node.shape for node in network.nodes}}
    value = jax.random.normal(jax.random.key(start), (samples, *shapes[entering]), policy.compute)
    names = [node.name for node in network.nodes[start:stop] if node.name in params]
    own = jax.device_put({name: params[name] for name in names})

    @jax.jit
    def both(own: Any, value: Array) -> Any:
        def run(own: Any, value: Array) -> Any:
            return network.run(own, {}, {entering: value}, start, stop, train=True)[0]

        out, back = jax.vjp(run, own, value)
        return back(jax.tree.map(jnp.ones_like, out))

    def call() -> float:
        began = time.perf_counter()
        for leaf in jax.tree.leaves(both(own, value)):
            leaf.block_until_ready()
        return time.perf_counter() - began

    call()  # compiles
    return min(call() for _ in range(TIMED_CALLS))


def busy_shares(stages: int) -> dict[str, dict[str, float]]:
    """By schedule and number of micro-batches: the share of its time that a device works, were all stages as fast."""
    return {
        schedule: {str(count): make_table(schedule, stages, count).busy_share for count in MICRO_BATCHES}
        for schedule in SCHEDULES
    }
