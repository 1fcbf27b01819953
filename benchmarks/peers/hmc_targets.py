"""The densities on which samplers are compared, over one flat vector or a dict, and what is known of them exactly.

`gaussian`: 50 numbers, correlation 0.9^|i - j|, condition number 302. `schools`: the eight schools, non-centred, mu ~
N(0, 5), tau ~ half-Cauchy(5), sampled as log tau; its exact moments by a grid over (mu, log tau). `logistic`: 1,000
rows of 24 standardised, correlated numbers, eight of them of two values, and a constant, like German credit's, drawn
with a fixed seed; weights ~ N(0, 10); nothing exact is known, so that the peers are compared with ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EFFECTS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


class Target(NamedTuple):
    log_density: Callable[[Any], Any]
    start: Any
    """One position."""
    exact: dict[str, tuple[np.ndarray, np.ndarray]]
    """Name of a leaf -> exact means and variances of it; the only leaf of a flat vector is `x`."""


def gaussian(size: int = 50, correlation: float = 0.9) -> Target:
    covariance = correlation ** np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    precision = jnp.asarray(np.linalg.inv(covariance), jnp.float32)
    return Target(lambda x: -0.5 * x @ precision @ x, jnp.zeros(size), {"x": (np.zeros(size), np.ones(size))})


def schools() -> Target:
    effects, errors = jnp.asarray(EFFECTS, jnp.float32), jnp.asarray(ERRORS, jnp.float32)

    def log_density(p: dict[str, Any]) -> Any:
        tau = jnp.exp(p["log_tau"])
        residual = (effects - p["mu"] - tau * p["z"]) / errors
        likelihood = -0.5 * (residual**2).sum() - 0.5 * (p["z"] ** 2).sum()
        return likelihood - 0.5 * (p["mu"] / 5) ** 2 - jnp.log1p((tau / 5) ** 2) + p["log_tau"]

    return Target(
        log_density, {"log_tau": jnp.zeros(()), "mu": jnp.zeros(()), "z": jnp.zeros(8)}, exact_schools()
    )


def exact_schools() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Means and variances by a grid: given mu and tau, an effect is N(mu, tau^2 + error^2)."""
    mu, log_tau = np.meshgrid(np.linspace(-25, 35, 301), np.linspace(-25, 6, 621), indexing="ij")
    tau2 = np.exp(2 * log_tau)
    weight = -0.5 * (mu / 5) ** 2 - np.log1p(tau2 / 25) + log_tau
    for effect, error in zip(EFFECTS, ERRORS, strict=True):
        weight -= 0.5 * (effect - mu) ** 2 / (tau2 + error**2) + 0.5 * np.log(tau2 + error**2)
    weight = np.exp(weight - weight.max())
    weight /= weight.sum()

    def moments(mean: np.ndarray, variance: np.ndarray | float = 0.0) -> tuple[float, float]:
        first = (weight * mean).sum()
        return first, (weight * (variance + mean**2)).sum() - first**2

    spread = [tau2 + error**2 for error in ERRORS]  # z given the rest: N(tau (y - mu) / s, error^2 / s)
    z = [
        moments(np.exp(log_tau) * (effect - mu) / s, error**2 / s)
        for effect, error, s in zip(EFFECTS, ERRORS, spread, strict=True)
    ]
    found = {"mu": moments(mu), "log_tau": moments(log_tau)}
    exact = {name: (np.array(mean), np.array(variance)) for name, (mean, variance) in found.items()}
    return {**exact, "z": (np.array([mean for mean, _ in z]), np.array([variance for _, variance in z]))}


def logistic(rows: int = 1000, size: int = 25) -> Target:
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(rows, size - 1))
    inputs += draw.normal(size=(rows, 4)) @ draw.normal(scale=0.5, size=(4, size - 1))
    inputs[:, ::3] = inputs[:, ::3] > 0.7
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    inputs = np.concatenate([np.ones((rows, 1)), inputs], 1)
    likely = 1 / (1 + np.exp(-inputs @ draw.normal(scale=0.5, size=size)))
    signs = np.where(draw.random(rows) < likely, 1.0, -1.0)
    signed = jnp.asarray(inputs * signs[:, None], jnp.float32)

    def log_density(weights: Any) -> Any:
        return jax.nn.log_sigmoid(signed @ weights).sum() - 0.5 * (weights**2).sum() / 100

    return Target(log_density, jnp.zeros(size), {})


TARGETS = {"gaussian": gaussian, "schools": schools, "logistic": logistic}
