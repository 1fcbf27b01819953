"""Where a run's images come from: small sets kept on the device, photographs streamed, or synthetic ones.

Files are opened before anything is compiled. The random crop of a photograph depends on the seed, the epoch and its
number alone, so that a run that is resumed, or that makes its calls in other sizes, sees the same pixels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from hotloop.data.dataset import Dataset, LabelledImages
from hotloop.data.image_stores import (
    ImageFolder,
    ImageStore,
    Part,
    RecordSet,
    is_image_folder,
    is_record_folder,
)
from hotloop.data.jpeg import pillow
from hotloop.data.load import load
from hotloop.engine.batch_sources import ShuffledBatches, Streamed
from hotloop.engine.device import REPLICA, usable_cores
from hotloop.engine.feed import Feed, Order, Resident, gather_rows, placement_like
from hotloop.engine.loop import Evaluation, PerSample, Sums, evaluate_batches
from hotloop.engine.progress import Console, advance_through
from hotloop.engine.split import SPLIT
from hotloop.errors import DataError
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.options import DATASET_SIZES, DatasetSize, TrainConfig
from hotloop.families.cnn.workers import MISSING, HostBatch, PhotoReader, WantedImages, Workers

SYNTHETIC_MEAN, SYNTHETIC_DEVIATION = 127, 60  # of pixels
SYNTHETIC_IMAGES = 256  # that differ, at most: they are for measuring speed, and take memory
NO_PHOTOGRAPHS = "there is no ImageNet here (name its folder by --dataset-path): "


class ImageSource(ABC):
    """Images to train and to validate with; `repeated` as a `Job` has it."""

    size: DatasetSize
    notice: str = ""
    repeated: bool = False

    @abstractmethod
    def feed(self, job: Job) -> Feed: ...

    @abstractmethod
    def evaluation(self, fn: PerSample, batch_size: int) -> Callable[[Any], Sums]:
        """state -> sums of `fn` over every validation image."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        pass


def open_source(config: TrainConfig, console: Console, seed: int) -> ImageSource:
    if config.synthetic_data is not None:
        return SyntheticImages(
            DATASET_SIZES[config.dataset], seed, on_device=config.synthetic_data == "device"
        )
    if config.dataset == "imagenet":
        if config.dataset_path == Path() and not (is_record_folder(Path()) or is_image_folder(Path())):
            return SyntheticImages(DATASET_SIZES["imagenet"], seed, on_device=True, why=NO_PHOTOGRAPHS)
        with console.progress("opening photographs"):
            return StreamedPhotographs(config, console, seed)
    with console.progress("loading images"):
        return ResidentImages(load(config.dataset, folder_of(config), console.say, console.progress))


def folder_of(config: TrainConfig) -> Path | None:
    """The folder that the user gave, if any."""
    return None if config.dataset_path == Path() else config.dataset_path


def _sharding(job: Job) -> NamedSharding | None:
    return None if job.mesh is None else NamedSharding(job.mesh, SPLIT)


def _columns(split: LabelledImages) -> dict[str, NDArray[Any]]:
    return {"image": split.images, "label": split.labels}


class ResidentImages(ImageSource):
    """A set that lives on the device."""

    def __init__(self, data: Dataset):
        self._data, self.notice = data, data.notice
        height, width, channels = data.train.images.shape[1:]
        self.size = DatasetSize(len(data.train), len(data.test), (height, width, channels), data.classes)

    def feed(self, job: Job) -> Feed:
        return Resident(
            _columns(self._data.train),
            job.batch.global_,
            seed=job.config.seed or 0,
            shuffled=job.shuffled,
            sharding=_sharding(job),
        )

    def evaluation(self, fn: PerSample, batch_size: int) -> Callable[[Any], Sums]:
        return Evaluation(fn, _columns(self._data.test), batch_size)


