"""Whose checkpoints are whose: what others saved in the output folder is not the run's.

A run's first record, which no other run has, marks its checkpoints. Steps of others, and whatever else lies there,
are neither gone on from, nor validated, nor replaced, nor removed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.engine import shelf
from hotloop.engine.checkpoint import Checkpoints, KeepAll, Restored
from hotloop.engine.loop import own
from hotloop.engine.plan import Plan
from hotloop.engine.run import read_events
from hotloop.errors import CheckpointError
from hotloop.families.cnn import saved
from hotloop.families.cnn.network import Network


@dataclass(frozen=True)
class Keeping:
    """Where a run saves, and which steps there are its own."""

    folder: Path
    run: Path
    given: bool
    """Whether the user named the folder: then it stays, even empty."""

    def opened(self) -> Checkpoints:
        """The run's own checkpoints; none as long as nothing is on record."""
        on_record = (self.run / "events.jsonl").exists()
        first = next(read_events(self.run), None) if on_record else None
        return Checkpoints(
            self.folder, KeepAll(), family=saved.FAMILY, config={"first_record": first}, shared=True
        )

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

    def newest(self, checkpoints: Checkpoints, state: Any) -> Restored | None:
        """The run's newest whole step, to go on from; None where none was ever begun."""
        return checkpoints.restore(own(state)) if checkpoints.begun() else None

    def clean(self, made: list[int]) -> None:
        """Remove these steps of the run, and the folder if the run made it and nothing else is in it."""
        there = shelf.numbered(self.folder)
        for step in made:
            shelf.remove(there[step])
        if not shelf.numbered(self.folder):
            (self.folder / saved.ABOUT).unlink(missing_ok=True)
        if not self.given and not list(self.folder.iterdir()):
            self.folder.rmdir()
