"""What the blocks of a persistent kernel publish and wait for, counted.

A block that waits for more than is published would hang a card, and one that waits for less would read what is not yet
there. Pallas' interpreter knows no semaphores; here a block's program runs as Python, its numbers all zero.
"""

from collections import defaultdict
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import pytest

from hotloop.layers import paths
from hotloop.layers.persistent_tiles import ROWS, Tile

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < paths.CARD_JAX, reason="kernels are built with jax 0.11.2 or later"
)
T, UNITS, SLICES = 4, 8, 16
CELLS = pytest.mark.parametrize("cell", ["rnn", "gru", "gru_reset_after", "lstm"])
WAYS = pytest.mark.parametrize("way", ["forward from zero", "forward from a state", "backward"])


class Chain:
    """Of a block; it notes what it is asked to do in the order in which it is."""

    rows = units = number = peer = tile_number = 0

    def __init__(self, tile, grid, scratch, exchanges=1):
        self.done = []

    def gate(self, number, hidden):
        return 0

    def fetch(self, source, shared_tile, barrier):
        pass

    def write(self, pairs):
        pass

    def publish(self, pairs, exchange=0, again=()):
        self.done.append(("publish", exchange))

    def wait(self, steps, exchange=0):
        self.done.append(("wait", exchange, int(steps)))

    def product(self, part, parts, weights, columns):
        return jnp.zeros((ROWS, columns))

    def send(self, sums):
        self.done.append(("share", sums.shape))

    def collect(self, sums):
        self.send(sums)
        return sums

    def read(self, tile):
        return jnp.zeros((ROWS, UNITS))


def make_program(monkeypatch, cell, way):
    """That of a chain, for the block that works out its gates and the one that helps with its products."""
    from hotloop.layers import persistent_backward, persistent_forward

    module = persistent_backward if way == "backward" else persistent_forward
    monkeypatch.setattr(module, "Chain", Chain)
    monkeypatch.setattr(module, "plgpu", MagicMock())
    module.plgpu.load.return_value = jnp.zeros(UNITS)
    shape = (cell, Tile(UNITS, 64, 2, 64, 2, 2), T, 128, UNITS * SLICES, jnp.float16)
    if way == "backward":
        return module._Backward(module.Job(*shape, True), defaultdict(MagicMock), defaultdict(MagicMock))
    job = module.Job(*shape, way == "forward from a state", True)
    return module._Forward(job, defaultdict(MagicMock), defaultdict(MagicMock))


def list_work(program, of_owner):
    with jax.disable_jit():
        (program._own if of_owner else program._help)()
    return program.chain.done


@WAYS
@CELLS
def test_a_block_waits_for_all_that_was_published_and_never_for_more(monkeypatch, cell, way):
    """All blocks do the same, so what one has published by then is what each will have."""
    published, waits = [0, 0], 0
    for kind, exchange, *steps in list_work(make_program(monkeypatch, cell, way), of_owner=True):
        if kind == "publish":
            published[exchange] += 1
        elif kind == "wait":
            waits += 1
            assert steps == [published[exchange]] != [0]
    resets = {"gru": T - (way == "forward from zero")}.get(cell, 0)
    assert published == [T, resets] and waits == T - 1 + resets


@WAYS
@CELLS
def test_a_block_that_helps_waits_for_the_same_and_sends_each_share_that_is_collected(monkeypatch, cell, way):
    owner, helper = (list_work(make_program(monkeypatch, cell, way), of_owner) for of_owner in (True, False))
    assert helper == [done for done in owner if done[0] != "publish"]
    assert any(done[0] == "share" for done in helper)
