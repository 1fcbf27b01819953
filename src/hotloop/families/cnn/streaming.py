"""ImageNet as a feed: photographs decoded by workers while the device computes, in the engine's order.

The random crop of an image depends on the seed, the epoch and the image's number alone, so that a run that is
resumed, or that makes its calls in other sizes, sees the same pixels. Record sets and image folders are both taken.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jax.sharding import NamedSharding

from hotloop.data.image_stores import (
    ImageFolder,
    ImageStore,
    Part,
    RecordSet,
    is_image_folder,
    is_record_folder,
)
from hotloop.engine.batch_sources import ShuffledBatches
from hotloop.engine.device import usable_cores
from hotloop.engine.feed import Streamed
from hotloop.engine.order import Order, Remainder
from hotloop.errors import DataError
from hotloop.families.cnn.reading import MISSING
from hotloop.families.cnn.workers import Batch, Wanted, Workers


def open_store(
    folder: Path, part: Part, *, instance: int = 0, instances: int = 1, check: bool = False
) -> ImageStore:
    """The images of one part (and one instance's share of it): TFRecord shards, or class folders.

    With `check`, every record is compared with its checksum when it is read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the one with the image set by --dataset-path")
    if is_record_folder(folder):
        return RecordSet(folder, part, instance=instance, instances=instances, check=check)
    if is_image_folder(folder):
        return ImageFolder(folder, part, instance=instance, instances=instances)
    raise DataError(
        f"{folder}: neither TFRecord shards (train-00000-of-01024) nor image folders (train/CLASS/*.jpg)"
    )


def default_workers(asked: int) -> int:
    """Workers to use: no more than asked for, and one for each processor."""
    return min(asked, usable_cores())


class PhotoSource(ShuffledBatches):
    """Batches of decoded photographs, in the order of `Order`."""

    def __init__(self, workers: Workers, order: Order):
        super().__init__(lambda numbers: None, order)
        self._workers = workers

    def example(self) -> Batch:
        """An empty batch: nothing need be decoded to see its form."""
        reading, size = self._workers.reading, self._order.batch_size
        pixels = np.empty((size, reading.size, reading.size, 3), reading.dtype)
        return {"image": pixels, "label": np.empty(size, np.int32)}

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """The batches of updates first .. first + count - 1."""
        return self._workers.batches(self._wanted(first + step) for step in range(count))

    def _wanted(self, update: int) -> Wanted:
        order = self._order
        places = update * order.batch_size + np.arange(order.batch_size)
        return order.indices(order.start(update), np.zeros(1, np.uint32))[0], places // order.period


class PhotoFeed(Streamed):
    """`engine.feed.Streamed` over photographs; closing it ends the workers too."""

    def __init__(
        self,
        workers: Workers,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        remainder: Remainder = "carry",
        sharding: NamedSharding | None = None,
    ):
        order = Order(len(workers.reading.store), batch_size, seed, remainder, shuffle)
        super().__init__(PhotoSource(workers, order), batch_size, seed=seed, sharding=sharding)
        self._workers = workers

    def close(self) -> None:
        """End the thread and the workers."""
        super().close()
        self._workers.close()


def evaluation_batches(workers: Workers, batch_size: int) -> Iterator[Batch]:
    """Every image once, in order, less those that are missing; batches, and the last one, may be smaller."""
    count = len(workers.reading.store)
    starts = range(0, count, batch_size)
    spans = (np.arange(start, min(start + batch_size, count)) for start in starts)
    for batch in workers.batches((span, np.zeros(len(span), np.int64)) for span in spans):
        there = batch["label"] != MISSING
        if there.any():
            yield batch if there.all() else {name: leaf[there] for name, leaf in batch.items()}
