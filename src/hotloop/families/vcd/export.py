"""The trained autoencoder of black and white images as a model to serve: its reconstruction of each, and the ELBO.

Both are by one sample of the encoder, drawn from a seed of the row's own, so that neighbours in a batch change nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hotloop.engine import precision
from hotloop.engine.checkpoint import Checkpoints
from hotloop.engine.exportable import (
    Arrays,
    Exportable,
    Signature,
    Tensor,
    best_step,
    describe_source,
    tolerance_of,
)
from hotloop.errors import ModelError
from hotloop.families.vcd import networks
from hotloop.families.vcd.config import FAMILY, PIXELS
from hotloop.families.vcd.model import load_run
from hotloop.families.vcd.samples import SIDE

WHITE = 127
"""A byte above it is white."""
EXAMPLES = 3
PARTS = ("decoder", "mean", "spread")


def from_run(run: Path, *, step: int | None = None, best: bool = False) -> Exportable:
    """The model of a run's checkpoint: that of a step, the one with the best ELBO on record, else the newest."""
    if best:
        steps = Checkpoints(run / "checkpoints", family=FAMILY).steps()
        step = best_step(run, steps, "test_elbo", 1)
    found = load_run(run, step)
    mode = found.job.model.precision
    policy = precision.parse(mode)
    weights = policy.to_compute({name: found.state["params"][name] for name in PARTS})
    images = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SIDE, SIDE, 1), np.uint8)
    examples = {"image": images, "seed": np.arange(EXAMPLES, dtype=np.int32)}
    return _describe(weights, mode, describe_source(run, found.step, found.config.data), examples)


def rebuild(about: Mapping[str, Any], weights: Mapping[str, Any], examples: Arrays) -> Exportable:
    """The same model from its own folder: model.json's contents, its weights as a tree, and its examples."""
    try:
        layers = {
            name: tuple(weights[name][str(number)] for number in range(len(weights[name]))) for name in PARTS
        }
        return _describe(layers, str(about["config"]["precision"]), about["source"], examples)
    except (KeyError, TypeError) as error:
        raise ModelError(f"its config in model.json cannot be read ({error!r})") from None


def _describe(weights: Any, mode: str, source: Mapping[str, Any], examples: Arrays) -> Exportable:
    return Exportable(
        family=FAMILY,
        name=FAMILY,
        function=reconstruct,
        weights=weights,
        signature=Signature(
            (Tensor.of("image", np.uint8, SIDE, SIDE, 1), Tensor.of("seed", np.int32)),
            (Tensor.of("reconstruction", np.float32, SIDE, SIDE, 1), Tensor.of("elbo", np.float32)),
        ),
        examples=examples,
        tolerance=tolerance_of(precision.parse(mode).compute),
        preprocessing=f"Grey images of {SIDE} x {SIDE} bytes; above {WHITE} is white, all else black. `seed` draws the "
        "sample of a row; the reconstruction is the probability of white, the ELBO is in nats.",
        config={"precision": mode},
        source=source,
    )


def reconstruct(weights: Any, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Probabilities of white and the ELBO, by the sample that `model.evaluate` draws for the image of that number."""
    images = (inputs["image"].reshape(inputs["image"].shape[0], PIXELS) > WHITE).astype(jnp.float32)
    mean, spread = networks.encode(weights, images)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), inputs["seed"])
    z = mean + spread * jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:]))(keys)
    logits = networks.forward(weights["decoder"], z)[-1]
    elbo = (
        networks.log_likelihood(logits, images) + networks.log_prior(z) - networks.log_normal(z, mean, spread)
    )
    shares = jax.nn.sigmoid(logits.astype(jnp.float32))
    pictures = shares.reshape(shares.shape[0], SIDE, SIDE, 1)
    return {"reconstruction": pictures, "elbo": elbo.astype(jnp.float32)}
