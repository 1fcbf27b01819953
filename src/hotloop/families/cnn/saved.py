"""Checkpoints of a run read back: by their folder, for validation, prediction and import; weights and statistics alone.

A checkpoint holds what a resumed run needs, the optimiser included; whoever only looks at images needs the weights,
the moving statistics and which network they belong to, which `network.json` beside the checkpoints tells.

Whose checkpoints are whose: what others saved in the output folder is not the run's.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from hotloop.engine import checkpoint_folder
from hotloop.engine.checkpoint import Checkpoints, KeepAll, Restored
from hotloop.engine.drive import check_position
from hotloop.engine.loop import copy_state
from hotloop.engine.plan import Plan
from hotloop.engine.precision import Policy, parse
from hotloop.engine.records import write_json
from hotloop.engine.run import Run, current_records, has_finished, read_events
from hotloop.errors import CheckpointError, RunError
from hotloop.families.cnn import presets
from hotloop.families.cnn.network import Network, build
from hotloop.families.cnn.norms import NormChoice
from hotloop.families.cnn.options import Train
from hotloop.families.cnn.presets import FAMILY, NETWORK_FILE
from hotloop.families.cnn.timing import TOOK
from hotloop.options.files import load_json


@dataclass(frozen=True)
class SavedNetwork:
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
        write_json(folder / NETWORK_FILE, asdict(self))


def checkpoints_in(folder: str | Path) -> Path:
    """The folder of checkpoints that a path means: itself, or the one of a run."""
    folder = Path(folder)
    inner = folder / "checkpoints"
    return inner if inner.is_dir() and not (folder / NETWORK_FILE).exists() else folder


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


def list_steps(folder: str | Path) -> list[int]:
    """Complete steps, oldest first."""
    with Checkpoints(folder, KeepAll(), family=FAMILY) as found:
        return found.steps()


def restore_weights(folder: str | Path, step: int | None, known: SavedNetwork) -> tuple[int, Any]:
    """Number and {params, statistics} of a step (None: the newest)."""
    with Checkpoints(folder, KeepAll(), family=FAMILY) as found:
        return restore_weights_from(found, step, known)


def restore_weights_from(found: Checkpoints, step: int | None, known: SavedNetwork) -> tuple[int, Any]:
    """The same among opened checkpoints."""
    like = jax.eval_shape(lambda: _fresh(known.network, known.policy))
    restored = found.restore(like, step, in_part=True).warn()
    return restored.step, restored.state


def _fresh(network: Network, policy: Policy) -> Mapping[str, Any]:
    params, moving = network.init(jax.random.key(0))
    return {"params": policy.to_update(params), "statistics": moving}


CLEANED_EVENT = "clean_dir"
"""The record that a run's checkpoints were about to be removed."""


