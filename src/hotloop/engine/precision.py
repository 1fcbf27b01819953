"""One weight update: its number formats (`32.32`, `16.32`, `16.16`: compute.update), loss scale and rounding, and the
global batch that replicas share and go over part by part.

Means are over the whole batch, however it is split, and random keys belong to samples by their place in it. A loss
scale keeps small gradients alive in half precision. It knows no models: a family hands in its loss as a function of
some samples. docs/precision.md tells what each mode is good for, and what rounding costs.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from hotloop.engine.device import REPLICA, platform
from hotloop.engine.keys import sample_keys
from hotloop.engine.optim import with_global_norm
from hotloop.engine.optim_keys import VELOCITY
from hotloop.errors import HotloopError, OptionError

Tree = TypeVar("Tree")
Params = TypeVar("Params")
Carry = TypeVar("Carry")
Means = Any
Loss = Callable[[Any, Any, Any, Array], tuple[Array, tuple[Any, dict[str, Array]]]]
"""`loss(params, carry, samples, keys)` -> mean loss, (carry for the next samples, mean figures)."""
MODES = ("32.32", "16.32", "16.16")
HALVES = ("bfloat16", "float16")
FLOAT32 = np.dtype(np.float32)
SIGN, INFINITY = np.uint32(0x8000_0000), np.uint32(0x7F80_0000)
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(REPLICA)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Policy:
    """The types of a run; hashable, so that it may be part of a config or a static argument.

    `compute` is the type of activations and gradients, `update` the one in which parameters and optimiser
    state are kept. The arithmetic of an update is always float32; its result is then rounded as it is kept.
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


def cast(tree: Tree, dtype: np.dtype[Any]) -> Tree:
    """The tree with its floating leaves in `dtype`; counters, keys and the like stay as they are."""

    def leaf(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    result: Tree = jax.tree.map(leaf, tree)
    return result


def partials_note(policy: Policy) -> str | None:
    """One line where half partials were asked for and this backend adds in float32 all the same, else None.

    It is measured, as XLA may widen in silence: 2048 + 1 + 1 + ... is lost by half addition, not by float32.
    """
    if not policy.half_partials:
        return None
    terms = jnp.ones((1, 1, 2048, 8), policy.compute).at[:, :, 0].set(2048)
    ones = jnp.ones((1, 2048, 8, 8), policy.compute)
    multiply = partial(jnp.matmul, terms[0, :, :, 0], ones[0, :, 0], preferred_element_type=policy.compute)
    products = multiply()
    if policy.compute == np.float16 and platform() != "tpu":  # the only sums that can be ordered
        with suppress(jax.errors.JaxRuntimeError):  # XLA refuses on some GPUs
            products = multiply(precision=lax.DotAlgorithmPreset.F16_F16_F16)
    convolved = lax.conv_general_dilated(
        terms,
        ones,
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=policy.compute,
    )
    sums = {"matrix products": (products, 4095), "convolutions": (convolved, 8 * 4095)}
    wide = [
        name for name, (total, exact) in sums.items() if total.ravel()[0] == np.asarray(exact, policy.compute)
    ]
    return f"half partials: {platform()} adds {' and '.join(wide)} in float32 all the same" if wide else None


class ScaleState(NamedTuple):
    """The factor in use, good updates since it last changed, and updates skipped in all; part of a family's state."""

    scale: Array
    good: Array
    skipped: Array


@dataclass(frozen=True)
class AutoScale:
    """As large a factor on the loss as gradients bear: doubled after `patience` good updates, halved on overflow."""

    initial: float = 2.0**15
    patience: int = 2000
    least: float = 2.0**-14
    most: float = 2.0**24

    def judge(self, state: ScaleState, gradients: Any) -> tuple[Array, ScaleState]:
        """Whether the update may be used: none of its gradients holds NaN or an infinity; and the state after it."""
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients)]).all()
        return finite, self.follow(state, finite)

    def follow(self, state: ScaleState, finite: Array) -> ScaleState:
        """The state after an update whose gradients were all finite, or not."""
        good = jnp.where(finite, state.good + 1, 0)
        grow = good >= self.patience
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.clip(state.scale * factor, self.least, self.most)
        return ScaleState(scale, jnp.where(grow, 0, good), state.skipped + (~finite).astype(jnp.int32))


