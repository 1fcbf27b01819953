"""What each of several processes reads of a batch: the rows that its devices hold, every image once in all."""

import platform
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from hotloop.data.dataset import Dataset, LabelledImages, RatingSet
from hotloop.data.ratings import Ratings
from hotloop.engine import loading, processes
from hotloop.engine.batch_sources import IterableBatches, ShuffledBatches, Streamed
from hotloop.engine.device import device_mesh
from hotloop.engine.feed import Order, fill_up
from hotloop.engine.loading import check_same_data, load_once, read_arrays, write_arrays
from hotloop.engine.precision import SPLIT
from hotloop.errors import DataError
from hotloop.families.cnn.photographs import UNSEEN
from hotloop.families.cnn.sources import PhotoBatches, evaluation_batches


class Recorder:
    """Workers that decode nothing: an image is its number, of a store of 23."""

    def __init__(self, count=23):
        self.reader = SimpleNamespace(size=1, dtype=np.dtype(np.uint8), store=range(count))
        self.read = []

    def batches(self, wanted):
        for numbers, epochs in wanted:
            self.read += zip(np.asarray(epochs).tolist(), numbers.tolist(), strict=True)
            yield {"image": np.zeros((len(numbers), 1, 1, 3), np.uint8), "label": numbers.astype(np.int32)}


def shares(count, size, stages=1):
    """The rows of a batch of `size` on each of `count` processes, and the sharding over all their devices."""
    each = {1: 4, 2: 2, 3: 1}[count]
    if count * each > jax.device_count():
        pytest.skip(f"{count * each} devices")
    mesh = device_mesh(count * each // stages, stages)
    sharding = NamedSharding(mesh, SPLIT)
    devices = np.array(mesh.devices).reshape(count, each)
    size = fill_up(sharding, size)
    return sharding, [processes.rows_on(sharding, size, set(own)) for own in devices]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_rows_of_all_processes_are_the_batch(count):
    _, rows = shares(count, 12)
    assert [row for own in rows for row in range(12)[own]] == list(range(12))
    assert len({own.stop - own.start for own in rows}) == 1


def test_processes_that_share_a_replica_read_the_same_rows():
    _, rows = shares(2, 12, stages=4)
    assert rows == [slice(0, 12)] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_photograph_of_a_training_is_decoded_by_one_process(count):
    _, rows = shares(count, 12)
    order, whole = Order(23, 12, seed=5), Recorder()
    together = list(PhotoBatches(whole, order).batches(1, 4))
    found, parts = [], []
    for own in rows:
        workers = Recorder()
        parts.append([batch["label"] for batch in PhotoBatches(workers, order).batches(1, 4, own)])
        found += workers.read
    assert sorted(found) == sorted(whole.read) and len(set(found)) == len(found) == 48
    for number, batch in enumerate(together):
        np.testing.assert_array_equal(np.concatenate([part[number] for part in parts]), batch["label"])


@pytest.mark.parametrize(("count", "stages"), [(2, 4), (2, 2), (3, 3)])
def test_processes_that_share_a_replica_read_all_labels_and_those_with_its_first_stage_decode(count, stages):
    sharding, rows = shares(count, 12, stages)
    devices = np.array(sharding.mesh.devices).reshape(count, -1)
    order, whole = Order(23, 12, seed=5), Recorder()
    together = list(PhotoBatches(whole, order).batches(1, 4))
    trained, validated, labels = [], [], []
    for own, local in zip(rows, devices, strict=True):
        seen = processes.first_stage_rows_on(sharding, 12, set(local.tolist()))
        workers, others = Recorder(), Recorder()
        labels.append([batch["label"] for batch in PhotoBatches(workers, order, seen).batches(1, 4, own)])
        trained += [each for each in workers.read if each[0] != UNSEEN]
        assert sum(len(b["label"]) for b in evaluation_batches(others, 12, own, seen)) in (23, 12, 11)
        validated += [number for epoch, number in others.read if epoch != UNSEEN]
        if not set(local.tolist()) & set(sharding.mesh.devices[:, 0].tolist()):
            assert {epoch for epoch, _ in workers.read} == {UNSEEN}
    assert sorted(trained) == sorted(whole.read) and sorted(validated) == list(range(23))
    for own, found in zip(rows, labels, strict=True):
        for ours, batch in zip(found, together, strict=True):
            np.testing.assert_array_equal(ours, batch["label"][own])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [5, 12, 24])
