"""Stores of labelled, encoded images: TFRecord shards, as ImageNet is commonly stored, and folders of image files. With
several instances each takes its share; the shares are disjoint and complete."""

import os
import re
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import file_errors
from hotloop.data.jpeg import ImageError, decode
from hotloop.data.tfrecord import WireError, index_shards, read_example, read_record
from hotloop.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")
Part = Literal["train", "validation"]
LABELS_FILE = "labels.txt"
IMAGENET_CLASSES = 1000
PART_FOLDERS = {"train": ("train",), "validation": ("val", "validation", "test")}
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_SHARD = re.compile(r"(?P<part>train|validation)-(?P<number>\d{5})-of-(?P<total>\d{5})")
BOX_SIDES = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
_PIECE = 256  # images that a process checks before it reports
_shared: Any = None


def no_boxes() -> NDArray[np.float32]:
    return np.empty((0, 4), np.float32)


@dataclass(frozen=True, eq=False)
class EncodedImage:
    encoded: bytes
    label: int  # from 0
    where: str  # the file, and the byte where it is one of many: for messages
    boxes: NDArray[np.float32] = field(default_factory=no_boxes)  # [objects, 4], shares of width and height


def shard_name(part: str, number: int, total: int) -> str:
    return f"{part}-{number:05d}-of-{total:05d}"


def list_shards(folder: str | Path, part: Part, faults: list[str] | None = None) -> list[Path]:
    """The shards of a part in order; DataError when there are none, two sets are mixed, or some are missing, which is
    added to the `faults` instead where a list of them is given."""
    folder = Path(folder)
    with file_errors(folder):
        found = [match for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))]
    ours = {(int(each["number"]), int(each["total"])) for each in found if each["part"] == part}
    totals = {total for _, total in ours}
    if not any(number < total for number, total in ours):
        raise DataError(f"{folder}: no {part} shards; expected files named {shard_name(part, 0, 1024)}")
    if len(totals) > 1:
        few, many = sorted(totals)[:2]
        raise DataError(f"{folder}: {part} shards of two sets, of {few} and of {many} files; remove one")
    total = totals.pop()
    missing = [number for number in range(total) if (number, total) not in ours]
    if missing:
        name = shard_name(part, missing[0], total)
        fault = f"{folder}: {len(missing)} of {total} {part} shards are missing, first {name}"
        if faults is None:
            raise DataError(fault)
        faults.append(fault)
    return [folder / shard_name(part, number, total) for number in range(total) if number not in missing]


def is_record_folder(folder: str | Path) -> bool:
    folder = Path(folder)
    return folder.is_dir() and any(_SHARD.fullmatch(path.name) for path in folder.iterdir())


class RecordSet:
    """One part of a record set, or one instance's share of its shards. Stored labels begin at 1, those handed on at
    0."""

    def __init__(
        self,
        folder: str | Path,
        part: Part,
        *,
        instance: int = 0,
        instances: int = 1,
        check: bool = False,
        faults: list[str] | None = None,
    ):
        folder = Path(folder)
        every = list_shards(folder, part, faults)
        if instances > len(every):
            raise DataError(f"{folder}: {len(every)} {part} shards cannot be shared by {instances} instances")
        self.files = every[instance::instances]
        own = part if instances == 1 else f"{part}.{instance}of{instances}"
        self.counts, self._index = index_shards(self.files, folder / f".{own}.index.npz", faults)
        self._shard_of = np.repeat(np.arange(len(self.files)), self.counts)
        self._check = check
        try:
            labels = (folder / LABELS_FILE).read_text(encoding="utf-8").strip().splitlines()
        except (OSError, ValueError):
            labels = []
        self.classes = len(labels) or IMAGENET_CLASSES
        self.source = f"{len(self.files):,} TFRecord file{'s' * (len(self.files) != 1)} at {folder}"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, number: int) -> EncodedImage:
        """Image `number` in the order of the shards; DataError names file and byte."""
        path = self.files[self._shard_of[number]]
        start, length = self._index[number].tolist()
        data = read_record(path, start, length, check=self._check)
        where = f"{path}: byte {start:,}"
        try:
            features = read_example(data, ("image/encoded", "image/class/label", *BOX_SIDES))
        except WireError as error:
            raise DataError(f"{path}: byte {start + error.at:,}: no image record ({error.reason})") from None
        encoded, label = features.get("image/encoded"), features.get("image/class/label")
        if not isinstance(encoded, list) or len(encoded) != 1:
            raise DataError(f"{where}: the record has no image/encoded")
        if not isinstance(label, np.ndarray) or label.dtype != np.int64 or len(label) != 1:
            raise DataError(f"{where}: the record has no image/class/label")
        if not 1 <= label[0] <= self.classes:
            raise DataError(f"{where}: label {label[0]}, expected 1 to {self.classes}")
        stored = [features.get(name, []) for name in BOX_SIDES]
        if any(isinstance(side, list) and side for side in stored):
            raise DataError(f"{where}: bounding boxes that are no numbers")
        sides = [np.asarray(side, np.float32) for side in stored]
        if len({len(side) for side in sides}) > 1:
            raise DataError(
                f"{where}: bounding boxes with {' and '.join(str(len(side)) for side in sides)} sides"
            )
        boxes = np.stack(sides, axis=1)
        if not np.isfinite(boxes).all():
            raise DataError(f"{where}: bounding boxes with sides that are no finite numbers")
        return EncodedImage(encoded[0], int(label[0]) - 1, where, boxes)


