"""The toy of the old program's metrics: eight samples 0 .. 7, whose loss and metric are 3.5 however they are split."""

from functools import partial

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


def losses_and_metrics(split, stages=1, samples=SAMPLES, scale=1.0):
    """Of three updates that change nothing, as a log would have them, by way of a program."""
    _, replicas, accumulation = split
    mesh = device_mesh(replicas, stages) if replicas * stages > 1 else None
    policy, optimiser = parse("32.32"), optax.sgd(0.0)
    params = {"offset": {"x": jnp.zeros(())}, "scale": {"x": jnp.float32(scale)}}
    state, step = init_trained(policy, optimiser, 1.0, params), partial(update_weights, undivided)
    if stages > 1:
        state = spread_over_stages(state, (("offset",), ("scale",)), policy, optimiser, mesh)
        step = partial(update_in_stages, (first, last), schedule="Interleaved")
    elif mesh is not None:
        state = processes.place(state, NamedSharding(mesh, EVERYWHERE))

    def update(state, batch, key):
        return step(
            state,
            batch,
            key,
            key,
            policy=policy,
            optimiser=optimiser,
            scale=1.0,
            mesh=mesh,
            accumulation=accumulation,
        )

    sharding = NamedSharding(mesh, SPLIT) if mesh is not None else None
    program = Program(update, Resident({"x": samples}, len(samples), sharding=sharding), 3, jax.random.key(0))
    _, metrics = program(state, 0, 3)
    return [metrics[name].tolist() for name in ("loss", "metric")]
