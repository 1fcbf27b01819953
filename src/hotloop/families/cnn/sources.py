"""Where a run's images come from: small sets kept on the device, photographs streamed, own ones either, or synthetic.

Files are opened before anything is compiled. The random crop of a photograph depends on the seed, the epoch and its
number alone, so that a run that is resumed, or that makes its calls in other sizes, sees the same pixels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from hotloop.data.dataset import Dataset
from hotloop.data.image_stores import (
    ImageFolder,
    ImageStore,
    Part,
    RecordSet,
    is_image_folder,
    is_record_folder,
)
from hotloop.data.jpeg import pillow
from hotloop.data.jpeg_rows import name_decoder
from hotloop.data.load import load
from hotloop.data.own_images import open_own_images
from hotloop.data.resample import name_resampler
from hotloop.engine import processes
from hotloop.engine.batch_sources import ShuffledBatches, Streamed
from hotloop.engine.device import REPLICA
from hotloop.engine.feed import Feed, Order, Resident, fill_up, gather_rows, placement_like
from hotloop.engine.loading import check_same_data, load_once
from hotloop.engine.loop import Evaluation, PerSample, Sums, evaluate_batches
from hotloop.engine.progress import Console, advance_through
from hotloop.errors import DataError
from hotloop.families.cnn.job import Job
from hotloop.families.cnn.options import DATASET_SIZES, DatasetSize, TrainConfig
from hotloop.families.cnn.own_folder import (
    check_headers,
    decode_own,
    expected_size,
    is_own,
    is_resident,
    own_size,
    pixel_bytes,
)
from hotloop.families.cnn.photographs import (
    MISSING,
    UNSEEN,
    HostBatch,
    PhotoReader,
    WantedImages,
    Workers,
)
from hotloop.machine import usable_cores

SYNTHETIC_MEAN, SYNTHETIC_DEVIATION = 127, 60  # of pixels
SYNTHETIC_IMAGES = 256  # that differ, at most: they are for measuring speed, and take memory


class MakeEvaluation(Protocol):
    """A function of a state: the sums of `fn` over every validation image. The devices of the sharding (None: one
    device) share each batch."""

    def __call__(
        self, fn: PerSample, batch_size: int, sharding: NamedSharding | None = None
    ) -> Callable[[Any], Sums]: ...


@dataclass(frozen=True)
class ImageSource:
    """Images to train and to validate with; `repeated` as a `Job` has it."""

    size: DatasetSize
    feed: Callable[[Job], Feed]
    evaluation: MakeEvaluation
    notice: str = ""
    repeated: bool = False
    classes: tuple[str, ...] = ()  # the names of one's own, in the order of the labels


@contextmanager
def open_source(config: TrainConfig, console: Console, seed: int) -> Iterator[ImageSource]:
    if config.synthetic_data is not None:
        on_device = config.synthetic_data == "device"
        yield synthetic_images(expected_size(config), seed, on_device=on_device)
    elif is_own(config):
        with open_own(config, console, seed) as source:
            yield source
    elif config.dataset != "imagenet":
        with console.progress("loading images"):
            loading = partial(load, config.dataset, folder_of(config), console.say, console.progress)
            data = load_once(loading, Dataset)
        yield resident_images(data)
    elif folder_of(config) is None and not (is_record_folder(Path()) or is_image_folder(Path())):
        why = "there is no ImageNet here (name its folder by --dataset-path): "
        yield synthetic_images(DATASET_SIZES["imagenet"], seed, on_device=True, why=why)
    else:
        with stream_photographs(config, console, seed) as source:
            yield source


def folder_of(config: TrainConfig) -> Path | None:
    """The folder that the user gave, if any."""
    return None if config.dataset_path == Path() else config.dataset_path


@contextmanager
def open_own(config: TrainConfig, console: Console, seed: int) -> Iterator[ImageSource]:
    """The user's own images, on the device or streamed."""
    pillow()
    own = processes.once_a_host(partial(open_own_images, config.dataset_path))
    check_same_data(classes=list(own.classes), images=[len(own.train), len(own.validation)])
    size, workers = own_size(config, own), count_workers(config.pipeline_num_parallel)
    mib = pixel_bytes(size) / 2**20
    if is_resident(config, size):
        console.say(f"data: {own.describe()}; {mib:,.1f} MiB of pixels, decoded once, stay on the device")
        data = load_once(partial(decode_own, config, own, workers, console), Dataset)
        found = resident_images(data)
        yield replace(found, size=found.size._replace(shape=size.shape), classes=own.classes)
        return
    more = f"{mib:,.1f} MiB of pixels, more than --resident-mib {config.resident_mib}"
    console.say(
        f"data: {own.describe()}; {more}: streamed by {workers} workers, {name_decoder()}, {name_resampler()}"
    )
    if not config.skip_corrupt:
        with console.progress("looking at images", size.train + size.validation) as bar:
            check_headers(own.train, workers, bar.advance)
            check_headers(own.validation, workers, bar.advance)
    with stream_stores(config, console, seed, size, own.train, own.validation) as source:
        yield replace(source, classes=own.classes)


