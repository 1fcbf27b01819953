"""The images that a load is made of: the first validation images of a data set that lies on this machine.

Nothing is fetched for it, and no stand-in takes a set's place: where a set is not here, the caller sends random bytes
and says so.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.catalogue import known_set
from hotloop.data.dataset import IMAGE_SETS, read_images
from hotloop.data.local_files import check_named_folders, find_set
from hotloop.errors import DataError

IMAGENET = "imagenet"


def find_validation_images(dataset: str, folder: Path | None, count: int) -> NDArray[np.uint8] | None:
    """Up to `count` images as bytes [n, H, W, C], as a validation sees them; None where the set is not here.

    DataError where `folder` (None: where data sets usually are) is not there, or has no such set.
    """
    if dataset == IMAGENET:
        return None if folder is None else _read_photographs(folder, count)
    if dataset not in IMAGE_SETS:
        return None
    check_named_folders(folder)
    found = find_set(known_set(dataset), folder)
    if found is not None and found.loadable:
        return read_images(found).test.images[:count]
    if folder is not None:
        raise DataError(f"--dataset-path {folder}: {dataset} is not there")
    return None


def _read_photographs(folder: Path, count: int) -> NDArray[Any]:
    from hotloop.families.cnn.photographs import PhotoReader
    from hotloop.families.cnn.sources import open_store

    reader = PhotoReader(open_store(folder, "validation"), training=False)
    numbers = range(min(count, len(reader.store)))
    if not numbers:
        raise DataError(f"--dataset-path {folder}: holds no validation image")
    return np.stack([reader.image(number)[0] for number in numbers])
