"""What a network sees of a training image: erased as numpy erases it, and the same for any split of the batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cnn_words import typed
from staged import FLOAT32, drawn, moved, relabelled, samples, staged, trained

from hotloop.engine.keys import sample_keys, seed_key, stream
from hotloop.families.cnn import augmentation, images, mixing, model
from hotloop.families.cnn.trivial_augment import change, draw_changes
from same_numbers import assert_same_but_for, assert_same_numbers

ALL = ("--mixup", "0.4", "--cutmix", "1", "--trivial-augment", "--random-erasing", "0.5", "--ema", "0.9")
# Norms of a sample by itself: those of a batch tell how it was split.
WORDS = (*FLOAT32, *ALL, "--norm-layer", "{name: group_norm, num_groups: 2}")
KEYS = sample_keys(seed_key(2), 0, 400)


def test_erased_are_the_parts_that_numpy_draws():
    seen = np.random.default_rng(0).normal(size=(len(KEYS), 10, 14, 2)).astype(np.float32)
    found = jax.jit(partial(augmentation.erase, probability=0.25))(seen, keys=KEYS)
    words = np.stack([jax.random.bits(stream(key, "erasing", 0), (4,), jnp.uint32) for key in KEYS]) >> 16
    sizes = []
    for area in (np.arange(64) + 0.5) / 64 * (1 / 3 - 0.02) + 0.02:
        for ratio in np.exp(np.linspace(np.log(0.3), -np.log(0.3), 129)[1::2]):
            height, width = round(np.sqrt(area * 140 * ratio)), round(np.sqrt(area * 140 / ratio))
            sizes += [(height, width)] if 0 < height < 10 and 0 < width < 14 else []
    wanted = seen.copy()
    for image, (chance, size, row, column) in zip(wanted, words.tolist(), strict=True):
        if chance < 0.25 * 65536:
            height, width = sizes[size * len(sizes) >> 16]
            top, left = row * (10 - height + 1) >> 16, column * (14 - width + 1) >> 16
            image[top : top + height, left : left + width] = 0
    np.testing.assert_array_equal(found, wanted)
    erased = (wanted != seen).any((1, 2, 3)).mean()
    assert abs(erased - 0.25) < 4 * np.sqrt(0.25 * 0.75 / len(KEYS))


def test_images_are_cropped_then_changed_then_normalised_then_erased_and_then_mixed():
    config = typed(*ALL).config
    own, other = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 8, 3)).astype(np.uint8)
    keys = KEYS[:8]

    def see(pixels, keys):
        pixels = images.crop_and_flip(pixels, images.draw_crops(keys))
        return augmentation.erase(images.standardise(change(pixels, draw_changes(keys))), 0.5, keys)

    def see_both(own, other, keys):
        both = see(own, keys), see(other, mixing.partner_keys(keys))
        return mixing.mix(mixing.draw_mixing(config, keys, 8, 8), *both)

    found = jax.jit(partial(augmentation.see_mixed, config))(own, other, keys)
    np.testing.assert_allclose(found, jax.jit(see_both)(own, other, keys), atol=1e-6)


def test_without_options_images_are_what_they_were():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3)).astype(np.uint8)
    for dataset in ("cifar10", "imagenet"):
        config = typed("--dataset", dataset).config
        found = augmentation.see(config, jnp.asarray(pixels), KEYS[:8])
        np.testing.assert_array_equal(found, images.augment(dataset, jnp.asarray(pixels), KEYS[:8]))


def test_photographs_that_come_as_floats_are_changed_as_bytes():
    config = typed("--dataset", "imagenet", "--trivial-augment").config
    pixels = np.random.default_rng(0).uniform(-3, 258, (8, 16, 16, 3)).astype(np.float32)
    rounded = np.clip(np.round(pixels), 0, 255).astype(np.uint8)
    see = jax.jit(partial(augmentation.see, config))
    found, wanted = (see(given, KEYS[:8]) for given in (pixels, rounded))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("split", "splits"),
    [((1, 4, 2), ()), ((2, 2, 2), ("a_out",))],
    ids=["four devices that accumulate", "two times two stages"],
)
def test_any_split_of_a_batch_has_the_same_images_labels_weights_and_averages(split, splits):
    whole = staged(*WORDS, split=(8, 1, 1))
    job = staged(*WORDS, split=split, splits=splits)
    start = drawn(whole)
    one, figures = trained(whole, 3, start)
    found = {
        way: trained(job, 3, **given)
        for way, given in {
            "same": {"state": start},
            "label": {"state": start, "batches": relabelled},
            "weight": {"state": moved(job, start)},
        }.items()
    }
    for name in ("params", "ema_params"):
        controls = {way: found[way][0][name] for way in ("label", "weight")}
        assert_same_but_for(found["same"][0][name], one[name], 1e-5, **controls)
    assert_same_numbers(found["same"][1], figures, 1e-5)


def test_the_loss_of_mixed_images_is_that_of_both_labels_in_their_shares():
    """With a network whose logits do not depend on the images: only labels, and their shares, are left."""
    job = staged(*WORDS, split=(8, 1, 1), rate=0.0)
    state, batch = drawn(job), samples(job)
    state["params"]["fc"]["kernel"] = 0 * state["params"]["fc"]["kernel"]
    _, figures = trained(job, 1, state)
    logits = np.asarray(state["params"]["fc"]["bias"], np.float64)
    surprise = np.log(np.exp(logits).sum()) - logits[batch["label"]]
    key = stream(jax.random.fold_in(seed_key(7), 0), "augment", 0)
    share = np.asarray(mixing.draw_mixing(job.config, sample_keys(key, 0, 8), 6, 6).share)
    wanted = share * surprise + (1 - share) * surprise[::-1]
    np.testing.assert_allclose(figures["loss"], wanted.mean(), rtol=1e-5)
    assert 0 < share.min() < share.max() < 1 or len(set(share)) > 2
    right = batch["label"] == logits.argmax()
    np.testing.assert_allclose(
        figures["training_accuracy"], (share * right + (1 - share) * right[::-1]).mean(), rtol=1e-5
    )


def decayed(decay, old, new):
    return decay * np.asarray(old, np.float64) + (1 - decay) * np.asarray(new, np.float64)


@pytest.mark.parametrize(("precision", "splits"), [("32.32", ()), ("16.16", ("a_out",))])
def test_averages_follow_weights_and_statistics_in_float32(precision, splits):
    job = staged("--precision", precision, "--ema", "0.3", split=(4, 1, 2), splits=splits)
    state = wanted = drawn(job)
    for number in range(4):
        state, _ = trained(job, 1, {**state, "update": np.int32(number)})
        mean = partial(decayed, min(0.3, (1 + number) / (10 + number)))
        new = {name: jax.tree.map(mean, wanted[name], state[of]) for name, of in model.AVERAGED.items()}
        wanted = {**wanted, **new}
    for name in model.AVERAGED:
        for found, value in zip(*map(jax.tree.leaves, (state[name], wanted[name])), strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
