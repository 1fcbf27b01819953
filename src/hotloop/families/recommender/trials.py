"""The trials of a sweep: what each is, what became of it, and the processes that they are, here or on a Ray cluster.

Each is in a process group of its own. One that fails is an outcome like any other and the rest go on. Ctrl-C, SIGTERM
and SIGHUP stop every child: it may save what it has, and is killed if it does not.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Any

from hotloop.engine.interrupt import before_leaving, raise_stops
from hotloop.engine.progress import Progress
from hotloop.engine.run import read_events, read_json
from hotloop.errors import DeviceError, MissingExtra, RunError
from hotloop.options.files import parse_json

WARNING = "warning:"
WATCH_SECONDS = 1.0
TAIL_BYTES = 64 * 1024  # of each stream of a child, what is looked at
CONNECT_SECONDS = 5.0
GRACE_SECONDS = 10.0  # in which a child that is told to stop may save
# Python waits for ever in one system call, but with a limit it looks about: Ray's cancelling is no signal.
FOREVER = 1e9
VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARED_MEMORY = 0.9  # of a device's memory, what processes that share it may take together


@dataclass(frozen=True)
class Trial:
    """One training to run; numbers begin at 1."""

    number: int
    exponent: float
    folder: Path
    command: tuple[str, ...]


@dataclass(frozen=True)
class TrialFigures:
    """Figures of a run, as far as it came; None where nothing was logged."""

    learning_rate: float | None = None  # that the training began with, or that its --lr-schedule is made of
    last_learning_rate: float | None = None
    updates: int = 0
    users: int = 0  # trained on, each as often as it was seen
    seconds: float = 0.0  # of the updates alone: compiling, validating and saving are in no log's time
    maximum: float | None = None  # users a second of the fastest log
    loss: float | None = None  # mean over the updates of the last log, as is `rmse`
    rmse: float | None = None
    error: str | None = None  # what ended the run, where it did not finish

    @property
    def average(self) -> float | None:
        """Users a second over all logs: users by time, not a mean of rates."""
        return self.users / self.seconds if self.seconds else None


def read_figures(folder: str | Path) -> TrialFigures:
    """The figures of the run in a folder; empty ones where none was begun, or others wrote in it."""
    folder = Path(folder)
    try:
        config, events = read_json(folder / "config.json"), list(read_events(folder))
        batch = config["batch_size"]
        factor = config["learning_rate_decay"][0] if config.get("lr_schedule", "drops") == "drops" else 1
        rate = 2.0 ** config["base_learning_rate"] * batch * factor
        end: dict[str, Any] = next((event for event in reversed(events) if event["event"] == "end"), {})
        logs = [event for event in events if event["event"] == "log" and event["throughput"]]
        if not logs:
            return TrialFigures(rate, error=end.get("error"))
        last, updates = logs[-1], [0, *(log["update"] for log in logs)]
        return TrialFigures(
            rate,
            last["learning_rate"],
            last["update"],
            users=last["update"] * batch,
            seconds=sum(
                (after - before) * batch / log["throughput"]
                for (before, after), log in zip(pairwise(updates), logs, strict=True)
            ),
            maximum=max(log["throughput"] for log in logs),
            loss=last["loss"],
            rmse=last["rmse"],
            error=end.get("error"),
        )
    except (RunError, LookupError, TypeError, ArithmeticError):
        return TrialFigures()


@dataclass(frozen=True)
class TrialOutcome:
    trial: Trial
    slot: int  # trials of one slot ran one after the other; those of different slots at the same time
    exit_status: int  # as the shell counts it, but below zero for the signal that killed it
    seconds: float  # from its start to its end, imports and compiling included
    answer: Mapping[str, Any] | None  # the JSON object on the last line of its standard output
    said: str  # the end of its standard error
    figures: TrialFigures

    @property
    def status(self) -> str:
        if self.exit_status == 0 and self.answer is not None:
            return "finished"
        return "diverged" if (self.figures.error or "").startswith("Diverged") else "failed"

    @property
    def reason(self) -> str | None:
        """Why it did not finish, in one line: exit status and what it said last."""
        if self.status == "finished":
            return None
        ended = f"exit status {self.exit_status}"
        if self.exit_status < 0:
            known = {each.value: each.name for each in signal.Signals}
            ended = f"killed by {known.get(-self.exit_status, f'signal {-self.exit_status}')}"
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return f"{ended}: {lines[-1][:300] if lines else 'it said nothing'}"


Listener = Callable[[TrialOutcome], None]
Engine = Callable[[Sequence[Trial], Listener], tuple[list[TrialOutcome], int]]
"""Runs trials and tells of each as it ends; all outcomes in the order of the trials, and how many ran at a time."""


@contextlib.contextmanager
def watch_trials(trials: Sequence[Trial], bar: Progress) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            bar.update(describe_progress(trials))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_progress(trials: Sequence[Trial]) -> str:
    """`sweep: trial 1 at epoch 3.25, trial 2 compiling 12 s`, of those whose records are here by now."""
    parts = []
    for trial in trials:
        with contextlib.suppress(RunError, LookupError, TypeError):  # none yet, or others wrote in it
            records = list(read_events(trial.folder))
            if records[-1]["event"] == "end":
                continue
            if any(record["event"] == "compile" for record in records):
                parts.append(f"trial {trial.number} at epoch {records[-1]['epoch']:.2f}")
            else:
                parts.append(f"trial {trial.number} compiling {time.time() - records[0]['time']:.0f} s")
    return f"sweep: {', '.join(parts)}" if parts else "sweep"


@dataclass(frozen=True)
class DevicesFound:
    """The devices that processes can be given one by one, and what was said while looking."""

    platform: str
    count: int
    warnings: tuple[str, ...] = ()


def find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    """What `--device` finds here, asked by a child, as who asks an accelerator holds it; else a DeviceError."""
    if not only_accelerator and (device == "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu"):
        return DevicesFound("cpu", 1)
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, ignore) as pool:
        return pool.submit(_find_devices, device, only_accelerator).result()


def _find_devices(device: str, only_accelerator: bool) -> DevicesFound:
    from hotloop.engine.device import setup

    said: list[str] = []
    chosen = setup(device, only_accelerator=only_accelerator, warn=said.append)
    import jax

    # A process takes all TPU chips of a host, and a CPU is one device however it is cut.
    count = len(jax.devices("gpu")) if chosen.platform == "gpu" else 1
    return DevicesFound(chosen.platform, count, tuple(said))


def trial_environments(
    devices: DevicesFound, concurrent: int, given: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each of so many processes at a time: devices by turns, memory shared where they are."""
    if devices.platform != "gpu":
        return [dict(given) for _ in range(concurrent)]
    names = [name.strip() for name in given.get(VISIBLE, "").split(",") if name.strip()]
    names = names or [str(n) for n in range(devices.count)]
    memory = share_memory(math.ceil(concurrent / devices.count)) if MEMORY not in given else {}
    return [{**given, VISIBLE: names[slot % devices.count], **memory} for slot in range(concurrent)]


