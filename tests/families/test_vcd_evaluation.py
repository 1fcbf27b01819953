"""The evaluation on the device and the command round it: exact answers, sizes that change nothing, the file."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.errors import DataError
from hotloop.families.vcd import evaluation, images, likelihood, model
from hotloop.families.vcd.config import LikelihoodOptions, VcdEvaluate, VcdModel, VcdTrain
from hotloop.families.vcd.likelihood import LikelihoodEstimator, make_proposals
from hotloop.options import build

LikelihoodOptions.__test__ = False  # a config, whatever pytest makes of its name


class Listener:
    """Keeps what is said, and the bars that were filled."""

    def __init__(self):
        self.said, self.warned, self.tables, self.bars = [], [], [], []

    def say(self, text):
        self.said.append(text)

    def warn(self, text):
        self.warned.append(text)

    def table(self, columns, rows):
        self.tables.append((columns, rows))

    @contextmanager
    def progress(self, description, total=None):
        bar = Bar()
        self.said.append(f"bar: {description}")
        yield bar
        self.bars.append((description, total, bar.done))


class Bar:
    done = 0

    def advance(self, amount=1):
        self.done += amount


# A model small enough for quadrature: one latent dimension, six pixels, one hidden layer.
def network(generator, *sizes, scale=1.0):
    return tuple(
        {
            "w": np.float32(scale * generator.normal(size=pair)),
            "b": np.float32(generator.normal(size=pair[1])),
        }
        for pair in pairwise(sizes)
    )


def small_model(pixels=6):
    generator = np.random.default_rng(2)
    params = {
        "mean": network(generator, pixels, 1, scale=0.1),
        "spread": network(generator, pixels, 1, scale=0.1),
        "decoder": network(generator, 1, 5, pixels, scale=1.5),
    }
    for name, bias in (("mean", 0.0), ("spread", 0.5)):  # about the prior: a fair encoder
        params[name][-1]["b"][:] = bias
    return params, np.uint8(generator.integers(0, 2, size=(11, pixels)))


def by_quadrature(decoder, x):
    """log p(x) in float64, by the trapezoidal rule; exact here to many more digits than are compared."""
    z = np.linspace(-12, 12, 40_001)
    wide = [{name: part.astype(np.float64) for name, part in layer.items()} for layer in decoder]
    hidden = np.maximum(z[:, None] @ wide[0]["w"] + wide[0]["b"], 0)
    logits = hidden @ wide[1]["w"] + wide[1]["b"]
    joint = x @ logits.T - np.logaddexp(0, logits).sum(-1) - 0.5 * z**2 - 0.5 * np.log(2 * np.pi)
    return np.log(np.exp(joint).sum(-1) * (z[1] - z[0]))


def nothing(_):
    pass


SAMPLES = 3010  # a last block of ten


def weighed(params, x, batch_size):
    estimate = LikelihoodEstimator(params, x, jax.random.key(3), batch_size=batch_size, samples=SAMPLES)
    ensemble = estimate.sample(0.3, 3, 40, 60, nothing)
    chosen = make_proposals(estimate.encoder, ensemble.mean, ensemble.squares, 60)
    return ensemble, {
        name: estimate.weigh(name, proposal, SAMPLES, nothing) for name, proposal in chosen.items()
    }


@pytest.fixture(scope="module")
def undivided():
    return weighed(*small_model(), batch_size=11)


def test_every_proposal_finds_the_likelihood_that_quadrature_gives(undivided):
    params, x = small_model()
    exact = by_quadrature(params["decoder"], x)
    found = undivided[1]
    assert len(found) == 3
    for name, estimate in found.items():
        error = np.sqrt(estimate.variance)
        assert error.max() < 0.05, name
        assert (np.abs(estimate.log_likelihood - exact) < 4 * error + 1e-5).all(), name
        figures = evaluation.summarise(estimate, SAMPLES)
        assert abs(figures["log_likelihood"] - exact.mean()) < 3 * figures["monte_carlo_error"], name
        assert figures["standard_error"] == pytest.approx(exact.std(ddof=1) / np.sqrt(11), rel=0.05)
        assert 0 < figures["effective_min"] <= figures["effective_median"] <= 1
        assert figures["effective_min"] <= figures["effective_mean"] <= 1
    assert evaluation.summarise(found["hmc_mean_std"], SAMPLES)["effective_mean"] > 0.5


def test_batches_and_chunks_change_no_estimate(undivided, monkeypatch):
    ensemble, found = undivided
    rows = 4 * 784
    monkeypatch.setitem(likelihood.MEMORY, "cpu", 900 * rows)  # 3 x 4 images, 14 x 250 samples
    again, others = weighed(*small_model(), batch_size=4)
    assert again.step_size == ensemble.step_size
    np.testing.assert_array_equal(again.mean, ensemble.mean)
    for name, other in others.items():
        for one, two in zip(found[name], other, strict=True):
            assert len(two) == 11
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_rows_are_cut_into_equal_batches_and_filled_up_at_the_end():
    cut = likelihood.split_rows(np.arange(10), 4)
    np.testing.assert_array_equal(cut, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]])
    assert likelihood.split_rows(np.zeros((10_000, 3)), 128).shape == (79, 127, 3)
    assert likelihood.split_rows(np.zeros((5, 3)), 128).shape == (1, 5, 3)


def test_pieces_cover_all_units_once_and_begin_with_none():
    calls, heard = [], []

    def step(first, stop, carry):
        calls.append((first, stop))
        return carry + sum(range(first, stop))

    assert likelihood.run_in_pieces(step, 0, 1000, heard.append) == sum(range(1000))
    assert calls[0] == (0, 0)
    assert [first for first, _ in calls[1:]] == [stop for _, stop in calls[:-1]]
    assert sum(heard) == 1000
    assert len(calls) < 20


def test_products_are_full_float32_whatever_the_weights_are_kept_in():
    params, x = small_model()
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    estimate = LikelihoodEstimator(half, x, jax.random.key(0), batch_size=11, samples=50)
    proposal = likelihood.Proposal(*(part[None] for part in estimate.encoder))
    sums = likelihood.empty_sums((1, 11))
    text = likelihood._weigh.jitted.lower(
        1, None, estimate._decoder, estimate._batches, proposal, jax.random.key(0), 50, 0, 1, sums
    ).as_text()
    products = re.findall(r"dot_general.*", text)
    assert len(products) == 2
    assert all("HIGHEST" in line and "bf16" not in line for line in products)


JOB = model.Job(VcdModel(z_dim=1, leapfrog_steps=3), 20)


def state():
    return {"params": small_model()[0], "step_size": jnp.float32(0.3)}


def set_up(monkeypatch, sets, **options):
    """A run after 70 updates, and its data."""
    config = VcdTrain(z_dim=1, leapfrog_steps=3, **options)
    monkeypatch.setattr(model, "load_run", lambda folder, step: model.TrainedRun(config, JOB, state(), 70))

    def load_images(name, console, hold_out):
        with console.progress("loading images"):
            fifth = len(sets.train) // 5
            held_out = replace(sets, train=sets.train[:-fifth], validation=sets.train[-fifth:])
            return held_out if hold_out else sets

    monkeypatch.setattr(images, "load_images", load_images)


@pytest.fixture
def run_folder(monkeypatch, tmp_path):
    rows = small_model()[1]
    set_up(monkeypatch, images.Images("digits", "drawn", rows[:0], rows[:0], rows, "a notice"))
    return tmp_path


QUICK = {"iwae_samples": SAMPLES, "burn_in": 5, "kept": 6}


def test_the_command_says_estimate_table_and_headline_and_writes_the_result(undivided, run_folder):
    listener = Listener()
    programs = (
        likelihood._encode,
        likelihood._weigh,
        likelihood._begin,
        likelihood._iterate,
    )
    compiled = [program.jitted._cache_size() for program in programs]
    result = evaluation.run(VcdEvaluate(run=run_folder, **QUICK), listener)
    # What `undivided` compiled serves the ELBO, all proposals and other numbers of iterations.
    assert [program.jitted._cache_size() for program in programs] == compiled
    estimate = next(i for i, text in enumerate(listener.said) if text.startswith("estimate: "))
    assert "3 proposals x 3,010 samples x 11 images" in listener.said[estimate]
    assert re.search(r", \d\.\de\+\d\d FLOP, about \d+ s once compiled$", listener.said[estimate])
    assert estimate < listener.said.index("bar: HMC")
    loading, bound, first, second = listener.bars
    assert (loading[0], bound[0]) == ("loading images", "ELBO")
    assert first == ("HMC", 11, 11)
    assert second[0] == "importance sampling"
    assert all(bar[1] == bar[2] > 0 for bar in (bound, second))  # chunks: by the platform's memory
    ((columns, rows),) = listener.tables
    assert [row[0] for row in rows] == ["encoder", "hmc_mean", "hmc_mean_std"]
    assert all(len(row) == len(columns) for row in rows)
    assert "hmc_mean_std" in " ".join(listener.said[-3:])
    assert not listener.warned

    path = run_folder / "evaluations" / "test-70.json"
    assert result["path"] == str(path)
    written = json.loads(path.read_text())
    assert {**written, "path": str(path)} == result
    assert list(path.parent.iterdir()) == [path]
    assert written["log_likelihood"] == written["proposals"]["hmc_mean_std"]["log_likelihood"]
    assert written["elbo"] < written["log_likelihood"] < 0
    assert (written["images"], written["split"], written["step"]) == (11, "test", 70)
    assert (written["source"], written["notice"]) == ("drawn", "a notice")
    assert 0 <= written["acceptance"] <= 1
    for figures in written["proposals"].values():
        assert {"standard_error", "monte_carlo_error"} <= set(figures)
        assert 0 < figures["effective_min"] <= figures["effective_mean"] <= 1


def test_a_quick_look_and_other_data_leave_the_evaluation_proper_alone(run_folder):
    result = evaluation.run(VcdEvaluate(run=run_folder, images=11, data="digits", **QUICK), Listener())
    assert Path(result["path"]).name == "test-70-digits-first-11.json"
    assert result["images"] == 11


def test_the_seed_decides_the_draws():
    rows = small_model()[1]
    one, same, other = (
        evaluation.estimate_likelihoods(JOB, state(), rows, LikelihoodOptions(**QUICK), seed, Listener())
        for seed in (0, 0, 1)
    )
    assert one["proposals"] == same["proposals"]
    assert one["log_likelihood"] != other["log_likelihood"]
    assert one["elbo"] != other["elbo"]


def test_a_split_without_images_is_refused_in_one_line(run_folder):
    with pytest.raises(DataError, match="--split validation: digits has no such images"):
        evaluation.run(VcdEvaluate(run=run_folder, split="validation"), Listener())


def test_validation_images_are_those_that_the_run_held_out(monkeypatch, tmp_path):
    rows = small_model()[1]
    train = np.concatenate([np.zeros((44, 6), np.uint8), rows])
    set_up(monkeypatch, images.Images("digits", "drawn", train, rows[:0], rows), validation=True)
    held_out = evaluation.run(VcdEvaluate(run=tmp_path, split="validation", **QUICK), Listener())
    test = evaluation.run(VcdEvaluate(run=tmp_path, **QUICK), Listener())
    assert held_out["proposals"] == test["proposals"]
    names = sorted(path.name for path in (tmp_path / "evaluations").iterdir())
    assert names == ["test-70.json", "validation-70.json"]


def test_a_likelihood_that_rests_on_few_samples_is_not_reported_without_a_warning(monkeypatch):
    params, rows = small_model()
    for layer in params["decoder"]:
        layer["w"] *= 30  # a posterior of thin slices
    hard = {"params": params, "step_size": jnp.float32(0.3)}
    listener = Listener()
    figures = evaluation.estimate_likelihoods(JOB, hard, rows, LikelihoodOptions(**QUICK), 0, listener)[
        "proposals"
    ]["hmc_mean_std"]
    assert figures["few_effective"] > 0
    (warning,) = listener.warned
    assert "fewer than 10 effective samples" in warning
    monkeypatch.setattr(evaluation, "FEW", 10**6)
    evaluation.estimate_likelihoods(JOB, hard, rows, LikelihoodOptions(**QUICK), 0, listener)
    assert listener.warned[-1].startswith("100 % of the images have fewer than")


def test_one_image_has_no_error_over_images():
    one = likelihood.LikelihoodEstimate(*(np.array([value]) for value in (-3.0, 10.0, 0.04, -4.0)))
    figures = evaluation.summarise(one, 20)
    assert np.isnan(figures["standard_error"])
    assert figures["monte_carlo_error"] == pytest.approx(0.2)
    assert figures["effective_mean"] == 0.5
    assert figures["few_effective"] == 0
    assert evaluation.summarise(one._replace(effective=np.array([9.9])), 20)["few_effective"] == 1


def test_the_defaults_are_the_papers():
    config = build(VcdEvaluate, {"run": "results/default"})
    assert (config.iwae_samples, config.burn_in, config.kept, config.split) == (20_000, 300, 300, "test")
    assert config.run == Path("results/default")
