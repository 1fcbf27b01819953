"""TrivialAugment against plain numpy, change by change, and against pillow, whose arithmetic it takes over."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.keys import sample_keys, seed_key
from hotloop.families.cnn import trivial_augment
from hotloop.families.cnn.trivial_augment import CHANGES, Changes

SIZE = 16
STRENGTHS = (0, 1, 7, 13, 20, 30)  # 20 is a turn by a right angle
ROUNDED = ("brightness", "color", "contrast", "sharpness", "auto_contrast")  # pillow computes these in floats


@pytest.fixture(scope="module")
def pictures():
    """Smooth in part, with channels of few values, and one that is of one colour."""
    draws = np.random.default_rng(0)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    waves = [127 + 120 * np.sin(rows / a + columns / b + c) for a, b, c in draws.uniform(1, 4, (9, 3))]
    noise = draws.integers(40, 200, (2, SIZE, SIZE, 3))
    flat = np.full((1, SIZE, SIZE, 3), 90)
    return np.concatenate(
        [np.stack(waves, -1).reshape(SIZE, SIZE, 3, 3).transpose(2, 0, 1, 3), noise, flat]
    ).astype(np.uint8)


compiled = jax.jit(trivial_augment.change)


def changed(pictures, name, strength, negative):
    """All pictures changed alike."""
    given = (jnp.full(len(pictures), value) for value in (CHANGES.index(name), strength, int(negative)))
    return np.asarray(compiled(pictures, Changes(*given)))


def blended(without, full, factor):
    fixed = math.floor(factor * 65536 + 0.5)
    return np.clip((without * 65536 + fixed * (full - without)) >> 16, 0, 255)


def moved(image, source):
    """Each pixel from where the linear `source(x, y)` says, of middles of pixels; black where that is outside."""
    out = np.zeros_like(image)
    # In 65,536ths from the first pixel on: a turn by half a right angle has pixels from right between two.
    first, right, below = (np.array(source(x, y)) for x, y in ((0.5, 0.5), (1.5, 0.5), (0.5, 1.5)))
    start, across, down = (np.floor(step * 65536 + 0.5) for step in (first, right - first, below - first))
    for y in range(SIZE):
        for x in range(SIZE):
            column, row = ((start + x * across + y * down) // 65536).astype(int)
            if 0 <= row < SIZE and 0 <= column < SIZE:
                out[y, x] = image[row, column]
    return out


def by_numpy(image, name, strength, negative):
    """One picture, by loops and formulas."""
    level = strength / 30 * (-1 if negative else 1)
    x, factor = image.astype(np.int64), 1 + 0.99 * level
    grey = (x @ np.array([19595, 38470, 7471]) + 32768 >> 16)[..., None]
    if name == "shear_x":
        return moved(image, lambda x, y: (x + 0.99 * level * y, y))
    if name == "shear_y":
        return moved(image, lambda x, y: (x, y + 0.99 * level * x))
    if name == "translate_x":
        return moved(image, lambda x, y: (x - int(32 * level), y))
    if name == "translate_y":
        return moved(image, lambda x, y: (x, y - int(32 * level)))
    if name == "rotate":
        angle, half = math.radians(135 * level), SIZE / 2
        cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)

        def turn(x, y):
            x, y = x - half, y - half
            return half + cosine * x - sine * y, half + sine * x + cosine * y

        return moved(image, turn)
    if name == "brightness":
        return blended(0, x, factor)
    if name == "color":
        return blended(grey, x, factor)
    if name == "contrast":
        return blended(math.floor(grey.mean() + 0.5), x, factor)
    if name == "sharpness":
        smooth = x.copy()
        for row in range(1, SIZE - 1):
            for column in range(1, SIZE - 1):
                window = x[row - 1 : row + 2, column - 1 : column + 2].sum((0, 1)) + 4 * x[row, column]
                smooth[row, column] = np.floor(window / 13 + 0.5)
        return blended(smooth, x, factor)
    if name == "posterize":
        kept = 8 - round(strength / 5)
        return x // 2 ** (8 - kept) * 2 ** (8 - kept)
    if name == "solarize":
        return np.where(x < 255 - 8.5 * strength, x, 255 - x)
    out = x.copy()
    for channel in range(3):
        values = x[..., channel]
        low, high = values.min(), values.max()
        if name == "auto_contrast" and high > low:
            out[..., channel] = (values - low) * 255 // (high - low)
        if name == "equalize":
            step = int((values < high).sum()) // 255
            if step:
                below = (values.ravel()[None] < values.ravel()[:, None]).sum(1).reshape(values.shape)
                out[..., channel] = np.minimum((step // 2 + below) // step, 255)
    return out


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_numpys(name, pictures):
    for strength in STRENGTHS:
        for negative in (False, True):
            found = changed(pictures, name, strength, negative)
            wanted = [by_numpy(picture, name, strength, negative) for picture in pictures]
            np.testing.assert_array_equal(found, wanted, f"{name} {strength} {negative}")


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_pillows(name, pictures):
    pytest.importorskip("PIL")
    from PIL import Image, ImageEnhance, ImageOps

    for strength in STRENGTHS:
        for sign in (1, -1):
            level = sign * strength / 30
            maps = {
                "shear_x": (1, 0.99 * level, 0, 0, 1, 0),
                "shear_y": (1, 0, 0, 0.99 * level, 1, 0),
                "translate_x": (1, 0, -int(32 * level), 0, 1, 0),
                "translate_y": (1, 0, 0, 0, 1, -int(32 * level)),
            }
            makes = {
                "identity": lambda image: image,
                "rotate": lambda image, level=level: image.rotate(135 * level),
                "posterize": lambda image, strength=strength: ImageOps.posterize(
                    image, 8 - round(strength / 5)
                ),
                "solarize": lambda image, strength=strength: ImageOps.solarize(image, 255 - 8.5 * strength),
                "auto_contrast": ImageOps.autocontrast,
                "equalize": ImageOps.equalize,
            }
            found = changed(pictures, name, strength, sign < 0)
            for picture, values in zip(pictures, found, strict=True):
                image = Image.fromarray(picture)
                if name in maps:
                    wanted = image.transform(image.size, Image.Transform.AFFINE, maps[name])
                elif name in makes:
                    wanted = makes[name](image)
                else:
                    wanted = getattr(ImageEnhance, name.capitalize())(image).enhance(1 + 0.99 * level)
                apart = np.abs(values.astype(int) - np.asarray(wanted)).max()
                assert apart <= (name in ROUNDED), (name, strength, sign)


def test_grey_images_have_no_colour_to_lose(pictures):
    grey = pictures[..., :1]
    np.testing.assert_array_equal(changed(grey, "color", 30, True), grey)
    assert changed(grey, "contrast", 30, True).shape == grey.shape


def test_every_change_strength_and_side_is_drawn_as_often():
    found = jax.tree.map(
        np.asarray, jax.jit(trivial_augment.draw_changes)(sample_keys(seed_key(1), 0, 20_000))
    )
    for values, kinds in ((found.number, 14), (found.strength, 31), (found.negative, 2)):
        counts = np.bincount(values, minlength=kinds)
        expected = len(values) / kinds
        assert len(counts) == kinds and np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert abs(np.corrcoef(found.number, found.strength)[0, 1]) < 0.03
