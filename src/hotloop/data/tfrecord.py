"""CRC-32C (Castagnoli), the checksum of TFRecord files: by a compiled package where one is installed, else by numpy.

A CRC is linear over XOR, so the checksum of a block is the XOR of one table entry for each (place, byte), and
blocks are joined pairwise. It must not know what is checked.

TFRecord files: length, masked CRC of the length, data, masked CRC of the data, over and over.
Where every record of a set of TFRecord shards lies, found once and kept in a hidden file beside the shards.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hotloop.data.content import read_npz
from hotloop.errors import DataError
from hotloop.rehearsal import begin_work

_POLYNOMIAL = 0x82F63B78
_BLOCK = 256
_MASK_DELTA = 0xA282EAD8
_WORD = 0xFFFFFFFF

Bytes = bytes | bytearray | memoryview


def crc32c(data: Bytes) -> int:
    """The checksum of the bytes."""
    return _fastest()(bytes(data))


def mask_crc(crc: int) -> int:
    """A checksum as TFRecord files hold it: turned by 15 bits plus a constant."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _WORD


def crc32c_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksum of each row of 4 to 256 bytes."""
    start = rows.copy()
    start[:, :4] ^= 0xFF
    return _linear(start) ^ np.uint32(_WORD)


def masked_rows(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """`masked` of many checksums."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(_MASK_DELTA)


@cache
def _fastest() -> Callable[[bytes], int]:
    """google-crc32c or crc32c when it is there (several GB/s), else the numpy code below."""
    with suppress(ImportError):
        package: Any = import_module("google_crc32c")
        if package.implementation == "c":
            return cast(Callable[[bytes], int], package.value)
    with suppress(ImportError):
        return cast(Callable[[bytes], int], import_module("crc32c").crc32c)
    return numpy_crc32c


def numpy_crc32c(data: bytes) -> int:
    """The checksum by numpy alone."""
    if len(data) < 4:
        return _bytewise(data)
    # Zeros before the data change nothing once the start value has been moved into the first four bytes.
    blocks = -(-len(data) // _BLOCK)
    padded = np.zeros(blocks * _BLOCK, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    first = len(padded) - len(data)
    padded[first : first + 4] ^= 0xFF
    return int(_joined(_linear(padded.reshape(blocks, _BLOCK)))) ^ _WORD


def _joined(crcs: NDArray[np.uint32]) -> np.uint32:
    """The checksum of all blocks in a row from the checksums of each."""
    level = 0
    while len(crcs) > 1:
        if len(crcs) % 2:
            crcs = np.concatenate([np.zeros(1, np.uint32), crcs])
        crcs = _shifted(crcs[::2], level) ^ crcs[1::2]
        level += 1
    return np.uint32(crcs[0])


def _linear(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksum of each row without start value and final inversion."""
    width = rows.shape[1]
    places = np.arange(_BLOCK - width, _BLOCK, dtype=np.uint16) << np.uint16(8)
    joined: NDArray[np.uint32] = np.bitwise_xor.reduce(_by_place().take(rows | places), axis=1)
    return joined


def _shifted(crcs: NDArray[np.uint32], level: int) -> NDArray[np.uint32]:
    """What checksums become when 256 * 2**level zero bytes follow."""
    table = _shift_tables(level)
    parts = [table[k].take((crcs >> np.uint32(8 * k)) & np.uint32(0xFF)) for k in range(4)]
    shifted: NDArray[np.uint32] = parts[0] ^ parts[1] ^ parts[2] ^ parts[3]
    return shifted


@cache
def _byte_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@cache
def _by_place() -> NDArray[np.uint32]:
    """[256 * 256]: what byte b at place p of a block of 256 adds to its checksum, at p * 256 + b."""
    table = np.empty((_BLOCK, 256), np.uint32)
    table[-1] = _byte_table()
    for place in range(_BLOCK - 2, -1, -1):
        table[place] = _followed_by_zero(table[place + 1])
    return table.reshape(-1)


@cache
def _shift_tables(level: int) -> NDArray[np.uint32]:
    """[4, 256]: what each byte of a checksum becomes when 256 * 2**level zero bytes follow."""
    values = np.arange(256, dtype=np.uint32)[None] << (np.uint32(8) * np.arange(4, dtype=np.uint32))[:, None]
    if level:
        return _shifted(_shifted(values, level - 1), level - 1)
    for _ in range(_BLOCK):
        values = _followed_by_zero(values)
    return values


def _followed_by_zero(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return _byte_table().take(crcs & np.uint32(0xFF)) ^ (crcs >> np.uint32(8))


def _bytewise(data: bytes) -> int:
    crc, table = _WORD, _byte_table()
    for byte in data:
        crc = int(table[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ _WORD


HEADER, FOOTER = 12, 4
Index = NDArray[np.int64]
"""[records, 2]: where the data of each record begins, and its length."""


def encode_record(data: bytes) -> bytes:
    """The bytes of one record as they stand in a file."""
    length = struct.pack("<Q", len(data))
    crcs = (struct.pack("<I", mask_crc(crc32c(part))) for part in (length, data))
    return length + next(crcs) + data + next(crcs)


def write_records(path: str | Path, records: Iterable[bytes]) -> None:
    """A file of these records."""
    path = Path(path)
    with path.open("wb") as file:
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
    path = Path(path)
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            headers, starts, fault = _read_headers(path, file.fileno(), size)
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
    if check and mask_crc(crc32c(data)) != struct.unpack_from("<I", found, length)[0]:
        raise DataError(f"{path}: byte {start:,}: a record of {length:,} bytes does not match its checksum")
    return data


def _read_headers(path: Path, file: int, size: int) -> tuple[bytes, list[int], str]:
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


_THREADS = 16  # the disk works, not the processor


def index_shards(
    paths: Sequence[Path], kept: Path, faults: list[str] | None = None
) -> tuple[NDArray[np.int64], Index]:
    """Records of each shard, and where the records of all shards lie, one shard after the other.

    A broken shard is a DataError; for whoever hands in a list of `faults` it is one more of them, and the records
    before its fault count.
    """
    stamps = np.array([[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, paths)], np.int64)
    names = np.array([path.name for path in paths])
    with suppress(DataError):
        found = read_npz(kept)
        if _same(found, {"names": names, "stamps": stamps}) and _is_plausible(found, stamps[:, 0]):
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
    with suppress(OSError):
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}.npz")
        np.savez(unfinished, names=names, stamps=stamps, counts=counts, index=index)
        unfinished.replace(kept)
    return counts, index


def _same(found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> bool:
    return all(name in found and np.array_equal(found[name], array) for name, array in wanted.items())


def _is_plausible(found: Mapping[str, NDArray[Any]], sizes: NDArray[np.int64]) -> bool:
    """Whether the records can lie where the index says, each inside its shard."""
    counts, index = found.get("counts"), found.get("index")
    if counts is None or index is None or counts.dtype != np.int64 or index.dtype != np.int64:
        return False
    if counts.shape != sizes.shape or (counts < 0).any() or index.shape != (counts.sum(), 2):
        return False
    start, length = index.T
    ends = np.repeat(sizes, counts) - FOOTER
    return bool(((start >= HEADER) & (length >= 0) & (start <= ends) & (length <= ends - start)).all())
