"""Preprocessing on host and device, the geometry of photographs, and the stream of them."""

import io
import platform
import shutil
from contextlib import contextmanager
from resource import RUSAGE_CHILDREN, getrusage

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.data.image_stores import EncodedImage, no_boxes
from hotloop.data.jpeg import ImageError
from hotloop.data.resample import SamplingGrid, resample
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.feed import Order
from hotloop.engine.keys import sample_keys
from hotloop.errors import DataError, OptionError
from hotloop.families.cnn import images
from hotloop.families.cnn.photographs import (
    PhotoReader,
    Rectangle,
    Workers,
    evaluation_image,
    grid_of_middle,
    random_crop,
    training_image,
)
from hotloop.families.cnn.sources import PhotoBatches, evaluation_batches, open_store
from pictures import DECODERS, encoded, image_folder, use_decoder


@pytest.fixture(scope="module")
def bytes_of():
    generator = np.random.default_rng(0)
    batch = generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    batch[0], batch[1], batch[2] = 7, 255, 0
    batch[2, 0, 0, 0] = 1
    batch[3] //= 64
    return batch


def float64_standardised(batch):
    wide = batch.astype(np.float64)
    mean, std = wide.mean((1, 2, 3), keepdims=True), wide.std((1, 2, 3), keepdims=True)
    return (wide - mean) / np.maximum(std, 1 / np.sqrt(wide[0].size))


def agree(found, wanted):
    """To the bit where host and device are one processor; a GPU's root and division round otherwise."""
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=3e-7, atol=3e-7)


def test_standardising_gives_the_same_bits_on_host_and_device_and_is_right(bytes_of):
    on_host, on_device = images.standardise(bytes_of), jax.jit(images.standardise)(bytes_of)
    agree(on_host, np.asarray(on_device))
    assert on_host.dtype == np.float32
    np.testing.assert_allclose(on_host, float64_standardised(bytes_of), rtol=3e-7, atol=3e-7)
    assert not on_host[0].any()  # one colour: no division by zero


def test_images_too_large_for_exact_sums_are_not_standardised():
    with pytest.raises(OptionError, match="49152 values cannot be standardised"):
        images.standardise(np.zeros((1, 128, 128, 3), np.uint8))


def test_augmenting_a_batch_gives_what_its_pieces_give_on_host_and_device(bytes_of):
    keys = sample_keys(jax.random.key(5), 0, len(bytes_of))
    drawn = images.draw_crops(keys)
    augment = jax.jit(images.augment, static_argnums=0)
    together = np.asarray(augment("cifar10", jnp.asarray(bytes_of), keys))
    halves = [
        augment("cifar10", jnp.asarray(bytes_of[at : at + 6]), sample_keys(jax.random.key(5), at, 6))
        for at in (0, 6)
    ]
    np.testing.assert_array_equal(together, np.concatenate(halves))
    on_host = images.standardise(images.crop_and_flip(bytes_of, tuple(map(np.asarray, drawn))))
    agree(together, on_host)


def test_a_crop_is_the_padded_image_from_the_drawn_place_on(bytes_of):
    drawn = (np.arange(12) % 9, np.arange(12)[::-1] % 9, np.arange(12) % 2 == 1)
    found = images.crop_and_flip(bytes_of, drawn)
    np.testing.assert_array_equal(found, np.asarray(images.crop_and_flip(jnp.asarray(bytes_of), drawn)))
    for sample, (row, column, mirrored) in enumerate(zip(*drawn, strict=True)):
        for y, x in ((0, 0), (31, 3), (17, 31)):
            source_y, source_x = y + row - 4, (31 - x if mirrored else x) + column - 4
            inside = 0 <= source_y < 32 and 0 <= source_x < 32
            wanted = bytes_of[sample, source_y, source_x] if inside else np.zeros(3)  # black outside
            np.testing.assert_array_equal(found[sample, y, x], wanted)


def test_crops_and_flips_are_drawn_evenly():
    row, column, mirrored = jax.jit(images.draw_crops)(sample_keys(jax.random.key(0), 0, 9000))
    for drawn in (row, column, images.draw_crops_on_host(np.random.default_rng(0), 9000)[0]):
        counts = np.bincount(drawn, minlength=9)
        assert len(counts) == 9
        assert np.sum((counts - 1000) ** 2 / 1000) < 26.1  # chi-square, 8 degrees of freedom, p = 0.001
    assert abs(np.mean(mirrored) - 0.5) < 0.018
    assert abs(np.corrcoef(row, column)[0, 1]) < 0.035


