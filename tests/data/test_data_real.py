"""The real sets, where this machine has them: in HOTLOOP_DATA or a folder `shared/data` beside the checkout."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from hotloop import data
from hotloop.data.catalogue import known_set
from hotloop.data.local_files import find_set, verify_set
from hotloop.errors import DataError

ROOT = Path(
    os.environ.get("HOTLOOP_DATA") or Path(__file__).resolve().parents[2] / "../shared/data"
).resolve()


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLOOP_OFFLINE", "1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("HOTLOOP_DATA", raising=False)


def needs(name: str):
    here = ROOT.is_dir() and find_set(known_set(name), ROOT) is not None
    return pytest.mark.skipif(not here, reason=f"no {name} in {ROOT}")


@needs("mnist")
def test_real_mnist_is_the_published_one():
    verdicts = verify_set(known_set("mnist"), find_set(known_set("mnist"), ROOT))
    assert [verdict.status for verdict in verdicts] == ["OK"] * 4
    dataset = data.load("mnist", ROOT, say=print)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert dataset.train.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert round(dataset.train.images.mean() / 255, 4) == 0.1307


@needs("mnist")
def test_real_mnist_always_gives_the_same_bits():
    images = data.load_binarised(ROOT, say=print)
    assert (len(images.train), len(images.validation), len(images.test)) == (50_000, 10_000, 10_000)
    whole = np.concatenate([images.train, images.validation])
    assert hashlib.sha256(whole.tobytes()).hexdigest() == (
        "07aef294fa06e5df8e6b3c6c3fa3ad8e19302efaa590d503974983ba73c138f6"
    )
    assert hashlib.sha256(images.test.tobytes()).hexdigest() == (
        "dac0cb4ec28a0c0aae15cab8abe7a76ffa644ef6fb025000861994ad010ef98e"
    )


@needs("mnist")
def test_mnist_is_refused_as_fashion_mnist():
    with pytest.raises(DataError, match="belongs to mnist, not to fashion_mnist"):
        data.load("fashion_mnist", ROOT / "mnist")


@needs("cifar10")
def test_real_cifar10_loads_whole_or_in_part():
    dataset = data.load("cifar10", ROOT, say=print)
    assert dataset.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert dataset.test.labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert dataset.train.images.shape[1:] == (32, 32, 3)
    assert dataset.train.images[0, 0, 0].tolist() == [59, 62, 63]


@needs("movielens-100k")
def test_real_movielens_is_the_published_one():
    verdicts = verify_set(known_set("movielens-100k"), find_set(known_set("movielens-100k"), ROOT))
    assert [verdict.status for verdict in verdicts] == ["OK"]
    ratings = data.load_ratings(data_dir=ROOT, say=print).ratings
    assert len(ratings) == 100_000
    assert (len(np.unique(ratings.users)), len(np.unique(ratings.items))) == (943, 1682)
    assert ratings.values.mean() == pytest.approx(3.52986, abs=1e-5)
