"""The objective `ranking`: its likelihood, hidden inputs and random code against numpy in float64."""

import math
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recommender_runs as runs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from recommender_small import Small, float64, quick, with_params  # noqa: F401

from hotloop.engine.keys import sample_keys
from hotloop.families.recommender import model, ranking
from hotloop.families.recommender.config import TrainOptions

ITEMS = 9
OPTIONS = {"objective": "ranking", "size": 128, "batch_size": 4, "precision": "32.32"}


def make_job(**options):
    config = TrainOptions(**{**OPTIONS, **options}).resolve()
    return Small(config, ITEMS, widths=(5, 3), updates_per_epoch=Fraction(7, 2))


def draw_params(job, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: model.init(job, key), jax.random.key(0))["params"]
    return jax.tree.map(lambda leaf: 0.5 * rng.normal(size=leaf.shape), shapes)


def selu(h):
    return 1.0507009873554805 * np.where(h > 0, h, 1.6732632423543772 * np.expm1(np.minimum(h, 0)))


def naive_network(params, x, noise=None):
    """Logits and KL divergences of users, one layer at a time."""
    *first, last = params["encoder"]
    for layer in first:
        x = selu(x @ layer["w"] + layer["b"])
    code, divergence = x @ last["w"] + last["b"], np.zeros(len(x))
    if "spread" in params:
        log_variance = x @ params["spread"]["w"] + params["spread"]["b"]
        divergence = -0.5 * (1 + log_variance - code**2 - np.exp(log_variance)).sum(1)
        code = code if noise is None else code + noise * np.exp(0.5 * log_variance)
    else:
        code = selu(code)
    for place, (layer, mirrored) in enumerate(
        zip(params["decoder"], reversed(params["encoder"]), strict=True)
    ):
        code = code @ layer.get("w", mirrored["w"].T) + layer["b"]
        code = code if place == len(params["decoder"]) - 1 else selu(code)
    return code, divergence


def naive_loss(logits, liked):
    """Minus the log-probability of each item that a user likes, by the definition."""
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.array(
        [
            -sum(math.log(p) for p, one in zip(*row, strict=True) if one)
            for row in zip(probabilities, liked, strict=True)
        ]
    )


def liked_rows(seed=1, users=4):
    rows = (np.random.default_rng(seed).random((users, ITEMS)) < 0.4).astype(np.float64)
    rows[1] = 0  # a user who likes nothing
    return rows


@pytest.mark.parametrize("options", [{}, {"untied": True}, {"kl": 0.3, "kl_epochs": 2.0}])
def test_loss_and_gradient_are_those_of_the_definition(options, float64):  # noqa: F811
    """Nothing is hidden and nothing drawn but the noise of a random code, so that both sides see the same input."""
    job = make_job(**options, input_dropout=0.0)
    params, liked, key = draw_params(job), liked_rows(), jax.random.key(5)
    weight = jnp.float64(0.2)
    noise = None
    if job.net.kl:
        keys = sample_keys(model.stream(key, "code", 0), 0, len(liked))
        noise = np.asarray(jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys))
    loss = quick(lambda params: model.ranking_loss(job, params, jnp.asarray(liked), weight, key)[0])

    def by_hand(params):
        lengths = np.sqrt((liked**2).sum(1, keepdims=True))
        logits, divergence = naive_network(params, liked / np.maximum(lengths, 1), noise)
        return (naive_loss(logits, liked) + 0.2 * divergence).mean()

    assert float(loss(params)) == pytest.approx(by_hand(params), rel=1e-12)
    gradient = quick(
        jax.grad(lambda params: model.ranking_loss(job, params, jnp.asarray(liked), weight, key)[0])
    )(params)
    rng = np.random.default_rng(2)
    way = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params)
    ahead = by_hand(jax.tree.map(lambda p, w: p + 1e-5 * w, params, way))
    behind = by_hand(jax.tree.map(lambda p, w: p - 1e-5 * w, params, way))
    along = sum(float((g * w).sum()) for g, w in zip(*map(jax.tree.leaves, (gradient, way)), strict=True))
    assert along == pytest.approx((ahead - behind) / 2e-5, rel=1e-7)


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.float64, (3, 6), elements=st.floats(-30, 30)), arrays.arrays(bool, (3, 6)))
def test_likelihood_is_that_of_the_softmax(logits, liked):
    found = ranking.neg_log_likelihood(jnp.asarray(logits, jnp.float32), jnp.asarray(liked))
    np.testing.assert_allclose(found, naive_loss(np.float32(logits), liked), rtol=2e-5, atol=2e-5)


