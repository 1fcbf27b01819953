"""What lies in a folder of checkpoints: which network they belong to (`network.json` beside them), and whose they are.

It deletes and trains nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from hotloop.engine.checkpoint import RunCheckpoints
from hotloop.engine.plan import Plan
from hotloop.engine.precision import Policy, parse
from hotloop.engine.run import write_json
from hotloop.errors import CheckpointError
from hotloop.families.cnn.network import Network, NormChoice, build
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE, find_run, read_run_options
from hotloop.options.files import load_json

Kind = Literal["raw", "ema"]
KINDS: dict[Kind, tuple[str, str]] = {
    "raw": ("params", "statistics"),
    "ema": ("ema_params", "ema_statistics"),
}
"""Which weights a checkpoint has, and the names of its trees of parameters and statistics."""
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLEANED = "clean_dir"  # the record that a run's checkpoints were about to be removed


@dataclass(frozen=True)
class SavedNetwork:
    """Which network, on which images, computed in which type: what must be known without the options."""

    network: Network
    dataset: str
    precision: str
    half: str
    updates_per_epoch: float
    ema: bool = False  # whether the checkpoints have averages beside the weights
    own_classes: tuple[str, ...] = ()  # the names of the user's own, in the order of the labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the labels; none where nobody named them."""
        return self.own_classes or (CIFAR10 if self.dataset == "cifar10" else ())

    @property
    def policy(self) -> Policy:
        return parse(self.precision, self.half)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("raw", "ema") if self.ema else ("raw",)

    def choose(self, asked: Literal["auto", "raw", "ema"], folder: Path) -> Kind:
        """The weights that are meant, averages where there are any; CheckpointError where there are none to ask for."""
        if asked == "auto":
            return self.kinds[-1]
        if asked not in self.kinds:
            raise CheckpointError(
                f"--weights ema: {folder} has no averages, as it was trained without --ema; leave it out"
            )
        return asked

    def weights(self, *kinds: Kind) -> Any:
        """Shapes and types of {params, statistics}, to restore a checkpoint `in_part` with; of other `kinds` than raw
        under their names."""

        def fresh() -> Mapping[str, Any]:
            params, moving = self.network.init(jax.random.key(0))
            wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
            trees = {"raw": (self.policy.to_update(params), moving), "ema": (wide, moving)}
            return {
                name: tree
                for kind in kinds or ("raw",)
                for name, tree in zip(KINDS[kind], trees[kind], strict=True)
            }

        return jax.eval_shape(fresh)

    def write(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {folder}: {error.strerror}; choose another folder") from None
        write_json(folder / NETWORK_FILE, asdict(self))


def read_saved_network(folder: str | Path) -> SavedNetwork:
    folder = Path(folder)
    path = folder / NETWORK_FILE
    try:
        found = load_json(path)
        network = found["network"]
        counts = [*network["shape"], network["classes"]]
        if len(counts) != 4 or not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"an image of {network['shape']} and {network['classes']} classes")
        made = {"shape": tuple(network["shape"]), "norm": NormChoice(**network["norm"])}
        dataset, precision, half = (str(found[name]) for name in ("dataset", "precision", "half"))
        per_epoch = float(found["updates_per_epoch"])
        is_averaged = found.get("ema", False) is True
        own = tuple(found.get("own_classes", ()))
        if not all(isinstance(name, str) for name in own) or len(own) not in (0, network["classes"]):
            raise ValueError(f"{len(own)} names of {network['classes']} classes")
        return SavedNetwork(build(**network | made), dataset, precision, half, per_epoch, is_averaged, own)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {NETWORK_FILE} there, which the folder of a run's checkpoints has"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def weights_of(state: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """`params` and `statistics` of one kind, of a state or a part of one that has them."""
    params, statistics = KINDS[kind]
    return {"params": state[params], "statistics": state[statistics]}


def counted_accuracy(validation: Mapping[str, Any]) -> float:
    """The accuracy of a validation that a checkpoint is judged by: that of its averages, where it has them."""
    accuracy: float = validation.get("ema_accuracy", validation["validation_accuracy"])
    return accuracy


def check_same(there: Network, here: Network, folder: Path) -> None:
    """The checkpoints must be of the network that the options name; its momentum matters to a training
    alone, and its variant is the checkpoints' own."""

    def by(network: Network) -> Network:
        return replace(network, norm=replace(network.norm, momentum=0.0), variant="keras")

    if by(there) != by(here):
        raise CheckpointError(
            f"{folder}: holds a {_in_words(there)}, and the options ask for a {_in_words(here)}; give the options "
            "that it was trained with"
        )


def check_classes(saved: SavedNetwork, classes: tuple[str, ...], folder: Path) -> None:
    """The labels must mean the same: CheckpointError where the checkpoints' classes have other names than these."""
    there = saved.own_classes
    if not there or not classes or there == classes:
        return
    pair = next((pair for pair in zip(there, classes, strict=False) if pair[0] != pair[1]), None)
    differing = f"{pair[0]} there is {pair[1]} here" if pair else f"{len(there)} there, {len(classes)} here"
    raise CheckpointError(f"{folder}: was trained on other classes than --dataset has: {differing}")


def _in_words(network: Network) -> str:
    shape, norm = " x ".join(map(str, network.shape)), network.norm
    size = norm.groups or norm.channels_per_group
    groups = f" ({size} {'groups' if norm.groups else 'channels a group'})" if size else ""
    return f"{network.model} for {shape} images and {network.classes} classes with {norm.kind} norm{groups}"


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
        if opened.steps():
            return
        is_begun = opened.begun()
    folder, give = checkpoints.folder, "give a run's folder or its folder of checkpoints"
    if is_begun:
        why = "every checkpoint there is damaged"
    elif was_cleaned(checkpoints):
        why = (
            "its checkpoints were removed after the validation, as --clean-dir asked for; train again without "
            "it, and the best and the last stay"
        )
    elif checkpoints.run is not None:
        why = f"has no checkpoint in {folder}: none was saved, or they were moved away"
    elif (folder / NETWORK_FILE).exists():
        why = f"holds no checkpoint; {give}"
    else:
        why = f"no {NETWORK_FILE} there; {give}"
    raise CheckpointError(f"{checkpoints.run or folder}: {why}")


def check_shared_folder(
    checkpoints: RunCheckpoints, network: Network, plan: Plan, *, averages: bool = False
) -> None:
    """CheckpointError where a run would replace another's step, or save beside those of another network."""
    others = checkpoints.other_steps()
    if not others:
        return
    known = read_saved_network(checkpoints.folder)
    check_same(known.network, network, checkpoints.folder)
    if known.ema != averages:
        has, not_here = ("no averages", "has --ema") if averages else ("averages", "has no --ema")
        raise CheckpointError(
            f"{checkpoints.folder}: another run's checkpoints there have {has}, and this run {not_here}; choose "
            "another --checkpoint-output-dir"
        )
    newest = max(checkpoints.steps(), default=0)
    still_to_come = [step for step in plan.updates("checkpoint") if step > newest]
    if taken := [step for step in others if step in still_to_come]:
        raise CheckpointError(
            f"{checkpoints.folder}: holds step {taken[0]} of another run, which this one would replace; choose another "
            "--checkpoint-output-dir, or move that step away"
        )
