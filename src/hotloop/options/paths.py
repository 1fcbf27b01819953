"""Paths as people write them: `~` and `~user` written out, and what no file can be called refused.

Such a path would fail wherever it is used first, far from the option that named it. It does not look at the disk.
"""

import os
from pathlib import Path

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, on every file system that people have


def expand(path: str | Path) -> Path:
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
