"""`hotloop cnn data-benchmark`: images a second of the input pipeline alone, without a network behind it.

Small sets are timed as they are used: gathered and augmented in a compiled loop on the device, or, without
--accelerator-side-preprocess, batch by batch in numpy. ImageNet is timed from the records to the batches that are
sent to the device, which always normalises photographs itself.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hotloop.data import load
from hotloop.data.dataset import LabelledImages
from hotloop.engine.feed import Resident
from hotloop.engine.keys import sample_keys
from hotloop.engine.order import Order
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.cnn.command_options import BenchmarkConfig
from hotloop.families.cnn.images import augment, crop_and_flip, draw_crops_on_host, is_cifar, preprocess
from hotloop.families.cnn.options import DATASET_SIZES
from hotloop.families.cnn.sources import PhotoBatches, count_workers, evaluation_batches, open_store
from hotloop.families.cnn.workers import HostBatch, PhotoReader, Workers
from hotloop.rehearsal import begin_work

_WARM_UP = 2

Epoch = Callable[[int], int]
"""Goes through epoch number n and returns how many images that was."""


def run(config: BenchmarkConfig, console: Console) -> Mapping[str, Any]:
    """Time each epoch, drop those that warm up, and say images a second."""
    rates = []
    with _pipeline(config, console) as (epoch, bound), console.progress("epochs", config.num_epochs) as bar:
        begin_work("reading images")
        for number in range(config.num_epochs):
            started = time.perf_counter()
            images = epoch(number)
            rates.append(images / (time.perf_counter() - started))
            bar.advance()
    kept = rates[min(_WARM_UP, config.num_epochs - 1) :]
    console.say(f"{config.dataset} {config.split}, {bound}: throughput: {mean(kept):.1f} samples/sec")
    return {
        "dataset": config.dataset,
        "pipeline": bound,
        "images_per_second": mean(kept),
        "epochs": rates,
        "warm_up_epochs": len(rates) - len(kept),
    }


@contextmanager
def _pipeline(config: BenchmarkConfig, console: Console) -> Iterator[tuple[Epoch, str]]:
    if config.synthetic_data:
        if config.synthetic_data == "device":
            console.warn("--synthetic-data device: nothing would be left to time; taken as host")
        yield _batchwise(config, lambda number: _synthetic_batches(config)), "synthetic on the host"
    elif config.dataset == "imagenet":
        with _photograph_pipeline(config, console) as pipeline:
            yield pipeline
    else:
        split = _small(config, console)
        if config.accelerator_side_preprocess:
            yield _on_device(config, split), "on the device"
        else:
            yield _batchwise(config, lambda number: _on_host(config, split, number)), "on the host"


def _batchwise(config: BenchmarkConfig, batches: Callable[[int], Iterator[HostBatch]]) -> Epoch:
    def epoch(number: int) -> int:
        images = 0
        for count, batch in enumerate(batches(number), 1):
            images += len(_finished(config, batch)["label"])
            if count == config.batches_per_epoch:
                break
        return images

    return epoch


def _finished(config: BenchmarkConfig, batch: HostBatch) -> HostBatch:
    """What is left for the host to do with a batch of a small set: normalise it and give it the compute type."""
    if config.accelerator_side_preprocess or config.dataset == "imagenet":
        return batch
    return {**batch, "image": preprocess(config.dataset, batch["image"]).astype(_type(config))}


def _type(config: BenchmarkConfig) -> Any:
    return np.float32 if config.precision == "32.32" else np.float16


def _synthetic_batches(config: BenchmarkConfig) -> Iterator[HostBatch]:
    """One made-up image and label over and over: grey levels around 127 with a spread of 60, cut at two spreads."""
    noise = np.random.default_rng(config.seed).standard_normal(DATASET_SIZES[config.dataset].shape)
    image = np.clip(127 + 60 * np.clip(noise, -2, 2), 0, 255).astype(np.uint8)
    size = config.micro_batch_size
    for _ in range(config.batches_per_epoch or max(1, 4096 // size)):
        yield {"image": np.repeat(image[None], size, 0), "label": np.zeros(size, np.int32)}


@contextmanager
def _photograph_pipeline(config: BenchmarkConfig, console: Console) -> Iterator[tuple[Epoch, str]]:
    assert config.dataset_path is not None  # the config has seen to it
    training = config.split == "train"
    store = open_store(config.dataset_path, "train" if training else "validation")
    workers = count_workers(config.pipeline_num_parallel)
    reader = PhotoReader(
        store, training, config.seed, eight_bit=config.eight_bit_transfer, skip_corrupt=config.skip_corrupt
    )
    size = config.micro_batch_size
    order = Order(len(store), size, config.seed, "drop") if training else None
    with Workers(reader, workers, config.workers, console.warn) as decoding:

        def batches(number: int) -> Iterator[HostBatch]:
            if order is None:
                return evaluation_batches(decoding, size)
            count = order.period // size
            return PhotoBatches(decoding, order).batches(number * count, config.batches_per_epoch or count)

        yield _batchwise(config, batches), f"{workers} {decoding.kind}, {store.source}"


def _small(config: BenchmarkConfig, console: Console) -> LabelledImages:
    dataset = load(config.dataset, config.dataset_path, say=console.say)
    split = dataset.train if config.split == "train" else dataset.test
    if len(split) < config.micro_batch_size:
        raise DataError(
            f"{config.dataset}: {len(split)} {config.split} images do not fill --micro-batch-size "
            f"{config.micro_batch_size}"
        )
    return split


def _on_host(config: BenchmarkConfig, split: LabelledImages, number: int) -> Iterator[HostBatch]:
    order = Order(len(split), config.micro_batch_size, config.seed, "drop")
    first = number * (order.period // order.batch_size)
    generator = np.random.default_rng((config.seed, number))
    for step in range(order.period // order.batch_size):
        rows = order.indices(order.start(first + step), np.zeros(1, np.uint32))[0]
        images: NDArray[Any] = split.images[rows]
        if config.split == "train" and is_cifar(config.dataset):
            images = crop_and_flip(images, draw_crops_on_host(generator, len(rows)))
        yield {"image": images, "label": split.labels[rows]}


def _on_device(config: BenchmarkConfig, split: LabelledImages) -> Epoch:
    """One compiled call an epoch; each batch's sum goes into the carry, so that none can be left out."""
    size = config.micro_batch_size

    def transform(batch: Any, key: Any) -> Any:
        if config.split == "train":
            return augment(config.dataset, batch, sample_keys(key, 0, size)).astype(_type(config))
        return preprocess(config.dataset, batch).astype(_type(config))

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
