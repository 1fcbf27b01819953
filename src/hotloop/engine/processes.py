"""Several processes that do one command together, each with devices of its own: the only file that knows of them.

All of them run the same code in the same order. Process 0 writes: records, checkpoints, the console; what goes by the
clock, by chance or by a signal is its word, which the others ask for (`agreed`). Nothing here is a collective but
the greeting, `fetch`, `place` of what is spread already, and the call of a `JitTogether`, and those wait for who still
compiles: a process that takes minutes keeps the others waiting, and loses none. With one process every function returns
at once, and nothing is imported for it.

`HOTLOOP_PROCESSES`, `HOTLOOP_PROCESS`, `HOTLOOP_COORDINATOR` (host:port), `HOTLOOP_HEARTBEAT` (s) say who is there, as
`hotloop launch` sets them; else Slurm, Open MPI or Kubernetes do. Under `HOTLOOP_NOTES` process i keeps `<i>.json`.
"""

import atexit
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hotloop.engine import interrupt, process_log, rendezvous
from hotloop.engine.interrupt import print_to_stderr
from hotloop.engine.process_group import FAILED, STOP, WORDS, LostPeer, PeerFailed, ProcessGroup
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, Sharding

Thing = TypeVar("Thing")
Phase = Literal["starting", "loading", "compiling", "training", "saving", "done"]
NOTE_SECONDS = 0.3
GATHERED = 2**26  # bytes of an array that are brought together on a device at a time
_group: ProcessGroup | None = None
_sharing = ExitStack()
"""Of stops, while there is a group."""


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
    group = ProcessGroup(state.client, state.num_processes, state.process_id, waiting=note)
    if group.count == 1:  # a job of one task after all
        return
    _group = group
    rendezvous.follow_first(gathered)
    atexit.register(end)
    sys.excepthook = _fail_for_all(sys.excepthook)
    threading.Thread(target=group.watch, name="hotloop-processes", daemon=True).start()
    interrupt.on_stop.append(request_stop)
    _sharing.enter_context(interrupt.share_stops())
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
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = jax.devices(platform)
    mesh = Mesh(np.array(devices, dtype=object), ("device",), axis_types=(AxisType.Auto,))
    ones = place(np.ones(len(devices), np.float32), NamedSharding(mesh, PartitionSpec("device")))  # type: ignore[no-untyped-call]
    barrier("devices")
    total = float(JitTogether(lambda x: x.sum())(ones))
    if total != len(devices):
        raise HotloopError(
            f"a sum of ones over {len(devices)} devices is {total}: their network is not sound"
        )


def explain_loss(error: BaseException) -> HotloopError | None:
    """The line for an error that only means that another process is gone; None for any other, and for one process."""
    return None if _group is None else _group.explain_loss(error)


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


class JitTogether:
    """`jax.jit` of what several processes compute together: a program is called once all of them have compiled it.

    Those that compile faster would wait in a collective for the others, which gloo gives up after 30 seconds. `static`
    are the places of arguments that are no arrays. Where no argument spans processes it is `jitted`, and no more.
    """

    def __init__(self, function: Callable[..., Any], static: tuple[int, ...] = (), **options: Any):
        import jax

        self.jitted = jax.jit(function, static_argnums=static, **options)
        self._static = static
        self._programs: dict[Any, Any] = {}
        """By the form of all arguments."""

    def __call__(self, *arguments: Any) -> Any:
        arrays = [each for number, each in enumerate(arguments) if number not in self._static]
        if not spans_processes(arrays):
            return self.jitted(*arguments)
        import jax

        leaves, structure = jax.tree.flatten(arrays)
        forms = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        key = tuple(arguments[number] for number in self._static), structure, forms
        if key not in self._programs:
            phase = _noted["phase"]
            note("compiling")
            self._programs[key] = self.jitted.lower(*arguments).compile()
            barrier("compiled")
            note(phase)
        return self._programs[key](*arrays)


@cache
def _move_to(sharding: "Sharding") -> JitTogether:
    return JitTogether(lambda leaf: leaf, out_shardings=sharding)


def place(tree: Any, sharding: "Sharding | None") -> Any:
    """Host data that every process has, as arrays on the devices of `sharding`; each sends only what is its own."""
    import jax

    if _group is None or sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    target = sharding

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf if leaf.sharding == target else _move_to(target)(leaf)
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


def first_stage_rows(sharding: "NamedSharding | None", length: int) -> Any:
    """Of this process's own rows, whether it has the device of the first stage that works on each: a bool for each."""
    import numpy as np

    if _group is None or sharding is None or sharding.is_fully_addressable:
        return np.ones(length, bool)
    return first_stage_rows_on(sharding, length, sharding.addressable_devices)