def share_memory(sharing: int) -> dict[str, str]:
    return {MEMORY: f"{SHARED_MEMORY / sharing:.3f}"} if sharing > 1 else {}


@dataclass(frozen=True)
class LocalEngine:
    concurrent: int | None
    devices: DevicesFound
    say: Callable[[str], None]

    def __call__(self, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        self.say(self.describe(len(trials)))
        concurrent = min(self.concurrent or self.devices.count, len(trials))
        return run_trials(trials, trial_environments(self.devices, concurrent, os.environ), ended), concurrent

    def describe(self, trials: int) -> str:
        count, platform = self.devices.count, self.devices.platform
        concurrent = min(self.concurrent or count, trials)
        return f"{trials} trials on {count} {platform} device{'s' * (count > 1)}, {concurrent} at a time"


def run_trials(
    trials: Sequence[Trial], environments: Sequence[Mapping[str, str]], ended: Listener
) -> list[TrialOutcome]:
    """As many at a time as there are environments."""
    children = ChildProcesses()
    free: SimpleQueue[int] = SimpleQueue()
    for slot in range(len(environments)):
        free.put(slot)

    def run(trial: Trial) -> TrialOutcome:
        slot = free.get()
        try:
            return run_trial(trial, slot, environments[slot], children)
        finally:
            free.put(slot)

    outcomes = []
    kill = partial(children.stop, grace=0)
    with raise_stops(), before_leaving(kill), ThreadPoolExecutor(len(environments)) as pool:
        try:
            for future in as_completed([pool.submit(run, trial) for trial in trials]):
                outcomes.append(future.result())
                ended(outcomes[-1])
        except BaseException:
            children.stop()  # and none of the trials that wait will start
            raise
    return sorted(outcomes, key=lambda outcome: outcome.trial.number)


def run_trial(
    trial: Trial, slot: int, environment: Mapping[str, str], children: "ChildProcesses"
) -> TrialOutcome:
    began = time.monotonic()
    # Into files: a child never waits for us, nor we for a grandchild that holds its streams open.
    with TemporaryFile() as out, TemporaryFile() as err:
        child = children.start(trial.command, environment, out, err)
        status = child.wait(FOREVER)
        children.forget(child)
        seconds = time.monotonic() - began
        answer, said = parse_answer(_read_tail(out)), _read_tail(err)
    return TrialOutcome(trial, slot, status, seconds, answer, said, read_figures(trial.folder))


def _read_tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read().decode(errors="replace")


def parse_answer(text: str) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


class ChildProcesses:
    """Processes that must not outlive this one: in groups of their own, stopped together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._running: set[subprocess.Popen[bytes]] = set()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], out: Any = None, err: Any = None
    ) -> subprocess.Popen[bytes]:
        """A new child that writes to these files; KeyboardInterrupt once they were stopped."""
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            # A group of its own: Ctrl-C is for us, who then stop it and whatever it started.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, process_group=0
            )
            self._running.add(child)
            return child

    def forget(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(child)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ask every child to stop, then kill what is left of their groups; no child starts afterwards."""
        with self._lock:
            self._stopped = True
            running = list(self._running)

        def send(number: signal.Signals) -> None:
            for child in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)

        try:
            send(signal.SIGTERM)
            limit = time.monotonic() + grace
            for child in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, limit - time.monotonic()))
        finally:
            send(signal.SIGKILL)