def resident_images(data: Dataset) -> ImageSource:
    """A set that lives on the device."""
    train, test = ({"image": split.images, "label": split.labels} for split in (data.train, data.test))

    def feed(job: Job) -> Feed:
        seed, shuffled = job.config.seed or 0, job.shuffled
        return Resident(train, job.batch.global_, seed=seed, shuffled=shuffled, sharding=job.sharding)

    height, width, channels = data.train.images.shape[1:]
    size = DatasetSize(len(data.train), len(data.test), (height, width, channels), data.classes)

    def evaluation(
        fn: PerSample, batch_size: int, sharding: NamedSharding | None = None
    ) -> Callable[[Any], Sums]:
        return Evaluation(fn, test, batch_size, sharding=sharding)

    return ImageSource(size, feed, evaluation, data.notice)


@contextmanager
def stream_photographs(config: TrainConfig, console: Console, seed: int) -> Iterator[ImageSource]:
    """ImageNet: records or folders, decoded by workers."""
    count = count_workers(config.pipeline_num_parallel)
    whole = DATASET_SIZES["imagenet"]
    with console.progress("opening photographs"):
        pillow()  # the workers need it: without it there should be no run
        train, validation = processes.once_a_host(partial(_open_parts, config))
        there = [store for store in (train, validation) if store is not None]
        check_same_data(photographs=[len(store) for store in there])
        for store in there:
            if store.classes > whole.classes:
                raise DataError(
                    f"--dataset-path {config.dataset_path}: {store.classes:,} classes, but the network has "
                    f"{whole.classes:,}: leave some of them out"
                )
        found = f"{' + '.join(f'{len(store):,}' for store in there)} photographs"
        workers = f"{count} workers, {name_decoder()}, {name_resampler()}"
        console.say(f"data: imagenet, {found}, files at {config.dataset_path}, {workers}")
    size = whole._replace(
        train=whole.train if train is None else len(train),
        validation=whole.validation if validation is None else len(validation),
    )
    with stream_stores(config, console, seed, size, train, validation) as source:
        yield source


