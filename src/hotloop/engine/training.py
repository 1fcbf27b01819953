"""The one way to run a training: its folder, records and checkpoints, resuming, the bar, validation, stopping.

`check_place` refuses what cannot work before data are read. `open_training` holds the run's folder while the family
works in it, `TrainingRun.train` makes the updates; `train` is both in one call.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from hotloop import startup
from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints, Restored
from hotloop.engine.checkpoint_folder import Keep, KeepLast
from hotloop.engine.device import platform
from hotloop.engine.drive import Callbacks, check_position, compile_first_piece, drive
from hotloop.engine.interrupt import print_to_stderr
from hotloop.engine.loop import Program, State, copy_state
from hotloop.engine.measure import find_report_folder
from hotloop.engine.plan import Plan
from hotloop.engine.process_group import PeerFailed
from hotloop.engine.process_log import FOLDER
from hotloop.engine.progress import Console, Show, show
from hotloop.engine.run import Run, check_free, compose_record, find_differences
from hotloop.engine.sink_group import Sink
from hotloop.engine.sinks import ConsoleSink
from hotloop.errors import OptionError, RunError
from hotloop.options import to_jsonable


def check_place(folder: Path, resume: bool, report: str | Path | None = None) -> None:
    """RunError or OptionError where what a training writes has no place; nothing but a named report is touched."""
    if not processes.is_writer():
        return
    check_free(folder, resume)
    find_report_folder(report, folder, lambda _: None)  # what is to be said about it is said with the run


def compiles_ahead(mesh: Any) -> bool:
    """Whether a run on these devices (None: one) should compile its program while its weights are drawn: where that is
    one accelerator of one process. On a CPU both would want the same cores."""
    return mesh is None and processes.count() == 1 and platform() != "cpu"


class UnwrittenRun(Run):
    """A run as those processes have it that do not write: the first one holds its folder and keeps its records."""

    def __init__(self, path: Path, resume: bool):
        self.path, self.checkpoints = path, path / "checkpoints"
        self.resumed, self.how_to_resume = resume, ""
        self._began, self._place = time.monotonic(), (0, 0.0)

    def event(
        self, event: str, *, update: int | None = None, epoch: float | None = None, **figures: Any
    ) -> dict[str, Any]:
        if update is None or epoch is None:
            update, epoch = self._place
        return compose_record(event, update, epoch, time.monotonic() - self._began, figures)

    def close(self, status: str = "finished", **figures: Any) -> None:
        pass


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

    def compile_ahead(self, program: Program, plan: Plan, forms: Any, start: int = 0) -> None:
        """Before there is a state, where `compiles_ahead`: trace the first call after `start` updates from the forms of
        one (`jax.eval_shape`), and let a thread compile it. `train` then waits for that."""
        compile_first_piece(program, plan, forms, start)
        startup.leave_out()  # the run's records have it as `lower_seconds`

    def train(
        self,
        program: Program,
        plan: Plan,
        state: State,
        *,
        resumed: Restored | None = None,
        title: str = "training",
        endless: bool = False,
        **callbacks: Unpack[Callbacks],
    ) -> State:
        """Make every update of the plan, and return the state after the last one; see `drive.Callbacks`.

        A run that is resumed goes on from `resumed` (None: from its newest checkpoint). It saves where the plan has
        checkpoints at all. `title` stands beside the bar; an `endless` plan ends with its data, which no bar can know.
        """
        startup.end_part("weights")
        processes.note("loading")
        if resumed is None and self.record.resumed:
            resumed = self.newest(state)
        with self.progress(title, None if endless else plan.total_updates) as bar:
            bar.advance(resumed.step if resumed else 0)
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
    each_process_saves: bool | None = None,
    how_to_resume: str = "give the same command again with --resume",
    resume_words: Sequence[str] = ("--resume",),
) -> Iterator[TrainingRun]:
    """Hold a run's folder: a new one, or with `resume` that of an earlier run with the same settings.

    `settings` become its config.json; those in `may_differ` may be others than before, and what an old one lacks of
    the `options` was at its default. `checkpoints` opens others than those in the folder, which are kept by `keep`.
    `sinks` see every record (None: the console alone); without a `console` lines go to standard error and `progress`
    shows bars. `report` is where the compiler's report was asked for, and `programs` are the sub-folders it will have.
    A `notice`, about the data say, is a warning among the records, and again at the end, where it is not missed.
    `how_to_resume` is said where a signal stops the run; `resume_words` are what the same command needs besides to go
    on with it, for a launcher that starts it again.

    Of several processes only the first writes, and all must see its folder, unless `each_process_saves` checkpoints of
    its own (None: the family has no such choice).
    """
    startup.end_part("data")
    folder, say = Path(folder), console.say if console else print_to_stderr
    warn = console.warn if console else lambda text: print_to_stderr(f"warning: {text}")
    # All have noted it before the first makes the folder, so that no run is there which somebody cannot go on with.
    processes.note(run=folder, resume=resume_words)
    _check_same_settings(settings)
    report_folder = find_report_folder(report, folder, warn, programs) if processes.is_writer() else None
    opened_run = (
        Run(
            folder,
            settings,
            command=command,
            resume=resume,
            may_differ=may_differ,
            options=options,
            sinks=[ConsoleSink(say)] if sinks is None else sinks,
        )
        if processes.is_writer()
        else UnwrittenRun(folder, resume)
    )
    opened_run.how_to_resume = how_to_resume
    with opened_run as record, processes.close_on_failure(partial(_close_failed, record)):
        if processes.count() > 1 and not each_process_saves:
            _check_shared(folder, can_save_apart=each_process_saves is not None)
        processes.use_folder(folder)
        if checkpoints is None:
            checkpoints = partial(
                Checkpoints, keep=keep, family=family, config=settings, each_process=bool(each_process_saves)
            )
        with checkpoints(record.checkpoints) as opened:
            if notice:
                record.event("warning", message=notice)
            yield TrainingRun(record, opened, report_folder, console.progress if console else progress)
            if notice:
                warn(notice)


def _close_failed(record: Run, failure: PeerFailed) -> None:
    with suppress(RunError):
        if failure.status >= 128:
            record.close("interrupted")
        else:
            record.close("failed", error=str(failure))


def _check_same_settings(settings: Mapping[str, Any]) -> None:
    """OptionError in every process where one has other settings than the first. It is also where all processes have
    looked at the folder, before the first makes it."""
    found = processes.gathered(to_jsonable(settings)) if processes.count() > 1 else []
    for number, theirs in enumerate(found):
        if changed := find_differences(found[0], theirs):
            raise OptionError(
                f"process {number} has other settings than process 0: {'; '.join(changed.values())}"
            )


def _check_shared(folder: Path, *, can_save_apart: bool) -> None:
    """RunError in every process where one does not see what process 0 writes into the folder; it names the way out
    where each process can save apart."""
    mark = folder / FOLDER / processes.agreed(f".seen-{secrets.token_hex(8)}")
    if processes.is_writer():
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    processes.barrier("folder")
    found = processes.gathered([mark.exists(), os.uname().nodename])
    if processes.is_writer():
        mark.unlink()
    blind = [f"{number} on {host}" for number, (sees, host) in enumerate(found) if not sees]
    if blind:
        apart = ", or let each save in its own: ckpt_all_instances=True" if can_save_apart else ""
        raise RunError(
            f"{folder} is not shared: process {', '.join(blind)} does not see what process 0 writes there; "
            f"choose a folder that all machines have{apart}"
        )


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
        how_to_resume=how_to_resume,
    ) as training:
        return training.train(program, plan, state, **callbacks)
