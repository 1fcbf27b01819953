"""Several processes that do one command together, each with devices of its own: the only file that knows of them.

All of them run the same code in the same order. Process 0 writes: records, checkpoints, the console; what goes by the
clock, by chance or by a signal is its word, which the others ask for (`agreed`). Nothing here is a collective but
`fetch` and the greeting: a process that compiles for minutes keeps the others waiting, and loses none. With one process
every function returns at once, and nothing is imported for it.

`HOTLOOP_PROCESSES`, `HOTLOOP_PROCESS`, `HOTLOOP_COORDINATOR` (host:port), `HOTLOOP_HEARTBEAT` (s) say who is there, as
`hotloop launch` sets them; else Slurm, Open MPI or Kubernetes do. Under `HOTLOOP_NOTES` process i keeps `<i>.json`.
"""

import atexit
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hotloop.engine import interrupt, process_log, rendezvous
from hotloop.engine.interrupt import print_to_stderr
from hotloop.errors import HotloopError
from hotloop.options.files import parse_json

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding, Sharding

Thing = TypeVar("Thing")
Phase = Literal["starting", "loading", "compiling", "training", "saving", "done"]
SLICE = 1.0
"""Seconds that a wait lasts before it looks whether a process has failed, or a signal came."""
LOOK_SECONDS = 0.5
"""Seconds between looks for a stop or a failure elsewhere."""
PATIENCE = 3.0
"""Seconds in which a process that hears of a failure elsewhere should have ended by itself."""
KEPT = 1000
"""Words of process 0 that stay readable for those who are behind; collectives keep them far closer than that."""
NOTE_SECONDS = 0.3
_STOP, _FAILED = "hotloop/word/stop", "hotloop/word/failed"
_LEAVING, _LEFT = "hotloop/leaving", "hotloop/left"


class PeerFailed(HotloopError):
    """Another process of the same command has failed; the message is its own."""

    def __init__(self, process: int, text: str, status: int):
        super().__init__(f"process {process}: {text}")
        self.status = status


