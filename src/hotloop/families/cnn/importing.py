"""`hotloop cnn import`: somebody else's weights as a checkpoint of ours, ready to validate and predict with."""

from collections.abc import Mapping
from typing import Any

from hotloop.engine.checkpoint import Checkpoints, KeepAll
from hotloop.engine.progress import Console
from hotloop.errors import CheckpointError
from hotloop.families.cnn import presets, saved, torch_weights
from hotloop.families.cnn.command_options import ImportConfig


def run(config: ImportConfig, console: Console) -> Mapping[str, Any]:
    """Read, check, and write one checkpoint at step 0."""
    network = torch_weights.recognise(config.weights)
    if saved.list_steps(config.out):
        raise CheckpointError(f"{config.out}: holds checkpoints already; choose another folder")
    params, statistics = torch_weights.load(config.weights, network)
    saved.SavedNetwork(network, "imagenet", "32.32", "bfloat16", 1.0).write(config.out)
    with Checkpoints(config.out, KeepAll(), family=presets.FAMILY) as checkpoints:
        checkpoints.save(0, {"params": params, "statistics": statistics}, position={})
        checkpoints.wait()
    console.say(f"{network.model}, {network.classes} classes, written to {config.out}")
    return {"checkpoint": str(config.out), "model": network.model, "classes": network.classes}
