"""A whole speedrun as one function of the data and a seed: whitening, initial weights, every update, the test.

Which images an update sees and how they are changed depends on the seed and its number alone. It knows no files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import DTypeLike

from hotloop.engine.feed import Order, gather_rows, seed_words
from hotloop.engine.keys import seed_key, stream
from hotloop.engine.muon import muon
from hotloop.families.cnn.model import move_statistics
from hotloop.families.cnn.speedrun import network
from hotloop.families.cnn.speedrun.augmentation import VIEWS, augment, further_views, normalise
from hotloop.families.cnn.speedrun.config import Recipe, rescaled_updates
from hotloop.layers import losses

COEFFICIENTS = (3.4576, -4.7391, 2.0843)
STEPS = 3  # of Newton and Schulz
TEST_BATCH = 2500
Images = Mapping[str, Array]
"""`image` [N, H, W, C] in bytes and `label` [N]."""
Update = Callable[[Any, Images], tuple[Any, Array]]


@dataclass(frozen=True)
class Job:
    """What the program is built from: the recipe, how many images there are to train with, the type of products."""

    recipe: Recipe
    images: int
    dtype: DTypeLike

    @property
    def updates(self) -> int:
        return self.recipe.updates(self.images)


def seed_arguments(seed: int) -> dict[str, Any]:
    """The seed as `run` takes it: the same program serves all of them."""
    return {"key": seed_key(seed), "order": seed_words(seed)}


def run(job: Job, train: Images, test: Images, seed: Mapping[str, Any]) -> dict[str, Array]:
    """Every update's mean `loss`, and the share of test images that are right: `plain_accuracy` by one look at each,
    `accuracy` with six at the uncertain ones."""
    recipe = job.recipe
    first_images = normalise(train["image"][: recipe.whitening_images])
    filters = network.whitening_filters(first_images, recipe.whitening_epsilon)
    state = init(job, stream(seed["key"], "init", 0))
    is_mirrored = jax.random.bernoulli(stream(seed["key"], "mirror", 0), 0.5, train["label"].shape)
    numbers = jnp.arange(job.updates, dtype=jnp.uint32)
    with_bias = recipe.whitening_updates(job.images)
    parts = []

    def step(one: Update, state: Any, number: Array) -> tuple[Any, Array]:
        return one(state, make_batch(job, train, is_mirrored, seed, number))

    # Two loops: when its bias rests nothing before the first convolution needs a gradient.
    for trains_bias, part in ((True, numbers[:with_bias]), (False, numbers[with_bias:])):
        state, found = lax.scan(partial(step, update(job, filters, trains_bias=trains_bias)), state, part)
        parts.append(found)
    logits = partial(predict, job, state, filters)
    plain, better = looks(recipe, logits, test["image"])
    return {
        "loss": jnp.concatenate(parts),
        "plain_accuracy": losses.correct(plain, test["label"]).mean(),
        "accuracy": losses.correct(better, test["label"]).mean(),
    }


def init(job: Job, key: Array) -> dict[str, Any]:
    params, statistics = network.init(job.recipe, key)
    return {"params": params, "statistics": statistics, "optimiser": optimiser(job).init(params)}


def optimiser(job: Job) -> optax.GradientTransformation:
    """Muon for kernels, Nesterov's momentum with L2 for the rest; every rate falls to zero along a straight line."""
    recipe, total = job.recipe, job.updates
    decay = recipe.decay * recipe.batch_size

    def falling(rate: float, updates: int) -> Callable[[Array], Array]:
        return lambda number: rate * jnp.maximum(0, 1 - number / updates)

    def descend(rate: float, updates: int) -> optax.GradientTransformation:
        return optax.chain(
            optax.add_decayed_weights(decay / rate),
            optax.trace(recipe.momentum, nesterov=True),
            optax.scale_by_learning_rate(falling(rate, updates)),
        )

    rescaled = np.fromiter(rescaled_updates(total), bool)
    kernels = muon(
        falling(recipe.kernel_rate, total),
        momentum=recipe.kernel_momentum,
        steps=STEPS,
        coefficients=COEFFICIENTS,
        decay=decay,
        is_rescaled=lambda number: jnp.asarray(rescaled)[number],
        dtype=job.dtype,
    )
    groups = {
        "whitening": descend(recipe.offset_rate, recipe.whitening_updates(job.images)),
        "offset": descend(recipe.offset_rate, total),
        "head": descend(recipe.head_rate, total),
        "kernel": kernels,
    }
    return optax.partition(groups, {name: name for name in groups})


