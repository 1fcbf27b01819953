"""tf.train.Example: a map from names to lists of bytes, int64 or float32, read and written without TensorFlow.

Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, Feature { oneof BytesList = 1,
FloatList = 2, Int64List = 3 }, each list a repeated field 1. Lists may be packed or not, unknown fields are passed
over, a name that comes twice counts the last time. It knows no particular names.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from hotloop.data.wire import (
    FIXED32,
    RUN,
    VARINT,
    WireError,
    fields,
    packed_floats,
    packed_varints,
    put_run,
    put_varint,
)

Values = list[bytes] | NDArray[np.int64] | NDArray[np.float32]
_BYTES, _FLOATS, _INTS = 1, 2, 3


def read_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """The features by name, or only the `wanted` ones; WireError says where the bytes are no Example."""
    names = None if wanted is None else {name.encode() for name in wanted}
    found: dict[str, Values] = {}
    for number, kind, start, end in fields(data, 0, len(data)):
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
    for number, kind, at, stop in fields(data, start, end):
        if number != 1:
            continue
        _expect(RUN, kind, at, "a feature")
        name, value = b"", (stop, stop)
        for part, part_kind, first, last in fields(data, at, stop):
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
    for number, kind, at, stop in fields(data, start, end):
        if number in _READERS:
            _expect(RUN, kind, at, "a list")
            values = _READERS[number](data, at, stop)
    return values


def _read_bytes(data: bytes, start: int, end: int) -> Values:
    found = []
    for number, kind, at, stop in fields(data, start, end):
        if number == 1:
            _expect(RUN, kind, at, "bytes")
            found.append(data[at:stop])
    return found


def _read_floats(data: bytes, start: int, end: int) -> Values:
    found = [np.empty(0, np.float32)]
    for number, kind, at, stop in fields(data, start, end):
        if number == 1:
            if kind != FIXED32:
                _expect(RUN, kind, at, "float32 numbers")
            found.append(packed_floats(data, at, stop))
    return np.concatenate(found)


def _read_ints(data: bytes, start: int, end: int) -> Values:
    found: list[int] = []
    for number, kind, at, stop in fields(data, start, end):
        if number == 1:
            if kind != VARINT:
                _expect(RUN, kind, at, "int64 numbers")
            found += packed_varints(data, at, stop)
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