class StreamedPhotographs(ImageSource):
    """ImageNet: records or folders, decoded by workers."""

    def __init__(self, config: TrainConfig, console: Console, seed: int):
        self._workers: list[Workers] = []
        self._feed: Streamed | None = None
        self._config, self._console, self._seed = config, console, seed
        self._count = min(config.pipeline_num_parallel, usable_cores())
        pillow()  # the workers need it: without it there should be no run
        self._train = open_store(config.dataset_path, "train") if config.training else None
        self._validation = open_store(config.dataset_path, "validation") if config.validation else None
        whole = DATASET_SIZES["imagenet"]
        for store in (self._train, self._validation):
            if store is not None and store.classes > whole.classes:
                raise DataError(
                    f"--dataset-path {config.dataset_path}: {store.classes:,} classes, but the network has "
                    f"{whole.classes:,}: leave some of them out"
                )
        self.size = whole._replace(
            train=whole.train if self._train is None else len(self._train),
            validation=whole.validation if self._validation is None else len(self._validation),
        )
        counts = [f"{len(store):,}" for store in (self._train, self._validation) if store is not None]
        found = f"{' + '.join(counts)} photographs"
        console.say(f"data: imagenet, {found}, files at {config.dataset_path}, {self._count} workers")

    def _open(self, store: Any, training: bool) -> Workers:
        if store is None:
            raise DataError("there are no images for this phase")
        eight_bit, skip_corrupt = self._config.eight_bit_transfer, self._config.skip_corrupt
        reader = PhotoReader(store, training, self._seed, eight_bit=eight_bit, skip_corrupt=skip_corrupt)
        self._workers.append(Workers(reader, self._count, on_skip=self._console.warn))
        return self._workers[-1]

    def feed(self, job: Job) -> Feed:
        size, workers = job.batch.global_, self._open(self._train, True)
        order = Order(len(workers.reader.store), size, self._seed, shuffled=job.shuffled)
        batches = PhotoBatches(workers, order)
        self._feed = Streamed(batches, size, seed=self._seed, sharding=_sharding(job))
        return self._feed

    def evaluation(self, fn: PerSample, batch_size: int) -> Callable[[Any], Sums]:
        workers = self._open(self._validation, False)

        def run(state: Any) -> Sums:
            with self._console.progress("photographs", -(-self.size.validation // batch_size)) as bar:
                batches = advance_through(evaluation_batches(workers, batch_size), bar)
                return evaluate_batches(fn, state, batches, batch_size)

        return run

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        for workers in self._workers:
            workers.close()
        if skipped := sum(workers.skipped for workers in self._workers):
            self._console.warn(
                f"--skip-corrupt: {skipped} broken images (training replaced them, validation left them out)"
            )


class SyntheticImages(ImageSource):
    """Random images and labels of a set's shape: on the device one micro-batch for all, or sent by the host.

    Which image comes at which place of a global batch does not depend on how the batch is split.
    """

    def __init__(self, size: DatasetSize, seed: int, on_device: bool, why: str = ""):
        self.size, self._seed, self.repeated = size, seed, on_device
        self.notice = f"{why}the images are made up: neither loss nor accuracy means anything"

    def _draw(self, count: int) -> dict[str, NDArray[Any]]:
        generator = np.random.default_rng(self._seed)
        shape = (count, *self.size.shape)
        pixels = np.clip(
            SYNTHETIC_DEVIATION * generator.standard_normal(shape, np.float32) + SYNTHETIC_MEAN, 0, 255
        )
        return {
            "image": pixels.astype(np.uint8),
            "label": generator.integers(0, self.size.classes, count, np.int32),
        }

    def feed(self, job: Job) -> Feed:
        """The same micro-batch for every update, or batches streamed from a few that lie in memory."""
        batch = job.batch
        if self.repeated:
            for_all = {name: np.tile(values, (batch.replicas, *[1] * (values.ndim - 1)))
                       for name, values in self._draw(batch.micro).items()}  # fmt: skip
            sharding = _sharding(job)
            on_device = jax.device_put(for_all, placement_like(sharding, (REPLICA,)))
            return RepeatedBatch(on_device, batch.global_, sharding)
        kept = self._draw(SYNTHETIC_IMAGES)

        def fetch(indices: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
            return {name: values[indices % len(values)] for name, values in kept.items()}

        samples, sharding = self.size.train, _sharding(job)
        return Streamed(fetch, batch.global_, seed=self._seed, samples=samples, sharding=sharding)

    def evaluation(self, fn: PerSample, batch_size: int) -> Callable[[Any], Sums]:
        """As many samples as the set would have."""
        batch_size = min(batch_size, self.size.validation)

        def gather(data: Any, indices: Array) -> Any:
            return gather_rows(data, indices % SYNTHETIC_IMAGES)

        return Evaluation(
            fn, self._draw(SYNTHETIC_IMAGES), batch_size, samples=self.size.validation, gather=gather
        )


@dataclass(eq=False)
class RepeatedBatch:
    """A feed that hands every update the same arrays, which stay on the device."""

    data: Any
    batch_size: int
    sharding: NamedSharding | None = None
    any_count = True
    longest_call = 2**30

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        return self.data

    def like(self, count: int) -> Any:
        return self.data

    def batch(self, arguments: Any, step: Array) -> Any:
        return arguments

    def position(self, update: int) -> dict[str, Any]:
        return {"made_up": True}

    def check_position(self, saved: Mapping[str, Any]) -> None:
        pass  # nothing moves


def open_store(folder: Path, part: Part) -> ImageStore:
    """The images of one part: TFRecord shards, or class folders."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the one with the image set by --dataset-path")
    if is_record_folder(folder):
        return RecordSet(folder, part)
    if is_image_folder(folder):
        return ImageFolder(folder, part)
    raise DataError(
        f"{folder}: neither TFRecord shards (train-00000-of-01024) nor image folders (train/CLASS/*.jpg)"
    )


class PhotoBatches(ShuffledBatches):
    """Batches of decoded photographs, in the order of `Order`."""

    def __init__(self, workers: Workers, order: Order):
        super().__init__(lambda numbers: None, order)
        self._workers = workers

    def example(self) -> HostBatch:
        """An empty batch: nothing need be decoded to see its form."""
        reader, size = self._workers.reader, self._order.batch_size
        pixels = np.empty((size, reader.size, reader.size, 3), reader.dtype)
        return {"image": pixels, "label": np.empty(size, np.int32)}

    def batches(self, first: int, count: int) -> Iterator[HostBatch]:
        """The batches of updates first .. first + count - 1."""
        order = self._order

        def wanted(update: int) -> WantedImages:
            places = update * order.batch_size + np.arange(order.batch_size)
            return order.indices(order.start(update), np.zeros(1, np.uint32))[0], places // order.period

        return self._workers.batches(map(wanted, range(first, first + count)))


def evaluation_batches(workers: Workers, batch_size: int) -> Iterator[HostBatch]:
    """Every image once, in order, less those that are missing; batches, and the last one, may be smaller."""
    count = len(workers.reader.store)
    starts = range(0, count, batch_size)
    spans = (np.arange(start, min(start + batch_size, count)) for start in starts)
    for batch in workers.batches((span, np.zeros(len(span), np.int64)) for span in spans):
        there = batch["label"] != MISSING
        if there.any():
            yield batch if there.all() else {name: leaf[there] for name, leaf in batch.items()}
