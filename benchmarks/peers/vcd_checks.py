"""Do ours, torch and BlackJAX compute the same thing? From the same weights, images and random numbers.

Torch makes one whole update in float64 and in float32; ours must lie as near to float64 as float32 can. BlackJAX's
chains must take the positions and decisions of ours when ours is given the numbers that BlackJAX draws. A decision
that hangs on rounding would part two equal programs, so uniforms are moved off the edge first. What does not agree is
not timed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from vcd_torch import GROUPS, Noise, Numbers, Report, Trainer

from hotloop.engine.optim import FirstSquareState
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd import networks
from hotloop.mcmc import hmc

EDGE = 0.02  # least distance of a uniform from the probability it is compared with
LIMIT = 5e-4  # relative error of float32 after forty leapfrogs over ReLUs; a wrong term gives 0.01 and more

Data = dict[str, np.ndarray]
Draws = tuple[np.ndarray, np.ndarray, np.ndarray]


def states(job: vcd.Job) -> Iterator[tuple[vcd.Job, Any]]:
    """The first update, when the variate is shared, and a later one, when it is local.

    The output layers are made small: at the start of a real run spreads of 1e-4 and gradients of 1e6 would make
    rounding as large as an error.
    """
    rng, state = np.random.default_rng(0), vcd.init(job, jax.random.key(0))
    small = {
        name: (*layers[:-1], jax.tree.map(lambda w: 0.1 * w, layers[-1]))
        for name, layers in state["params"].items()
    }
    state |= {"params": small, "step_size": np.float32(0.3)}  # one in seven is rejected
    state["variate"] = {"shared": np.float32(-100), "own": np.zeros(job.images, np.float32)}
    job = replace(job, model=replace(job.model, shared_updates=1))
    yield job, state
    squares = jax.tree.map(lambda w: rng.random(w.shape, np.float32), small)
    own = rng.standard_normal(job.images, np.float32)
    later = {
        "slots": {**state["slots"], "rmsprop_outside": FirstSquareState(squares, np.int32(1))},
        "update": np.int32(1),
        "variate": {"shared": np.float32(-100), "own": own},
    }
    yield job, state | later


def against_torch(job: vcd.Job, data: Data, device: str) -> dict[str, float]:
    """The largest relative errors of both, over the states."""
    errors = [torch_errors(*case, data, device) for case in states(job)]
    return {side: max(error[side] for error in errors) for side in errors[0]}


def torch_errors(job: vcd.Job, state: Any, data: Data, device: str) -> dict[str, float]:
    """One update of each, with products in full float32, against torch's in float64."""
    model, rng = job.model, np.random.default_rng(1)
    index = rng.permutation(job.images)[: model.micro_batch_size]
    normals = rng.standard_normal((model.hmc_steps + 1, len(index), model.z_dim), np.float32)
    noise = normals[0], normals[1:], rng.random((model.hmc_steps, len(index)), np.float32)
    before = numbers_of(state)
    _, report = torch_update(job, data, before, index, noise, device, torch.float64)
    noise = *noise[:2], off_the_edge(noise[2], report.probabilities.cpu().numpy())
    exact, _ = torch_update(job, data, before, index, noise, device, torch.float64)
    theirs, _ = torch_update(job, data, before, index, noise, device, torch.float32)
    ours = our_update(job, data, state, index, noise)
    errors = {"ours": worst(before, ours, exact), "torch": worst(before, theirs, exact)}
    if not max(errors.values()) <= LIMIT:
        raise SystemExit(
            f"torch: updates differ from float64 by {errors}: not the same computation, not timed"
        )
    return errors


