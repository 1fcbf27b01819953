"""Checkpoints of a run read back: by their folder, for validation, prediction and import; weights and statistics alone.

A checkpoint holds what a resumed run needs, the optimiser included; whoever only looks at images needs the weights,
the moving statistics and which network they belong to, which `network.json` beside the checkpoints tells.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.checkpoint import Checkpoints, KeepAll
from hotloop.engine.precision import Policy, parse
from hotloop.engine.records import write_json
from hotloop.errors import CheckpointError
from hotloop.families.cnn.network import Network, build
from hotloop.families.cnn.norms import Norm
from hotloop.families.cnn.of_run import ABOUT, FAMILY
from hotloop.options.files import load_json


@dataclass(frozen=True)
class About:
    """Which network, on which images, computed in which type."""

    network: Network
    dataset: str
    precision: str
    half: str
    updates_per_epoch: float

    @property
    def policy(self) -> Policy:
        """The types of its numbers."""
        return parse(self.precision, self.half)

    def write(self, folder: Path) -> None:
        """Put it beside the checkpoints."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {folder}: {error.strerror}; choose another folder") from None
        write_json(folder / ABOUT, asdict(self))


def checkpoints_in(folder: str | Path) -> Path:
    """The folder of checkpoints that a path means: itself, or the one of a run."""
    folder = Path(folder)
    inner = folder / "checkpoints"
    return inner if inner.is_dir() and not (folder / ABOUT).exists() else folder


def about(folder: str | Path) -> About:
    """What the checkpoints in a folder belong to."""
    folder = Path(folder)
    path = folder / ABOUT
    try:
        found = load_json(path)
        network = found["network"]
        counts = [*network["shape"], network["classes"]]
        if len(counts) != 4 or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"an image of {network['shape']} and {network['classes']} classes")
        return About(
            build(
                network["model"],
                tuple(network["shape"]),
                network["classes"],
                Norm(**network["norm"]),
                network["variant"],
            ),
            str(found["dataset"]),
            str(found["precision"]),
            str(found["half"]),
            float(found["updates_per_epoch"]),
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {ABOUT} there, which the folder of a run's checkpoints has"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def check_same(there: Network, here: Network, folder: Path) -> None:
    """The checkpoints must be of the network that the options name; its momentum matters to a training
    alone, and its variant is the checkpoints' own."""
    if _by(there) != _by(here):
        raise CheckpointError(
            f"{folder}: holds a {_in_words(there)}, and the options ask for a {_in_words(here)}; give the options "
            "that it was trained with"
        )


def _by(network: Network) -> Network:
    return replace(network, norm=replace(network.norm, momentum=0.0), variant="keras")


def _in_words(network: Network) -> str:
    shape, norm = " x ".join(map(str, network.shape)), network.norm
    size = norm.groups or norm.channels_per_group
    groups = f" ({size} {'groups' if norm.groups else 'channels a group'})" if size else ""
    return f"{network.model} for {shape} images and {network.classes} classes with {norm.kind} norm{groups}"


def steps(folder: str | Path) -> list[int]:
    """Complete steps, oldest first."""
    with Checkpoints(folder, KeepAll(), family=FAMILY) as found:
        return found.steps()


def weights(folder: str | Path, step: int | None, known: About) -> tuple[int, Any]:
    """Number and {params, statistics} of a step (None: the newest)."""
    with Checkpoints(folder, KeepAll(), family=FAMILY) as found:
        return weights_among(found, step, known)


def weights_among(found: Checkpoints, step: int | None, known: About) -> tuple[int, Any]:
    """The same among opened checkpoints."""
    like = jax.eval_shape(lambda: _fresh(known.network, known.policy))
    restored = found.restore(like, step, in_part=True).warned()
    return restored.step, restored.state


def _fresh(network: Network, policy: Policy) -> Mapping[str, Any]:
    params, moving = network.init(jax.random.key(0))
    return {"params": policy.to_update(params), "statistics": moving}
