"""Photographs decoded by workers: threads, or processes that write into shared memory. No jax: they start sooner.

A broken image stops the run with its file and position, or, when asked for, is replaced by the next whole one in
training and marked as missing in validation.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotloop.data.image_stores import ImageStore
from hotloop.data.jpeg import ImageError
from hotloop.errors import DataError
from hotloop.families.cnn.photographs import (
    SIZE,
    evaluation_image,
    resample_bytes,
    resample_floats,
    training_image,
)

MISSING = -1  # the label of an image that could not be read and was not replaced
WorkerKind = Literal["auto", "threads", "processes"]
WantedImages = tuple[NDArray[Any], NDArray[Any]]  # numbers of a batch's images, and the epoch of each
HostBatch = dict[str, NDArray[Any]]
Filled = tuple[
    NDArray[np.int32], list[str]
]  # labels of images put in place, and what was said of skipped ones
_IN_A_ROW = 100  # so many broken images one after the other are no accident
_PART = 8  # images that a worker is given at once
# From so many workers on, processes are the default. Threads begin at once, but about a tenth of the work holds
# Python's lock: some ten of them would wait for each other.
_MANY = 8


@dataclass(frozen=True, eq=False)
class PhotoReader:
    """Which images, and how they become pixels."""

    store: ImageStore
    training: bool
    seed: int = 0
    size: int = SIZE
    eight_bit: bool = True
    skip_corrupt: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the pixels: bytes, or floats of the same range that are not truncated."""
        return np.dtype(np.uint8 if self.eight_bit else np.float32)

    def fill(self, images: NDArray[Any], numbers: Iterable[int], epochs: Iterable[int]) -> Filled:
        """Put image `numbers[i]`, as epoch `epochs[i]` sees it, into images[i]; if it is broken and may be, in training
        one of the next, in validation none."""
        labels: list[int] = []
        skipped: list[str] = []
        for place, (number, epoch) in enumerate(zip(numbers, epochs, strict=True)):
            for step in range(_IN_A_ROW if self.training else 1):
                try:
                    images[place], label = self.image((int(number) + step) % len(self.store), int(epoch))
                    break
                except DataError as error:
                    if not self.skip_corrupt:
                        raise
                    skipped.append(str(error))
            else:
                if self.training:
                    raise DataError(f"{skipped[-1]}; {_IN_A_ROW} broken images in a row: the set is unusable")
                images[place], label = 0, MISSING
            labels.append(label)
        return np.array(labels, np.int32), skipped

    def image(self, number: int, epoch: int = 0) -> tuple[NDArray[Any], int]:
        """Pixels and label of one image; DataError when it is broken."""
        encoded, generator = self.store.read(number), np.random.default_rng((self.seed, epoch, number))
        resample = resample_bytes if self.eight_bit else resample_floats
        try:
            if self.training:
                pixels = training_image(encoded, generator, self.size, resample)
            else:
                pixels = evaluation_image(encoded, self.size, resample)
        except ImageError as error:
            raise DataError(f"{encoded.where}: corrupt image ({error})") from None
        return pixels, encoded.label


class Workers:
    """Decodes batches ahead of who takes them; a context.

    `skipped` counts the broken images that were met; `on_skip` hears of each once.
    """

    def __init__(
        self,
        reader: PhotoReader,
        workers: int,
        kind: WorkerKind = "auto",
        on_skip: Callable[[str], None] = lambda text: None,
    ):
        self.reader = reader
        self.skipped, self._on_skip, self._named = 0, on_skip, set[str]()
        self.kind = kind if kind != "auto" else "processes" if workers >= _MANY else "threads"
        shape = (3 * workers, _PART, reader.size, reader.size, 3)
        size = int(np.prod(shape)) * reader.dtype.itemsize
        self._free = deque(range(shape[0]))
        self._pool: Executor
        if self.kind == "threads":
            memory: Any = bytearray(size)
            self._pool = ThreadPoolExecutor(workers, "hotloop-decode", _adopt, (reader, memory, shape))
        else:
            context = get_context("spawn")  # a fork would copy jax's threads in whatever state they are
            memory = context.RawArray("B", size)
            self._pool = ProcessPoolExecutor(workers, context, _adopt, (reader, memory, shape))
        self._parts = np.frombuffer(memory, reader.dtype).reshape(shape)

    def batches(self, wanted: Iterable[WantedImages]) -> Iterator[HostBatch]:
        """One batch after the other; those to come are begun as soon as there is room."""
        begun: deque[_Part] = deque()
        side = self.reader.size
        try:
            for numbers, epochs in wanted:
                count = len(numbers)
                images = np.empty((count, side, side, 3), self.reader.dtype)
                batch = {"image": images, "label": np.empty(count, np.int32)}
                for start in range(0, count, _PART):
                    if not self._free:
                        yield from self._finish(begun)
                    place, slot = slice(start, min(start + _PART, count)), self._free.popleft()
                    future = self._pool.submit(_fill, slot, numbers[place], epochs[place])
                    begun.append(_Part(batch, place, slot, future))
            while begun:
                yield from self._finish(begun)
        finally:
            for part in begun:
                part.future.cancel()
            wait([part.future for part in begun])  # nobody may write into a slot that is given out again
            self._free += [part.slot for part in begun]

    def _finish(self, begun: "deque[_Part]") -> Iterator[HostBatch]:
        """Take the oldest part; yields its batch when that was the last of it."""
        part = begun[0]
        try:
            labels, skipped = part.future.result()
        except BrokenProcessPool:
            raise DataError("a decoding process was killed: is there memory for so many workers?") from None
        begun.popleft()
        part.batch["image"][part.place] = self._parts[part.slot, : len(labels)]
        part.batch["label"][part.place] = labels
        self._free.append(part.slot)
        for text in skipped:
            if text not in self._named:
                self._named.add(text)
                self._on_skip(text)
                self.skipped += 1
        if part.place.stop == len(part.batch["label"]):
            yield part.batch

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Part(NamedTuple):
    """A few images of a batch, and who makes them."""

    batch: HostBatch
    place: slice
    slot: int
    future: Future[Filled]


_own = threading.local()  # in a worker: what it reads, and the memory that it writes into


def _adopt(reader: PhotoReader, memory: Any, shape: tuple[int, ...]) -> None:
    if threading.current_thread() is threading.main_thread():  # a process of its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    _own.reader, _own.parts = reader, np.frombuffer(memory, reader.dtype).reshape(shape)


def _fill(slot: int, numbers: NDArray[Any], epochs: NDArray[Any]) -> Filled:
    filled: Filled = _own.reader.fill(_own.parts[slot], numbers, epochs)
    return filled
