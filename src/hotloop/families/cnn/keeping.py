"""Whose checkpoints are whose: what others saved in the output folder is not the run's.

A run's first record, which no other run has, marks its checkpoints. Steps of others, and whatever else lies there,
are neither gone on from, nor validated, nor replaced, nor removed. A finished run whose own are gone does not go on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine import checkpoint_folder
from hotloop.engine.checkpoint import Checkpoints, KeepAll, Restored
from hotloop.engine.drive import check_position
from hotloop.engine.loop import copy_state
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, current_records, has_finished, read_events
from hotloop.errors import CheckpointError, RunError
from hotloop.families.cnn import of_run, saved
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.network import Network
from hotloop.families.cnn.time_to_train import TOOK

CLEANED = "clean_dir"
"""The record that a run's checkpoints were about to be removed."""


@dataclass(frozen=True)
class Keeping:
    """Where a run saves, and which steps there are its own."""

    folder: Path
    run: Path | None
    """None where nothing is known of the run: then every step counts."""
    given: bool
    """Whether the user named the folder: then it stays, even empty."""

    @classmethod
    def of(cls, config: Train, run: Path) -> "Keeping":
        """Where the options let a run save."""
        given = config.checkpoint_output_dir
        return cls(given or run / "checkpoints", run, given is not None)

    @classmethod
    def at(cls, path: Path) -> "Keeping":
        """What lies at a path: a run's folder, or one of checkpoints; CheckpointError where there is neither."""
        run = of_run.run_at(path)
        if run is None and not path.is_dir():
            raise CheckpointError(f"{path}: no such folder; give a run's folder or its folder of checkpoints")
        if run is None:
            return cls(saved.checkpoints_in(path), None, True)
        given = of_run.options_at(run).get("checkpoint_output_dir")
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
        if (self.folder / of_run.ABOUT).exists():
            return "holds no checkpoint; give a run's folder or its folder of checkpoints"
        return f"no {of_run.ABOUT} there; give a run's folder or its folder of checkpoints"

    def opened(self) -> Checkpoints:
        """The run's own checkpoints; none as long as nothing is on record."""
        if self.run is None:
            return Checkpoints(self.folder, KeepAll(), family=of_run.FAMILY)
        first = next(iter(self._records()), None)
        return Checkpoints(
            self.folder, KeepAll(), family=of_run.FAMILY, config={"first_record": first}, shared=True
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
        others = sorted({*saved.steps(self.folder)} - {*mine})
        if not others or plan is None:
            return
        saved.check_same(saved.about(self.folder).network, network, self.folder)
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
        return any(each["event"] == CLEANED for each in self._records())

    def _has_ended(self) -> bool:
        return self.run is not None and has_finished(self.run)

    def newest(self, checkpoints: Checkpoints, state: Any) -> Restored | None:
        """The run's newest whole step, to go on from; None where none was ever begun."""
        return checkpoints.restore(copy_state(state), check=check_position) if checkpoints.begun() else None

    def clean(self, made: list[int], kept: list[int], epoch: float, record: Run) -> None:
        """Remove the other steps of the run, and the folder if the run made it and nothing else is in it."""
        gone = [step for step in made if step not in kept]
        # It is there already where a kill came right after it.
        if not any(each["event"] == CLEANED for each in current_records(self._records())):
            record.event(CLEANED, update=made[-1], epoch=epoch, steps=gone, kept=kept)
        with self.opened() as checkpoints:
            for step in gone:
                checkpoints.remove(step)
        if not checkpoint_folder.find_steps(self.folder):
            (self.folder / of_run.ABOUT).unlink(missing_ok=True)
        if not self.given and not list(self.folder.iterdir()):
            self.folder.rmdir()
