"""The pictures of `hotloop vcd samples`, drawn from networks simple enough to read z back off the pixels."""

import json
import struct
import zlib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hotloop.cli.command import Context
from hotloop.engine import precision
from hotloop.engine.keys import seed_key
from hotloop.errors import DataError
from hotloop.families.vcd import images as image_sets
from hotloop.families.vcd import model, samples
from hotloop.families.vcd.config import VcdSamples, VcdTrain
from hotloop.families.vcd.images import Images
from hotloop.families.vcd.model import TrainedRun, make_job
from hotloop.options import build

LATENT, HIDDEN, PIXELS = 3, 6, 784
MEAN, SPREAD = 1.5, 0.8


def network(*layers):
    return tuple({"w": np.asarray(w, np.float32), "b": np.asarray(b, np.float32)} for w, b in layers)


def reading_decoder():
    """The logit of pixel i is z_i for the first three pixels, 0 for the others: relu(z) - relu(-z) = z."""
    both = np.hstack([np.eye(LATENT), -np.eye(LATENT)])
    out = np.zeros((HIDDEN, PIXELS))
    out[:, :LATENT] = both.T
    return network((both, np.zeros(HIDDEN)), (np.eye(HIDDEN), np.zeros(HIDDEN)), (out, np.zeros(PIXELS)))


def blind_encoder(value):
    """The same output for every image."""
    return network(
        (np.zeros((PIXELS, HIDDEN)), np.zeros(HIDDEN)),
        (np.zeros((HIDDEN, HIDDEN)), np.zeros(HIDDEN)),
        (np.zeros((HIDDEN, LATENT)), np.full(LATENT, value)),
    )


def run_saved(step_size=0.3, **options):
    sizes = {"z_dim": LATENT, "hidden": (HIDDEN, HIDDEN), "hmc_steps": 4, "leapfrog_steps": 2}
    config = build(VcdTrain, sizes | options)
    raw = np.log(np.exp(SPREAD) - np.exp(1e-4))
    params = {"mean": blind_encoder(MEAN), "spread": blind_encoder(raw), "decoder": reading_decoder()}
    state = {"params": params, "step_size": np.float32(step_size)}
    return TrainedRun(config, make_job(config, 50), state, 70)


def some_images(count=40, notice=""):
    bits = np.random.default_rng(0).integers(0, 2, (count, PIXELS), np.uint8)
    return Images("set", "here", bits[:0], bits[:0], bits, notice)


kept_draw = cache(samples.draw)
"""One function for one job: what was compiled in one test serves the next."""


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """A saved run and a data set, so that `run` needs no training; what it is asked for is kept."""
    asked = SimpleNamespace(saved=run_saved(), images=some_images(), data=None, step=None)

    def saved_run(folder, step):
        asked.step = step
        return asked.saved

    def some_set(name, console):
        asked.data = name
        if isinstance(asked.images, Exception):
            raise asked.images
        return asked.images

    monkeypatch.setattr(samples, "draw", kept_draw)
    monkeypatch.setattr(model, "load_run", saved_run)
    monkeypatch.setattr(image_sets, "load_images", some_set)
    asked.run = lambda **options: samples.run(VcdSamples(run=tmp_path / "run", **options), Context())
    return asked


def read(path):
    content = Path(path).read_bytes()
    at, packed = 8, b""
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        body = content[at + 8 : at + 8 + length]
        if content[at + 4 : at + 8] == b"IHDR":
            width, height = struct.unpack(">II", body[:8])
        elif content[at + 4 : at + 8] == b"IDAT":
            packed += body
        at += 12 + length
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, width + 1)[:, 1:]


def cells(canvas, columns, line, height, width):
    """The pictures of a grid, cut out by the stated geometry alone."""
    rows = (canvas.shape[0] - line) // (height + line)
    assert canvas.shape == (rows * (height + line) + line, columns * (width + line) + line)
    tops, lefts = (
        [line + i * (size + line) for i in range(n)] for n, size in ((rows, height), (columns, width))
    )
    return np.stack([canvas[t : t + height, u : u + width] for t in tops for u in lefts])


FRAME = 3 * 29 + 1


def cut_triples(canvas, columns):
    frames = cells(canvas, columns, 4, 30, FRAME)
    return np.stack([cells(frame, 3, 1, 28, 28) for frame in frames])


def latents(probabilities):
    p = np.asarray(probabilities, np.float64)[:, :LATENT]
    return np.log(p) - np.log1p(-p)


