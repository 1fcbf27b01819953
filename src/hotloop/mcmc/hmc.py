"""Hamiltonian Monte Carlo: `sample` draws from any log density over a pytree; its parts stand on their own.

>>> import jax, jax.numpy as jnp
>>> from hotloop import hmc
>>> def log_density(position):
...     return -0.5 * ((position["a"] - 3) ** 2 + (position["b"] ** 2).sum() / 4)
>>> start = {"a": 0.0, "b": jnp.zeros(2)}
>>> result = hmc.sample(log_density, start, key=jax.random.key(0), chains=100, warmup=200, samples=100)
>>> result.samples["b"].shape, round(float(result.samples["a"].mean()), 1), result.divergences
((100, 100, 2), 3.0, 0)
>>> bool(result.diagnose().r_hat["a"] < 1.01)
True

With a `folder` a sampling that was stopped can be resumed. `Sampler` compiles once for many keys. `kernel`,
`transition`, `init` and their types are single HMC steps over rows [chains, z] for a loop of one's own
(mcmc/kernel.py); `r_hat`, `ess_bulk` and `ess_tail` take draws [chains, draws] of one number, whatever made them.
docs/hmc.md explains all of it.
"""

from hotloop.mcmc.diagnostics import ess_bulk, ess_tail, r_hat
from hotloop.mcmc.kernel import (
    UNROLLED_LEAPFROGS,
    Info,
    Kernel,
    LogDensity,
    State,
    Transition,
    ValueAndGradient,
    adaptation,
    energy,
    gradient_of,
    init,
    kernel,
    leapfrog,
    metropolis,
    transition,
)
from hotloop.mcmc.result import Diagnosis, Result, Seconds
from hotloop.mcmc.sampler import Sampler, sample

__all__ = [
    "UNROLLED_LEAPFROGS",
    "Diagnosis",
    "Info",
    "Kernel",
    "LogDensity",
    "Result",
    "Sampler",
    "Seconds",
    "State",
    "Transition",
    "ValueAndGradient",
    "adaptation",
    "energy",
    "ess_bulk",
    "ess_tail",
    "gradient_of",
    "init",
    "kernel",
    "leapfrog",
    "metropolis",
    "r_hat",
    "sample",
    "transition",
]
