"""Validation beside the training, in a process of its own: the training's side of it.

At each validation the weights are written to RUN/validating and the training goes on; the answer is recorded when it
comes, as the validation of the update whose weights they were. Nothing that was queued is lost or replaced: where
OUTSTANDING answers are missing the training waits, a file goes only when its answer is recorded, and what an
interrupted run left there is asked again by the run that resumes it. If the process dies the training stops, saved.
How errors are computed is `validator`'s matter.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from hotloop.engine.device import platform
from hotloop.engine.host_events import Diverged
from hotloop.engine.run import Run
from hotloop.errors import OptionError, RunError
from hotloop.families.recommender import saved_run
from hotloop.families.recommender.validations import Figures, Validations, name_figures
from hotloop.families.recommender.validator import FOLDER, write_weights
from hotloop.families.recommender.work import Work

OUTSTANDING = 4
"""Weights that may wait for their answers while the training goes on."""
LAST_WORDS = "stderr.txt"
_PATIENCE_SECONDS = 10


def check(where: str) -> None:
    """Refuse a device that two processes cannot share."""
    if where == "tpu":
        raise OptionError("--multiprocessing: a TPU belongs to one process at a time; leave the option out")


def environment(where: str, devices: int, variables: Mapping[str, str]) -> dict[str, str]:
    """The other process's variables: the second GPU where there are two, and no more memory than it needs."""
    own = dict(variables)
    if where == "gpu":
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        visible = own.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        if devices > 1:
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[1].strip()
    return own


def left_over(run: Path, update: int, answered: Mapping[int, Any]) -> list[int]:
    """Steps whose weights an interrupted run left unvalidated, in order; files of no more use are deleted.

    These are weights that are answered, and those after `update`, where the run goes on: they will come again.
    """
    steps = []
    for path in (run / FOLDER).glob(".*.npz*"):
        path.unlink()  # half written by a killed process
    for path in sorted((run / FOLDER).glob("[0-9]*.npz")):
        if int(path.stem) in answered or int(path.stem) > update:
            path.unlink()
        else:
            steps.append(int(path.stem))
    return steps


def weights_file(run: Path, step: int) -> Path:
    """Where the weights of a step wait."""
    return run / FOLDER / f"{step:08d}.npz"


def clear(run: Path) -> None:
    """Delete what only validation needed, once nothing waits."""
    for name in (LAST_WORDS, "ratings.npz"):
        (run / FOLDER / name).unlink(missing_ok=True)
    with suppress(OSError):
        (run / FOLDER).rmdir()


class Beside:
    """The other process, from its start to its end; in a `with` block, so that it has one.

    Answers are recorded, and taken in by `answers`, in a thread.
    """

    def __init__(self, run: Run, work: Work, answers: Validations):
        assert work.data.validation is not None
        self._run, self._work, self._answers = run, work, answers
        self._changed = threading.Condition()
        self._closing = False
        (run.path / FOLDER).mkdir(exist_ok=True)
        saved_run.write_training(run.path / FOLDER, work.data.validation)
        words = [
            sys.executable, "-m", "hotloop.families.recommender.validator", str(run.path.absolute()), platform()
        ]  # fmt: skip
        variables = environment(platform(), len(jax.devices(platform())), os.environ)
        with (run.path / FOLDER / LAST_WORDS).open("wb") as errors:
            # A session of its own: Ctrl-C is for the training, which then ends this process in its own time.
            self.process = subprocess.Popen(
                words, stdin=-1, stdout=-1, stderr=errors, env=variables, start_new_session=True, text=True
            )
        work.console.say(f"Running validation beside the training, in process {self.process.pid}")
        self._reader = threading.Thread(target=self._read, name="hotloop-validation", daemon=True)
        self._reader.start()

    def __call__(self, state: Any) -> Figures:
        """Queue the weights of a state; there are no figures yet."""
        self._wait(OUTSTANDING - 1)
        step = int(state["update"])
        write_weights(weights_file(self._run.path, step), state["params"])
        self.ask(step)
        return {}

    def ask(self, step: int) -> None:
        """Queue weights that lie in the folder."""
        self._wait(OUTSTANDING - 1)
        with self._changed:
            self._answers.waiting += (step,)
        weights = weights_file(self._run.path, step).absolute()
        job = {"step": step, "epoch": self._work.epoch(step), "weights": str(weights)}
        assert self.process.stdin is not None
        with suppress(OSError):  # a process that has died is noticed where its answers end
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for what is still to come; RunError where it never will."""
        if self._answers.waiting and not self._answers.error:
            say(f"waiting for {len(self._answers.waiting)} validations beside the training")
        self._wait(0)
        if self._answers.error:
            raise RunError(
                f"--multiprocessing: {self._answers.error}; the run is saved: go on with --resume "
                f"--run-name {self._run.path.name}, without --multiprocessing if it happens again"
            )

    def _wait(self, most: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._answers.error) or len(self._answers.waiting) <= most)

    def _read(self) -> None:
        """Take in answers as they come, until there are no more."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._take(json.loads(line))
            error = "" if self._closing else self._reason()
        except Exception as problem:  # whatever it is, the training must not wait for ever
            error = f"an answer could not be recorded ({problem})"
        with self._changed:
            self._answers.error = error
            self._changed.notify_all()

    def _take(self, answer: Mapping[str, Any]) -> None:
        step, figures = answer["step"], name_figures(answer["figures"])
        self._answers.figures[step] = figures
        self._run.event("validation", update=step, epoch=answer["epoch"], **figures)
        weights_file(self._run.path, step).unlink(missing_ok=True)
        with self._changed:
            self._answers.waiting = tuple(other for other in self._answers.waiting if other != step)
            self._changed.notify_all()

    def _reason(self) -> str:
        status = self._ended()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = (self._run.path / FOLDER / LAST_WORDS).read_text(errors="replace").strip().splitlines()
        return f"the validating process {how}" + (f" ({lines[-1].strip()})" if lines else "")

    def _ended(self) -> int:
        """The status of the process, which is about to end by itself; if it does not, it is ended."""
        try:
            return self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> "Beside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process; after a divergence its answers are waited for, since they tell which step is best."""
        if kind is not None and issubclass(kind, Diverged):
            self._wait(0)
        self._closing = True
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self._ended()
        self._reader.join()
        self.process.stdout.close()
        if not (self._answers.waiting or self._answers.error):
            clear(self._run.path)
