"""The image model as it is exported: the ELBO of `evaluate`, and rows that know nothing of their neighbours."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hotloop.errors import CheckpointError
from hotloop.families.vcd import export, model
from hotloop.families.vcd.config import VcdTrain

JOB = model.make_job(VcdTrain(z_dim=3, hidden=8), 50)


@pytest.fixture
def exported(monkeypatch, tmp_path):
    state = jax.jit(partial(model.init, JOB))(jax.random.key(0))
    found = model.TrainedRun(SimpleNamespace(data="digits"), JOB, state, 70)
    monkeypatch.setattr(export, "load_run", lambda folder, step: found)
    return export.from_run(tmp_path), state


def test_the_elbo_is_that_of_evaluate_for_the_image_of_that_number(exported):
    found, state = exported
    pixels = found.examples["image"]
    seeds = np.array([4, 0, 7], np.int32)
    answers = jax.jit(found.function)(found.weights, {"image": pixels, "seed": seeds})
    bits = (pixels.reshape(3, 784) > 127).astype(np.uint8)
    expected = jax.jit(model.evaluate(JOB))(state, {"image": bits, "index": seeds})
    np.testing.assert_allclose(answers["elbo"], expected["elbo"], rtol=1e-6)
    pictures = np.asarray(answers["reconstruction"])
    assert pictures.shape == (3, 28, 28, 1) and 0 <= pictures.min() < pictures.max() <= 1


def test_a_row_is_the_same_among_other_neighbours_and_its_seed_counts(exported):
    found, _ = exported
    pixels = found.examples["image"]

    def answer(rows, seeds):
        inputs = {"image": pixels[rows], "seed": np.array(seeds, np.int32)}
        return {
            name: np.asarray(value) for name, value in jax.jit(found.function)(found.weights, inputs).items()
        }

    alone, among, other = answer([1], [9]), answer([0, 1, 2], [5, 9, 5]), answer([1], [10])
    for name, value in alone.items():
        np.testing.assert_allclose(value[0], among[name][1], rtol=1e-5, atol=1e-6)
    assert alone["elbo"] != other["elbo"]


def test_the_best_needs_a_validation_on_record(tmp_path):
    with pytest.raises(CheckpointError, match="best=True: no validation of a checkpoint"):
        export.from_run(tmp_path, best=True)
