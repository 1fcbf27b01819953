"""The toy of the old program's metrics: eight samples 0 .. 7, whose loss and metric are 3.5 however they are split."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from hotloop.engine import processes
from hotloop.engine.device import device_mesh
from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.pipeline import spread_over_stages, update_in_stages
from hotloop.engine.precision import EVERYWHERE, SPLIT, init_trained, parse, update_weights

SAMPLES = np.arange(8, dtype=np.float32)
SPLITS = [(8, 1, 1), (1, 1, 8), (2, 4, 1), (2, 2, 2), (1, 4, 2)]
"""Micro-batch, replicas, accumulation."""


def first(params, carry, values, samples, keys):
    """Of two stages: what crosses is the samples."""
    return samples["x"] + 0 * params["offset"]["x"], (carry, {})


def last(params, carry, values, samples, keys):
    mean = (values * params["scale"]["x"]).mean()
    return mean, (carry, {"loss": mean, "metric": samples["x"].mean()})


def undivided(params, carry, samples, keys):
    values, _ = first(params, carry, None, samples, keys)
    return last(params, carry, values, samples, keys)


POLICY, RESTING = parse("32.32"), optax.sgd(0.0)


def mesh_of(split, stages):
    return device_mesh(split[1], stages) if split[1] * stages > 1 else None


@cache
def three_updates(split, stages):
    """A program of three updates that change nothing."""
    mesh, step = mesh_of(split, stages), partial(update_weights, undivided)
    if stages > 1:
        step = partial(update_in_stages, (first, last), schedule="Interleaved")
    settings = {"policy": POLICY, "optimiser": RESTING, "scale": 1.0, "mesh": mesh, "accumulation": split[2]}

    def update(state, batch, key):
        return step(state, batch, key, key, **settings)

    return Program(update, feed_of(SAMPLES, mesh), 3, jax.random.key(0))


def feed_of(samples, mesh):
    sharding = NamedSharding(mesh, SPLIT) if mesh is not None else None
    return Resident({"x": samples}, len(samples), sharding=sharding)


def losses_and_metrics(split, stages=1, samples=SAMPLES, scale=1.0):
    """Of three updates, as a log would have them, by way of a program."""
    mesh, program = mesh_of(split, stages), three_updates(split, stages)
    params = {"offset": {"x": jnp.zeros(())}, "scale": {"x": jnp.float32(scale)}}
    state = init_trained(POLICY, RESTING, 1.0, params)
    if stages > 1:
        state = spread_over_stages(state, (("offset",), ("scale",)), POLICY, RESTING, mesh)
    elif mesh is not None:
        state = processes.place(state, NamedSharding(mesh, EVERYWHERE))
    program.feed = feed_of(samples, mesh)
    _, metrics = program(state, 0, 3)
    return [metrics[name].tolist() for name in ("loss", "metric")]