def test_each_photograph_of_a_validation_is_decoded_by_one_process_in_as_many_batches(count, size):
    sharding, rows = shares(count, size)
    filled = fill_up(sharding, size)
    found, lengths = [], []
    for own in rows:
        workers = Recorder()
        lengths.append([len(batch["label"]) for batch in evaluation_batches(workers, filled, own)])
        found += [number for _, number in workers.read]
    assert sorted(found) == list(range(23))
    assert {len(each) for each in lengths} == {-(-23 // filled)}
    assert sum(map(sum, lengths)) == 23


@pytest.mark.parametrize("count", [2, 3])
def test_arrays_and_iterators_are_read_in_shares_too(count):
    _, rows = shares(count, 12)
    order, data = Order(23, 12, seed=5), np.arange(23)
    sources = (
        lambda: ShuffledBatches(lambda numbers: data[numbers], order),
        lambda: IterableBatches(lambda: iter([data[:12], data[11:]]), 12),
    )
    for make in sources:
        whole = list(make().batches(0, 2))
        parts = [list(make().batches(0, 2, own)) for own in rows]
        for number, batch in enumerate(whole):
            np.testing.assert_array_equal(np.concatenate([part[number] for part in parts]), batch)


def test_alone_a_process_reads_every_row():
    with Streamed(np.arange(24), 6, sharding=shares(3, 6)[0]) as feed:
        batch = feed.batch(feed.arguments(0, 1), np.uint32(0))
    assert batch.shape == (6,) and len(set(np.asarray(batch).tolist())) == 6


class TwoOnOneHost:
    """Processes 0 and 1 of a machine, one after the other: what each says is gathered when both have said it."""

    def __init__(self, monkeypatch, hosts):
        self.said, self.hosts, self.index = [], hosts, 0
        monkeypatch.setattr(processes, "_group", self)
        monkeypatch.setattr(processes, "count", lambda: 2)
        monkeypatch.setattr(processes, "index", lambda: self.index)
        monkeypatch.setattr(processes, "gathered", self.gathered)
        monkeypatch.setattr(processes, "barrier", lambda name: None)

    def gathered(self, value):
        if isinstance(value, str) and value == platform.node():
            return self.hosts
        if isinstance(value, list):  # what is compared: alike
            return [value, value]
        self.said.append(value)
        return [*self.said, None][:2]


def test_a_stand_in_is_drawn_by_one_process_of_a_machine_and_goes_to_the_others(monkeypatch):
    drawn = []

    def draw():
        drawn.append(1)
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4, 1)
        split = LabelledImages(pixels, np.array([3, 4], np.int32))
        about = {"name": "mnist", "source": "drawn", "stand_in": True, "notice": "STAND-IN", "classes": 5}
        return Dataset(**about, train=split, test=split)

    group = TwoOnOneHost(monkeypatch, [platform.node()] * 2)
    kept = {}
    monkeypatch.setattr(loading, "read_arrays", lambda kind, path: kept[path])
    monkeypatch.setattr(loading, "write_arrays", lambda data, path: kept.update({path: data}))
    first = load_once(draw, Dataset)
    group.index = 1
    second = load_once(draw, Dataset)
    assert second is first and drawn == [1]
    group.hosts, group.said[:] = ["a", "b"], []  # on two machines each draws its own
    group.index = 0
    load_once(draw, Dataset)
    group.index = 1
    load_once(draw, Dataset)
    assert drawn == [1, 1, 1]


def test_a_set_is_the_same_after_a_file(tmp_path):
    draws = np.random.default_rng(0)
    train, test = (
        LabelledImages(draws.integers(0, 256, (n, 4, 4, 3)).astype(np.uint8), np.arange(n, dtype=np.int32))
        for n in (5, 3)
    )
    one = Dataset(name="cifar10", source="a", stand_in=True, notice="b", classes=7, train=train, test=test)
    write_arrays(one, tmp_path / "one.npz")
    other = read_arrays(Dataset, tmp_path / "one.npz")
    for name in ("name", "source", "stand_in", "notice", "classes"):
        assert getattr(other, name) == getattr(one, name)
    for part in ("train", "test"):
        for name in ("images", "labels"):
            ours, wanted = (getattr(getattr(each, part), name) for each in (other, one))
            assert ours.dtype == wanted.dtype
            np.testing.assert_array_equal(ours, wanted)


def test_ratings_without_times_are_the_same_after_a_file(tmp_path):
    table = Ratings(np.arange(3), np.arange(3, 6), np.ones(3, np.float32))
    one = RatingSet(name="movielens-100k", source="drawn", stand_in=True, notice="b", ratings=table)
    write_arrays(one, tmp_path / "one.npz")
    other = read_arrays(RatingSet, tmp_path / "one.npz")
    assert other.ratings.times is None and other.ratings.items.tolist() == [3, 4, 5] and other.stand_in


def test_data_that_differ_in_one_process_are_one_line_that_names_it(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gathered", lambda value: [value, ["node7", {"source": "a stand-in"}]])
    with pytest.raises(DataError, match=r"process 1 on node7 .*: source a stand-in in place of its"):
        check_same_data(source="its files")
    check_same_data(source="a stand-in")
