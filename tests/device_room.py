"""How much of each device's memory arrays take while something runs, for tests of what need fit on no device."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import hotloop

OURS = str(Path(hotloop.__file__).parent)


def floats_by_device() -> Counter[Any]:
    """Bytes of the floats that lie on each device; images and labels do not count."""
    buffers = {}  # a part of an array may be an array, too
    for array in jax.live_arrays():
        if jnp.issubdtype(array.dtype, jnp.floating):
            for shard in array.addressable_shards:
                buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    held: Counter[Any] = Counter()
    for (device, _), size in buffers.items():
        held[device] += size
    return held


@contextmanager
def watch_devices() -> Iterator[Counter[Any]]:
    """By device the most bytes of floats that lay there beside what was there before: seen at each return from one of
    our functions, where all that it has made is still alive."""
    there = jax.live_arrays()  # held, so that none of it goes meanwhile and makes room in the count
    before, most = floats_by_device(), Counter[Any]()
    most.update(dict.fromkeys(jax.devices(), 0))

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code.co_filename.startswith(OURS):
            for device, held in floats_by_device().items():
                most[device] = max(most[device], held - before[device])

    sys.setprofile(look)
    try:
        yield most
    finally:
        sys.setprofile(None)
        del there
