"""What sampling gives: the draws as the user's pytree, what each chain did, and how far it can be trusted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from hotloop.errors import MissingExtra, OptionError
from hotloop.mcmc import diagnostics

PyTree = Any


class Seconds(NamedTuple):
    """Where the time went; compiling is in neither of the others."""

    compile: float
    warmup: float
    sampling: float


class Diagnosis(NamedTuple):
    """One value for each number of a position, in the shapes of a position."""

    r_hat: PyTree
    """Near 1; above 1.01 chains disagree."""
    ess_bulk: PyTree
    ess_tail: PyTree


@dataclass(frozen=True)
class Result:
    """The draws after warm-up of all chains."""

    samples: PyTree
    """Positions; every leaf begins with [chains, draws]."""
    log_density: Float[Array, "chains draws"]
    acceptance: Float[Array, "chains draws"]
    """The probability with which each proposal was taken."""
    diverging: Bool[Array, "chains draws"]
    leapfrogs: Int[Array, "draws"]
    """Of each draw, the same for all chains."""
    step_size: float
    trajectory: float
    """Mean length of the draws' trajectories: step size times the mean of `leapfrogs`."""
    mass: PyTree
    """Of the shapes of a position: the inverse of the variances that warm-up found."""
    names: tuple[str, ...]
    """Of the leaves."""
    seconds: Seconds

    @property
    def divergences(self) -> int:
        """Trajectories whose energy ran away: where there are any, the density is steeper than the step size allows."""
        return int(np.asarray(self.diverging).sum())

    def diagnose(self) -> Diagnosis:
        """R-hat and effective sample sizes of every number of a position."""
        estimates = diagnostics.r_hat, diagnostics.ess_bulk, diagnostics.ess_tail
        return Diagnosis(*(jax.tree.map(partial(_each, one), self.samples) for one in estimates))

    def summary(self) -> str:
        """A table: mean, standard deviation, standard error of the mean, effective sample sizes and R-hat."""
        lines = [f"{'':16}{'mean':>11}{'sd':>11}{'error':>11}{'bulk ESS':>10}{'tail ESS':>10}{'R-hat':>8}"]
        found = zip(*(jax.tree.leaves(each) for each in (self.samples, *self.diagnose())), strict=True)
        for name, (leaf, r_hat, bulk, tail) in zip(self.names, found, strict=True):
            values = np.asarray(leaf, np.float64)
            mean, spread = values.mean((0, 1)), values.std((0, 1))
            for place in np.ndindex(mean.shape):
                shown = f"{name}{list(place)}" if place else name
                error = spread[place] / np.sqrt(bulk[place])
                lines.append(
                    f"{shown:16}{mean[place]:11.4g}{spread[place]:11.4g}{error:11.2g}"
                    f"{bulk[place]:10.0f}{tail[place]:10.0f}{r_hat[place]:8.3f}"
                )
        chains, draws = self.log_density.shape
        lines.append(
            f"{chains} chains of {draws} draws, acceptance {float(self.acceptance.mean()):.2f}, "
            f"{float(self.leapfrogs.mean()):.1f} leapfrogs of {self.step_size:.3g} a draw, "
            f"{self.divergences} divergences"
        )
        return "\n".join(lines)

    def to_arviz(self) -> Any:
        """As arviz has it, an xarray.DataTree: groups `posterior` and `sample_stats`. Needs the extra `arviz`."""
        try:
            from arviz_base import from_dict
        except ImportError:
            raise MissingExtra("arviz-base", "arviz", "a result as arviz' DataTree") from None
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.samples)]
        _check_names(self.names, [leaf.ndim - 2 for leaf in leaves])
        shape = self.log_density.shape
        return from_dict(
            {
                "posterior": dict(zip(self.names, leaves, strict=True)),
                "sample_stats": {
                    "lp": np.asarray(self.log_density),
                    "acceptance_rate": np.asarray(self.acceptance),
                    "diverging": np.asarray(self.diverging),
                    "n_steps": np.broadcast_to(np.asarray(self.leapfrogs), shape),
                    "step_size": np.full(shape, self.step_size),
                },
            }
        )


def _check_names(names: Sequence[str], axes: Sequence[int]) -> None:
    """OptionError for names of which arviz would keep one of two, or none: those of its axes, too."""
    of_axes = [f"{name}_dim_{axis}" for name, count in zip(names, axes, strict=True) for axis in range(count)]
    taken = Counter([*names, *of_axes, "chain", "draw"])
    if wrong := [name for name in names if taken[name] > 1 or "/" in name]:
        raise OptionError(
            f"to_arviz: {wrong[0]} is the name of another variable or axis there, or has a slash: "
            "rename that part of the position"
        )


def _each(estimate: Callable[[Any], float], leaf: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The estimate of each number, from its draws [chains, draws]."""
    values = np.asarray(leaf, np.float64)
    flat = values.reshape(*values.shape[:2], -1)
    found = [estimate(flat[..., place]) for place in range(flat.shape[-1])]
    return np.array(found).reshape(values.shape[2:])
