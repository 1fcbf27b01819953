"""Batch-norm statistics: any split equals the undivided batch, in a stream and across replicas; the seed's rule too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from hotloop.engine.device import REPLICA, device_mesh
from hotloop.engine.plan import Batch
from hotloop.engine.precision import centre_and_spread
from hotloop.families.cnn.model import (
    RunningStatistics,
    add_statistics,
    count_values,
    finish_statistics,
    move_statistics,
)
from hotloop.families.cnn.network import NormChoice, build

TOTAL, CHANNELS = 24, 3
DIVISORS = [n for n in range(1, TOTAL + 1) if TOTAL % n == 0]
ADD = jax.jit(add_statistics)


def start_statistics(like):
    return RunningStatistics(jnp.int32(0), jax.tree.map(jnp.zeros_like, like))


def drawn(seed: int, offset: float = 0.0, values: int = TOTAL) -> np.ndarray:
    """Values [N, C] of channels with different means and widths."""
    draw = np.random.default_rng(seed).normal(size=(values, CHANNELS))
    return draw * [1.0, 0.1, 5.0] + [0.0, 2.0, -1.0] + offset


def parts_of(x: np.ndarray, accumulation: int, copies: int, kind=np.float64) -> dict:
    """Statistics of every part, stacked as [accumulation, replicas, C], biased, computed in doubles."""
    split = x.reshape(accumulation, copies, -1, CHANNELS)
    return {"bn": {"mean": split.mean(2).astype(kind), "variance": split.var(2).astype(kind)}}


def streamed(parts: dict, rule) -> dict:
    """Added up one micro-batch after another in a compiled scan, then across replicas along a mapped axis."""

    def replica(parts):
        like = jax.tree.map(lambda leaf: leaf[0], parts)
        running, _ = lax.scan(
            lambda running, part: (add_statistics(running, part, rule), None), start_statistics(like), parts
        )
        return finish_statistics(*centre_and_spread(running, REPLICA))

    mapped = jax.vmap(replica, in_axes=1, axis_name=REPLICA)
    results = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})(parts)
    return jax.tree.map(lambda leaf: leaf[0], results)


def close(result: dict, mean, variance, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(result["bn"]["mean"], mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(result["bn"]["variance"], variance, rtol=rtol)


@given(st.sampled_from(DIVISORS), st.integers(0, 99))
def test_micro_batches_of_any_size_have_the_statistics_of_the_undivided_batch(accumulation, seed):
    x = drawn(seed)
    parts = parts_of(x, accumulation, 1)
    with jax.enable_x64(True):
        running = start_statistics(jax.tree.map(lambda leaf: leaf[0, 0], parts))
        for n in range(accumulation):
            running = ADD(running, jax.tree.map(lambda leaf, n=n: leaf[n, 0], parts))
        close(finish_statistics(*centre_and_spread(running, None)), x.mean(0), x.var(0))


@pytest.mark.parametrize("split", [(1, 1), (6, 1), (1, 4), (3, 4)])
def test_any_split_over_replicas_has_the_statistics_of_the_undivided_batch(split):
    x = drawn(1)
    with jax.enable_x64(True):
        close(streamed(parts_of(x, *split), "spread"), x.mean(0), x.var(0))


def seeds_rule(x: np.ndarray, accumulation: int, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """The old program's moving variance: unbiased ones averaged, made biased, spread over replicas, unbiased."""
    split = x.reshape(accumulation, copies, -1, CHANNELS)
    n = split.shape[2]
    means, variances = split.mean(2).mean(0), split.var(2, ddof=1).mean(0) * (n - 1) / n
    together = (variances + (means - means.mean(0)) ** 2).mean(0)
    return means.mean(0), together * (copies * n) / (copies * n - 1)


