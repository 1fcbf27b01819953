"""A whole speedrun: its schedules, batches, augmentation and test, updates against PyTorch, and that it learns."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.keys import stream
from hotloop.families.cnn.images import draw_crops
from hotloop.families.cnn.speedrun import augmentation, network, program
from hotloop.families.cnn.speedrun.config import Recipe, rescaled_updates

SMALL = Recipe(
    batch_size=16,
    epochs=Fraction(2),
    widths=(8, 12, 12),
    whitening_images=20,
    whitening_epochs=Fraction("0.5"),
)
JOB = program.Job(SMALL, 50, jnp.dtype("float32"))


def pictures(count, seed):
    """Ten colours with noise on them, by class."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count).astype(np.int32)
    colours = np.random.default_rng(99).integers(30, 225, (10, 1, 1, 3))
    noise = generator.normal(0, 20, (count, 32, 32, 3))
    return {"image": np.clip(colours[labels] + noise, 0, 255).astype(np.uint8), "label": labels}


def test_the_whole_set_takes_256_updates_and_seven_with_the_bias():
    assert (Recipe().updates(50_000), Recipe().whitening_updates(50_000)) == (256, 7)
    assert Recipe().updates_per_epoch(50_000) == 32


@pytest.mark.parametrize("total", [1, 17, 256])
def test_kernels_are_rescaled_less_and_less_often(total):
    """As the public program counts: every 2 + int(15 done / total) updates."""
    last, expected = 0, []
    for step in range(1, total + 1):
        expected.append(step - last >= 2 + int(15 * (step / total)))
        last = step if expected[-1] else last
    assert list(rescaled_updates(total)) == expected
    if total == 256:
        places = np.flatnonzero(expected)
        assert list(places[:3]) == [1, 3, 5] and 14 <= np.diff(places)[-1] <= 17


def test_pixels_are_shifted_into_their_reflection_mirrored_and_recoloured():
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    mirrored, key = np.array([True, False, True, False, False]), jax.random.key(3)
    found = np.asarray(augmentation.augment(Recipe(), jnp.asarray(images), jnp.asarray(mirrored), key))
    for i, image in enumerate(images):
        crop_key = jax.random.fold_in(stream(key, "crop", 0), i)
        row, column, _ = (int(each[0]) for each in draw_crops(crop_key[None], 2))
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), "reflect").astype(np.float64)
        crop = padded[row : row + 32, column : column + 32]
        crop = crop[:, ::-1] if mirrored[i] else crop
        plain = (crop / 255 - augmentation.MEAN) / augmentation.DEVIATION
        colour_key = jax.random.fold_in(stream(key, "colour", 0), i)
        shift, factor = np.asarray(jax.random.uniform(colour_key, (2,), minval=-1, maxval=1), np.float64)
        assert 0 <= row <= 4 and 0 <= column <= 4
        expected = (plain + 0.1399 * shift) * (1 + 0.1308 * factor)
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=5e-6)


def test_what_a_sample_draws_depends_on_its_place_alone():
    images = jnp.asarray(np.random.default_rng(1).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8))
    mirrored, key = jnp.zeros(8, bool), jax.random.key(0)
    whole = augmentation.augment(Recipe(), images, mirrored, key)
    part = augmentation.augment(Recipe(), images[:3], mirrored[:3], key)
    np.testing.assert_array_equal(whole[:3], part)


