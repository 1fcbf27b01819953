"""hotloop-native's convolutions from several threads and devices at once, over many calls, and on fewer threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from native_calls import Convolution, child, draw

SAME = (1, 1, 1, 1)
SHAPES = [
    (Convolution(pads=SAME), (2, 12, 12, 16), (3, 3, 16, 16)),
    (Convolution(pads=SAME, groups=4), (2, 9, 9, 32), (3, 3, 8, 32)),
    (Convolution((2, 2), SAME), (2, 11, 11, 8), (3, 3, 8, 24)),
    (Convolution(pads=SAME, groups=16), (2, 9, 9, 16), (3, 3, 1, 16)),
]


def repeated(conv, times):
    """A program of `times` steps, each forward and both gradients; every number depends on every call."""

    @jax.jit
    def program(x, kernel):
        def step(_, carried):
            x, kernel = carried
            dx, dkernel = conv.gradients(x, kernel, conv.forward(x, kernel))
            return x - 1e-4 * dx, kernel - 1e-4 * dkernel

        return jax.lax.fori_loop(0, times, step, (x, kernel))

    return program


def test_threads_at_once_have_the_numbers_of_one_after_another():
    programs = [(repeated(conv, 200), draw(0, *shapes)) for conv, *shapes in SHAPES]
    alone = [jax.block_until_ready(program(*arrays)) for program, arrays in programs]
    threads = 2 * len(programs)
    start = Barrier(threads)

    def together(program, arrays):
        start.wait()
        return jax.block_until_ready(program(*arrays))

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(together, *zip(*2 * programs, strict=True)))
    for ours, expected in zip(results, 2 * alone, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_devices_at_once_have_the_numbers_of_one():
    conv, *shapes = SHAPES[0]
    devices = jax.devices("cpu")
    x, kernel = draw(0, (len(devices) * shapes[0][0], *shapes[0][1:]), shapes[1])
    step = jax.shard_map(
        lambda x, kernel: (conv.forward(x, kernel), conv.gradients(x, kernel, x)[1][None]),
        mesh=Mesh(np.array(devices), "images"),
        in_specs=(P("images"), P()),
        out_specs=P("images"),
    )
    y, dkernels = jax.jit(step)(x, kernel)
    for part, y_part, dkernel in zip(
        np.split(x, len(devices)), np.split(y, len(devices)), dkernels, strict=True
    ):
        np.testing.assert_array_equal(y_part, conv.forward(part, kernel))
        np.testing.assert_array_equal(dkernel, conv.gradients(part, kernel, part)[1])


EIGHT = """
import jax
import test_native_threads as tests
assert len(jax.devices()) == 8
tests.test_devices_at_once_have_the_numbers_of_one()
"""


@pytest.mark.slow
def test_eight_devices_and_two_processes_at_once():
    flags = "--xla_force_host_platform_device_count=8"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: child(EIGHT, XLA_FLAGS=flags), range(2)))


GROWTH = """
import test_native_threads as tests
def kilobytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
programs = [(tests.repeated(conv, 1000), tests.draw(0, *shapes)) for conv, *shapes in tests.SHAPES]
def turn():
    for program, arrays in programs:
        tests.jax.block_until_ready(program(*arrays))
for _ in range(20):  # until each of XLA's threads has run each of the programs
    turn()
def growth():
    before = kilobytes()
    for _ in range(9):  # of 4 programs of 1000 steps of 3 calls
        turn()
    return kilobytes() - before
# Where other work holds the cores a thread may run a program late for the first time, which takes its memory once; what
# leaks does so every time.
print(min(growth() for _ in range(3)))
"""


@pytest.mark.alone
def test_memory_does_not_grow_over_a_hundred_thousand_calls():
    grown = int(child(GROWTH))
    assert grown < 1024, f"{grown} KiB more after 108,000 calls"


THREADS = """
import os
import test_native_threads as tests
arrays = [tests.jax.device_put(array) for array in tests.draw(0, *tests.SHAPES[0][1:])]
program = tests.repeated(tests.SHAPES[0][0], 20).lower(*arrays).compile()
before = len(os.listdir("/proc/self/task"))
tests.jax.block_until_ready(program(*arrays))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_threads_are_used_than_xla_has(threads):
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip(f"{threads} cores are needed")
    flags = "--xla_force_host_platform_device_count=1"
    assert int(child(THREADS, XLA_FLAGS=flags, NPROC=str(threads))) == threads - 1
