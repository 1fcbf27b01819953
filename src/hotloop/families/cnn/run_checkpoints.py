"""Whose checkpoints are whose: what others saved in the output folder is not the run's.

A run's first record, which no other run has, marks its checkpoints. Steps of others, and whatever else lies there,
are neither gone on from, nor validated, nor replaced, nor removed. A finished run whose own are gone does not go on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine.checkpoint import Checkpoints, KeepAll, Restored
from hotloop.engine.drive import check_position
from hotloop.engine.loop import copy_state
from hotloop.engine.run import Run, current_records, has_finished, read_events
from hotloop.errors import RunError

CLEANED = "clean_dir"
"""The record that a run's checkpoints were about to be removed."""


@dataclass(frozen=True)
class RunCheckpoints:
    """Where a run saves, and which steps there are its own."""

    folder: Path
    run: Path | None
    """None where nothing is known of the run: then every step counts."""
    family: str
    given: bool
    """Whether the user named the folder: then it stays, even empty."""

    def open(self) -> Checkpoints:
        """The run's own checkpoints; none as long as nothing is on record."""
        if self.run is None:
            return Checkpoints(self.folder, KeepAll(), family=self.family)
        first = next(iter(self.records()), None)
        return Checkpoints(
            self.folder, KeepAll(), family=self.family, config={"first_record": first}, shared=True
        )

    def records(self) -> list[dict[str, Any]]:
        return [*read_events(self.run)] if self.run and (self.run / "events.jsonl").exists() else []

    def steps(self) -> list[int]:
        """The run's own steps, oldest first."""
        with self.open() as checkpoints:
            return checkpoints.steps()

    def other_steps(self) -> list[int]:
        """Steps of other runs in the same folder, oldest first."""
        with Checkpoints(self.folder, KeepAll(), family=self.family) as everybody:
            return sorted({*everybody.steps()} - {*self.steps()})

    def check_unfinished(self) -> None:
        """RunError where the run is finished and left nothing to go on from: it would start over unasked."""
        with self.open() as checkpoints:
            if checkpoints.begun():
                return
        if self.was_cleaned() or self.has_ended():
            why = (
                "its checkpoints were removed, as --clean-dir asked for"
                if self.was_cleaned()
                else "has no checkpoints"
            )
            raise RunError(
                f"--resume: {self.run} is finished and {why}; to train again give another --run-name"
            )

    def was_cleaned(self) -> bool:
        return any(each["event"] == CLEANED for each in self.records())

    def has_ended(self) -> bool:
        return self.run is not None and has_finished(self.run)

    def newest(self, checkpoints: Checkpoints, state: Any) -> Restored | None:
        """The run's newest whole step, to go on from; None where none was ever begun."""
        return checkpoints.restore(copy_state(state), check=check_position) if checkpoints.begun() else None

    def clean(self, made: list[int], kept: list[int], epoch: float, record: Run) -> None:
        """Remove the other steps of the run."""
        gone = [step for step in made if step not in kept]
        # It is there already where a kill came right after it.
        if not any(each["event"] == CLEANED for each in current_records(self.records())):
            record.event(CLEANED, update=made[-1], epoch=epoch, steps=gone, kept=kept)
        with self.open() as checkpoints:
            for step in gone:
                checkpoints.remove(step)
