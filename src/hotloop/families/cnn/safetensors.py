"""A strict reader of safetensors files: a length, a JSON header, then the tensors' bytes one after the other.

Nothing in such a file is run, and nothing is believed before it is checked: the header's length, every type, shape and
place. Tensors are read one by one, so that those not asked for cost nothing. It knows no network.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.errors import DataError
from hotloop.options.files import parse_json

LONGEST_HEADER = 1 << 24  # bytes; the format allows 100 million, a ResNet-152 has 90,000
MOST_AXES = 32
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)
}
_BYTES["BOOL"] = 1


@dataclass(frozen=True)
class Tensor:
    """Where in its file a tensor lies, and what it is."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """In bytes."""
        return _BYTES[self.kind] * prod(self.shape)

    def read(self) -> NDArray[np.float32]:
        """The values in float32; 16-bit types widen exactly."""
        if self.kind not in ("F32", "F16", "BF16"):
            raise DataError(
                f"{self.path}: tensor {self.name!r} is {self.kind}: only F32, F16 and BF16 are read"
            )
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(data) != self.size:
            raise DataError(
                f"{self.path}: byte {self.start + len(data):,}: the file ends inside {self.name!r}"
            )
        return _widened(data, self.kind).reshape(self.shape)


def _widened(data: bytes, kind: str) -> NDArray[np.float32]:
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float32)


def tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, after its whole header has been checked against its length."""
    path = Path(path)
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            if length < 8 or header > min(LONGEST_HEADER, length - 8):
                raise DataError(
                    f"{path}: byte 0: not a safetensors file: a header of {header:,} bytes in {length:,} bytes"
                )
            entries = _parsed(path, file.read(header))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    found = [_tensor(path, name, entry, 8 + header) for name, entry in entries.items()]
    _check_places(path, found, 8 + header, length)
    return {tensor.name: tensor for tensor in found}


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        entries = parse_json(text, unique)
    except ValueError as error:
        raise DataError(f"{path}: the header is not proper JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(entries, dict):
        raise DataError(f"{path}: the header is not a JSON object of tensors")
    entries.pop("__metadata__", None)
    return entries


def _tensor(path: Path, name: str, entry: Any, base: int) -> Tensor:
    """One entry of the header, its length agreed with its type and shape."""

    def wrong(what: str) -> DataError:
        return DataError(f"{path}: tensor {name[:200]!r}: {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("the header must give dtype, shape and data_offsets, and nothing else")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _BYTES:
        raise wrong(f"unknown type {str(kind)[:40]!r}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise wrong(f"the shape must be at most {MOST_AXES} whole numbers of 0 or more")
    if not _counts(offsets) or len(offsets) != 2:
        raise wrong("data_offsets must be two whole numbers of 0 or more")
    tensor = Tensor(path, name, kind, tuple(shape), base + offsets[0])
    if offsets[1] - offsets[0] != tensor.size:
        raise wrong(
            f"{kind} of shape {shape} needs {tensor.size:,} bytes, data_offsets give {offsets[1] - offsets[0]:,}"
        )
    return tensor


def _counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def _check_places(path: Path, found: list[Tensor], base: int, length: int) -> None:
    """The tensors must follow one another without gap or overlap, to the end of the file."""
    at = base
    for tensor in sorted(found, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != at:
            raise DataError(
                f"{path}: byte {at:,}: tensor {tensor.name!r} should begin here, not at {tensor.start:,}"
            )
        at += tensor.size
    if at != length:
        what = "is cut short" if length < at else "goes on after its last tensor"
        raise DataError(
            f"{path}: byte {min(at, length):,}: the file of {length:,} bytes {what}: {at:,} expected"
        )
