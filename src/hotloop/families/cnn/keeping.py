"""Whose checkpoints are whose: what was in the output folder before a run is not the run's.

Such steps, and whatever else lies there, are neither gone on from, nor validated, nor replaced, nor removed. The run's
records keep their numbers, so that a run that goes on knows them, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine import drive, shelf
from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.loop import own
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run, read_events
from hotloop.errors import CheckpointError
from hotloop.families.cnn import saved
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.network import Network

EVENT = "other_checkpoints"


@dataclass(frozen=True)
class Keeping:
    """The folder that a run saves in, and the steps in it that are others'."""

    folder: Path
    others: frozenset[int]
    given: bool
    """Whether the user named the folder: then it stays, even empty."""

    @classmethod
    def of(cls, folder: Path, run: Path, config: Train) -> "Keeping":
        """Look before the first update; a run that goes on looked when it began."""
        if config.checkpoint_output_dir is None:
            return cls(folder, frozenset(), given=False)
        if config.resume and (run / "events.jsonl").exists():
            found = [event for event in read_events(run) if event["event"] == EVENT]
            others = [step for event in found for step in event["steps"]]
        else:
            others = saved.steps(folder)
        return cls(folder, frozenset(others), given=True)

    def check(self, network: Network, plan: Plan | None) -> None:
        """CheckpointError where the run would write over another's step, or beside those of another network."""
        if not self.others or plan is None:
            return
        saved.check_same(saved.about(self.folder).network, network, self.folder)
        if taken := sorted(self.others & {*plan.updates("checkpoint")}):
            raise CheckpointError(
                f"--checkpoint-output-dir {self.folder}: holds step {taken[0]} of another run, which this one would "
                "replace; choose another folder"
            )

    def note(self, record: Run) -> None:
        """Write down the steps of others, for when this run goes on."""
        if self.others:
            record.event(EVENT, count=len(self.others), steps=sorted(self.others))

    def newest(self, checkpoints: Checkpoints, state: Any) -> Restored | None:
        """The run's newest step, to go on from."""
        if not self.others:
            return drive.newest(checkpoints, state)
        steps = self.made(checkpoints)
        return checkpoints.restore(own(state), steps[-1]) if steps else None

    def made(self, checkpoints: Checkpoints) -> list[int]:
        """The run's own steps, oldest first."""
        return [step for step in checkpoints.steps() if step not in self.others]

    def clean(self, made: list[int]) -> None:
        """Remove these steps of the run, and the folder if the run made it and nothing else is in it."""
        there = shelf.numbered(self.folder)
        for step in made:
            shelf.remove(there[step])
        if not shelf.numbered(self.folder):
            (self.folder / saved.ABOUT).unlink(missing_ok=True)
        if not self.given and not list(self.folder.iterdir()):
            self.folder.rmdir()