@dataclass(eq=False)
class _Group:
    """The connected processes: a store of texts that all of them read and write, kept by process 0."""

    client: Any
    count: int
    index: int
    spoken: int = 0
    """How often process 0 has spoken; all count alike, since all run the same code."""
    failure: PeerFailed | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def read(self, key: str) -> str:
        """The text under a key, as soon as it is there."""
        while True:
            if self.failure is not None:
                raise self.failure
            try:
                return str(self.client.blocking_key_value_get(key, int(1000 * SLICE)))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HotloopError(
                        f"process {self.index} has lost the others: process 0 is gone"
                    ) from None

    def write(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # process 0 is gone, or somebody was quicker to say the same
            self.client.key_value_set(key, text)

    def agreed(self, value: Any) -> Any:
        self.spoken += 1
        key = f"hotloop/said/{self.spoken}"
        if self.index:
            return parse_json(self.read(key))
        text = json.dumps(value)
        if self.failure is not None:
            raise self.failure
        self.write(key, text)
        if self.spoken > KEPT:
            with suppress(RuntimeError):
                self.client.key_value_delete(f"hotloop/said/{self.spoken - KEPT}")
        return parse_json(text)

    def gathered(self, value: Any) -> list[Any]:
        place = f"hotloop/heard/{self.spoken + 1}"
        if self.index:
            self.write(f"{place}/{self.index}", json.dumps(value))
            return list(self.agreed(None))
        others = [parse_json(self.read(f"{place}/{number}")) for number in range(1, self.count)]
        with suppress(RuntimeError):
            self.client.key_value_delete(f"{place}/")
        return list(self.agreed([value, *others]))

    def watch(self) -> None:
        """On a thread: a stop that another process was asked for is this one's, too; so is a failure."""
        pause = max(LOOK_SECONDS, self.count / 200)  # process 0 answers some hundred looks a second
        while not self.ended.wait(pause):
            try:
                words = dict(self.client.key_value_dir_get("hotloop/word/"))
            except RuntimeError:
                continue
            if _STOP in words:
                interrupt.pass_on(int(words[_STOP]))
            if _FAILED in words and self.failure is None:
                said = parse_json(words[_FAILED])
                if said["process"] == self.index:
                    return
                self.failure = PeerFailed(**said)
                if not self.ended.wait(PATIENCE):
                    # The main thread is in a collective that never ends.
                    for close in (*_closing,):
                        close(str(self.failure))
                    print_to_stderr(f"hotloop: error: {self.failure}")
                    self.leave(self.failure.status)

    def leave(self, status: int) -> None:
        """End this process, without jax's own way out, which waits for those that never come.

        Process 0 goes last, since the others cannot be without it. Who has stopped waits for it, however long it saves:
        jax would take a process that is gone for a lost one, and abort the rest.
        """
        self.ended.set()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if self.index == 0:
            self.write(f"{_LEAVING}/0", "")
        until = time.monotonic() + (2 * PATIENCE if self.index == 0 or status < 128 else math.inf)
        with suppress(RuntimeError):
            while time.monotonic() < until:
                if self.index and self.client.key_value_dir_get(f"{_LEAVING}/"):
                    self.write(f"{_LEFT}/{self.index}", "")
                    break
                if not self.index and len(self.client.key_value_dir_get(f"{_LEFT}/")) == self.count - 1:
                    break
                time.sleep(0.05)
        os._exit(status)


_group: _Group | None = None
_closing: list[Callable[[str], object]] = []


@contextmanager
def close_on_failure(close: Callable[[str], object]) -> Iterator[None]:
    """While the block runs: what must be closed, with the reason, where this process has to end in a collective that
    another one does not come to any more."""
    _closing.append(close)
    try:
        yield
    finally:
        _closing.remove(close)


def start() -> None:
    """Meet the other processes, before any device is opened; nothing happens where this is the only one.

    From here on the lines of all processes but 0 go to a file each. Other versions or options in one of them are
    refused.
    """
    global _group
    if _group is not None:
        return
    place = rendezvous.find_place()
    if place is None:
        return
    note("starting")
    state = rendezvous.meet(place)
    group = _Group(state.client, state.num_processes, state.process_id)
    if group.count == 1:  # a job of one task after all
        return
    _group = group
    atexit.register(end)
    sys.excepthook = _fail_for_all(sys.excepthook)
    threading.Thread(target=group.watch, name="hotloop-processes", daemon=True).start()
    interrupt.on_stop.append(request_stop)
    if is_writer():
        process_log.keep_for_python()
    else:
        process_log.divert(group.index)
    rendezvous.check_same_program(gathered(rendezvous.describe_program()))
    note("loading")


def greet(platform: str) -> None:
    """A first tiny sum over all devices, so that processes whose network does not connect them say so at once."""
    if _group is None:
        return
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.devices(platform)
    mesh = jax.make_mesh((len(devices),), ("device",), devices=devices)
    ones = place(np.ones(len(devices), np.float32), NamedSharding(mesh, PartitionSpec("device")))  # type: ignore[no-untyped-call]
    barrier("devices")
    total = float(jax.jit(lambda x: x.sum())(ones))
    if total != len(devices):
        raise HotloopError(
            f"a sum of ones over {len(devices)} devices is {total}: their network is not sound"
        )


def count() -> int:
    """How many processes there are."""
    return 1 if _group is None else _group.count


def index() -> int:
    """Which of them this is, from 0."""
    return 0 if _group is None else _group.index


def is_writer() -> bool:
    """Whether this is the process that writes files and lines: process 0."""
    return index() == 0


def agreed(value: Any) -> Any:
    """Process 0's value of anything that JSON holds, of any size; what the others have counts for nothing."""
    return value if _group is None else _group.agreed(value)


def gathered(value: Any) -> list[Any]:
    """Every process's value, in their order, in every process."""
    return [value] if _group is None else _group.gathered(value)


def barrier(name: str) -> None:
    """Return when every process has come here; it is no collective, so that it waits for any time."""
    if _group is not None and (came := set(_group.gathered(name))) != {name}:
        raise HotloopError(
            f"the processes do not do the same: one is at {', another at '.join(sorted(came))}"
        )


def spans_processes(tree: Any) -> bool:
    """Whether an array (or the form of one, or a sharding) of the tree lies partly on another process's devices."""
    if _group is None:
        return False
    import jax

    places = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree)]
    return any(not getattr(place, "is_fully_addressable", True) for place in places)


def place(tree: Any, sharding: "Sharding | None") -> Any:
    """Host data that every process has, as arrays on the devices of `sharding`; each sends only what is its own."""
    import jax

    if _group is None or sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    target = sharding

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf if leaf.sharding == target else jax.jit(lambda x: x, out_shardings=target)(leaf)
        data = leaf if isinstance(leaf, jax.Array) and _is_key(leaf) else _host_array(leaf)
        return jax.make_array_from_callback(data.shape, target, lambda where: data[where])

    return jax.tree.map(put, tree)


