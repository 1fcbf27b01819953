"""Image sets as folders of files: train/CLASS/*.jpg and val/CLASS/*.jpg (or validation/CLASS).

Classes are the sorted names of the training folders, and validation has the same labels. What a file is, its
content says; names only decide whether it is looked at. It must not decode images.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.data.encoded import EncodedImage
from hotloop.data.records import Part
from hotloop.errors import DataError

FOLDERS = {"train": ("train",), "validation": ("val", "validation")}
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")


@dataclass(frozen=True)
class ImageFile:
    """One file and its class, from 0."""

    path: Path
    label: int


def part_folder(root: str | Path, part: Part) -> Path | None:
    """The folder of a part, where there is one."""
    root = Path(root)
    return next((root / name for name in FOLDERS[part] if (root / name).is_dir()), None)


def is_image_folder(root: str | Path) -> bool:
    """Whether the folder holds train/ or val/ with class folders."""
    root = Path(root)
    folders = (part_folder(root, "train"), part_folder(root, "validation"))
    return any(entry.is_dir() for folder in folders if folder for entry in folder.iterdir())


def class_names(root: str | Path) -> tuple[str, ...]:
    """The classes in the order of their labels: those of the training images, else of the validation images."""
    root = Path(root)
    folder = part_folder(root, "train") or part_folder(root, "validation")
    if folder is None:
        raise DataError(f"{root}: no image folder; expected train/CLASS/*.jpg and val/CLASS/*.jpg")
    return _folders(folder)


def list_images(root: str | Path, part: Part, classes: Sequence[str]) -> list[ImageFile]:
    """Every image of a part, sorted; DataError for a class folder without images or an unknown class."""
    root = Path(root)
    folder = part_folder(root, part)
    if folder is None:
        raise DataError(f"{root}: no folder {' or '.join(FOLDERS[part])} with class folders of images")
    labels = {name: label for label, name in enumerate(classes)}
    images = []
    for name in _folders(folder):
        if name not in labels:
            raise DataError(f"{folder / name}: class {name} has no training folder")
        files = _files(folder / name)
        if not files:
            raise DataError(f"{folder / name}: class folder without images ({', '.join(SUFFIXES)})")
        images += [ImageFile(path, labels[name]) for path in files]
    return images


class ImageFolder:
    """The images of one part of an image folder, or of one instance's share of them."""

    def __init__(self, root: str | Path, part: Part, *, instance: int = 0, instances: int = 1):
        root = Path(root)
        names = class_names(root)
        images = list_images(root, part, names)[instance::instances]
        paths = [os.fsencode(image.path) for image in images]
        # One run of bytes instead of a million texts: it goes to other processes at once.
        self._paths = b"".join(paths)
        self._ends = np.cumsum([len(path) for path in paths])
        self._labels = np.array([image.label for image in images], np.int32)
        self.classes = len(names)
        self.source = f"{len(images):,} files at {root}"

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, number: int) -> EncodedImage:
        """Image `number` in the sorted order of classes and names."""
        start = self._ends[number - 1] if number else 0
        path = os.fsdecode(self._paths[start : self._ends[number]])
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - a Path for each of a million images costs more
                return EncodedImage(file.read(), int(self._labels[number]), path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _folders(folder: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder}: no class folders")
    return tuple(names)


def _files(folder: Path) -> list[Path]:
    names = (entry.name for entry in os.scandir(folder) if entry.is_file() and entry.name[0] != ".")
    return [folder / name for name in sorted(names) if name.lower().endswith(SUFFIXES)]
