"""The deep autoencoder: its network, one weight update and its evaluation, as the engine wants them.

Six fully connected layers with SELU after every one, the decoder's weights the encoder's transposed; dropout stands in
one place, after the code. Parameters are {"encoder": ({"w", "b"}, ...), "decoder": ({"b"} or {"w", "b"}, ...)},
weights [in, out]. In ratings a zero is "no rating". Of several replicas each has a share of the users; a loss is a sum
over all of them, divided by the number of all their ratings or places, so that any split of a batch gives the same.

With the objective `ranking` the same network has logits for outputs (`ranking`): no re-feeding, and no activation
after the last layer.

joint re-feeding: y = f(x), z = f(y) with another dropout mask, one loss L(y, x) + |z - y|^2, one step, the gradient
through everything. alternate: a step on L(y, x), then steps on |f(y) - y|^2 with y detached, each with the weights of
the step before.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine import optim, precision
from hotloop.engine.device import mesh_of_replicas, platform
from hotloop.engine.keys import sample_keys, stream
from hotloop.engine.precision import count_replicas, first_row, on_replicas, sum_replicas
from hotloop.families.recommender import ranking
from hotloop.families.recommender.batches import DeviceRows, Entries, SparseBatch, sum_errors
from hotloop.families.recommender.config import DROPOUT, KS, LAYERS, OPTIMISERS, TrainOptions, UpdateOptions
from hotloop.families.recommender.measures import ranking_values
from hotloop.families.recommender.ranking import is_relevant
from hotloop.layers.dense import product, with_bias
from hotloop.layers.initial import constant, draw, glorot_uniform
from hotloop.layers.tied import Tied, Untied, selu, selu_slope

Params = Any
State = Any
Batch = Mapping[str, Any]
SPARSE_SHARE = 0.01  # of rated places, up to which a sparse product beats the dense one
DECOUPLED_DECAY = ("AdamW", "Muon")
"""Their decay shrinks the weights themselves; that of the others is added to the gradient."""


@dataclass(frozen=True)
class Job:
    """All that an update and an evaluation are built from."""

    net: UpdateOptions
    items: int
    drops: tuple[int, ...] = ()  # updates from which each next factor of the rate holds
    low: float = -math.inf  # predictions are clipped to this range when they are evaluated
    high: float = math.inf
    updates_per_epoch: Fraction = Fraction(1)
    replicas: int = 1  # devices that share the users of an update

    @cached_property
    def mesh(self) -> Mesh | None:
        """Of the replicas; None for one."""
        return mesh_of_replicas(self.replicas)

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.net.size is not None
        return self.net.layers or LAYERS[self.net.size]

    @property
    def is_ranking(self) -> bool:
        return self.net.objective == "ranking"

    @property
    def is_tied(self) -> bool:
        return self.net.tied and not self.net.untied

    @property
    def dropout(self) -> float:
        usual = 0.0 if self.is_ranking else DROPOUT[self.net.size or 128]
        return 0.0 if self.net.no_dropout else usual if self.net.dropout is None else self.net.dropout

    @property
    def input_dropout(self) -> float:
        return 0.0 if self.net.no_dropout else self.net.input_dropout

    @property
    def refeeding(self) -> str:
        return "none" if self.is_ranking or self.net.no_dense_refeeding else self.net.refeed

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


def make_job(
    config: TrainOptions, users: int, items: int, drops: tuple[int, ...], low: float, high: float
) -> Job:
    """The job of a run on so many users and items with ratings from `low` to `high`."""
    bounds = (low, high) if config.clip else (-math.inf, math.inf)
    net = {each.name: getattr(config, each.name) for each in fields(UpdateOptions)}
    net["precision"] = resolve_precision(config.precision)
    per_epoch = Fraction(users, config.batch_size or users)
    return Job(UpdateOptions(**net), items, drops, *bounds, per_epoch, config.replicas)


def resolve_precision(mode: str) -> str:
    return mode if mode != "auto" else "32.32" if platform() == "cpu" else "16.16"


def takes_sparse(job: Job, train: RatingMatrix) -> bool:
    """Whether an update on sparse ratings is the faster one: joint re-feeding in float32 on a CPU, few ratings."""
    few = train.ratings < SPARSE_SHARE * train.users * job.items
    plain = job.refeeding == "joint" and not job.net.no_selu
    return platform() == "cpu" and few and plain and job.policy.compute == jnp.float32


def choose_training(job: Job, train: RatingMatrix) -> RatingMatrix:
    """What batches are made of: the ratings, or where an order is learnt a one for each item that a user likes."""
    return ranking.keep_relevant(train, job.net.relevant) if job.is_ranking else train


def optimiser(net: UpdateOptions) -> optim.Transformation:
    """Decay, then clipping, then momentum, then the rate."""
    name, params = OPTIMISERS[net.optimizer]
    decoupled, l2 = (net.weight_decay, 0.0) if net.optimizer in DECOUPLED_DECAY else (0.0, net.weight_decay)
    return optim.make(
        name,
        {**params, **net.optimizer_params},
        weight_decay=decoupled,
        l2=l2,
        clip=1.0 if net.gradient_clipping else None,
        global_batch_size=net.batch_size or 1,
    )


def make_rate(job: Job) -> Callable[[Array | int], Array]:
    """The rate of each update: dropping as the old program's did, or by a schedule of the engine's."""
    if job.net.lr_schedule == "drops":
        steps = {"boundaries": [drop - 1 for drop in job.drops], "values": job.rates}
        return optim.learning_rate("stepped", steps, global_batch_size=1, updates_per_epoch=1)
    batch, per_epoch = job.net.batch_size or 1, job.updates_per_epoch
    return optim.learning_rate(
        job.net.lr_schedule, job.net.schedule_params, global_batch_size=batch, updates_per_epoch=per_epoch
    )


def init(job: Job, key: Array) -> State:
    """Glorot uniform weights and biases of zero, an optimiser that has seen nothing, no update yet."""
    layers, is_tied, policy = job.layers, job.is_tied, job.policy
    down = list(pairwise((job.items, *layers)))
    up = [(out, into) for into, out in reversed(down)]
    own = [{} if is_tied else {"w": glorot_uniform(size)} for size in up]
    network: dict[str, Any] = {
        "encoder": tuple({"w": glorot_uniform(size), "b": constant(size[1:])} for size in down),
        "decoder": tuple({**w, "b": constant(size[1:])} for w, size in zip(own, up, strict=True)),
    }
    if job.net.kl:
        network["spread"] = {"w": glorot_uniform(down[-1]), "b": constant(down[-1][1:])}
    params = policy.to_update(draw(key, network))
    return {
        "params": params,
        "optimiser": precision.start_state(policy, optimiser(job.net), params),
        "update": jnp.zeros((), jnp.int32),
    }


def update(job: Job) -> Callable[[State, Batch, Array], tuple[State, dict[str, Array]]]:
    """One batch: one step, or 1 + aug_steps of them under alternate re-feeding."""
    net, refeeding, rate_at, chain = job.net, job.refeeding, make_rate(job), optimiser(job.net)

    def update_on_share(
        axis: str | None, share: Array, rows: DeviceRows | None, state: State, key: Array
    ) -> tuple[State, dict[str, Array]]:
        """`share` are dense ratings, or with `rows` the users to take out of them."""
        x = share if rows is None else SparseBatch(rows, share)
        rate = rate_at(state["update"])

        def differentiate(loss: Callable[[Any], tuple[Array, Any]]) -> tuple[Any, tuple[Array, Any]]:
            """The gradient by way of the scaled loss, the loss, both of all replicas, and what else it returns."""

            def scaled(params: Any) -> tuple[Array, Any]:
                value, extra = loss(params)
                return net.loss_scaling * value, (value, extra)

            found = jax.grad(scaled, has_aux=True)(job.policy.to_compute(state["params"]))
            gradients, (value, extra) = found
            gradients, value = sum_replicas((gradients, value), axis)
            # Unscaled in float32: in float16 small ones would be lost again.
            wide = jax.tree.map(
                lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) / net.loss_scaling, gradients
            )
            return wide, (value, extra)

        def step(state: State, gradients: Any, number: int) -> tuple[State, Array]:
            """The state after one step of the optimiser, and the norm of the gradients."""
            norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)))
            slots, params, rounding = state["optimiser"], state["params"], stream(key, "rounding", number)
            params, slots = precision.optimise(
                job.policy, chain, gradients, slots, params, rounding, rate=rate
            )
            return {**state, "params": params, "optimiser": slots}, norm

        if isinstance(x, SparseBatch):
            gradients, (loss, masked) = sum_replicas(sparse_joint(job, state["params"], x, key, axis), axis)
        elif job.is_ranking:
            weight = kl_weight(job, state["update"])
            loss_of = partial(ranking_loss, job, liked=x, weight=weight, key=key, axis=axis)
            gradients, (loss, own) = differentiate(loss_of)
            figures = {
                "loss": loss,
                **({"kl": sum_replicas(own, axis), "kl_weight": weight} if net.kl else {}),
            }
        elif refeeding == "joint":
            gradients, (loss, own) = differentiate(lambda params: joint_loss(job, params, x, key, axis))
            masked = sum_replicas(own, axis)
        else:
            gradients, (masked, y) = differentiate(lambda params: rating_loss(job, params, x, key, axis))
            loss = masked
        state, norm = step(state, gradients, 0)
        if not job.is_ranking:
            figures = {"loss": loss, "rmse": jnp.sqrt(masked)}
        for n in range(1, net.aug_steps + 1) if refeeding == "alternate" else ():
            loss_of = partial(refeeding_loss, job, target=y, key=stream(key, "dropout", n), axis=axis)
            gradients, (figures["refeed_loss"], y) = differentiate(loss_of)
            state, norm = step(state, gradients, n)
        new = {**state, "update": state["update"] + 1}
        return new, {**figures, "learning_rate": rate, "gradient_norm": norm}

    def make_update(state: State, batch: Batch, key: Array) -> tuple[State, dict[str, Array]]:
        x, rows = batch["ratings"], None
        if isinstance(x, SparseBatch):
            rows, x, _ = x
        found: tuple[State, dict[str, Array]] = on_replicas(update_on_share, job.mesh)(x, rows, state, key)
        return found

    return make_update


def joint_loss(job: Job, params: Any, x: Array, key: Array, axis: str | None = None) -> tuple[Array, Array]:
    """Of this replica's users: their share in the loss of both passes, and in the masked error in it."""
    masked, y = rating_loss(job, params, x, key, axis)
    return masked + refeeding_loss(job, params, y, stream(key, "dropout", 1), axis)[0], masked


