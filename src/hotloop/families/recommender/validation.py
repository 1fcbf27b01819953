"""The validations of a run: what they say about stopping and the best checkpoint, and the process that makes them
while the training goes on (--multiprocessing), both sides of it.

Weights are written to RUN/validating; figures are recorded when they come, as those of the update whose weights they
were. Nothing that was queued is lost: where OUTSTANDING figures are missing the training waits, and what an interrupted
run left is asked again by the run that resumes it. If the process dies the training stops, saved.

The process, `python -m hotloop.families.recommender.validation RUN PLATFORM`, reads lines of {step, weights} and
answers each with its figures. It ends with its input, whatever it is doing: so it never outlives the training.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from numpy.typing import NDArray

from hotloop.data.content import read_npz
from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine import processes
from hotloop.engine.checkpoint import Checkpoints, named_leaves, snapshot
from hotloop.engine.checkpoint_folder import Keep, KeepBest, Metrics
from hotloop.engine.device import PREALLOCATE, platform, setup
from hotloop.engine.drive import Diverged
from hotloop.engine.plan import Plan
from hotloop.engine.progress import Console
from hotloop.engine.run import Run, current_records, read_events
from hotloop.errors import HotloopError, RunError
from hotloop.families.recommender import model
from hotloop.families.recommender.batches import Figures, make_rating_error
from hotloop.families.recommender.config import KS
from hotloop.families.recommender.measures import Batch, ScoringRules, make_measures
from hotloop.families.recommender.saved_run import BEST, Setup, read_matrix, read_setup, state_shapes
from hotloop.options.files import whole_file

# In the run's folder: weights that are not validated yet, the ratings to validate with, what the process said.
FOLDER, RATINGS_FILE, STDERR_FILE = "validating", "ratings.npz", "stderr.txt"
OUTSTANDING = 4  # weights that may wait for their figures while the training goes on
_PATIENCE_SECONDS = 10  # for a process that is about to end by itself; then it is killed


def make_validation(
    job: model.Job, train: RatingMatrix, truth: RatingMatrix, size: int, mesh: Mesh | None = None
) -> Callable[[Any], Figures]:
    """From a state to the figures of a validation, compiled once: errors of ratings, or worth of an order."""
    if not job.is_ranking:
        return make_rating_error(model.evaluate(job), train, truth, size, mesh)
    measure, (short, long) = measure_order(job, train, truth, size, mesh), KS
    left_out = [f"ndcg@{long}", f"ndcg@{long}_se", f"recall@{short}", f"recall@{short}_se"]

    def measure_briefly(state: Any) -> Figures:
        return {name: value for name, value in measure(state).items() if name not in left_out}

    return measure_briefly


def measure_order(
    job: model.Job,
    train: RatingMatrix,
    truth: RatingMatrix,
    size: int,
    mesh: Mesh | None = None,
    likes: NDArray[np.int64] | None = None,
    *,
    rates: bool = False,
) -> Callable[[Any], Figures]:
    """From a state to the worth of the order that its scores make, with `likes` beside that of popularity; of a model
    that `rates` what its ratings are worth, too."""
    rules = ScoringRules(job.low, job.high, ks=KS, relevant=job.net.relevant)

    def score(state: Any, batch: Batch) -> Array:
        return model.predict(job, state, batch["ratings"])

    return make_measures(score, train, truth, size, rules, mesh=mesh, rates=rates, likes=likes)


class Validations(Keep):
    """Validations by step, in the order of the steps, and a rule of which checkpoints to keep by them.

    Where they come `late` a checkpoint is saved before its validation is known, so that its own figures do not tell:
    those that still wait for it stay, and of the others the best.
    """

    def __init__(self, patience: int | None = None, late: bool = False, rule: KeepBest = BEST["ratings"]):
        self.patience, self.late, self.rule = patience, late, rule
        self.figures: dict[int, Figures] = {}
        self.waiting: tuple[int, ...] = ()
        self.error = ""
        """Why no more figures will come, where that is so."""

    def record(self, run: Run, plan: Plan, step: int, figures: Figures) -> None:
        """Take in figures of weights that waited in the folder, which they need no longer."""
        self.figures[step] = {f"validation_{name}": value for name, value in figures.items()}
        epoch = float(step / plan.updates_per_epoch)
        run.event("validation", update=step, epoch=epoch, **self.figures[step])
        weights_path(run.path, step).unlink(missing_ok=True)

    def enough(self) -> bool:
        """Whether `patience` validations came after the best one, or none will come any more."""
        sign = 1 if self.rule.mode == "min" else -1
        found = [figures.get(self.rule.metric) for _, figures in sorted(dict(self.figures).items())]
        values = [sign * v if v is not None and math.isfinite(v) else math.inf for v in found]
        best = min(values, default=math.inf)
        since = len(values) - 1 - values.index(best) if math.isfinite(best) else len(values)
        return bool(self.error) or (self.patience is not None and since >= self.patience)

    def choose(self, metrics: Metrics) -> set[int]:
        return self.rule.choose(self._known(metrics)) | set(metrics).intersection(self.waiting)

    def best(self, metrics: Metrics) -> int | None:
        return self.rule.best(self._known(metrics))

    def _known(self, metrics: Metrics) -> Metrics:
        figures = dict(self.figures)
        return {step: {**own, **figures.get(step, {})} for step, own in metrics.items()}

    def mark_best(self, checkpoints: Checkpoints, like: Any) -> None:
        """Write the best checkpoint again with its validation, for all who open the run later."""
        step = checkpoints.best()
        if step is None or self.rule.metric in checkpoints.metrics(step):
            return
        found = checkpoints.restore(like, step)
        metrics = {**found.metrics, **self.figures.get(step, {})}
        checkpoints.save(step, found.state, position=found.position, metrics=metrics)
        checkpoints.wait()


@contextmanager
def open_validation(
    setup: Setup,
    run: Run,
    found: Validations,
    errors_on: Callable[[str], Callable[[Any], Figures]],
    done: int,
    console: Console,
) -> Iterator[Callable[[model.State], Figures]]:
    """Validation in a process of its own, or between calls, while the training waits.

    A run that goes on from `done` updates first validates what an earlier process left.
    """
    for event in current_records(read_events(run.path)) if run.resumed else ():
        if event["event"] == "validation" and event["update"] <= done:
            own = {name: value for name, value in event.items() if name.startswith("validation_")}
            found.figures[event["update"]] = own
    left_over = processes.agreed(
        find_left_over(run.path, done, found.figures) if processes.is_writer() else None
    )
    if setup.config.multiprocessing:
        assert setup.data.validation is not None
        truth, used = setup.data.validation, setup.config.replicas
        with ProcessValidation(run, setup.plan, found, truth, console, used) as process:
            for step in left_over:
                process.queue(step)
            yield process
            process.finish()
        return
    console.say("Running validation...")

    def measured(params: Any) -> Figures:
        with console.progress("validating"):
            return errors_on("validation")({"params": params})

    def validate(state: model.State) -> Figures:
        named = {f"validation_{name}": value for name, value in measured(state["params"]).items()}
        found.figures[int(state["update"])] = named
        return named

    for step in left_over:
        weights = read_weights(weights_path(run.path, step), setup.job)
        found.record(run, setup.plan, step, measured(weights))
    if processes.is_writer():
        clear_folder(run.path)
    yield validate


def weights_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:08d}.npz"


def find_left_over(run: Path, update: int, answered: Mapping[int, Any]) -> list[int]:
    """Steps whose weights an interrupted run left unvalidated, in order; files of no more use are deleted."""
    steps = []
    for path in (run / FOLDER).glob(".*.npz*"):
        path.unlink()  # half written by a killed process
    for path in sorted((run / FOLDER).glob("[0-9]*.npz")):
        if int(path.stem) in answered or int(path.stem) > update:
            path.unlink()  # after `update`, where the run goes on, they will come again
        else:
            steps.append(int(path.stem))
    return steps


def clear_folder(run: Path) -> None:
    """Delete what only validation needed, once nothing waits."""
    for name in (STDERR_FILE, RATINGS_FILE):
        (run / FOLDER / name).unlink(missing_ok=True)
    with suppress(OSError):
        (run / FOLDER).rmdir()


def write_weights(path: Path, params: Any) -> None:
    """The weights as a file that is whole or not there."""
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **snapshot(params)[0])  # type: ignore[arg-type]


def read_weights(path: Path, job: model.Job) -> Any:
    """What was written, with the types that the job keeps weights in."""
    like, arrays = state_shapes(job)["params"], read_npz(path)
    # A file of numpy's knows no bfloat16: it has two nameless bytes, which are looked at as what they are.
    leaves = [arrays[name].view(leaf.dtype) for name, leaf in named_leaves(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def process_environment(
    where: str, devices: int, variables: Mapping[str, str], used: int = 1
) -> dict[str, str]:
    """The other process's variables: a GPU beside the first so many, which are used, where there is one, else the
    last, and no more memory than it needs."""
    own = dict(variables)
    if where == "gpu":
        own[PREALLOCATE] = "false"
        visible = own.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        if devices > 1:
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[min(used, devices - 1)].strip()
    return own


class ProcessValidation:
    """The process, from its start to its end; figures are recorded, and taken in by `found`, in a thread."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        found: Validations,
        truth: RatingMatrix,
        console: Console,
        used_devices: int = 1,
    ):
        self._run, self._plan, self._validations, self._say = run, plan, found, console.say
        self._changed = threading.Condition()
        self._closing = False
        (run.path / FOLDER).mkdir(exist_ok=True)
        truth.write(run.path / FOLDER / RATINGS_FILE)
        words = [sys.executable, "-m", __name__, str(run.path.absolute()), platform()]
        devices = len(jax.devices(platform()))
        variables = process_environment(platform(), devices, os.environ, used_devices)
        with (run.path / FOLDER / STDERR_FILE).open("wb") as errors:
            # A session of its own: Ctrl-C is for the training, which then ends this process in its own time.
            self.process = subprocess.Popen(
                words, stdin=-1, stdout=-1, stderr=errors, env=variables, start_new_session=True, text=True
            )
        console.say(f"Running validation beside the training, in process {self.process.pid}")
        self._reader = threading.Thread(target=self._read, name="hotloop-validation", daemon=True)
        self._reader.start()

    def __call__(self, state: Any) -> Figures:
        """Queue the weights of a state; there are no figures yet."""
        self._wait(OUTSTANDING - 1)
        step = int(state["update"])
        write_weights(weights_path(self._run.path, step), state["params"])
        self.queue(step)
        return {}

    def queue(self, step: int) -> None:
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
        """Take in figures as they come, until there are no more, and say why where that is too early."""
        assert self.process.stdout is not None
        error = ""
        try:
            for line in self.process.stdout:
                answer = json.loads(line)
                step = answer["step"]
                self._validations.record(self._run, self._plan, step, answer["figures"])
                with self._changed:
                    self._validations.waiting = tuple(n for n in self._validations.waiting if n != step)
                    self._changed.notify_all()
            if not self._closing:
                status = self._end()
                killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else ""
                text = (self._run.path / FOLDER / STDERR_FILE).read_text(errors="replace")
                last = [f" ({line.strip()})" for line in text.strip().splitlines()[-1:]]
                error = f"the validating process {killed or f'ended with status {status}'}{''.join(last)}"
        except Exception as problem:  # whatever it is, the training must not wait for ever
            error = f"an answer could not be recorded ({problem})"
        with self._changed:
            self._validations.error = error
            self._changed.notify_all()

    def _end(self) -> int:
        """The status of the process, which is about to end by itself; if it does not, it is ended."""
        try:
            return self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> "ProcessValidation":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
            clear_folder(self._run.path)


def main(folder: Path, where: str) -> None:
    """The process: give figures until its parent has gone."""
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for line in sys.stdin:
                jobs.put(json.loads(line))
        finally:  # a line that was torn by a kill is an end, too
            os._exit(0)  # the parent has gone, and with it the need for what the main thread is computing

    threading.Thread(target=listen, daemon=True).start()
    # Standard output is for replies alone: what libraries print there goes to standard error instead.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup(where)
    found = read_setup(folder)
    ids = np.arange(found.users), np.arange(found.job.items)  # the real ones are in no figure
    train, truth = (read_matrix(place, *ids) for place in (folder, folder / FOLDER))
    assert found.config.validation_batch_size is not None
    measure = make_validation(found.job, train, truth, found.config.validation_batch_size)
    while True:
        asked = jobs.get()
        figures = measure({"params": read_weights(Path(asked["weights"]), found.job)})
        print(json.dumps({**asked, "figures": figures}), file=replies, flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except HotloopError as error:
        sys.exit(str(error))
