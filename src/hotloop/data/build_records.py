"""Class folders of images made into TFRecord shards by several processes; a build that was stopped and begun again ends
in the same bytes, since a shard is a function of an order drawn with a fixed seed."""

import csv
import hashlib
import json
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import file_errors
from hotloop.data.image_stores import (
    BOX_SIDES,
    LABELS_FILE,
    Part,
    class_names,
    in_processes,
    list_images,
    no_boxes,
    part_folder,
    shard_name,
)
from hotloop.data.jpeg import ImageError, check_image, pillow
from hotloop.data.local_files import digest_file
from hotloop.data.own_images import hold_out
from hotloop.data.tfrecord import Values, encode_record, write_example
from hotloop.errors import DataError
from hotloop.options.files import load_json, whole_file

MANIFEST = "manifest.json"
_FORMAT = 1
IMAGES_PER_SHARD = {"train": 1252, "validation": 391}  # so that ImageNet gets its usual 1,024 and 128 shards
_PARTS: tuple[Part, ...] = ("train", "validation")


@dataclass(frozen=True)
class Build:
    source: Path
    out: Path
    shards: Mapping[str, int | None]
    texts: Path | None = None
    boxes: Path | None = None
    skip_corrupt: bool = False
    hold_out: bool = False  # validation shards of a part of train/, as `own_images` would hold it out
    workers: int = 1


@dataclass(frozen=True)
class Shard:
    bytes: int
    sha256: str
    records: int
    repaired: int = 0
    skipped: tuple[str, ...] = ()  # images left out because they do not decode


@dataclass(frozen=True)
class PartManifest:
    plan: str  # checksum of everything that decides the content: images, labels, order, options
    images: int
    total: int
    shards: Mapping[str, Shard]  # the finished ones by name


@dataclass(frozen=True, eq=False)
class Item:
    path: str
    label: int  # from 1
    synset: str
    text: str
    boxes: NDArray[np.float32]


ShardTask = tuple[Path, tuple[Item, ...]]


@dataclass(frozen=True, eq=False)
class PartPlan:
    part: Part
    tasks: tuple[ShardTask, ...]  # the shards that are still to be made
    manifest: PartManifest  # with those that an earlier build has made


