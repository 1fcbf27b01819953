"""How the processes of a run find each other: by the launcher's environment, or by that of Slurm, Open MPI, Kubernetes.

`find_place` says which of how many this process is, from the environment alone; `meet` lets jax connect them. Whoever
does not come, a port that is taken and an address that nobody answers at end in one line after `MEETING_SECONDS`.
"""

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hotloop.engine.interrupt import print_to_stderr
from hotloop.errors import DeviceError, OptionError
from hotloop.options.files import parse_json

HEARTBEAT_SECONDS = 100
MEETING_SECONDS = 120
"""Seconds until all processes must have come; a heartbeat that is longer, or `HOTLOOP_MEETING`, says otherwise."""
SHUTDOWN_SECONDS = 60
PORTS = 61440, 4096
"""The first port for processes that a cluster's scheduler starts, and how many there are: as jax has them."""


@dataclass(frozen=True)
class Place:
    """This process among those of the run. What is None jax finds out by itself, by its own `method`."""

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None
    """The GPUs of this machine that are this process's; None: all that it sees."""
    method: str = "deactivate"
    environment: tuple[tuple[str, str], ...] = ()
    """What jax's own detection must find in the environment."""


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands among several; None where it is the only one."""
    if "HOTLOOP_PROCESSES" in environment:
        return _from_launcher(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 0)) > 1 and "SLURM_STEP_NODELIST" in environment:
        # jax's own port is the job's alone, so that two launches in one job would meet each other.
        job, step = (
            int(re.sub(r"\D", "", environment.get(name, "")) or 0)
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        port = PORTS[0] + (31 * job + step) % PORTS[1]
        count, index = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_PROCID", 0))
        return Place(None, count, index, method="slurm", environment=(("JAX_COORDINATOR_PORT", str(port)),))
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        if "OMPI_MCA_orte_hnp_uri" in environment:
            return Place(method="ompi")
        return _from_open_mpi_5(environment)
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= {*environment}:
        if find_spec("kubernetes") is None:  # each pod would train alone, and all write the same
            raise DeviceError(
                "JOB_COMPLETION_INDEX: this is a pod of an indexed Job, whose pods find each other with "
                "pip install 'jax[k8s]'; to work alone in it set HOTLOOP_PROCESSES=1"
            )
        return Place(method="k8s")
    return None


def _from_launcher(environment: Mapping[str, str]) -> Place | None:
    numbers = {}
    for name in ("HOTLOOP_PROCESSES", "HOTLOOP_PROCESS"):
        text = environment.get(name, "0")
        if not re.fullmatch(r"\d{1,7}", text):
            raise OptionError(f"{name} {text}: must be a whole number")
        numbers[name] = int(text)
    count, index = numbers.values()
    if count <= 1:
        return None
    coordinator = environment.get("HOTLOOP_COORDINATOR", "")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise OptionError(f"HOTLOOP_COORDINATOR {coordinator}: must be host:port of process 0")
    if index >= count:
        raise OptionError(f"HOTLOOP_PROCESS {index}: the processes are 0 to {count - 1}")
    return Place(coordinator, count, index)


def _from_open_mpi_5(environment: Mapping[str, str]) -> Place:
    """Open MPI from version 5 on, which jax before 0.12 does not detect."""
    rank, size, local = (
        int(environment.get(f"OMPI_COMM_WORLD_{name}", 0)) for name in ("RANK", "SIZE", "LOCAL_RANK")
    )
    # `prterun-HOST-PID@1`: the host of mpirun, where rank 0 is unless a host file says otherwise.
    found = re.fullmatch(r"prterun-(.+)-(\d+)@\d+", environment.get("PMIX_NAMESPACE", ""))
    if given := environment.get("HOTLOOP_COORDINATOR"):
        coordinator = given
    elif int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0)) == size:
        port = int(found[2]) if found else int(environment.get("PMIX_VERSION", "0").replace(".", "") or 0)
        coordinator = f"localhost:{PORTS[0] + port % PORTS[1]}"
    elif found:
        coordinator = f"{found[1]}:{PORTS[0] + int(found[2]) % PORTS[1]}"
    else:
        raise OptionError("HOTLOOP_COORDINATOR: Open MPI does not say where rank 0 is; set it to host:port")
    return Place(coordinator, size, rank, (local,))


def meet(place: Place) -> Any:
    """Connect with the others; the client of jax's coordination service. DeviceError where that cannot be."""
    import jax
    from jax._src import distributed

    # What gRPC would log of a port or a peer is said below, in one line.
    for name, value in (*place.environment, ("GRPC_VERBOSITY", "NONE")):
        os.environ.setdefault(name, value)
    # A run listens for SIGTERM itself; jax's listener would take the signal away.
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    heartbeat, seconds = find_times()
    here = f"process {place.index} of {place.count}" if place.count else f"this {place.method} process"
    where = f" at {place.coordinator}" if place.coordinator else ""

    def give_up() -> None:
        # jax would abort the process, with a page of C++ and status 134.
        missing = "not all of the others came" if place.index == 0 else f"process 0{where} did not answer"
        print_to_stderr(f"hotloop: error: {here}: {missing} within {seconds} s; see what became of them")
        os._exit(2)

    if place.index == 0 and place.coordinator:
        _check_port(place.coordinator, here)
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            place.devices,
            cluster_detection_method=place.method,
            initialization_timeout=10 * seconds,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=_seconds("HOTLOOP_SHUTDOWN", SHUTDOWN_SECONDS),
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DeviceError(f"{here} cannot begin: {reason}") from None
    finally:
        timer.cancel()
    return distributed.global_state


