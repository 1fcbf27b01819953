"""Loading by name: files first, then the network, then a stand-in that says so; never one for a given folder."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from hotloop import data
from hotloop.data import catalogue, stand_ins
from hotloop.data.catalogue import Download, KnownFile, KnownSet
from hotloop.errors import DataError

RNG = np.random.default_rng(0)
GREY = {
    "train": RNG.integers(0, 256, (12, 28, 28), dtype=np.uint8),
    "t10k": RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8),
}
DIGIT_LABELS = {"train": np.arange(12, dtype=np.uint8) % 10, "t10k": np.arange(5, dtype=np.uint8)}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network, no data of the user, small stand-ins."""
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    monkeypatch.delenv("HOTLOOP_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stand_ins, "DIGIT_COUNTS", (120, 30))
    monkeypatch.setattr(stand_ins, "OBJECT_COUNTS", (110, 20))


def idx(array: np.ndarray) -> bytes:
    return (0x0800 | array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(folder: Path, labels=DIGIT_LABELS, images=GREY) -> Path:
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[part]), 1))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels[part]))
    return folder


def write_cifar(path: Path, labels, images, coarse=()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [*coarse, labels]
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    path.write_bytes(np.concatenate([np.stack(columns, 1), planes], axis=1).astype(np.uint8).tobytes())


PHOTOS = RNG.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)


def heard(loader, *arguments, **keywords):
    lines = []
    return loader(*arguments, say=lines.append, **keywords), lines


def test_idx_files_become_splits_and_say_where_they_are(tmp_path):
    folder = write_idx(tmp_path / "mnist")
    dataset, lines = heard(data.load, "mnist", tmp_path)
    for split, part in ((dataset.train, "train"), (dataset.test, "t10k")):
        assert (split.images.shape[1:], split.images.dtype) == ((28, 28, 1), np.uint8)
        assert np.array_equal(split.images[..., 0], GREY[part])
        assert split.labels.dtype == np.int32
        assert split.labels.tolist() == DIGIT_LABELS[part].tolist()
    assert (dataset.name, dataset.classes, dataset.source) == ("mnist", 10, f"files at {folder}")
    assert (dataset.stand_in, dataset.notice) == (False, "")
    assert lines == [f"data: mnist, 12 + 5 images (a part of the 60,000 + 10,000), files at {folder}"]


def test_data_is_found_through_the_environment_and_in_the_users_folder(tmp_path, monkeypatch):
    users = write_idx(tmp_path / "home/hotloop/fashion_mnist")
    assert data.load("fashion-mnist", say=print).source == f"files at {users}"
    shared = write_idx(tmp_path / "shared/fashion-mnist")
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "shared"))
    assert data.load("fashion-mnist", say=print).source == f"files at {shared}"


def test_a_subset_of_cifar10_loads_and_says_how_many_images_it_is(tmp_path):
    folder = tmp_path / "cifar10-subset"
    write_cifar(folder / "data_batch_1.bin", np.arange(6), PHOTOS[:6])
    write_cifar(folder / "test_batch.bin", np.arange(2), PHOTOS[6:])
    dataset, lines = heard(data.load, "cifar10", tmp_path)
    assert np.array_equal(dataset.train.images, PHOTOS[:6])
    assert np.array_equal(dataset.test.images, PHOTOS[6:])
    assert dataset.test.labels.tolist() == [0, 1]
    assert lines == [f"data: cifar10, 6 + 2 images (a part of the 50,000 + 10,000), files at {folder}"]


def test_cifar10_batches_come_in_the_order_of_their_numbers(tmp_path):
    for number in (2, 1, 5):
        write_cifar(tmp_path / f"data_batch_{number}.bin", np.full(2, number), PHOTOS[:2])
    write_cifar(tmp_path / "test_batch.bin", np.arange(2), PHOTOS[6:])
    assert data.load("cifar10", tmp_path, say=print).train.labels.tolist() == [1, 1, 2, 2, 5, 5]


