"""Optimisers and learning rates by name, for every family; an optimiser that optax has needs no more than its line in
`optim_keys.OPTIMISERS`.

With O an optimiser's direction and r the rate of an update (one number, or a tree of them by parameter group), L2 is
dW = -r O(g + l2 W), decay is dW = -r (O(g) + wd W): the same for an optimiser without memory, different for every
other. The gradient that comes in is unscaled and averaged over the global batch; `precision.optimise` does the
arithmetic in float32.

A learning rate is a pure function of the update number, so that logging it or resuming a run cannot move it. Update
numbers are integers (float32 would lose them from 2^24 on) and a decay is computed from the updates that remain, so
that the last rates are as exact as the first. Rates but for `stepped` are given for one sample and grow with the global
batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from hotloop.engine.optim_keys import (
    NON_NEGATIVE,
    OPTIMISERS,
    VELOCITY,
    check_optimiser,
    check_schedule,
    rmsprop_decay,
)
from hotloop.errors import OptionError

Path = tuple[str, ...]
Exclude = Callable[[Path], bool]
Params = Mapping[str, Any]
Transformation: TypeAlias = optax.GradientTransformationExtraArgs
KERAS_EPSILON = 1e-7  # what Keras takes for an epsilon of 0
ADAMW_DECAY = 1e-4  # of `optax.adamw`, where none is given
MOST_UPDATES = 2**32 - 2  # update numbers are uint32, and a ramp adds one
NORMS_AND_BIASES = frozenset({"scale", "offset", "bias"})


def exclude_norms_and_biases(path: Path) -> bool:
    """The parameters of norm layers and all biases are not decayed, as in most recipes."""
    return path[-1] in NORMS_AND_BIASES


def make(
    name: str,
    params: Params,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    clip: float | None = None,
    global_batch_size: int = 1,
    exclude: Exclude | None = None,
) -> Transformation:
    """The optimiser `name` with its parameters, or an OptionError; leaves that `exclude` names are never decayed.

    Its `update(gradients, state, weights, rate=...)` gives the steps to add. `clip` bounds each gradient by its size.
    """
    params = check_optimiser(name, params, global_batch_size=global_batch_size)
    for argument, value in (("weight_decay", weight_decay), ("l2", l2)):
        if reason := NON_NEGATIVE(value):
            raise OptionError(f"{argument}={value}: {reason}")

    spares = exclude or (lambda path: False)

    def decayed(weights: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: not spares(_names(path)), weights)

    links: list[tuple[str, Any]] = []
    if l2:
        links.append(("l2", optax.add_decayed_weights(l2, decayed)))
    if clip is not None:
        links.append(("clip", optax.clip(clip)))
    velocity = (VELOCITY, optax.trace(params.get("momentum", 0), params.get("nesterov", False)))
    descent = ("rate", _stateless(lambda g, w, rate: jax.tree.map(lambda r, g: -r * g, rate, g)))
    match name:
        case "sgd":
            links.append(descent)
        case "momentum":
            links += [velocity, descent]
        case "lars":
            epsilon = params["epsilon"] or KERAS_EPSILON
            links.append((name, step_by_lars(params["weight_decay"], params["eeta"], epsilon, spares)))
        case "rmsprop":
            rho = rmsprop_decay(params["base_decay_exponent"], global_batch_size)
            links.append((name, step_by_rms(rho, params["epsilon"] or KERAS_EPSILON)))
        case "rmsprop_outside" if params.get("first_square"):
            links += [(name, scale_by_first_square_rms(params["decay"], params["epsilon"])), descent]
        case "rmsprop_outside":
            links += [
                (name, optax.scale_by_rms(params["decay"], params["epsilon"], eps_in_sqrt=False)),
                descent,
            ]
        case "adamw":
            adam = {key: value for key, value in params.items() if key != "weight_decay"}
            usual = 0.0 if weight_decay else ADAMW_DECAY  # the same decay, given beside the rule
            decay = optax.add_decayed_weights(params.get("weight_decay", usual), decayed)
            links += [(name, optax.scale_by_adam(**adam)), ("adamw_decay", decay), descent]
        case "muon":
            # A rate of -1 leaves the direction as it is: optax takes the rate for one of descent.
            muon = optax.contrib.muon(
                -1.0, weight_decay_mask=decayed, muon_weight_dimension_numbers=_matrix_axes, **params
            )
            links += [(name, muon), descent]
        case _:  # a function of optax by the names of its parameters
            links += [(name, getattr(optax, OPTIMISERS[name].optax)(**params)), descent]
    # Keras keeps the rate inside the momentum: a change of the rate acts on new gradients only.
    if name in ("sgd", "lars", "rmsprop") and params["momentum"]:
        links.append(velocity)
    if weight_decay:  # decoupled: it shrinks weights whatever the rule

        def shrink(step: Array, r: Any, weight: Array, decayed: bool) -> Array:
            return step - r * (weight_decay * weight) if decayed else step

        decay = _stateless(lambda steps, w, rate: jax.tree.map(shrink, steps, rate, w, decayed(w)))
        links.append(("decay", decay))
    return optax.named_chain(*links)


def at_rate(chain: Transformation, rate: float | Callable[[Any], Any]) -> optax.GradientTransformation:
    """The chain at a fixed rate, or at that of a schedule, by a count of the updates in the optimiser's own state."""
    if not callable(rate):
        return optax.GradientTransformation(
            chain.init, lambda g, state, w=None: chain.update(g, state, w, rate=rate)
        )

    def init(weights: Any) -> CountedState:
        return CountedState(jnp.zeros((), jnp.int32), chain.init(weights))

    def update(gradients: Any, state: CountedState, weights: Any = None) -> tuple[Any, CountedState]:
        steps, inner = chain.update(gradients, state.inner, weights, rate=rate(state.updates))
        return steps, CountedState(optax.safe_increment(state.updates), inner)

    return optax.GradientTransformation(init, update)


