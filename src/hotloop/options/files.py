"""Paths as people write them: `~` and `~user` written out, and what no file can be called refused.

Such a path would fail wherever it is used first, far from the option that named it. It does not look at the disk.

JSON text that anybody may have written: whatever is wrong with it is a ValueError.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, on every file system that people have


def expand_path(path: str | Path) -> Path:
    """The path itself; a ValueError says why there can be no such file."""
    text = str(path)
    if "\0" in text:
        raise ValueError("has a zero character, which no file name can have")
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ValueError("there is no such user; write the folder out") from None
    try:
        encoded = os.fsencode(found)
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which no file name can have") from None
    if len(encoded) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in encoded.split(b"/")):
        raise ValueError(f"is too long: names have at most {LONGEST_NAME} bytes, paths {LONGEST_PATH}")
    return found


DEEPEST = 100
LARGEST = 1 << 26
"""Bytes of a file that is read: ours are far smaller, and a device never ends."""

Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(text: str | bytes, pairs: Pairs | None = None) -> Any:
    """What the text says, objects made by `pairs` where it is given."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    if "\\ud" in text.lower():
        _check_characters(value)
    return value


def load_json(path: Path) -> Any:
    """What a file says; OSError where it cannot be read."""
    return parse_json(read_bounded(path))


def read_bounded(path: Path, most: int = LARGEST) -> bytes:
    """All bytes of a file, unless there are more."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if _holds(each))
        level = [each for values in inner for each in values]
    if any(map(_holds, level)):
        raise ValueError(f"nested more than {DEEPEST} deep")


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in a text") from None