def test_each_set_is_prepared_as_it_should(bytes_of):
    np.testing.assert_allclose(
        images.preprocess("imagenet", bytes_of),
        (bytes_of / 255 - np.array(images.MEAN)) / np.array(images.STD),
        rtol=0,
        atol=5e-7,
    )
    np.testing.assert_array_equal(
        images.preprocess("mnist", bytes_of), bytes_of.astype(np.float32) * np.float32(1 / 255)
    )
    np.testing.assert_array_equal(images.preprocess("cifar100", bytes_of), images.standardise(bytes_of))
    for name in ("imagenet", "mnist"):
        on_device = jax.jit(images.preprocess, static_argnums=0)(name, bytes_of)
        np.testing.assert_allclose(on_device, images.preprocess(name, bytes_of), rtol=0, atol=3e-7)
    with pytest.raises(OptionError, match="--dataset netflix"):
        images.preprocess("netflix", bytes_of)


def test_evaluation_takes_the_middle_of_a_short_side_of_256():
    # 500 x 375 becomes 341 x 256 (341.33 truncated); the middle 224 begin at 58 and 16
    assert grid_of_middle(500, 375, 224) == SamplingGrid(58 * 500 / 341, 16 * 375 / 256, 500 / 341, 375 / 256)
    assert grid_of_middle(375, 500, 224) == SamplingGrid(16 * 375 / 256, 58 * 500 / 341, 375 / 256, 500 / 341)
    assert grid_of_middle(256, 257, 224) == SamplingGrid(16, 16, 1, 1)


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**32))
def test_a_random_crop_lies_inside_and_keeps_area_and_aspect(width, height, seed):
    crop = random_crop(np.random.default_rng(seed), width, height, no_boxes())
    assert crop.left >= 0 and crop.top >= 0
    assert crop.left + crop.width <= width and crop.top + crop.height <= height
    if (crop.width, crop.height) != (width, height):
        assert crop.width * crop.height >= 0.1 * width * height
        assert 0.75 * crop.height - 0.5 <= crop.width <= 1.33 * crop.height + 0.5


def test_random_crops_reach_all_areas_and_corners():
    generator = np.random.default_rng(0)
    crops = [random_crop(generator, 400, 300, no_boxes()) for _ in range(2000)]
    areas = np.array([crop.width * crop.height for crop in crops]) / 120_000
    assert areas.min() < 0.12 and areas.max() > 0.9
    assert min(crop.left for crop in crops) == 0 and min(crop.top for crop in crops) == 0
    assert max(crop.left + crop.width for crop in crops) == 400
    assert max(crop.top + crop.height for crop in crops) == 300


def test_random_crops_have_every_form_between_3_to_4_and_4_to_3():
    generator = np.random.default_rng(0)
    crops = [random_crop(generator, 2000, 2000, no_boxes()) for _ in range(2000)]
    forms = np.array([crop.width / crop.height for crop in crops])
    # Of 2,000 draws the outermost lie within a thousandth of the ends; a side of 450 pixels rounds by another.
    assert forms.min() == pytest.approx(0.75, abs=0.003) and forms.max() == pytest.approx(1.33, abs=0.003)


def test_a_random_crop_covers_a_tenth_of_a_box():
    generator, box = np.random.default_rng(0), np.array([[0.8, 0.0, 1.0, 0.3]], np.float32)
    for _ in range(300):
        crop = random_crop(generator, 400, 300, box)
        wide = min(400, crop.left + crop.width) - max(320, crop.left)
        tall = min(90, crop.top + crop.height) - max(0, crop.top)
        assert max(wide, 0) * max(tall, 0) >= 0.1 * 80 * 90 * 0.999


def test_a_box_that_no_crop_can_cover_gives_the_whole_image():
    outside = np.array([[2.0, 2.0, 3.0, 3.0]], np.float32)
    assert random_crop(np.random.default_rng(0), 40, 30, outside) == Rectangle(0, 0, 40, 30)


