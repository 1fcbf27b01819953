"""`hotloop cnn build-records`, `verify`, `data-benchmark`: image sets made, checked; the input pipeline timed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hotloop.data import build_records, load
from hotloop.data.build_records import Build, read_manifest, shard_fault
from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, Dataset, LabelledImages
from hotloop.data.image_stores import (
    ImageStore,
    Part,
    RecordSet,
    check_images,
    is_record_folder,
    list_shards,
    part_folder,
)
from hotloop.data.jpeg_rows import name_decoder
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.data.own_images import open_own_images
from hotloop.data.resample import name_resampler
from hotloop.engine import processes
from hotloop.engine.feed import Order, Resident
from hotloop.engine.keys import sample_keys
from hotloop.engine.loading import check_same_data, load_once
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.cnn.command_options import BenchmarkConfig, BuildConfig, VerifyConfig
from hotloop.families.cnn.images import CIFAR, augment, crop_and_flip, draw_crops_on_host, preprocess
from hotloop.families.cnn.options import DATASET_SIZES, FOLDER
from hotloop.families.cnn.photographs import HostBatch, PhotoReader, Workers
from hotloop.families.cnn.sources import (
    PhotoBatches,
    count_workers,
    evaluation_batches,
    open_store,
)
from hotloop.machine import usable_cores
from hotloop.options import expand_path
from hotloop.rehearsal import begin_work

IMAGENET = DATASET_SIZES["imagenet"]._asdict()
MOST_SHOWN = 1000  # faults that are named one by one
WARM_UP = 2  # epochs that do not count, where there are more
_PARTS: tuple[Part, ...] = ("train", "validation")
Epoch = Callable[[int], int]  # goes through epoch number n and returns how many images that was


def run_build(config: BuildConfig, console: Console) -> Mapping[str, Any]:
    """Make the shards that are still missing, and say what is in all of them."""
    build = Build(
        source=config.source,
        out=config.out,
        shards={"train": config.train_shards, "validation": config.validation_shards},
        texts=config.synset_texts,
        boxes=config.boxes,
        skip_corrupt=config.skip_corrupt,
        hold_out=config.hold_out,
        workers=config.workers or usable_cores(),
    )
    parts = build_records.plan_build(build)
    if kept := sum(len(part.manifest.shards) for part in parts):
        console.say(f"{config.out}: {kept:,} finished shards are whole and are kept")
    with console.progress("images", sum(len(items) for part in parts for _, items in part.tasks)) as bar:
        manifests = build_records.run_build(build, parts, bar.advance)
    shards = {part.part: manifests[part.part].shards.values() for part in parts}
    result = {
        part: {
            "shards": len(made),
            "images": sum(shard.records for shard in made),
            "repaired": sum(shard.repaired for shard in made),
            "skipped": sum(len(shard.skipped) for shard in made),
        }
        for part, made in shards.items()
    }
    columns = ("shards", "images", "repaired", "skipped")
    rows = [[part, *(f"{each[key]:,}" for key in columns)] for part, each in result.items()]
    console.table(["part", *columns], rows)
    for made in shards.values():
        for text in (text for shard in made for text in shard.skipped):
            console.warn(f"skipped {text}")
    return {"folder": str(config.out), "parts": result}


def run_verify(config: VerifyConfig, console: Console) -> Mapping[str, Any]:
    """Count the images of each part and look for broken ones; DataError when there are any."""
    folder, name = config.dataset_path, config.dataset
    if name not in DATASET_SIZES:
        return _verify_own(config, folder if name == FOLDER and folder else expand_path(name), console)
    if name != "imagenet":
        check_named_folders(folder)
        if find_set(known_set(name), folder) is None:
            raise DataError(f"{name}: not on this machine; `hotloop data fetch {name}` brings it")
        begin_work(f"reading {name}")
        dataset = load(name, folder, say=console.say)
        counts = {"train": len(dataset.train), "test": len(dataset.test)}
        whole = dict(zip(counts, IMAGE_SETS[name], strict=True))
        rows = [[part, f"{counts[part]:,}", f"{whole[part]:,}"] for part in counts]
        console.table(["part", "images", "expected"], rows)
        for part, count in counts.items():
            if count != whole[part]:
                console.warn(f"{name} {part}: {count:,} images, the whole set has {whole[part]:,}")
        counted = {part: {"images": count, "expected": whole[part]} for part, count in counts.items()}
        return {"dataset": name, "source": dataset.source, "parts": counted}
    assert folder is not None  # the config has seen to it
    if is_record_folder(folder):
        names = {*(path.name.partition("-")[0] for path in folder.iterdir()), *read_manifest(folder)}
        parts = [part for part in _PARTS if part in names]
    else:  # where there are none, opening the first one says what is expected
        parts = [part for part in _PARTS if part_folder(folder, part)] or ["train"]
    begin_work(f"reading {folder}")
    result = {part: _verify_part(config, folder, part, console) for part in parts}
    console.table(
        ["part", "images", "expected", "broken"],
        [
            [part, f"{each['images']:,}", f"{IMAGENET[part]:,}", f"{len(each['broken']):,}"]
            for part, each in result.items()
        ],
    )
    _refuse_broken(folder, [text for each in result.values() for text in each["broken"]], console)
    return {"dataset": config.dataset, "folder": str(folder), "parts": result}


def _refuse_broken(folder: Path, broken: list[str], console: Console) -> None:
    """Name them; DataError where there are any."""
    for text in broken[:MOST_SHOWN]:
        console.warn(text)
    if len(broken) > MOST_SHOWN:
        console.warn(f"and {len(broken) - MOST_SHOWN:,} more")
    if broken:
        raise DataError(f"{folder}: {len(broken):,} broken, first {broken[0]}")


def _verify_own(config: VerifyConfig, folder: Path, console: Console) -> Mapping[str, Any]:
    """One's own images: what a training would see, each of them read, and with --decode decoded."""
    own = open_own_images(folder)
    begin_work(f"reading {folder}")
    console.say(own.describe())
    broken: list[str] = []
    stores: dict[Part, ImageStore] = {"train": own.train, "validation": own.validation}
    if is_record_folder(folder):
        stores = {part: RecordSet(folder, part, check=config.checksums) for part in _PARTS}
    for part, store in stores.items():
        with console.progress(f"{part} images", len(store)) as bar:
            broken += check_images(
                store, decoding=config.decode, workers=config.workers or usable_cores(), advance=bar.advance
            )
    counts = {part: {"images": len(store)} for part, store in stores.items()}
    console.table(["part", "images"], [[part, f"{each['images']:,}"] for part, each in counts.items()])
    _refuse_broken(folder, broken, console)
    return {"dataset": FOLDER, "folder": str(folder), "classes": own.classes, "parts": counts}