@dataclass(frozen=True)
class RunCheckpoints:
    """Where a run saves, and which steps there are its own."""

    folder: Path
    run: Path | None
    """None where nothing is known of the run: then every step counts."""
    given: bool
    """Whether the user named the folder: then it stays, even empty."""

    @classmethod
    def of(cls, config: Train, run: Path) -> "RunCheckpoints":
        """Where the options let a run save."""
        given = config.checkpoint_output_dir
        return cls(given or run / "checkpoints", run, given is not None)

    @classmethod
    def at(cls, path: Path) -> "RunCheckpoints":
        """What lies at a path: a run's folder, or one of checkpoints; CheckpointError where there is neither."""
        run = presets.find_run(path)
        if run is None and not path.is_dir():
            raise CheckpointError(f"{path}: no such folder; give a run's folder or its folder of checkpoints")
        if run is None:
            return cls(checkpoints_in(path), None, True)
        given = presets.read_run_options(run).get("checkpoint_output_dir")
        return cls(Path(given or run / "checkpoints"), run, given is not None)

    def check_any(self) -> None:
        """CheckpointError where there is no whole checkpoint: it says what became of them."""
        with self.opened() as checkpoints:
            if not checkpoints.steps():
                raise CheckpointError(f"{self.run or self.folder}: {self._why_none(checkpoints.begun())}")

    def _why_none(self, begun: bool) -> str:
        if begun:
            return "every checkpoint there is damaged"
        if self._is_cleaned():
            return (
                "its checkpoints were removed after the validation, as --clean-dir asked for; train again without "
                "it, and the best and the last stay"
            )
        if self.run is not None:
            return f"has no checkpoint in {self.folder}: none was saved, or they were moved away"
        if (self.folder / presets.NETWORK_FILE).exists():
            return "holds no checkpoint; give a run's folder or its folder of checkpoints"
        return f"no {presets.NETWORK_FILE} there; give a run's folder or its folder of checkpoints"

    def opened(self) -> Checkpoints:
        """The run's own checkpoints; none as long as nothing is on record."""
        if self.run is None:
            return Checkpoints(self.folder, KeepAll(), family=presets.FAMILY)
        first = next(iter(self._records()), None)
        return Checkpoints(
            self.folder, KeepAll(), family=presets.FAMILY, config={"first_record": first}, shared=True
        )

    def _records(self) -> list[dict[str, Any]]:
        return [*read_events(self.run)] if self.run and (self.run / "events.jsonl").exists() else []

    def made(self) -> list[int]:
        """The run's own steps, oldest first."""
        with self.opened() as checkpoints:
            return checkpoints.steps()

    def check(self, network: Network, plan: Plan | None) -> None:
        """CheckpointError where the run would meet another's step, or save beside those of another network."""
        mine = self.made()
        others = sorted({*list_steps(self.folder)} - {*mine})
        if not others or plan is None:
            return
        check_same(read_saved_network(self.folder).network, network, self.folder)
        still_to_come = [step for step in plan.updates("checkpoint") if step > max(mine, default=0)]
        if taken := [step for step in others if step in still_to_come]:
            raise CheckpointError(
                f"{self.folder}: holds step {taken[0]} of another run, which this one would replace; choose another "
                "--checkpoint-output-dir, or move that step away"
            )

    def check_unfinished(self) -> None:
        """RunError where the run is finished and left nothing to go on from: it would start over unasked."""
        with self.opened() as checkpoints:
            if checkpoints.begun():
                return
        if self._is_cleaned() or self._has_ended():
            why = (
                "its checkpoints were removed, as --clean-dir asked for"
                if self._is_cleaned()
                else "has no checkpoints"
            )
            raise RunError(
                f"--resume: {self.run} is finished and {why}; to train again give another --run-name"
            )

    def is_done(self) -> bool:
        """Whether the run came to its end: trained, validated, and rid of the checkpoints that were not to stay."""
        return self._has_ended() and any(each["event"] == TOOK for each in self._records())

    def _is_cleaned(self) -> bool:
        return any(each["event"] == CLEANED_EVENT for each in self._records())

    def _has_ended(self) -> bool:
        return self.run is not None and has_finished(self.run)

    def newest(self, checkpoints: Checkpoints, state: Any) -> Restored | None:
        """The run's newest whole step, to go on from; None where none was ever begun."""
        return checkpoints.restore(copy_state(state), check=check_position) if checkpoints.begun() else None

    def clean(self, made: list[int], kept: list[int], epoch: float, record: Run) -> None:
        """Remove the other steps of the run, and the folder if the run made it and nothing else is in it."""
        gone = [step for step in made if step not in kept]
        # It is there already where a kill came right after it.
        if not any(each["event"] == CLEANED_EVENT for each in current_records(self._records())):
            record.event(CLEANED_EVENT, update=made[-1], epoch=epoch, steps=gone, kept=kept)
        with self.opened() as checkpoints:
            for step in gone:
                checkpoints.remove(step)
        if not checkpoint_folder.find_steps(self.folder):
            (self.folder / presets.NETWORK_FILE).unlink(missing_ok=True)
        if not self.given and not list(self.folder.iterdir()):
            self.folder.rmdir()
