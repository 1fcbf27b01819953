"""Which samples make up which weight update: the endless stream of shuffled passes over a data set.

Update n takes the places n*B .. n*B + B - 1 of the stream. Where a place lies (its pass, and how far into it)
is worked out in Python integers for a call's first update and in 32-bit arithmetic from there on, by the same
code on the host and inside a compiled program. It must not know what a sample is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

from hotloop.engine.shuffle import check_size, permuted, seed_words
from hotloop.errors import CheckpointError, DataError

Remainder = Literal["carry", "drop"]


@dataclass(frozen=True)
class Order:
    """The order of `samples` samples in batches of `batch_size`, named by a seed of up to 64 bits.

    Where the batch size does not divide the number of samples, "carry" lets a batch begin in one pass and end
    in the next (every sample exactly once a pass), and "drop" leaves the last samples of each pass out, so
    that every pass begins with a batch (which samples are left out differs from pass to pass).
    """

    samples: int
    batch_size: int
    seed: int = 0
    remainder: Remainder = "carry"
    shuffled: bool = True
    """Without it every pass takes the samples as they lie."""

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise DataError("the data set is empty: there is nothing to train on")
        check_size(self.samples)
        if self.batch_size < 1:
            raise DataError(f"batch size {self.batch_size}: must be at least 1")
        if self.batch_size > self.samples:
            raise DataError(
                f"batch size {self.batch_size} is larger than the data set of {self.samples} samples: "
                f"take a batch of at most {self.samples}"
            )

    @property
    def period(self) -> int:
        """Places of the stream that one pass fills."""
        dropped = self.samples % self.batch_size if self.remainder == "drop" else 0
        return self.samples - dropped

    @property
    def longest_call(self) -> int:
        """Updates of one call for which 32-bit places suffice."""
        return int((2**32 - self.samples) // self.batch_size) - 1

    def start(self, update: int) -> dict[str, Any]:
        """Small scalars that say where an update begins: the arguments of `indices`."""
        epoch, offset = divmod(update * self.batch_size, self.period)
        return {"seed": seed_words(self.seed), "epoch": np.uint32(epoch), "offset": np.uint32(offset)}

    def indices(self, start: Mapping[str, Any], steps: ArrayLike) -> Any:
        """The samples of the updates `steps` (uint32) after `start`, of shape [*steps.shape, batch_size].

        The same numbers by numpy for a numpy array and by jax for a jax array.
        """
        xp: Any = steps.__array_namespace__()  # type: ignore[union-attr]
        begin = start["offset"] + steps[..., None] * np.uint32(self.batch_size)  # type: ignore[index]
        period = np.uint32(self.period)
        places = begin % period + xp.arange(self.batch_size, dtype=np.uint32)
        if not self.shuffled:
            return places % period
        return permuted(places, self.samples, start["seed"], start["epoch"] + begin // period)

    def position(self, update: int) -> dict[str, Any]:
        """What a checkpoint keeps of the data's place."""
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "remainder": self.remainder,
            **({} if self.shuffled else {"shuffled": False}),
            "update": update,
        }

    def check_position(self, saved: Mapping[str, Any]) -> None:
        """Refuse to go on from a checkpoint whose batches were drawn in another order."""
        check_same(self.position(0), saved)


def check_same(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare two positions, all but the update they stand at."""
    for name, value in here.items():
        if name != "update" and saved.get(name) != value:
            label = name.replace("_", " ")
            raise CheckpointError(
                f"the checkpoint was made with {label} {saved.get(name)}, this run has {value}: "
                f"resume with {label} {saved.get(name)}, or start a new run"
            )