def _check_port(coordinator: str, here: str) -> None:
    """DeviceError where process 0's port is taken: jax 0.11 ends by a segmentation fault there."""
    try:
        probe_port(int(coordinator.rpartition(":")[2]))
    except (OSError, OverflowError):
        reason = f"its port at {coordinator} is in use; choose another one"
        raise DeviceError(f"{here} cannot begin: {reason}") from None


def probe_port(port: int) -> None:
    """OSError where a process of this machine cannot listen at a port; one that is just being given up is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def find_times() -> tuple[int, int]:
    """Seconds without a sign after which a process counts as lost, and until all must have come. Who gives them longer
    for a sign has slow machines, and they are slow to come as well."""
    heartbeat = _seconds("HOTLOOP_HEARTBEAT", HEARTBEAT_SECONDS)
    return heartbeat, _seconds("HOTLOOP_MEETING", max(MEETING_SECONDS, heartbeat))


def _seconds(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text) or float(text) < 1:
        raise OptionError(f"{name} {text}: must be seconds, at least 1")
    return int(float(text))


def describe_program() -> dict[str, str]:
    """What must be the same in every process: versions, and the words of the command."""
    from importlib.metadata import version
    from platform import python_version

    from hotloop.version import VERSION

    packages = {name: version(name) for name in ("jax", "jaxlib")}
    words = sys.argv[1 : len(sys.argv) - len(_words_to_resume())]
    return {"hotloop": VERSION, "python": python_version(), **packages, "options": " ".join(words)}


def _words_to_resume() -> list[str]:
    """The last words of the command that this machine's launcher has added, since it starts it again."""
    added = [str(word) for word in parse_json(os.environ.get("HOTLOOP_RESUME") or "[]")]
    return added if added and sys.argv[-len(added) :] == added else []


def follow_first(gathered: Callable[[Any], list[Any]]) -> None:
    """All go on with the run that process 0 goes on with, or with none as it does: those whose launchers, on other
    machines, thought otherwise. Where there are such, this does not return, but starts this program once more."""
    found = gathered(_words_to_resume())
    if all(words == found[0] for words in found):
        return
    from jax._src import distributed

    own = sys.orig_argv[1 : len(sys.orig_argv) - len(_words_to_resume())]
    distributed.shutdown()  # type: ignore[no-untyped-call]  # which waits for all
    os.environ["HOTLOOP_RESUME"] = json.dumps(found[0])
    os.execv(sys.executable, [sys.executable, *own, *found[0]])


def check_same_program(found: list[dict[str, str]]) -> None:
    """DeviceError where a process has other versions, OptionError where it has other options than process 0."""
    for number, other in enumerate(found):
        for name, value in found[0].items():
            if other.get(name) == value:
                continue
            if name != "options":
                raise DeviceError(
                    f"process {number} has {name} {other.get(name)}, process 0 has {value}: install the same"
                )
            raise OptionError(
                f"process {number} has other options than process 0: {_differing(value, other[name])}"
            )


def _differing(ours: str, theirs: str) -> str:
    """`--epochs 3 in place of --epochs 2`: the words that differ, with the one before them."""
    old, new = ours.split(), theirs.split()
    start = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    while old and new and len(old) > start and len(new) > start and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    start = max(0, start - (start > 0 and old[start - 1].startswith("--")))
    return f"{' '.join(new[start:]) or 'nothing'} in place of {' '.join(old[start:]) or 'nothing'}"
