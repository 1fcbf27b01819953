"""`--freeze`: which layers keep their weights, and an optimiser that leaves them alone.

The stem is all before the first block, stage n the n-th group of blocks of one width: conv1 and conv2 to conv5 of a
resnet, conv1 and conv2 to conv4 of a cifar_resnet; of a toy model the first and the second convolution. A frozen layer
has no optimiser state, so that neither momentum nor decay moves it.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hotloop.engine.optim import Transformation
from hotloop.errors import OptionError
from hotloop.families.cnn.network import Network
from hotloop.families.cnn.options import ALL_BUT_CLASSIFIER

_OF_RESNET = re.compile(r"conv(?P<from_one>\d+)_")
_OF_TOY = re.compile(r"(conv2d|bn|gn)_(?P<from_zero>\d+)")


def classifier_of(network: Network) -> str:
    return network.nodes[-1].name


def find_frozen(network: Network, freeze: str | None) -> frozenset[str]:
    """The names of the layers with weights that stay as they begin."""
    if freeze is None:
        return frozenset()
    last_layer = classifier_of(network)
    names = (node.name for node in network.nodes if node.parameters and node.name != last_layer)
    stages = {name: _stage(name) for name in names}
    most = max(stages.values())
    last = {"stem": 0, ALL_BUT_CLASSIFIER: most}.get(freeze)
    if last is None:
        last = int(freeze.partition(":")[2])
    if last > most:
        raise OptionError(
            f"--freeze {freeze}: {network.model} has {most} stages; stages:{most} is all of them"
        )
    return frozenset(name for name, stage in stages.items() if stage <= last)


def _stage(name: str) -> int:
    """0 for the stem."""
    found = _OF_RESNET.match(name)
    if found:
        return int(found["from_one"]) - 1
    found = _OF_TOY.fullmatch(name)
    assert found is not None, f"{name} belongs to no stage"
    return int(found["from_zero"])


def count_weights(network: Network, frozen: frozenset[str]) -> tuple[int, int]:
    """Parameters that are trained, and all."""
    counts = {node.name: node.weights for node in network.nodes}
    return sum(count for name, count in counts.items() if name not in frozen), sum(counts.values())


def describe_frozen(network: Network, freeze: str, frozen: frozenset[str]) -> str:
    trained, every = count_weights(network, frozen)
    return f"--freeze {freeze}: {trained:,} of {every:,} parameters are trained, {len(frozen)} layers stay as they are"


def leave_out(optimiser: Transformation, frozen: frozenset[str]) -> Transformation:
    """The optimiser of the layers that are not frozen, which neither sees nor keeps anything of the others."""
    if not frozen:
        return optimiser

    def moving(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {name: leaves for name, leaves in tree.items() if name not in frozen}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        steps, state = optimiser.update(moving(updates), state, moving(params), **extra)
        # A weight plus -0 is the same weight, bit for bit, even where it is -0 itself.
        still = {
            name: jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), updates[name])
            for name in updates
            if name in frozen
        }
        return {name: steps[name] if name in steps else still[name] for name in updates}, state

    return Transformation(lambda params: optimiser.init(moving(params)), update)


def stop_gradients(params: Mapping[str, Any], frozen: frozenset[str]) -> dict[str, Any]:
    """The parameters, through the frozen of which no gradient goes: nothing is computed back beyond the first layer
    that is trained."""
    return {
        name: jax.lax.stop_gradient(leaves) if name in frozen else leaves for name, leaves in params.items()
    }
