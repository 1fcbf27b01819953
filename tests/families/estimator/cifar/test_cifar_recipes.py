"""The example's recipes: their rules and rates in numbers, the smoothed loss, and the augmentation of images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine import optim
from hotloop.engine.keys import sample_keys
from hotloop.families.cnn.images import crop_and_flip, draw_crops
from hotloop.families.estimator.cifar import model
from hotloop.families.estimator.cifar.config import RECIPES
from hotloop.families.estimator.config import Mode

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (5, 32, 32, 3), np.uint8)
GRADIENTS = GENERATOR.normal(size=(4, 3)).astype(np.float32)


def steps(name, rate, updates=4):
    """What a recipe adds to three weights in a few updates."""
    recipe = RECIPES[name]
    rule = optim.at_rate(optim.make(*model.OPTIMIZERS[recipe.rule]), model.make_rate(recipe, rate, updates))
    state = rule.init(jnp.zeros(3))
    made = []
    for gradient in GRADIENTS:
        step, state = rule.update(jnp.asarray(gradient), state, jnp.zeros(3))
        made.append(np.asarray(step))
    return np.array(made)


def test_reference_is_plain_sgd():
    np.testing.assert_allclose(steps("reference", 0.01), -0.01 * GRADIENTS, rtol=1e-6)


def test_keras_is_rmsprop_with_epsilon_beside_the_root_and_a_rate_that_decays_by_update():
    average, wanted = np.zeros(3), []
    for update, gradient in enumerate(GRADIENTS.astype(np.float64)):
        average = 0.9 * average + 0.1 * gradient**2
        wanted.append(-1e-4 / (1 + 1e-6 * update) * gradient / (np.sqrt(average) + 1e-7))
    np.testing.assert_allclose(steps("keras", 1e-4), wanted, rtol=1e-6)
    rate = model.make_rate(RECIPES["keras"], 1e-4, 1)
    assert rate(1_000_000) == pytest.approx(0.5e-4)


def test_fast_rises_to_its_rate_and_ends_at_nothing():
    rate = model.make_rate(RECIPES["fast"], 2e-3, 100)
    rates = [float(rate(update)) for update in range(101)]
    assert max(rates) == rates[20] == pytest.approx(2e-3)
    assert rates[0] < 2e-4 and rates[100] == 0
    assert np.all(np.diff(rates[:21]) > 0) and np.all(np.diff(rates[20:]) < 0)


def test_a_short_run_of_fast_moves_the_weights():
    assert abs(steps("fast", 2e-3, updates=4)[0]).min() > 1e-4


def test_labels_are_smoothed_in_training_alone():
    params = {"recipe": "fast", "learning_rate": 1e-3, "updates": 10}
    logits, labels = GENERATOR.normal(size=(6, 10)), GENERATOR.integers(0, 10, 6)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    sharp = np.eye(10)[labels]
    for mode, wanted in ((Mode.TRAIN, 0.9 * sharp + 0.01), (Mode.EVALUATE, sharp)):
        found = model.model_fn(mode, params).loss(jnp.float32(logits), jnp.asarray(labels))
        np.testing.assert_allclose(found, -(wanted * log_p).sum(1), rtol=1e-5)


def moved(image, row, column, mirror, reach, fill):
    """One image's augmentation in numpy."""
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), fill)
    cut = padded[row : row + 32, column : column + 32]
    return cut[:, ::-1] if mirror else cut


@pytest.mark.parametrize("name", ["shift", "crop"])
def test_images_are_moved_and_mirrored_as_drawn(name):
    reach, fill = model.REACH[name]
    key = jax.random.key(3)
    drawn = [np.asarray(each) for each in draw_crops(sample_keys(key, 0, 5), reach)]
    batch = {"features": jnp.asarray(IMAGES), "labels": jnp.arange(5)}
    found = jax.jit(model.find_transform(name))(batch, key)
    assert found["features"].dtype == np.uint8
    np.testing.assert_array_equal(found["labels"], np.arange(5))
    wanted = [moved(image, *draw, reach, fill) for image, *draw in zip(IMAGES, *drawn, strict=True)]
    np.testing.assert_array_equal(found["features"], wanted)


def test_shifts_repeat_the_border_and_crops_are_black():
    bright = jnp.full((1, 32, 32, 3), 200, jnp.uint8)
    corner = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
    assert crop_and_flip(jnp.asarray(bright), corner, *model.REACH["shift"]).min() == 200
    black = np.asarray(crop_and_flip(jnp.asarray(bright), corner, *model.REACH["crop"]))
    assert black[0, :4].max() == black[0, :, :4].max() == 0 and black[0, 4:, 4:].min() == 200


def test_every_shift_is_as_likely_as_every_other_and_half_are_mirrored():
    count = 20_000
    row, column, mirrored = map(np.asarray, draw_crops(sample_keys(jax.random.key(4), 0, count), 3))
    pairs = np.bincount(7 * row + column, minlength=49)
    expected = count / 49
    assert ((pairs - expected) ** 2 / expected).sum() < 48 + 4 * (2 * 48) ** 0.5  # chi-square, 48 degrees
    assert mirrored.mean() == pytest.approx(0.5, abs=4 * (0.25 / count) ** 0.5)
    assert abs(np.corrcoef(mirrored, row)[0, 1]) < 4 / count**0.5


def test_no_augmentation_is_no_transform_and_the_same_one_is_the_same_function():
    assert model.find_transform("none") is None
    assert model.find_transform("crop") is model.find_transform("crop")