def rating_loss(job: Job, params: Any, x: Array, key: Array, axis: str | None = None) -> tuple[Array, Array]:
    """This replica's share in the masked error, and its predictions."""
    y = apply_network(job, params, x, stream(key, "dropout", 0), axis)
    return masked_error(y, x.astype(y.dtype), axis), y


def refeeding_loss(
    job: Job, params: Any, target: Array, key: Array, axis: str | None = None
) -> tuple[Array, Array]:
    """This replica's share in the mean squared error over all places, and its predictions."""
    y = apply_network(job, params, target, key, axis)
    return mean_square(y - target, axis), y


def kl_weight(job: Job, update: Array) -> Array:
    """Of the KL divergence in an update's loss: it grows in even steps over `kl_epochs` epochs."""
    steps = max(1.0, job.net.kl_epochs * float(job.updates_per_epoch))
    return job.net.kl * jnp.minimum(update.astype(jnp.float32) / np.float32(steps), 1)


def ranking_loss(
    job: Job, params: Any, liked: Array, weight: Array, key: Array, axis: str | None = None
) -> tuple[Array, Array]:
    """This replica's share in the mean over all users of the loss, and in that of the KL divergence."""
    first, rows = first_row(len(liked), axis), len(liked)
    x = ranking.hide_items(
        ranking.normalise(liked), sample_keys(stream(key, "input", 0), first, rows), job.input_dropout
    )
    noise = None
    if job.net.kl:
        keys = sample_keys(stream(key, "code", 0), first, rows)
        noise = jax.vmap(lambda k: jax.random.normal(k, (job.layers[-1],)))(keys)
    keep = draw_dropout(job, stream(key, "dropout", 0), rows, axis)
    logits, divergence = ranking.run_ranker(params, x, keep, noise, linear=job.net.no_selu)
    users = rows * count_replicas(axis)
    share = divergence.sum() / users
    return ranking.neg_log_likelihood(logits, liked).sum() / users + weight * share, share