def test_resizing_reads_at_multiples_of_the_step_and_clamps_at_the_edge():
    ramp = np.repeat(np.array([[0, 10, 20, 40]], np.uint8)[..., None], 3, axis=2)
    across = resample(ramp, SamplingGrid(0, 0, 4 / 8, 1 / 8), 8)[0, :, 0]
    assert across.tolist() == [0, 5, 10, 15, 20, 30, 40, 40]  # no half pixels, no aligned corners


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 200),
    st.floats(-0.5, 3),
    st.floats(-0.5, 3),
    st.sampled_from([1 / 3, 0.7, 1, 1.9, 6.5]),
    st.booleans(),
)
def test_resampling_is_bilinear_in_float64(height, width, left, top, step, mirrored):
    """Few and many columns: of an image more than four times as wide as the result only those that are read count."""
    pixels = np.random.default_rng(height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    grid = SamplingGrid(left, top, step, step * 0.8)
    found = resample(pixels, grid, 16, mirrored)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, sampled(pixels, grid, 16, mirrored), rtol=0, atol=1e-4)


def sampled(pixels, grid, size, mirrored):
    """Plain loops: every output pixel from its four neighbours."""
    height, width = pixels.shape[:2]
    out = np.empty((size, size, 3))
    for y in range(size):
        for x in range(size):
            v, u = grid.top + y * grid.step_y, grid.left + x * grid.step_x
            i, j = int(np.floor(v)), int(np.floor(u))
            corner = [
                [
                    pixels[np.clip(k, 0, height - 1), np.clip(m, 0, width - 1)].astype(float)
                    for m in (j, j + 1)
                ]
                for k in (i, i + 1)
            ]
            upper, lower = (a + (b - a) * (u - j) for a, b in corner)
            out[y, x] = upper + (lower - upper) * (v - i)
    return out[:, ::-1] if mirrored else out


def test_a_mirrored_photograph_is_the_mirrored_photograph():
    photo = EncodedImage(encoded(90, 70, 1), 0, "here")
    plain, mirrored = (training_image(photo, Fixed(flip), 24, reduced=False) for flip in (False, True))
    np.testing.assert_array_equal(plain[:, ::-1], mirrored)
    assert np.abs(plain - mirrored).max() > 5


class Fixed:
    """Random numbers that always choose the same crop, and the flip that is asked for."""

    def __init__(self, flip):
        self._generator, self._flip = np.random.default_rng(1), flip

    def uniform(self, *bounds):
        return self._generator.uniform(*bounds)

    def integers(self, low, high=None):
        return self._flip if high is None else self._generator.integers(low, high)


def test_reduced_decoding_reads_the_same_places():
    photo = EncodedImage(encoded(400, 320, 3), 0, "here")
    for number in range(6):
        plain, reduced = (
            training_image(photo, np.random.default_rng((0, 0, number)), 32, reduced=reduced)
            for reduced in (False, True)
        )
        # The grain is averaged away, the picture stays where it is: a shift by one pixel would cost about 1.
        assert np.abs(plain - reduced).mean() < 6
        assert abs(np.mean(plain - reduced)) < 0.5
        shifted = np.abs(plain[:, 1:] - reduced[:, :-1]).mean()
        assert np.abs(plain[:, 1:] - reduced[:, 1:]).mean() < shifted


