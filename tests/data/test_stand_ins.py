"""Stand-ins: the same for the same seed, balanced, and neither impossible nor trivial to learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.data.dataset import binarise
from hotloop.data.stand_ins import SHAPES, TEXTURES, draw_digits, draw_objects, draw_taste_ratings

TRAIN, TEST = 3000, 500


@pytest.fixture(scope="module")
def drawn():
    return {"digits": draw_digits(TRAIN + TEST, seed=3), "objects": draw_objects(TRAIN + TEST, seed=3)}


def flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def nearest_neighbour_accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    known, asked = flat(images[:TRAIN]), flat(images[TRAIN:])
    distance = (known**2).sum(1) - 2 * asked @ known.T
    return float(np.mean(labels[:TRAIN][distance.argmin(1)] == labels[TRAIN:]))


def linear_accuracy(images: np.ndarray, labels: np.ndarray) -> float:
    """Ridge regression on one-hot labels."""
    pixels = np.c_[flat(images), np.ones(len(images), np.float32)]
    known, asked = pixels[:TRAIN], pixels[TRAIN:]
    gram = known.T @ known + 10 * np.eye(known.shape[1], dtype=np.float32)
    weights = np.linalg.solve(gram, known.T @ np.eye(10, dtype=np.float32)[labels[:TRAIN]])
    return float(np.mean((asked @ weights).argmax(1) == labels[TRAIN:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classifier", "low", "high"),
    [
        ("digits", nearest_neighbour_accuracy, 0.6, 0.95),
        ("digits", linear_accuracy, 0.5, 0.95),
        ("objects", nearest_neighbour_accuracy, 0.2, 0.6),
        ("objects", linear_accuracy, 0.2, 0.7),
    ],
)
def test_a_simple_classifier_is_better_than_chance_and_worse_than_perfect(drawn, name, classifier, low, high):
    images, labels = drawn[name][:2]
    assert low < classifier(images, labels) < high


def test_digits_are_grey_images_of_ten_balanced_classes(drawn):
    images, labels = drawn["digits"]
    assert (images.shape, images.dtype) == ((TRAIN + TEST, 28, 28, 1), np.uint8)
    assert (labels.shape, labels.dtype) == ((TRAIN + TEST,), np.int32)
    assert np.bincount(labels, minlength=10).min() > (TRAIN + TEST) / 10 * 0.8
    assert images[:, :2].mean() < images[:, 13:15].mean() / 5  # paper at the edge, ink in the middle
    assert images.reshape(len(images), -1).max(1).min() > 120  # ink in every image


def test_objects_are_colour_images_of_shapes_and_textures(drawn):
    images, shapes, textures = drawn["objects"]
    assert (images.shape, images.dtype) == ((TRAIN + TEST, 32, 32, 3), np.uint8)
    assert shapes.dtype == textures.dtype == np.int32
    for labels, names in ((shapes, SHAPES), (textures, TEXTURES)):
        assert len(names) == 10
        assert np.bincount(labels, minlength=10).min() > (TRAIN + TEST) / 10 * 0.8
    assert images.reshape(len(images), -1).std(1).min() > 5


@pytest.mark.parametrize("draw", [draw_digits, draw_objects])
def test_the_seed_decides_every_pixel(draw):
    first, again, other = draw(300, seed=1), draw(300, seed=1), draw(300, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("draw", [draw_digits, draw_objects])
def test_no_image_comes_twice(draw):
    images = draw(1000)[0]
    assert len({image.tobytes() for image in images}) == 1000


def test_ratings_have_the_size_scale_and_skew_of_movielens():
    ratings = draw_taste_ratings(seed=5)
    assert 80_000 < len(ratings) < 120_000
    assert set(np.unique(ratings.values)) == {1, 2, 3, 4, 5}
    assert 3 < ratings.values.mean() < 4
    assert ratings.users.min() == ratings.items.min() == 1
    assert ratings.users.max() == 943
    assert ratings.items.max() <= 1682
    pairs = ratings.users.astype(np.int64) * 10_000 + ratings.items
    assert len(np.unique(pairs)) == len(pairs)
    assert (np.diff(ratings.times) >= 0).all()
    by_item = np.sort(np.bincount(ratings.items))[::-1]
    assert by_item[:168].sum() > 0.3 * len(ratings)
    assert np.bincount(ratings.users)[1:].min() >= 20


def test_ratings_are_the_same_for_the_same_seed():
    first, again, other = (draw_taste_ratings(50, 60, 500, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.values, again.values)
    assert np.array_equal(first.items, again.items)
    assert not np.array_equal(first.items, other.items)


def test_ratings_hold_tastes_that_user_and_item_means_do_not_explain():
    ratings = draw_taste_ratings(200, 150, 12_000, seed=1)
    dense = np.full((200, 150), np.nan)
    dense[ratings.users - 1, ratings.items - 1] = ratings.values
    mean = np.nanmean(dense)
    dense -= mean
    dense -= np.nanmean(dense, axis=1, keepdims=True)
    dense -= np.nanmean(dense, axis=0, keepdims=True)
    known = ~np.isnan(dense)
    filled = np.where(known, dense, 0) / known.mean()
    strengths = np.linalg.svd(filled, compute_uv=False)
    shuffled = filled.copy()
    np.random.default_rng(0).shuffle(shuffled.reshape(-1))
    noise = np.linalg.svd(shuffled, compute_uv=False)
    assert (strengths[:4] > 1.15 * noise[0]).all()


def test_binarised_bits_follow_the_greyness():
    grey = np.repeat(np.arange(256, dtype=np.uint8), 40_000).reshape(256, 200, 200)
    share = binarise(grey, seed=7).mean(axis=(1, 2))
    expected = np.arange(256) / 255
    error = np.abs(share - expected)
    assert (error <= 4.5 * np.sqrt(expected * (1 - expected) / 40_000)).all()
    assert share[0] == 0
    assert share[255] == 1


@given(st.integers(0, 2**32), st.integers(1, 50))
def test_binarising_is_fixed_by_the_seed_and_a_prefix_stays_the_same(seed, count):
    grey = np.random.default_rng(0).integers(0, 256, (50, 3, 5), dtype=np.uint8)
    assert np.array_equal(binarise(grey, seed)[:count], binarise(grey[:count], seed))


def test_binarised_bits_never_change():
    grey = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    bits = "001100002001030946c217624922402b9a9fd26f173fbe7ffe77e77ffdfffbff"
    assert np.packbits(binarise(grey, seed=0).ravel()).tobytes().hex() == bits