LossScale = float | AutoScale
"""A number for the whole run, which hides no overflow (1 is no scaling), or an automatic one."""


class Trained(NamedTuple):
    """What a weight update changes; `kept` is what a model has beside its weights, such as moving averages."""

    params: Any
    optimiser: Any
    kept: Any
    scale: ScaleState


def init_trained(policy: Policy, optimiser: Any, scale: LossScale, params: Any, kept: Any = ()) -> Trained:
    """Fresh parameters as they are kept between updates, and an optimiser and a loss scale that have seen nothing."""
    params, fresh = policy.to_update(params), start_scale(scale)
    return Trained(params, start_state(policy, optimiser, params), kept, fresh)


def start_scale(scale: LossScale) -> ScaleState:
    """A loss scale that has seen nothing."""
    factor = scale.initial if isinstance(scale, AutoScale) else scale
    if not (factor > 0 and math.isfinite(factor)):
        raise OptionError(f"scale={factor}: must be greater than 0 and finite")
    return ScaleState(jnp.float32(factor), jnp.int32(0), jnp.int32(0))


def start_state(policy: Policy, optimiser: Any, params: Any) -> Any:
    """The state of an optimiser of `optim`, or of any of optax, before its first update.

    A momentum is kept as the parameters are, everything else in a type that squares fit: a gradient below 2e-4 has a
    square that float16 has not, and divided by the root of a mean that is zero it wrecks the network. Single numbers
    (rates and decays that `optax.inject_hyperparams` keeps there) are float32 in every mode: 0.999 is 1 in bfloat16,
    and Adam then divides by zero.
    """
    state = optimiser.init(cast(params, FLOAT32))
    forms = jax.eval_shape(optimiser.init, cast(params, policy.update))

    def narrow(path: Any, leaf: Array, form: Any) -> Array:
        if not leaf.ndim or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        in_momentum = VELOCITY in (getattr(part, "key", None) for part in path)
        return leaf.astype(FLOAT32 if form.dtype == np.float16 and not in_momentum else form.dtype)

    return jax.tree.map_with_path(narrow, state, forms)


def update_weights(
    loss: Loss,
    old: Trained,
    batch: Any,
    sample_key: Array,
    rounding_key: Array,
    *,
    policy: Policy,
    optimiser: Any,
    scale: LossScale,
    mesh: Mesh | None,
    accumulation: int,
    repeated: bool = False,
    group: int = 1,
    begin: Callable[[Any], Any] = lambda kept: kept,
    finish: Callable[[Any, Any, Any], Any] = lambda kept, centre, spread: centre,
    **extra: Any,
) -> tuple[Trained, dict[str, Array]]:
    """One step by the gradient of the mean loss, and the figures' means; left out where a loss scale overflowed.

    `begin(kept)` is the carry of each replica's first part. `finish(kept, centre, spread)` is what is kept after its
    last, of the carry's `centre_and_spread` over the replicas. `group` neighbouring replicas take the samples together
    that one with parts so many times as large would take. `extra` goes to the optimiser.
    """

    def average(axis: str | None, batch: Any, params: Any, kept: Any, factor: Array, key: Array) -> Any:
        def part(carry: Any, samples: Any, keys: Array) -> Any:
            def scaled(params: Any) -> Any:
                mean, found = loss(params, carry, samples, keys)
                return mean.astype(jnp.float32) * factor, found

            gradients, (carry_on, figures) = jax.grad(scaled, has_aux=True)(params)
            return (gradients, figures), carry_on

        means, carry = mean_of_parts(
            part, begin(kept), batch, key, accumulation, axis, repeated=repeated, group=group
        )
        return average_replicas(means, axis), finish(kept, *centre_and_spread(carry, axis))

    factor = old.scale.scale
    if mesh is not None and group > 1 and accumulation > 1 and not repeated:
        batch = deal_to_groups(batch, mesh.shape[REPLICA], group, accumulation)
    (gradients, figures), kept = on_replicas(average, mesh)(
        batch, policy.to_compute(old.params), old.kept, factor, sample_key
    )
    # Unscaled in float32, exactly where the factor is a power of two.
    one_over = 1 / factor
    gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32) * one_over, gradients)
    params, slots = optimise(policy, optimiser, gradients, old.optimiser, old.params, rounding_key, **extra)
    new = Trained(params, slots, kept, old.scale)
    if isinstance(scale, AutoScale):
        usable, judged = scale.judge(old.scale, gradients)
        new = jax.tree.map(partial(jnp.where, usable), new, old)._replace(scale=judged)
    return new, figures


