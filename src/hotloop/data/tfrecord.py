"""TFRecord files: length, masked CRC of the length, data, masked CRC of the data, over and over.

Reading is by an index of where each record lies, so that records are fetched in any order. Errors name the file and
the byte. It must not know what is in a record.
"""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotloop.data.crc32c import crc32c, crc32c_rows, masked, masked_rows
from hotloop.errors import DataError

HEADER, FOOTER = 12, 4
Index = NDArray[np.int64]
"""[records, 2]: where the data of each record begins, and its length."""


def record(data: bytes) -> bytes:
    """The bytes of one record as they stand in a file."""
    length = struct.pack("<Q", len(data))
    crcs = (struct.pack("<I", masked(crc32c(part))) for part in (length, data))
    return length + next(crcs) + data + next(crcs)


def write_records(path: str | Path, records: Iterable[bytes]) -> None:
    """A file of these records."""
    path = Path(path)
    with path.open("wb") as file:
        for data in records:
            file.write(record(data))


def index_records(path: str | Path) -> Index:
    """Where the records of a file lie; every length is checked by its CRC, the data is not read."""
    index, fault = index_until_fault(path)
    if fault:
        raise DataError(fault)
    return index


def index_until_fault(path: str | Path) -> tuple[Index, str]:
    """Where the records lie that come before the first fault of a file, and what that is: empty where there is none."""
    path = Path(path)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            headers, starts, fault = _headers(path, file.fileno(), size)
    except OSError as error:
        return np.empty((0, 2), np.int64), f"{path}: cannot be read ({error.strerror})"
    table = np.frombuffer(headers, np.uint8).reshape(-1, HEADER)
    wrong = _wrong_lengths(table)
    if len(wrong):
        at = int(wrong[0])
        fault = f"{path}: byte {starts[at]:,}: no record here (its length does not match its checksum)"
        table, starts = table[:at], starts[:at]
    lengths = np.ascontiguousarray(table[:, :8]).view("<u8")[:, 0].astype(np.int64)
    return np.stack([np.array(starts, np.int64) + HEADER, lengths], axis=1), fault


def read_record(path: str | Path, start: int, length: int, *, check: bool = False) -> bytes:
    """The data of one record of an index; with `check` its CRC must be right."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            found = os.pread(file, length + FOOTER, start)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if len(found) != length + FOOTER:
        raise DataError(f"{path}: byte {start:,}: the file ends in a record of {length:,} bytes")
    data = found[:length]
    if check and masked(crc32c(data)) != struct.unpack_from("<I", found, length)[0]:
        raise DataError(f"{path}: byte {start:,}: a record of {length:,} bytes does not match its checksum")
    return data


def _headers(path: Path, file: int, size: int) -> tuple[bytes, list[int], str]:
    """The header of each record and where it begins, following the lengths to the end of the file or to a fault."""
    at, headers, starts = 0, [], []
    fault = ""
    while at < size and not fault:
        header = os.pread(file, HEADER, at)
        length = int.from_bytes(header[:8], "little")
        after = at + HEADER + length + FOOTER
        if len(header) < HEADER:
            fault = f"{path}: byte {at:,}: the file ends in the header of a record"
            break
        if after > size:
            fault = f"{path}: byte {at:,}: the file ends in a record of {length:,} bytes"
            # A wrong length also points beyond the end: which of the two it is, the CRC tells.
            if not len(_wrong_lengths(np.frombuffer(header, np.uint8)[None])):
                break
        headers.append(header)
        starts.append(at)
        at = after
    return b"".join(headers), starts, fault


def _wrong_lengths(table: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which of these headers have a length that does not match its checksum."""
    stored = np.ascontiguousarray(table[:, 8:]).view("<u4")[:, 0]
    return np.flatnonzero(masked_rows(crc32c_rows(table[:, :8])) != stored)