def test_a_pass_has_no_image_twice_and_mirrors_each_in_every_second_one():
    count, recipe = 40, Recipe(batch_size=8, translation=0, brightness=0.0, contrast=0.0)
    # Each image knows its number by its left half, and which way round it is.
    images = np.zeros((count, 32, 32, 3), np.uint8)
    images[:, :, :16] = np.arange(1, count + 1)[:, None, None, None]
    train = {"image": jnp.asarray(images), "label": jnp.arange(count)}
    job, seed = program.Job(recipe, count, jnp.dtype("float32")), program.seed_arguments(5)
    first = jnp.asarray(np.random.default_rng(0).random(count) < 0.5)
    make = jax.jit(partial(program.make_batch, job, train, first, seed))
    orders = []
    for epoch in range(3):
        seen = []
        for number in range(5 * epoch, 5 * epoch + 5):
            batch = make(jnp.uint32(number))
            right = np.asarray(batch["image"])[:, 0, 31, 0]
            is_mirrored = right > np.asarray(augmentation.normalise(jnp.zeros((1, 3))))[0, 0] + 1e-4
            labels = np.asarray(batch["label"])
            np.testing.assert_array_equal(is_mirrored, np.asarray(first)[labels] ^ (epoch % 2 == 1))
            seen.extend(labels)
        assert sorted(seen) == list(range(count))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_uncertain_images_get_the_mean_of_six_views():
    images = np.random.default_rng(2).integers(0, 256, (13, 32, 32, 3), dtype=np.uint8)
    weight = np.random.default_rng(3).normal(size=(32 * 32 * 3, 10)) / 2000

    def logits(images):
        return jnp.matmul(images.reshape(len(images), -1).astype(jnp.float32), weight, precision="highest")

    plain, better = program.looks(Recipe(), logits, jnp.asarray(images))
    flat = images.reshape(13, -1).astype(np.float64) @ weight
    np.testing.assert_allclose(plain, flat, rtol=0, atol=1e-3)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    views = [images, padded[:, :32, :32], padded[:, 2:34, 2:34]]
    views += [view[:, :, ::-1] for view in views]
    mean = np.mean([view.reshape(13, -1).astype(np.float64) @ weight for view in views], 0)
    odds = np.exp(flat - flat.max(1, keepdims=True))
    unsure = np.argsort((odds / odds.sum(1, keepdims=True)).max(1))[:3]
    expected = flat.copy()
    expected[unsure] = mean[unsure]
    assert np.abs(mean - flat).max() > 0.01
    np.testing.assert_allclose(better, expected, rtol=0, atol=1e-3)


def test_batches_of_the_test_change_nothing(monkeypatch):
    state, images = (
        jax.jit(partial(program.init, JOB))(jax.random.key(0)),
        jnp.asarray(pictures(7, 0)["image"]),
    )
    filters = network.whitening_filters(augmentation.normalise(images), 5e-4)
    whole = jax.jit(partial(program.predict, JOB))(state, filters, images)
    monkeypatch.setattr(program, "TEST_BATCH", 3)
    parts = jax.jit(lambda *arrays: program.predict(JOB, *arrays))(state, filters, images)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_updates_are_those_of_pytorch_with_and_without_the_bias():
    pytest.importorskip("torch")
    from speedrun_in_torch import InTorch

    train = jax.tree.map(jnp.asarray, pictures(50, 1))
    seed = program.seed_arguments(2)
    filters = network.whitening_filters(augmentation.normalise(train["image"][:20]), 5e-4)
    state = jax.jit(partial(program.init, JOB))(seed["key"])
    other = InTorch(SMALL, 50, state["params"], state["statistics"], filters)
    make = jax.jit(partial(program.make_batch, JOB, train, jnp.zeros(50, bool), seed))
    steps = {bias: jax.jit(program.update(JOB, filters, trains_bias=bias)) for bias in (True, False)}
    assert (SMALL.updates(50), SMALL.whitening_updates(50)) == (6, 2)
    for number in range(4):
        batch = make(jnp.uint32(number))
        state, loss = steps[number < 2](state, batch)
        expected = other.step(batch["image"], np.asarray(batch["label"]))
        assert float(loss) == pytest.approx(expected, abs=1e-3)
    for (group, name), value in other.parameters().items():
        np.testing.assert_allclose(
            state["params"][group][name], value, rtol=0, atol=2e-3, err_msg=f"{group} {name}"
        )
    for name, (mean, variance) in other.running.items():
        np.testing.assert_allclose(state["statistics"][name]["mean"], mean, rtol=0, atol=1e-2)
        np.testing.assert_allclose(state["statistics"][name]["variance"], variance, rtol=0.02, atol=1e-2)


@pytest.mark.slow
def test_one_program_serves_all_seeds_and_learns():
    train, test = pictures(320, 3), pictures(100, 4)
    job = program.Job(
        Recipe(batch_size=32, epochs=Fraction(2), widths=(8, 12, 12)), 320, jnp.dtype("float32")
    )
    traced = []

    def run(*arrays):
        traced.append(1)
        return program.run(job, *arrays)

    call = jax.jit(run)
    first, again, other = (
        jax.device_get(call(train, test, program.seed_arguments(seed))) for seed in (0, 0, 1)
    )
    assert traced == [1]
    np.testing.assert_array_equal(first["loss"], again["loss"])
    assert first["accuracy"] == again["accuracy"]
    assert first["loss"].shape == (20,) and np.all(first["loss"] != other["loss"])
    assert min(first["accuracy"], other["accuracy"]) > 0.6  # guessing gives 0.1
    assert first["loss"][-1] < 0.7 * first["loss"][0]