def on_replicas(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """`fn(axis, batch, *others)` as a function of batch and others; with a mesh, each replica has its share of batch.

    `axis` is the name to reduce over, or None; what `fn` returns must be the same on every replica.
    """
    if mesh is None:
        return partial(fn, None)

    def run(batch: Any, *others: Any) -> Any:
        return jax.shard_map(
            partial(fn, REPLICA),
            mesh=mesh,
            in_specs=(SPLIT, *[EVERYWHERE] * len(others)),
            out_specs=EVERYWHERE,
            check_vma=False,
        )(batch, *others)

    return run


def sum_replicas(shares: Tree, axis: str | None) -> Tree:
    """The sum of all replicas' shares, floats in float32: a sum of 16-bit gradients may leave their range."""
    if axis is None:
        return shares
    total: Tree = lax.psum(cast(shares, FLOAT32), axis)  # type: ignore[no-untyped-call]
    return total


def gather_replicas(rows: Tree, axis: str | None) -> Tree:
    """The rows of all replicas, in the order of the undivided batch."""
    if axis is None:
        return rows
    whole: Tree = jax.tree.map(lambda leaf: lax.all_gather(leaf, axis, tiled=True), rows)
    return whole


def first_row(rows: int, axis: str | None) -> Array | int:
    """The place in the undivided batch of the first of this replica's `rows` samples."""
    return 0 if axis is None else lax.axis_index(axis) * rows


def count_replicas(axis: str | None) -> int:
    return 1 if axis is None else int(lax.axis_size(axis))


def mean_of_parts(
    fn: Callable[[Carry, Any, Array], tuple[Means, Carry]],
    carry: Carry,
    batch: Any,
    key: Array,
    count: int,
    axis: str | None = None,
    *,
    repeated: bool = False,
    group: int = 1,
) -> tuple[Means, Carry]:
    """Of the means that `fn(carry, part, keys)` gives for `count` equal parts of this replica's share, the mean.

    The carry goes from part to part. Several parts are averaged in float32. With `repeated` the share is one part that
    stands for all. `group` replicas have the samples that `deal_to_groups` gives them.
    """
    take = take_part_with_keys(batch, key, count, axis, group=group, repeated=repeated)

    def part(carry: Carry, number: Array | int) -> tuple[Means, Carry]:
        return fn(carry, *take(number))

    if count == 1:
        return part(carry, 0)
    share = 1 / count

    def add(held: tuple[Carry, Means], number: Array) -> tuple[tuple[Carry, Means], None]:
        means, carry = part(held[0], number)
        return (carry, jax.tree.map(lambda a, b: a + share * b.astype(jnp.float32), held[1], means)), None

    forms, _ = jax.eval_shape(part, carry, 0)
    zeros = jax.tree.map(lambda form: jnp.zeros(form.shape, jnp.float32), forms)
    (carry, means), _ = lax.scan(add, (carry, zeros), jnp.arange(count))
    return means, carry


def deal_to_groups(batch: Any, replicas: int, group: int, count: int) -> Any:
    """The batch in the order in which replicas in groups take it: each has `count` parts, and part n of all replicas of
    a group are neighbours in the batch, as they would be in one larger part of a single replica."""

    def deal(leaf: Array) -> Array:
        parts = leaf.reshape(replicas // group, count, group, -1, *leaf.shape[1:])
        return parts.swapaxes(1, 2).reshape(leaf.shape)

    return jax.tree.map(deal, batch)


def take_part(batch: Any, count: int) -> Callable[[Array | int], Any]:
    """The samples of one of `count` equal parts of a replica's share, by its number."""
    size, odd = divmod(jax.tree.leaves(batch)[0].shape[0], count)
    if odd:
        raise HotloopError(
            f"{count * size + odd} samples of a replica cannot be split into {count} equal parts"
        )
    return lambda number: jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, number * size, size), batch
    )


