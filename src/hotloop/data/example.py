"""tf.train.Example: a map from names to lists of bytes, int64 or float32, read and written without TensorFlow.

Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, Feature { oneof BytesList = 1,
FloatList = 2, Int64List = 3 }, each list a repeated field 1, packed or not; of a name twice the last counts.
By hand: protobuf's Python classes would copy every image's bytes, and come with TensorFlow alone.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, RUN, FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers; a run is text, a message or packed numbers."""
_FIXED = {FIXED64: 8, FIXED32: 4}
_BYTES, _FLOATS, _INTS = 1, 2, 3
Values = list[bytes] | NDArray[np.int64] | NDArray[np.float32]


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
    value, shift, began = 0, 0, at
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise WireError(began, "number without an end")


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
    return put_varint(number << 3 | RUN) + put_varint(len(content)) + content


def read_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """The features by name, or only the `wanted` ones; WireError says where the bytes are no Example."""
    names = None if wanted is None else {name.encode() for name in wanted}
    found: dict[str, Values] = {}
    for start, end in _runs(data, 0, len(data), "Features"):
        for at, stop in _runs(data, start, end, "a feature"):
            name, value = b"", (stop, stop)
            for number, kind, first, last in read_fields(data, at, stop):
                if number in (1, 2):
                    _expect_run(kind, first, "a feature's name or value")
                if number == 1:
                    name = data[first:last]
                elif number == 2:
                    value = (first, last)
            if names is None or name in names:
                found[_text(name, at)] = _read_values(data, *value)
    return found


def write_example(features: Mapping[str, Values]) -> bytes:
    """The bytes of an Example with these features, names in sorted order."""
    entries = (
        put_run(1, put_run(1, name.encode()) + put_run(2, _feature(name, features[name])))
        for name in sorted(features)
    )
    return put_run(1, b"".join(entries))


def _runs(data: bytes, start: int, end: int, what: str, unpacked: int = RUN) -> Iterator[tuple[int, int]]:
    """Start and end of every field 1, which must be a run, or of the wire type that unpacked numbers have."""
    for number, kind, at, stop in read_fields(data, start, end):
        if number == 1:
            if kind != unpacked:
                _expect_run(kind, at, what)
            yield at, stop


def _read_values(data: bytes, start: int, end: int) -> Values:
    values: Values = []
    for number, kind, at, stop in read_fields(data, start, end):
        if number not in (_BYTES, _FLOATS, _INTS):
            continue
        _expect_run(kind, at, "a list")
        if number == _BYTES:
            values = [data[first:last] for first, last in _runs(data, at, stop, "bytes")]
        elif number == _FLOATS:
            floats = [np.empty(0, np.float32)]
            for first, last in _runs(data, at, stop, "float32 numbers", unpacked=FIXED32):
                if (last - first) % 4:
                    raise WireError(first, f"{last - first} bytes are not whole float32 numbers")
                floats.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
            values = np.concatenate(floats).astype(np.float32)
        else:
            numbers: list[int] = []
            for first, last in _runs(data, at, stop, "int64 numbers", unpacked=VARINT):
                while first < last:
                    value, first = read_varint(data, first, last)
                    numbers.append(value - (1 << 64) if value >> 63 else value)  # two's complement
            values = np.array(numbers, np.int64)
    return values


def _expect_run(kind: int, at: int, what: str) -> None:
    if kind != RUN:
        raise WireError(at, f"{what} of wire type {kind}, expected {RUN}")


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
