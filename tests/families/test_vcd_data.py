"""The family's images: zeros and ones, splits, the threshold for Fashion-MNIST, and the order of training."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.data import stand_ins
from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set
from hotloop.engine.feed import Resident
from hotloop.errors import DataError
from hotloop.families.vcd import images, train
from hotloop.families.vcd.config import VcdTrain
from listener import Listener

REAL = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()
QUICK = {"xla_backend_optimization_level": 0}
HERE = REAL.is_dir() and find_set(known_set("mnist"), REAL) is not None


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network, no data of the user, small stand-ins."""
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    monkeypatch.delenv("HOTLOOP_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stand_ins, "DIGIT_COUNTS", (120, 30))


def idx(array):
    return (0x0800 | array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(folder, train, test):
    folder.mkdir(parents=True)
    for part, grey in {"train": train, "t10k": test}.items():
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(grey))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(len(grey), dtype=np.uint8) % 10))
    return folder


def every_grey(count):
    """Images in which every grey occurs: pixel n of image i is n + i."""
    return (np.arange(784)[None] + np.arange(count)[:, None]).astype(np.uint8).reshape(count, 28, 28)


def load(name, hold_out=False):
    return images.load_images(str(name), Listener(), hold_out=hold_out)


def test_fashion_mnist_is_one_where_a_pixel_is_above_one_half(tmp_path, monkeypatch):
    """127 / 255 is below, 128 / 255 above; by name and by folder."""
    folder = write_idx(tmp_path / "fashion_mnist", every_grey(12), every_grey(5))
    given = load(folder)
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path))
    for loaded in (given, load("fashion_mnist")):
        grey = every_grey(12).reshape(12, 784)
        np.testing.assert_array_equal(loaded.train, (grey / 255 > 0.5).astype(np.uint8))
        assert loaded.train[0, 127] == 0 and loaded.train[0, 128] == 1
        assert (loaded.train.shape, loaded.test.shape) == ((12, 784), (5, 784))
        assert loaded.train.dtype == np.uint8


@pytest.mark.parametrize("name", ["digits", "binarised_mnist"])
def test_images_are_rows_of_zeros_and_ones_in_splits_that_share_none(name):
    loaded = load(name)
    assert [len(split) for split in (loaded.train, loaded.validation, loaded.test)] == [100, 20, 30]
    for split in (loaded.train, loaded.validation, loaded.test):
        assert split.shape[1:] == (784,) and split.dtype == np.uint8 and set(np.unique(split)) == {0, 1}
    assert bool(loaded.notice) == (name != "digits")


def test_holding_out_takes_the_last_training_images_and_leaves_the_rest_in_order():
    loaded = load("digits")
    held = load("digits", hold_out=True)
    np.testing.assert_array_equal(held.train, loaded.train[:80])
    np.testing.assert_array_equal(held.validation, loaded.train[80:])
    np.testing.assert_array_equal(held.test, loaded.test)


@pytest.mark.skipif(not HERE, reason=f"no mnist in {REAL}")
def test_of_the_real_set_ten_thousand_are_held_out_and_epochs_count_the_rest():
    loaded = load(REAL / "mnist")
    held = load(REAL / "mnist", hold_out=True)
    assert [len(split) for split in (loaded.train, loaded.validation, loaded.test)] == [
        50_000,
        10_000,
        10_000,
    ]
    assert (len(held.train), len(held.validation)) == (40_000, 10_000)
    np.testing.assert_array_equal(held.validation[-1], loaded.train[-1])
    options = VcdTrain()
    assert (train.make_plan(options, 50_000).total_updates, options.decay_period(50_000)) == (400_000, 15_000)
    assert (train.make_plan(options, 40_000).total_updates, options.decay_period(40_000)) == (320_000, 12_000)


class Stopped(Exception):
    pass


def test_every_epoch_visits_every_image_once_with_its_own_number(monkeypatch, tmp_path):
    """As `train` feeds them; 4 does not divide 10, so the third batch runs over into the next pass."""
    data = np.random.default_rng(0).integers(0, 2, (10, 784), dtype=np.uint8)
    feeds = []

    def stop(*_):
        raise Stopped

    monkeypatch.setattr(train, "Resident", lambda *where, **how: feeds.append(Resident(*where, **how)))
    monkeypatch.setattr(train, "Program", stop)

    def epochs(seed):
        options = VcdTrain(micro_batch_size=4, seed=seed, hidden=(4,), results_dir=tmp_path)
        with pytest.raises(Stopped):
            train.train_run(options, images.Images("", "", data, data, data), Listener(), "")
        feed = feeds.pop()
        take = jax.jit(jax.vmap(lambda step: feed.batch(feed.arguments(0, 1), step)), compiler_options=QUICK)
        batch = take(jnp.arange(10, dtype=jnp.uint32))
        np.testing.assert_array_equal(batch["image"], data[np.asarray(batch["index"])])
        return np.asarray(batch["index"]).reshape(4, 10)

    one = epochs(3)
    assert (np.sort(one, 1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in one.tolist()}) == 4
    np.testing.assert_array_equal(one, epochs(3))
    assert not np.array_equal(one, epochs(4))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "byte"),
        (lambda path: path.write_bytes(b"\0\0\x08\x01" + path.read_bytes()[4:]), "train-images"),
        (lambda path: path.unlink(), "train-images|not there"),
    ],
    ids=["short", "magic", "missing"],
)
def test_a_broken_file_in_the_folder_is_one_line_that_names_it(tmp_path, spoil, reason):
    folder = write_idx(tmp_path / "mnist", every_grey(12), every_grey(5))
    spoil(folder / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match=reason) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_what_is_neither_a_set_nor_a_folder_is_one_line(tmp_path):
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(b"")
    for name, reason in ((tmp_path / "nowhere", "neither a set"), (file, "must be the folder")):
        with pytest.raises(DataError, match=reason) as error:
            load(name)
        assert str(name) in str(error.value) and "\n" not in str(error.value)
