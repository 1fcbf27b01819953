"""Which tiles the persistent kernels were measured to be fastest with, by what is done, cell, batch and hidden size.

A shape that is not here keeps the plain path. Every entry's blocks must be on the card together, since they wait for
each other: `paths.py` counts them against the multiprocessors before a kernel is taken. It must not import jax.
"""

from typing import NamedTuple

ROWS = 64  # of the matrix unit's left operand; a chain may have fewer, and the rest is never written out


class Tile(NamedTuple):
    """How a recurrence is cut up."""

    units: int
    """Hidden units of a block, or of a cluster of blocks that split them: a multiple of 8."""
    rows: int
    """Rows of a chain: 16, 32 or 64."""
    chains: int
    """Warpgroups of a block, each with rows of its own."""
    part: int
    """Columns of the exchanged state that are fetched and multiplied at once: a multiple of 64."""
    stages: int
    """Parts of the exchanged state that a chain has in shared memory at once: two at least, or all."""
    split: int = 1
    """Blocks of a cluster which have the same units and chains, each a part of the weights, and each one of the chains
    whose sums it collects from all."""

    @property
    def own_chains(self) -> int:
        """Those whose gates a block works out."""
        return self.chains if self.split == 1 else 1

    def grid(self, batch: int, hidden: int) -> tuple[int, int]:
        return batch // (self.rows * self.chains), hidden // self.units

    def blocks(self, batch: int, hidden: int) -> int:
        groups, slices = self.grid(batch, hidden)
        return groups * slices * self.split


ALONE = ((1024, 256),)
"""Batch and hidden size of the tanh RNNs whose whole matrix a block keeps."""
ROWS_ALONE = 8
"""Rows of such a block: the matrix unit's fewest columns, which spreads a batch of 1,024 over 128 multiprocessors."""

INFER = {
    ("rnn", 64, 512): Tile(16, 32, 1, 64, 8),
    ("rnn", 128, 512): Tile(16, 32, 1, 64, 8),
    ("rnn", 256, 1024): Tile(32, 64, 1, 64, 16),
    ("rnn", 128, 1536): Tile(24, 64, 2, 64, 8, 2),
    ("gru", 64, 512): Tile(16, 16, 1, 64, 8),
    ("gru", 128, 512): Tile(16, 32, 1, 64, 8),
    ("gru", 256, 1024): Tile(32, 64, 2, 64, 5, 2),
    ("gru", 128, 1536): Tile(24, 64, 2, 64, 5, 2),
    ("gru", 1024, 256): Tile(32, 64, 1, 64, 4),
    ("gru_reset_after", 64, 512): Tile(8, 32, 1, 64, 8),
    ("gru_reset_after", 128, 512): Tile(8, 64, 1, 64, 8),
    ("gru_reset_after", 256, 1024): Tile(16, 64, 2, 64, 6),
    ("gru_reset_after", 128, 1536): Tile(24, 64, 2, 64, 5, 2),
    ("gru_reset_after", 1024, 256): Tile(16, 64, 2, 64, 4),
    ("lstm", 64, 512): Tile(8, 32, 1, 64, 8),
    ("lstm", 128, 512): Tile(8, 64, 1, 64, 8),
    ("lstm", 256, 1024): Tile(16, 64, 2, 64, 4),
    ("lstm", 128, 1536): Tile(24, 64, 2, 64, 2, 2),
    ("lstm", 1024, 256): Tile(16, 64, 2, 64, 4),
}
FORWARD = INFER
BACKWARD = {
    ("rnn", 64, 512): Tile(16, 32, 1, 64, 8),
    ("rnn", 128, 512): Tile(32, 32, 1, 64, 8),
    ("rnn", 256, 1024): Tile(32, 64, 1, 64, 16),
    ("rnn", 128, 1536): Tile(24, 64, 2, 64, 6, 2),
    ("gru", 64, 512): Tile(32, 16, 1, 64, 12),
    ("gru", 128, 512): Tile(16, 32, 1, 64, 16),
    ("gru", 256, 1024): Tile(32, 64, 2, 128, 2, 2),
    ("gru", 1024, 256): Tile(32, 64, 1, 64, 12),
    ("gru_reset_after", 64, 512): Tile(32, 16, 1, 64, 12),
    ("gru_reset_after", 128, 512): Tile(16, 32, 1, 64, 16),
    ("gru_reset_after", 256, 1024): Tile(32, 64, 2, 128, 2, 2),
    ("gru_reset_after", 1024, 256): Tile(32, 64, 1, 64, 12),
    ("lstm", 64, 512): Tile(16, 32, 1, 256, 5),
    ("lstm", 128, 512): Tile(16, 32, 1, 256, 5),
    ("lstm", 256, 1024): Tile(32, 64, 2, 64, 3, 2),
    ("lstm", 1024, 256): Tile(32, 64, 1, 64, 12),
}