@pytest.mark.parametrize("split", [(1, 1), (6, 1), (1, 4), (3, 4)])
def test_the_seeds_rule_leaves_out_the_spread_between_micro_batches_alone(split):
    x, accumulation = drawn(2), split[0]
    mean, unbiased = seeds_rule(x, *split)
    values = TOTAL // accumulation
    old = {"bn": {"mean": np.zeros(CHANNELS), "variance": np.ones(CHANNELS)}}
    with jax.enable_x64(True):
        merged = streamed(parts_of(x, *split), "seed")
        close(merged, mean, unbiased * (values - 1) / values)
        close(move_statistics(old, merged, 0.9, {"bn": values}), 0.1 * mean, 0.9 + 0.1 * unbiased)
        assert np.allclose(merged["bn"]["variance"], x.var(0)) == (accumulation == 1)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_float32_keeps_its_digits_where_means_are_far_from_zero(offset):
    x = drawn(3, offset, 64 * 32).astype(np.float32).astype(np.float64)
    parts = parts_of(x, 64, 1, np.float32)
    # The means of the parts are themselves rounded, to 6e-5 at 1000; E[x^2] - E[x]^2 would be wrong by 0.06.
    tolerance = 2e-6 if offset == 0 else 2e-4
    close(streamed(parts, "spread"), x.mean(0), x.var(0), tolerance)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_replicas_on_devices_agree_with_the_undivided_batch():
    x = drawn(4)
    parts = jax.tree.map(lambda leaf: leaf[0], parts_of(x, 1, 4, np.float32))

    def replica(part):
        one = jax.tree.map(lambda leaf: leaf[0], part)
        return finish_statistics(*centre_and_spread(add_statistics(start_statistics(one), one), REPLICA))

    merged = jax.jit(jax.shard_map(replica, mesh=device_mesh(4), in_specs=P(REPLICA), out_specs=P()))(parts)
    close(merged, x.mean(0), x.var(0), 1e-5)


def test_statistics_move_once_with_the_unbiased_variance():
    old = {"bn": {"mean": np.full(CHANNELS, 2.0), "variance": np.full(CHANNELS, 3.0)}}
    x = drawn(5)
    with jax.enable_x64(True):
        new = move_statistics(old, {"bn": {"mean": x.mean(0), "variance": x.var(0)}}, 0.97, {"bn": TOTAL})
    close(new, 0.97 * 2 + 0.03 * x.mean(0), 0.97 * 3 + 0.03 * x.var(0, ddof=1))


def test_a_single_value_has_the_variance_zero_and_no_division_by_zero():
    x = drawn(6, values=1)
    old = {"bn": {"mean": np.zeros(CHANNELS), "variance": np.ones(CHANNELS)}}
    with jax.enable_x64(True):
        close(
            move_statistics(old, {"bn": {"mean": x.mean(0), "variance": x.var(0)}}, 0.5, {"bn": 1}),
            0.5 * x.mean(0),
            0.5,
        )


def test_counts_are_the_samples_of_an_update_times_the_positions_of_a_layer():
    network = build("toy_model_bn", (32, 32, 3), 10)
    _, statistics = jax.eval_shape(network.init, jax.random.key(0))
    shapes = {info.name: info.shape for info in network.nodes}
    batch = Batch(micro=8, replicas=2, accumulation=3)
    for rule, samples in (("spread", 48), ("seed", 16)):
        found = count_values(network, batch, rule)
        assert found == {name: samples * shapes[name][0] * shapes[name][1] for name in statistics}


def test_a_network_without_batch_norm_has_nothing_to_merge():
    network = build("toy_model_bn", (32, 32, 3), 10, NormChoice("group", groups=2))
    found = count_values(network, Batch(micro=8))
    assert (
        found
        == finish_statistics(*centre_and_spread(add_statistics(start_statistics({}), {}), None))
        == move_statistics({}, {}, 0.9, found)
        == {}
    )


def test_every_split_of_a_batch_into_accumulation_gives_the_networks_own_statistics():
    """The first norm layer sees the same values in any split: its statistics must agree with the whole batch's."""
    network = build("toy_model_bn", (32, 32, 3), 10)
    params, statistics = network.init(jax.random.key(0))
    images = np.random.default_rng(7).normal(size=(12, 32, 32, 3)).astype(np.float32)

    @jax.jit
    def accumulated(images):
        def body(running, micro):
            return add_statistics(running, network.apply(params, statistics, micro, train=True)[1]), None

        running, _ = lax.scan(body, start_statistics(statistics), images)
        return finish_statistics(*centre_and_spread(running, None))["bn_0"]

    whole, split = accumulated(images[None]), accumulated(images.reshape(4, 3, 32, 32, 3))
    for name in ("mean", "variance"):
        np.testing.assert_allclose(split[name], whole[name], rtol=2e-5, atol=1e-6)
    assert jnp.all(whole["variance"] > 0)