def apply_network(
    job: Job, params: Any, x: Array, key: Array | None = None, axis: str | None = None
) -> Array:
    """Predictions for dense ratings; with a key, the code is dropped out, each row by its place in the whole batch."""
    keep = 1.0 if key is None else draw_dropout(job, key, len(x), axis)
    return forward(params, x, keep, linear=job.net.no_selu)


def draw_dropout(job: Job, key: Array, rows: int, axis: str | None = None) -> Array | float:
    if not job.dropout:
        return 1.0
    share = 1 - job.dropout
    keys = sample_keys(key, first_row(rows, axis), rows)
    chosen = jax.vmap(lambda k: jax.random.bernoulli(k, share, (job.layers[-1],)))(keys)
    return chosen / np.float32(share)


def predict(job: Job, state: State, x: Array) -> Array:
    """Of dense ratings: a rating for every item, or where an order was learnt its log-probability."""
    params = job.policy.to_compute(state["params"])
    if job.is_ranking:
        return ranking.log_probabilities(params, x, job.net.relevant, linear=job.net.no_selu)
    return apply_network(job, params, x)


def evaluate(job: Job) -> Callable[[State, Batch], dict[str, Array]]:
    """For each user: squared and absolute error of clipped predictions, summed over its ratings, and their number; or
    where an order is learnt what `ranking_values` has."""

    def values(state: State, batch: Batch) -> dict[str, Array]:
        if job.is_ranking:
            scores, rated = predict(job, state, batch["ratings"]), batch["ratings"] > 0
            return ranking_values(scores, rated, is_relevant(batch["truth"], job.net.relevant), KS)
        predictions = jnp.clip(predict(job, state, batch["ratings"]), job.low, job.high)
        return sum_errors(predictions, batch["truth"])

    return values