def test_inputs_have_length_one_and_a_user_who_likes_nothing_none():
    rows = ranking.normalise(jnp.asarray(liked_rows(), jnp.bfloat16))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 0, 1, 1], rtol=1e-6)
    assert rows.dtype == jnp.float32


def test_hidden_items_are_a_share_of_all_and_belong_to_the_place_in_the_batch():
    keys = sample_keys(jax.random.key(3), 0, 64)
    rows = jnp.ones((64, 1000))
    found = np.asarray(ranking.hide_items(rows, keys, 0.3))
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / np.float32(0.7))}
    hidden = (found == 0).mean()
    assert abs(hidden - 0.3) < 4 * math.sqrt(0.21 / found.size)
    # Rows and columns are hidden independently: a row's share and the same places of two rows scatter as coins do.
    assert np.std((found == 0).mean(1)) == pytest.approx(math.sqrt(0.21 / 1000), rel=0.35)
    both = ((found[:-1] == 0) & (found[1:] == 0)).mean()
    assert both == pytest.approx(0.09, abs=0.005)
    again = ranking.hide_items(rows[40:], sample_keys(jax.random.key(3), 40, 24), 0.3)
    np.testing.assert_array_equal(again, found[40:])
    other = np.asarray(ranking.hide_items(rows, sample_keys(jax.random.key(4), 0, 64), 0.3))
    assert ((other == 0) & (found == 0)).mean() == pytest.approx(0.09, abs=0.005)
    assert ranking.hide_items(rows, keys, 0.0) is rows


def test_the_weight_of_the_divergence_grows_over_its_epochs_and_stays():
    job = make_job(kl=0.4, kl_epochs=10.0)  # 35 updates
    found = [float(model.kl_weight(job, jnp.int32(update))) for update in (0, 7, 35, 1000)]
    assert found == pytest.approx([0, 0.4 * 7 / 35, 0.4, 0.4], rel=1e-6)


def test_an_update_learns_to_like_what_users_like():
    job = make_job(optimizer="Adam", base_learning_rate=-9.0, weight_decay=0.0)
    update, liked = quick(model.update(job)), np.float32(liked_rows())
    state = model.init(job, jax.random.key(0))
    losses = []
    for n in range(60):
        state, figures = update(state, {"ratings": jnp.asarray(liked)}, jax.random.key(n))
        losses.append(float(figures["loss"]))
    assert set(figures) == {"loss", "learning_rate", "gradient_norm"}
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    scores = np.asarray(model.predict(job, state, jnp.asarray(5 * liked)))
    np.testing.assert_allclose(np.exp(scores).sum(1), 1, rtol=1e-5)
    for row in (0, 2, 3):
        assert scores[row][liked[row] > 0].mean() > scores[row][liked[row] == 0].mean() + 0.5


def test_what_is_rated_low_is_not_liked_and_does_not_matter():
    job = make_job()
    params = jax.tree.map(jnp.float32, draw_params(job))
    ratings = 4 * np.float32(liked_rows())
    low = np.where(ratings == 0, np.float32(3.5), ratings)
    first, second = (
        np.asarray(model.predict(job, {"params": params}, jnp.asarray(each))) for each in (ratings, low)
    )
    np.testing.assert_array_equal(first, second)
    logits = naive_network(
        jax.tree.map(np.float64, params), np.asarray(ranking.normalise(jnp.asarray(liked_rows())))
    )[0]
    wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(first, wanted, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    arrays.arrays(np.float32, (5, 7), elements=st.sampled_from([0, 0, 1, 3.5, 4, 4.5])),
    st.sampled_from([1, 4, 4.5, 9]),
)
def test_what_is_kept_are_ones_at_ratings_that_are_high_enough(dense, least):
    kept = ranking.keep_relevant(runs.matrix(dense), least)
    found = np.zeros(dense.shape)
    for user in range(len(dense)):
        columns, values = kept.row(user)
        found[user, columns] = values
    np.testing.assert_array_equal(found, (dense >= least) & (dense > 0))


def test_ratings_of_many_values_are_kept_by_themselves():
    dense = np.float32(np.random.default_rng(0).uniform(1, 5, (20, 30)))
    matrix = replace(runs.matrix(dense), levels=None, codes=dense.reshape(-1))
    assert ranking.keep_relevant(matrix, 4.0).ratings == (dense >= 4).sum() > 0