def test_cifar100_has_a_hundred_fine_classes(tmp_path):
    write_cifar(tmp_path / "train.bin", np.arange(93, 99), PHOTOS[:6], [np.arange(6)])
    write_cifar(tmp_path / "test.bin", np.arange(2), PHOTOS[6:], [np.arange(2)])
    dataset = data.load("cifar100", tmp_path, say=print)
    assert dataset.classes == 100
    assert dataset.train.labels.tolist() == [93, 94, 95, 96, 97, 98]


@pytest.mark.parametrize(
    ("name", "what", "shape", "classes"),
    [
        ("mnist", "120 + 30 procedural digits", (28, 28, 1), 10),
        ("fashion_mnist", "120 + 30 procedural digits", (28, 28, 1), 10),
        ("cifar10", "110 + 20 procedural objects", (32, 32, 3), 10),
        ("cifar100", "110 + 20 procedural objects", (32, 32, 3), 100),
    ],
)
def test_without_files_and_network_a_stand_in_runs_and_says_so(tmp_path, name, what, shape, classes):
    dataset, lines = heard(data.load, name)
    assert dataset.stand_in
    assert dataset.source == "procedural stand-in"
    assert lines == [dataset.notice]
    assert dataset.notice.startswith(f"STAND-IN DATA: {what}, not {name}, ")
    assert "HOTLOOP_OFFLINE is set" in dataset.notice
    assert f"{len(dataset.train)} + {len(dataset.test)} " in dataset.notice
    assert dataset.train.images.shape[1:] == dataset.test.images.shape[1:] == shape
    assert dataset.classes == classes
    assert max(dataset.train.labels) < classes
    assert max(dataset.train.labels) >= classes * 0.9
    assert not (tmp_path / "home").exists()


def test_the_default_voice_is_heard(capsys):
    assert data.load("mnist").notice in capsys.readouterr().err


def test_a_given_folder_without_the_set_is_an_error_and_never_a_stand_in(tmp_path):
    with pytest.raises(
        DataError, match=r"data_dir=.*: mnist is not there; HOTLOOP_OFFLINE is set.*by hand"
    ) as caught:
        data.load("mnist", tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="movielens-100k is not there"):
        data.load_ratings(data_dir=tmp_path)
    with pytest.raises(DataError, match="binarised_mnist is not there"):
        data.load_binarised(tmp_path)


def test_a_given_folder_that_is_missing_is_an_error_and_never_a_stand_in(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"data_dir=.*none: no such folder"):
        data.load("mnist", tmp_path / "none")
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "gone"))
    for loader in (lambda: data.load("mnist"), data.load_ratings, data.load_binarised):
        with pytest.raises(DataError, match=r"HOTLOOP_DATA=.*gone: no such folder"):
            loader()


def test_broken_files_are_an_error_and_never_a_stand_in(tmp_path):
    folder = write_idx(tmp_path / "home/hotloop/mnist")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: byte 7: "):
        data.load("mnist")


def test_images_and_labels_must_fit_together(tmp_path):
    folder = write_idx(tmp_path / "a", labels={**DIGIT_LABELS, "t10k": np.arange(4, dtype=np.uint8)})
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: byte 4: 4 labels for 5 images"):
        data.load("mnist", folder)
    folder = write_idx(tmp_path / "b", labels={**DIGIT_LABELS, "train": np.arange(12, dtype=np.uint8)})
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: byte 18: label 10, expected 0 to 9"):
        data.load("mnist", folder)
    folder = write_idx(tmp_path / "c", images={**GREY, "train": GREY["train"][:, 1:]})
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: byte 8: images of 27 x 28"):
        data.load("mnist", folder)


def test_files_of_another_set_with_the_same_names_are_refused(tmp_path, monkeypatch):
    folder = write_idx(tmp_path / "x")
    small = idx(DIGIT_LABELS["t10k"])
    mnist = catalogue.SETS["mnist"]
    mine = KnownFile(
        "t10k-labels-idx1-ubyte",
        len(small),
        f"sha256:{hashlib.sha256(small).hexdigest()}",
        mnist.files[3].download,
    )
    other = KnownSet("other", "", "", ("other",), (mine,))
    monkeypatch.setattr("hotloop.data.dataset.SETS", {"mnist": mnist, "other": other})
    with pytest.raises(DataError, match="belongs to other, not to mnist"):
        data.load("mnist", folder)


