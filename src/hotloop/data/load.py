"""Loads a set by name: from files, else fetched, else a procedural stand-in that says that it is one; but a folder that
the user gave is never answered with a stand-in."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hotloop.data.catalogue import KnownSet, known_set
from hotloop.data.dataset import (
    IMAGE_SETS,
    BinaryImages,
    Dataset,
    Loaded,
    RatingSet,
    binarise_dataset,
    read_amat,
    read_images,
)
from hotloop.data.fetch import FetchError, Progress, fetch, no_progress
from hotloop.data.local_files import LocalSet, check_named_folders, find_set, look_in
from hotloop.data.ratings import read_u_data
from hotloop.data.stand_ins import stand_in_images, stand_in_ratings
from hotloop.errors import DataError

Say = Callable[[str], None]
Set = TypeVar("Set", bound=Loaded)
_BINARISED = "binarised_mnist"


def to_stderr(text: str) -> None:
    """Where lines go unless another function is given: that a stand-in runs must not be missed."""
    print(text, file=sys.stderr)


def load(
    name: str, data_dir: str | Path | None = None, say: Say = to_stderr, progress: Progress = no_progress
) -> Dataset:
    """Labelled images: mnist, fashion_mnist, cifar10 or cifar100."""
    known = known_set(name)
    if known.name not in IMAGE_SETS:
        if known.expected:
            raise DataError(f"{known.name}: not fetched ({known.licence}) and not read by this command yet")
        raise DataError(f"{known.name}: does not fit here; use one of {', '.join(IMAGE_SETS)}")
    try:
        found = _locate((known,), data_dir, progress)
    except FetchError as error:
        return _announce(stand_in_images(known.name, error.why), say)
    dataset = read_images(found)
    train, test = counts = len(dataset.train), len(dataset.test)
    whole = IMAGE_SETS[known.name]
    part = "" if counts == whole else f" (a part of the {whole[0]:,} + {whole[1]:,})"
    say(f"data: {known.name}, {train:,} + {test:,} images{part}, {dataset.source}")
    return dataset


def load_ratings(
    data_dir: str | Path | None = None, say: Say = to_stderr, progress: Progress = no_progress
) -> RatingSet:
    """MovieLens-100K."""
    known = known_set("movielens-100k")
    try:
        found = _locate((known,), data_dir, progress)
    except FetchError as error:
        return _announce(stand_in_ratings(known.name, error.why), say)
    ratings = read_u_data(found.files["u.data"])
    source = f"files at {found.folder}"
    say(f"data: {known.name}, {len(ratings):,} ratings, {source}")
    return RatingSet(name=known.name, source=source, ratings=ratings)


def load_binarised(
    data_dir: str | Path | None = None, say: Say = to_stderr, progress: Progress = no_progress
) -> BinaryImages:
    """Binarised MNIST: the published bits, else MNIST binarised here, else procedural digits binarised."""
    published, mnist = known_set(_BINARISED), known_set("mnist")
    try:
        found = _locate((published, mnist), data_dir, progress)
    except FetchError as error:
        return _announce(binarise_dataset(stand_in_images(_BINARISED, error.why)), say)
    if found.known is mnist:
        images = binarise_dataset(read_images(found))
        say(
            f"data: {mnist.name}, {images.source}, binarised here: the published set's distribution, other bits"
        )
        return images
    train, validation, test = (read_amat(found.files[file.name]) for file in published.files)
    source = f"files at {found.folder}"
    say(f"data: {_BINARISED}, {len(train):,} + {len(validation):,} + {len(test):,} images, {source}")
    return BinaryImages(name=_BINARISED, source=source, train=train, validation=validation, test=test)


def _announce(stand_in: Set, say: Say) -> Set:
    say(stand_in.notice)
    return stand_in


def _locate(choices: tuple[KnownSet, ...], data_dir: str | Path | None, progress: Progress) -> LocalSet:
    """The first of the sets that is here, else the first that can be fetched; FetchError where neither is so, but a
    plain DataError when the user named the folder."""
    data_dir = None if data_dir is None else Path(data_dir)
    check_named_folders(data_dir)
    for known in choices:
        found = find_set(known, data_dir)
        if found and found.loadable:
            return found
    failures = []
    for known in choices:
        try:
            found = look_in(known, fetch(known, data_dir, progress).folder)
        except FetchError as error:
            failures.append(error)
            continue
        assert found is not None  # fetch has just verified it
        return found
    if data_dir is not None:
        raise DataError(f"data_dir={data_dir}: {choices[0].name} is not there; {failures[0]}")
    raise failures[0]
