"""Initial values for a whole tree of parameters from one flat random draw.

Many draws of many shapes compile one by one and can cost more than the training program; one flat draw, cut into
pieces, compiles once (docs/layers.md). It knows shapes and scales, no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import erf, prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike
from numpy.typing import NDArray

Kind = Literal["normal", "truncated", "uniform", "constant"]
DRAWN = ("normal", "truncated", "uniform")
_WITHIN = erf(2**0.5)  # of a normal's values lie within two standard deviations
_SPREAD = 0.87962566103423978  # standard deviation of a standard normal cut off at two
_INSIDE = np.nextafter(np.float32(-1), np.float32(0))  # -1 itself would become an infinite normal
THREEFRY = "threefry2x32"
PIECE = 2**22  # numbers that `draw_on_host` draws at a time: 16 MiB


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
    leaves, tree = _flatten(specs)
    flats: Any = _draw(key, *_sizes(leaves))
    if not isinstance(flats[0], jax.core.Tracer):
        flats = jax.device_get(flats)  # numpy cuts without compiling: 1 s instead of 4 for a ResNet-50
    return jax.tree.unflatten(tree, [jnp.asarray(value, dtype) for value in _cut(leaves, flats)])


def draw_on_host(key: Array, specs: Any) -> Any:
    """The numbers of `draw` as host arrays, for what a device has no room for: it draws `PIECE` of them at a time.

    A generator whose numbers do not go by their places (another than jax's own) draws all at once.
    """
    leaves, tree = _flatten(specs)
    sizes = _sizes(leaves)
    own = key.dtype == jax.random.key(0, impl=THREEFRY).dtype
    by_place = own and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    flats = _draw_pieces(key, sizes) if by_place else jax.device_get(_draw(key, *sizes))
    return jax.tree.unflatten(tree, [np.asarray(value, np.float32) for value in _cut(leaves, flats)])


def _flatten(specs: Any) -> tuple[list[Spec], Any]:
    return jax.tree.flatten(specs, is_leaf=lambda leaf: isinstance(leaf, Spec))


def _sizes(leaves: Sequence[Spec]) -> list[int]:
    """How many numbers of each kind in DRAWN are needed."""
    return [sum(prod(leaf.shape) for leaf in leaves if leaf.kind == kind) for kind in DRAWN]


def _cut(leaves: Sequence[Spec], flats: Sequence[Any]) -> Iterator[Any]:
    """Each leaf's values, of the numbers drawn of each kind."""
    rest = dict(zip(DRAWN, flats, strict=True))
    for leaf in leaves:
        if leaf.kind == "constant":
            yield np.full(leaf.shape, leaf.scale, np.float32)  # as it is: jax would compile its conversion
            continue
        size, flat = prod(leaf.shape), rest[leaf.kind]
        yield flat[:size].reshape(leaf.shape) * np.float32(leaf.scale)
        rest[leaf.kind] = flat[size:]


@partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Array, normals: int, truncated: int, uniforms: int) -> tuple[Array, Array, Array]:
    """Standard normals, those cut off at two, and uniforms in (-1, 1)."""
    flat = jax.random.uniform(key, (normals + truncated + uniforms,), jnp.float32, _INSIDE, 1.0)
    whole, cut, uniform = jnp.split(flat, (normals, normals + truncated))
    return _spread("normal", whole), _spread("truncated", cut), uniform


def _spread(kind: str, uniform: Array) -> Array:
    """Uniforms in (-1, 1) as numbers of a kind."""
    if kind == "uniform":
        return uniform
    return 2**0.5 * lax.erf_inv(uniform if kind == "normal" else np.float32(_WITHIN) * uniform)


def _draw_pieces(key: Array, sizes: Sequence[int]) -> list[NDArray[np.float32]]:
    """What `_draw` gives, on the host; the device holds a piece at a time."""
    found, first = [], 0
    for kind, size in zip(DRAWN, sizes, strict=True):
        flat = np.empty(size, np.float32)
        length = min(size, PIECE)
        for start in range(0, size, PIECE):
            piece = np.asarray(_draw_piece(key, np.uint32(first + start), length, kind))
            flat[start : start + length] = piece[: size - start]
        found.append(flat)
        first += size
    return found


@partial(jax.jit, static_argnums=(2, 3))
def _draw_piece(key: Array, first: Array, length: int, kind: str) -> Array:
    """The numbers at the places from `first` on of `jax.random.uniform(key, ...)`, as it makes them of their bits."""
    places = first + jnp.arange(length, dtype=jnp.uint32)
    words = threefry_2x32(jax.random.key_data(key), jnp.concatenate([jnp.zeros_like(places), places]))
    bits = (words[:length] ^ words[length:]) >> np.uint32(9) | np.float32(1).view(np.uint32)
    floats = lax.bitcast_convert_type(bits, jnp.float32) - np.float32(1)
    return _spread(kind, lax.max(_INSIDE, floats * (np.float32(1) - _INSIDE) + _INSIDE))
