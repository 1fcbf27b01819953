"""Validation in a process of its own, while the training goes on: both sides of it.

At each validation the weights are written to RUN/validating and the training goes on; the figures are recorded when
they come, as the validation of the update whose weights they were. Nothing that was queued is lost or replaced:
where OUTSTANDING figures are missing the training waits, a file goes only when its figures are recorded, and what an
interrupted run left there is asked again by the run that resumes it. If the process dies the training stops, saved.

The process is `python -m hotloop.families.recommender.validate_process RUN PLATFORM`. Each line of its input is
{step, weights}; each line of its output has the figures with it, in the same order. When its input ends it ends, in
the middle of whatever it is doing: so it never outlives the training, however that ended. All it knows of the run is
in the run's folder; files of weights are removed by the training.
"""

import json
import os
import queue
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
import numpy as np

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.device import platform, setup
from hotloop.engine.drive import Diverged
from hotloop.engine.plan import Plan
from hotloop.engine.run import Run
from hotloop.errors import HotloopError, OptionError, RunError
from hotloop.families.recommender import model, validations
from hotloop.families.recommender.measures import make_rating_error
from hotloop.families.recommender.saved_run import read_matrix, read_setup
from hotloop.families.recommender.validations import FOLDER, STDERR_FILE, Figures, Validations, weights_path

OUTSTANDING = 4
"""Weights that may wait for their figures while the training goes on."""
_PATIENCE_SECONDS = 10
"""For a process that is about to end by itself; then it is killed."""


def check_shareable(where: str) -> None:
    """Refuse a device that two processes cannot share."""
    if where == "tpu":
        raise OptionError("--multiprocessing: a TPU belongs to one process at a time; leave the option out")


def process_environment(where: str, devices: int, variables: Mapping[str, str]) -> dict[str, str]:
    """The other process's variables: the second GPU where there are two, and no more memory than it needs."""
    own = dict(variables)
    if where == "gpu":
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        visible = own.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        if devices > 1:
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[1].strip()
    return own


class ProcessValidation:
    """The process, from its start to its end; in a `with` block, so that it has one.

    Figures are recorded, and taken in by `found`, in a thread.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        found: Validations,
        truth: RatingMatrix,
        say: Callable[[str], None],
    ):
        self._run, self._plan, self._validations, self._say = run, plan, found, say
        self._changed = threading.Condition()
        self._closing = False
        (run.path / FOLDER).mkdir(exist_ok=True)
        truth.write(run.path / FOLDER / "ratings.npz")
        words = [sys.executable, "-m", __name__, str(run.path.absolute()), platform()]
        variables = process_environment(platform(), len(jax.devices(platform())), os.environ)
        with (run.path / FOLDER / STDERR_FILE).open("wb") as errors:
            # A session of its own: Ctrl-C is for the training, which then ends this process in its own time.
            self.process = subprocess.Popen(
                words, stdin=-1, stdout=-1, stderr=errors, env=variables, start_new_session=True, text=True
            )
        say(f"Running validation beside the training, in process {self.process.pid}")
        self._reader = threading.Thread(target=self._read, name="hotloop-validation", daemon=True)
        self._reader.start()

    def __call__(self, state: Any) -> Figures:
        """Queue the weights of a state; there are no figures yet."""
        self._wait(OUTSTANDING - 1)
        step = int(state["update"])
        validations.write_weights(weights_path(self._run.path, step), state["params"])
        self.queue(step)
        return {}

    def queue(self, step: int) -> None:
        """Queue weights that lie in the folder."""
        self._wait(OUTSTANDING - 1)
        with self._changed:
            self._validations.waiting += (step,)
        job = {"step": step, "weights": str(weights_path(self._run.path, step).absolute())}
        assert self.process.stdin is not None
        with suppress(OSError):  # a process that has died is noticed where its output ends
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def finish(self) -> None:
        """Wait for what is still to come; RunError where it never will."""
        if self._validations.waiting and not self._validations.error:
            self._say(f"waiting for {len(self._validations.waiting)} validations beside the training")
        self._wait(0)
        if self._validations.error:
            raise RunError(
                f"--multiprocessing: {self._validations.error}; the run is saved: go on with --resume "
                f"--run-name {self._run.path.name}, without --multiprocessing if it happens again"
            )

    def _wait(self, most: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._validations.error) or len(self._validations.waiting) <= most
            )

    def _read(self) -> None:
        """Take in figures as they come, until there are no more."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                answer = json.loads(line)
                step = answer["step"]
                figures = {f"validation_{name}": value for name, value in answer["figures"].items()}
                self._validations.record(self._run, self._plan, step, figures)
                with self._changed:
                    self._validations.waiting = tuple(n for n in self._validations.waiting if n != step)
                    self._changed.notify_all()
            error = "" if self._closing else self._reason()
        except Exception as problem:  # whatever it is, the training must not wait for ever
            error = f"an answer could not be recorded ({problem})"
        with self._changed:
            self._validations.error = error
            self._changed.notify_all()

    def _reason(self) -> str:
        status = self._end()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = (self._run.path / FOLDER / STDERR_FILE).read_text(errors="replace").strip().splitlines()
        return f"the validating process {how}" + (f" ({lines[-1].strip()})" if lines else "")

    def _end(self) -> int:
        """The status of the process, which is about to end by itself; if it does not, it is ended."""
        try:
            return self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> "ProcessValidation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process; after a divergence its figures are waited for, since they tell which step is best."""
        if kind is not None and issubclass(kind, Diverged):
            self._wait(0)
        self._closing = True
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self._end()
        self._reader.join()
        self.process.stdout.close()
        if not (self._validations.waiting or self._validations.error):
            validations.clear_folder(self._run.path)


def main(folder: Path, where: str) -> None:
    """The process: give figures until there is nobody left who asks."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    # Standard output is for answers alone: what libraries print there goes to standard error instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup(where)
    found = read_setup(folder)
    ids = np.arange(found.users), np.arange(found.job.items)  # the real ones are in no figure
    train, truth = (read_matrix(place, *ids) for place in (folder, folder / FOLDER))
    assert found.config.validation_batch_size is not None
    measure = make_rating_error(model.evaluate(found.job), train, truth, found.config.validation_batch_size)
    while True:
        asked = jobs.get()
        figures = measure({"params": validations.read_weights(Path(asked["weights"]), found.job)})
        print(json.dumps({**asked, "figures": figures}), file=answers, flush=True)


def _listen(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        for line in sys.stdin:
            jobs.put(json.loads(line))
    finally:  # a line that was torn by a kill is an end, too
        os._exit(0)  # whoever asked has gone: nobody waits for what the main thread is computing


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except HotloopError as error:
        sys.exit(str(error))
