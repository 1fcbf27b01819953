"""The deep autoencoder: its network, one weight update and its evaluation, as the engine wants them.

The network has six fully connected layers with SELU after every one, the decoder's weights the encoder's transposed;
dropout stands in one place, after the code. Parameters are {"encoder": ({"w", "b"}, ...), "decoder": ({"b"} or {"w",
"b"}, ...)}, weights [in, out]. In ratings a zero is "no rating".

joint re-feeding: y = f(x), z = f(y) with another dropout mask, one loss L(y, x) + |z - y|^2, one step, the gradient
through everything. alternate: a step on L(y, x), then steps on |f(y) - y|^2 with y detached, each with the weights of
the step before.

`joint_gradient` is that of joint re-feeding with sparse ratings, written out for a CPU. Of the eleven products with all
items that an update makes by automatic differentiation, two have the ratings for an operand, which are a four-hundredth
full, and four are parts of one weight gradient. Here the ratings stay sparse and the other parts are one product over
both passes; the middle layers are differentiated as usual.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import optim, precision
from hotloop.engine.device import platform
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.optim import learning_rate
from hotloop.families.recommender.batches import Entries, SparseBatch
from hotloop.families.recommender.config import LAYERS, TrainOptions, UpdateOptions
from hotloop.families.recommender.measures import sum_errors
from hotloop.layers.dense import column_sums, product, with_bias
from hotloop.layers.initial import constant, draw, glorot_uniform

Params = Any
SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
SPARSE_SHARE = 0.01
"""The share of rated places up to which a sparse product beats the dense one."""
State = Any
Batch = Mapping[str, Any]
OPTIMISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Momentum": ("momentum", {"momentum": 0.9}),
    "SGD": ("sgd", {"momentum": 0}),
    # With a trust coefficient of 1 the rate is the share of its own norm by which a layer moves.
    "LARS": ("lars", {"momentum": 0.9, "weight_decay": 0, "eeta": 1, "epsilon": 0}),
    "RMSprop": ("rmsprop_outside", {"decay": 0.9, "epsilon": 1e-7}),
    "Adam": ("adam", {}),
    "AdamW": ("adam", {}),
    "Muon": ("muon", {}),
}
DECAY_BESIDE = ("AdamW", "Muon")
"""Their decay shrinks the weights themselves; that of the others is added to the gradient."""


def resolve_precision(mode: str) -> str:
    return mode if mode != "auto" else "32.32" if platform() == "cpu" else "16.16"


@dataclass(frozen=True)
class Job:
    """All that an update and an evaluation are built from."""

    net: UpdateOptions
    items: int
    drops: tuple[int, ...] = ()
    """Updates from which each next factor of the rate holds."""
    low: float = -math.inf
    high: float = math.inf
    """Predictions are clipped to this range when they are evaluated."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Units of the encoder."""
        assert self.net.size is not None
        return LAYERS[self.net.size]

    @property
    def policy(self) -> precision.Policy:
        mode = resolve_precision(self.net.precision)
        return precision.parse(mode, self.net.half, stochastic_rounding=not self.net.no_prng)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate before the first drop, after it, and so on."""
        assert self.net.batch_size is not None
        base = 2.0**self.net.base_learning_rate * self.net.batch_size
        return tuple(base * factor for factor in self.net.learning_rate_decay[: len(self.drops) + 1])


def make_job(config: TrainOptions, items: int, drops: tuple[int, ...], low: float, high: float) -> Job:
    """The job of a run on so many items with ratings from `low` to `high`."""
    bounds = (low, high) if config.clip else (-math.inf, math.inf)
    net = UpdateOptions(**{each.name: getattr(config, each.name) for each in fields(UpdateOptions)})
    return Job(net, items, drops, *bounds)


def optimiser(net: UpdateOptions) -> optim.Transformation:
    """Decay, then clipping, then momentum, then the rate."""
    name, params = OPTIMISERS[net.optimizer]
    beside, inside = (net.weight_decay, 0.0) if net.optimizer in DECAY_BESIDE else (0.0, net.weight_decay)
    clip = 1.0 if net.gradient_clipping else None
    return optim.make(name, params, weight_decay=beside, l2=inside, clip=clip)


def init(job: Job, key: Array) -> State:
    """Random weights, an optimiser that has seen nothing, no update yet."""
    params = job.policy.to_update(init_network(key, job.items, job.layers, job.net.is_tied))
    return {
        "params": params,
        "optimiser": precision.start_state(job.policy, optimiser(job.net), params),
        "update": jnp.zeros((), jnp.int32),
    }


def update(job: Job) -> Callable[[State, Batch, Array], tuple[State, dict[str, Array]]]:
    """One batch: one step, or 1 + aug_steps of them under alternate re-feeding."""
    transformation, refeeding = optimiser(job.net), job.net.refeeding
    steps = {"boundaries": [drop - 1 for drop in job.drops], "values": job.rates}
    rate_at = learning_rate("stepped", steps, global_batch_size=1, updates_per_epoch=1)

    def make_update(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        x, rate = batch["ratings"], rate_at(state["update"])

        def step(state: State, gradients: Any, number: int) -> tuple[State, Array]:
            """The state after one step of the optimiser with gradients of the scaled loss, and their norm."""
            # Unscaled in float32: in float16 small ones would be lost again.
            scale = job.net.loss_scaling
            wide = jax.tree.map(
                lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / scale, gradients
            )
            norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(wide)))
            slots, params, rounding = state["optimiser"], state["params"], stream(key, "rounding", number)
            params, slots = precision.optimise(
                job.policy, transformation, wide, slots, params, rounding, rate=rate
            )
            return {**state, "params": params, "optimiser": slots}, norm

        if isinstance(x, SparseBatch):
            gradients, (loss, masked) = _sparse_joint(job, state["params"], x, key)
        elif refeeding == "joint":
            gradients, (loss, masked) = _gradient(job, state, lambda params: _joint(job, params, x, key))
        else:
            gradients, (masked, y) = _gradient(job, state, lambda params: _rated(job, params, x, key))
            loss = masked
        state, norm = step(state, gradients, 0)
        figures = {"loss": loss, "rmse": jnp.sqrt(masked)}
        for n in range(1, job.net.aug_steps + 1) if refeeding == "alternate" else ():
            refeed = partial(_refed, job, target=y, key=stream(key, "dropout", n))
            gradients, (figures["refeed_loss"], y) = _gradient(job, state, refeed)
            state, norm = step(state, gradients, n)
        new = {**state, "update": state["update"] + 1}
        return new, {**figures, "learning_rate": rate, "gradient_norm": norm}

    return make_update


def _gradient(
    job: Job, state: State, loss: Callable[[Any], tuple[Array, Any]]
) -> tuple[Any, tuple[Array, Any]]:
    """The gradient of the scaled loss, and what the loss returns."""

    def scaled(params: Any) -> tuple[Array, Any]:
        value, extra = loss(params)
        return job.net.loss_scaling * value, (value, extra)

    found: tuple[Any, Any] = jax.grad(scaled, has_aux=True)(job.policy.to_compute(state["params"]))
    return found


def _joint(job: Job, params: Any, x: Array, key: Array) -> tuple[Array, Array]:
    masked, y = _rated(job, params, x, key)
    return masked + _refed(job, params, y, stream(key, "dropout", 1))[0], masked


def _sparse_joint(job: Job, params: Any, x: SparseBatch, key: Array) -> tuple[Any, tuple[Array, Array]]:
    """The same with sparse ratings: its gradient, and what `_joint` returns."""
    keeps = [draw_dropout(job, stream(key, "dropout", n), len(x.users)) for n in (0, 1)]
    return joint_gradient(params, x, keeps, job.net.loss_scaling)


def _rated(job: Job, params: Any, x: Array, key: Array) -> tuple[Array, Array]:
    y = apply_network(job, params, x, stream(key, "dropout", 0))
    return masked_error(y, x.astype(y.dtype)), y


def _refed(job: Job, params: Any, target: Array, key: Array) -> tuple[Array, Array]:
    y = apply_network(job, params, target, key)
    return dense_error(y, target), y


def apply_network(job: Job, params: Any, x: Array, key: Array | None = None) -> Array:
    """Predictions for dense ratings; with a key, the code is dropped out, each row by its own place."""
    return forward(params, x, draw_dropout(job, key, len(x)), linear=job.net.no_selu)


def draw_dropout(job: Job, key: Array | None, rows: int) -> Array | float:
    """What the code is multiplied with."""
    if key is None or not job.net.code_dropout:
        return 1.0
    share = 1 - job.net.code_dropout
    keys = sample_keys(key, 0, rows)
    chosen = jax.vmap(lambda k: jax.random.bernoulli(k, share, (job.layers[-1],)))(keys)
    return chosen / np.float32(share)


def predict(job: Job, state: State, x: Array) -> Array:
    """Predictions without dropout, float32."""
    return apply_network(job, job.policy.to_compute(state["params"]), x)


def evaluate(job: Job) -> Callable[[State, Batch], dict[str, Array]]:
    """For each user: squared and absolute error of clipped predictions, summed over its ratings, and their number."""

    def values(state: State, batch: Batch) -> dict[str, Array]:
        predictions = jnp.clip(predict(job, state, batch["ratings"]), job.low, job.high)
        return sum_errors(predictions, batch["truth"])

    return values


def init_network(key: Array, items: int, layers: tuple[int, ...], tied: bool) -> Params:
    """Glorot uniform weights and biases of zero."""
    down = list(pairwise((items, *layers)))
    up = [(out, into) for into, out in reversed(down)]
    encoder = tuple({"w": glorot_uniform(size), "b": constant(size[1:])} for size in down)
    own = [{} if tied else {"w": glorot_uniform(size)} for size in up]
    decoder = tuple({**weights, "b": constant(size[1:])} for weights, size in zip(own, up, strict=True))
    return draw(key, {"encoder": encoder, "decoder": decoder})


def forward(params: Params, x: Array, keep: Array | float = 1.0, *, linear: bool = False) -> Array:
    """Predictions [B, items] in float32; `keep` scales the code (dropout: 0 or 1 / (1 - p))."""
    activation = (lambda x: x) if linear else selu
    return run_layers(params["encoder"], params["decoder"], x, keep, activation)


def run_layers(
    encoder: Params, decoder: Params, x: Array, keep: Array | float, activation: Callable[[Array], Array]
) -> Array:
    """Some layers down and as many up again."""
    for layer in encoder:
        x = activation(with_bias(_product(x, layer["w"]), layer["b"]))
    x = x * keep
    for layer, weights in zip(decoder, reversed(encoder), strict=True):
        x = activation(with_bias(_product(x, layer.get("w", weights["w"].T)), layer["b"]))
    return x


def selu(x: Array) -> Array:
    """SELU by exp(x) - 1, whose error near 0 is 6e-8 at most: on a CPU 0.8 ms where `jax.nn.selu` takes 2.0.

    At 0 the slope is that from below, not the half of it that the gradient of `minimum` would give.
    """
    return SELU_SCALE * jnp.where(x > 0, x, SELU_ALPHA * (jnp.exp(jnp.where(x > 0, 0, x)) - 1))


def selu_slope(y: Array) -> Array:
    """The derivative of SELU where its value is y."""
    return jnp.where(y > 0, SELU_SCALE, y + SELU_SCALE * SELU_ALPHA)


def _product(x: Array, w: Array) -> Array:
    """x w and its gradients with operands in the weights' type, summed in float32 (or float64)."""
    result: Array = product(jnp.asarray(x, w.dtype), w)
    return result


