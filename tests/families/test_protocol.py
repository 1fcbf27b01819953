"""Every family has the one shape that the engine takes: init, update and evaluate, pure, of a hashable job."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from cnn.cnn_words import job_of
from recommender.recommender_small import Small, ratings

from family_protocol import check_family
from hotloop import Mode, ModelSpec, RunConfig
from hotloop.families.cnn import model as cnn
from hotloop.families.estimator import model as estimator
from hotloop.families.kernels import model as kernels
from hotloop.families.kernels.config import Dense
from hotloop.families.recommender import model as recommender
from hotloop.families.recommender.config import UpdateOptions
from hotloop.families.vcd import model as vcd
from hotloop.families.vcd.config import VcdModel

DRAWS = np.random.default_rng(0)
Case = tuple[Any, Any, int]
"""A job, its data, and a batch size that does not divide them."""


def cnn_case() -> Case:
    words = ("--model", "toy_model_bn", "--dataset", "mnist", "--micro-batch-size", "4")
    images = DRAWS.integers(0, 256, (10, 28, 28, 1), dtype=np.uint8)
    return job_of(*words), {"image": images, "label": DRAWS.integers(0, 10, 10)}, 4


def estimator_case() -> Case:
    def init(key: Any) -> Any:
        return {"w": 0.1 * jax.random.normal(key, (5, 2))}

    def apply(weights: Any, x: Any, *, train: bool, keys: Any) -> Any:
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (5,)))(keys) if train else 1
        return (x * kept) @ weights["w"]

    features = DRAWS.normal(size=(19, 5)).astype(np.float32)
    data = {"features": features, "labels": (features.sum(1) > 0).astype(np.int32)}
    spec = ModelSpec(init=init, apply=apply, optimizer=optax.sgd(0.1, momentum=0.9))
    return estimator.build_job(spec, Mode.TRAIN, data, RunConfig()), data, 4


def kernels_case() -> Case:
    job = kernels.Job(Dense(size=8, batch_size=4), "float32")
    data = job.kernel.data(DRAWS, 10, "float32")
    return job, jax.tree.map(np.asarray, job.kernel.rows_first(data)), 4


def recommender_case() -> Case:
    options = UpdateOptions(size=128, batch_size=4, base_learning_rate=-7, precision="32.32")
    data = {"ratings": ratings(19, 30), "truth": ratings(19, 30, seed=2)}
    return Small(options, 30), data, 4


def vcd_case() -> Case:
    """Six updates of 4 out of 10 images; the switch to local variates is the fourth."""
    chosen = VcdModel(
        z_dim=2, hidden=(5,), hmc_steps=1, leapfrog_steps=1, shared_updates=3, micro_batch_size=4
    )
    images = DRAWS.integers(0, 2, (10, 28, 28), dtype=np.uint8)
    return vcd.Job(chosen, 10), {"image": images, "index": np.arange(10)}, 4


FAMILIES = {
    "cnn": (cnn, cnn_case),
    "estimator": (estimator, estimator_case),
    "kernels": (kernels, kernels_case),
    "recommender": (recommender, recommender_case),
    "vcd": (vcd, vcd_case),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_keeps_the_protocol(family: str) -> None:
    module: Any
    make: Callable[[], Case]
    module, make = FAMILIES[family]
    job, data, batch_size = make()
    check_family(module.init, module.update, module.evaluate, job, data, batch_size)
