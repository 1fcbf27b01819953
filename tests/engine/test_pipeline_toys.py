"""The old program's two toys, y = 2 x and y = 0, end at 3.0 and 0.3111111 however a batch and its model are split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hotloop.engine.device import device_mesh
from hotloop.engine.pipeline import SCHEDULES, spread_over_stages, update_in_stages
from hotloop.engine.precision import init_trained, parse, update_weights
from hotloop.engine.stage_rows import undivided

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
WIDE, DESCENT, KEY = parse("32.32"), optax.sgd(1.0), jax.random.key(0)
TOYS = {
    3.0: {"x": np.ones(16, np.float32), "y": np.full(16, 2, np.float32)},
    0.3111111: {"x": np.linspace(0, 1, 16, dtype=np.float32), "y": np.zeros(16, np.float32)},
}
"""By the weight that one step of size 1 from 1 leads to, with the squared error as loss."""


def times_weight(params, carry, values, samples, keys):
    return samples["x"] * params["dense"]["w"], (carry, {})


def squared_error(params, carry, values, samples, keys):
    error = jnp.square(values - samples["y"]).mean()
    return error, (carry, {"loss": error})


def whole_loss(params, carry, samples, keys):
    return squared_error(params, carry, times_weight(params, carry, None, samples, keys)[0], samples, keys)


SETTINGS = {"policy": WIDE, "optimiser": DESCENT, "scale": 1.0}


def start():
    return init_trained(WIDE, DESCENT, 1.0, {"dense": {"w": jnp.float32(1)}})


@pytest.mark.parametrize("weight", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 1), (1, 4), (2, 2), (4, 4)])
def test_replicas_and_accumulation_end_at_the_same_weight(weight, replicas, accumulation):
    mesh = device_mesh(replicas) if replicas > 1 else None
    settings = {**SETTINGS, "mesh": mesh, "accumulation": accumulation}
    new, _ = jax.jit(lambda old, batch: update_weights(whole_loss, old, batch, KEY, KEY, **settings))(
        start(), TOYS[weight]
    )
    assert float(new.params["dense"]["w"]) == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize("weight", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 4), (2, 2), (2, 8)])
def test_stages_end_at_the_same_weight(weight, replicas, accumulation):
    """The second stage has a loss and no weights."""
    mesh, stages = device_mesh(replicas, 2), [times_weight, squared_error]
    old = spread_over_stages(start(), [["dense"], []], WIDE, DESCENT, mesh)
    for schedule in SCHEDULES if accumulation == 4 else SCHEDULES[:1]:
        settings = {**SETTINGS, "mesh": mesh, "accumulation": accumulation, "schedule": schedule}
        new, figures = jax.jit(
            lambda old, batch, settings=settings: update_in_stages(stages, old, batch, KEY, KEY, **settings)
        )(old, TOYS[weight])
        assert float(undivided(new).params["dense"]["w"]) == pytest.approx(weight, abs=1e-6)
        assert float(figures["loss"]) == pytest.approx(
            np.square(TOYS[weight]["x"] - TOYS[weight]["y"]).mean(), rel=1e-6
        )