def forward(params: Params, x: Array, keep: Array | float = 1.0, *, linear: bool = False) -> Array:
    """Predictions [B, items] in float32; `keep` scales the code (dropout: 0 or 1 / (1 - p))."""
    activation = (lambda x: x) if linear else selu
    return run_layers(params["encoder"], params["decoder"], x, keep, activation)


def run_layers(
    encoder: Params, decoder: Params, x: Array, keep: Array | float, activation: Callable[[Array], Array]
) -> Array:
    """Some layers down and as many up again; operands in the weights' type, summed in float32 (or float64)."""

    def layer(x: Array, w: Array, b: Array) -> Array:
        return activation(with_bias(product(jnp.asarray(x, w.dtype), w), b))

    for down in encoder:
        x = layer(x, down["w"], down["b"])
    x = x * keep
    for up, mirrored in zip(decoder, reversed(encoder), strict=True):
        x = layer(x, up.get("w", mirrored["w"].T), up["b"])
    return x


def masked_error(predictions: Array, ratings: Array, axis: str | None = None) -> Array:
    """The squared errors at the places that hold a rating, over the number of such places of all replicas.

    Not over this replica's own: users have rated more or less, and a mean of such means is another loss.
    """
    there = ratings > 0
    errors = jnp.where(there, predictions - ratings, 0)
    return jnp.square(errors).sum() / jnp.maximum(sum_replicas(there.sum(), axis), 1)


def mean_square(differences: Array, axis: str | None = None) -> Array:
    """The squares over the number of places of all replicas."""
    return jnp.square(differences).sum() / (differences.size * count_replicas(axis))


