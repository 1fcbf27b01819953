"""Whether every image of a store can be read, and decoded when asked for, by several processes.

Faults are texts that name file and position. It must not know how the images are stored.
"""

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise

from hotloop.data.encoded import ImageStore
from hotloop.data.jpeg import ImageError, decode
from hotloop.data.parallel import in_processes
from hotloop.errors import DataError

_PIECE = 256


def check_images(
    store: ImageStore, *, decoding: bool, workers: int, advance: Callable[[int], None]
) -> list[str]:
    """What is wrong with the images, in their order; `advance` hears how many have been looked at."""
    ends = [*range(0, len(store), _PIECE), len(store)]
    pieces = list(pairwise(ends))
    found = {}
    with closing(in_processes(_faults, (store, decoding), pieces, workers)) as done:
        for piece, faults in done:
            found[piece] = faults
            advance(piece[1] - piece[0])
    return [fault for piece in pieces for fault in found[piece]]


def _faults(shared: tuple[ImageStore, bool], piece: tuple[int, int]) -> list[str]:
    store, decoding = shared
    faults = []
    for number in range(*piece):
        try:
            image = store.read(number)
        except DataError as error:
            faults.append(str(error))
            continue
        try:
            if decoding:
                decode(image.encoded)
        except ImageError as error:
            faults.append(f"{image.where}: corrupt image ({error})")
    return faults