@pytest.mark.parametrize("name", ["movielens-100k", "binarised_mnist", "imagenet"])
def test_a_set_that_is_not_labelled_images_is_refused_by_load(name):
    with pytest.raises(DataError, match=f"{name}: "):
        data.load(name)


def test_ratings_load_from_their_file_or_stand_in(tmp_path):
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k/u.data").write_bytes(b"7\t9\t5\t100\n")
    found, lines = heard(data.load_ratings, data_dir=tmp_path)
    assert (found.ratings.users.tolist(), found.stand_in) == ([7], False)
    assert lines == [f"data: movielens-100k, 1 ratings, files at {tmp_path / 'ml-100k'}"]
    stand_in, lines = heard(data.load_ratings)
    assert stand_in.stand_in
    assert lines == [stand_in.notice]
    assert f"{len(stand_in.ratings):,} procedural ratings of 943 users, not movielens-100k" in stand_in.notice


def amat(bits: np.ndarray) -> bytes:
    return "".join(" ".join(map(str, row)) + "\n" for row in bits.reshape(len(bits), -1)).encode()


def test_published_bits_come_before_mnist_binarised_here(tmp_path):
    write_idx(tmp_path / "mnist")
    bits = RNG.integers(0, 2, (6, 28, 28, 1), dtype=np.uint8)
    made, lines = heard(data.load_binarised, tmp_path)
    assert "binarised here: the published set's distribution, other bits" in lines[0]
    assert (len(made.train), len(made.validation), len(made.test)) == (10, 2, 5)
    assert made.train.shape[1:] == (28, 28, 1)
    assert made.train.max() == 1
    folder = tmp_path / "binarised_mnist"
    folder.mkdir()
    for number, name in enumerate(("train", "valid", "test")):
        (folder / f"binarized_mnist_{name}.amat").write_bytes(amat(bits[number : 2 * number + 1]))
    published, lines = heard(data.load_binarised, tmp_path)
    assert lines == [f"data: binarised_mnist, 1 + 2 + 3 images, files at {folder}"]
    assert np.array_equal(published.train, bits[:1])
    assert np.array_equal(published.validation, bits[1:3])
    assert np.array_equal(published.test, bits[2:5])


def test_binarised_digits_stand_in_and_say_so():
    images, lines = heard(data.load_binarised)
    assert images.stand_in
    assert lines == [images.notice]
    assert "120 + 30 procedural digits, not binarised_mnist" in images.notice
    assert set(np.unique(images.train)) == {0, 1}
    assert (len(images.train), len(images.validation), len(images.test)) == (100, 20, 30)


def test_missing_data_is_fetched_where_there_is_a_network(tmp_path, monkeypatch):
    """The network is a folder here: downloading is tested elsewhere."""
    source = write_idx(tmp_path / "network")
    mnist = catalogue.SETS["mnist"]
    files = []
    for file in mnist.files:
        path = next(source.glob(f"{file.name}*"))
        content = path.read_bytes()
        plain = gzip.decompress(content) if path.suffix == ".gz" else content
        checksum = f"sha256:{hashlib.sha256(plain).hexdigest()}"
        files.append(
            KnownFile(file.name, len(plain), checksum, Download(path.name, ("net/",), len(content), ""))
        )
    toy = KnownSet("mnist", "", "", ("mnist",), tuple(files))
    monkeypatch.setattr(catalogue, "SETS", {"mnist": toy})
    monkeypatch.delenv("HOTLOOP_OFFLINE")
    monkeypatch.setattr("hotloop.data.fetch.probe_mirrors", set)
    monkeypatch.setattr(
        "hotloop.data.fetch.download",
        lambda item, target, mirrors, report: target.write_bytes((source / item.name).read_bytes()),
    )
    dataset, _ = heard(data.load, "mnist")
    assert dataset.source == f"files at {tmp_path / 'home/hotloop/mnist'}"
    assert dataset.train.labels.tolist() == DIGIT_LABELS["train"].tolist()