def part_folder(root: str | Path, part: Part) -> Path | None:
    """The first that is there; a test/ without class folders has no labels, and is passed over."""
    found = (Path(root) / name for name in PART_FOLDERS[part])
    return next(
        (path for path in found if path.is_dir() and (path.name != "test" or _has_folders(path))), None
    )


def _has_folders(folder: Path) -> bool:
    return any(path.is_dir() for path in folder.iterdir())


def is_image_folder(root: str | Path) -> bool:
    folders = (part_folder(root, "train"), part_folder(root, "validation"))
    return any(_has_folders(folder) for folder in folders if folder)


def class_names(root: str | Path) -> tuple[str, ...]:
    """The classes in the order of their labels: those of the training images, else of the validation images."""
    folder = part_folder(root, "train") or part_folder(root, "validation")
    if folder is None:
        raise DataError(f"{root}: no image folder; expected train/CLASS/*.jpg and val/CLASS/*.jpg")
    return list_class_folders(folder)


def list_images(root: str | Path, part: Part, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Every image of a part and its label from 0, sorted; DataError for an unknown class or one without images."""
    folder = part_folder(root, part)
    if folder is None:
        raise DataError(f"{root}: no folder {' or '.join(PART_FOLDERS[part])} with class folders of images")
    return list_class_images(folder, classes)


def list_class_images(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """The images folder/CLASS/*.jpg, sorted, with labels; as `list_images`."""
    labels = {name: label for label, name in enumerate(classes)}
    images = []
    for name in list_class_folders(folder):
        if name not in labels:
            raise DataError(f"{folder / name}: class {name} has no training folder")
        there = (
            entry.name for entry in os.scandir(folder / name) if entry.is_file() and entry.name[0] != "."
        )
        files = [folder / name / file for file in sorted(there) if file.lower().endswith(SUFFIXES)]
        if not files:
            raise DataError(f"{folder / name}: class folder without images ({', '.join(SUFFIXES)})")
        images += [(path, labels[name]) for path in files]
    return images


def list_class_folders(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder}: no class folders")
    if odd := [name for name in names if not name.isprintable()]:
        raise DataError(f"{folder}: class folder {odd[0]!r}: a name that cannot be printed; rename it")
    return tuple(names)


class ListedImages:
    """Image files with labels, in the order in which they are given. A file's suffix does not count."""

    def __init__(self, images: Sequence[tuple[Path, int]], classes: int, source: str):
        paths = [os.fsencode(path) for path, _ in images]
        # One run of bytes instead of a million texts: it goes to other processes at once.
        self._paths = b"".join(paths)
        self._ends = np.cumsum([len(path) for path in paths])
        self._labels = np.array([label for _, label in images], np.int32)
        self.classes = classes
        self.source = source

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, number: int) -> str:
        start = self._ends[number - 1] if number else 0
        return os.fsdecode(self._paths[start : self._ends[number]])

    def read(self, number: int) -> EncodedImage:
        """Image `number`; DataError names its file."""
        path = self.path(number)
        with file_errors(path), open(path, "rb") as file:  # noqa: PTH123 - a Path for each of a million images costs more
            return EncodedImage(file.read(), int(self._labels[number]), path)


class ImageFolder(ListedImages):
    """The images train/CLASS/*.jpg or val/CLASS/*.jpg (or validation/CLASS), or one instance's share of them, sorted;
    classes are the sorted names of the training folders. A file's suffix only decides whether it is looked at."""

    def __init__(self, root: str | Path, part: Part, *, instance: int = 0, instances: int = 1):
        names = class_names(root)
        images = list_images(root, part, names)[instance::instances]
        super().__init__(images, len(names), f"{len(images):,} files at {root}")


ImageStore = RecordSet | ListedImages
"""Images are read by number, in any order and from several threads; labels are below `classes`."""


def check_images(
    store: ImageStore, *, decoding: bool, workers: int, advance: Callable[[int], None]
) -> list[str]:
    """What is wrong with the images of a store, in their order, by several processes; each text names file and place.
    `advance` is called with how many have been looked at."""
    ends = [*range(0, len(store), _PIECE), len(store)]
    pieces = list(pairwise(ends))
    found = {}
    with closing(in_processes(_find_faults, (store, decoding), pieces, workers)) as done:
        for piece, faults in done:
            found[piece] = faults
            advance(piece[1] - piece[0])
    return [fault for piece in pieces for fault in found[piece]]


def _find_faults(shared: tuple[ImageStore, bool], piece: tuple[int, int]) -> list[str]:
    store, decoding = shared
    faults = []
    for number in range(*piece):
        try:
            image = store.read(number)
            if decoding:
                decode(image.encoded)
        except DataError as error:
            faults.append(str(error))
        except ImageError as error:
            faults.append(f"{image.where}: corrupt image ({error})")
    return faults


def in_processes(
    fn: Callable[[Any, Task], Result], shared: Any, tasks: Sequence[Task], workers: int
) -> Generator[tuple[Task, Result]]:
    """(task, fn(shared, task)) in the order in which they end; `shared` goes to each process once.

    Processes are spawned, not forked: the parent may have threads. One worker, or one task, is done in this process.
    """
    if workers == 1 or len(tasks) < 2:
        yield from ((task, fn(shared, task)) for task in tasks)
        return
    with ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _adopt, (shared,)) as pool:
        futures = {pool.submit(_call, fn, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise DataError("a worker process was killed: is there memory for so many workers?") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _adopt(shared: Any) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    _shared = shared


def _call(fn: Callable[[Any, Any], Any], task: Any) -> Any:
    return fn(_shared, task)
