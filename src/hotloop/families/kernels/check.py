"""A kernel's numbers against the float64 reference, before it may be timed.

Errors are norms of differences relative to the reference's norm. Rows are independent, so an output is
compared on as many rows as a budget of operations allows; an update is compared on a batch that repeats a
few rows, which has the same mean loss and gradients as those rows alone while the compiled program keeps its
full shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from hotloop.errors import WrongResult
from hotloop.families.kernels import model
from hotloop.families.kernels.data import PoolOnDevice
from hotloop.families.kernels.model import Job, State
from hotloop.families.kernels.reference import in_float64

REFERENCE_FLOPS = 4e9  # about a second of float64 on one core
BOUNDS = {
    "float32": {"output": 1e-5, "gradient": 1e-5, "parameters": 1e-6},
    "float16": {"output": 2e-3, "gradient": 5e-3, "parameters": 5e-4},
    "bfloat16": {"output": 1.6e-2, "gradient": 4e-2, "parameters": 4e-3},
    "float16 partials": {"output": 2e-2, "gradient": 5e-2, "parameters": 5e-4},
    "bfloat16 partials": {"output": 1.6e-1, "gradient": 4e-1, "parameters": 4e-3},
}
"""The largest relative error of each result that is still a correct kernel; a loss is held to the output's.
float32 is summed in float32 on every device (never TF32). 16-bit types round each layer's result to 2^-11 or
2^-8; chains of layers and steps add up a few such roundings, and gradients run along the chain twice. With half
partials the sums themselves are rounded at each of up to thousands of terms. Parameters are those after one update,
off by their own stochastic rounding: in the mean square half a gap at most."""


STEP_ERROR = 1e-3
"""What an optimiser that divides by roots or orthogonalises may add, as a share of its step: near a gradient of zero
float32 and float64 part."""


@dataclass(frozen=True)
class CheckResult:
    """What was compared, how far it was off, and how far it may be."""

    rows: int
    of_rows: int
    errors: Mapping[str, float]
    bounds: Mapping[str, float]

    def __str__(self) -> str:
        errors = ", ".join(
            f"{name} {error:.1e} (limit {self.bounds[name]:g})" for name, error in self.errors.items()
        )
        return f"checked against float64 on {self.rows} of {self.of_rows} rows: relative error {errors}"


def check_inference(job: Job, state: State, feed: PoolOnDevice) -> CheckResult:
    """The timed program's own last output against the reference's, on rows spread over the batch."""
    kernel, y = job.kernel, np.asarray(state["y"])
    x = feed.at(int(state["count"]) - 1)["x"]
    total = x.shape[kernel.row_axes["x"]]
    rows = max(1, min(total, int(REFERENCE_FLOPS / _flops_of_row(job, total))))
    chosen = np.unique(np.linspace(0, total - 1, rows).round().astype(int))
    expected = in_float64(kernel.reference_apply, state["params"], x.take(chosen, kernel.row_axes["x"]))
    error = relative_error(y.take(chosen, kernel.row_axes["y"]), expected)
    return _judge(job, len(chosen), total, {"output": error})


def check_training(job: Job, state: State, feed: PoolOnDevice) -> CheckResult:
    """One update, by the functions that the timed program repeats: loss, gradients and new parameters.

    SGD's parameters are those of a step along the reference's gradients. Other rules may make much of the last bit of a
    gradient: theirs are those of the same optax chain, in float64, on the gradients that were found, which are compared
    by themselves.
    """
    kernel, batch, params = job.kernel, feed.at(0), state["params"]
    total = batch["x"].shape[kernel.row_axes["x"]]
    a_row = _flops_of_row(job, total)
    rows = max((n for n in range(1, total + 1) if total % n == 0 and n * a_row <= REFERENCE_FLOPS), default=1)
    few = {name: np.asarray(leaf).take(range(rows), kernel.row_axes[name]) for name, leaf in batch.items()}
    tiled = {
        name: np.concatenate([leaf] * (total // rows), kernel.row_axes[name]) for name, leaf in few.items()
    }
    differentiate, update = model.gradients(job), model.update(job)

    @jax.jit
    def update_once(state: State, batch: Any) -> Any:
        loss, gradients = differentiate(state["params"], batch)
        return loss, gradients, update(state, batch, jax.random.key(job.config.seed))[0]["params"]

    with job.matmul_precision():
        found = update_once(state, kernel.rows_first(tiled))
    loss, gradients, new = jax.tree.map(np.asarray, found)
    expected_loss, expected = in_float64(jax.value_and_grad(kernel.reference_loss), params, few)

    def step(params: Any, gradients: Any) -> Any:
        chain, rate = job.optimiser, job.config.learning_rate
        steps, _ = chain.update(gradients, chain.init(params), params, rate=rate)
        return optax.apply_updates(params, steps), optax.tree.norm(steps) / optax.tree.norm(params)

    plain = job.config.optimizer == "sgd"
    moved, size = in_float64(step, params, expected if plain else gradients)
    errors = {
        "loss": relative_error(loss, expected_loss),
        "gradient": worst_leaf(gradients, expected),
        "parameters": worst_leaf(new, moved),
    }
    return _judge(job, rows, total, errors, 0.0 if plain else STEP_ERROR * float(size))


def _flops_of_row(job: Job, rows: int) -> float:
    """Operations of one iteration for a row of those of all replicas."""
    return job.kernel.cost(1).flops * job.config.replicas / rows


def relative_error(found: Any, expected: Any, floor: float = 0.0) -> float:
    """|found - expected| / max(|expected|, floor), in Euclidean norms; nan where anything found is nan."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    difference = float(np.linalg.norm(found - expected))
    size = max(float(np.linalg.norm(expected)), floor)
    return difference / size if size else difference


def worst_leaf(found: Any, expected: Any) -> float:
    """The largest relative error of a tree's leaves; a small leaf is measured against a tenth of the whole."""
    whole = float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected))))
    errors = jax.tree.map(lambda f, e: relative_error(f, e, 0.1 * whole), found, expected)
    return float(np.max(jax.tree.leaves(errors)))


def _judge(
    job: Job, rows: int, of_rows: int, errors: Mapping[str, float], step_error: float = 0.0
) -> CheckResult:
    all_bounds = BOUNDS[job.dtype + " partials" * job.config.enable_half_partials]
    bounds = {name: all_bounds["output" if name == "loss" else name] for name in errors}
    if "parameters" in bounds:
        bounds["parameters"] += step_error
    for name, error in errors.items():
        if not error <= bounds[name]:
            raise WrongResult(
                f"{job.kernel.title}: wrong result, not timed: relative error of the {name} against float64 is "
                f"{error:.3g}, the limit is {bounds[name]:g}"
            )
    return CheckResult(rows, of_rows, errors, bounds)