def off_the_edge(uniforms: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Uniforms that decide the same, but by a margin; they may leave [0, 1)."""
    accepted = uniforms < probabilities
    moved = np.where(accepted, probabilities - EDGE, probabilities + EDGE)
    near = np.abs(uniforms - probabilities) < EDGE
    return np.where(near, moved, uniforms).astype(np.float32)


def numbers_of(state: Any) -> Numbers:
    """Our state, as torch's."""

    def lists(groups: Any) -> dict[str, list[np.ndarray]]:
        return {name: [np.asarray(layer[k]) for layer in groups[name] for k in ("w", "b")] for name in GROUPS}

    variate = np.asarray(state["variate"]["shared"] + state["variate"]["own"])
    squares, size = state["slots"]["rmsprop_outside"].nu, float(state["step_size"])
    return Numbers(lists(state["params"]), lists(squares), variate, size, int(state["update"]))


def torch_update(
    job: vcd.Job,
    data: Data,
    before: Numbers,
    index: np.ndarray,
    noise: Draws,
    device: str,
    dtype: torch.dtype,
) -> tuple[Numbers, Report]:
    trainer = Trainer(job.model, data["image"], device, dtype)
    trainer.load(before)
    given = Noise(*(torch.from_numpy(part).to(device, dtype) for part in noise))
    report = trainer.update(torch.from_numpy(index).to(device), given)
    return trainer.numbers(), report


def our_update(job: vcd.Job, data: Data, state: Any, index: np.ndarray, noise: Draws) -> Numbers:
    """Ours with these draws; the fused kernel rounds on purpose, so the plain sampler stands for it here."""
    plain = replace(job, model=replace(job.model, sampler="plain"))
    batch = {name: array[index] for name, array in data.items()}
    with (
        mock.patch.object(vcd, "draw_noise", lambda *_: vcd.Noise(*noise)),
        jax.default_matmul_precision("highest"),
    ):
        after, _ = jax.jit(vcd.update(plain))(state, batch, jax.random.key(0))
    return numbers_of(after)


def worst(before: Numbers, got: Numbers, wanted: Numbers) -> float:
    """The largest relative error among what the update made of each array."""
    pairs = zip(_changes(before, got), _changes(before, wanted), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def _changes(before: Numbers, after: Numbers) -> list[np.ndarray]:
    """Steps of the weights, mean squared gradients, and what the variates and the step size moved by."""

    def wide(arrays: dict[str, list[np.ndarray]]) -> list[np.ndarray]:
        return [array.astype(np.float64) for name in GROUPS for array in arrays[name]]

    steps = [b - a for a, b in zip(wide(before.params), wide(after.params), strict=True)]
    squares = wide(after.slots)
    variate = after.variate.astype(np.float64) - before.variate
    return [*steps, *squares, variate, np.array([after.step_size / before.step_size - 1])]


def against_blackjax(job: vcd.Job, data: Data) -> dict[str, float]:
    """One HMC iteration of all chains by both, from the same numbers: positions, decisions, log joints."""
    import vcd_blackjax

    model, rows, state = job.model, job.model.micro_batch_size, next(states(job))[1]
    images = data["image"][:rows].astype(np.float32)
    decoder = state["params"]["decoder"]
    position = np.random.default_rng(2).standard_normal((rows, model.z_dim), np.float32)
    keys = jax.random.split(jax.random.key(3), rows)

    @jax.jit
    def both(position: jax.Array, size: jax.Array) -> Any:
        gradient_at = networks.value_and_gradient(decoder, images)
        start = hmc.init(position, gradient_at)
        mine, info = hmc.transition(gradient_at, model.leapfrog_steps)(
            start, *vcd_blackjax.its_draws(keys, model.z_dim), size
        )
        first = vcd_blackjax.HMCState(*start)
        theirs, accepted = vcd_blackjax.transition(model, decoder, images)(keys, first, size)
        return mine, info.accepted, theirs, accepted

    with jax.default_matmul_precision("highest"):
        mine, accepted, theirs, their_accepted = both(position, state["step_size"])
    same = np.asarray(accepted == their_accepted)
    errors = [_relative(np.asarray(a)[same], np.asarray(b)[same]) for a, b in zip(mine, theirs, strict=True)]
    result = {"blackjax": max(errors), "decisions_that_differ": float((~same).sum())}
    if not (result["blackjax"] <= LIMIT and result["decisions_that_differ"] <= 0.02 * rows):
        raise SystemExit(f"blackjax: differs from ours, {result}: not the same computation, not timed")
    return result


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