def _is_key(leaf: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _host_array(leaf: Any) -> Any:
    import jax
    import numpy as np

    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def own_rows(sharding: "NamedSharding | None", length: int) -> slice:
    """Those of `length` rows, split by `sharding`, that lie on this process's devices: all where it spans no others."""
    if _group is None or sharding is None or sharding.is_fully_addressable:
        return slice(None)
    return rows_on(sharding, length, sharding.addressable_devices)


def rows_on(sharding: "NamedSharding", length: int, devices: "Collection[jax.Device]") -> slice:
    """Those of `length` rows, split by `sharding`, that lie on some neighbouring devices."""
    found = sharding.devices_indices_map((length,)).items()
    spans = [where[0].indices(length) for device, where in found if device in devices and where]
    return slice(min(span[0] for span in spans), max(span[1] for span in spans))


def place_rows(tree: Any, sharding: "NamedSharding | None", length: int, axis: int = 0) -> Any:
    """Host data of which each process has its own rows along `axis`, as arrays with all `length` of them."""
    if _group is None or sharding is None or sharding.is_fully_addressable:
        return place(tree, sharding)
    import jax

    def put(leaf: Any) -> Any:
        shape = (*leaf.shape[:axis], length, *leaf.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, _host_array(leaf), shape)  # type: ignore[no-untyped-call]

    return jax.tree.map(put, tree)


def on_this_host() -> list[int]:
    """The processes that run on this one's machine; all must ask."""
    if _group is None:
        return [0]
    hosts = gathered(platform.node())
    return [number for number, host in enumerate(hosts) if host == hosts[index()]]


def once_a_host(
    work: Callable[[], Thing],
    tell: Callable[[Thing], Any] = lambda thing: None,
    take: Callable[[Any], Thing | None] = lambda word: None,
) -> Thing:
    """What `work` gives: first in one process of each machine, then, when all of those are done, in the others, which
    find what it has fetched or written.

    `tell` makes a word of what the first has (anything that JSON holds), and `take` what the others have of that; where
    it is None they work themselves.
    """
    if _group is None:
        return work()
    first = on_this_host()[0]
    thing = work() if index() == first else None
    word = gathered(None if thing is None else tell(thing))[first]
    if thing is None:
        thing = take(word)
    return work() if thing is None else thing


def fetch(tree: Any) -> Any:
    """Arrays that lie anywhere as host arrays of our own; a collective where they are spread, so all must call it."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def bring(leaf: Any) -> Any:
        spread = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        if spread:
            everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            gather = jax.jit(lambda x: x, out_shardings=everywhere).lower(leaf).compile()
            barrier("gather")
            leaf = gather(leaf)
        # A copy: on CPU np.asarray would be a view, which makes the donation of the buffer fail in silence.
        return np.array(leaf, order="C")

    return jax.tree.map(bring, tree)


def request_stop(number: int) -> None:
    """Let all processes hear a signal that this one has got."""
    if _group is not None:
        _group.write(_STOP, str(number))


def stop_requested() -> int | None:
    """The signal that any process has got; None as long as there is none."""
    if _group is None:
        return None
    with suppress(RuntimeError):
        words = dict(_group.client.key_value_dir_get("hotloop/word/"))
        return int(words[_STOP]) if _STOP in words else None
    return None


def use_folder(folder: Path) -> None:
    """The run's folder is known: other processes' lines go there from now on."""
    process_log.move_to(folder, index())


_noted: dict[str, Any] = {"phase": None, "update": 0, "run": None, "resume": [], "time": 0.0}


def note(
    phase: Phase, update: int | None = None, run: Path | None = None, resume: Sequence[str] | None = None
) -> None:
    """Say how far this process is, for the launcher's watch; what is not given stays as it was last said.

    `resume` are the words that make the command go on with this run. At most a few notes a second are written.
    """
    folder = os.environ.get("HOTLOOP_NOTES")
    if not folder:
        return
    new = {
        "phase": phase,
        "update": update,
        "run": run and str(run.absolute()),
        "resume": resume and [*resume],
    }
    changed = {name: value for name, value in new.items() if value is not None and value != _noted[name]}
    now = time.time()
    if not (changed.keys() - {"update"}) and now - _noted["time"] < NOTE_SECONDS:
        return
    _noted.update(changed, time=now)
    file = Path(folder) / f"{os.environ.get('HOTLOOP_PROCESS') or index()}.json"
    with suppress(OSError):  # the launcher may have gone, and its folder with it
        part = file.with_suffix(".part")
        part.write_text(json.dumps(_noted))
        part.replace(file)


def end(status: int = 0, text: str = "") -> None:
    """This process's command is over. One that succeeded waits for the others; one that failed ends them."""
    global _group
    group = _group
    if group is None or group.ended.is_set():
        return
    if status == 0:
        try:
            barrier("end")
        except HotloopError as error:
            status = getattr(error, "status", 1)
            print_to_stderr(f"hotloop: error: {error}")
    if status:
        if group.failure is None and status < 128:  # a stop has been passed on already
            group.write(_FAILED, json.dumps({"process": group.index, "text": text, "status": status}))
        group.leave(status)
    note("done")
    group.ended.set()
    _group = None


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _fail_for_all(before: Hook) -> Hook:
    """An error that nobody handles ends a program; here it ends those of the other processes, too."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end(getattr(error, "exit_status", 1), f"{kind.__name__}: {error}")

    return hook
