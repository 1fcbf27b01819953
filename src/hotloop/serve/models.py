"""The models of a server: which versions are loaded, which one answers for a name, and how one takes over.

A version is loaded beside the others and appears here when it is ready; one that goes ends its requests first.
Everything is called in the event loop.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from hotloop.engine.model_place import VERSION
from hotloop.errors import did_you_mean, one_line
from hotloop.serve.artefact import Artefact
from hotloop.serve.batcher import Batcher
from hotloop.serve.figures import Figures
from hotloop.serve.refusal import NotFound, Unready
from hotloop.serve.runner import CALLS, DeviceThread, Load
from hotloop.serve.tensors import shorten

ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
Key = tuple[str, int]
KEEP_FIGURES = (
    900.0  # seconds that figures of a version that has gone stay, so that the last ones are collected
)


class State(NamedTuple):
    """What a version does, in the words of the open protocol's index, and why where it was refused."""

    word: Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]
    reason: str = ""


@dataclass(frozen=True)
class LoadedVersion:
    """A version that answers: what it is, its queue, and what to close when its last request has ended."""

    artefact: Artefact
    batcher: Batcher
    close: Callable[[], None]

    @property
    def key(self) -> Key:
        return self.artefact.name, self.artefact.version

    async def end(self) -> None:
        """Let nobody in, answer those who are, and let go of the weights."""
        await self.batcher.drain()
        self.close()
        await asyncio.to_thread(return_free_memory)


def share_memory() -> None:
    """Let all threads of this process take memory from the same two places; to be called before there are any.

    glibc gives each of many threads a place of its own, which keeps what one large body or image had: a machine of
    sixteen cores held a gigabyte after a few dozen of them.
    """
    if limit := getattr(ctypes.CDLL(None), "mallopt", None):
        limit(ARENA_MAX, 2)