def make_batch(
    job: Job, train: Images, is_mirrored: Array, seed: Mapping[str, Any], number: Array
) -> dict[str, Array]:
    """The batch of an update: shuffled anew in every pass, and augmented."""
    recipe = job.recipe
    order = Order(job.images, recipe.batch_size, remainder="drop")
    start = {"seed": seed["order"], "epoch": np.uint32(0), "offset": np.uint32(0)}
    indices = order.indices(start, number)
    batch = gather_rows({**train, "mirrored": is_mirrored}, indices)
    is_odd_pass = number // np.uint32(recipe.updates_per_epoch(job.images)) % 2 == 1
    key = stream(stream(seed["key"], "update", number), "augment", 0)
    images = augment(recipe, batch["image"], batch["mirrored"] ^ is_odd_pass, key)
    return {"image": images, "label": batch["label"]}


def update(job: Job, filters: Array, *, trains_bias: bool) -> Update:
    """One update, and its mean loss."""
    recipe, optimise = job.recipe, optimiser(job).update

    def loss(params: network.Params, statistics: network.Statistics, batch: Images) -> Any:
        if not trains_bias:
            params = {**params, "whitening": lax.stop_gradient(params["whitening"])}
        logits, found = network.apply(params, statistics, filters, batch["image"], job.dtype, train=True)
        # The sum, as rates are for sums; a mean would leave float16 fewer digits of small gradients, too.
        return losses.cross_entropy(logits, batch["label"], recipe.smoothing).sum(), found

    def one(state: dict[str, Any], batch: Images) -> tuple[dict[str, Any], Array]:
        params = state["params"]
        (total, found), gradients = jax.value_and_grad(loss, has_aux=True)(params, state["statistics"], batch)
        changes, memory = optimise(gradients, state["optimiser"], params)
        counts = network.count_values(recipe, batch["image"].shape[1:3])
        new = {
            "params": optax.apply_updates(params, changes),
            "statistics": move_statistics(state["statistics"], found, recipe.kept_statistics, counts),
            "optimiser": memory,
        }
        return new, total / recipe.batch_size

    return one


def predict(job: Job, state: Mapping[str, Any], filters: Array, images: Array) -> Array:
    """Logits of bytes [N, H, W, C], batch by batch."""
    count = len(images)
    size = min(TEST_BATCH, count)
    places = np.arange(-(-count // size) * size, dtype=np.int32).reshape(-1, size) % count

    def logits(indices: Array) -> Array:
        seen = normalise(gather_rows(images, indices))
        return network.apply(state["params"], state["statistics"], filters, seen, job.dtype, train=False)[0]

    found: Array = lax.map(logits, jnp.asarray(places))
    return found.reshape(places.size, -1)[:count]


def looks(recipe: Recipe, logits: Callable[[Array], Array], images: Array) -> tuple[Array, Array]:
    """Logits by one look at each image, and those with the mean over six views of the images whose largest probability
    is lowest."""
    plain = logits(images)
    unsure = int(len(images) * recipe.uncertain)
    if not unsure:
        return plain, plain
    worst = lax.top_k(-jax.nn.softmax(plain).max(-1), unsure)[1]
    views = further_views(images[worst])
    others = logits(views.reshape(-1, *images.shape[1:])).reshape(VIEWS - 1, unsure, -1)
    return plain, plain.at[worst].set((plain[worst] + others.sum(0)) / VIEWS)
