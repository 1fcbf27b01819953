"""Greyscale pictures as PNG files, with nothing but the standard library: no image package is needed for them.

It knows the file format and how to write a file whole; what is on a picture it does not know.
"""

import struct
from pathlib import Path
from zlib import compress, crc32

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import RunError
from hotloop.options.files import whole_file

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, DEPTH = 0, 8


def encode(pixels: NDArray[np.uint8]) -> bytes:
    """The PNG file of a picture [height, width] of bytes, 0 black to 255 white."""
    if pixels.ndim != 2 or pixels.dtype != np.uint8 or not pixels.size:
        raise ValueError(f"a picture is [height, width] bytes, not {pixels.dtype} {pixels.shape}")
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, DEPTH, GREY, 0, 0, 0)
    # Every line begins with the number of its filter; 0 is none.
    lines = np.pad(pixels, ((0, 0), (1, 0))).tobytes()
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", compress(lines, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc32(kind + content))


def write(path: str | Path, pixels: NDArray[np.uint8]) -> None:
    """Write the picture whole or not at all, making the folder if need be."""
    path, content = Path(path), encode(pixels)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
