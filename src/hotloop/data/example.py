"""The wire format of protocol buffers: tagged fields of varints, fixed words and runs of bytes.

Strict: nothing is read beyond the end of what was handed over. It must not know what a message means.

tf.train.Example: a map from names to lists of bytes, int64 or float32, read and written without TensorFlow.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, RUN, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}


class WireError(ValueError):
    """Bytes that are no message; `at` is where in them."""

    def __init__(self, at: int, reason: str):
        super().__init__(f"byte {at}: {reason}")
        self.at, self.reason = at, reason


def read_fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, start, end) of each field in data[start:end]; a varint's bytes, a run without its length."""
    at = start
    while at < end:
        began = at
        tag, at = read_varint(data, at, end)
        kind = tag & 7
        if kind == VARINT:
            stop = read_varint(data, at, end)[1]
        elif kind == RUN:
            length, at = read_varint(data, at, end)
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


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
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


def to_signed(value: int) -> int:
    """Two's complement of 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def read_varints(data: bytes, start: int, end: int) -> list[int]:
    """Signed numbers one after the other."""
    found = []
    while start < end:
        value, start = read_varint(data, start, end)
        found.append(to_signed(value))
    return found


def read_floats(data: bytes, start: int, end: int) -> NDArray[np.float32]:
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


Values = list[bytes] | NDArray[np.int64] | NDArray[np.float32]
_BYTES, _FLOATS, _INTS = 1, 2, 3


def read_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """The features by name, or only the `wanted` ones; WireError says where the bytes are no Example."""
    names = None if wanted is None else {name.encode() for name in wanted}
    found: dict[str, Values] = {}
    for number, kind, start, end in read_fields(data, 0, len(data)):
        if number == 1:
            _expect(RUN, kind, start, "Features")
            _read_features(data, start, end, names, found)
    return found


def write_example(features: Mapping[str, Values]) -> bytes:
    """The bytes of an Example with these features, names in sorted order."""
    entries = (
        put_run(1, put_run(1, name.encode()) + put_run(2, _feature(name, features[name])))
        for name in sorted(features)
    )
    return put_run(1, b"".join(entries))


def _read_features(
    data: bytes, start: int, end: int, names: set[bytes] | None, found: dict[str, Values]
) -> None:
    for number, kind, at, stop in read_fields(data, start, end):
        if number != 1:
            continue
        _expect(RUN, kind, at, "a feature")
        name, value = b"", (stop, stop)
        for part, part_kind, first, last in read_fields(data, at, stop):
            if part in (1, 2):
                _expect(RUN, part_kind, first, "a feature's name or value")
            if part == 1:
                name = data[first:last]
            elif part == 2:
                value = (first, last)
        if names is None or name in names:
            found[_text(name, at)] = _values(data, *value)


def _values(data: bytes, start: int, end: int) -> Values:
    values: Values = []
    for number, kind, at, stop in read_fields(data, start, end):
        if number in _READERS:
            _expect(RUN, kind, at, "a list")
            values = _READERS[number](data, at, stop)
    return values


def _read_bytes(data: bytes, start: int, end: int) -> Values:
    found = []
    for number, kind, at, stop in read_fields(data, start, end):
        if number == 1:
            _expect(RUN, kind, at, "bytes")
            found.append(data[at:stop])
    return found


def _read_floats(data: bytes, start: int, end: int) -> Values:
    found = [np.empty(0, np.float32)]
    for number, kind, at, stop in read_fields(data, start, end):
        if number == 1:
            if kind != FIXED32:
                _expect(RUN, kind, at, "float32 numbers")
            found.append(read_floats(data, at, stop))
    return np.concatenate(found)


def _read_ints(data: bytes, start: int, end: int) -> Values:
    found: list[int] = []
    for number, kind, at, stop in read_fields(data, start, end):
        if number == 1:
            if kind != VARINT:
                _expect(RUN, kind, at, "int64 numbers")
            found += read_varints(data, at, stop)
    return np.array(found, np.int64)


_READERS = {_BYTES: _read_bytes, _FLOATS: _read_floats, _INTS: _read_ints}


def _expect(wanted: int, kind: int, at: int, what: str) -> None:
    if kind != wanted:
        raise WireError(at, f"{what} of wire type {kind}, expected {wanted}")


def _text(name: bytes, at: int) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise WireError(at, f"feature name {name!r} is not UTF-8") from None


def _feature(name: str, values: Values) -> bytes:
    if isinstance(values, list):
        return put_run(_BYTES, b"".join(put_run(1, value) for value in values))
    if values.dtype.kind == "f":
        return put_run(_FLOATS, put_run(1, values.astype("<f4").tobytes()) if len(values) else b"")
    if values.dtype.kind in "iu":
        return put_run(_INTS, put_run(1, b"".join(map(put_varint, values.tolist()))) if len(values) else b"")
    raise TypeError(f"{name}: {values.dtype} does not fit an Example")
