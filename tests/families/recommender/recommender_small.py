"""A recommender of any widths for tests: the same job with other layers, ratings drawn by numpy, float64 throughout."""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest

from hotloop.engine import precision
from hotloop.families.recommender import model

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""For programs that run a few times: most of a test's time is the compiler's."""


@dataclass(frozen=True)
class Small(model.Job):
    """A job with widths of its own."""

    widths: tuple[int, ...] = (6,)

    @property
    def layers(self):
        return self.widths


def ratings(users, items, seed=0, share=0.4):
    """Dense ratings 1 .. 5, zero where there is none."""
    generator = np.random.default_rng(seed)
    there = generator.random((users, items)) < share
    return np.where(there, generator.integers(1, 6, (users, items)), 0).astype(np.float32)


def with_params(job, params):
    """A state with these weights and nothing remembered."""
    slots = jax.eval_shape(model.optimiser(job.net).init, params)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), slots)
    return {"params": params, "optimiser": zeros, "update": np.int32(0)}


@pytest.fixture
def float64(monkeypatch):
    """Updates in float64: what is kept and computed in float32 is widened."""
    monkeypatch.setattr(precision, "FLOAT32", np.dtype(np.float64))
    with jax.enable_x64(True):
        yield
