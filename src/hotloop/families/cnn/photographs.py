"""ImageNet's photographs from their encoded bytes to batches of pixels on the host: cut, resampled, by many workers.

Output pixel i is read at i * (old size / new size) (data/resample.py). Bytes are the floats truncated. No jax:
processes that work start sooner.
"""

import ctypes
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import sqrt
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotloop.data.image_stores import EncodedImage, ImageStore
from hotloop.data.jpeg import ImageError, Pixels, open_image
from hotloop.data.jpeg_rows import read_rows
from hotloop.data.resample import SamplingGrid, resample
from hotloop.errors import DataError
from hotloop.families.cnn.options import PHOTOGRAPHS

if TYPE_CHECKING:
    from PIL import Image

SIZE, SHORT_SIDE = 224, 256  # of what the network sees, and of the photograph that its middle is cut from
# The old program's random crop: shares of the area, width over height, least share of a box, and tries.
AREAS, ASPECTS, COVERED, ATTEMPTS = (0.05, 1.0), (0.75, 1.33), 0.1, 100
MISSING = -1  # the label of an image that could not be read and was not replaced
UNSEEN = -1  # the epoch of an image of which only the label is wanted: another process decodes it
WantedImages = tuple[NDArray[Any], NDArray[Any]]  # numbers of a batch's images, and the epoch of each
HostBatch = dict[str, NDArray[Any]]
Filled = tuple[NDArray[np.int32], list[str]]  # labels, and what was said of images that were skipped
_IN_A_ROW = 100  # so many broken images one after the other are no accident
_PART = 8  # images that a worker is given at once
# From so many workers on, processes are the default. Threads begin at once, but about a tenth of the work holds
# Python's lock: some ten of them would wait for each other.
_MANY = 8
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's settings in malloc.h
_KEPT = 1 << 25  # bytes: the most that it takes as a threshold


