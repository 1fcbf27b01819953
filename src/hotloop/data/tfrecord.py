"""TFRecord files (length, masked CRC of it, data, masked CRC of that, over and over) of tf.train.Examples.

By hand: TensorFlow's reader reads in order alone and takes seconds to import, and protobuf's Python classes would copy
every image's bytes. Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, Feature { oneof
BytesList = 1, FloatList = 2, Int64List = 3 }, each list a repeated field 1, packed or not.
"""

import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import file_errors, read_npz
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import whole_file
from hotloop.rehearsal import begin_work

HEADER, FOOTER = 12, 4
_MASK_DELTA = 0xA282EAD8
_THREADS = 16  # the disk works, not the processor
Index = NDArray[np.int64]  # [records, 2]: where the data of each record begins, and its length
VARINT, FIXED64, RUN, FIXED32 = 0, 1, 2, 5  # wire types; a run is text, a message or packed numbers
_FIXED = {FIXED64: 8, FIXED32: 4}
_BYTES, _FLOATS, _INTS = 1, 2, 3
Values = list[bytes] | NDArray[np.int64] | NDArray[np.float32]


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord files hold it: turned by 15 bits plus a constant."""
    try:
        import google_crc32c
    except ImportError:
        raise MissingExtra("google-crc32c", "images", "checking TFRecord files") from None
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def index_until_fault(path: str | Path) -> tuple[Index, str]:
    """Where the records lie that come before the first fault of a file, and what that is, if there is one; every length
    is checked by its CRC, the data is not read."""
    found: list[tuple[int, int]] = []
    fault = ""
    try:
        with file_errors(path), Path(path).open("rb", buffering=0) as file:
            at, size = 0, os.fstat(file.fileno()).st_size
            while at < size and not fault:
                header = os.pread(file.fileno(), HEADER, at)
                if len(header) < HEADER:
                    fault = "the file ends in the header of a record"
                    break
                length, crc = struct.unpack("<QI", header)
                after = at + HEADER + length + FOOTER
                if masked_crc(header[:8]) != crc:
                    fault = "no record here (its length does not match its checksum)"
                elif after > size:
                    fault = f"the file ends in a record of {length:,} bytes"
                else:
                    found.append((at + HEADER, length))
                    at = after
    except DataError as error:
        return np.empty((0, 2), np.int64), str(error)
    index = np.array(found, np.int64).reshape(-1, 2)
    return index, f"{path}: byte {at:,}: {fault}" if fault else ""


def read_record(path: str | Path, start: int, length: int, *, check: bool = False) -> bytes:
    """The data of one record of an index; with `check` its CRC must be right."""
    with file_errors(path):
        file = os.open(path, os.O_RDONLY)
        try:
            found = os.pread(file, length + FOOTER, start)
        finally:
            os.close(file)
    if len(found) != length + FOOTER:
        raise DataError(f"{path}: byte {start:,}: the file ends in a record of {length:,} bytes")
    data = found[:length]
    if check and masked_crc(data) != struct.unpack_from("<I", found, length)[0]:
        raise DataError(f"{path}: byte {start:,}: a record of {length:,} bytes does not match its checksum")
    return data


def index_shards(
    paths: Sequence[Path], kept: Path, faults: list[str] | None = None
) -> tuple[NDArray[np.int64], Index]:
    """Records of each shard, and where the records of all shards lie, one shard after the other.

    Following the lengths through 150 GB touches every record, so that the index is `kept` in a file, and used as long
    as each shard has the size and the time of change that it had. A broken shard is a DataError, or one more of the
    `faults`: then the records before its fault count.
    """
    stamps = np.array([[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, paths)], np.int64)
    names = np.array([path.name for path in paths])
    with suppress(DataError, KeyError):
        found = read_npz(kept)
        counts, index, sizes = found["counts"], found["index"], stamps[:, 0]
        same = np.array_equal(found["names"], names) and np.array_equal(found["stamps"], stamps)
        sound = same and counts.dtype == index.dtype == np.int64 and counts.shape == sizes.shape
        if sound and (counts >= 0).all() and index.shape == (counts.sum(), 2):
            start, length = index.T
            ends = np.repeat(sizes, counts) - FOOTER
            # A record can only lie inside its shard.
            if ((start >= HEADER) & (length >= 0) & (start <= ends) & (length <= ends - start)).all():
                return counts, index
    begin_work(f"indexing the records of {kept.parent}")
    with ThreadPoolExecutor(_THREADS) as pool:
        parts, said = zip(*pool.map(index_until_fault, paths), strict=True)
    counts, index = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
    if broken := [fault for fault in said if fault]:
        if faults is None:
            raise DataError(broken[0])
        faults += broken
        return counts, index
    with suppress(OSError), whole_file(kept) as part, part.open("wb") as file:
        np.savez(file, names=names, stamps=stamps, counts=counts, index=index)
    return counts, index


class WireError(ValueError):
    """Bytes that are no message; `at` is where in them."""

    def __init__(self, at: int, reason: str):
        super().__init__(f"byte {at}: {reason}")
        self.at, self.reason = at, reason


def read_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Values]:
    """The features by name, or only the `wanted` ones; WireError says where the bytes are no Example."""
    names = None if wanted is None else {name.encode() for name in wanted}
    found: dict[str, Values] = {}
    for _, start, end in _read_runs(data, 0, len(data), "Features"):
        for _, at, stop in _read_runs(data, start, end, "a feature"):
            name, value = b"", (stop, stop)
            for number, first, last in _read_runs(data, at, stop, "a feature's name or value", (1, 2)):
                if number == 1:
                    name = data[first:last]
                else:
                    value = (first, last)
            if names is None or name in names:
                try:
                    text = name.decode()
                except UnicodeDecodeError:
                    raise WireError(at, f"feature name {name!r} is not UTF-8") from None
                found[text] = _read_values(data, *value)
    return found


def _read_values(data: bytes, start: int, end: int) -> Values:
    values: Values = []
    for number, at, stop in _read_runs(data, start, end, "a list", (_BYTES, _FLOATS, _INTS)):
        if number == _BYTES:
            values = [data[first:last] for _, first, last in _read_runs(data, at, stop, "bytes")]
        elif number == _FLOATS:
            floats = [np.empty(0, np.float32)]
            for _, first, last in _read_runs(data, at, stop, "float32 numbers", unpacked=FIXED32):
                if (last - first) % 4:
                    raise WireError(first, f"{last - first} bytes are not whole float32 numbers")
                floats.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
            values = np.concatenate(floats).astype(np.float32)
        else:
            numbers: list[int] = []
            for _, first, last in _read_runs(data, at, stop, "int64 numbers", unpacked=VARINT):
                while first < last:
                    value, first = _read_varint(data, first, last)
                    numbers.append(value - (1 << 64) if value >> 63 else value)  # two's complement
            values = np.array(numbers, np.int64)
    return values


def _read_runs(
    data: bytes, start: int, end: int, what: str, numbers: Collection[int] = (1,), unpacked: int = RUN
) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field in data[start:end] that has one of the `numbers`. It must be a run, which
    comes without its length, or of the wire type that `unpacked` numbers have."""
    at = start
    while at < end:
        began = at
        tag, at = _read_varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            stop = _read_varint(data, at, end)[1]
        elif kind == RUN:
            length, at = _read_varint(data, at, end)
            stop = at + length
        elif kind in _FIXED:
            stop = at + _FIXED[kind]
        else:
            raise WireError(began, f"field of unknown wire type {kind}")
        if number == 0:
            raise WireError(began, "field number 0")
        if stop > end:
            raise WireError(began, f"field of {stop - at} bytes where {end - at} are left")
        if number in numbers:
            if kind not in (RUN, unpacked):
                raise WireError(at, f"{what} of wire type {kind}, expected {RUN}")
            yield number, at, stop
        at = stop


def _read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value, shift, began = 0, 0, at
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise WireError(began, "number without an end")


def write_example(features: Mapping[str, Values]) -> bytes:
    """The bytes of an Example with these features, names in sorted order."""
    entries = []
    for name, values in sorted(features.items()):
        if isinstance(values, list):
            feature = put_run(_BYTES, b"".join(put_run(1, value) for value in values))
        elif values.dtype.kind == "f":
            feature = put_run(_FLOATS, put_run(1, values.astype("<f4").tobytes()) if len(values) else b"")
        elif values.dtype.kind in "iu":
            packed = b"".join(map(put_varint, values.tolist()))
            feature = put_run(_INTS, put_run(1, packed) if len(values) else b"")
        else:
            raise TypeError(f"{name}: {values.dtype} does not fit an Example")
        entries.append(put_run(1, put_run(1, name.encode()) + put_run(2, feature)))
    return put_run(1, b"".join(entries))


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
