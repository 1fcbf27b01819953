"""Batches apart are the same benchmark as a pool that each iteration picks from, without the copy."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.families.kernels import bench, model, pool
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.bench import check_inference

SLOW = pytest.mark.slow
SMALL = {
    "dense": configs.Dense(size=32, batch_size=4),
    "grouped-conv": configs.GroupedConv(
        batch_size=2, filter_in=8, filter_out=8, group_dim=4, input_size=8, block_repeats=2
    ),
    "rnn": configs.Rnn(batch_size=2, timesteps=3, hidden_size=16),
    "lstm-multi": configs.LstmMulti(batch_size=2, timesteps=3, hidden_size=16, input_size=4),
}


def job_of(config, **changes):
    config = replace(config, **{"dtype": "float32", **changes})
    return bench.make_job(config, jax.devices()[0])


def made(job, feed):
    state = model.begin(job, jax.random.key(0), feed.at(0)["x"])
    return bench._compile(job, feed, job.config.batches_per_step, state)


def both(job, batches):
    """The benchmark of a pool that is picked from, and the same with its batches apart."""
    return made(job, pool.PoolOnDevice(job, batches)), made(job, pool.BatchesApart(job, batches))


def assert_alike(ours, theirs, rtol=1e-6):
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        assert mine.shape == other.shape
        assert np.linalg.norm(mine - other) <= rtol * max(np.linalg.norm(other), 1e-3)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dense" else [SLOW]) for name in SMALL]
)
def test_states_and_losses_are_those_of_the_pool(name, train):
    job = job_of(SMALL[name], train=train, batches_per_step=6, learning_rate=0.1)
    picked, apart = both(job, 3)
    for _ in range(2):
        picked.step(), apart.step()
        assert apart.iterations == picked.iterations
        assert_alike(apart.state, picked.state)
    assert int(apart.state["count"]) == 12
    if train:
        assert apart.losses().shape == picked.losses().shape == (12,)
        np.testing.assert_allclose(apart.losses(), picked.losses(), rtol=1e-5)


def test_every_update_rounds_with_the_key_of_its_count():
    """Steps far below the spacing of the weights: what they become is decided by the random bits."""
    job = job_of(SMALL["dense"], dtype="bfloat16", train=True, batches_per_step=8, learning_rate=1e-3)
    picked, apart = both(job, 4)
    start = np.asarray(picked.state["params"]["kernel"], np.float32)
    picked.step(), apart.step()
    found, expected = (np.asarray(each.state["params"]["kernel"], np.float32) for each in (apart, picked))
    assert np.mean(expected != start) > 0.01
    # The loops are fused in two ways, so that a sum here and there may end on another side of its rounding.
    assert np.mean(found != expected) < 0.1 * np.mean(expected != start)


@pytest.mark.parametrize(
    "length", [pytest.param(length, marks=[] if length in (1, 5, 6) else [SLOW]) for length in range(1, 10)]
)
def test_calls_of_every_length_are_those_of_the_pool(length, monkeypatch):
    """An accelerator's choice of the form, made on the CPU."""
    job = job_of(SMALL["dense"], train=True, batches_per_step=length)
    feed = feed_on("gpu", job, monkeypatch)
    apart = made(job, feed)
    picked = made(job, pool.PoolOnDevice(job, feed.batches))
    for _ in range(3):
        picked.step(), apart.step()
    assert apart.iterations == 3 * length
    np.testing.assert_allclose(apart.losses(), picked.losses(), rtol=1e-5)
    assert_alike(apart.state["params"], picked.state["params"])


