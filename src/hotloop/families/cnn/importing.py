"""`hotloop cnn import`: somebody else's weights as a checkpoint of ours, ready to validate and predict with."""

from collections.abc import Mapping
from typing import Any

from hotloop.engine.checkpoint import Checkpoints, KeepAll
from hotloop.engine.progress import Console
from hotloop.errors import CheckpointError
from hotloop.families.cnn import foreign, of_run, saved
from hotloop.families.cnn.small_config import Import


def run(config: Import, console: Console) -> Mapping[str, Any]:
    """Read, check, and write one checkpoint at step 0."""
    network = foreign.recognise(config.weights)
    if saved.steps(config.out):
        raise CheckpointError(f"{config.out}: holds checkpoints already; choose another folder")
    params, statistics = foreign.load(config.weights, network)
    saved.About(network, "imagenet", "32.32", "bfloat16", 1.0).write(config.out)
    with Checkpoints(config.out, KeepAll(), family=of_run.FAMILY) as checkpoints:
        checkpoints.save(0, {"params": params, "statistics": statistics}, position={})
        checkpoints.wait()
    console.say(f"{network.model}, {network.classes} classes, written to {config.out}")
    return {"checkpoint": str(config.out), "model": network.model, "classes": network.classes}