def first_stage_rows_on(sharding: "NamedSharding", length: int, devices: "Collection[jax.Device]") -> Any:
    """The same for some neighbouring devices. Those of a mesh's second axis are the stages of one replica, which has
    the same rows on all of them."""
    import numpy as np

    mesh = sharding.mesh.devices
    firsts = mesh.reshape(len(mesh), -1)[:, 0].tolist()
    held = np.zeros(length, bool)
    for device in firsts:
        if device in devices:
            held[rows_on(sharding, length, [device])] = True
    return held[rows_on(sharding, length, devices)]


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

    def bring(leaf: Any) -> Any:
        spread = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
        if spread:
            return gather(leaf)
        # A copy: on CPU np.asarray would be a view, which makes the donation of the buffer fail in silence.
        return np.array(leaf, order="C")

    return jax.tree.map(bring, tree)


def gather(array: "jax.Array") -> Any:
    """An array whose rows are spread over devices, as a host array; a collective.

    It comes in pieces of columns: beside its own rows a device holds `GATHERED` bytes of it, or as much again as its
    own, so that what fits on no device can be brought together.
    """
    import numpy as np

    if not array.size:
        return np.empty(array.shape, array.dtype)
    place: Any = array.sharding
    rows, width = array.shape[0], array.size // array.shape[0]
    shares = rows // place.shard_shape(array.shape)[0]
    columns = max(-(-width // shares), min(width, GATHERED // (rows * array.dtype.itemsize)))
    take = _take_columns(place.mesh, place.spec[:1], columns)
    host = np.empty((rows, width), array.dtype)
    for start in range(0, width, columns):
        first = min(start, width - columns)
        host[:, first : first + columns] = np.asarray(take(array, np.int32(first)))
    return host.reshape(array.shape)


@cache
def _take_columns(mesh: "Mesh", rows: tuple[Any, ...], columns: int) -> JitTogether:
    """So many neighbouring columns of an array whose rows are spread over `mesh`, on every device."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    own = NamedSharding(mesh, PartitionSpec(*rows))  # type: ignore[no-untyped-call]

    def take(x: Any, first: Any) -> Any:
        piece = jax.lax.dynamic_slice_in_dim(x.reshape(x.shape[0], -1), first, columns, axis=1)
        return jax.lax.with_sharding_constraint(piece, own)  # type: ignore[no-untyped-call]

    return JitTogether(take, out_shardings=everywhere)


@contextmanager
def close_on_failure(close: Callable[[PeerFailed], object]) -> Iterator[None]:
    """While the block runs: what must be closed where another process has failed, be it that the block ends of it or
    that this process has to end in a collective that the other one does not come to any more."""
    closing = [] if _group is None else _group.closing
    closing.append(close)
    try:
        yield
    except PeerFailed as failure:
        close(failure)
        raise
    finally:
        closing.remove(close)


def request_stop(number: int) -> None:
    """Let all processes hear a signal that this one has got."""
    if _group is not None:
        _group.write(STOP, str(number))


def agree_to_stop() -> None:
    """All processes have been told to stop after the same update: none need be told, and process 0 is waited for."""
    if _group is not None:
        _group.stopping = True


def stop_requested() -> int | None:
    """The signal that any process has got; None as long as there is none."""
    if _group is None:
        return None
    with suppress(RuntimeError):
        words = dict(_group.client.key_value_dir_get(WORDS))
        return int(words[STOP]) if STOP in words else None
    return None


def use_folder(folder: Path) -> None:
    """The run's folder is known: other processes' lines go there from now on."""
    process_log.move_to(folder, index())


_noted: dict[str, Any] = {"phase": None, "update": 0, "run": None, "resume": [], "time": 0.0}


def note(
    phase: Phase | None = None,
    update: int | None = None,
    run: Path | None = None,
    resume: Sequence[str] | None = None,
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
            status = getattr(error, "status", getattr(error, "exit_status", 1))
            print_to_stderr(f"hotloop: error: {error}")
    if status == LostPeer.exit_status and group.failure is None:
        os._exit(status)  # those who are left find out as this one did
    if status:
        if group.failure is not None:
            status = group.failure.status
        elif not group.stopping:
            group.write(FAILED, json.dumps({"process": group.index, "text": text, "status": status}))
        group.leave(status)
    note("done")
    group.ended.set()
    _sharing.close()
    _group = None


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _fail_for_all(before: Hook) -> Hook:
    """An error that nobody handles ends a program; here it ends those of the other processes, too."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end(getattr(error, "exit_status", 1), f"{kind.__name__}: {error}")

    return hook