def feed_on(platform, job, monkeypatch):
    monkeypatch.setattr(model.Job, "sharding", lambda *_: jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return pool.make_feed(
        replace(job, device=SimpleNamespace(platform=platform)), job.config.batches_per_step
    )


@pytest.mark.parametrize(
    ("length", "batches"), [(1, None), (2, 2), (3, 3), (5, None), (6, 3), (8, 4), (9, 3), (10, 2), (49, None)]
)
def test_an_accelerator_has_as_many_batches_apart_as_can_go_round(length, batches, monkeypatch):
    feed = feed_on("gpu", job_of(SMALL["dense"], batches_per_step=length), monkeypatch)
    assert isinstance(feed, pool.BatchesApart) == (batches is not None)
    assert feed.batches == (batches or pool.POOL_BATCHES)
    assert feed.iterations_a_step == (batches or 1)


def test_a_cpu_and_batches_from_the_host_keep_the_pool(monkeypatch):
    job = job_of(SMALL["dense"], batches_per_step=8)
    assert type(feed_on("cpu", job, monkeypatch)) is pool.PoolOnDevice
    sent = replace(job, config=replace(job.config, use_generated_data=True))
    assert type(feed_on("gpu", sent, monkeypatch)) is pool.PoolFromHost


@given(rows=st.integers(1, 64), replicas=st.integers(1, 3), room=st.integers(1, 10**5))
def test_a_pool_has_as_many_batches_as_fit_and_two_at_least(rows, replicas, room):
    config = configs.Rnn(batch_size=rows, timesteps=2, hidden_size=4, replicas=replicas)
    job = model.Job(config, "float16", device=None)
    a_batch = 2 * rows * replicas * (4 * 2 + 4)  # two steps: four numbers of 16 bits and a label of 32 each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "POOL_BYTES", room)
        found = pool.count_fitting(job)
    assert 2 <= found <= pool.POOL_BATCHES
    assert found == 2 or found * a_batch <= room
    assert found == pool.POOL_BATCHES or (found + 1) * a_batch > room


def prepared(train, form=pool.BatchesApart):
    job = job_of(SMALL["dense"], train=train, batches_per_step=12)
    ready = made(job, form(job, 3))
    return ready, ready.program.lower(ready.state).as_text()


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_no_batch_is_sliced_out_of_an_array_of_all(train):
    sliced = re.compile(r"dynamic_slice .*tensor<3x4x32xf32>")
    _, text = prepared(train)
    assert not sliced.search(text) and "tensor<3x4x32xf32>" not in text
    assert text.split("func.func public @main")[1].split("->")[0].count("tensor<4x32xf32>") >= 3
    assert sliced.search(prepared(train, pool.PoolOnDevice)[1])


def test_every_pass_has_its_input_behind_the_whole_output_before_it():
    """Operands of the barriers: the count and the first input, an output and the next input, the last output."""
    _, text = prepared(train=False)
    operands = re.findall(r"optimization_barrier (.*?) : (.*?)(?: loc|\n)", text)
    types = [re.findall(r"tensor<([^>]*)>", kinds) for _, kinds in operands]
    assert types == [["ui32", "4x32xf32"], *[["4x32xf32"] * 2] * 2, ["4x32xf32"]]


def test_every_update_has_its_batch_behind_the_parameters_before_it():
    _, text = prepared(train=True)
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert sum("tensor<32x32xf32>" in line and "tensor<4x32xf32>" in line for line in barriers) == 3


def test_an_output_beyond_reach_moves_the_count_on():
    ready, _ = prepared(train=False)
    ready.state["params"] = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e9), ready.state["params"])
    ready.feed.pool = jax.tree.map(jnp.ones_like, ready.feed.pool)
    ready.step()
    assert int(ready.state["count"]) == 24


def test_the_last_output_belongs_to_the_last_batch():
    ready, _ = prepared(train=False)
    ready.step()
    assert check_inference(ready.job, ready.state, ready.feed).errors["output"] < 1e-6
    ready.state["count"] = ready.state["count"] - 1
    with pytest.raises(bench.WrongResult):
        check_inference(ready.job, ready.state, ready.feed)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_share_batches_that_lie_apart(train):
    job = job_of(SMALL["dense"], train=train, batches_per_step=4, replicas=2, learning_rate=0.5)
    picked, apart = both(job, 2)
    picked.step(), apart.step()
    assert len(apart.feed.pool[0]["x"].sharding.device_set) == 2
    assert_alike(apart.state, picked.state)
