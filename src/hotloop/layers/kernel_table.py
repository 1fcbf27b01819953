"""Which of two paths is the faster one on this machine, shape by shape: measured when first asked for, and kept.

A table is a JSON file in the cache folder, one for each kind of machine: processor, cores, XLA's flags and the versions
that the times depend on. Processes take turns with it, so that two which start together measure once and choose alike,
and a run that is resumed takes the paths that it took. It knows no operation and no package.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax import lax

from hotloop.compiler_options import choose_options
from hotloop.machine import cache_folder, cpu_model, usable_cores
from hotloop.options.files import load_json, whole_file
from hotloop.version import VERSION

Function = Callable[..., Any]
Call = Callable[[int], float]
"""So many turns of a loop -> milliseconds a turn."""
MARGIN = 1.1
"""So many times faster a native kernel must be to be taken, where nothing else speaks for it."""
FORMAT = 3
"""Of tables. Those of format 1 had the smallest of five calls of each path, which a busy moment made wrong; those of
format 2 another margin for recurrences."""
CALL_SECONDS = 0.01
"""How long one timed call of a loop lasts, where a single turn does not take longer."""
MOST_TURNS = 200
LEAST_PAIRS = 5
SECONDS, SECONDS_IN_DOUBT, MOST_SECONDS = 0.5, 1.0, 2.0
"""How long two paths are compared by the fastest call of each, and at most by the clock; the least pairs always."""
NEAR = 1.05
"""A median ratio nearer than this to the margin leaves a doubt."""
LONG = 3.0
"""Seconds of measuring in one process after which a line tells of it, and again after each four times as long."""
LOCK_SECONDS = 60.0
"""How long another process is waited for that has the table."""
log = logging.getLogger("hotloop.native")


@dataclass(frozen=True)
class Times:
    """Milliseconds of one operation by its two paths."""

    plain_ms: float
    native_ms: float
    margin: float = MARGIN
    """The least ratio at which the native path is taken."""

    @property
    def ratio(self) -> float:
        return self.plain_ms / self.native_ms

    @property
    def is_native_faster(self) -> bool:
        return self.native_ms * self.margin <= self.plain_ms


@dataclass
class Contents:
    machine: Mapping[str, Any]
    fault: str | None = None
    """What is wrong with the package on this machine, '' for nothing; None: not tried out yet."""
    kernels: dict[str, Times] = field(default_factory=dict)


class Table:
    """The table of one kind of machine, in memory and, unless `path` is None, in a file."""

    def __init__(self, path: Path | None, machine: Mapping[str, Any]):
        self.path, self._measuring_seconds, self._told = path, 0.0, LONG
        self._contents = Contents(machine)
        self._contents = self._read() or self._contents

    @property
    def kernels(self) -> Mapping[str, Times]:
        return self._contents.kernels

    @property
    def fault(self) -> str | None:
        return self._contents.fault

    def find_times(self, key: str, measure: Callable[[], Times]) -> Times:
        """What the table says, or else what is measured now."""
        if key not in self.kernels:
            with self._locked():
                if key not in self.kernels:
                    began = time.perf_counter()
                    self._contents.kernels[key] = measure()
                    self._write()
                    self._tell(time.perf_counter() - began)
        return self.kernels[key]

    def find_fault(self, find: Callable[[], tuple[str, bool]]) -> str:
        """What is wrong with the package, '' for nothing: known from before, or found now; what is not for good is
        found again by the next process."""
        if self.fault is not None:
            return self.fault
        with self._locked():
            if self.fault is None:
                fault, for_good = find()
                self._contents.fault = fault
                if for_good:
                    self._write()
            return self.fault or ""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """With the file to itself, and what others have written in it by now."""
        lock = self._take_lock()
        try:
            if found := self._read():
                found.kernels = {**self._contents.kernels, **found.kernels}
                found.fault = self.fault if found.fault is None else found.fault
                self._contents = found
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def _take_lock(self) -> int | None:
        """Its descriptor; None where there is no file, nothing may be written, or another process does not let go."""
        if self.path is None:
            return None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return None
        until = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            time.sleep(0.05)
        os.close(lock)
        return None

    def _read(self) -> Contents | None:
        """The file's contents; None where there is none, or it is damaged, which a line tells."""
        if self.path is None:
            return None
        try:
            found = load_json(self.path)
            kernels = {str(key): Times(**times) for key, times in found["kernels"].items()}
            if not all(
                isinstance(ms, int | float) for each in kernels.values() for ms in asdict(each).values()
            ):
                raise TypeError("times that are no numbers")
            if not isinstance(found["fault"], str | None):
                raise TypeError("a fault that is no text")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.warning("%s: damaged, so the kernels of this machine are measured anew", self.path)
            with suppress(OSError):
                self.path.unlink()
            return None
        return Contents(self._contents.machine, found["fault"], kernels)

    def _write(self) -> None:
        if self.path is None:
            return
        with suppress(OSError), whole_file(self.path) as part:  # measured again by the next process
            part.write_text(json.dumps(asdict(self._contents), indent=1))

    def _tell(self, seconds: float) -> None:
        self._measuring_seconds += seconds
        if self._measuring_seconds >= self._told:
            self._told = 4 * self._measuring_seconds
            log.warning(
                "choosing the faster kernels for this machine: %d measured, %.0f s so far; kept in %s",
                len(self.kernels),
                self._measuring_seconds,
                self.path or "this process alone (HOTLOOP_CACHE=off)",
            )


