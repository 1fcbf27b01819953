"""What a layer benchmark is: parameters, data, a forward function and a loss, and both again in plain float64.

One record a layer, built from its config; loops, timing, checking and printing see nothing else of it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from hotloop.families.kernels import reference
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
    x_shape: Callable[[int], tuple[int, ...]]
    """rows -> shape of a batch's input."""
    row_axes: Mapping[str, int]
    """Which axis of `x`, `labels` and the output `y` counts rows."""
    apply: Callable[[Any, Array], Array]
    reference_apply: Callable[[Any, Array], Array]
    criterion: str
    """A name of `CRITERIA`: how far an output is from its target."""
    target: Callable[[Batch], Array]
    loss_terms: int
    """How many terms one replica's mean has: what float16 gradients have to be scaled up by."""
    items: int
    """What one replica's iteration counts in items/sec."""
    cost: Callable[[int], Cost]
    """bytes of a number -> cost of one replica's iteration."""
    labels: Callable[[Any], Any] | None = None
    """input -> labels, on the host, where there are any."""
    note: str = ""
    """One line to say before the run, where the shape has a surprise in it."""

    def data(self, generator: np.random.Generator, rows: int, dtype: DTypeLike) -> HostBatch:
        """One batch, drawn in float32 whatever the type, so that every type sees the same data."""
        x = generator.standard_normal(self.x_shape(rows), np.float32).astype(dtype)
        return {"x": x, "labels": self.labels(x)} if self.labels else {"x": x}

    def loss(self, params: Any, batch: Batch) -> Array:
        """Mean over rows, in float32 at least."""
        return CRITERIA[self.criterion][0](self.apply(params, batch["x"]), self.target(batch))

    def reference_loss(self, params: Any, batch: Batch) -> Array:
        return CRITERIA[self.criterion][1](self.reference_apply(params, batch["x"]), self.target(batch))

    def lay_out(self, batch: Batch) -> Batch:
        """A batch of rows first with its rows where the layer has them."""
        return {name: jnp.moveaxis(leaf, 0, self.row_axes[name]) for name, leaf in batch.items()}

    def rows_first(self, batch: Batch) -> Batch:
        return {name: jnp.moveaxis(leaf, self.row_axes[name], 0) for name, leaf in batch.items()}


def mean_square(y: Array, target: Array) -> Array:
    """Mean of squared differences, in float32."""
    return jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Softmax cross-entropy at class labels, mean over rows and steps, in float32."""
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(wide, -1) - chosen).mean()


CRITERIA = {
    "mean square": (mean_square, reference.mean_square),
    "cross-entropy": (cross_entropy, reference.cross_entropy),
}


def matmul_precision(dtype: str, half_partials: bool, platform: str) -> AbstractContextManager[None]:
    """How products are summed while a program is traced: 16 bits if asked for, and float32 never as TF32."""
    algorithm: Any = None
    if half_partials:
        algorithm = {"float16": "F16_F16_F16", "bfloat16": "BF16_BF16_BF16"}[dtype]
    elif dtype == "float32" and platform != "cpu":
        algorithm = "highest"
    context: AbstractContextManager[None] = jax.default_matmul_precision(algorithm)
    return context
