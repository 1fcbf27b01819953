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


def check_weight(name, step):
    """One update ends at the toy's weight, and elsewhere, by hand, with one other label or from another weight."""
    toy = TOYS[name]
    assert step(toy, toy.data) == pytest.approx(float(name), abs=1e-6)
    for other, data in toy.changed:
        assert step(other, data) == pytest.approx(other.step(data), abs=1e-6)
        assert abs(other.step(data) - float(name)) > 1e-2


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 1), (1, 4), (2, 2), (4, 4)])
def test_replicas_and_accumulation_end_at_the_same_weight(name, replicas, accumulation):
    toy = TOYS[name]
    settings = {**SETTINGS, "mesh": device_mesh(replicas) if replicas > 1 else None}

    def loss(params, carry, samples, keys):
        return toy.loss(params["dense"]["w"], samples), (carry, {})

    @jax.jit
    def update(old, data):
        return update_weights(loss, old, data, KEY, KEY, accumulation=accumulation, **settings)[0]

    check_weight(name, lambda toy, data: float(update(start(toy), data).params["dense"]["w"]))


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 4), (2, 2), (2, 8)])
def test_stages_end_at_the_same_weight(name, replicas, accumulation):
    """The second stage has a loss and no weights."""
    mesh, stages = device_mesh(replicas, 2), [times_weight, squared_error]
    for schedule in SCHEDULES if accumulation == 4 else SCHEDULES[:1]:
        settings = {**SETTINGS, "mesh": mesh, "accumulation": accumulation, "schedule": schedule}
        update = jax.jit(partial(update_in_stages, stages, **settings))

        def step(toy, data, update=update):
            old = spread_over_stages(start(toy), [["dense"], []], WIDE, DESCENT, mesh)
            new, figures = update(old, data, KEY, KEY)
            error = np.square(toy.start * data["x"] - data["y"]).mean()
            assert float(figures["loss"]) == pytest.approx(error, rel=1e-6)
            return float(undivided(new).params["dense"]["w"])

        check_weight(name, step)