def return_free_memory() -> None:
    """To the system. glibc would keep it for the threads that it was of, and each version has had its own."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Models:
    """Versions by name and number."""

    def __init__(
        self,
        figures: Figures,
        *,
        delay: float = 0.0,
        queue: int = 256,
        say: Callable[[str], None] = lambda text: None,
    ):
        """`delay` and `queue` are every batcher's: seconds to wait for company, requests that wait at most.

        `say` takes a line where a device call raised, or compiled after its version was ready, from its thread.
        """
        self.figures, self._say = figures, say
        self._delay, self.queue = delay, queue
        self._loaded: dict[str, dict[int, LoadedVersion]] = {}
        self._expected: set[Key] = set()
        self._loading: set[Key] = set()
        self._refused: dict[Key, str] = {}
        """Why, of versions whose folder was not right when it was last looked at."""
        self._forgetting: dict[Key, asyncio.TimerHandle] = {}
        self._ending: dict[asyncio.Task[None], LoadedVersion] = {}
        self._threads: list[DeviceThread] = []
        """Of versions that are loading, loaded or on their way out."""
        self.is_ending = False
        """Whether the server is on its way out: not ready, though it answers who is connected."""

    def expect(self, keys: set[Key]) -> None:
        """Versions that are being loaded: until they are there, who asks for them is told to come back."""
        self._expected |= keys

    def begin(self, key: Key) -> None:
        """A version is being loaded; it may answer all the while, if it was loaded before."""
        self._loading.add(key)
        self._refused.pop(key, None)

    def refuse(self, key: Key, reason: str) -> None:
        """A version that was being loaded will not come."""
        self._expected.discard(key)
        self._loading.discard(key)
        self._refused[key] = reason

    @property
    def is_ready(self) -> bool:
        return not self.is_ending and not self._expected and bool(self._loaded)

    async def load(self, folder: Path) -> tuple[LoadedVersion, Load]:
        """The version in a folder, compiled and compared, not yet answering; ModelError where it is not right."""
        loop = asyncio.get_running_loop()
        artefact = await loop.run_in_executor(None, Artefact.open, folder)
        own = self.figures.of(artefact.name, artefact.version)

        def alarm(rung: int) -> None:
            own.late_compilations += 1
            self._say(f"ALARM: {own.name} version {own.version} compiled for {rung} rows after it was ready")

        def complain(sentence: str) -> None:
            self._say(f"{own.name} version {own.version}: {sentence}")

        thread = DeviceThread(artefact, alarm, complain)
        self._threads = [each for each in self._threads if not each.has_ended()] + [thread]
        try:
            took = await thread.load()
        except BaseException:
            thread.close()
            raise
        return LoadedVersion(artefact, self.make_batcher(artefact, thread, took.by_rung), thread.close), took

    def make_batcher(
        self, artefact: Artefact, run: DeviceThread, seconds: Mapping[int, float] = {}
    ) -> Batcher:
        name, version = artefact.name, artefact.version
        return Batcher(
            run,
            artefact.ladder,
            delay=self._delay,
            queue=self.queue,
            calls=CALLS,
            seconds=seconds,
            on_batch=lambda record: self.figures.count_batch(name, version, record),
        )

    def put(self, version: LoadedVersion) -> None:
        """Let a version answer from now on, in the place of one of the same number, which ends its requests."""
        name, number = version.key
        versions = self._loaded.setdefault(name, {})
        before = versions.get(number)
        versions[number] = version
        self._expected.discard(version.key)
        self._loading.discard(version.key)
        if version.key in self._forgetting:
            self._forgetting.pop(version.key).cancel()
        self.figures.pending[version.key] = version.batcher
        if before is not None:
            self._end_beside(before)

    def remove(self, key: Key) -> None:
        """Let a version answer nobody else; of one that was refused, forget that it was."""
        name, number = key
        self._refused.pop(key, None)
        self.figures.pending.pop(key, None)
        if key in self._forgetting:
            self._forgetting.pop(key).cancel()
        loop = asyncio.get_running_loop()
        self._forgetting[key] = loop.call_later(KEEP_FIGURES, self._forget_figures, key)
        if number in self._loaded.get(name, {}):
            gone = self._loaded[name].pop(number)
            if not self._loaded[name]:
                del self._loaded[name]
            self._end_beside(gone)

    def _forget_figures(self, key: Key) -> None:
        del self._forgetting[key]
        if key not in self._refused:  # else its folder is here again
            self.figures.forget(*key)

    def _end_beside(self, version: LoadedVersion) -> None:
        task = asyncio.get_running_loop().create_task(version.end())
        self._ending[task] = version
        task.add_done_callback(self._ending.pop)

    async def end(self) -> None:
        """End all versions; returns when every request has been answered."""
        self.is_ending = True
        for name, versions in list(self._loaded.items()):
            for number in list(versions):
                self.remove((name, number))
        await asyncio.gather(*self._ending)

    def end_threads(self, seconds: float) -> bool:
        """Close the device threads of all versions, from any thread; whether they have ended within so many seconds."""
        for each in self._threads:
            each.close()
        until = time.monotonic() + seconds
        return all(each.has_ended(max(0.0, until - time.monotonic())) for each in self._threads)

    @property
    def held(self) -> int:
        """Requests that have been let in and not been answered, by versions on their way out as well."""
        versions = [each for some in self._loaded.values() for each in some.values()]
        return sum(each.batcher.held for each in (*versions, *self._ending.values()))

    def names(self) -> list[str]:
        return sorted(self._loaded)

    def versions(self, name: str) -> list[int]:
        return sorted(self._loaded.get(name, {}))

    def states(self) -> dict[Key, State]:
        """All versions that answer, load, end, or were refused; of one that answers, why its new form was refused."""
        found = {key: State("UNAVAILABLE", reason) for key, reason in self._refused.items()}
        found |= {each.key: State("UNLOADING") for each in self._ending.values()}
        found |= {key: State("LOADING") for key in self._expected | self._loading}
        for name, versions in self._loaded.items():
            for number in versions:
                word: Literal["READY", "UNLOADING"] = "UNLOADING" if self.is_ending else "READY"
                found[name, number] = State(word, self._refused.get((name, number), ""))
        return dict(sorted(found.items()))

    def find(self, name: str, version: str | None = None) -> LoadedVersion:
        """The version asked for, the newest where none is; NotFound, or Unready while it is being loaded."""
        versions = self._loaded.get(name, {})
        number = None
        if version is not None:
            if VERSION.fullmatch(version) is None:
                raise NotFound(
                    f"there is no version {shorten(version)} of a model: versions are whole numbers from 1"
                )
            number = int(version)
        if versions and (number is None or number in versions):
            return versions[max(versions) if number is None else number]
        if any(own == name and number in (None, other) for own, other in self._expected):
            raise Unready(f"the model {name} is being loaded")
        if versions:
            there = ", ".join(map(str, sorted(versions)))
            raise NotFound(f"the model {name} has no version {version}; there: {there}")
        known = {*self._loaded, *(own for own, _ in self._expected)}
        raise NotFound(f"there is no model '{shorten(name)}'{did_you_mean(name[:100], known)}")


def describe_load(version: LoadedVersion, took: Load) -> str:
    """A line for people."""
    name, number = version.key
    rungs = len(version.artefact.ladder)
    made = (
        "none of them by the compiler" if not took.compiled else f"{took.compiled} programs by the compiler"
    )
    return f"loaded {name} version {number}: {rungs} batch sizes in {took.seconds:.1f} s, {made}"


def describe_error(error: Exception) -> str:
    return one_line(str(error) or type(error).__name__)


def describe_refusal(folder: Path, error: Exception) -> str:
    return f"refused {folder}: {describe_error(error)}"
