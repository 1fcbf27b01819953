"""Training trains, replicas equal one large batch, host-fed data equals data on the device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.errors import WrongResult
from hotloop.families.kernels import bench, check, model
from hotloop.families.kernels import config as configs
from hotloop.families.kernels.bench import find_place, prepare
from hotloop.families.kernels.catalogue import build
from hotloop.families.kernels.data import PoolFromHost, make_pool

BOUNDS = check.BOUNDS["float32"]
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
    return prepare(config, build(config), find_place(config, jax.devices()[0]), dtype)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("dense-relu", "gru") else [SLOW]) for name in SMALL],
)
def test_the_loss_falls_and_the_update_is_the_reference_update(name):
    config = SMALL[name]
    kernel, pool = build(config), make_pool(build(config), config, "float32")
    params = kernel.init(jax.random.key(0), "float32")
    jitted = jax.jit(model.updater(kernel, config.learning_rate, jax.random.key(0), None))

    def update(params, count, batch):
        with model.matmul_precision("float32", False, jax.default_backend()):
            return jitted(params, count, batch)

    batches = [{key: leaf[number] for key, leaf in pool.items()} for number in range(len(pool["x"]))]
    checked = check.check_update(
        kernel, params, lambda p, b: update(p, 0, b), batches[0], 1.0, config.learning_rate, BOUNDS
    )
    assert checked.rows == config.batch_size
    losses = []
    for count in range(75 * len(batches)):
        loss, _, params = update(params, count, batches[count % len(batches)])
        losses.append(float(loss))
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_smaller_than_the_spacing_of_sixteen_bit_weights_count_in_the_mean(dtype):
    config, rate = configs.Dense(size=16, batch_size=4), 1e-4
    kernel = build(config)
    params = kernel.init(jax.random.key(0), dtype)
    batch = kernel.data(np.random.default_rng(0), 4, params["kernel"].dtype)
    update = model.updater(kernel, rate, jax.random.key(1), None)
    _, gradients, new = jax.jit(jax.vmap(update, (None, 0, None)))(
        params, np.arange(2000, dtype=np.uint32), batch
    )
    assert new["kernel"].dtype == dtype
    old = np.asarray(params["kernel"], np.float64)
    step = -rate * np.asarray(gradients["kernel"], np.float64)[0]
    spacing = np.abs(old) * float(jnp.finfo(dtype).eps)
    assert np.median(np.abs(step) / spacing) < 0.3
    moved = np.asarray(new["kernel"], np.float64).mean(0) - old
    assert (moved * step).sum() / (step**2).sum() == pytest.approx(1, abs=0.1)


def test_float16_weights_learn():
    ready = made(configs.Dense(size=64, batch_size=16, batches_per_step=400, train=True), "float16")
    assert bench.check_training(ready).errors["gradient"] > 1e-7
    for _ in range(3):
        ready.step()
    losses = bench.summarise_losses(ready)
    assert losses["loss_last"] < 0.9 * losses["loss_first"]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("layer", [DENSE, pytest.param(RNN, marks=SLOW)])
def test_two_replicas_train_as_one_with_twice_the_batch(layer):
    one = made(replace(layer, batch_size=2 * layer.batch_size))
    two = made(replace(layer, replicas=2))
    np.testing.assert_array_equal(one.feed.batch(0)["x"], two.feed.batch(0)["x"])
    start = np.asarray(jax.tree.leaves(one.params)[0])
    assert bench.check_training(two).rows == one.config.batch_size
    (one_losses,), (two_losses,) = one.step(), two.step()
    np.testing.assert_allclose(two_losses, one_losses, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-7)
    moved = np.abs(np.asarray(jax.tree.leaves(one.params)[0]) - start).max()
    assert moved > 1e-4
    shards = [np.asarray(shard.data) for shard in jax.tree.leaves(two.params)[0].addressable_shards]
    np.testing.assert_array_equal(shards[0], shards[1])


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_that_do_not_average_would_be_found_out(monkeypatch):
    monkeypatch.setattr("hotloop.families.kernels.model.lax.pmean", lambda values, axis: values)
    with pytest.raises(WrongResult, match="wrong result, not timed"):
        bench.check_training(made(replace(DENSE, replicas=2)))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_replicas_infer_on_their_own_rows():
    config = configs.Rnn(batch_size=2, timesteps=3, hidden_size=16, batches_per_step=4, replicas=2)
    ready = made(config)
    (last,) = ready.step()
    assert last.shape == (3, 4, 16)
    assert bench.check_inference(ready, [last]).rows == 4


@pytest.mark.parametrize("piece", [1, 2**27])
def test_data_sent_from_the_host_trains_as_data_on_the_device(piece, monkeypatch):
    monkeypatch.setattr("hotloop.families.kernels.data.PIECE_BYTES", piece)
    resident, sent = made(DENSE), made(replace(DENSE, use_generated_data=True))
    assert isinstance(sent.feed, PoolFromHost)
    assert sent.feed.iterations_a_call == (1 if piece == 1 else 5)
    for _ in range(2):
        expected, found = np.concatenate(resident.step()), np.concatenate(sent.step())
        assert found.shape == (5,)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_step_from_the_host_sends_every_batch_anew(monkeypatch):
    sent = made(replace(DENSE, use_generated_data=True, train=False))
    put, numbers = jax.device_put, []

    def counting(leaf, where):
        numbers.append(leaf.shape[0])
        return put(leaf, where)

    monkeypatch.setattr("hotloop.families.kernels.data.jax.device_put", counting)
    (last,) = sent.step()
    assert sum(numbers) == 5
    assert bench.check_inference(sent, [last]).errors["output"] < 1e-6


def test_zero_values_are_zero():
    ready = made(replace(DENSE, use_zero_values=True, train=False))
    assert not np.any(ready.feed.batch(1)["x"])
    (last,) = ready.step()
    assert bench.check_inference(ready, [last]).errors["output"] == 0
