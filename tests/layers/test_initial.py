"""Initial values: variance, independence, rounding, and the time a ResNet-50 takes to start."""

import subprocess
import sys
import time
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from hotloop.layers.initial import Spec, constant, draw, glorot_uniform, he_normal


def resnet50_specs() -> dict[str, Spec]:
    """Every parameter of ResNet-50 for 1000 classes: kernels, batch-norm scales and shifts, the last layer."""
    specs: dict[str, Spec] = {}

    def conv(name: str, k: int, inputs: int, outputs: int) -> None:
        specs[name] = he_normal((k, k, inputs, outputs))
        specs[name + ".scale"] = constant((outputs,), 1.0)
        specs[name + ".shift"] = constant((outputs,))

    conv("stem", 7, 3, 64)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            name = f"stage{stage}.block{block}"
            conv(name + ".in", 1, inputs, width)
            conv(name + ".mid", 3, width, width)
            conv(name + ".out", 1, width, 4 * width)
            if block == 0:
                conv(name + ".skip", 1, inputs, 4 * width)
            inputs = 4 * width
    specs["head.kernel"] = glorot_uniform((2048, 1000))
    specs["head.bias"] = constant((1000,))
    return specs


def test_the_list_is_resnet50() -> None:
    assert sum(prod(spec.shape) for spec in resnet50_specs().values()) == 25_557_032


def test_resnet50_starts_in_under_four_seconds_in_a_fresh_process() -> None:
    script = (
        "import time, sys, jax; sys.path.insert(0, sys.argv[1]); from test_initial import resnet50_specs, draw\n"
        "key = jax.random.key(0); specs = resnet50_specs(); jax.block_until_ready(jax.numpy.zeros(1) + 1)\n"
        "start, cpu = time.perf_counter(), time.process_time()\n"
        "jax.block_until_ready(draw(key, specs))\n"
        "print(min(time.perf_counter() - start, time.process_time() - cpu))"
    )
    here = __file__.rsplit("/", 1)[0]
    answer = subprocess.run([sys.executable, "-c", script, here], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 4.0
