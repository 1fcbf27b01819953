"""Shards of image records: how one is built of image files, and the manifest of a folder of them.

manifest.json has size, checksum and count of each shard and grows with every finished one, so that a build that was
stopped goes on where it was. A shard is built in a process of its own: what goes there and back is plain data.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hotloop.data.content import read_errors, write_errors
from hotloop.data.example import Values, write_example
from hotloop.data.image_stores import Boxes, no_boxes
from hotloop.data.jpeg import CheckedImage, ImageError, check_image
from hotloop.data.local_files import digest_file
from hotloop.data.tfrecord import encode_record
from hotloop.errors import DataError
from hotloop.options.files import load_json, whole_file

MANIFEST = "manifest.json"
_FORMAT = 1
Value = TypeVar("Value")


@dataclass(frozen=True)
class Shard:
    """A finished shard as it was written."""

    bytes: int
    sha256: str
    records: int
    repaired: int = 0
    skipped: tuple[str, ...] = ()  # images left out because they do not decode


@dataclass(frozen=True)
class PartManifest:
    """What a part (train, validation) was made from, and its finished shards by name."""

    plan: str  # checksum of everything that decides the content: images, labels, order, options
    images: int
    total: int
    shards: Mapping[str, Shard]


def read_manifest(folder: str | Path) -> dict[str, PartManifest]:
    """The parts by name; empty where there is no manifest; DataError where it cannot be understood."""
    path = Path(folder) / MANIFEST
    try:
        body = load_json(path)
        if body["program"] != "hotloop" or body["format"] != _FORMAT:
            raise DataError(f"{path}: not a manifest that this version reads; move it away to build anew")
        return {name: _read_part(part) for name, part in body["parts"].items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: damaged; move it away to build anew") from None


def write_manifest(folder: Path, parts: Mapping[str, PartManifest]) -> None:
    body = {"program": "hotloop", "format": _FORMAT, "parts": {n: asdict(part) for n, part in parts.items()}}
    path = folder / MANIFEST
    with write_errors(path), whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(body, indent=1) + "\n")


def shard_fault(path: Path, shard: Shard) -> str:
    """Why the file is not the shard that was written, or an empty text."""
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"{size:,} bytes, {shard.bytes:,} were written"
        same = digest_file(path, "sha256")[1] == f"sha256:{shard.sha256}"
        return "" if same else "does not match its sha256: it was altered or damaged"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _read_part(body: dict[str, Any]) -> PartManifest:
    shards = {}
    for name, shard in body["shards"].items():
        numbers = {key: _is(int, shard[key]) for key in ("bytes", "records", "repaired")}
        skipped = tuple(_is(str, image) for image in _is(list, shard["skipped"]))
        shards[name] = Shard(sha256=_is(str, shard["sha256"]), skipped=skipped, **numbers)
    return PartManifest(_is(str, body["plan"]), _is(int, body["images"]), _is(int, body["total"]), shards)


def _is(kind: type[Value], value: Any) -> Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


@dataclass(frozen=True, eq=False)
class Item:
    path: str
    label: int  # from 1
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
    path = task.path
    with write_errors(path), whole_file(path) as unfinished, unfinished.open("wb") as file:
        for item in task.items:
            with read_errors(item.path):
                encoded = Path(item.path).read_bytes()
            try:
                image = check_image(encoded)
            except ImageError as error:
                if not skip_corrupt:
                    raise DataError(
                        f"{item.path}: {error}; skip_corrupt=True leaves such images out"
                    ) from None
                skipped.append(f"{item.path}: {error}")
                continue
            boxes = task.boxes.get(Path(item.path).stem, no_boxes())
            file.write(encode_record(write_example(record_features(item, image, boxes))))
            records += 1
            repaired += image.repaired
        file.flush()
        os.fsync(file.fileno())
        size, checksum = digest_file(unfinished, "sha256")
    return Shard(size, checksum.removeprefix("sha256:"), records, repaired, tuple(skipped))


def record_features(item: Item, image: CheckedImage, boxes: np.ndarray) -> dict[str, Values]:
    sides = dict(zip(("xmin", "ymin", "xmax", "ymax"), boxes.T.astype(np.float32), strict=True))
    numbers = {
        "image/height": image.height,
        "image/width": image.width,
        "image/channels": 3,
        "image/class/label": item.label,
    }
    return {
        **{name: np.array([number], np.int64) for name, number in numbers.items()},
        "image/colorspace": [b"RGB"],
        "image/class/synset": [item.synset.encode()],
        "image/class/text": [item.text.encode()],
        **{f"image/object/bbox/{side}": values for side, values in sides.items()},
        "image/object/bbox/label": np.full(len(boxes), item.label, np.int64),
        "image/format": [b"JPEG"],
        "image/filename": [os.fsencode(Path(item.path).name)],
        "image/encoded": [image.encoded],
    }
