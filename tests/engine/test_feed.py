"""Feeds: every sample once a pass, the same batches from device and host, errors that name the culprit."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hotloop.engine.batch_sources import ShuffledBatches, Streamed
from hotloop.engine.feed import Order, Resident
from hotloop.errors import CheckpointError, DataError


def numbered(samples: int) -> dict[str, np.ndarray]:
    """Samples that can be told apart, in small types."""
    index = np.arange(samples)
    image = np.stack([index % 251, index // 251, index % 7], axis=1).astype(np.uint8)
    return {"image": image, "label": index.astype(np.int32)}


def batches(feed: Any, first: int, count: int, following: int = 0) -> Any:
    """The batches of a call, gathered inside one compiled program."""
    return jax.tree.map(np.asarray, gathering(feed, count)(feed.arguments(first, count, following)))


@cache
def gathering(feed: Any, count: int) -> Any:
    steps = jnp.arange(count, dtype=jnp.uint32)
    return jax.jit(lambda arguments: jax.lax.map(lambda step: feed.batch(arguments, step), steps))


def order_of(order: Order, first: int, count: int) -> np.ndarray:
    return order.indices(order.start(first), np.arange(count, dtype=np.uint32))


@given(samples=st.integers(1, 60), batch=st.integers(1, 60), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_carrying_sees_every_sample_once_a_pass(samples: int, batch: int, seed: int) -> None:
    batch = min(batch, samples)
    passes = 3
    updates = -(-passes * samples // batch)
    seen = order_of(Order(samples, batch, seed), 0, updates).reshape(-1)[: passes * samples]
    for one in seen.reshape(passes, samples):
        np.testing.assert_array_equal(np.sort(one), np.arange(samples))


@given(samples=st.integers(1, 60), batch=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_dropping_begins_every_pass_afresh_and_repeats_no_sample_in_it(samples: int, batch: int) -> None:
    batch = min(batch, samples)
    order = Order(samples, batch, 5, "drop")
    per_pass = samples // batch
    seen = order_of(order, 0, 4 * per_pass).reshape(4, -1)
    for one in seen:
        assert len(np.unique(one)) == per_pass * batch
    assert order.start(per_pass)["offset"] == 0


@given(samples=st.integers(2, 50), first=st.integers(0, 2**32 - 8), split=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_call_that_begins_anywhere_continues_the_stream(samples: int, first: int, split: int) -> None:
    order = Order(samples, max(1, samples // 3), 9)
    whole = order_of(order, first, 7)
    parts = [order_of(order, first, split), order_of(order, first + split, 7 - split)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_an_order_of_the_largest_sets_and_calls_does_not_overflow() -> None:
    order = Order(2**31 - 1, 2**12, 1)
    last = order.longest_call - 1
    far = order.indices(order.start(3), np.array([last], np.uint32))
    near = order.indices(order.start(3 + last), np.array([0], np.uint32))
    np.testing.assert_array_equal(far, near)


@pytest.mark.parametrize("remainder", ["carry", "drop"])
def test_device_and_host_give_the_same_batches(remainder: Any) -> None:
    data = numbered(50)
    resident = Resident(data, 8, seed=2**40 + 3, remainder=remainder)
    with Streamed(data, 8, seed=2**40 + 3, remainder=remainder) as streamed:
        for first, count in ((0, 5), (5, 5), (12, 5), (4, 5)):
            one, other = batches(resident, first, count), batches(streamed, first, count, following=5)
            assert one["image"].dtype == np.uint8
            for name in data:
                np.testing.assert_array_equal(one[name], other[name])
            np.testing.assert_array_equal(one["image"], data["image"][one["label"]])


def test_every_source_gives_what_the_arrays_give() -> None:
    data = numbered(30)

    class Archive:
        def __len__(self) -> int:
            return 30

        def __getitem__(self, indices: np.ndarray) -> np.ndarray:
            return data["image"][indices]

    def fetch(indices: np.ndarray) -> np.ndarray:
        return data["image"][indices]

    expected = batches(Resident(data["image"], 7, seed=1), 0, 6)
    for source, samples in ((data["image"], None), (Archive(), None), (fetch, 30)):
        with Streamed(source, 7, seed=1, samples=samples) as feed:
            np.testing.assert_array_equal(batches(feed, 0, 6), expected)


def test_a_ready_source_keeps_its_own_order_and_shows_its_form_without_a_batch() -> None:
    class Ready(ShuffledBatches):
        def example(self) -> np.ndarray:
            return np.empty(7, np.int32)

    drawn: list[list[int]] = []

    def fetch(indices: np.ndarray) -> np.ndarray:
        drawn.append(indices.tolist())
        return indices.astype(np.int32)

    order = Order(30, 7, 1, "drop", shuffled=False)
    with Streamed(Ready(fetch, order), 7, seed=5) as feed:
        assert feed.like(6)["batches"].shape == (6, 7) and drawn == []
        found = batches(feed, 0, 6)
        assert feed.samples == 30 and feed.position(3) == order.position(3)
    np.testing.assert_array_equal(found, np.arange(42).reshape(6, 7) % 28)
    with pytest.raises(DataError, match="its first axis should be 8"):
        Streamed(Ready(fetch, order), 8)


def test_seeds_give_other_orders() -> None:
    orders = {tuple(order_of(Order(50, 50, seed), 0, 1)[0]) for seed in (0, 1, 2**32, 2**33)}
    assert len(orders) == 4


def test_a_transform_gets_a_key_of_its_own_update_in_both_feeds() -> None:
    data = numbered(40)

    def noisy(batch: Any, key: jax.Array) -> Any:
        return batch["label"] + jax.random.uniform(key, (8,))

    resident = Resident(data, 8, seed=6, transform=noisy)
    whole = batches(resident, 0, 10)
    np.testing.assert_array_equal(batches(resident, 4, 6), whole[4:])
    noise = whole % 1
    assert len(np.unique(noise)) == noise.size
    with Streamed(data, 8, seed=6, transform=noisy) as streamed:
        np.testing.assert_array_equal(batches(streamed, 0, 10), whole)


def test_a_gather_of_ones_own_densifies_ragged_rows() -> None:
    starts, items = np.array([0, 2, 2, 5]), np.array([1, 3, 0, 1, 2])

    def dense(data: Any, users: jax.Array) -> jax.Array:
        begin, end = data["starts"][users], data["starts"][users + 1]
        place = jnp.arange(len(items))
        mine = (place >= begin[:, None]) & (place < end[:, None])
        return jax.vmap(lambda row: jnp.zeros(4, jnp.uint8).at[data["items"]].max(row.astype(jnp.uint8)))(
            mine
        )

    feed = Resident({"starts": starts, "items": items}, 3, samples=3, gather=dense)
    rows = batches(feed, 0, 1)[0]
    assert Counter(map(tuple, rows)) == Counter([(0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 0)])


def test_the_data_is_an_argument_and_not_a_constant_of_the_program() -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 16_384), np.uint8)
    feed = Resident({"image": image}, 4)
    program = jax.jit(lambda arguments: feed.batch(arguments, jnp.uint32(0))).lower(feed.arguments(0, 1))
    assert len(program.as_text()) < image.nbytes  # as a constant it would take two characters a byte


def test_streams_prepare_the_next_call_while_the_caller_works() -> None:
    fetched: list[str] = []

    def fetch(indices: np.ndarray) -> np.ndarray:
        fetched.append(threading.current_thread().name)
        return indices

    with Streamed(fetch, 2, samples=20) as feed:
        feed.arguments(0, 3, following=4)
        deadline = time.monotonic() + 10
        while len(fetched) < 1 + 3 + 4 and time.monotonic() < deadline:  # one to learn the form of a batch
            time.sleep(0.001)
        assert len(fetched) == 8
        feed.arguments(3, 4)
        assert len(fetched) == 8
        assert all(name.startswith("hotloop-feed") for name in fetched[1:])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotloop-feed")]


@pytest.mark.parametrize(("first", "count"), [(2, 3), (1, 6), (0, 2)])
def test_a_wrong_guess_of_the_next_call_costs_time_but_no_batch(first: int, count: int) -> None:
    data = numbered(50)
    expected = data["label"][order_of(Order(50, 5, 1), first, count)]
    with Streamed(data, 5, seed=1) as feed:
        feed.arguments(0, 2, following=6)
        np.testing.assert_array_equal(feed.arguments(first, count)["batches"]["label"], expected)


def test_a_calls_buffer_is_bounded() -> None:
    data = numbered(100)  # 7 bytes a sample
    with Streamed(data, 10, buffer_bytes=700) as feed:
        assert feed.longest_call == 10
    with Streamed(data, 10, buffer_bytes=1) as feed:
        assert feed.longest_call == 1


def counted(stop: int, batch_size: int = 4) -> Iterator[np.ndarray]:
    for number in range(stop):
        yield np.full(batch_size, number, np.int32)


def test_an_iterator_is_taken_as_it_comes_and_nothing_is_lost() -> None:
    with Streamed(counted(100), 4) as feed:
        assert batches(feed, 0, 3, following=5)[:, 0].tolist() == [0, 1, 2]
        assert batches(feed, 3, 2, following=2)[:, 0].tolist() == [3, 4]  # five were drawn ahead
        assert batches(feed, 5, 4)[:, 0].tolist() == [5, 6, 7, 8]


def test_an_iterator_resumes_by_dropping_what_came_before() -> None:
    with Streamed(counted(100), 4) as feed:
        feed.check_position(feed.position(50))
        assert batches(feed, 50, 2)[:, 0].tolist() == [50, 51]
        with pytest.raises(DataError, match="an iterator cannot go back to batch 3: it stands at batch 50"):
            feed.arguments(3, 1)


@pytest.mark.parametrize("kind", [iter, partial(map, np.asarray)])
def test_an_iterator_that_another_feed_has_drawn_from_is_refused(kind: Any) -> None:
    iterator = kind(counted(100))
    with Streamed(iterator, 4) as feed:
        feed.arguments(0, 3, following=5)
    with pytest.raises(DataError, match="another feed has drawn from this iterator: give that feed again"):
        Streamed(iterator, 4)


def test_an_iterator_that_ends_says_after_how_many_batches() -> None:
    with Streamed(counted(5), 4) as feed:
        feed.arguments(0, 3, following=3)
        with pytest.raises(DataError, match="the data ended after 5 batches"):
            feed.arguments(3, 3)


def test_an_exception_in_the_thread_reaches_the_caller_as_it_was() -> None:
    class Torn(Exception):
        pass

    def fetch(indices: np.ndarray) -> np.ndarray:
        if threading.current_thread().name.startswith("hotloop-feed"):
            raise Torn("shard 7 is torn")
        return indices

    with Streamed(fetch, 2, samples=20) as feed, pytest.raises(Torn, match="shard 7 is torn") as caught:
        feed.arguments(0, 1)
    assert caught.traceback[-1].name == "fetch"


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda b: {"image": b["image"]}, "batch 0 is made of"),
        (lambda b: {**b, "image": b["image"][:-1]}, r"batch 0: image is uint8\[3, 3\], .* uint8\[4, 3\]"),
        (lambda b: {**b, "label": b["label"] * 0.5}, r"batch 0: label is float64\[4\], .* int32\[4\]"),
    ],
)
def test_a_batch_unlike_the_first_is_named(spoiled: Any, message: str) -> None:
    data = numbered(20)
    calls: list[int] = []

    def fetch(indices: np.ndarray) -> Any:
        batch = {name: array[indices] for name, array in data.items()}
        calls.append(1)
        return batch if len(calls) == 1 else spoiled(batch)

    with Streamed(fetch, 4, samples=20) as feed, pytest.raises(DataError, match=message):
        feed.arguments(0, 1)


@pytest.mark.parametrize("kind", [Resident, Streamed])
@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        ({}, 1, "the data set holds no arrays"),
        ({"x": np.zeros((0, 3))}, 1, "the data set is empty"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, 1, "must have one length, but they have: x 3, y 4"),
        ({"x": np.zeros(3), "y": np.float32(1)}, 1, "y of a data set is a single value"),
        ({"x": np.zeros(3)}, 4, "batch size 4 is larger than the data set of 3 samples"),
        ({"x": np.zeros(3)}, 0, "batch size 0: must be at least 1"),
    ],
)
def test_data_that_cannot_work_is_refused_in_one_line(
    kind: Any, data: Any, batch_size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        kind(data, batch_size)
    assert "\n" not in str(caught.value)


def test_a_function_must_say_how_many_samples_there_are() -> None:
    with pytest.raises(DataError, match="give `samples`"):
        Streamed(lambda indices: indices, 4)


def test_text_is_no_batch() -> None:
    with pytest.raises(DataError, match="only numbers can go to the device"):
        Streamed(np.array(["a", "b"]), 1)


@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_positions_of_another_order_are_refused(kind: Any) -> None:
    saved = kind(numbered(50), 8, seed=1).position(12)
    kind(numbered(50), 8, seed=1).check_position(saved)
    others = (
        (kind(numbered(49), 8, seed=1), "samples 50, this run has 49"),
        (kind(numbered(50), 4, seed=1), "batch size 8, this run has 4"),
        (kind(numbered(50), 8, seed=2), "seed 1, this run has 2"),
        (kind(numbered(50), 8, seed=1, remainder="drop"), "remainder carry, this run has drop"),
    )
    for other, message in others:
        with pytest.raises(CheckpointError, match=message):
            other.check_position(saved)


needs_four = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def over_four_devices() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("replica",)), PartitionSpec("replica"))


@needs_four
@pytest.mark.parametrize("kind", [Resident, Streamed])
def test_a_batch_spread_over_replicas_is_the_same_batch(kind: Any) -> None:
    data, sharding = numbered(50), over_four_devices()
    feed = kind(data, 8, seed=3, sharding=sharding)
    one = jax.jit(lambda arguments: feed.batch(arguments, jnp.uint32(1)))(feed.arguments(0, 2))
    assert one["image"].sharding.is_equivalent_to(sharding, 2)
    expected = batches(Resident(data, 8, seed=3), 0, 2)
    np.testing.assert_array_equal(one["label"], expected["label"][1])


@needs_four
def test_a_batch_that_replicas_cannot_share_is_refused() -> None:
    with pytest.raises(DataError, match="a batch of 6 cannot be split evenly over 4 devices"):
        Resident(numbered(50), 6, sharding=over_four_devices())


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 1])
def test_integers_that_a_device_would_cut_are_refused(value):
    data = {"labels": np.array([0, value, 1], np.int64)}
    with pytest.raises(DataError, match=f"labels: {value} does not fit the device's int32"):
        Resident(data, 1)
    with Streamed(data, 1) as feed, pytest.raises(DataError, match=f"{value} does not fit"):
        feed.arguments(0, 3)
    Resident({"labels": np.array([2**31 - 1, -(2**31)], np.int64)}, 1)
