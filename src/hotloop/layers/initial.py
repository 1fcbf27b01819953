"""Initial values for a whole tree of parameters from one flat random draw.

Many separate draws of many shapes compile one by one and can cost more than the training program; one flat draw, cut
into pieces, compiles once. It knows shapes and scales, no model.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

Kind = Literal["normal", "uniform", "constant"]


@dataclass(frozen=True)
class Spec:
    """One parameter: `scale` is the standard deviation of a normal, the limit of a uniform, or the constant itself."""

    shape: tuple[int, ...]
    kind: Kind = "constant"
    scale: float = 0.0


def he_normal(shape: tuple[int, ...]) -> Spec:
    """Normal with variance 2 / fan-in, all axes but the last being fan-in (HWIO and [I, O])."""
    return Spec(shape, "normal", (2.0 / prod(shape[:-1])) ** 0.5)


def glorot_uniform(shape: tuple[int, ...]) -> Spec:
    """Uniform with variance 2 / (fan-in + fan-out), the last two axes being in and out and the others space."""
    space = prod(shape[:-2])
    return Spec(shape, "uniform", (6.0 / (space * (shape[-2] + shape[-1]))) ** 0.5)


def constant(shape: tuple[int, ...], value: float = 0.0) -> Spec:
    """Every element the same."""
    return Spec(shape, "constant", value)


def draw(key: Array, specs: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """A tree of arrays for a tree of `Spec`s, the random ones cut from one draw a kind."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    normal_key, uniform_key = jax.random.split(key)
    sizes = {kind: sum(prod(s.shape) for s in leaves if s.kind == kind) for kind in ("normal", "uniform")}
    flat = {
        "normal": np.asarray(jax.random.normal(normal_key, sizes["normal"])),
        "uniform": np.asarray(jax.random.uniform(uniform_key, sizes["uniform"], minval=-1.0)),
    }
    used = {"normal": 0, "uniform": 0}
    values = []
    for spec in leaves:
        if spec.kind == "constant":
            values.append(jnp.full(spec.shape, spec.scale, dtype))
            continue
        start, stop = used[spec.kind], used[spec.kind] + prod(spec.shape)
        used[spec.kind] = stop
        values.append(jnp.asarray(flat[spec.kind][start:stop].reshape(spec.shape) * spec.scale, dtype))
    return jax.tree.unflatten(tree, values)
