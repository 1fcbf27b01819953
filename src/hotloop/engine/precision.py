"""Number formats of a run: `32.32`, `16.32`, `16.16` (compute.update), half type, rounding, partial sums.

A `Policy` says in which type a model computes and in which one parameters and optimiser state are kept
between updates; the functions here cast, round and update by it. It knows no model and no family.
docs/precision.md tells what each mode is good for, and what rounding costs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hotloop.engine.device import platform
from hotloop.engine.optim_keys import VELOCITY
from hotloop.engine.rounding import stochastic_round
from hotloop.errors import OptionError

Tree = TypeVar("Tree")
Params = TypeVar("Params")
MODES = ("32.32", "16.32", "16.16")
HALVES = ("bfloat16", "float16")
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Policy:
    """The types of a run; hashable, so that it may be part of a config or a static argument.

    `compute` is the type of activations and gradients, `update` the one in which parameters and optimiser
    state are kept; an optimiser's squares need a wider one than float16 (`kept_squares`). The arithmetic of an update
    is always float32; its result is then rounded as it is kept.
    """

    compute: np.dtype[Any] = FLOAT32
    update: np.dtype[Any] = FLOAT32
    stochastic_rounding: bool = False
    half_partials: bool = False

    def to_compute(self, tree: Tree) -> Tree:
        """Parameters or a batch as the model computes with them."""
        return cast(tree, self.compute)

    def to_update(self, tree: Tree) -> Tree:
        """Parameters as they are kept between updates."""
        return cast(tree, self.update)

    @property
    def conv_options(self) -> dict[str, Any]:
        """Keywords for `lax.conv_general_dilated`: float32 results, or half ones under half partials."""
        return {"preferred_element_type": self.compute if self.half_partials else FLOAT32}

    @property
    def dot_options(self) -> dict[str, Any]:
        """Keywords for `jnp.matmul` or `lax.dot_general`; only float16 sums can be ordered, and not everywhere."""
        if self.half_partials and self.compute == np.float16 and _takes_float16_sums(platform()):
            return {**self.conv_options, "precision": lax.DotAlgorithmPreset.F16_F16_F16}
        return self.conv_options


@cache
def _takes_float16_sums(platform: str) -> bool:
    """Whether XLA compiles a product that is to be summed in float16; it refuses on some GPUs."""
    if platform == "tpu":
        return False
    matrix = jax.ShapeDtypeStruct((16, 16), np.float16)  # type: ignore[no-untyped-call]
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=lax.DotAlgorithmPreset.F16_F16_F16))
    try:
        product.lower(matrix, matrix).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def parse(
    mode: str, half: str = "bfloat16", *, stochastic_rounding: bool = True, half_partials: bool = False
) -> Policy:
    """The policy of a mode such as `16.16`; switches that a mode has no use for are off in the result."""
    if mode not in MODES:
        raise OptionError(f"precision={mode}: must be one of {', '.join(MODES)} (compute.update)")
    if half not in HALVES:
        raise OptionError(f"half={half}: must be one of {', '.join(HALVES)}")
    compute, update = (np.dtype(jnp.dtype(half)) if bits == "16" else FLOAT32 for bits in mode.split("."))
    return Policy(
        compute,
        update,
        stochastic_rounding=stochastic_rounding and update != FLOAT32,
        half_partials=half_partials and compute != FLOAT32,
    )


def kept_squares(update: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which means of squared gradients are kept beside parameters of type `update`.

    A gradient below 2e-4 has a square that float16 has not: the mean is zero in most updates, and the gradient divided
    by its root a step that wrecks the network. bfloat16 has the range of float32.
    """
    return FLOAT32 if update == np.float16 else update


def cast(tree: Tree, dtype: np.dtype[Any]) -> Tree:
    """The tree with its floating leaves in `dtype`; counters, keys and the like stay as they are."""
    result: Tree = jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_floating(leaf) else leaf, tree)
    return result


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def start_state(policy: Policy, optimiser: Any, params: Any) -> Any:
    """The state of an optimiser of `optim`, or of any of optax, before its first update.

    A momentum is kept as the parameters are, everything else in a type that squares fit. Single numbers (rates and
    decays that `optax.inject_hyperparams` keeps there) are float32 in every mode: 0.999 is 1 in bfloat16, and Adam then
    divides by zero.
    """
    state = optimiser.init(cast(params, FLOAT32))
    forms = jax.eval_shape(optimiser.init, cast(params, policy.update))

    def narrow(path: Any, leaf: Array, form: Any) -> Array:
        if not leaf.ndim or not _is_floating(leaf):
            return leaf
        in_momentum = VELOCITY in (getattr(part, "key", None) for part in path)
        return leaf.astype(form.dtype if in_momentum else kept_squares(form.dtype))

    return jax.tree.map_with_path(narrow, state, forms)


def optimise(
    policy: Policy, optimiser: Any, gradients: Params, state: Any, params: Params, key: Array, **extra: Any
) -> tuple[Params, Any]:
    """One step of an optax optimiser: all arithmetic in float32, parameters and state rounded back as kept.

    `extra` is what its update takes besides, such as `rate=` for those of `optim`. The state is rounded by the policy,
    too: a bfloat16 average that moves by a thousandth at a time would never move if it were rounded to nearest.
    """
    wide, wide_state = cast(params, FLOAT32), cast(state, FLOAT32)
    updates, new_state = optimiser.update(cast(gradients, FLOAT32), wide_state, wide, **extra)
    total = jax.tree.map(jnp.add, wide, updates)
    rounded: tuple[Params, Any] = _round_like(policy, (total, new_state), (params, state), key)
    return rounded


def _round_like(policy: Policy, tree: Tree, like: Any, key: Array) -> Tree:
    """Each floating leaf in the type of its counterpart; leaves are numbered so that no two share bits."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(like)]
    if policy.stochastic_rounding:
        rounded = [
            stochastic_round(x, kind, key, n) for n, (x, kind) in enumerate(zip(leaves, kinds, strict=True))
        ]
    else:
        rounded = [leaf.astype(kind) for leaf, kind in zip(leaves, kinds, strict=True)]
    result: Tree = jax.tree.unflatten(structure, rounded)
    return result


def partials_note(policy: Policy) -> str | None:
    """One line where half partials were asked for and this backend adds in float32 all the same, else None.

    It is measured, as XLA may widen in silence: 2048 + 1 + 1 + ... is lost by half addition, not by float32.
    """
    if not policy.half_partials:
        return None
    terms = jnp.ones((1, 1, 2048, 8), policy.compute).at[:, :, 0].set(2048)
    ones = jnp.ones((1, 2048, 8, 8), policy.compute)
    layout = ("NHWC", "HWIO", "NHWC")
    sums = {
        "matrix products": jnp.matmul(terms[0, :, :, 0], ones[0, :, 0], **policy.dot_options),
        "convolutions": lax.conv_general_dilated(
            terms, ones, (1, 1), "VALID", dimension_numbers=layout, **policy.conv_options
        ),
    }
    exact = {"matrix products": 4095, "convolutions": 8 * 4095}
    wide = [
        name for name, total in sums.items() if total.ravel()[0] == np.asarray(exact[name], policy.compute)
    ]
    if not wide:
        return None
    return f"half partials: {platform()} adds {' and '.join(wide)} in float32 all the same"