@contextmanager
def stream_stores(
    config: TrainConfig,
    console: Console,
    seed: int,
    size: DatasetSize,
    train: ImageStore | None,
    validation: ImageStore | None,
) -> Iterator[ImageSource]:
    """Images that are decoded by workers as they are needed; None for a phase that has none."""
    count, side = count_workers(config.pipeline_num_parallel), size.shape[0]
    opened: list[Workers] = []

    def say_skipped(of_all: Callable[[int], list[int]]) -> None:
        if skipped := sum(of_all(sum(workers.skipped for workers in opened))):
            console.warn(
                f"--skip-corrupt: {skipped} broken images (training replaced them, validation left them out)"
            )

    def decode(store: ImageStore | None, training: bool) -> Workers:
        if store is None:
            raise DataError("there are no images for this phase")
        # One's own are bytes on the device, too, where they stay there.
        eight_bit, skip_corrupt = config.eight_bit_transfer or is_own(config), config.skip_corrupt
        reader = PhotoReader(store, training, seed, side, eight_bit, skip_corrupt)
        opened.append(stack.enter_context(Workers(reader, count, on_skip=console.warn)))
        return opened[-1]

    def feed(job: Job) -> Feed:
        workers = decode(train, True)
        order = Order(size.train, job.batch.global_, seed, shuffled=job.shuffled)
        batches = PhotoBatches(workers, order, find_seen(config, job.sharding, order.batch_size))
        return stack.enter_context(Streamed(batches, order.batch_size, seed=seed, sharding=job.sharding))

    def evaluation(
        fn: PerSample, batch_size: int, sharding: NamedSharding | None = None
    ) -> Callable[[Any], Sums]:
        workers = decode(validation, False)
        filled = fill_up(sharding, batch_size)
        rows, seen = processes.own_rows(sharding, filled), find_seen(config, sharding, filled)

        def run(state: Any) -> Sums:
            with console.progress("photographs", -(-size.validation // filled)) as bar:
                batches = advance_through(evaluation_batches(workers, filled, rows, seen), bar)
                return evaluate_batches(fn, state, batches, filled, sharding)

        return run

    try:
        with ExitStack() as stack:
            yield ImageSource(size, feed, evaluation)
    except BaseException:
        say_skipped(lambda own: [own])  # others may not come to be asked
        raise
    say_skipped(processes.gathered)


def _open_parts(config: TrainConfig) -> tuple[ImageStore | None, ImageStore | None]:
    """The images of both phases; None for one that there is not. Records are indexed, and the index is kept."""
    train = open_store(config.dataset_path, "train") if config.training else None
    return train, open_store(config.dataset_path, "validation") if config.validation else None


def synthetic_images(size: DatasetSize, seed: int, on_device: bool, why: str = "") -> ImageSource:
    """Random images and labels of a set's shape: on the device one micro-batch for all, or sent by the host.

    Which image comes at which place of a global batch does not depend on how replicas and accumulation split it. Sent
    by the host it does not depend on the micro-batch either; on the device another micro-batch has other images.
    Validation has as many samples as the set would have.
    """

    def draw(count: int) -> dict[str, NDArray[Any]]:
        generator = np.random.default_rng(seed)
        words = generator.integers(0, 2**16, (count, *size.shape), np.uint16)
        return {
            "image": _pixel_of_word()[words],
            "label": generator.integers(0, size.classes, count, np.int32),
        }

    def feed(job: Job) -> Feed:
        batch, sharding = job.batch, job.sharding
        if on_device:
            # Of the micro-batch that was asked for: replicas that share statistics may have become a larger one.
            repeats = batch.replicas * batch.micro // job.asked.micro
            for_all = {name: np.tile(values, (repeats, *[1] * (values.ndim - 1)))
                       for name, values in draw(job.asked.micro).items()}  # fmt: skip
            return RepeatedBatch(
                processes.place(for_all, placement_like(sharding, (REPLICA,))), batch.global_
            )
        kept = draw(SYNTHETIC_IMAGES)

        def fetch(indices: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
            return {name: values[indices % SYNTHETIC_IMAGES] for name, values in kept.items()}

        return Streamed(fetch, batch.global_, seed=seed, samples=size.train, sharding=sharding)

    def evaluation(
        fn: PerSample, batch_size: int, sharding: NamedSharding | None = None
    ) -> Callable[[Any], Sums]:
        def gather(data: Any, indices: Array) -> Any:
            return gather_rows(data, indices % SYNTHETIC_IMAGES)

        kept = draw(SYNTHETIC_IMAGES)
        return Evaluation(fn, kept, batch_size, samples=size.validation, gather=gather, sharding=sharding)

    notice = f"{why}the images are made up: neither loss nor accuracy means anything"
    return ImageSource(size, feed, evaluation, notice, repeated=on_device)


def _pixel_of_word() -> NDArray[np.uint8]:
    """The normal pixel of each 16-bit word, cut off at black and white. To look pixels up takes a sixth of the
    time of drawing normal numbers, for which the first update of 512 images of 224 x 224 would wait."""
    from scipy.special import ndtri

    shares = (np.arange(2**16) + 0.5) / 2**16
    pixels: NDArray[np.float64] = SYNTHETIC_MEAN + SYNTHETIC_DEVIATION * ndtri(shares)
    return np.clip(pixels, 0, 255).astype(np.uint8)


class RepeatedBatch:
    """A feed that hands every update the same arrays, which stay on the device."""

    any_count = True
    longest_call = 2**30

    def __init__(self, data: Any, batch_size: int):
        self.data, self.batch_size = data, batch_size

    def arguments(self, first: int, count: int, following: int = 0) -> Any:
        return self.data

    def like(self, count: int) -> Any:
        return self.data

    def batch(self, arguments: Any, step: Any) -> Any:
        return arguments

    def position(self, update: int) -> dict[str, bool]:
        return {"made_up": True}

    def check_position(self, saved: Any) -> None:
        """Nothing moves, so every position is this one."""


def count_workers(most: int) -> int:
    """Workers that decode in this process: one for each processor, which the processes of a machine share."""
    return max(1, min(most, usable_cores() // len(processes.on_this_host())))


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

    def __init__(self, workers: Workers, order: Order, seen: NDArray[np.bool_] | None = None):
        """Of the rows that `batches` is asked for, those that are not `seen` come as labels alone (None: all are)."""
        super().__init__(lambda numbers: None, order)
        self._workers, self._seen = workers, seen

    def example(self) -> HostBatch:
        """An empty batch: nothing need be decoded to see its form."""
        reader, size = self._workers.reader, self._order.batch_size
        pixels = np.empty((size, reader.size, reader.size, 3), reader.dtype)
        return {"image": pixels, "label": np.empty(size, np.int32)}

    def batches(self, first: int, count: int, rows: slice = slice(None)) -> Iterator[HostBatch]:
        """The batches of updates first .. first + count - 1, or these rows of them."""
        order = self._order

        def wanted(update: int) -> WantedImages:
            places = update * order.batch_size + np.arange(order.batch_size)[rows]
            numbers = order.indices(order.start(update), np.zeros(1, np.uint32))[0][rows]
            return numbers, _unless_seen(self._seen, places // order.period)

        return self._workers.batches(map(wanted, range(first, first + count)))


def _unless_seen(seen: NDArray[np.bool_] | None, epochs: NDArray[Any]) -> NDArray[Any]:
    return epochs if seen is None else np.where(seen[: len(epochs)], epochs, UNSEEN)


def find_seen(
    config: TrainConfig, sharding: NamedSharding | None, batch_size: int
) -> NDArray[np.bool_] | None:
    """Which of this process's rows of a batch it must decode: those whose first stage it has; None for all.

    With --skip-corrupt it is all: whether an image is broken, and another's label counts, only its decoding tells. With
    --mixup or --cutmix, too: others' images go into those of the first stage.
    """
    seen = processes.first_stage_rows(sharding, batch_size)
    is_every = config.skip_corrupt or config.mixup or config.cutmix
    return None if is_every or seen.all() else seen


def evaluation_batches(
    workers: Workers,
    batch_size: int,
    rows: slice = slice(None),
    seen: NDArray[np.bool_] | None = None,
) -> Iterator[HostBatch]:
    """The rows `rows` of every batch: together each image once, in order, less those that are missing. Batches, and the
    last one, may be smaller; one that has no image left is passed over, unless others may have rows of it. Those that
    are not `seen` come as labels alone."""
    count = len(workers.reader.store)
    every = (np.arange(start, start + batch_size)[rows] for start in range(0, count, batch_size))
    spans = [span[span < count] for span in every]
    reader = workers.reader
    wanted = ((span, _unless_seen(seen, np.zeros(len(span), np.int64))) for span in spans if len(span))
    for batch in workers.batches(wanted):
        there = batch["label"] != MISSING
        if there.any() or rows != slice(None):
            yield batch if there.all() else {name: leaf[there] for name, leaf in batch.items()}
    missing = sum(not len(span) for span in spans)  # the last batches may have no rows for somebody
    for _ in range(missing):
        pixels = np.empty((0, reader.size, reader.size, 3), reader.dtype)
        yield {"image": pixels, "label": np.empty(0, np.int32)}
