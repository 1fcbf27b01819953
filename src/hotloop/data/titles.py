"""Titles of items by their ids: MovieLens' u.item, movies.dat and movies.csv, and lines of id and title like them.

The first line decides what separates fields: whichever of `|`, `::`, a TAB or a comma comes first in it, as titles and
genres have the others; between commas fields may be quoted. Ids are the first field, titles the second, the rest is
passed over. MovieLens wrote its older files in Latin-1.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from hotloop.data.content import read_content
from hotloop.errors import DataError

MOST_BYTES = 1 << 27  # MovieLens-32M has 4 million
EXPECTED = "expected an id and a title, as in MovieLens' u.item or movies.csv"


def read_titles(path: str | Path) -> dict[int, str]:
    """The title of each id; DataError with the first line that has none, and what is wrong with it."""
    path = Path(path)
    data = read_content(path, most=MOST_BYTES)
    if b"\0" in data:
        raise DataError(f"{path}: not a text file; {EXPECTED}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    titles: dict[int, str] = {}
    for number, fields in _split_lines(path, text):
        fault = _find_fault(fields, titles)
        if fault and not titles and _is_header(fields):
            continue
        if fault:
            raise DataError(f"{path}: line {number}: {fault}; {EXPECTED}")
        # A title is one field of a line of text again.
        titles[int(fields[0])] = " ".join(fields[1].split())
    if not titles:
        raise DataError(f"{path}: no title in this file; {EXPECTED}")
    return titles


def _split_lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line that is not empty."""
    lines = text.split("\n")  # not splitlines: titles may hold the separators of Unicode
    first = next((line for line in lines if line.strip()), "")
    if not first:
        return
    separators = sorted((each for each in ("::", "|", "\t", ",") if each in first), key=first.index)
    if not separators:
        raise DataError(f"{path}: line {lines.index(first) + 1}: no '|', '::', TAB or comma; {EXPECTED}")
    separator = separators[0]
    if separator != ",":
        rows = enumerate((line.rstrip("\r").split(separator) for line in lines), 1)
        yield from ((number, fields) for number, fields in rows if fields != [""])
        return
    reader = csv.reader(lines, strict=True)
    try:
        yield from ((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}; {EXPECTED}") from None


def _find_fault(fields: list[str], known: dict[int, str]) -> str:
    if len(fields) < 2:
        return f"{len(fields)} field"
    item, title = fields[0].strip(), fields[1].strip()
    if not (item.isascii() and item.removeprefix("-").isdigit()):
        return f"id {item[:60]!r} is not a whole number"
    if len(item) > 19:
        return f"id {item[:60]!r} is too large"
    if not title:
        return f"id {item} has no title"
    return f"id {item} stands here again" if int(item) in known else ""


def _is_header(fields: list[str]) -> bool:
    """Whether names of columns stand here: `movieId,title,genres`."""
    return len(fields) >= 2 and fields[0].strip().lower().endswith("id") and "title" in fields[1].lower()