class Rectangle(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_crop(
    generator: np.random.Generator, width: int, height: int, boxes: NDArray[np.float32]
) -> Rectangle:
    """A part with a random aspect (0.75 to 1.33) and area (0.05 to 1 of the image) at a random place.

    It covers at least a tenth of one of the boxes, or of the image where there are none. Each of up to 100 attempts
    draws the aspect, then the height from those that give such an area; when all fail, the whole image is taken.
    """
    objects = boxes * np.array([width, height, width, height], np.float32)
    least, most = (share * width * height for share in AREAS)
    for _ in range(ATTEMPTS):
        aspect = generator.uniform(*ASPECTS)
        highest = min(round(sqrt(most / aspect)), height, int((width + 0.5) / aspect))
        lowest = min(round(sqrt(least / aspect)), highest)
        tall = int(generator.integers(lowest, highest + 1))
        wide = round(tall * aspect)
        if 0 < wide <= width and tall > 0 and least <= wide * tall <= most:
            left, top = map(int, generator.integers(0, [width - wide + 1, height - tall + 1]))
            crop = Rectangle(left, top, wide, tall)
            if _covers_any(crop, objects) if len(boxes) else wide * tall >= COVERED * width * height:
                return crop
    return Rectangle(0, 0, width, height)


def _covers_any(crop: Rectangle, objects: NDArray[np.float32]) -> bool:
    """Whether a tenth of one of the objects (left, top, right, bottom) lies in the part."""
    lefts, tops, rights, bottoms = objects.T
    across = np.minimum(rights, crop.left + crop.width) - np.maximum(lefts, crop.left)
    down = np.minimum(bottoms, crop.top + crop.height) - np.maximum(tops, crop.top)
    common = np.maximum(across, 0) * np.maximum(down, 0)
    return bool((common >= COVERED * (rights - lefts) * (bottoms - tops)).any())


def grid_of_middle(width: int, height: int, size: int) -> SamplingGrid:
    """The middle size x size of the image resized to a short side of 256 (for other sizes than 224 in proportion),
    sizes truncated and offsets floored."""
    short = SHORT_SIDE * size // SIZE
    resized = [side * short // min(width, height) for side in (width, height)]
    step_x, step_y = width / resized[0], height / resized[1]
    left, top = ((side - size) // 2 for side in resized)
    return SamplingGrid(left * step_x, top * step_y, step_x, step_y)


def training_image(
    image: EncodedImage, generator: np.random.Generator, size: int, *, reduced: bool = True
) -> NDArray[np.float32]:
    """A random part, mirrored in half of the cases, [size, size, 3] from 0 to 255.

    `reduced` lets the JPEG decoder halve (quarter, ...) the image where the part keeps at least `size` pixels a side:
    faster, and smoother than reading every second pixel. Without it the pixels are those of the full decoding.
    """
    opened = open_image(image.encoded)
    crop = random_crop(generator, *opened.size, image.boxes)
    mirrored = bool(generator.integers(2))
    room = min(crop.width, crop.height) // size if reduced else 1
    wanted = next((factor for factor in (8, 4, 2) if factor <= room), 1)
    pixels, factor = read_rows(opened, image.encoded, crop.top + crop.height, wanted)
    step_x, step_y = crop.width / size, crop.height / size  # stretched or shrunk, whatever the aspect
    if factor > 1:
        # The same places in an image whose pixels are the means of factor x factor old ones.
        left, top = ((start - (factor - 1) / 2) / factor for start in (crop.left, crop.top))
        return resample(pixels, SamplingGrid(left, top, step_x / factor, step_y / factor), size, mirrored)
    cut = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    return resample(cut, SamplingGrid(0, 0, step_x, step_y), size, mirrored)


def evaluation_image(image: EncodedImage, size: int) -> NDArray[np.float32]:
    """The middle of the image, [size, size, 3] from 0 to 255."""
    opened = open_image(image.encoded)
    grid = grid_of_middle(*opened.size, size)
    pixels, _ = read_rows(opened, image.encoded, int(grid.top + (size - 1) * grid.step_y) + 2)
    return resample(pixels, grid, size)


def fit_to_network(image: "Image.Image", shape: tuple[int, int, int], dataset: str) -> Pixels:
    """An RGB image as the bytes that a network sees: of photographs the middle as in validation, of others all."""
    if dataset in PHOTOGRAPHS:
        return resample(np.asarray(image), grid_of_middle(*image.size, shape[0]), shape[0]).astype(np.uint8)
    resized = image.convert("L" if shape[2] == 1 else "RGB").resize((shape[1], shape[0]))
    return np.asarray(resized, np.uint8).reshape(shape)


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
        """Pixels and label of one image, zeros in an epoch that is UNSEEN; DataError when it is broken."""
        encoded = self.store.read(number)
        if epoch == UNSEEN:
            return np.zeros((self.size, self.size, 3), self.dtype), encoded.label
        generator = np.random.default_rng((self.seed, epoch, number))
        try:
            if self.training:
                pixels = training_image(encoded, generator, self.size)
            else:
                pixels = evaluation_image(encoded, self.size)
        except ImageError as error:
            raise DataError(f"{encoded.where}: corrupt image ({error})") from None
        return pixels.astype(self.dtype, copy=False), encoded.label


class Workers:
    """Decodes batches ahead of who takes them; a context.

    `skipped` counts the broken images that were met; `on_skip` is called with each once.
    """

    def __init__(
        self,
        reader: PhotoReader,
        workers: int,
        kind: Literal["auto", "threads", "processes"] = "auto",
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
            wait([part.future for part in begun])  # a slot that is given out again must not be written into
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
        _keep_memory()
    _own.reader, _own.parts = reader, np.frombuffer(memory, reader.dtype).reshape(shape)


def _keep_memory() -> None:
    """Let this process keep what it frees: images come and go, and each would be given to the system and asked for
    anew, 700 page faults an image and a third of the time. Only glibc can be told."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            adjust(setting, _KEPT)


def _fill(slot: int, numbers: NDArray[Any], epochs: NDArray[Any]) -> Filled:
    filled: Filled = _own.reader.fill(_own.parts[slot], numbers, epochs)
    return filled
