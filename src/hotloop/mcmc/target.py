"""A log density over any pytree as one over columns [z, chains], and the checks of where the chains start.

What cannot work is refused here with one line, before anything is compiled for long: leaves that are no floats, shapes
that do not fit, a log density that is not one number, or not finite at the start.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from hotloop.errors import HotloopError, OptionError, first_line
from hotloop.mcmc.kernel import State, ValueAndGradient

FLOATS = ("float32", "float64")
FEW_PARTS = 8
PyTree = Any
Found = TypeVar("Found")


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that is known by its shape and type alone."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Layout:
    """How a position, any pytree of floats, is a row of z numbers."""

    treedef: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def describe(self) -> list[list[str]]:
        """Name, and type and shape, of each leaf, as JSON has it; two names may read alike."""
        return [
            [name, f"{self.dtype}{list(shape)}"] for name, shape in zip(self.names, self.shapes, strict=True)
        ]

    def unravel(self, rows: Float[Array, "*rows z"]) -> PyTree:
        """Rows of any leading shape as positions whose leaves begin with that shape."""
        leaves, place = [], 0
        for shape in self.shapes:
            stop = place + prod(shape)
            leaves.append(rows[..., place:stop].reshape(*rows.shape[:-1], *shape))
            place = stop
        return jax.tree.unflatten(self.treedef, leaves)

    def ravel(self, positions: PyTree, leading: int = 1) -> Float[Array, "*rows z"]:
        """The other way: leaves that begin with `leading` shared axes as rows."""
        leaves = [jnp.asarray(leaf, self.dtype) for leaf in jax.tree.leaves(positions)]
        rows = [leaf.reshape(*leaf.shape[:leading], -1) for leaf in leaves]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)


def layout_of(position: PyTree) -> Layout:
    """The layout of one chain's position; its leaves may be arrays or only their shapes."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(position)
    if not leaves:
        raise OptionError("initial has no arrays: give a pytree of floats, one position of a chain")
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") or "x" for path, _ in leaves)
    types = [_type_of(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
    for name, dtype in zip(names, types, strict=True):
        if dtype.name not in FLOATS:
            raise OptionError(
                f"initial: {name} is {dtype.name}: HMC moves float32 or, with jax_enable_x64, float64; write 0.0 for 0"
            )
    shapes = tuple(tuple(np.shape(leaf)) for _, leaf in leaves)
    for name, shape in zip(names, shapes, strict=True):
        if prod(shape) == 0:
            raise OptionError(f"initial: {name} has shape {list(shape)}: there is nothing to sample")
    return Layout(treedef, names, shapes, np.dtype(jnp.result_type(*types)))


def _type_of(name: str, leaf: Any) -> np.dtype[Any]:
    try:
        return np.dtype(jnp.result_type(leaf))
    except (TypeError, ValueError):
        raise OptionError(
            f"initial: {name} is a {type(leaf).__name__}: HMC moves floats and arrays of them"
        ) from None


def separate_chains(initial: PyTree) -> tuple[int, PyTree]:
    """How many chains the leaves' first axes say there are, and the shapes of one chain's position."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(initial)
    counts = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "x": np.shape(leaf)[:1]
        for path, leaf in leaves
    }
    if () in counts.values() or len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count[0] if count else 'none'}" for name, count in counts.items())
        raise OptionError(
            f"without chains= every leaf of initial begins with an axis of chains, the same for all; here: {shown}"
        )
    layout_of(initial)
    one = jax.tree.map(lambda leaf: abstract(np.shape(leaf)[1:], jnp.result_type(leaf)), initial)
    return next(iter(counts.values()), (0,))[0], one


Stack = Callable[[list[Array]], Array]
"""Rows below rows."""


def over_columns(
    log_density: Callable[[PyTree], Array], layout: Layout, stack: Stack = jnp.concatenate
) -> ValueAndGradient:
    """Value and gradient of every column at once: the density of one position is mapped over the chains.

    Chains are the last axis all the way, so that sums over a position run along whole vectors of chains. `stack` puts
    the gradients by the leaves of a position together.
    """

    def total(positions: PyTree) -> tuple[Array, Array]:
        values = jax.vmap(log_density, in_axes=-1)(positions)
        return values.sum(), values

    def value_and_gradient(columns: Array) -> tuple[Array, Array]:
        leaves = jnp.split(columns, np.cumsum([prod(shape) for shape in layout.shapes])[:-1])
        shaped = [leaf.reshape(*shape, -1) for leaf, shape in zip(leaves, layout.shapes, strict=True)]
        with full_products():
            (_, values), slope = jax.value_and_grad(total, has_aux=True)(
                jax.tree.unflatten(layout.treedef, shaped)
            )
        slopes = [leaf.reshape(-1, columns.shape[1]) for leaf in jax.tree.leaves(slope)]
        return values.astype(layout.dtype), slopes[0] if len(slopes) == 1 else stack(slopes)

    return value_and_gradient


def stack_on_a_card(parts: list[Float[Array, "_ chains"]]) -> Float[Array, "z chains"]:
    """A few parts, padded and added: XLA makes a GPU's concatenation a kernel of its own kind, with which a leapfrog is
    two kernels, not one. On a CPU the eight schools' draws take about a quarter longer with it."""
    if len(parts) > FEW_PARTS:
        return jnp.concatenate(parts)
    total, above, zero = sum(len(part) for part in parts), 0, jnp.zeros((), parts[0].dtype)
    padded = []
    for part in parts:
        below = total - above - len(part)
        padded.append(lax.pad(part, zero, ((above, below, 0), (0, 0, 0))))
        above += len(part)
    return reduce(jnp.add, padded)


def full_products() -> AbstractContextManager[object]:
    """Products in the density's own type, unless jax was told otherwise.

    A GPU multiplies float32 as TF32, with ten bits: that is another density. Of a Gaussian with a condition number of
    302 it makes variances 6 % larger; on an H200 moments were 17 standard errors off with 4,096 chains.
    """
    is_told = jax.config.jax_default_matmul_precision is not None  # type: ignore[attr-defined]
    return nullcontext() if is_told else jax.default_matmul_precision("highest")


def trace(name: str, work: Callable[[], Found]) -> Found:
    """What tracing a user's function gives; what that throws becomes one line that names the function."""
    try:
        return work()
    except HotloopError:
        raise
    except Exception as error:  # whatever a user's function throws
        reason = first_line(error).removesuffix(".")
        raise OptionError(
            f"{name} failed on what jax traces it with: {type(error).__name__}: {reason}"
        ) from error


def check_callable(log_density: Any) -> None:
    if not callable(log_density):
        raise OptionError(
            f"log_density must be a function of one position, not a {type(log_density).__name__}"
        )


def check_key(key: Any) -> None:
    """Refuse what is not one key of jax.random."""
    shape, dtype = np.shape(key), getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_old = dtype == np.uint32 and len(shape) == 1 and _is_key_data(key)
    if is_typed and shape:
        raise OptionError(f"key has shape {list(shape)}: one key is needed, from which all chains draw")
    if not (is_typed or is_old):
        raise OptionError(f"key is {str(key)[:60]}: a key of jax.random is needed, such as jax.random.key(0)")


def _is_key_data(words: Any) -> bool:
    """Whether these are as many words as a key of jax's default generator has."""
    try:
        jax.random.wrap_key_data(words)
    except (TypeError, ValueError):
        return False
    return True


def check_density(log_density: Callable[[PyTree], Array], layout: Layout) -> None:
    """Refuse what is not one float of a position."""
    position = jax.tree.unflatten(layout.treedef, [abstract(shape, layout.dtype) for shape in layout.shapes])
    found = trace("log_density", lambda: jax.eval_shape(log_density, position))
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise OptionError(
            f"log_density must return one float for one position; it returned a {type(found).__name__}"
        )
    if found.shape != () or not jnp.issubdtype(found.dtype, jnp.floating):
        kind = f"{found.dtype}{list(found.shape)}"
        raise OptionError(f"log_density must return one float for one position; it returned {kind}")


def check_start(state: State) -> None:
    """Refuse chains that could never move: no finite density or gradient where they start."""
    for what, finite, values in (
        ("log_density", np.isfinite(state.log_density), state.log_density),
        ("the gradient of log_density", np.isfinite(state.gradient).all(0), None),
    ):
        bad = np.flatnonzero(~finite)
        if bad.size:
            shown = "" if values is None else f" ({values[bad[0]]} for chain {bad[0]})"
            raise OptionError(
                f"{what} is not finite at the start of {bad.size} of {finite.size} chains{shown}: "
                "give another initial position"
            )
