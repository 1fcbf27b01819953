"""Checkpoints of a run read back and validated, one after the other in the order of epochs; which of them is the best.

Whoever only looks at images needs the weights, the moving statistics and which network they belong to, which
`network.json` beside the checkpoints tells. It deletes and trains nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import jax

from hotloop.engine.checkpoint import Checkpoints, RunCheckpoints
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.loop import Sums
from hotloop.engine.plan import Plan
from hotloop.engine.precision import Policy, parse
from hotloop.engine.progress import Console
from hotloop.engine.run import write_json
from hotloop.engine.sinks import Recorder
from hotloop.errors import CheckpointError, OptionError
from hotloop.families.cnn import model
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.network import Network, NormChoice, build
from hotloop.families.cnn.options import TrainConfig
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE, find_run, read_run_options
from hotloop.families.cnn.sources import ImageSource
from hotloop.options.files import load_json

CLEANED = "clean_dir"  # the record that a run's checkpoints were about to be removed
TARGET_WIDTH = 0.02  # how fast the sweep's figure falls below the target


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
        return parse(self.precision, self.half)

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
        return SavedNetwork(build(**network | made), dataset, precision, half, per_epoch)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no {NETWORK_FILE} there, which the folder of a run's checkpoints has"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


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


def validation_figures(sums: Sums, top: int) -> dict[str, Any]:
    """Accuracies and mean loss over every image."""
    count = sums["samples"]
    return {
        "validation_accuracy": sums["correct"] / count,
        # Not "accuracy": whoever looks for the last "accuracy: X %" of a log must not find this one.
        f"validation_top_{top}": sums["correct_top"] / count,
        "validation_loss": sums["loss"] / count,
        "samples": count,
    }


def choose_best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest accuracy; of equals the earliest."""
    return max(found, key=lambda each: (each["validation_accuracy"], -each["step"]))


def sweep_figures(found: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """When the target was first reached, and the figure that a sweep maximises: both by the last checkpoint's rule."""
    reached = [each["epoch"] for each in found if each["validation_accuracy"] >= target]
    last = found[-1]
    short = min(last["validation_accuracy"] - target, 0.0) / TARGET_WIDTH
    return {
        "target_accuracy": target,
        "epoch_to_target": reached[0] if reached else None,
        "optimization_metric": exp(-0.5 * short**2) / last["epoch"] if last["epoch"] else None,
    }


def others_to_validate(config: TrainConfig, asked: Path, own: RunCheckpoints) -> RunCheckpoints | None:
    """The checkpoints that --checkpoint-input-dir names, unless they are the run's own; CheckpointError where it has
    none and nobody said that random weights will do."""
    if config.training and asked.resolve() == own.folder.resolve():
        return None
    try:
        found = checkpoints_at(asked)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint-input-dir {error}") from None
    if config.random_weights and found.steps():
        raise OptionError(f"--random-weights: {asked} holds checkpoints; leave out one of them")
    if not (config.training or config.random_weights):
        check_any(found)
    return found


def validate(
    job: Job,
    source: ImageSource,
    console: Console,
    record: Recorder,
    own: RunCheckpoints,
    others: RunCheckpoints | None,
    last: model.State | None,
) -> dict[str, Any]:
    """Every checkpoint that there is to validate, in the order of epochs, the best marked.

    `others` are checkpoints to validate in place of the run's own; `last` is the state that the training ended with
    (None: there was no training).
    """
    config, checkpoints = job.config, others or own
    in_hand: Any = None
    steps = others.steps() if others else own.steps() if last is not None else []
    if others:
        with others.open() as opened:
            for line in opened.damaged():
                console.warn(line)
    if steps:
        known = read_saved_network(checkpoints.folder)
        job = replace(job, network=known.network)
    else:
        known = SavedNetwork.of(job)
        lacking = f"{others.folder} holds no checkpoint" if others else "there is no checkpoint to validate"
        console.warn(f"{lacking}; {'random' if last is None else 'the last'} weights are validated")
        # By way of the host: they may lie on several devices, where the images do not.
        state = jax.device_get(
            last if last is not None else model.init(job, stream(seed_key(config.seed or 0), "init", 0))
        )
        in_hand = {name: state[name] for name in ("params", "statistics")}
    assert job.validation is not None
    evaluation = source.evaluation(model.evaluate(job), job.validation.batch)

    found: list[dict[str, Any]] = []
    wanted = sorted(steps) or [int(state["update"])]
    with console.progress("validation", len(wanted)) as bar:
        for step in wanted:
            weights = in_hand
            if weights is None:
                with checkpoints.open() as opened:
                    _, weights = restore_weights(opened, step, known)
            epoch, figures = (
                step / known.updates_per_epoch,
                validation_figures(evaluation(weights), config.top_k),
            )
            record.event("validation", update=step, epoch=epoch, **figures)
            found.append({"step": step, "epoch": epoch, **figures})
            bar.advance(1)
    if not steps:
        return {"validation": found, "best": None}
    best = choose_best(found)
    # No colon: the last "accuracy: X %" of a log is that of the last checkpoint, as old patterns mean it.
    accuracy = f"accuracy {100 * best['validation_accuracy']:.2f} %"
    console.say(f"best of {len(found)}: step {best['step']}, epoch {best['epoch']:g}, {accuracy}")
    result: dict[str, Any] = {"validation": found, "best": best}
    if config.sweep:
        figures = sweep_figures(found, config.target_accuracy)
        record.event("sweep", **figures)
        result |= figures
    return result
