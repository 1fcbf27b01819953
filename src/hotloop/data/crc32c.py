"""CRC-32C (Castagnoli), the checksum of TFRecord files: by a compiled package where one is installed, else by numpy.

A CRC is linear over XOR, so the checksum of a block is the XOR of one table entry for each (place, byte), and
blocks are joined pairwise. It must not know what is checked.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_BLOCK = 256
_MASK_DELTA = 0xA282EAD8
_WORD = 0xFFFFFFFF

Bytes = bytes | bytearray | memoryview


def crc32c(data: Bytes) -> int:
    """The checksum of the bytes."""
    return _fastest()(bytes(data))


def masked(crc: int) -> int:
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
