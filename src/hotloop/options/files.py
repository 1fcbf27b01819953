"""JSON that is not trusted, and files that get their names only when they are whole."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEEPEST = 100
LARGEST = 1 << 26  # bytes of a file that is read: ours are far smaller, and a device never ends


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well and vanishes when it does not."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):  # a full disk gets its room back; on one that only reads there is nothing
            part.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            error.filename = str(path)
        raise


def parse_json(text: str | bytes) -> Any:
    """What the text says, or a ValueError; NaN and Infinity are read, as programs write them.

    Python's own reader raises RecursionError for brackets in brackets, and lets through what the next function cannot
    bear: depth that only a stack of C holds, and halves of surrogate pairs, which no output takes.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if text.count("[") + text.count("{") > DEEPEST:
        level = [value]
        for _ in range(DEEPEST):
            held = [each for each in level if isinstance(each, dict | list)]
            inner = (each.values() if isinstance(each, dict) else each for each in held)
            level = [each for values in inner for each in values]
        if any(isinstance(each, dict | list) for each in level):
            raise ValueError(f"nested more than {DEEPEST} deep")
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair in a text") from None
    return value


def load_json(path: Path) -> Any:
    """What a file says; OSError where it cannot be read, ValueError where it is no JSON or too long."""
    return parse_json(read_bounded(path))


def read_bounded(path: Path, most: int = LARGEST) -> bytes:
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data