def whole_image(encoded_image):
    """[height, width, 3] by pillow, from the first to the last row."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded_image)).convert("RGB"))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_training_image_is_cut_exactly_where_the_crop_is_drawn(monkeypatch, decoder, subsampling):
    """Against the full decoding: the place to the pixel, the values but for float32's rounding."""
    use_decoder(monkeypatch, decoder)
    photo = EncodedImage(encoded(150, 117, 2, quality=95, subsampling=subsampling), 0, "here")
    pixels, parts = whole_image(photo.encoded), set()
    for number in range(12):
        generator = np.random.default_rng((3, 1, number))
        crop = random_crop(generator, 150, 117, no_boxes())
        mirrored = bool(generator.integers(2))
        cut = pixels[crop.top :, crop.left :][: crop.height, : crop.width]
        wanted = sampled(cut, SamplingGrid(0, 0, crop.width / 24, crop.height / 24), 24, mirrored)
        found = training_image(photo, np.random.default_rng((3, 1, number)), 24, reduced=False)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
        parts.add(crop)
    assert len(parts) == 12 and min(crop.top + crop.height for crop in parts) < 90  # some leave rows out


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(150, 117), (90, 300), (301, 64)])
def test_an_evaluation_image_is_that_of_the_full_decoding(monkeypatch, decoder, size):
    use_decoder(monkeypatch, decoder)
    photo = EncodedImage(encoded(*size, 2, quality=95), 0, "here")
    wanted = sampled(whole_image(photo.encoded), grid_of_middle(*size, 24), 24, False)
    np.testing.assert_allclose(evaluation_image(photo, 24), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("missing", [2, 40, 400])
def test_a_photograph_without_its_end_is_refused_though_the_rows_that_are_cut_out_are_there(missing):
    whole = encoded(150, 117, 2, quality=95)
    image = EncodedImage(whole[:-missing], 0, "here")
    for number in range(6):
        with pytest.raises(ImageError, match="truncated"):
            training_image(image, np.random.default_rng(number), 24)
    with pytest.raises(ImageError, match="truncated"):
        evaluation_image(image, 24)


def test_evaluation_is_the_resized_middle():
    photo = EncodedImage(encoded(100, 60, 4), 0, "here")
    found = evaluation_image(photo, 28)  # a short side of 32: 53 x 32, from (12, 2) on
    from hotloop.data.jpeg import decode

    resized = bilinear_all(decode(photo.encoded), 53, 32)
    np.testing.assert_allclose(found, resized[2:30, 12:40], rtol=0, atol=2e-3)


def bilinear_all(pixels, width, height):
    """Plain loops: the whole image resized."""
    out = np.empty((height, width, 3))
    for y in range(height):
        for x in range(width):
            v, u = y * pixels.shape[0] / height, x * pixels.shape[1] / width
            top, left = int(v), int(u)
            low, right = min(top + 1, pixels.shape[0] - 1), min(left + 1, pixels.shape[1] - 1)
            a, b, c, d = (
                pixels[i, j].astype(float) for i, j in ((top, left), (top, right), (low, left), (low, right))
            )
            out[y, x] = (a + (b - a) * (u - left)) * (1 - v + top) + (c + (d - c) * (u - left)) * (v - top)
    return out


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    parts = {"train": {"a": 11, "b": 12}, "val": {"a": 5, "b": 6}}
    return image_folder(tmp_path_factory.mktemp("photos"), parts)


def reading(folder, part="train", **options):
    return PhotoReader(open_store(folder, part), part == "train", seed=3, size=16, **options)


@contextmanager
def photo_feed(workers, size, seed=0, remainder="carry", shuffled=True):
    order = Order(len(workers.reader.store), size, seed, remainder, shuffled)
    with workers, Streamed(PhotoBatches(workers, order), size, seed=seed) as feed:
        yield feed


def fetched(folder, calls, **options):
    """The images and labels that a feed gives in calls of so many updates."""
    first, parts = 0, []
    with photo_feed(Workers(reading(folder), **options), 5, seed=3) as feed:
        for count in calls:
            parts.append(jax.tree.map(np.asarray, feed.arguments(first, count)["batches"]))
            first += count
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


def test_a_feed_gives_the_same_pixels_for_any_calls_and_any_number_of_workers(photos):
    wanted = fetched(photos, [10], workers=1, kind="threads")
    assert wanted["image"].shape == (10, 5, 16, 16, 3)
    for calls, workers in (([10], 3), ([3, 1, 6], 2)):
        found = fetched(photos, calls, workers=workers, kind="threads")
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_processes_decode_the_same_pixels(photos):
    wanted = fetched(photos, [6], workers=1, kind="threads")
    jax.tree.map(np.testing.assert_array_equal, fetched(photos, [6], workers=2, kind="processes"), wanted)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other library can be told to keep memory")
def test_a_worker_process_keeps_the_memory_of_images_that_are_gone(tmp_path):
    """It costs some 700 page faults an image where it does not; starting costs some 15,000."""
    folder = image_folder(tmp_path, {"train": {"a": 8}}, size=(500, 375))
    before, numbers = getrusage(RUSAGE_CHILDREN).ru_minflt, np.tile(np.arange(8), 25)
    with Workers(PhotoReader(open_store(folder, "train"), True), 1, "processes") as workers:
        (batch,) = workers.batches([(numbers, numbers)])
    assert batch["image"].shape == (200, 224, 224, 3)
    assert getrusage(RUSAGE_CHILDREN).ru_minflt - before < 200 * 300


def test_a_feed_follows_the_engines_order_and_draws_anew_each_epoch(photos):
    found = fetched(photos, [10], workers=1)
    order, source = Order(23, 5, 3), reading(photos)
    numbers = order.indices(order.start(0), np.arange(10, dtype=np.uint32)).reshape(-1)
    for place, number in enumerate(numbers.tolist()):
        pixels, label = source.image(number, epoch=place // 23)
        np.testing.assert_array_equal(found["image"].reshape(50, 16, 16, 3)[place], pixels)
        assert found["label"].reshape(50)[place] == label
    assert sorted(numbers[:23].tolist()) == list(range(23))
    assert (source.image(0, epoch=0)[0] != source.image(0, epoch=1)[0]).any()


def test_a_feed_without_shuffling_goes_in_turn(photos):
    with photo_feed(Workers(reading(photos), 1), 10, remainder="drop", shuffled=False) as feed:
        labels = np.asarray(feed.arguments(0, 3)["batches"]["label"])
    assert labels.tolist() == [[0] * 10, [0] + [1] * 9, [0] * 10]


def test_evaluation_sees_every_image_once(photos):
    with Workers(reading(photos, "validation"), 2) as workers:
        batches = list(evaluation_batches(workers, 4))
    assert [len(batch["label"]) for batch in batches] == [4, 4, 3]
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == [0] * 5 + [1] * 6


def test_floats_are_what_the_bytes_were_truncated_from(photos):
    exact, _ = reading(photos, eight_bit=False).image(2)
    cut, _ = reading(photos).image(2)
    assert exact.dtype == np.float32
    error = exact - cut
    assert error.min() > -1e-4 and error.max() < 1 + 1e-4


@pytest.fixture
def damaged(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    bad = folder / "train/a/a_4.JPEG"
    bad.write_bytes(bad.read_bytes()[:-150])
    return folder


def test_a_corrupt_image_stops_the_feed_by_name(damaged):
    with photo_feed(Workers(reading(damaged), 2), 5) as feed, pytest.raises(DataError) as caught:
        feed.arguments(0, 5)
    assert "train/a/a_4.JPEG: corrupt image (" in str(caught.value)


def test_a_corrupt_image_can_be_replaced_and_is_counted_and_named_once(damaged):
    said = []
    source = reading(damaged, skip_corrupt=True)
    with Workers(source, 2, on_skip=said.append) as workers:
        for _ in range(2):
            (batch,) = workers.batches([(np.arange(23), np.zeros(23, int))])
    assert workers.skipped == len(said) == 1
    assert "train/a/a_4.JPEG" in said[0]
    bad = [open_store(damaged, "train").read(k).where for k in range(23)].index(
        str(damaged / "train/a/a_4.JPEG")
    )
    np.testing.assert_array_equal(batch["image"][bad], source.image(bad + 1)[0])


def test_validation_leaves_a_corrupt_image_out_and_counts_every_other_once(damaged):
    source = PhotoReader(open_store(damaged, "train"), training=False, size=16, skip_corrupt=True)
    labels = [source.store.read(k).label for k in range(23)]
    bad = next(k for k in range(23) if source.store.read(k).where.endswith("a_4.JPEG"))
    with Workers(source, 2) as workers:
        batches = list(evaluation_batches(workers, 5))
        assert list(evaluation_batches(workers, 1))[bad]["label"].tolist() == [labels[bad + 1]]
    assert workers.skipped == 1
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == labels[:bad] + labels[bad + 1 :]
    assert sum(len(batch["image"]) for batch in batches) == 22


def test_workers_go_on_after_a_batch_that_failed(damaged):
    with Workers(reading(damaged), 1) as workers:
        for _ in range(3):
            with pytest.raises(DataError):
                list(workers.batches([(np.arange(23), np.zeros(23, int))] * 3))
        (batch,) = workers.batches([(np.arange(11, 23), np.zeros(12, int))])
    assert batch["label"].tolist() == [1] * 12


def test_a_set_of_nothing_but_broken_images_ends(tmp_path):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    (folder / "x.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match="100 broken images in a row"):
        reading(tmp_path, skip_corrupt=True).fill(np.empty((1, 16, 16, 3), np.uint8), [0], [0])


def test_a_folder_without_images_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match=r"neither TFRecord shards .* nor image folders"):
        open_store(tmp_path, "train")
    with pytest.raises(DataError, match="nowhere: no such folder"):
        open_store(tmp_path / "nowhere", "train")
