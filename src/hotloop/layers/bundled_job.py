"""How a grouped convolution is cut up into the blocks of `bundled_kernel.py`. It knows no jax."""

from typing import Any, NamedTuple

from hotloop.layers.persistent_tiles import ROWS

APART = 8
"""Channels more than a bundle's that are fetched: a matrix load's 8 pixels lie in different banks then."""
PITCHES = (16, 32, 64)
"""Pixels from a row of the image to the next in shared memory: of those that divide a warpgroup's pixels the fewest
that hold a row and its edges; what is found for those between two rows is never written out."""


class Job(NamedTuple):
    """One call of the kernel."""

    images: int
    height: int  # of the result
    width: int
    channels: int
    size: tuple[int, int]  # of the convolution's kernel
    edge: tuple[int, int]  # rows above and columns left of the input that are zeros
    bundle: int  # channels that are multiplied together
    parts: int  # warpgroups of a block
    dtype: Any

    @property
    def columns(self) -> int:
        """Of an image that a block has: all, or equal shares of more than fit."""
        most = max(PITCHES) - self.size[1] + 1
        return -(-self.width // -(-self.width // most))

    @property
    def pitch(self) -> int:
        return min(pitch for pitch in PITCHES if pitch >= self.columns + self.size[1] - 1)

    @property
    def rows(self) -> int:
        """Of an image that a block has."""
        return self.parts * ROWS // self.pitch

    @property
    def fetched(self) -> tuple[int, int, int]:
        """Rows, columns and channels of the input that a block fetches."""
        return self.rows + self.size[0] - 1, self.pitch, self.bundle + APART

    @property
    def share(self) -> float:
        """Of the pixels that are multiplied those of an image: the rest lies between its rows and beyond its end."""
        _, across, down, _ = self.grid
        return self.height * self.width / (across * down * self.parts * ROWS)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        across, down = -(-self.width // self.columns), -(-self.height // self.rows)
        return self.channels // self.bundle, across, down, self.images
