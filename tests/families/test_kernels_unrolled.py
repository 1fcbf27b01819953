"""Tiny kernels are written out several times in a turn of an accelerator's loop, and each of them is computed whole."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from hotloop.families.kernels import bench
from hotloop.families.kernels import config as configs


def job_on(platform, config):
    job = bench.make_job(config, jax.devices("cpu")[0])
    return replace(job, device=SimpleNamespace(platform=platform))


@pytest.mark.parametrize(
    ("platform", "config", "unroll"),
    [
        ("gpu", configs.Dense(), bench.UNROLLED),
        ("cpu", configs.Dense(), 1),
        ("gpu", configs.Lstm(batch_size=256, timesteps=25, hidden_size=1024, fused=True), 1),
    ],
    ids=["tiny", "on a CPU", "large"],
)
def test_a_turn_of_the_loop_has_several_iterations_of_tiny_kernels_alone(platform, config, unroll):
    assert bench._unroll(job_on(platform, config)) == unroll


def test_the_whole_output_of_every_iteration_is_asked_for():
    """Without a barrier the compiler would work out the one number of an output that is looked at, where other
    iterations follow in the same turn: on a GPU a convolution took a quarter of its time so."""
    config = configs.Dense(batch_size=4, size=8, batches_per_step=8, dtype="float32")
    made = bench.prepare(bench.make_job(config, jax.devices("cpu")[0]))
    text = made.program.lower(made.state).as_text()
    assert re.search(r"optimization_barrier %\S+ : tensor<4x8xf32>", text)
