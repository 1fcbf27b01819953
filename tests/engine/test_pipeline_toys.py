"""The old program's two toys, y = 2 x and y = 0, end at 3.0 and 0.3111111 however a batch and its model are split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from weight_toys import TOYS

from hotloop.engine.device import device_mesh
from hotloop.engine.pipeline import SCHEDULES, spread_over_stages, update_in_stages
from hotloop.engine.precision import init_trained, parse, update_weights
from hotloop.engine.stage_rows import undivided

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
WIDE, DESCENT, KEY = parse("32.32"), optax.sgd(1.0), jax.random.key(0)
SETTINGS = {"policy": WIDE, "optimiser": DESCENT, "scale": 1.0}


def times_weight(params, carry, values, samples, keys):
    return samples["x"] * params["dense"]["w"], (carry, {})


def squared_error(params, carry, values, samples, keys):
    error = jnp.square(values - samples["y"]).mean()
    return error, (carry, {"loss": error})


def start(toy):
    assert (toy.rate, toy.share) == (1, 1)
    return init_trained(WIDE, DESCENT, 1.0, {"dense": {"w": jnp.float32(toy.start)}})


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 1), (1, 4), (2, 2), (4, 4)])
def test_replicas_and_accumulation_end_at_the_same_weight(name, replicas, accumulation):
    toy = TOYS[name]
    settings = {**SETTINGS, "mesh": device_mesh(replicas) if replicas > 1 else None}

    def loss(params, carry, samples, keys):
        return toy.loss(params["dense"]["w"], samples), (carry, {})

    @jax.jit
    def update(old):
        return update_weights(loss, old, toy.data, KEY, KEY, accumulation=accumulation, **settings)[0]

    assert float(update(start(toy)).params["dense"]["w"]) == pytest.approx(float(name), abs=1e-6)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 4), (2, 2), (2, 8)])
def test_stages_end_at_the_same_weight(name, replicas, accumulation):
    """The second stage has a loss and no weights."""
    toy, mesh, stages = TOYS[name], device_mesh(replicas, 2), [times_weight, squared_error]
    old = spread_over_stages(start(toy), [["dense"], []], WIDE, DESCENT, mesh)
    for schedule in SCHEDULES if accumulation == 4 else SCHEDULES[:1]:
        settings = {**SETTINGS, "mesh": mesh, "accumulation": accumulation, "schedule": schedule}
        update = jax.jit(partial(update_in_stages, stages, **settings))
        new, figures = update(old, toy.data, KEY, KEY)
        assert float(undivided(new).params["dense"]["w"]) == pytest.approx(float(name), abs=1e-6)
        error = np.square(toy.start * toy.data["x"] - toy.data["y"]).mean()
        assert float(figures["loss"]) == pytest.approx(error, rel=1e-6)