def log_joint(images, z):
    """In float64, of the reading decoder: the other 781 pixels are coins."""
    x = images[:, :LATENT].astype(np.float64)
    likelihood = (x * z - np.logaddexp(0, z)).sum(1) - (PIXELS - LATENT) * np.log(2)
    return likelihood - 0.5 * (z * z).sum(1) - 0.5 * LATENT * np.log(2 * np.pi)


def drawn(run, images, prior=6, steps=4):
    return jax.device_get(jax.jit(kept_draw(run.job, prior, steps))(run.state, images, seed_key(0)))


# What is drawn.


def test_prior_pictures_come_from_a_standard_normal():
    z = latents(drawn(run_saved(), some_images(0).test, prior=4000, steps=1).prior)
    error = 1 / np.sqrt(len(z))
    assert np.abs(z.mean(0)).max() < 4 * error
    assert np.abs(np.cov(z.T) - np.eye(LATENT)).max() < 4 * np.sqrt(2) * error


def test_the_second_picture_is_at_the_encoders_sample_and_the_third_at_the_posterior():
    """Given the image the latents are independent, so the posterior's moments are sums on a line."""
    images = np.tile(some_images(1).test, (4000, 1))
    result = drawn(run_saved(step_size=0.6), images, steps=12)
    z0, zt = latents(result.before), latents(result.after)
    error = 1 / np.sqrt(len(images))
    assert np.abs(z0.mean(0) - MEAN).max() < 4 * SPREAD * error
    assert np.abs(z0.std(0) - SPREAD).max() < 4 * SPREAD * error
    at = np.linspace(-10, 10, 4001)
    for i, bit in enumerate(images[0, :LATENT]):
        weights = np.exp(bit * at - np.logaddexp(0, at) - at * at / 2)
        weights /= weights.sum()
        mean = weights @ at
        spread = np.sqrt(weights @ (at - mean) ** 2)
        assert abs(zt[:, i].mean() - mean) < 4 * spread * error
        assert abs(zt[:, i].std() - spread) < 4 * spread * error


def test_the_log_joints_are_those_of_the_pictures():
    images = some_images(2).test
    result = drawn(run_saved(), images)
    np.testing.assert_allclose(result.log_joint_z0, log_joint(images, latents(result.before)), rtol=2e-6)
    np.testing.assert_allclose(result.log_joint_zt, log_joint(images, latents(result.after)), rtol=2e-6)


@pytest.mark.slow
def test_the_trained_step_size_is_used_not_the_first_one_and_does_not_adapt():
    # A step that adapted at this rate would be cut to a thousandth in three iterations and then be accepted.
    images = some_images(3).test
    wild = drawn(run_saved(1e3, adaptation_rate=0.9), images)
    assert wild.acceptance == 0
    np.testing.assert_array_equal(wild.after, wild.before)
    assert drawn(run_saved(1e-3, adaptation_rate=0.9), images).acceptance == 1


@pytest.mark.slow
def test_weights_of_sixteen_bits_can_be_drawn_from():
    run = run_saved(precision="16.16")
    run.state["params"] = precision.parse("16.16").to_update(run.state["params"])
    result = drawn(run, some_images(2).test)
    assert all(np.isfinite(value).all() for value in result)
    assert result.before.dtype == np.float32


# What is written.


@pytest.mark.slow
def test_both_files_have_the_size_and_lines_that_were_asked_for(ready):
    result = ready.run(rows=3, columns=7, scale=1)
    prior, rebuilt = read(result["prior"]), read(result["reconstructions"])
    assert cells(prior, 7, 1, 28, 28).shape == (21, 28, 28)
    assert (prior[::29] == 96).all() and (prior[:, ::29] == 96).all()
    assert cut_triples(rebuilt, 2).shape == (6, 3, 28, 28)
    assert (rebuilt[:4] == 255).all() and (rebuilt[34:38] == 255).all() and (rebuilt[:, -4:] == 255).all()
    assert result["images"] == 6