def run_in_worker(trial: Trial, slot: int, memory: dict[str, str]) -> TrialOutcome:
    """A trial in a worker of the cluster; a cancelled task stops its child."""
    children = ChildProcesses()
    try:
        return run_trial(trial, slot, {**memory, **os.environ}, children)
    finally:
        children.stop()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@dataclass(frozen=True)
class RayEngine:
    """A cluster by its address, or one that is started here for the sweep."""

    address: str | None
    concurrent: int | None
    device: str
    say: Callable[[str], None]

    def __call__(self, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
            os.environ.setdefault(name, "0")
        try:
            ray = import_module("ray")
        except ImportError:
            raise MissingExtra("ray", "ray", "--engine ray") from None
        try:
            host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
            if host and port.isdigit():  # where nobody answers, Ray itself would go on trying for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            here = {} if self.address else {"include_dashboard": False}  # a cluster has its own, or none
            ray.init(self.address or "local", log_to_driver=False, logging_level="ERROR", **here)
        except Exception as error:  # ray raises a different kind for each way an address can be wrong
            raise RunError(
                f"--ray-address {self.address or 'local'}: no cluster there ({_first_line(error)})"
            ) from None
        try:
            with raise_stops():
                return self._run(ray, trials, ended)
        finally:
            ray.shutdown()

    def _run(self, ray: Any, trials: Sequence[Trial], ended: Listener) -> tuple[list[TrialOutcome], int]:
        gpus = 0 if self.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if self.device == "gpu" and not gpus:
            raise DeviceError("--device gpu: the Ray cluster has no GPU; use --device auto")
        devices = gpus or sum(node["Alive"] for node in ray.nodes())
        concurrent = min(self.concurrent or devices, len(trials))
        sharing = math.ceil(concurrent / devices)
        kind = f"GPU{'s' * (gpus > 1)}" if gpus else f"node{'s' * (devices > 1)}"
        self.say(f"{len(trials)} trials on {devices} {kind} of a Ray cluster, {concurrent} at a time")
        memory = share_memory(sharing) if gpus else {}
        task = ray.remote(run_in_worker).options(
            num_gpus=1 / sharing if gpus else 0, num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        waiting, outcomes = list(trials), []
        free = list(range(concurrent))
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and free:
                    slot = free.pop(0)
                    running[task.remote(waiting.pop(0), slot, memory)] = slot
                (done,), _ = ray.wait(list(running), num_returns=1)
                free.append(running.pop(done))
                outcomes.append(ray.get(done))
                ended(outcomes[-1])
        except ray.exceptions.RayError as error:
            raise RunError(f"--engine ray: a worker of the cluster was lost ({_first_line(error)})") from None
        finally:
            for each in running:  # none, unless it was stopped
                ray.cancel(each)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=GRACE_SECONDS + 2)
        return sorted(outcomes, key=lambda outcome: outcome.trial.number), concurrent
