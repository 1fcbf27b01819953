"""Initial values for a whole tree of parameters from one flat random draw.

Many draws of many shapes compile one by one and can cost more than the training program; one flat draw, cut into
pieces, compiles once (docs/layers.md). It knows shapes and scales, no model.
"""

from dataclasses import dataclass
from functools import partial
from math import erf, prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

Kind = Literal["normal", "truncated", "uniform", "constant"]
DRAWN = ("normal", "truncated", "uniform")
_WITHIN = erf(2**0.5)  # of a normal's values lie within two standard deviations
_SPREAD = 0.87962566103423978  # standard deviation of a standard normal cut off at two


@dataclass(frozen=True)
class Spec:
    """One parameter: `scale` is a normal's standard deviation before any cut, a uniform's limit, or the constant."""

    shape: tuple[int, ...]
    kind: Kind
    scale: float


def he_normal(shape: tuple[int, ...]) -> Spec:
    """Normal of variance 2 / fan-in, where all axes but the last are fan-in (HWIO and [I, O])."""
    return Spec(shape, "normal", (2.0 / prod(shape[:-1])) ** 0.5)


def truncated_normal(shape: tuple[int, ...]) -> Spec:
    """Normal values cut off at two standard deviations, of variance 1 / fan-in: Keras' VarianceScaling."""
    return Spec(shape, "truncated", 1 / (prod(shape[:-1]) ** 0.5 * _SPREAD))


def glorot_uniform(shape: tuple[int, ...]) -> Spec:
    """Uniform of variance 2 / (fan-in + fan-out), where the last two axes are in and out, the others space."""
    space = prod(shape[:-2])
    return Spec(shape, "uniform", (6.0 / (space * (shape[-2] + shape[-1]))) ** 0.5)


def constant(shape: tuple[int, ...], value: float = 0.0) -> Spec:
    """Every element the same."""
    return Spec(shape, "constant", value)


def draw(key: Array, specs: Any, dtype: DTypeLike = jnp.float32) -> Any:
    """A tree of arrays for a tree of `Spec`s, drawn in float32 and rounded to `dtype`."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    sizes = [sum(prod(leaf.shape) for leaf in leaves if leaf.kind == kind) for kind in DRAWN]
    flats = _draw(key, *sizes)
    if not isinstance(flats[0], jax.core.Tracer):
        flats = jax.device_get(flats)  # numpy cuts without compiling: 1 s instead of 4 for a ResNet-50
    rest = dict(zip(DRAWN, flats, strict=True))
    values = []
    for leaf in leaves:
        if leaf.kind == "constant":
            values.append(jnp.asarray(np.full(leaf.shape, leaf.scale), dtype))
            continue
        size, flat = prod(leaf.shape), rest[leaf.kind]
        values.append(jnp.asarray(flat[:size].reshape(leaf.shape) * np.float32(leaf.scale), dtype))
        rest[leaf.kind] = flat[size:]
    return jax.tree.unflatten(tree, values)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Array, normals: int, truncated: int, uniforms: int) -> tuple[Array, Array, Array]:
    """Standard normals, those cut off at two, and uniforms in (-1, 1)."""
    inside = np.nextafter(np.float32(-1), np.float32(0))  # -1 itself would become an infinite normal
    flat = jax.random.uniform(key, (normals + truncated + uniforms,), jnp.float32, inside, 1.0)
    whole, cut, uniform = jnp.split(flat, (normals, normals + truncated))
    return 2**0.5 * lax.erf_inv(whole), 2**0.5 * lax.erf_inv(np.float32(_WITHIN) * cut), uniform