def test_pictures_are_original_before_after_and_the_figures_are_their_means(ready):
    result = ready.run(rows=2, columns=3, scale=1)
    original, before, after = cut_triples(read(result["reconstructions"]), 1).swapaxes(0, 1)
    chosen = (original.reshape(2, PIXELS) // 255).astype(np.uint8)
    places = [np.flatnonzero((ready.images.test == image).all(1)) for image in chosen]
    assert [len(place) for place in places] == [1, 1] and places[0] < places[1]
    same = drawn(ready.saved, chosen)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(original, samples.make_pictures(chosen))
    np.testing.assert_array_equal(before, samples.make_pictures(same.before))
    np.testing.assert_array_equal(after, samples.make_pictures(same.after))
    np.testing.assert_array_equal(
        cells(read(result["prior"]), 3, 1, 28, 28), samples.make_pictures(same.prior)
    )
    assert result["log_joint_z0"] == pytest.approx(same.log_joint_z0.mean(), rel=1e-6)
    assert result["log_joint_zt"] == pytest.approx(same.log_joint_zt.mean(), rel=1e-6)
    assert result["acceptance"] == same.acceptance


def test_scale_repeats_every_pixel(ready):
    small = read(ready.run(rows=2, columns=3, scale=1)["prior"])
    large = read(ready.run(rows=2, columns=3, scale=3)["prior"])
    np.testing.assert_array_equal(large, np.kron(small, np.ones((3, 3), np.uint8)))


def test_one_seed_gives_the_same_files_and_another_gives_others(ready):
    def files(seed):
        result = ready.run(rows=2, columns=3, seed=seed)
        return [Path(result[name]).read_bytes() for name in ("prior", "reconstructions")]

    first, again, other = files(1), files(1), files(2)
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


@pytest.mark.slow
def test_the_runs_data_and_sampler_are_the_default_and_options_win(ready, tmp_path):
    result = ready.run(rows=2, columns=3)
    assert (ready.data, ready.step) == ("binarised_mnist", None)
    assert (result["hmc_steps"], result["step"]) == (4, 70)
    assert result["prior"] == str(tmp_path / "run" / "samples" / "prior.png")
    result = ready.run(rows=2, columns=3, data="digits", step=7, hmc_steps=2, output=tmp_path / "other")
    assert (ready.data, ready.step) == ("digits", 7)
    assert result["hmc_steps"] == 2
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "prior.png",
        "reconstructions.png",
    ]


def test_what_was_written_is_said(ready, capsys):
    result = ready.run(rows=2, columns=3)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and out[0].startswith(result["prior"]) and "update 70" in out[0]
    assert out[1].startswith(result["reconstructions"]) and "4 HMC iterations" in out[1]
    assert f"{result['log_joint_z0']:.1f}" in out[1]
    assert json.loads(json.dumps(result)) == result


@pytest.mark.slow
def test_few_test_images_are_all_shown(ready):
    ready.images = some_images(2)
    result = ready.run(rows=1, columns=9, scale=1)
    assert result["images"] == 2
    first, second, empty = cells(read(result["reconstructions"]), 3, 4, 30, FRAME)
    assert first.any() and second.any() and (empty == 255).all()


def test_without_the_runs_data_the_prior_is_still_drawn(ready, capsys):
    ready.images = DataError("--data /gone: neither a set nor a folder that exists")
    result = ready.run(rows=2, columns=3)
    assert read(result["prior"]).any()
    assert (
        "reconstructions" not in result
        and not Path(result["prior"]).with_name("reconstructions.png").exists()
    )
    assert "no reconstructions: --data /gone" in capsys.readouterr().err


def test_data_that_were_asked_for_must_be_there(ready):
    ready.images = DataError("--data /gone: neither a set nor a folder that exists")
    with pytest.raises(DataError, match="/gone"):
        ready.run(data="/gone")


def test_a_stand_in_is_not_passed_over_in_silence(ready, capsys):
    ready.images = some_images(notice="these are procedural digits")
    ready.run(rows=2, columns=3)
    assert "these are procedural digits" in capsys.readouterr().err


# The pieces.


def test_a_grid_fills_lines_from_the_left_and_leaves_the_rest_in_the_lines_shade():
    canvas = samples.arrange_grid(
        np.arange(1, 6, dtype=np.uint8).repeat(6).reshape(5, 2, 3), 3, line=2, shade=9
    )
    found = cells(canvas, 3, 2, 2, 3)
    assert [set(np.unique(cell)) for cell in found] == [{1}, {2}, {3}, {4}, {5}, {9}]


def test_probabilities_become_the_nearest_shade():
    values = np.zeros((1, PIXELS))
    values[0, :4] = [1, 0.5, 1 / 255, 0.6 / 255]
    assert samples.make_pictures(values)[0, 0, :5].tolist() == [255, 128, 1, 1, 0]
