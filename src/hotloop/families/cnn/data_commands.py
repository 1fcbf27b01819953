"""`hotloop cnn build-records` and `verify`: image sets made, counted and checked.

Words and tables around `hotloop.data`; timing the input pipeline is in `data_benchmark`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.data import build_records, load
from hotloop.data.build_records import Build
from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS
from hotloop.data.image_stores import (
    ImageStore,
    Part,
    RecordSet,
    check_images,
    is_record_folder,
    list_shards,
    part_folder,
)
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.data.shards import PartManifest, read_manifest, shard_fault
from hotloop.engine.device import usable_cores
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.cnn.command_options import BuildConfig, VerifyConfig
from hotloop.families.cnn.options import DATASET_SIZES
from hotloop.families.cnn.sources import open_store
from hotloop.rehearsal import begin_work

IMAGENET = DATASET_SIZES["imagenet"]._asdict()
MOST_TOLD = 1000
"""Faults that are told one by one."""
_PARTS: tuple[Part, ...] = ("train", "validation")


def run_build(config: BuildConfig, console: Console) -> Mapping[str, Any]:
    """Make the shards that are still missing, and say what is in all of them."""
    build = Build(
        source=config.source,
        out=config.out,
        shards={"train": config.train_shards, "validation": config.validation_shards},
        texts=config.synset_texts,
        boxes=config.boxes,
        skip_corrupt=config.skip_corrupt,
        workers=config.workers or usable_cores(),
    )
    parts = build_records.plan_build(build)
    if kept := sum(len(part.manifest.shards) for part in parts):
        console.say(f"{config.out}: {kept:,} finished shards are whole and are kept")
    with console.progress("images", sum(part.images for part in parts)) as bar:
        manifests = build_records.run_build(build, parts, bar.advance)
    result = {part.part: _summary(manifests[part.part]) for part in parts}
    console.table(
        ["part", "shards", "images", "repaired", "skipped"],
        [
            [part, *(f"{each[key]:,}" for key in ("shards", "images", "repaired", "skipped"))]
            for part, each in result.items()
        ],
    )
    for text in [
        text for part in parts for shard in manifests[part.part].shards.values() for text in shard.skipped
    ]:
        console.warn(f"skipped {text}")
    return {"folder": str(config.out), "parts": result}


def _summary(manifest: PartManifest) -> dict[str, int]:
    made = manifest.shards.values()
    return {
        "shards": len(made),
        "images": sum(shard.records for shard in made),
        "repaired": sum(shard.repaired for shard in made),
        "skipped": sum(len(shard.skipped) for shard in made),
    }


def run_verify(config: VerifyConfig, console: Console) -> Mapping[str, Any]:
    """Count the images of each part and look for broken ones; DataError when there are any."""
    if config.dataset != "imagenet":
        return _verify_small(config, console)
    assert config.dataset_path is not None  # the config has seen to it
    result = {}
    parts = _parts_of(config.dataset_path)
    begin_work(f"reading {config.dataset_path}")
    for part in parts:
        result[part] = _verify_part(config, config.dataset_path, part, console)
    console.table(
        ["part", "images", "expected", "broken"],
        [
            [part, f"{each['images']:,}", f"{IMAGENET[part]:,}", f"{len(each['broken']):,}"]
            for part, each in result.items()
        ],
    )
    broken = [text for each in result.values() for text in each["broken"]]
    for text in broken[:MOST_TOLD]:
        console.warn(text)
    if len(broken) > MOST_TOLD:
        console.warn(f"and {len(broken) - MOST_TOLD:,} more")
    if broken:
        raise DataError(f"{config.dataset_path}: {len(broken):,} broken, first {broken[0]}")
    return {"dataset": config.dataset, "folder": str(config.dataset_path), "parts": result}


def _parts_of(folder: Path) -> list[Part]:
    """The parts that are or were there; where there are none, opening the first one says what is expected."""
    if is_record_folder(folder):
        names = {*(path.name.partition("-")[0] for path in folder.iterdir()), *read_manifest(folder)}
        return [part for part in _PARTS if part in names]
    return [part for part in _PARTS if part_folder(folder, part)] or ["train"]


def _verify_part(config: VerifyConfig, folder: Path, part: Part, console: Console) -> dict[str, Any]:
    broken: list[str] = []
    if is_record_folder(folder):
        if not any(folder.glob(f"{part}-*")):
            lost = f"{folder}: no {part} shard is there, and manifest.json names some"
            return {"images": 0, "source": str(folder), "broken": [lost]}
        store: ImageStore = RecordSet(folder, part, check=config.checksums, faults=broken)
        broken += _against_manifest(folder, part) if config.checksums else []
    else:
        store = open_store(folder, part)
    if config.checksums or config.decode:
        with console.progress(f"{part} images", len(store)) as bar:
            broken += check_images(
                store, decoding=config.decode, workers=config.workers or usable_cores(), advance=bar.advance
            )
    if len(store) != IMAGENET[part]:
        console.warn(f"{part}: {len(store):,} images, ImageNet has {IMAGENET[part]:,}")
    return {"images": len(store), "source": store.source, "broken": broken}


def _against_manifest(folder: Path, part: Part) -> list[str]:
    """Shards that are not as their builder wrote them; a set without manifest passes."""
    manifest = read_manifest(folder).get(part)
    if manifest is None:
        return []
    unfinished = [path for path in list_shards(folder, part, []) if path.name not in manifest.shards]
    wrong = [f"{path}: not in manifest.json: the build is unfinished" for path in unfinished]
    reasons = {name: shard_fault(folder / name, shard) for name, shard in manifest.shards.items()}
    return wrong + [f"{folder / name}: {reason}" for name, reason in reasons.items() if reason]


def _verify_small(config: VerifyConfig, console: Console) -> Mapping[str, Any]:
    check_named_folders(config.dataset_path)
    if find_set(known_set(config.dataset), config.dataset_path) is None:
        raise DataError(
            f"{config.dataset}: not on this machine; `hotloop data fetch {config.dataset}` brings it"
        )
    begin_work(f"reading {config.dataset}")
    dataset = load(config.dataset, config.dataset_path, say=console.say)
    counts = {"train": len(dataset.train), "test": len(dataset.test)}
    expected = dict(zip(counts, IMAGE_SETS[config.dataset], strict=True))
    console.table(
        ["part", "images", "expected"],
        [[part, f"{counts[part]:,}", f"{expected[part]:,}"] for part in counts],
    )
    for part, count in counts.items():
        if count != expected[part]:
            console.warn(f"{config.dataset} {part}: {count:,} images, the whole set has {expected[part]:,}")
    parts = {part: {"images": count, "expected": expected[part]} for part, count in counts.items()}
    return {"dataset": config.dataset, "source": dataset.source, "parts": parts}