def clip_by_global_norm(limit: float) -> Transformation:
    """All gradients made smaller together where their norm is above `limit`, as `optax.clip_by_global_norm` does it.

    Unlike that one it may be the first of a chain for a model in stages, which hands over the norm of all of them.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, global_norm: "GlobalNorm | None" = None, **extra: Any
    ) -> tuple[Any, Any]:
        squares = (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(updates))
        norm = jnp.sqrt(sum(squares)) if global_norm is None else global_norm.of(updates)
        factor = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), updates), state

    return Transformation(optax.init_empty_state, update)


@dataclass(frozen=True, eq=False)
class GlobalNorm:
    """The norm of the gradients of all stages, of which one stage has `gradients`."""

    value: Any
    gradients: Any

    def of(self, updates: Any) -> Any:
        """The norm, if `updates` are the very gradients: what another link of a chain made of them has another one."""
        pairs = zip_longest(*map(jax.tree.leaves, (updates, self.gradients)))
        if all(ours is theirs for ours, theirs in pairs):
            return self.value
        raise OptionError(
            "optimizer: in stages clip_by_global_norm must be the first of its chain, for all weights"
        )


def with_global_norm(optimiser: Any, extra: dict[str, Any], norm: Any, gradients: Any) -> dict[str, Any]:
    """What the optimiser of one stage is handed besides: the norm of all stages' gradients too, where it may."""
    takes = isinstance(optimiser, optax.GradientTransformationExtraArgs)
    return {**extra, "global_norm": GlobalNorm(norm, gradients)} if takes else extra


class CountedState(NamedTuple):
    """The updates so far, and the state of the chain."""

    updates: Array
    inner: Any


def _matrix_axes(weights: Any) -> Any:
    """What is a matrix to Muon: a convolution's kernel HWIO is [H W I, O]; others go by Adam."""

    def axes(leaf: Any) -> Any:
        *inputs, output = range(leaf.ndim)
        return optax.contrib.MuonDimensionNumbers(tuple(inputs), (output,)) if leaf.ndim > 1 else None

    return jax.tree.map(axes, weights)


def _stateless(step: Callable[[Any, Any, Any], Any]) -> Transformation:
    """A link of a chain that keeps nothing: `step(updates, weights, rates)`, with a rate for every leaf."""

    def update(updates: Any, state: Any, params: Any = None, *, rate: Any, **extra: Any) -> tuple[Any, Any]:
        return step(updates, params, jax.tree.broadcast(rate, updates)), state

    return Transformation(optax.init_empty_state, update)