def take_part_with_keys(
    batch: Any, key: Array, count: int, axis: str | None, *, repeated: bool = False, group: int = 1
) -> Callable[[Array | int], tuple[Any, Array]]:
    """The samples of one of `count` equal parts of this replica's share, by its number, and a key for each of them.

    With `repeated` the share is one part that stands for all. `group` replicas have what `deal_to_groups` gives them.
    """
    take = take_part(batch, 1 if repeated else count)
    size = jax.tree.leaves(batch)[0].shape[0] // (1 if repeated else count)
    replica = 0 if axis is None else lax.axis_index(axis)
    first, apart = (replica // group * group * count + replica % group) * size, group * size
    return lambda number: (
        take(0 if repeated else number),
        sample_keys(key, first + number * apart, size),
    )


def average_replicas(means: Means, axis: str | None) -> Means:
    """The mean over replicas, in float32: a sum of 16-bit gradients may leave their range."""
    return means if axis is None else lax.pmean(cast(means, FLOAT32), axis)  # type: ignore[no-untyped-call]


def centre_and_spread(carry: Carry, axis: str | None) -> tuple[Carry, Carry]:
    """The mean over replicas of each number, in float32 or wider, and the mean of its squared distance from that.

    One replica's is its own mean, with a spread of 0. What is no float (a counter) is the same on all, or the largest.
    """
    if axis is None:
        return carry, jax.tree.map(jnp.zeros_like, carry)

    def mean(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return lax.pmax(leaf, axis)  # type: ignore[no-untyped-call,no-any-return]
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return lax.pmean(wide, axis)  # type: ignore[no-untyped-call,no-any-return]

    centre: Carry = jax.tree.map(mean, carry)
    spread: Carry = jax.tree.map(lambda leaf, middle: mean(jnp.square(leaf - middle)), carry, centre)
    return centre, spread


def optimise(
    policy: Policy,
    optimiser: Any,
    gradients: Params,
    state: Any,
    params: Params,
    key: Array,
    *,
    numbers: Sequence[int] | None = None,
    global_norm: Array | None = None,
    **extra: Any,
) -> tuple[Params, Any]:
    """One step of an optax optimiser: all arithmetic in float32, parameters and state rounded back as kept.

    `extra` is what its update takes besides, such as `rate=` for those of `optim`. The state is rounded by the policy,
    too: a bfloat16 average that moves by a thousandth at a time would never move if it were rounded to nearest.
    Where these are some leaves of a larger tree, `numbers` are their places in it, so that they round as they do there,
    and `global_norm` is that of all its gradients.
    """
    wide, wide_state, wide_gradients = (cast(tree, FLOAT32) for tree in (params, state, gradients))
    if global_norm is not None:
        extra = with_global_norm(optimiser, extra, global_norm, wide_gradients)
    updates, new_state = optimiser.update(wide_gradients, wide_state, wide, **extra)
    total = jax.tree.map(jnp.add, wide, updates)
    leaves, structure = jax.tree.flatten((total, new_state))
    rounded = []
    places = range(len(leaves)) if numbers is None else numbers
    for number, leaf, kept in zip(places, leaves, jax.tree.leaves((params, state)), strict=True):
        if policy.stochastic_rounding:  # leaves are numbered so that no two share bits
            rounded.append(stochastic_round(leaf, kept.dtype, key, number))
        else:
            rounded.append(leaf.astype(kept.dtype))
    result: tuple[Params, Any] = jax.tree.unflatten(structure, rounded)
    return result


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
    place = jnp.zeros(shape, jnp.uint32)  # row-major, made by axis so that a sharded array is not gathered
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return _mix(place * (step | 1) + start)  # an odd step: no counter value comes twice


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
