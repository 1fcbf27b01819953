"""The one way to run a training: its folder, records and checkpoints, resuming, the bar, validation, stopping.

`check_place` refuses what cannot work before data are read. `open_training` holds the run's folder while the family
works in it, `TrainingRun.train` makes the updates; `train` is both in one call.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.checkpoint_folder import Keep, KeepLast
from hotloop.engine.drive import Callbacks, check_position, drive
from hotloop.engine.interrupt import print_to_stderr
from hotloop.engine.loop import Program, State, copy_state
from hotloop.engine.measure import find_report_folder
from hotloop.engine.plan import Plan
from hotloop.engine.progress import Console, Show, show
from hotloop.engine.run import Run, Sink, check_free
from hotloop.engine.sinks import ConsoleSink


def check_place(folder: Path, resume: bool, report: str | Path | None = None) -> None:
    """RunError or OptionError where what a training writes has no place; nothing but a named report is touched."""
    check_free(folder, resume)
    find_report_folder(report, folder, lambda _: None)  # what is to be said about it is said with the run


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A run that is open: its records, its checkpoints, and where its report goes (None: nowhere)."""

    record: Run
    checkpoints: Checkpoints
    report: Path | None
    progress: Show

    def newest(self, state: State) -> Restored | None:
        """The newest whole checkpoint of a state like `state`, to go on from; None where none was ever begun. A folder
        in which every checkpoint is damaged is an error: starting over would hide it."""
        begun = self.checkpoints.begun()
        return self.checkpoints.restore(copy_state(state), check=check_position) if begun else None

    def train(
        self,
        program: Program,
        plan: Plan,
        state: State,
        *,
        resumed: Restored | None = None,
        title: str = "training",
        endless: bool = False,
        how_to_resume: str = "give the same command again with --resume",
        **callbacks: Unpack[Callbacks],
    ) -> State:
        """Make every update of the plan, and return the state after the last one; see `drive.Callbacks`.

        A run that is resumed goes on from `resumed` (None: from its newest checkpoint). It saves where the plan has
        checkpoints at all. `title` stands beside the bar; an `endless` plan ends with its data, which no bar can know.
        """
        if resumed is None and self.record.resumed:
            resumed = self.newest(state)
        with self.progress(title, None if endless else plan.total_updates) as bar:
            bar.advance(resumed.step if resumed else 0)
            self.record.how_to_resume = how_to_resume
            return drive(
                program,
                plan,
                state,
                self.record,
                self.checkpoints if any(mark.kind == "checkpoint" for mark in plan.marks) else None,
                resumed=resumed,
                progress=bar,
                report=self.report,
                **callbacks,
            )


@contextmanager
def open_training(
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    command: str,
    family: str = "",
    resume: bool = False,
    may_differ: Collection[str] = (),
    options: type[Any] | None = None,
    keep: Keep = KeepLast(3),  # noqa: B008 - frozen
    checkpoints: Callable[[Path], Checkpoints] | None = None,
    console: Console | None = None,
    sinks: Sequence[Sink] | None = None,
    progress: Show = show,
    report: str | Path | None = None,
    programs: Sequence[str] = ("training", "evaluation"),
    notice: str = "",
) -> Iterator[TrainingRun]:
    """Hold a run's folder: a new one, or with `resume` that of an earlier run with the same settings.

    `settings` become its config.json; those in `may_differ` may be others than before, and what an old one lacks of
    the `options` was at its default. `checkpoints` opens others than those in the folder, which are kept by `keep`.
    `sinks` see every record (None: the console alone); without a `console` lines go to standard error and `progress`
    shows bars. `report` is where the compiler's report was asked for, and `programs` are the sub-folders it will have.
    A `notice`, about the data say, is a warning among the records, and again at the end, where it is not missed.
    """
    folder, say = Path(folder), console.say if console else print_to_stderr
    warn = console.warn if console else lambda text: print_to_stderr(f"warning: {text}")
    report_folder = find_report_folder(report, folder, warn, programs)
    with Run(
        folder,
        settings,
        command=command,
        resume=resume,
        may_differ=may_differ,
        options=options,
        sinks=[ConsoleSink(say)] if sinks is None else sinks,
    ) as record:
        if checkpoints is None:
            checkpoints = partial(Checkpoints, keep=keep, family=family, config=settings)
        with checkpoints(record.checkpoints) as opened:
            if notice:
                record.event("warning", message=notice)
            yield TrainingRun(record, opened, report_folder, console.progress if console else progress)
            if notice:
                warn(notice)


def train(
    program: Program,
    plan: Plan,
    state: State,
    folder: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    family: str = "",
    resume: bool = False,
    keep: Keep = KeepLast(3),  # noqa: B008 - frozen
    sinks: Sequence[Sink] | None = None,
    report: str | Path | None = None,
    how_to_resume: str = "call train again with resume=True",
    **callbacks: Unpack[Callbacks],
) -> State:
    """Train in a folder of its own, or with `resume` go on there; the state after the last update.

    The folder holds the records (`events.jsonl`), the checkpoints and the `settings`, which a resumed run must have
    again. A stop by Ctrl-C or SIGTERM is saved and raised as `Interrupted`. `drive.Callbacks` says what may be added.

    >>> import jax, numpy as np, tempfile
    >>> from hotloop import Plan, Program, Resident, train
    >>> def update(slope, batch, key):
    ...     error = slope * batch["x"] - batch["y"]
    ...     return slope - (error * batch["x"]).mean(), {"loss": (error**2).mean()}
    >>> x = np.linspace(-1, 1, 32, dtype=np.float32)
    >>> plan = Plan.for_epochs(samples=32, epochs=10, batch=8, ckpts_per_epoch="1/5")
    >>> program = Program(
    ...     update, Resident({"x": x, "y": 3 * x}, 8), plan.updates_per_call, jax.random.key(0)
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     slope = train(program, plan, 0.0, f"{folder}/run", guard="loss", sinks=[])
    >>> round(float(slope), 2)
    3.0
    """
    with open_training(
        folder,
        settings or {},
        command=" ".join(sys.argv),
        family=family,
        resume=resume,
        keep=keep,
        sinks=sinks,
        report=report,
    ) as training:
        return training.train(program, plan, state, how_to_resume=how_to_resume, **callbacks)
