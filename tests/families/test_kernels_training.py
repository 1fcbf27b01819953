"""Training trains, replicas equal one large batch, host-fed data equals data on the device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.errors import WrongResult
from hotloop.families.kernels import bench, model
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.bench import check_inference, check_training
from hotloop.families.kernels.model import Job
from hotloop.families.kernels.pool import PoolFromHost

DENSE = configs.Dense(size=32, batch_size=4, batches_per_step=5, train=True, learning_rate=0.5)
RNN = configs.Rnn(batch_size=2, timesteps=2, hidden_size=8, batches_per_step=3, train=True)
SMALL = {
    "dense-relu": configs.Dense(size=32, batch_size=16, include_activation=True),
    "grouped-conv": configs.GroupedConv(
        filter_in=8, filter_out=8, group_dim=4, input_size=8, block_repeats=2
    ),
    "rnn": configs.Rnn(batch_size=2, timesteps=3, hidden_size=16, learning_rate=0.1),
    "gru": configs.Gru(batch_size=2, timesteps=3, hidden_size=16, input_size=8, learning_rate=0.1),
    "lstm": configs.Lstm(batch_size=2, timesteps=3, hidden_size=16, learning_rate=0.1, fused=True),
    "lstm-multi": configs.LstmMulti(batch_size=2, timesteps=3, hidden_size=16, input_size=4),
}


def made(config, dtype="float32"):
    return bench.prepare(bench.make_job(replace(config, dtype=dtype), jax.devices()[0]))


def last_over_first(ready):
    """The mean loss over the last round of the batches by that over the first."""
    losses, batches = ready.losses(), ready.feed.batches
    return losses[-batches:].mean() / losses[:batches].mean()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("dense-relu", "gru") else [SLOW]) for name in SMALL],
)
def test_the_loss_falls_and_the_update_is_the_reference_update(name):
    ready = made(replace(SMALL[name], train=True, batches_per_step=300))
    checked = check_training(ready.job, ready.state, ready.feed)
    assert checked.rows == ready.job.config.batch_size
    ready.step()
    assert last_over_first(ready) < 0.95


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_another_optimiser_trains_with_the_state_it_keeps(optimizer):
    ready = made(
        configs.Dense(
            size=16, batch_size=4, train=True, batches_per_step=100, optimizer=optimizer, learning_rate=0.02
        )
    )
    check_training(ready.job, ready.state, ready.feed)
    before = jax.tree.map(np.asarray, ready.state["slots"])
    ready.step()
    assert last_over_first(ready) < 0.9
    after = jax.tree.leaves(ready.state["slots"])
    assert any(not np.array_equal(a, b) for a, b in zip(after, jax.tree.leaves(before), strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.slow
def test_steps_smaller_than_the_spacing_of_sixteen_bit_weights_count_in_the_mean(dtype):
    job = Job(configs.Dense(size=16, batch_size=4, learning_rate=1e-4), dtype)
    state = model.init(job, jax.random.key(0))
    old = state["params"]["kernel"]
    batch = job.kernel.data(np.random.default_rng(0), 4, dtype)
    keys = jax.random.split(jax.random.key(1), 2000)
    new = jax.jit(jax.vmap(model.update(job), (None, None, 0)))(state, batch, keys)[0]["params"]["kernel"]
    assert new.dtype == dtype
    old = np.asarray(old, np.float64)
    step = -1e-4 * np.asarray(model.gradients(job)(state["params"], batch)[1]["kernel"], np.float64)
    spacing = np.abs(old) * float(jnp.finfo(dtype).eps)
    assert np.median(np.abs(step) / spacing) < 0.3
    moved = np.asarray(new, np.float64).mean(0) - old
    assert (moved * step).sum() / (step**2).sum() == pytest.approx(1, abs=0.1)


def test_float16_weights_learn():
    ready = made(configs.Dense(size=64, batch_size=16, batches_per_step=400, train=True), "float16")
    assert check_training(ready.job, ready.state, ready.feed).errors["gradient"] > 1e-7
    for _ in range(3):
        ready.step()
    assert last_over_first(ready) < 0.9


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("layer", [DENSE, pytest.param(RNN, marks=SLOW)])
def test_two_replicas_train_as_one_with_twice_the_batch(layer):
    one = made(replace(layer, batch_size=2 * layer.batch_size))
    two = made(replace(layer, replicas=2))
    np.testing.assert_array_equal(one.feed.at(0)["x"], two.feed.at(0)["x"])
    start = np.asarray(jax.tree.leaves(one.state["params"])[0])
    assert check_training(two.job, two.state, two.feed).rows == one.job.config.batch_size
    one.step(), two.step()
    np.testing.assert_allclose(two.losses(), one.losses(), rtol=1e-6)
    parameters = [jax.tree.leaves(each.state["params"]) for each in (one, two)]
    for a, b in zip(*parameters, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-7)
    moved = np.abs(np.asarray(parameters[0][0]) - start).max()
    assert moved > 1e-4
    shards = [np.asarray(shard.data) for shard in parameters[1][0].addressable_shards]
    np.testing.assert_array_equal(shards[0], shards[1])


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_that_do_not_average_would_be_found_out(monkeypatch):
    monkeypatch.setattr("hotloop.engine.precision.lax.pmean", lambda values, axis: values)
    with pytest.raises(WrongResult, match="wrong result, not timed"):
        ready = made(replace(DENSE, replicas=2))
        check_training(ready.job, ready.state, ready.feed)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_infer_on_their_own_rows():
    config = configs.Rnn(batch_size=2, timesteps=3, hidden_size=16, batches_per_step=4, replicas=2)
    ready = made(config)
    ready.step()
    assert ready.state["y"].shape == (3, 4, 16)
    assert check_inference(ready.job, ready.state, ready.feed).rows == 4


@pytest.mark.parametrize("piece", [1, 2**27])
def test_data_sent_from_the_host_trains_as_data_on_the_device(piece, monkeypatch):
    monkeypatch.setattr("hotloop.families.kernels.pool.PIECE_BYTES", piece)
    resident, sent = made(DENSE), made(replace(DENSE, use_generated_data=True))
    assert isinstance(sent.feed, PoolFromHost)
    assert sent.program.updates_per_call == (1 if piece == 1 else 5)
    for steps in (1, 2):
        resident.step(), sent.step()
        assert sent.losses().shape == (5 * steps,)
    np.testing.assert_allclose(sent.losses(), resident.losses(), rtol=1e-6)


def test_a_step_from_the_host_sends_every_batch_anew(monkeypatch):
    sent = made(replace(DENSE, use_generated_data=True, train=False))
    put, numbers = jax.device_put, []

    def counting(leaf, where):
        numbers.append(leaf.shape[0])
        return put(leaf, where)

    monkeypatch.setattr("jax.device_put", counting)
    sent.step()
    assert sum(numbers) == 5
    assert check_inference(sent.job, sent.state, sent.feed).errors["output"] < 1e-6


def test_zero_values_are_zero():
    ready = made(replace(DENSE, use_zero_values=True, train=False))
    assert not np.any(ready.feed.pool["x"])
    ready.step()
    assert check_inference(ready.job, ready.state, ready.feed).errors["output"] == 0