def step_by_lars(weight_decay: float, eeta: float, epsilon: float, exclude: Exclude) -> Transformation:
    """Layer-wise adaptive rates (You, Gitman and Ginsburg, 2017): each leaf moves in proportion to its own norm.

    The step is -rate ratio (g + wd W) with ratio = eeta |W| / (|g| + wd |W| + epsilon), which is not the form
    of `optax.lars`. Scales, offsets and biases take the plain rate and are not decayed.
    """

    def norm(x: Array) -> Array:
        """In float32 or wider: squares of half numbers leave their range."""
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))))

    def leaf(path: Any, g: Array, w: Array, rate: Array) -> Array:
        names = _names(path)
        if names[-1] in NORMS_AND_BIASES:
            return -rate * g
        decay = 0.0 if exclude(names) else weight_decay
        w_norm, g_norm = norm(w), norm(g)
        ratio = eeta * w_norm / (g_norm + decay * w_norm + epsilon)
        # A leaf that is all zero could never leave zero, and one without a gradient has nothing to measure by.
        return -(rate * jnp.where((w_norm > 0) & (g_norm > 0), ratio, 1) * (g + decay * w))

    return _stateless(lambda g, w, rates: jax.tree.map_with_path(leaf, g, w, rates))


def step_by_rms(rho: float, epsilon: float) -> Transformation:
    """Keras' RMSprop: -rate g / sqrt(v + epsilon) with v <- rho v + (1 - rho) g^2.

    In this order, unlike `optax.scale_by_rms`: rounded otherwise, a run parts from the same run of earlier versions.
    """

    def init(params: Any) -> optax.ScaleByRmsState:
        return optax.ScaleByRmsState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None, *, rate: Any, **extra: Any) -> tuple[Any, Any]:
        nu = jax.tree.map(lambda v, g: rho * v + (1 - rho) * jnp.square(g), state.nu, updates)
        rates = jax.tree.broadcast(rate, updates)
        steps = jax.tree.map(lambda r, g, v: -(r * g / jnp.sqrt(v + epsilon)), rates, updates, nu)
        return steps, optax.ScaleByRmsState(nu)

    return Transformation(init, update)


class FirstSquareState(NamedTuple):
    """The running mean of squared gradients, and the number of updates so far."""

    nu: Any
    updates: Array


def scale_by_first_square_rms(decay: float, epsilon: float) -> Transformation:
    """g / (epsilon + sqrt v) with v <- decay v + (1 - decay) g^2, and g^2 itself in the first update.

    The first step is then g / (epsilon + |g|).
    """

    def init(params: Any) -> FirstSquareState:
        return FirstSquareState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: FirstSquareState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        kept = jnp.where(state.updates == 0, 0.0, decay)

        def move(v: Array, g: Array) -> Array:
            share = kept.astype(v.dtype)
            return share * v + (1 - share) * g * g

        nu = jax.tree.map(move, state.nu, updates)
        steps = jax.tree.map(lambda g, v: g / (epsilon + jnp.sqrt(v)), updates, nu)
        return steps, FirstSquareState(nu, state.updates + 1)

    return Transformation(init, update)


