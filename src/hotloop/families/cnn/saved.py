"""Checkpoints of a run read back: by their folder, for validation, prediction and import; weights and statistics alone.

A checkpoint holds what a resumed run needs, the optimiser included; whoever only looks at images needs the weights,
the moving statistics and which network they belong to, which `network.json` beside the checkpoints tells.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.plan import Plan
from hotloop.engine.precision import Policy, parse
from hotloop.engine.records import write_json
from hotloop.engine.training import RunCheckpoints
from hotloop.errors import CheckpointError
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.network import Network, NormChoice, build
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE, find_run, read_run_options
from hotloop.options.files import load_json

CLEANED = "clean_dir"  # the record that a run's checkpoints were about to be removed


@dataclass(frozen=True)
class SavedNetwork:
    """Which network, on which images, computed in which type: what must be known without the options."""

    network: Network
    dataset: str
    precision: str
    half: str
    updates_per_epoch: float

    @classmethod
    def of(cls, job: Job) -> "SavedNetwork":
        per_epoch = float(job.plan.updates_per_epoch) if job.plan else 1.0
        config = job.config
        return cls(job.network, config.dataset, config.precision, config.half, per_epoch)

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
        write_json(folder / NETWORK_FILE, asdict(self))


def read_saved_network(folder: str | Path) -> SavedNetwork:
    """What the checkpoints in a folder belong to."""
    folder = Path(folder)
    path = folder / NETWORK_FILE
    try:
        found = load_json(path)
        network = found["network"]
        counts = [*network["shape"], network["classes"]]
        if len(counts) != 4 or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"an image of {network['shape']} and {network['classes']} classes")
        return SavedNetwork(
            build(
                network["model"],
                tuple(network["shape"]),
                network["classes"],
                NormChoice(**network["norm"]),
                network["variant"],
            ),
            str(found["dataset"]),
            str(found["precision"]),
            str(found["half"]),
            float(found["updates_per_epoch"]),
        )
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {NETWORK_FILE} there, which the folder of a run's checkpoints has"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def check_same(there: Network, here: Network, folder: Path) -> None:
    """The checkpoints must be of the network that the options name; its momentum matters to a training
    alone, and its variant is the checkpoints' own."""
    if _comparable(there) != _comparable(here):
        raise CheckpointError(
            f"{folder}: holds a {_in_words(there)}, and the options ask for a {_in_words(here)}; give the options "
            "that it was trained with"
        )


def _comparable(network: Network) -> Network:
    return replace(network, norm=replace(network.norm, momentum=0.0), variant="keras")


def _in_words(network: Network) -> str:
    shape, norm = " x ".join(map(str, network.shape)), network.norm
    size = norm.groups or norm.channels_per_group
    groups = f" ({size} {'groups' if norm.groups else 'channels a group'})" if size else ""
    return f"{network.model} for {shape} images and {network.classes} classes with {norm.kind} norm{groups}"


def restore_weights(found: Checkpoints, step: int | None, known: SavedNetwork) -> tuple[int, Any]:
    """Number and {params, statistics} of a step (None: the newest)."""

    def fresh() -> Mapping[str, Any]:
        params, moving = known.network.init(jax.random.key(0))
        return {"params": known.policy.to_update(params), "statistics": moving}

    restored = found.restore(jax.eval_shape(fresh), step, in_part=True).warn()
    return restored.step, restored.state


def own_checkpoints(config: TrainConfig, run: Path) -> RunCheckpoints:
    """Where the options let a run save."""
    return RunCheckpoints(config.checkpoint_output_dir or run / "checkpoints", run, FAMILY)


def checkpoints_at(path: str | Path) -> RunCheckpoints:
    """What lies at a path: a run's folder, or one of checkpoints; CheckpointError where there is neither."""
    path = Path(path)
    run = find_run(path)
    if run is not None:
        given = read_run_options(run).get("checkpoint_output_dir")
        return RunCheckpoints(Path(given or run / "checkpoints"), run, FAMILY)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run's folder or its folder of checkpoints")
    inner = path / "checkpoints"
    is_outer = inner.is_dir() and not (path / NETWORK_FILE).exists()
    return RunCheckpoints(inner if is_outer else path, None, FAMILY)


def was_cleaned(checkpoints: RunCheckpoints) -> bool:
    return any(each["event"] == CLEANED for each in checkpoints.records())


def check_any(checkpoints: RunCheckpoints) -> None:
    """CheckpointError where there is no whole checkpoint: it says what became of them."""
    with checkpoints.open() as opened:
        if not opened.steps():
            where = checkpoints.run or checkpoints.folder
            raise CheckpointError(f"{where}: {_why_none(checkpoints, opened.begun())}")


def _why_none(checkpoints: RunCheckpoints, begun: bool) -> str:
    if begun:
        return "every checkpoint there is damaged"
    if was_cleaned(checkpoints):
        return (
            "its checkpoints were removed after the validation, as --clean-dir asked for; train again without "
            "it, and the best and the last stay"
        )
    if checkpoints.run is not None:
        return f"has no checkpoint in {checkpoints.folder}: none was saved, or they were moved away"
    if (checkpoints.folder / NETWORK_FILE).exists():
        return "holds no checkpoint; give a run's folder or its folder of checkpoints"
    return f"no {NETWORK_FILE} there; give a run's folder or its folder of checkpoints"


def check_shared_folder(checkpoints: RunCheckpoints, network: Network, plan: Plan) -> None:
    """CheckpointError where a run would replace another's step, or save beside those of another network."""
    others = checkpoints.other_steps()
    if not others:
        return
    check_same(read_saved_network(checkpoints.folder).network, network, checkpoints.folder)
    newest = max(checkpoints.steps(), default=0)
    still_to_come = [step for step in plan.updates("checkpoint") if step > newest]
    if taken := [step for step in others if step in still_to_come]:
        raise CheckpointError(
            f"{checkpoints.folder}: holds step {taken[0]} of another run, which this one would replace; choose another "
            "--checkpoint-output-dir, or move that step away"
        )
