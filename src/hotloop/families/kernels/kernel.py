"""What a layer benchmark is: parameters, data, a forward function, a loss, and the same two in plain float64.

One record a layer, built from its config; loops, timing, checking and printing see nothing else of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.kernels.costs import Cost

Batch = dict[str, Array]
"""`x`, and `labels` where the loss needs any."""
HostBatch = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Kernel:
    """One layer; `apply` and `loss` are the fast ones, `reference_*` their float64 oracles."""

    title: str
    sizes: Mapping[str, int | str]
    """What the banner says of the shape."""
    init: Callable[[Array, DTypeLike], Any]
    """(key, dtype) -> parameters."""
    data: Callable[[np.random.Generator, int, DTypeLike], HostBatch]
    """(generator, rows, dtype) -> one batch of so many rows."""
    row_axes: Mapping[str, int]
    """Which axis of `x`, `labels` and the output `y` counts rows."""
    apply: Callable[[Any, Array], Array]
    loss: Callable[[Any, Batch], Array]
    """Mean over rows, in float32 at least."""
    loss_terms: int
    """How many terms one replica's mean has: what float16 gradients have to be scaled up by."""
    reference_apply: Callable[[Any, Array], Array]
    reference_loss: Callable[[Any, Batch], Array]
    items: int
    """What one replica's iteration counts in items/sec."""
    cost: Callable[[int], Cost]
    """bytes of a number -> cost of one replica's iteration."""
    note: str = ""
    """One line to say before the run, where the shape has a surprise in it."""


def mean_square(y: Array, target: Array) -> Array:
    """Mean of squared differences, in float32."""
    return jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Softmax cross-entropy at class labels, mean over rows and steps, in float32."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(wide, -1) - chosen).mean()


def draw_normal(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray[Any, Any]:
    """Standard normal numbers, drawn in float32 whatever the type, so that every type sees the same data."""
    return generator.standard_normal(shape, np.float32).astype(dtype)
