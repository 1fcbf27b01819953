"""The optional tables that go into image records: names of synsets, and bounding boxes of objects."""

import csv
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import DataError

Boxes = dict[str, NDArray[np.float32]]
"""File name without folder and suffix -> [objects, 4]: xmin, ymin, xmax, ymax as shares."""


def read_texts(path: str | Path, synsets: Collection[str]) -> dict[str, str]:
    """Lines of `synset TAB text`; DataError when one of the synsets has none."""
    path = Path(path)
    texts = {}
    for number, line in enumerate(_lines(path), 1):
        synset, tab, text = line.partition("\t")
        if line.strip() and not tab:
            raise DataError(f"{path}: line {number}: expected synset, tab and text, not {line[:60]!r}")
        texts[synset.strip()] = text.strip()
    missing = sorted(set(synsets) - set(texts))
    if missing:
        raise DataError(f"{path}: no text for {len(missing)} of {len(synsets)} classes, first {missing[0]}")
    return texts


def read_boxes(path: str | Path) -> Boxes:
    """Lines of `file,xmin,ymin,xmax,ymax`, several for an image with several objects; a header may come first."""
    path = Path(path)
    rows: dict[str, list[list[float]]] = {}
    for number, cells in enumerate(_rows(path), 1):
        if not cells:
            continue
        try:
            name, sides = cells[0], [float(cell) for cell in cells[1:]]
        except ValueError:
            if number == 1:
                continue
            sides = []
        if len(sides) != 4 or not (0 <= sides[0] <= sides[2] <= 1 and 0 <= sides[1] <= sides[3] <= 1):
            raise DataError(
                f"{path}: line {number}: expected file,xmin,ymin,xmax,ymax with shares of 0 to 1, "
                f"not {','.join(cells)[:60]!r}"
            )
        rows.setdefault(Path(name).stem, []).append(sides)
    return {name: np.array(sides, np.float32) for name, sides in rows.items()}


def _rows(path: Path) -> Iterator[list[str]]:
    reader = csv.reader(_lines(path))
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: no CSV ({error})") from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,}: not UTF-8 text") from None
