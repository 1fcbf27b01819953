"""Inference with every batch norm folded into the convolution before it: its slope in the kernel, the rest a bias.

A convolution, its bias and the ReLU are then one kernel on an NVIDIA GPU, and no normalised copy of its result is
written. Kernels are scaled in float32, before they are rounded to the type of the computation. It trains nothing.
"""

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax import Array

from hotloop.engine.precision import Policy
from hotloop.families.cnn.network import Network, Params, Statistics
from hotloop.families.cnn.pieces import BatchNorm, Conv


def logits(network: Network, policy: Policy, state: Any, images: Array) -> Array:
    """Float32 logits [N, classes] by a state's `params` and `statistics`; images as the network sees them."""
    params, statistics = folded(network, state["params"], state["statistics"])
    found, _ = network.apply(policy.to_compute(params), statistics, policy.to_compute(images), train=False)
    return found


def folded(network: Network, params: Params, statistics: Statistics) -> tuple[Params, Statistics]:
    """Parameters with biases for norms, and the statistics of the norms that stay as they are."""
    into = _convolutions(network)
    made, left = dict(params), {name: each for name, each in statistics.items() if name not in into}
    for name, (norm, before) in into.items():
        own, seen = params[name], statistics[name]
        slope = own["scale"] / jnp.sqrt(seen["variance"] + norm.epsilon)  # float32, as statistics always are
        made[before] = {"kernel": params[before]["kernel"] * slope}
        made[name] = {"bias": own["offset"] - seen["mean"] * slope}
    return made, left


def _convolutions(network: Network) -> dict[str, tuple[BatchNorm, str]]:
    """Norm -> itself and the plain convolution that it alone reads."""
    pieces = {placed.name: placed.piece for placed in network.placed}
    readers = Counter(name for placed in network.placed for name in placed.inputs)
    found = {}
    for placed in network.placed:
        before = placed.inputs[0]
        source = pieces.get(before)
        if (
            isinstance(placed.piece, BatchNorm)
            and isinstance(source, Conv)
            and not source.biased_relu
            and readers[before] == 1
        ):
            found[placed.name] = (placed.piece, before)
    return found