def plan_build(build: Build) -> list[PartPlan]:
    """What is to be made; everything that can be wrong before an image is opened is an error here."""
    pillow()
    names = class_names(build.source)
    texts = read_texts(build.texts, names) if build.texts else {}
    boxes = read_boxes(build.boxes) if build.boxes else {}
    with file_errors(build.out, "cannot be made a folder"):
        build.out.mkdir(parents=True, exist_ok=True)
    manifests, none = read_manifest(build.out), no_boxes()
    plans = []
    for part, images in _list_parts(build, names).items():
        items = [
            Item(str(path), label + 1, names[label], texts.get(names[label], ""), boxes.get(path.stem, none))
            for path, label in images
        ]
        random.Random(12345).shuffle(items)
        total = build.shards[part] or -(-len(items) // IMAGES_PER_SHARD[part])
        if total > len(items):
            raise DataError(
                f"{build.source}: {len(items)} {part} images do not fill {total} shards; ask for fewer"
            )
        tasks, state = [], hashlib.sha256()
        for number in range(total):
            chosen = tuple(items[number * len(items) // total : (number + 1) * len(items) // total])
            name = shard_name(part, number, total)
            tasks.append((build.out / name, chosen))
            state.update(f"{name}\n".encode())
            for item in chosen:
                path = Path(item.path)
                what = f"{path.name} {path.stat().st_size} {item.label} {item.synset} {item.text}\n"
                state.update(what.encode(errors="replace") + item.boxes.tobytes())
        plan, made = state.hexdigest(), manifests.get(part)
        if made is not None and made.plan != plan:
            raise DataError(
                f"{build.out}: holds {part} shards of other images or options; take another folder or remove them"
            )
        # The shards of an earlier build of the same plan that are still whole need not be made again.
        whole = {
            name: shard
            for name, shard in (made.shards if made else {}).items()
            if (build.skip_corrupt or not shard.skipped) and not shard_fault(build.out / name, shard)
        }
        still_open = tuple(task for task in tasks if task[0].name not in whole)
        plans.append(PartPlan(part, still_open, PartManifest(plan, len(items), total, whole)))
    return plans


def _list_parts(build: Build, names: Sequence[str]) -> dict[Part, list[tuple[Path, int]]]:
    """The images of each part that there is, or that is to be made."""
    there = [part for part in _PARTS if part_folder(build.source, part)]
    if not build.hold_out:
        return {part: list_images(build.source, part, names) for part in there}
    if there != ["train"]:
        raise DataError(f"{build.source}: there are images to validate with already; hold none out")
    train, validation = hold_out(list_images(build.source, "train", names))
    return {"train": train, "validation": validation}


def run_build(
    build: Build, parts: Sequence[PartPlan], advance: Callable[[int], None]
) -> dict[str, PartManifest]:
    """Make the open shards; the manifest is written after each. `advance` is called with every shard's images."""
    manifests = read_manifest(build.out)
    manifests |= {each.part: each.manifest for each in parts}

    def write_manifest() -> None:
        body = {
            "program": "hotloop",
            "format": _FORMAT,
            "parts": {name: asdict(part) for name, part in manifests.items()},
        }
        _write_text(build.out / MANIFEST, json.dumps(body, indent=1) + "\n")

    _write_text(build.out / LABELS_FILE, "".join(f"{name}\n" for name in class_names(build.source)))
    write_manifest()
    tasks = [task for each in parts for task in each.tasks]
    part_of = {path: each.part for each in parts for path, _ in each.tasks}
    with closing(in_processes(build_shard, build.skip_corrupt, tasks, build.workers)) as built:
        for (path, items), shard in built:
            manifest = manifests[part_of[path]]
            shards = dict(sorted({**manifest.shards, path.name: shard}.items()))
            manifests[part_of[path]] = replace(manifest, shards=shards)
            write_manifest()
            advance(len(items))
    return manifests


def _write_text(path: Path, text: str) -> None:
    with file_errors(path, "cannot be written"), whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def read_texts(path: str | Path, synsets: Collection[str]) -> dict[str, str]:
    """Lines of `synset TAB text`; DataError when one of the synsets has none."""
    path = Path(path)
    texts = {}
    for number, line in enumerate(_lines(path), 1):
        synset, tab, text = line.partition("\t")
        if line.strip() and not tab:
            raise DataError(f"{path}: line {number}: expected synset, tab and text, not {line[:60]!r}")
        texts[synset.strip()] = text.strip()
    missing = sorted(set(synsets) - set(texts))
    if missing:
        raise DataError(f"{path}: no text for {len(missing)} of {len(synsets)} classes, first {missing[0]}")
    return texts


def read_boxes(path: str | Path) -> dict[str, NDArray[np.float32]]:
    """File name without folder and suffix -> [objects, 4], of lines `file,xmin,ymin,xmax,ymax` with shares of 0 to 1,
    several for an image with several objects; a header may come first."""
    path = Path(path)
    rows: dict[str, list[list[float]]] = {}
    reader = csv.reader(_lines(path))
    try:
        lines = list(reader)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: no CSV ({error})") from None
    for number, cells in enumerate(lines, 1):
        if not cells:
            continue
        try:
            name, sides = cells[0], [float(cell) for cell in cells[1:]]
        except ValueError:
            if number == 1:
                continue
            sides = []
        if len(sides) != 4 or not (0 <= sides[0] <= sides[2] <= 1 and 0 <= sides[1] <= sides[3] <= 1):
            raise DataError(
                f"{path}: line {number}: expected file,xmin,ymin,xmax,ymax with shares of 0 to 1, "
                f"not {','.join(cells)[:60]!r}"
            )
        rows.setdefault(Path(name).stem, []).append(sides)
    return {name: np.array(sides, np.float32) for name, sides in rows.items()}


def _lines(path: Path) -> list[str]:
    try:
        with file_errors(path):
            return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,}: not UTF-8 text") from None


def build_shard(skip_corrupt: bool, task: ShardTask) -> Shard:
    """Write the shard and say what was written; an image that does not decode is named in a DataError, or left out."""
    skipped: list[str] = []
    records = repaired = 0
    path, items = task
    with (
        file_errors(path, "cannot be written"),
        whole_file(path) as unfinished,
        unfinished.open("wb") as file,
    ):
        for item in items:
            with file_errors(item.path):
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
            features: dict[str, Values] = {
                "image/height": np.array([image.height]),
                "image/width": np.array([image.width]),
                "image/channels": np.array([3]),
                "image/colorspace": [b"RGB"],
                "image/class/label": np.array([item.label]),
                "image/class/synset": [item.synset.encode()],
                "image/class/text": [item.text.encode()],
                **dict(zip(BOX_SIDES, item.boxes.T, strict=True)),
                "image/object/bbox/label": np.full(len(item.boxes), item.label),
                "image/format": [b"JPEG"],
                "image/filename": [os.fsencode(Path(item.path).name)],
                "image/encoded": [image.encoded],
            }
            file.write(encode_record(write_example(features)))
            records += 1
            repaired += image.repaired
        file.flush()
        os.fsync(file.fileno())
        size, checksum = digest_file(unfinished, "sha256")
    return Shard(size, checksum.removeprefix("sha256:"), records, repaired, tuple(skipped))


def read_manifest(folder: str | Path) -> dict[str, PartManifest]:
    """The parts by name; empty where there is no manifest; DataError where it cannot be understood."""
    path = Path(folder) / MANIFEST
    parts = {}
    try:
        body = load_json(path)
        if body["program"] != "hotloop" or body["format"] != _FORMAT:
            raise DataError(f"{path}: not a manifest that this version reads; move it away to build anew")
        for name, part in body["parts"].items():
            shards = {}
            for file, shard in part["shards"].items():
                found = _pick(shard, bytes=int, sha256=str, records=int, repaired=int, skipped=list)
                if not all(type(image) is str for image in found["skipped"]):
                    raise TypeError("an image without a name")
                shards[file] = Shard(**{**found, "skipped": tuple(found["skipped"])})
            parts[name] = PartManifest(**_pick(part, plan=str, images=int, total=int), shards=shards)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: damaged; move it away to build anew") from None
    return parts


def _pick(body: Any, **kinds: type) -> dict[str, Any]:
    """These entries of a JSON object; KeyError or TypeError where one is missing or of another kind."""
    for name, kind in kinds.items():
        if type(body[name]) is not kind:
            raise TypeError(f"{name} is no {kind.__name__}")
    return {name: body[name] for name in kinds}


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
