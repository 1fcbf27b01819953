"""Loads a set by name: from files, else fetched, else a procedural stand-in that says that it is one.

A folder that the user gave is never answered with a stand-in: what is missing there is an error. This is the
door of the data room; the readers behind it know one format each.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from hotloop.data.catalogue import KnownSet, known_set
from hotloop.data.dataset import IMAGE_SETS, BinaryImages, Dataset, RatingSet, binarise, read_images
from hotloop.data.fetch import FetchError, Progress, fetch, no_progress
from hotloop.data.image_formats import read_amat
from hotloop.data.local_files import LocalSet, check_named_folders, find_set, is_loadable, look_in
from hotloop.data.ratings import read_ratings
from hotloop.data.stand_ins import stand_in_images, stand_in_ratings
from hotloop.errors import DataError

Say = Callable[[str], None]
_RATINGS, _BINARISED = "movielens-100k", "binarised_mnist"
_VALIDATION_SHARE = 6
"""One in so many training images of a binarised set is kept for validation: of MNIST's 60,000 the last 10,000."""


def to_stderr(text: str) -> None:
    """The default voice: nobody must miss that a stand-in runs."""
    print(text, file=sys.stderr)


def load(
    name: str, data_dir: str | Path | None = None, say: Say = to_stderr, progress: Progress = no_progress
) -> Dataset:
    """Labelled images: mnist, fashion_mnist, cifar10 or cifar100."""
    known = _check_fits(name, tuple(IMAGE_SETS))
    try:
        _, found = _locate((known,), data_dir, progress)
    except FetchError as error:
        dataset = stand_in_images(known.name, error.why)
        say(dataset.notice)
        return dataset
    dataset = read_images(known, found)
    train, test = counts = len(dataset.train), len(dataset.test)
    whole = IMAGE_SETS[known.name]
    part = "" if counts == whole else f" (a part of the {whole[0]:,} + {whole[1]:,})"
    say(f"data: {known.name}, {train:,} + {test:,} images{part}, {dataset.source}")
    return dataset


def load_ratings(
    name: str = _RATINGS,
    data_dir: str | Path | None = None,
    say: Say = to_stderr,
    progress: Progress = no_progress,
) -> RatingSet:
    """Ratings: movielens-100k."""
    known = _check_fits(name, (_RATINGS,))
    try:
        _, found = _locate((known,), data_dir, progress)
    except FetchError as error:
        stand_in = stand_in_ratings(known.name, error.why)
        say(stand_in.notice)
        return stand_in
    ratings = read_ratings(found.files["u.data"])
    source = f"files at {found.folder}"
    say(f"data: {known.name}, {len(ratings):,} ratings, {source}")
    return RatingSet(name=known.name, source=source, ratings=ratings)


def load_binarised(
    data_dir: str | Path | None = None, say: Say = to_stderr, progress: Progress = no_progress
) -> BinaryImages:
    """Binarised MNIST: the published bits, else MNIST binarised here, else procedural digits binarised."""
    published, mnist = known_set(_BINARISED), known_set("mnist")
    try:
        known, found = _locate((published, mnist), data_dir, progress)
    except FetchError as error:
        stand_in = binarise_dataset(stand_in_images(_BINARISED, error.why))
        say(stand_in.notice)
        return stand_in
    if known is mnist:
        images = binarise_dataset(read_images(mnist, found))
        say(
            f"data: {mnist.name}, {images.source}, binarised here: the published set's distribution, other bits"
        )
        return images
    train, validation, test = (read_amat(found.files[file.name]) for file in published.files)
    source = f"files at {found.folder}"
    say(f"data: {_BINARISED}, {len(train):,} + {len(validation):,} + {len(test):,} images, {source}")
    return BinaryImages(name=_BINARISED, source=source, train=train, validation=validation, test=test)


def binarise_dataset(grey: Dataset) -> BinaryImages:
    """Grey images made zeros and ones once and for all; the last training images become the validation set."""
    train = binarise(grey.train.images, seed=0)
    keep = len(train) - len(train) // _VALIDATION_SHARE
    return BinaryImages(
        name=grey.name,
        source=grey.source,
        stand_in=grey.stand_in,
        notice=grey.notice,
        train=train[:keep],
        validation=train[keep:],
        test=binarise(grey.test.images, seed=1),
    )


def _check_fits(name: str, names: tuple[str, ...]) -> KnownSet:
    known = known_set(name)
    if known.name in names:
        return known
    if known.expected:
        raise DataError(f"{known.name}: not fetched ({known.licence}) and not read by this command yet")
    raise DataError(f"{known.name}: does not fit here; use one of {', '.join(names)}")


def _locate(
    choices: tuple[KnownSet, ...], data_dir: str | Path | None, progress: Progress
) -> tuple[KnownSet, LocalSet]:
    """The first of the sets that is here, else the first that can be fetched.

    FetchError where neither is so, but a plain DataError when the user named the folder.
    """
    data_dir = None if data_dir is None else Path(data_dir)
    check_named_folders(data_dir)
    for known in choices:
        found = find_set(known, data_dir)
        if found and is_loadable(known, found):
            return known, found
    failure: FetchError | None = None
    for known in choices:
        try:
            folder = fetch(known, data_dir, progress).folder
            found = look_in(known, folder)
            assert found is not None  # fetch has just verified it
            return known, found
        except FetchError as error:
            failure = failure or error
    assert failure is not None
    if data_dir is not None:
        raise DataError(f"data_dir={data_dir}: {choices[0].name} is not there; {failure}")
    raise failure
