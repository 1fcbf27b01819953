"""Where every record of a set of TFRecord shards lies, found once and kept in a hidden file beside the shards.

Following the lengths through 150 GB touches every record; the kept index is used as long as each shard has the size
and the time of change that it had. A folder that cannot be written to just goes without.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hotloop.data.tfrecord import Index, index_records

_THREADS = 16  # the disk works, not the processor


def index_shards(paths: Sequence[Path], kept: Path) -> tuple[NDArray[np.int64], Index]:
    """Records of each shard, and where the records of all shards lie, one shard after the other."""
    stamps = np.array([[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, paths)], np.int64)
    names = np.array([path.name for path in paths])
    damaged = (OSError, ValueError, KeyError, BadZipFile, EOFError)
    with suppress(*damaged), kept.open("rb") as file, np.load(file) as found:
        if np.array_equal(found["names"], names) and np.array_equal(found["stamps"], stamps):
            return found["counts"], found["index"]
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(index_records, paths))
    counts, index = np.array([len(part) for part in parts], np.int64), np.concatenate(parts)
    with suppress(OSError):
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}.npz")
        np.savez(unfinished, names=names, stamps=stamps, counts=counts, index=index)
        unfinished.replace(kept)
    return counts, index
