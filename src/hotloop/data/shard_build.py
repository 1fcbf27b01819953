"""One shard of image records: read each file, look whether it decodes, repair what is no RGB JPEG, write.

Runs in a process of its own, so everything it is handed and hands back is plain data. It must not know of other
shards.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.data.encoded import no_boxes
from hotloop.data.example import Values, write_example
from hotloop.data.jpeg import Checked, ImageError, checked
from hotloop.data.record_facts import Boxes
from hotloop.data.shard_files import Shard, sha256_of, whole_file
from hotloop.data.tfrecord import record
from hotloop.errors import DataError


@dataclass(frozen=True, eq=False)
class Item:
    """One image that a shard gets."""

    path: str
    label: int
    """From 1."""
    synset: str
    text: str


@dataclass(frozen=True, eq=False)
class ShardTask:
    """Everything that the content of one shard depends on."""

    path: Path
    items: tuple[Item, ...]
    boxes: Boxes


def build_shard(skip_corrupt: bool, task: ShardTask) -> Shard:
    """Write the shard and say what was written; an image that does not decode is named in a DataError, or left out."""
    skipped: list[str] = []
    records = repaired = 0
    with whole_file(task.path) as unfinished, unfinished.open("wb") as file:
        for item, image in _images(task, skipped if skip_corrupt else None):
            boxes = task.boxes.get(Path(item.path).stem, no_boxes())
            file.write(record(write_example(features(item, image, boxes))))
            records += 1
            repaired += image.repaired
        file.flush()
        os.fsync(file.fileno())
        size, checksum = unfinished.stat().st_size, sha256_of(unfinished)
    return Shard(size, checksum, records, repaired, tuple(skipped))


def features(item: Item, image: Checked, boxes: np.ndarray) -> dict[str, Values]:
    """The fields of a record."""
    sides = dict(zip(("xmin", "ymin", "xmax", "ymax"), boxes.T.astype(np.float32), strict=True))
    return {
        "image/height": _int(image.height),
        "image/width": _int(image.width),
        "image/colorspace": [b"RGB"],
        "image/channels": _int(3),
        "image/class/label": _int(item.label),
        "image/class/synset": [item.synset.encode()],
        "image/class/text": [item.text.encode()],
        **{f"image/object/bbox/{side}": values for side, values in sides.items()},
        "image/object/bbox/label": np.full(len(boxes), item.label, np.int64),
        "image/format": [b"JPEG"],
        "image/filename": [os.fsencode(Path(item.path).name)],
        "image/encoded": [image.encoded],
    }


def _images(task: ShardTask, skipped: list[str] | None) -> Iterator[tuple[Item, Checked]]:
    for item in task.items:
        try:
            yield item, checked(Path(item.path).read_bytes())
        except ImageError as error:
            if skipped is None:
                raise DataError(f"{item.path}: {error}; skip_corrupt=True leaves such images out") from None
            skipped.append(f"{item.path}: {error}")
        except OSError as error:
            raise DataError(f"{item.path}: cannot be read ({error.strerror})") from None


def _int(value: int) -> np.ndarray:
    return np.array([value], np.int64)
