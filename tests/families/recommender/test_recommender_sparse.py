"""Joint re-feeding on sparse ratings: the gradient of the dense way, in float64, and the same training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recommender_small import Small, quick
from test_recommender_batches import matrix

from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.recommender import batches, model
from hotloop.families.recommender.config import TrainOptions

ITEMS = 40
SIZES = [3, 0, 40, 1, 7, 12]
RATINGS = matrix(SIZES, ITEMS, "half stars")
KEY = jax.random.key(3)
CONFIG = TrainOptions(
    size=128, batch_size=6, data="procedural", base_learning_rate=-9, precision="32.32"
).resolve()


def dense(users, dtype):
    rows = [RATINGS.row(user) for user in users]
    full = np.zeros((len(users), ITEMS), dtype)
    for into, (items, values) in zip(full, rows, strict=True):
        into[items] = values
    return full


@pytest.mark.parametrize(("untied", "dropout", "chunk"), [(False, 0.5, 5), (True, 0.0, 1024)])
def test_the_gradient_is_that_of_the_dense_loss(monkeypatch, untied, dropout, chunk):
    """Of users in order, of some twice, and of one without ratings alone; in one chunk and in many, whatever the scale
    of the loss, which float32 does not need."""
    monkeypatch.setattr(batches.SparseBatch.fold, "__defaults__", (chunk,))
    net = replace(CONFIG, untied=untied, dropout=dropout, loss_scaling=50.0)
    job = Small(net, ITEMS, widths=(7, 5, 6))
    with jax.enable_x64(True):
        generator = np.random.default_rng(1)
        forms = jax.eval_shape(lambda key: model.init(job, key)["params"], KEY)
        params = jax.tree.map(lambda form: generator.normal(0.02, 0.3, form.shape), forms)
        rows = jax.device_put(batches.make_rows(RATINGS))
        wanted = quick(
            jax.value_and_grad(
                lambda p, x: model.joint_loss(job, p, x, KEY),
                has_aux=True,
            )
        )
        made = quick(
            lambda p, users: model.sparse_joint(job, p, batches.SparseBatch(rows, users, jnp.float64), KEY)
        )
        for users in ([0, 1, 2, 3, 4, 5], [4, 2, 4, 1, 0, 2], [1, 1, 1, 1, 1, 1]):
            (all, masked), gradients = wanted(params, dense(users, np.float64))
            found, (loss, mask) = made(params, np.asarray(users))
            np.testing.assert_allclose(loss, all, rtol=1e-12)
            np.testing.assert_allclose(mask, masked, rtol=1e-12, atol=1e-300)
            for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12 * np.abs(two).max())


def trained(sparse):
    job = Small(CONFIG, ITEMS, widths=(7, 5, 6))
    feed = batches.make_feed(RATINGS, 6, CONFIG.seed, job.policy.compute, sparse=sparse)
    program = Program(model.update(job), feed, 5, seed_key(1))
    state, metrics = program(copy_state(model.init(job, KEY)), 0, 5)
    return jax.tree.map(np.asarray, (state["params"], dict(metrics)))


@pytest.mark.slow
def test_training_is_the_same_either_way():
    one, two = (trained(sparse) for sparse in (False, True))
    assert np.isfinite(one[1]["loss"]).all()
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "platform", "full", "sparse"),
    [
        ({}, "cpu", 0.002, True),
        ({}, "cpu", 0.02, False),
        ({}, "gpu", 0.002, False),
        ({"refeed": "none"}, "cpu", 0.002, False),
        ({"refeed": "alternate"}, "cpu", 0.002, False),
        ({"no_selu": True}, "cpu", 0.002, False),
        ({"precision": "16.32"}, "cpu", 0.002, False),
    ],
)
def test_where_ratings_stay_sparse(monkeypatch, options, platform, full, sparse):
    monkeypatch.setattr(model, "platform", lambda: platform)
    users, items = 100, 1000
    some = matrix([int(full * items)] * users, items)
    job = model.Job(replace(CONFIG, **options), items)
    assert model.takes_sparse(job, some) == sparse
