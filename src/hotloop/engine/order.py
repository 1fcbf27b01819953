"""Which samples make up which weight update: the endless stream of shuffled passes over a data set.

Update n takes the places n*B .. n*B + B - 1 of the stream. Where a place lies (its pass, and how far into it) is worked
out in Python integers for a call's first update and in 32-bit arithmetic from there on, by the same code on the host
and inside a compiled program, bit for bit.

A pass is a permutation that is evaluated only where it is asked for, without state, sort or index array: swap-or-not
(Hoang, Morris, Rogaway, CRYPTO 2012). Each round pairs every x with `pivot - x (mod n)` and swaps the pair when a hash
of it says so. Both members of a pair take the same decision, so each round is a bijection for any n, and 24 rounds mix
well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from hotloop.engine.device import platform
from hotloop.errors import CheckpointError, DataError

Remainder = Literal["carry", "drop"]
ROUNDS = 24
LARGEST = 2**31 - 1  # sums of two positions must fit 32 bits
_GOLDEN = np.uint32(0x9E3779B9)


def permute(positions: ArrayLike, n: int, seed: int | ArrayLike, epoch: ArrayLike) -> Any:
    """The samples at `positions` (uint32 below 2n) of the pass named by seed and epoch, and of the next.

    Position n is the first of epoch + 1, so that a batch may straddle two passes. `seed` is a whole number or
    its two words (`seed_words`), so that it may be an argument of a compiled program; `epoch` is one number
    or an array that broadcasts against `positions`. Returns uint32 below n, by numpy for a numpy array and by
    jax for a jax array.
    """
    check_size(n)
    xp: Any = positions.__array_namespace__()  # type: ignore[union-attr]
    if n == 1:  # besides being simple: XLA's GPU compiler fails on shuffles of one
        return xp.zeros_like(positions)
    size = np.uint32(n)
    over = positions >= size
    pivots, salts = _round_keys(xp, size, seed, xp.asarray(epoch).astype(np.uint32))

    def swap_or_not(r: Any, x: Any) -> Any:
        partner = xp.where(over, pivots[r][1], pivots[r][0]) + (size - x)
        partner = xp.where(partner >= size, partner - size, partner)
        salt = xp.where(over, salts[r][1], salts[r][0])
        return xp.where(_mix(xp.maximum(x, partner) ^ salt) & np.uint32(1) != 0, partner, x)

    x = xp.where(over, positions - size, positions)
    if xp is np:
        for r in range(ROUNDS):
            x = swap_or_not(r, x)
        return x
    # Compiled for a CPU, four rounds a trip run as fast as all 24 in a row and compile in half the time; an accelerator
    # wants one fused kernel.
    return jax.lax.fori_loop(0, ROUNDS, swap_or_not, x, unroll=4 if platform() == "cpu" else ROUNDS)


def seed_words(seed: int) -> np.ndarray:
    """A seed of up to 64 bits as two uint32 words, low word first."""
    return np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)


def check_size(n: int) -> None:
    """Refuse what 32-bit positions cannot count."""
    if not 1 <= n <= LARGEST:
        raise DataError(f"a data set of {n} samples cannot be shuffled: it must have 1 to {LARGEST} samples")


def _round_keys(xp: Any, size: np.uint32, seed: int | ArrayLike, epoch: Any) -> tuple[Any, Any]:
    """Pivots below n and hash salts, each of shape [rounds, 2, *epoch.shape], the 2 for this epoch and the
    next."""
    words = xp.asarray(seed_words(seed) if isinstance(seed, int) else seed)
    # Never a scalar: numpy warns when a scalar wraps around, and wrapping is the point.
    epochs = xp.stack([epoch, epoch + np.uint32(1)])[None]
    low, high = (word.reshape((1,) * epochs.ndim) for word in (words[:1], words[1:]))
    root = _mix(low ^ _mix(high + _GOLDEN))
    first, second = _mix(root + epochs), _mix(_mix(root + _GOLDEN) ^ epochs)
    counter = xp.arange(2 * ROUNDS, dtype=np.uint32).reshape(-1, *(1,) * (epochs.ndim - 1))
    drawn = _mix(_mix(first + counter * _GOLDEN) ^ second)
    return drawn[:ROUNDS] % size, drawn[ROUNDS:]


def _mix(x: Any) -> Any:
    """A 32-bit hash (C. Wellons' low-bias constants): each output bit depends on every input bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


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
        return permute(places, self.samples, start["seed"], start["epoch"] + begin // period)

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
