"""Number formats of a run: `32.32`, `16.32`, `16.16` (compute.update), half type, rounding, loss scale, partial sums.

A `Policy` says in which type a model computes and in which one parameters and optimiser state are kept between updates;
`start_state` and `optimise` update by it, with stochastic rounding where it says so. A loss scale keeps small gradients
alive in half precision. docs/precision.md tells what each mode is good for, and what rounding costs.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from hotloop.engine.device import platform
from hotloop.engine.optim_keys import VELOCITY
from hotloop.errors import OptionError

Tree = TypeVar("Tree")
Params = TypeVar("Params")
MODES = ("32.32", "16.32", "16.16")
HALVES = ("bfloat16", "float16")
FLOAT32 = np.dtype(np.float32)
SIGN, INFINITY = np.uint32(0x8000_0000), np.uint32(0x7F80_0000)


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
    leaves, structure = jax.tree.flatten((total, new_state))
    rounded = []
    for number, (leaf, kept) in enumerate(zip(leaves, jax.tree.leaves((params, state)), strict=True)):
        if policy.stochastic_rounding:  # leaves are numbered so that no two share bits
            rounded.append(stochastic_round(leaf, kept.dtype, key, number))
        else:
            rounded.append(leaf.astype(kept.dtype))
    result: tuple[Params, Any] = jax.tree.unflatten(structure, rounded)
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
    return f"half partials: {platform()} adds {' and '.join(wide)} in float32 all the same" if wide else None


def stochastic_round(x: Array, dtype: DTypeLike, key: Array, leaf: int = 0) -> Array:
    """Round float32 to bfloat16 or float16 without bias; to any other type it is a plain cast.

    A value between two neighbours of the target type goes up with a probability equal to the way it has come, so that
    the mean of many roundings is the value. Exact values stay, subnormals are kept, NaN and infinities pass, and a
    finite value never becomes infinite (it stays at the largest finite one). The same key and leaf number give the same
    result; two leaves under one key, or one leaf under two keys, see unrelated bits.
    """
    target = jnp.dtype(dtype)
    if target not in ROUND_MAGNITUDE or x.dtype == target:
        return x.astype(target)
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = pattern & ~SIGN
    rounded = ROUND_MAGNITUDE[target](magnitude, random_bits(x.shape, key, leaf))
    signed = rounded | ((pattern & SIGN) >> 16)
    return lax.bitcast_convert_type(signed.astype(jnp.uint16), target)


def random_bits(shape: tuple[int, ...], key: Array, leaf: int = 0) -> Array:
    """32 random bits an element: a counter with a step and a start drawn from (key, leaf), then mixed.

    Rounding needs bits that are even and unrelated to the data, no more; threefry's cost about 40 times as
    much (benchmarks/rounding.py).
    """
    data = jax.random.key_data(key).reshape(-1)  # of a key that is typed or raw
    start, step = data[0], data[-1]
    # Three rounds that keep all 64 bits of the key: no two keys come to the same start and step.
    start ^= _mix(step + jnp.uint32((0x9E37_79B9 * (leaf + 1)) % 2**32))
    step ^= _mix(start)
    start ^= _mix(step)
    return _mix(_place(shape) * (step | 1) + start)  # an odd step: no counter value comes twice


def _place(shape: tuple[int, ...]) -> Array:
    """The row-major number of each element, made by axis so that a sharded array is not gathered."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return place


def _mix(word: Array) -> Array:
    """Stir a word, invertibly, so that each of its bits reaches every bit of the result."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB_352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846C_A68B)
    return word ^ (word >> 16)


def _bfloat16(magnitude: Array, bits: Array) -> Array:
    """The upper half of a float32: add 16 random bits below it and cut; the carry is the rounding up."""
    rounded = jnp.minimum((magnitude + (bits >> 16)) >> 16, 0x7F7F)
    # A NaN may keep all of its payload in the half that is cut: the quiet bit stops it from turning infinite.
    special = (magnitude >> 16) | jnp.where(magnitude > INFINITY, jnp.uint32(0x40), jnp.uint32(0))
    return jnp.where(magnitude < INFINITY, rounded, special)


def _float16(magnitude: Array, bits: Array) -> Array:
    """Cut 13 bits of the significand, and one more for each power of two below the smallest normal number."""
    exponent = jnp.maximum(magnitude >> 23, 1)  # biased by 127; float32 subnormals vanish in the cut anyway
    significand = (magnitude & 0x7F_FFFF) | 0x80_0000
    below = jnp.maximum(113, exponent) - exponent  # 2^-14 is the smallest normal
    # The cut is at most 31 bits wide: smaller numbers lose low bits first, and below 2^-55 they go to zero.
    significand = significand >> jnp.minimum(jnp.maximum(below, 18) - 18, 31)
    cut = 13 + jnp.minimum(below, 18)
    carried = (significand + (bits >> (32 - cut))) >> cut
    rounded = jnp.minimum(carried + ((jnp.maximum(exponent, 113) - 113) << 10), 0x7BFF)
    special = jnp.where(magnitude > INFINITY, jnp.uint32(0x7E00), jnp.uint32(0x7C00))
    return jnp.where(magnitude < INFINITY, rounded, special)


ROUND_MAGNITUDE = {jnp.dtype(jnp.bfloat16): _bfloat16, jnp.dtype(jnp.float16): _float16}


class ScaleState(NamedTuple):
    """The factor in use, good updates since it last changed, and updates skipped in all; part of a family's state."""

    scale: Array
    good: Array
    skipped: Array


def _start(scale: float) -> ScaleState:
    if not (scale > 0 and math.isfinite(scale)):
        raise OptionError(f"scale={scale}: must be greater than 0 and finite")
    return ScaleState(jnp.float32(scale), jnp.int32(0), jnp.int32(0))


@dataclass(frozen=True)
class StaticScale:
    """One factor for the whole run; 1 is no scaling. A gradient that is not finite is not hidden."""

    scale: float = 1.0

    def init(self) -> ScaleState:
        return _start(self.scale)

    def judge(self, state: ScaleState, gradients: Any) -> tuple[Array, ScaleState]:
        return jnp.bool_(True), state


@dataclass(frozen=True)
class AutoScale:
    """As large a factor as the gradients bear: doubled after `patience` good updates, halved on overflow."""

    initial: float = 2.0**15
    patience: int = 2000
    least: float = 2.0**-14
    most: float = 2.0**24

    def init(self) -> ScaleState:
        return _start(self.initial)

    def judge(self, state: ScaleState, gradients: Any) -> tuple[Array, ScaleState]:
        """Whether the update may be used, and the state after it."""
        finite = all_finite(gradients)
        good = jnp.where(finite, state.good + 1, 0)
        grow = good >= self.patience
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.clip(state.scale * factor, self.least, self.most)
        return finite, ScaleState(
            scale, jnp.where(grow, 0, good), state.skipped + (~finite).astype(jnp.int32)
        )


def scale_loss(state: ScaleState, loss: Array) -> Array:
    """The loss to differentiate, in float32."""
    return loss.astype(jnp.float32) * state.scale


def unscale(state: ScaleState, gradients: Tree) -> Tree:
    """The gradients of the loss itself, in float32; exact for factors that are powers of two."""
    one_over = 1 / state.scale
    result: Tree = jax.tree.map(lambda gradient: gradient.astype(jnp.float32) * one_over, gradients)
    return result


def all_finite(tree: Any) -> Array:
    """Whether no leaf holds NaN or an infinity."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def choose(usable: Array, new: Tree, old: Tree) -> Tree:
    """The new state where the update may be used, else the old one, bit for bit."""
    result: Tree = jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, old)
    return result
