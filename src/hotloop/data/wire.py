"""The wire format of protocol buffers: tagged fields of varints, fixed words and runs of bytes.

Strict: nothing is read beyond the end of what was handed over. It must not know what a message means.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, RUN, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


class WireError(ValueError):
    """Bytes that are no message; `at` is where in them."""

    def __init__(self, at: int, reason: str):
        super().__init__(f"byte {at}: {reason}")
        self.at, self.reason = at, reason


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, start, end) of each field in data[start:end]; a varint's bytes, a run without its length."""
    at = start
    while at < end:
        began = at
        tag, at = varint(data, at, end)
        kind = tag & 7
        if kind == VARINT:
            stop = varint(data, at, end)[1]
        elif kind == RUN:
            length, at = varint(data, at, end)
            stop = at + length
        elif kind in _FIXED:
            stop = at + _FIXED[kind]
        else:
            raise WireError(began, f"field of unknown wire type {kind}")
        if tag >> 3 == 0:
            raise WireError(began, "field number 0")
        if stop > end:
            raise WireError(began, f"field of {stop - at} bytes where {end - at} are left")
        yield tag >> 3, kind, at, stop
        at = stop


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An unsigned number of up to 64 bits, and where the next byte is."""
    value, shift, began = 0, 0, at
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise WireError(began, "number without an end")


def signed(value: int) -> int:
    """Two's complement of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def packed_varints(data: bytes, start: int, end: int) -> list[int]:
    """Signed numbers one after the other."""
    found = []
    while start < end:
        value, start = varint(data, start, end)
        found.append(signed(value))
    return found


def packed_floats(data: bytes, start: int, end: int) -> NDArray[np.float32]:
    """float32 numbers one after the other."""
    if (end - start) % 4:
        raise WireError(start, f"{end - start} bytes are not whole float32 numbers")
    return np.frombuffer(data, "<f4", (end - start) // 4, start).astype(np.float32)


def put_varint(value: int) -> bytes:
    """A number of up to 64 bits; negative ones in two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_run(number: int, content: bytes) -> bytes:
    """A field of bytes: text, a message or packed numbers."""
    return put_varint(number << 3 | RUN) + put_varint(len(content)) + content
