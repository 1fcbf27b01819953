"""What an update in stages takes of a device's memory, by the compiler's own account; and that large sums are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from hotloop.engine import optim
from hotloop.engine.device import REPLICA, STAGE, device_mesh
from hotloop.engine.pipeline import spread_over_stages, update_in_stages
from hotloop.engine.precision import init_trained, parse

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
WIDE, KEY = parse("32.32"), jax.random.key(0)
MOMENTUM = optim.make("sgd", {"momentum": 0.9})
STAGES, SIZE, WIDTH = 3, 16, 1024


def layer(number):
    """The last stage alone has a large weight, so that a device's share is plain to see."""

    def stage(params, carry, values, samples, keys):
        x = jnp.tanh((samples["x"] if values is None else values) * params[str(number)]["scale"])
        if number < STAGES - 1:
            return x, (carry, {})
        loss = jnp.square(x @ params[str(number)]["kernel"]).mean()
        return loss, (carry, {"loss": loss})

    return stage


def measure(schedule, count):
    """The compiler's account of one update of `count` micro-batches, and the bytes of parameters and slots."""
    params = {str(number): {"scale": jnp.ones(WIDTH)} for number in range(STAGES)}
    params["2"]["kernel"] = jnp.ones((WIDTH, 8))
    mesh = device_mesh(1, STAGES)
    whole = init_trained(WIDE, MOMENTUM, 1.0, params)
    old = spread_over_stages(whole, list("012"), WIDE, MOMENTUM, mesh)
    settings = {"policy": WIDE, "optimiser": MOMENTUM, "scale": 1.0, "mesh": mesh, "rate": 0.1}
    stages = [layer(number) for number in range(STAGES)]

    def update(old, batch):
        counts = {"accumulation": count, "schedule": schedule}
        return update_in_stages(stages, old, batch, KEY, KEY, **settings, **counts)

    batch = {"x": jax.ShapeDtypeStruct((count * SIZE, WIDTH), np.float32)}
    compiled = jax.jit(update, donate_argnums=0).lower(old, batch).compile()
    return compiled.memory_analysis(), batch["x"].size * 4


def test_interleaved_takes_less_than_grouped_and_grouped_the_same_for_any_number_of_micro_batches():
    crossing = SIZE * WIDTH * 4
    temporary = {
        (schedule, count): measure(schedule, count)[0].temp_size_in_bytes
        for schedule, count in (("Grouped", 12), ("Grouped", 128), ("Interleaved", 12), ("Sequential", 12))
    }
    # Rings of 6 values and 5 gradients against 3 and 1, and against 1 and 1.
    saved = temporary["Grouped", 12] - temporary["Interleaved", 12]
    assert 0.8 * 7 * crossing < saved < 1.5 * 7 * crossing
    assert temporary["Sequential", 12] < temporary["Interleaved", 12]
    assert abs(temporary["Grouped", 128] - temporary["Grouped", 12]) < 0.02 * temporary["Grouped", 12]


def test_parameters_and_slots_of_a_device_are_the_largest_stages_share():
    found, batch = measure("Sequential", 2)
    largest = 2 * 4 * (WIDTH + 8 * WIDTH)  # a parameter and a slot each
    assert largest <= found.argument_size_in_bytes - batch <= 1.02 * largest
    assert found.alias_size_in_bytes >= 0.98 * largest  # the state is donated


@pytest.mark.parametrize("axes", [REPLICA, STAGE, (REPLICA, STAGE)])
def test_sums_over_devices_are_right_for_chunks_of_4_mib(axes):
    """A sum that scatters its result has given wrong numbers for large chunks without a word; `psum` must not."""
    mesh = device_mesh(2, 2)
    elements = 2**20 + 3
    rng = np.random.default_rng(0)
    parts = rng.integers(-1000, 1000, (2, 2, elements)).astype(np.float32)

    def add(part):
        return lax.psum(part, axes)

    where = PartitionSpec(REPLICA, STAGE)
    found = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=where, out_specs=where))(parts)
    along = {REPLICA: 0, STAGE: 1, (REPLICA, STAGE): (0, 1)}[axes]
    expected = np.broadcast_to(parts.sum(along, keepdims=True), parts.shape)
    np.testing.assert_array_equal(found, expected)
    assert np.abs(expected).max() > 1000