def _verify_part(config: VerifyConfig, folder: Path, part: Part, console: Console) -> dict[str, Any]:
    broken: list[str] = []
    if is_record_folder(folder):
        if not any(folder.glob(f"{part}-*")):
            lost = f"{folder}: no {part} shard is there, and manifest.json names some"
            return {"images": 0, "source": str(folder), "broken": [lost]}
        store: ImageStore = RecordSet(folder, part, check=config.checksums, faults=broken)
        # Shards that are not as their builder wrote them; a set without manifest passes.
        if config.checksums and (manifest := read_manifest(folder).get(part)):
            unfinished = [path for path in list_shards(folder, part, []) if path.name not in manifest.shards]
            broken += [f"{path}: not in manifest.json: the build is unfinished" for path in unfinished]
            faults = {name: shard_fault(folder / name, shard) for name, shard in manifest.shards.items()}
            broken += [f"{folder / name}: {fault}" for name, fault in faults.items() if fault]
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


def run_benchmark(config: BenchmarkConfig, console: Console) -> Mapping[str, Any]:
    """Time each epoch, drop those that warm up, and say images a second: of all processes together, each of which reads
    its own share of every batch."""
    rates = []
    with ExitStack() as stack:
        epoch, bound = _open_pipeline(config, console, stack)
        bar = stack.enter_context(console.progress("epochs", config.num_epochs))
        begin_work("reading images")
        for number in range(config.num_epochs):
            processes.barrier("epoch")
            started = time.perf_counter()
            images = epoch(number)
            rates.append(sum(processes.gathered(images / (time.perf_counter() - started))))
            bar.advance()
    kept = rates[min(WARM_UP, config.num_epochs - 1) :]
    together = "" if processes.count() == 1 else f", {processes.count()} processes together"
    speed = f"throughput: {mean(kept):.1f} samples/sec"
    console.say(f"{config.dataset} {config.split}, {bound}{together}: {speed}")
    return {
        "dataset": config.dataset,
        "pipeline": bound,
        "processes": processes.count(),
        "images_per_second": mean(kept),
        "epochs": rates,
        "warm_up_epochs": len(rates) - len(kept),
    }