def masked_error(predictions: Array, ratings: Array) -> Array:
    """The mean squared error over the places that hold a rating."""
    there = ratings > 0
    errors = jnp.where(there, predictions - ratings, 0)
    return jnp.square(errors).sum() / jnp.maximum(there.sum(), 1)


def dense_error(predictions: Array, targets: Array) -> Array:
    """The mean squared error over all places."""
    return jnp.square(predictions - targets).mean()


def joint_gradient(
    params: Params, ratings: SparseBatch, keeps: Sequence[Array | float], scale: float
) -> tuple[Params, tuple[Array, Array]]:
    """What `jax.grad` of the joint loss times `scale` gives, for a SELU network; loss and masked error unscaled."""
    into = params["encoder"][0]["w"]
    tied = "w" not in params["decoder"][-1]
    out_of = into.T if tied else params["decoder"][-1]["w"]
    y, y_code, y_back = _through(params, _rated_product(ratings, into), out_of, keeps[0])
    z, z_code, z_back = _through(params, product(y, into), out_of, keeps[1])
    rated = jnp.maximum(ratings.total, 1)
    masked, dense = _squared_error(ratings, y) / rated, jnp.square(z - y).mean()

    apart = (2 * scale / y.size) * (z - y)
    dz = apart * selu_slope(z)
    inner_z, dz_first = z_back(product(dz, out_of.T))
    dy = _with_errors(ratings, product(dz_first, into.T) - apart, y, 2 * scale / rated)
    dy = dy * selu_slope(y)
    inner_y, dy_first = y_back(product(dy, out_of.T))
    last = {"b": column_sums(dz) + column_sums(dy)}
    if tied:
        d_into = _weights((dz, y, dy), (z_code, dz_first, y_code))
    else:
        d_into = _weights((y,), (dz_first,))
        last["w"] = _weights((z_code, y_code), (dz, dy))
    inner = jax.tree.map(jnp.add, inner_z, inner_y)
    d_first = {"w": _with_outer(ratings, d_into, dy_first), "b": inner["first_bias"]}
    gradients = {"encoder": (d_first, *inner["encoder"]), "decoder": (*inner["decoder"], last)}
    return gradients, (masked + dense, masked)


