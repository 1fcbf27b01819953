"""`--dataset DIR`: a folder of the user's own images, how large it is, and its pixels where they stay on the device.

A set whose pixels fit (`--resident-mib`) is decoded once: for training the middle square of each image, somewhat larger
than what the network sees, of which the device cuts random parts; for validation what it sees. A larger one is streamed
as photographs are. Whatever no training could use is refused before anything is compiled.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import file_errors
from hotloop.data.dataset import Dataset, LabelledImages
from hotloop.data.image_stores import EncodedImage, ImageStore, ListedImages
from hotloop.data.jpeg import ImageError, check_header, open_image
from hotloop.data.jpeg_rows import read_rows
from hotloop.data.own_images import OwnImages, open_own_images
from hotloop.data.resample import SamplingGrid, resample
from hotloop.engine.progress import Console
from hotloop.errors import DataError
from hotloop.families.cnn.options import DATASET_SIZES, FOLDER, DatasetSize, TrainConfig
from hotloop.families.cnn.photographs import SHORT_SIDE, SIZE, evaluation_image

SMALL_SIDE = 32  # of what other networks than resnets see, unless --image-size says something else
_PART = 64  # images that a thread is given at once
Decode = Callable[[EncodedImage], NDArray[np.float32]]


def expected_size(config: TrainConfig) -> DatasetSize:
    """What the images of a configuration are, as far as it can be known before they are read."""
    return own_size(config, open_own_images(config.dataset_path)) if is_own(config) else _known(config)


def _known(config: TrainConfig) -> DatasetSize:
    return DATASET_SIZES[config.dataset]


def is_own(config: TrainConfig) -> bool:
    return config.dataset == FOLDER


def own_size(config: TrainConfig, own: OwnImages) -> DatasetSize:
    side = config.image_size or (SIZE if config.model_name.startswith("resnet") else SMALL_SIDE)
    return DatasetSize(len(own.train), len(own.validation), (side, side, 3), len(own.classes))


def stored_side(side: int) -> int:
    """Of the squares that random parts are cut from: as much larger as validation's photographs are."""
    return SHORT_SIDE * side // SIZE


def pixel_bytes(size: DatasetSize) -> int:
    """Of a whole set on the device."""
    kept = stored_side(size.shape[0])
    return size.train * kept * kept * 3 + size.validation * prod(size.shape)


def is_resident(config: TrainConfig, size: DatasetSize) -> bool:
    return pixel_bytes(size) <= config.resident_mib << 20


def square_image(image: EncodedImage, size: int) -> NDArray[np.float32]:
    """The middle square of the image, all of its short side, [size, size, 3] from 0 to 255.

    Where it is halved (quartered, ...) at least, the JPEG decoder does that: faster, and smoother than leaving out
    pixels.
    """
    opened = open_image(image.encoded)
    width, height = opened.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    wanted = next((factor for factor in (8, 4, 2) if factor <= short // size), 1)
    pixels, factor = read_rows(opened, image.encoded, height, wanted)
    left, top = ((start - (factor - 1) / 2) / factor for start in (left, top))
    step = short / size / factor
    return resample(pixels, SamplingGrid(left, top, step, step), size)


def decode_own(config: TrainConfig, own: OwnImages, workers: int, console: Console) -> Dataset:
    """The whole set as bytes; DataError names an image that is broken, unless such are to be left out."""
    side = own_size(config, own).shape[0]
    kept = stored_side(side)
    with console.progress("decoding images", len(own.train) + len(own.validation)) as bar:

        def read(store: ImageStore, size: int, decode: Decode) -> LabelledImages:
            return _decode(
                store, size, decode, workers, console if config.skip_corrupt else None, bar.advance
            )

        train = read(own.train, kept, lambda image: square_image(image, kept))
        test = read(own.validation, side, lambda image: evaluation_image(image, side))
    return Dataset(
        name=FOLDER, source=f"files at {own.folder}", classes=len(own.classes), train=train, test=test
    )


def _decode(
    store: ImageStore,
    size: int,
    decode: Decode,
    workers: int,
    skipping: Console | None,
    advance: Callable[[int], None],
) -> LabelledImages:
    """Every image of a store; broken ones are left out, and named, by the console that is there for it."""
    images, labels = np.empty((len(store), size, size, 3), np.uint8), np.empty(len(store), np.int32)
    broken: list[tuple[int, str]] = []

    def fill(first: int) -> int:
        last = min(first + _PART, len(store))
        for number in range(first, last):
            encoded = store.read(number)
            labels[number] = encoded.label
            try:
                images[number] = decode(encoded)
            except ImageError as error:
                fault = f"{encoded.where}: corrupt image ({error})"
                if skipping is None:
                    raise DataError(f"{fault}; --skip-corrupt leaves such images out") from None
                broken.append((number, fault))
        return last - first

    with ThreadPoolExecutor(workers, "hotloop-decode") as pool:
        futures = [pool.submit(fill, first) for first in range(0, len(store), _PART)]
        try:
            for future in futures:
                advance(future.result())
        finally:
            pool.shutdown(cancel_futures=True)
    if not broken:
        return LabelledImages(images, labels)
    for _, fault in sorted(broken):
        assert skipping is not None
        skipping.warn(f"left out {fault}")
    whole = np.setdiff1d(np.arange(len(store)), [number for number, _ in broken])
    if not len(whole):
        raise DataError(f"{sorted(broken)[0][1]}; every image is broken: the set is unusable")
    return LabelledImages(images[whole], labels[whole])


def check_headers(store: ImageStore, workers: int, advance: Callable[[int], None]) -> None:
    """DataError for a file that is no image at all: a run that streams should not end by it after hours.

    Only headers are read. Records were decoded when they were built.
    """
    if not isinstance(store, ListedImages):
        return

    def look(first: int) -> int:
        last = min(first + _PART, len(store))
        for path in map(store.path, range(first, last)):
            try:
                with file_errors(path):
                    check_header(path)
            except ImageError as error:
                fault = f"{path}: corrupt image ({error})"
                raise DataError(f"{fault}; --skip-corrupt lets others take its place") from None
        return last - first

    with ThreadPoolExecutor(workers, "hotloop-look") as pool:
        for count in pool.map(look, range(0, len(store), _PART)):
            advance(count)