def _open_pipeline(config: BenchmarkConfig, console: Console, stack: ExitStack) -> tuple[Epoch, str]:
    """What goes through an epoch, and where it does that."""
    size = config.micro_batch_size
    if config.synthetic_data:
        if config.synthetic_data == "device":
            console.warn("--synthetic-data device: nothing would be left to time; taken as host")
        # One image over and over: grey levels around 127 with a spread of 60, cut at two spreads.
        noise = np.random.default_rng(config.seed).standard_normal(DATASET_SIZES[config.dataset].shape)
        image = np.clip(127 + 60 * np.clip(noise, -2, 2), 0, 255).astype(np.uint8)

        def same(number: int) -> Iterator[HostBatch]:
            for _ in range(config.batches_per_epoch or max(1, 4096 // size)):
                yield {"image": np.repeat(image[None], size, 0), "label": np.zeros(size, np.int32)}

        return _batchwise(config, same), "synthetic on the host"
    if config.dataset == "imagenet":
        return _photographs(config, console, stack)
    dataset = load_once(partial(load, config.dataset, config.dataset_path, say=console.say), Dataset)
    split = dataset.train if config.split == "train" else dataset.test
    if len(split) < size * processes.count():
        raise DataError(
            f"{config.dataset}: {len(split)} {config.split} images do not fill --micro-batch-size {size}"
        )
    if config.accelerator_side_preprocess:
        return _on_device(config, split), "on the device"
    return _batchwise(config, partial(_on_host, config, split)), "on the host"


def _batchwise(config: BenchmarkConfig, batches: Callable[[int], Iterator[HostBatch]]) -> Epoch:
    """Batches of small sets still have to be normalised by the host and get the compute type."""
    is_finished = config.accelerator_side_preprocess or config.dataset == "imagenet"
    dtype = np.float32 if config.precision == "32.32" else np.float16

    def epoch(number: int) -> int:
        images = 0
        for batch in islice(batches(number), config.batches_per_epoch):
            images += len(batch["label"])
            if not is_finished:
                preprocess(config.dataset, batch["image"]).astype(dtype)
        return images

    return epoch


def _photographs(config: BenchmarkConfig, console: Console, stack: ExitStack) -> tuple[Epoch, str]:
    assert config.dataset_path is not None  # the config has seen to it
    training = config.split == "train"
    part: Part = "train" if training else "validation"
    store = processes.once_a_host(partial(open_store, config.dataset_path, part))
    check_same_data(photographs=len(store))
    reader = PhotoReader(
        store, training, config.seed, eight_bit=config.eight_bit_transfer, skip_corrupt=config.skip_corrupt
    )
    size, rows = config.micro_batch_size * processes.count(), _own_rows(config)
    workers = count_workers(config.pipeline_num_parallel)
    order = Order(len(store), size, config.seed, "drop") if training else None
    decoding = stack.enter_context(Workers(reader, workers, config.workers, console.warn))

    def batches(number: int) -> Iterator[HostBatch]:
        if order is None:
            return evaluation_batches(decoding, size, rows)
        count = order.period // size
        return PhotoBatches(decoding, order).batches(number * count, config.batches_per_epoch or count, rows)

    how = f"{workers} {decoding.kind}, {name_decoder()}, {name_resampler()}, {store.source}"
    return _batchwise(config, batches), how


def _own_rows(config: BenchmarkConfig) -> slice:
    """This process's rows of a batch of all processes together."""
    return slice(first := processes.index() * config.micro_batch_size, first + config.micro_batch_size)


def _on_host(config: BenchmarkConfig, split: LabelledImages, number: int) -> Iterator[HostBatch]:
    order = Order(len(split), config.micro_batch_size * processes.count(), config.seed, "drop")
    first = number * (order.period // order.batch_size)
    generator = np.random.default_rng((config.seed, number))
    for step in range(order.period // order.batch_size):
        rows = order.indices(order.start(first + step), np.zeros(1, np.uint32))[0][_own_rows(config)]
        images: NDArray[Any] = split.images[rows]
        if config.split == "train" and config.dataset in CIFAR:
            images = crop_and_flip(images, draw_crops_on_host(generator, len(rows)))
        yield {"image": images, "label": split.labels[rows]}


def _on_device(config: BenchmarkConfig, split: LabelledImages) -> Epoch:
    """One compiled call an epoch; each batch's sum goes into the carry, so that none can be left out."""
    size, dtype = config.micro_batch_size, np.float32 if config.precision == "32.32" else np.float16

    def transform(batch: Any, key: Any) -> Any:
        if config.split == "train":
            return augment(config.dataset, batch, sample_keys(key, 0, size)).astype(dtype)
        return preprocess(config.dataset, batch).astype(dtype)

    feed = Resident(split.images, size, seed=config.seed, remainder="drop", transform=transform)
    count = min(config.batches_per_epoch or len(split), len(split) // size)

    @jax.jit
    def call(arguments: Any) -> Any:
        def body(step: Any, total: Any) -> Any:
            return total + jnp.sum(feed.batch(arguments, step.astype(jnp.uint32)), dtype=jnp.float32)

        return jax.lax.fori_loop(0, count, body, jnp.float32(0))

    compiled = call.lower(feed.arguments(0, count)).compile()

    def epoch(number: int) -> int:
        compiled(feed.arguments(number * count, count)).block_until_ready()
        return count * size

    return epoch