def _through(
    params: Params, before: Array, out_of: Array, keep: Array | float
) -> tuple[Array, Array, Callable[[Array], Any]]:
    """From the first layer's product to the predictions: these, what the last layer was given, and the way back.

    The way back gives the gradients of all but the widest weights, and that of `before`.
    """

    def middle(inner: Params, before: Array) -> Array:
        x = selu(with_bias(before, inner["first_bias"]))
        return run_layers(inner["encoder"], inner["decoder"], x, keep, selu)

    own = params["encoder"][1:], params["decoder"][:-1]
    inner = {"first_bias": params["encoder"][0]["b"], "encoder": own[0], "decoder": own[1]}
    code, back = jax.vjp(middle, inner, before)
    return selu(product(code, out_of) + params["decoder"][-1]["b"]), code, back


def _weights(inputs: Sequence[Array], gradients: Sequence[Array]) -> Array:
    """The sum of the weight gradients of several uses, as one product."""
    return jnp.concatenate(inputs).T @ jnp.concatenate(gradients)


def _rated_product(ratings: SparseBatch, weights: Array) -> Array:
    """ratings @ weights."""

    def add(total: Array, chunk: Entries) -> Array:
        mine = chunk.row == jnp.arange(len(ratings.users), dtype=jnp.int32)[:, None]
        return total + jnp.where(mine, chunk.value, 0) @ weights[chunk.column]

    return ratings.fold(add, jnp.zeros((len(ratings.users), weights.shape[1]), weights.dtype))


def _squared_error(ratings: SparseBatch, predictions: Array) -> Array:
    def add(total: Array, chunk: Entries) -> Array:
        errors = predictions[chunk.row, chunk.column] - chunk.value
        return total + jnp.where(chunk.inside, jnp.square(errors), 0).sum()

    return ratings.fold(add, jnp.zeros((), predictions.dtype))


def _with_errors(ratings: SparseBatch, into: Array, predictions: Array, factor: Array) -> Array:
    """`into` with the errors times a factor added where there are ratings."""

    def add(into: Array, chunk: Entries) -> Array:
        errors = predictions[chunk.row, chunk.column] - chunk.value
        return into.at[chunk.row, chunk.column].add(jnp.where(chunk.inside, factor * errors, 0))

    return ratings.fold(add, into)


def _with_outer(ratings: SparseBatch, into: Array, dy: Array) -> Array:
    """`into` + ratings.T @ dy."""

    def add(into: Array, chunk: Entries) -> Array:
        return into.at[chunk.column].add(chunk.value[:, None] * dy[chunk.row])

    return ratings.fold(add, into)
