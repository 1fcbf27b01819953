"""Image sets in TFRecord shards, as ImageNet is commonly stored: train-00000-of-01024 and so on.

Shards are sorted by number and must all be there. With several instances each takes every so many-th shard, so that
their parts are disjoint and together complete. Stored labels begin at 1, those handed on at 0. It must not decode
images.
"""

import re
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotloop.data.encoded import EncodedImage
from hotloop.data.example import Values, read_example
from hotloop.data.record_index import index_shards
from hotloop.data.tfrecord import read_record
from hotloop.data.wire import WireError
from hotloop.errors import DataError

Part = Literal["train", "validation"]
LABELS = "labels.txt"
IMAGENET_CLASSES = 1000
_SHARD = re.compile(r"(?P<part>train|validation)-(?P<number>\d{5})-of-(?P<total>\d{5})")
_BOX = tuple(f"image/object/bbox/{side}" for side in ("xmin", "ymin", "xmax", "ymax"))
_WANTED = ("image/encoded", "image/class/label", *_BOX)


def shard_name(part: str, number: int, total: int) -> str:
    """The name of a shard's file."""
    return f"{part}-{number:05d}-of-{total:05d}"


def shards(folder: str | Path, part: Part, faults: list[str] | None = None) -> list[Path]:
    """The shards of a part in order; DataError when there are none, some are missing, or two sets are mixed.

    Missing ones are one more of the `faults` for whoever hands in a list of them.
    """
    folder = Path(folder)
    try:
        found = [match for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from None
    ours = {(int(each["number"]), int(each["total"])) for each in found if each["part"] == part}
    totals = {total for _, total in ours}
    if not totals:
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
    """Whether the folder holds any shard."""
    folder = Path(folder)
    return folder.is_dir() and any(_SHARD.fullmatch(path.name) for path in folder.iterdir())


class RecordSet:
    """The images of one part of a record set, or of one instance's share of its shards."""

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
        every = shards(folder, part, faults)
        if instances > len(every):
            raise DataError(f"{folder}: {len(every)} {part} shards cannot be shared by {instances} instances")
        self.files = every[instance::instances]
        own = part if instances == 1 else f"{part}.{instance}of{instances}"
        self.counts, self._index = index_shards(self.files, folder / f".{own}.index.npz", faults)
        self._shard_of = np.repeat(np.arange(len(self.files)), self.counts)
        self._check = check
        self.classes = _classes(folder)
        self.source = f"{len(self.files):,} TFRecord file{'s' * (len(self.files) != 1)} at {folder}"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, number: int) -> EncodedImage:
        """Image `number` in the order of the shards."""
        path = self.files[self._shard_of[number]]
        start, length = self._index[number].tolist()
        data = read_record(path, start, length, check=self._check)
        where = f"{path}: byte {start:,}"
        try:
            features = read_example(data, _WANTED)
        except WireError as error:
            raise DataError(f"{path}: byte {start + error.at:,}: no image record ({error.reason})") from None
        return EncodedImage(
            _encoded(features, where), self._label(features, where), where, _boxes(features, where)
        )

    def _label(self, features: dict[str, Values], where: str) -> int:
        stored = features.get("image/class/label")
        if not isinstance(stored, np.ndarray) or stored.dtype != np.int64 or len(stored) != 1:
            raise DataError(f"{where}: the record has no image/class/label")
        if not 1 <= stored[0] <= self.classes:
            raise DataError(f"{where}: label {stored[0]}, expected 1 to {self.classes}")
        return int(stored[0]) - 1


def _classes(folder: Path) -> int:
    try:
        return len((folder / LABELS).read_text().strip().splitlines()) or IMAGENET_CLASSES
    except (OSError, ValueError):
        return IMAGENET_CLASSES


def _encoded(features: dict[str, Values], where: str) -> bytes:
    stored = features.get("image/encoded")
    if not isinstance(stored, list) or len(stored) != 1:
        raise DataError(f"{where}: the record has no image/encoded")
    return stored[0]


def _boxes(features: dict[str, Values], where: str) -> NDArray[np.float32]:
    sides = [features.get(name) for name in _BOX]
    if any(isinstance(side, list) and side for side in sides):
        raise DataError(f"{where}: bounding boxes that are no numbers")
    lists = [np.asarray([] if side is None else side, np.float32) for side in sides]
    if len({len(side) for side in lists}) > 1:
        raise DataError(
            f"{where}: bounding boxes with {' and '.join(str(len(side)) for side in lists)} sides"
        )
    boxes = np.stack(lists, axis=1)
    if not np.isfinite(boxes).all():
        raise DataError(f"{where}: bounding boxes with sides that are no finite numbers")
    return boxes
