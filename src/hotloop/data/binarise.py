"""Grey images made black and white once and for all: each pixel is 1 with the probability of its greyness.

The bits depend on the pixel's place and the seed alone, and come from a raw PCG64 stream, which numpy promises
not to change: the same images give the same bits on every machine.
"""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4096
_THRESHOLDS = ((np.arange(256, dtype=np.uint32) * 65536 + 254) // 255).astype(np.uint32)
"""A 16-bit random number is below entry g for a share of g / 255 of them, to the nearest 1 / 65536."""


def binarise(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Zeros and ones in the shape of the images; 0 always gives 0 and 255 always 1."""
    stream = np.random.PCG64(seed)
    bits = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), _BLOCK):
        grey = images[start : start + _BLOCK]
        raw = stream.random_raw(-(-grey.size // 4)).astype("<u8").view("<u2")
        bits[start : start + _BLOCK] = raw[: grey.size].reshape(grey.shape) < _THRESHOLDS[grey]
    return bits
