"""A layer benchmark made ready: devices, number type, parameters, data and the compiled loop.

It decides where and in what type; nothing is checked or timed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hotloop.engine.device import REPLICA, pick_device, replica_mesh
from hotloop.engine.keys import stream
from hotloop.errors import OptionError
from hotloop.families.kernels import program
from hotloop.families.kernels.config import Layer
from hotloop.families.kernels.data import FromHost, OnDevice, Place, make_pool
from hotloop.families.kernels.kernel import Kernel
from hotloop.families.kernels.program import Program

AUTO_DTYPE = {"gpu": "float16", "tpu": "bfloat16", "cpu": "float32"}


@dataclass
class Bench:
    """A benchmark ready to run: what stays the same, and the state that goes from call to call."""

    config: Layer
    kernel: Kernel
    place: Place
    dtype: str
    key: Array
    feed: OnDevice | FromHost
    params: Any
    count: Array
    program: Program
    losses: list[Array] = field(default_factory=list)
    """Of every update so far, call by call, when it trains."""

    def step(self) -> Sequence[Array]:
        """One step of `batches_per_step` iterations, finished when this returns."""
        self.params, self.count, results = self.feed.step(self.program, self.params, self.count)
        for result in results:
            result.block_until_ready()
        if self.config.train:
            self.losses += results
        return results


def find_place(config: Layer, device: jax.Device) -> Place:
    """The devices that the options ask for, or an error before anything is compiled."""
    if config.replicas > 1:
        return Place(device, replica_mesh(config.replicas, device.platform))
    return Place(pick_device(config.device_id, device.platform), None)


def choose_dtype(config: Layer, device: jax.Device) -> str:
    """The number type: as given, or what suits the platform."""
    dtype = AUTO_DTYPE.get(device.platform, "float32") if config.dtype == "auto" else config.dtype
    if config.enable_half_partials and dtype == "float32":
        raise OptionError("--enable-half-partials: needs 16-bit numbers; use --dtype float16 or bfloat16")
    return dtype


def prepare(config: Layer, kernel: Kernel, place: Place, dtype: str) -> Bench:
    """Parameters, data and the compiled loop, all in their places."""
    key = jax.random.key(config.seed)
    params = jax.device_put(kernel.init(stream(key, "init", 0), dtype), place.everywhere())
    count = jax.device_put(jnp.uint32(0), place.everywhere())
    pool = make_pool(kernel, config, dtype)
    source = FromHost if config.use_generated_data else OnDevice
    feed = source(pool, config.batches_per_step, place.pool(kernel, pool))
    compiled = compile_loop(
        config, kernel, place, dtype, key, (params, count, feed.pool), feed.iterations_a_call
    )
    return Bench(config, kernel, place, dtype, key, feed, params, count, compiled)


def compile_loop(
    config: Layer, kernel: Kernel, place: Place, dtype: str, key: Array, arguments: Any, iterations: int
) -> Program:
    """The timed call with so many iterations."""
    if config.train:
        axis = REPLICA if place.mesh else None
        call = program.training(kernel, iterations, config.learning_rate, stream(key, "rounding", 0), axis)
        spec = program.P0
    else:
        call, spec = program.inference(kernel, iterations), program.rows_on(kernel.row_axes["y"])
    with program.arithmetic(dtype, config.enable_half_partials, place.device.platform):
        return program.compile_call(call, arguments, kernel, place.mesh, spec)
