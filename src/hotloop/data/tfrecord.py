"""TFRecord files: length, masked CRC of the length, data, masked CRC of the data, over and over.

Reading is by an index of where each record lies, so that records are fetched in any order. By hand, since TensorFlow's
reader reads in order alone and takes seconds to import.
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import read_errors, read_npz
from hotloop.errors import DataError, MissingExtra
from hotloop.options.files import whole_file
from hotloop.rehearsal import begin_work

HEADER, FOOTER = 12, 4
_MASK_DELTA = 0xA282EAD8
_THREADS = 16  # the disk works, not the processor
Index = NDArray[np.int64]  # [records, 2]: where the data of each record begins, and its length


@cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError:
        raise MissingExtra("google-crc32c", "images", "checking TFRecord files") from None
    checksum: Callable[[bytes], int] = google_crc32c.value
    return checksum


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord files hold it: turned by 15 bits plus a constant."""
    crc = _crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def write_records(path: str | Path, records: Iterable[bytes]) -> None:
    with Path(path).open("wb") as file:
        for data in records:
            file.write(encode_record(data))


def index_records(path: str | Path) -> Index:
    """Where the records of a file lie; every length is checked by its CRC, the data is not read."""
    index, fault = index_until_fault(path)
    if fault:
        raise DataError(fault)
    return index


def index_until_fault(path: str | Path) -> tuple[Index, str]:
    """Where the records lie that come before the first fault of a file, and what that is: empty where there is none."""
    found: list[tuple[int, int]] = []
    fault = ""
    try:
        with read_errors(path), Path(path).open("rb", buffering=0) as file:
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
    with read_errors(path):
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

    Following the lengths through 150 GB touches every record, so that the index is kept in the file `kept`, and used as
    long as each shard has the size and the time of change that it had; a folder that cannot be written to goes without.
    A broken shard is a DataError; for whoever hands in a list of `faults` it is one more of them, and the records
    before its fault count.
    """
    stamps = np.array([[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, paths)], np.int64)
    names = np.array([path.name for path in paths])
    with suppress(DataError, KeyError):
        found = read_npz(kept)
        same = np.array_equal(found["names"], names) and np.array_equal(found["stamps"], stamps)
        if same and _is_plausible(found["counts"], found["index"], stamps[:, 0]):
            return found["counts"], found["index"]
    begin_work(f"indexing the records of {kept.parent}")
    with ThreadPoolExecutor(_THREADS) as pool:
        found_in = list(pool.map(index_until_fault, paths))
    parts = [part for part, _ in found_in]
    broken = [fault for _, fault in found_in if fault]
    if broken and faults is None:
        raise DataError(broken[0])
    counts, index = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
    if broken and faults is not None:
        faults += broken
        return counts, index
    with suppress(OSError), whole_file(kept) as part, part.open("wb") as file:
        np.savez(file, names=names, stamps=stamps, counts=counts, index=index)
    return counts, index


def _is_plausible(counts: NDArray[Any], index: NDArray[Any], sizes: NDArray[np.int64]) -> bool:
    """Whether the records can lie where the index says, each inside its shard."""
    if counts.dtype != np.int64 or index.dtype != np.int64 or counts.shape != sizes.shape:
        return False
    if (counts < 0).any() or index.shape != (counts.sum(), 2):
        return False
    start, length = index.T
    ends = np.repeat(sizes, counts) - FOOTER
    return bool(((start >= HEADER) & (length >= 0) & (start <= ends) & (length <= ends - start)).all())
