"""A folder of the user's own images: which classes it has, which images are to train and which to validate with.

It is train/CLASS/*.jpg with val/CLASS, validation/CLASS or test/CLASS beside it, or the records that `build-records`
made of one. Where there is nothing to validate with, a part of the training images is held out by their names alone, so
that every run, on every machine, holds out the same ones. No image is opened here.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hotloop.data.content import file_errors
from hotloop.data.image_stores import (
    LABELS_FILE,
    PART_FOLDERS,
    ImageStore,
    ListedImages,
    RecordSet,
    is_record_folder,
    list_class_folders,
    list_class_images,
    part_folder,
)
from hotloop.errors import DataError

Images = list[tuple[Path, int]]  # files, and their labels from 0
HELD_OUT = 10  # one in so many images of a class; of fewer, one
LAYOUT = "expected train/CLASS/*.jpg, and val/CLASS/*.jpg if there are images to validate with"


@dataclass(frozen=True, eq=False)
class OwnImages:
    folder: Path
    classes: tuple[str, ...]  # in the order of the labels
    train: ImageStore
    validation: ImageStore
    held_out: bool = False  # whether the validation images are a part of train/

    def describe(self) -> str:
        """What is there, in words."""
        counts = f"{len(self.train):,} + {len(self.validation):,} images of {len(self.classes):,} classes"
        rule = f" (no {', '.join(PART_FOLDERS['validation'])}: one in {HELD_OUT} of each class is held out by its name)"
        return f"{counts} at {self.folder}{rule if self.held_out else ''}"


def open_own_images(folder: str | Path) -> OwnImages:
    """What a folder holds; DataError for whatever no training could use."""
    folder = Path(folder)
    with file_errors(folder):
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; {LAYOUT}")
        found = _open_records(folder) if is_record_folder(folder) else _open_files(folder)
    if len(found.classes) < 2:
        raise DataError(
            f"{folder}: only one class, {found.classes[0]}: there is nothing to tell apart; add another"
        )
    return found


def _open_files(folder: Path) -> OwnImages:
    train, validation, classes, held_out = list_own_images(folder)
    to_train, to_validate = (
        ListedImages(images, len(classes), f"{len(images):,} files at {folder}")
        for images in (train, validation)
    )
    return OwnImages(folder, classes, to_train, to_validate, held_out)


def list_own_images(folder: Path) -> tuple[Images, Images, tuple[str, ...], bool]:
    """The files to train and to validate with, the classes, and whether the latter had to be held out."""
    if not (folder / "train").is_dir():
        raise DataError(f"{folder}: no folder train in it; {LAYOUT}")
    classes = list_class_folders(folder / "train")
    train = list_class_images(folder / "train", classes)
    other = part_folder(folder, "validation")
    if other is None:
        return *hold_out(train), classes, True
    theirs = list_class_folders(other)
    if lacking := [name for name in classes if name not in theirs]:
        raise DataError(
            f"{other}: has no class {lacking[0]}, which {folder / 'train'} has; both need the same"
        )
    return train, list_class_images(other, classes), classes, False


def hold_out(images: Sequence[tuple[Path, int]]) -> tuple[Images, Images]:
    """The images of train/ in two: to train, and to validate with.

    Of each class a tenth, and at least one: those whose names `CLASS/FILE` have the smallest SHA-256. No order of
    files, seed or machine changes it, and another image moves at most one.
    """
    chosen: set[Path] = set()
    for _, group in groupby(images, key=lambda each: each[1]):
        paths = [path for path, _ in group]
        if len(paths) < 2:
            raise DataError(
                f"{paths[0].parent}: one image alone, and one of each class is held out to validate with: "
                "add images, or a folder val"
            )
        ranked = sorted(paths, key=lambda path: hashlib.sha256(_name(path)).digest())
        chosen.update(ranked[: max(1, round(len(paths) / HELD_OUT))])
    train = [each for each in images if each[0] not in chosen]
    return train, [each for each in images if each[0] in chosen]


def _name(path: Path) -> bytes:
    return os.fsencode(f"{path.parent.name}/{path.name}")


def _open_records(folder: Path) -> OwnImages:
    try:
        classes = tuple((folder / LABELS_FILE).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        raise DataError(
            f"{folder}: records without a readable {LABELS_FILE}, the names of their classes; build-records writes it"
        ) from None
    if not any(folder.glob("validation-*")):
        raise DataError(
            f"{folder}: no validation records; build them anew from a folder that has val/CLASS, or with hold_out"
        )
    return OwnImages(folder, classes, RecordSet(folder, "train"), RecordSet(folder, "validation"))
