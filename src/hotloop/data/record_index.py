"""Where every record of a set of TFRecord shards lies, found once and kept in a hidden file beside the shards.

Following the lengths through 150 GB touches every record; the kept index is used as long as each shard has the size
and the time of change that it had. A folder that cannot be written to just goes without.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotloop.data.npz import read_npz
from hotloop.data.tfrecord import FOOTER, HEADER, Index, index_until_fault
from hotloop.errors import DataError
from hotloop.rehearsal import begin_work

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
        if _same(found, {"names": names, "stamps": stamps}) and _whole(found, stamps[:, 0]):
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


def _whole(found: Mapping[str, NDArray[Any]], sizes: NDArray[np.int64]) -> bool:
    """Whether the records can lie where the index says, each inside its shard."""
    counts, index = found.get("counts"), found.get("index")
    if counts is None or index is None or counts.dtype != np.int64 or index.dtype != np.int64:
        return False
    if counts.shape != sizes.shape or (counts < 0).any() or index.shape != (counts.sum(), 2):
        return False
    start, length = index.T
    ends = np.repeat(sizes, counts) - FOOTER
    return bool(((start >= HEADER) & (length >= 0) & (start <= ends) & (length <= ends - start)).all())