def _names(path: Any) -> Path:
    """A path as text, for dicts, attributes and positions alike."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def learning_rate(
    name: str,
    params: Params,
    *,
    global_batch_size: int,
    updates_per_epoch: int | Fraction,
    warmup: Params | None = None,
    staircase: bool = False,
) -> Callable[[Array | int], Array]:
    """The rate (float32) at an update number, which may be traced, or an array of them.

    Parameters name times in epochs; `int(epochs * updates_per_epoch)` updates, as Python truncates, are meant.
    """
    check_schedule(name, params, warmup)
    schedule = _make_schedule(name, params, global_batch_size, updates_per_epoch)
    rising = delay = 0
    if warmup is not None:
        rising = _updates(warmup, "warmup_epochs", updates_per_epoch, argument="learning_rate: warmup")
        delay = rising if warmup["warmup_mode"] == "shift" else 0

    def rate(update: Array | int) -> Array:
        t = jnp.asarray(update, jnp.uint32)
        if staircase:  # the rate of an epoch's first update holds for the whole epoch
            t = t // jnp.uint32(updates_per_epoch) * jnp.uint32(updates_per_epoch)
        if warmup is None:
            return schedule(t)
        # `shift` starts the schedule after the warm-up, `mask` lets it run from the first update.
        return schedule(t - jnp.minimum(t, jnp.uint32(delay))) * _ramp(t, rising)

    return rate


def _make_schedule(
    name: str, params: Params, batch: int, per_epoch: int | Fraction
) -> Callable[[Array], Array]:
    peak = float(params.get("initial_learning_rate", 0)) * batch
    match name:
        case "const":
            return lambda t: jnp.full(t.shape, peak, jnp.float32)
        case "cosine":
            # (1 + cos(pi t / T)) / 2, written as sin^2(pi / 2 (T - t) / T): nothing cancels towards the end.
            total = _updates(params, "epochs_to_total_decay", per_epoch, least=1)
            return lambda t: (
                peak * lax.integer_pow(jnp.sin(math.pi / 2 * _remaining(t, total) / float(total)), 2)
            )
        case "stepped":  # value k holds up to and with boundary k
            values = np.asarray(params["values"], np.float32)
            boundaries = np.asarray([int(epoch * per_epoch) for epoch in params["boundaries"]], np.uint64)
            boundaries = np.minimum(boundaries, MOST_UPDATES).astype(np.uint32)
            if (
                not boundaries.size
            ):  # an empty constant inside shard_map ends the compiler of jaxlib 0.11 on a CPU
                return lambda t: jnp.full(t.shape, values[0])
            return lambda t: jnp.asarray(values)[(t[..., None] > boundaries).sum(-1)]
        case "polynomial":  # (L - E) ((T - t) / T)^power + E; its T alone is not truncated to whole updates
            end = peak * float(params["end_learning_rate_ratio"])
            whole = _updates(params, "epochs_to_total_decay", per_epoch)
            length = float(params["epochs_to_total_decay"] * per_epoch)

            def polynomial(t: Array) -> Array:
                left = jnp.where(t > jnp.uint32(whole), 0, _remaining(t, whole) + (length - whole)) / length
                shape: Array = left ** params["power"]
                return (peak - end) * shape + end

            return polynomial
        case "exponential":  # all at once after every decay_epochs
            factor, period = (
                jnp.float32(params["decay_rate"]),
                _updates(params, "decay_epochs", per_epoch, least=1),
            )
            return lambda t: peak * factor ** (t // jnp.uint32(period)).astype(jnp.float32)
        case _:  # one_cycle: straight up to the peak, then down to 0, which only the update after the last would have
            top = _updates(params, "peak_epoch", per_epoch)
            total = _updates(params, "total_epochs", per_epoch, least=1)
            fall = float(max(total - top, 1))
            return lambda t: peak * _ramp(t, top) * jnp.minimum(_remaining(t, total) / fall, 1)


def _updates(
    params: Params,
    key: str,
    per_epoch: int | Fraction,
    *,
    least: int = 0,
    argument: str = "learning_rate: params",
) -> int:
    """The epochs under `key` as a number of updates; a decay has to take at least 1."""
    updates = int(params[key] * per_epoch)
    if updates > MOST_UPDATES:
        raise OptionError(f"{argument}: {key} {params[key]}: more than {MOST_UPDATES} updates")
    if updates < least:
        raise OptionError(f"{argument}: {key} {params[key]}: less than one update of {per_epoch} an epoch")
    return updates


def _remaining(t: Array, total: int) -> Array:
    """Updates from t to `total`, 0 after it; subtracted before they are rounded to float32."""
    left: Array = jnp.uint32(total) - jnp.minimum(t, jnp.uint32(total))
    return left.astype(jnp.float32)


def _ramp(t: Array, updates: int) -> Array:
    """(t + 1) / (updates + 1), from there on 1."""
    return (jnp.minimum(t, jnp.uint32(updates)) + 1).astype(jnp.float32) / float(updates + 1)