def sparse_joint(
    job: Job, params: Params, x: SparseBatch, key: Array, axis: str | None = None
) -> tuple[Params, tuple[Array, Array]]:
    """The gradient of `joint_loss` for sparse ratings and SELU, and what `joint_loss` returns.

    Written out for a CPU. Of the eleven products with all items that an update makes by automatic differentiation, two
    have the ratings for an operand, which are a four-hundredth full, and four are parts of one weight gradient. Here
    the ratings stay sparse and the other parts are one product over both passes (`layers.tied`); what the ratings add
    to gradients is added to them, rating by rating, and the middle layers are differentiated as usual. The loss is not
    scaled: float32 needs none of it, and gradients would have to be read once more.
    """
    users = len(x.users)
    rated_places = jnp.maximum(sum_replicas(x.sizes.sum(), axis), 1)
    first, last = params["encoder"][0], params["decoder"][-1]
    into: Array = first["w"]
    outer = Untied(into, last["w"].T, last["b"]) if "w" in last else Tied(into, last["b"])
    inner = {"bias": first["b"], "encoder": params["encoder"][1:], "decoder": params["decoder"][:-1]}

    def middle(before: Array, number: int) -> tuple[Array, Callable[[Array], Any]]:
        """From the first layer's product: what the last layer is given, and the way back to `before`."""
        keep = draw_dropout(job, stream(key, "dropout", number), users, axis)

        def run(inner: Params, before: Array) -> Array:
            hidden = selu(with_bias(before, inner["bias"]))
            return run_layers(inner["encoder"], inner["decoder"], hidden, keep, selu)

        code, back = jax.vjp(run, inner, before)
        return code, back

    def add_product(total: Array, chunk: Entries) -> Array:
        return total.at[chunk.row].add(chunk.value[:, None] * into[chunk.column])

    y_code, y_back = middle(x.fold(add_product, jnp.zeros((users, into.shape[1]), into.dtype)), 0)
    y, following = outer.forward(y_code)
    z_code, z_back = middle(following, 1)
    places = y.size * count_replicas(axis)
    z, dz_code, apart = outer.refeed(z_code, y, 2 / places)
    inner_z, dz_first = z_back(dz_code)
    d_outer = outer.differentiate(y, z, y_code, z_code, dz_first, 2 / places)

    def find_pulls(chunk: Entries) -> tuple[Array, Array]:
        found = y[chunk.column, chunk.row]
        errors = jnp.where(chunk.inside, found - chunk.value, 0)
        return errors, (2 / rated_places) * errors * selu_slope(found)

    def add_pulls(totals: tuple[Array, Array, Array], chunk: Entries) -> tuple[Array, Array, Array]:
        squares, dy_code, d_bias = totals
        errors, pulls = find_pulls(chunk)
        dy_code = dy_code.at[chunk.row].add(pulls[:, None] * outer.out_of[chunk.column])
        return squares + jnp.square(errors).sum(), dy_code, d_bias.at[chunk.column].add(pulls)

    squares, dy_code, d_bias = x.fold(add_pulls, (jnp.zeros((), y.dtype), d_outer.code, d_outer.bias))
    masked = squares / rated_places
    inner_y, dy_first = y_back(dy_code)

    def add_outer(totals: tuple[Array, ...], chunk: Entries) -> tuple[Array, ...]:
        of_first = chunk.value[:, None] * dy_first[chunk.row]
        of_last = find_pulls(chunk)[1][:, None] * y_code[chunk.row]
        added = (of_first + of_last,) if len(totals) == 1 else (of_first, of_last)
        return tuple(total.at[chunk.column].add(one) for total, one in zip(totals, added, strict=True))

    d_into, *d_out_of = x.fold(add_outer, d_outer.weights)
    d_inner = jax.tree.map(jnp.add, inner_z, inner_y)
    d_first = {"w": d_into, "b": d_inner["bias"]}
    d_last = {"b": d_bias, **({"w": d_out_of[0].T} if d_out_of else {})}
    gradients = {"encoder": (d_first, *d_inner["encoder"]), "decoder": (*d_inner["decoder"], d_last)}
    return gradients, (masked + apart / places, masked)