def describe_machine(package: str) -> dict[str, Any]:
    """What times depend on, but for the shapes; `package` is the version of the native kernels."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "hotloop": VERSION,  # whose plain paths may have become faster
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "native": package,
        "format": FORMAT,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def table_for(package: str) -> Table:
    """The table of this machine with this version of the native kernels."""
    root, machine = cache_folder(), describe_machine(package)
    mark = blake2b(json.dumps(machine).encode(), digest_size=6).hexdigest()
    return _open(None if root is None else root / "kernels" / f"{mark}.json", tuple(machine.items()))


@cache
def _open(path: Path | None, machine: tuple[tuple[str, Any], ...]) -> Table:
    return Table(path, dict(machine))


def time_both(
    plain: Function,
    native: Function,
    forms: Sequence[Any],
    margin: float = MARGIN,
    prepare: Function = lambda *arrays: arrays,
) -> Times:
    """Time both inside a compiled loop, in turns; in a thread of its own, since the one that asks may be in the middle
    of a trace. What `prepare` makes of the arrays, before the loop, is what the native path is given."""
    with ThreadPoolExecutor(1, thread_name_prefix="hotloop-measure") as alone:
        return alone.submit(_time_both, plain, native, forms, margin, prepare).result()


def _time_both(
    plain: Function, native: Function, forms: Sequence[Any], margin: float, prepare: Function
) -> Times:
    random = np.random.default_rng(0).standard_normal(4099)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = tuple(jax.numpy.asarray(np.resize(random, form.shape), form.dtype) for form in forms)
        prepared = tuple(jax.jit(prepare)(*arrays))

        def timed(function: Function, arrays: Sequence[jax.Array]) -> Call:
            loop = compile_loop(function, arrays)
            return lambda turns: _milliseconds(lambda: loop(turns, arrays)) / turns

        return compare_calls(timed(plain, arrays), timed(native, prepared), margin)


def _milliseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())  # type: ignore[no-untyped-call]
    return 1e3 * (time.perf_counter() - began)


def compare_calls(plain: Call, native: Call, margin: float = MARGIN) -> Times:
    """Of many pairs of short calls, one after the other, that with the median ratio.

    What else the machine does may slow one path alone, one that uses more cores, and its clock may change for both
    at any moment: neither moves the ratios of more than a few pairs.
    """
    calls = (plain, native)
    for call in calls:
        call(1)  # makes oneDNN's kernel, and touches the memory
    turns = [min(MOST_TURNS, 1 + int(1e3 * CALL_SECONDS / call(1))) for call in calls]
    pairs: list[Times] = []
    until = time.perf_counter() + MOST_SECONDS
    while len(pairs) < LEAST_PAIRS or (len(pairs) < _enough(pairs, turns) and time.perf_counter() < until):
        first = len(pairs) % 2  # in turn, as the second finds the caches as the other leaves them
        ms = {which: calls[which](turns[which]) for which in (first, 1 - first)}
        pairs.append(Times(ms[0], ms[1], margin))
    found = _by_ratio(pairs)[(len(pairs) - 1) // 2]
    return Times(round(found.plain_ms, 5), round(found.native_ms, 5), margin)


def _by_ratio(pairs: Sequence[Times]) -> list[Times]:
    return sorted(pairs, key=lambda pair: pair.ratio)


def _enough(pairs: Sequence[Times], turns: Sequence[int]) -> float:
    """Pairs; more where a quarter of them would choose otherwise, or the middle one only just.

    They are counted by the fastest, as those of a slow moment would else be most of the few that fit.
    """
    low, middle, high = (_by_ratio(pairs)[len(pairs) * quarter // 4] for quarter in (1, 2, 3))
    is_near = 1 / NEAR < middle.ratio / middle.margin < NEAR
    in_doubt = is_near or low.is_native_faster != high.is_native_faster
    fastest = min(pair.plain_ms for pair in pairs), min(pair.native_ms for pair in pairs)
    pair_ms = turns[0] * fastest[0] + turns[1] * fastest[1]
    return 1e3 * (SECONDS_IN_DOUBT if in_doubt else SECONDS) / pair_ms


def compile_loop(function: Function, arrays: Sequence[jax.Array]) -> Any:
    """`(turns, arrays)` -> the results of the last of so many turns, each of which does all of the work."""

    def loop(turns: jax.Array, arrays: Sequence[jax.Array]) -> Any:
        forms = jax.tree.leaves(jax.eval_shape(function, *arrays))
        empty = [jax.numpy.zeros(each.shape, each.dtype) for each in forms]
        return lax.fori_loop(0, turns, lambda _, results: jax.tree.leaves(function(*arrays)), empty)

    # Left to itself XLA would do the work once, before the loop. To have each turn change a number of its arrays is no
    # way out: XLA then copies them, which takes longer than some operations.
    lowered = jax.jit(loop).lower(1, arrays)
    in_loop = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
    return lowered.compile({**choose_options(lowered, "cpu"), **in_loop})
