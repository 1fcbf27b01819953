"""Where a run's images come from: small sets kept on the device, photographs streamed, or made-up ones.

A `Source` says what the data are and makes the training feed and the evaluation. Files are opened here, before
anything is compiled. It knows neither networks nor updates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from hotloop.data.dataset import Dataset, LabelledImages
from hotloop.data.image_stores import is_image_folder, is_record_folder
from hotloop.data.jpeg import pillow
from hotloop.data.load import load
from hotloop.engine.device import REPLICA
from hotloop.engine.evaluate import Evaluation, PerSample, Sums, evaluate_batches
from hotloop.engine.feed import Feed, Resident, Streamed, gather_rows, placement_like
from hotloop.engine.progress import Console, advance_through
from hotloop.engine.split import SPLIT
from hotloop.errors import DataError
from hotloop.families.cnn.config import Train
from hotloop.families.cnn.reading import Reading
from hotloop.families.cnn.settings import SAMPLES, Samples, Settings
from hotloop.families.cnn.streaming import PhotoFeed, default_workers, evaluation_batches, open_store
from hotloop.families.cnn.workers import Workers

Evaluate = Callable[[Any], Sums]
BRIGHT, SPREAD = 127, 60
"""Mean and deviation of made-up pixels."""
DIFFERENT = 256
"""Made-up images that differ, at most: they are for measuring speed, and take memory."""
NO_PHOTOGRAPHS = "there is no ImageNet here (name its folder by --dataset-path): "


class Source(Protocol):
    """Images to train and to validate with."""

    samples: Samples
    notice: str
    repeated: bool

    def feed(self, settings: Settings, mesh: Mesh | None) -> Feed:
        """Batches of the training."""

    def evaluation(self, fn: PerSample, batch_size: int) -> Evaluate:
        """state -> sums of `fn` over every validation image."""

    def close(self) -> None:
        """Let go of files and workers."""


def open_source(config: Train, console: Console, seed: int) -> Source:
    """The images that the options ask for."""
    if config.synthetic_data is not None:
        return MadeUp(SAMPLES[config.dataset], seed, on_device=config.synthetic_data == "device")
    if config.dataset == "imagenet":
        if config.dataset_path == Path() and not (is_record_folder(Path()) or is_image_folder(Path())):
            return MadeUp(SAMPLES["imagenet"], seed, on_device=True, why=NO_PHOTOGRAPHS)
        with console.progress("opening photographs"):
            return Photographs(config, console, seed)
    with console.progress("loading images"):
        return Small(load(config.dataset, folder_of(config), console.say, console.progress))


def folder_of(config: Train) -> Path | None:
    """The folder that the user gave, if any."""
    return None if config.dataset_path == Path() else config.dataset_path


def _spread(mesh: Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, SPLIT)


def _named(split: LabelledImages) -> dict[str, NDArray[Any]]:
    return {"image": split.images, "label": split.labels}


class Small:
    """A set that lives on the device."""

    repeated = False

    def __init__(self, data: Dataset):
        self._data, self.notice = data, data.notice
        height, width, channels = data.train.images.shape[1:]
        self.samples = Samples(len(data.train), len(data.test), (height, width, channels), data.classes)

    def feed(self, settings: Settings, mesh: Mesh | None) -> Feed:
        """Batches gathered inside the loop."""
        return Resident(
            _named(self._data.train),
            settings.batch.global_,
            seed=settings.seed or 0,
            shuffled=settings.shuffle,
            sharding=_spread(mesh),
        )

    def evaluation(self, fn: PerSample, batch_size: int) -> Evaluate:
        """One compiled pass."""
        return Evaluation(fn, _named(self._data.test), batch_size)

    def close(self) -> None:
        """Nothing is open."""


class Photographs:
    """ImageNet: records or folders, decoded by workers."""

    repeated = False
    notice = ""

    def __init__(self, config: Train, console: Console, seed: int):
        self._workers: list[Workers] = []
        self._count = default_workers(config.pipeline_num_parallel)
        self._seed, self._eight_bit, self._warn = seed, config.eight_bit_transfer, console.warn
        self._skip_corrupt, self._progress = config.skip_corrupt, console.progress
        pillow()  # the workers need it: without it there should be no run
        self._train = open_store(config.dataset_path, "train") if config.training else None
        self._validation = open_store(config.dataset_path, "validation") if config.validation else None
        whole = SAMPLES["imagenet"]
        for store in (self._train, self._validation):
            if store is not None and store.classes > whole.classes:
                raise DataError(
                    f"--dataset-path {config.dataset_path}: {store.classes:,} classes, but the network has "
                    f"{whole.classes:,}: leave some of them out"
                )
        self.samples = Samples(
            len(self._train) if self._train is not None else whole.train,
            len(self._validation) if self._validation is not None else whole.validation,
            whole.shape,
            whole.classes,
        )
        counts = [f"{len(store):,}" for store in (self._train, self._validation) if store is not None]
        found = f"{' + '.join(counts)} photographs"
        console.say(f"data: imagenet, {found}, files at {config.dataset_path}, {self._count} workers")

    def _open(self, store: Any, training: bool) -> Workers:
        if store is None:
            raise DataError("there are no images for this phase")
        reading = Reading(
            store, training, self._seed, eight_bit=self._eight_bit, skip_corrupt=self._skip_corrupt
        )
        self._workers.append(Workers(reading, self._count, on_skip=self._warn))
        return self._workers[-1]

    def feed(self, settings: Settings, mesh: Mesh | None) -> Feed:
        """Batches a call ahead of the device."""
        return PhotoFeed(
            self._open(self._train, True),
            settings.batch.global_,
            seed=self._seed,
            shuffle=settings.shuffle,
            sharding=_spread(mesh),
        )

    def evaluation(self, fn: PerSample, batch_size: int) -> Evaluate:
        """Batches from the host, every image once."""

        workers = self._open(self._validation, False)

        def run(state: Any) -> Sums:
            with self._progress("photographs", -(-self.samples.validation // batch_size)) as bar:
                batches = advance_through(evaluation_batches(workers, batch_size), bar)
                return evaluate_batches(fn, state, batches, batch_size)

        return run

    def close(self) -> None:
        """End all workers."""
        for workers in self._workers:
            workers.close()
        if skipped := sum(workers.skipped for workers in self._workers):
            self._warn(
                f"--skip-corrupt: {skipped} broken images (training replaced them, validation left them out)"
            )


class MadeUp:
    """Random images and labels of a set's shape: on the device one micro-batch for all, or sent by the host.

    Which image comes at which place of a global batch does not depend on how the batch is split.
    """

    def __init__(self, samples: Samples, seed: int, on_device: bool, why: str = ""):
        self.samples, self._seed, self.repeated = samples, seed, on_device
        self.notice = f"{why}the images are made up: neither loss nor accuracy means anything"

    def _drawn(self, count: int) -> dict[str, NDArray[Any]]:
        generator = np.random.default_rng(self._seed)
        shape = (count, *self.samples.shape)
        pixels = np.clip(SPREAD * generator.standard_normal(shape, np.float32) + BRIGHT, 0, 255)
        return {
            "image": pixels.astype(np.uint8),
            "label": generator.integers(0, self.samples.classes, count, np.int32),
        }

    def feed(self, settings: Settings, mesh: Mesh | None) -> Feed:
        """The same micro-batch for every update, or batches streamed from a few that lie in memory."""
        batch = settings.batch
        if self.repeated:
            for_all = {name: np.tile(values, (batch.replicas, *[1] * (values.ndim - 1)))
                       for name, values in self._drawn(batch.micro).items()}  # fmt: skip
            return Same(for_all, batch.global_, _spread(mesh))
        kept = self._drawn(DIFFERENT)

        def fetch(indices: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
            return {name: values[indices % len(values)] for name, values in kept.items()}

        return Streamed(
            fetch,
            batch.global_,
            seed=self._seed,
            samples=self.samples.train,
            sharding=_spread(mesh),
        )

    def evaluation(self, fn: PerSample, batch_size: int) -> Evaluate:
        """As many samples as the set would have."""
        size = min(batch_size, self.samples.validation)

        def gather(data: Any, indices: Array) -> Any:
            return gather_rows(data, indices % DIFFERENT)

        return Evaluation(fn, self._drawn(DIFFERENT), size, samples=self.samples.validation, gather=gather)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(eq=False)
class Same:
    """A feed that hands every update the same arrays, which stay on the device."""

    data: Any
    batch_size: int
    sharding: NamedSharding | None = None
    any_count = True
    longest_call = 2**30

    def __post_init__(self) -> None:
        self.data = jax.device_put(self.data, placement_like(self.sharding, (REPLICA,)))

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        """The arrays."""
        return self.data

    def like(self, count: int) -> Any:
        """The arrays."""
        return self.data

    def batch(self, arguments: Any, step: Array) -> Any:
        """All of them."""
        return arguments

    def position(self, update: int) -> dict[str, Any]:
        """Nothing moves."""
        return {"made_up": True}

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Any place will do."""
