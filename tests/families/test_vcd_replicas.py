"""Replicas: updates, control variates, step sizes and likelihoods are those of one device, whoever has an image."""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest
from test_vcd_evaluation import nothing, small_model

from hotloop.engine.device import mesh_of_replicas
from hotloop.engine.feed import Resident, place_everywhere
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Evaluation, Program, copy_state
from hotloop.engine.precision import sum_replicas
from hotloop.errors import DeviceError, OptionError
from hotloop.families.vcd import fused, likelihood, model, train
from hotloop.families.vcd.config import VcdModel, VcdTrain
from hotloop.families.vcd.likelihood import LikelihoodEstimator, make_proposals
from same_numbers import assert_same_numbers, assert_seen, with_moved_weight

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
SLOW = pytest.mark.slow
IMAGES, BATCH, UPDATES = 14, 8, 4  # the second batch runs over the end of a pass, and holds images twice
SMALL = VcdModel(
    z_dim=3,
    hidden=(8, 5),
    hmc_steps=3,
    leapfrog_steps=2,
    step_size=0.5,
    adaptation_rate=0.05,
    shared_updates=1,
    micro_batch_size=BATCH,
    sampler="plain",
)
BITS = np.random.default_rng(0).integers(0, 2, (IMAGES, 784), dtype=np.uint8)
WAYS = {
    "vcd": {},
    "global": {"control_variate": "global"},
    "hoffman": {"method": "hoffman"},
    "kl": {"method": "kl"},
}


def feed_of(job, bits):
    data = {"image": bits, "index": np.arange(IMAGES, dtype=np.int32)}
    return Resident(data, BATCH, seed=2, sharding=job.sharding)


def make_program(way, replicas, **options):
    job = model.Job(dataclasses.replace(SMALL, **WAYS[way], **options), IMAGES, replicas)
    return job, Program(model.update(job), feed_of(job, BITS), UPDATES, seed_key(1))


def run(job, program, bits=BITS, change=lambda params: params):
    """Metrics of each update, and the state after the last."""
    state = copy_state(model.init(job, jax.random.key(3)))
    state = place_everywhere({**state, "params": change(state["params"])}, job.mesh)
    program.feed = feed_of(job, bits)
    state, metrics = program(state, 0, UPDATES)
    return jax.tree.map(np.asarray, (dict(metrics), state))


def trained(way, replicas, **options):
    return run(*make_program(way, replicas, **options))


alone = cache(partial(trained, replicas=1))


def assert_same_training(found, wanted):
    first = [{name: values[:2] for name, values in metrics.items()} for metrics, _ in (found, wanted)]
    assert_same_numbers(*first, 1e-6)
    assert_same_numbers(found[0], wanted[0], 1e-5)
    assert_same_numbers(found[1], wanted[1], 1e-5)


@pytest.mark.parametrize(
    ("way", "replicas"),
    [
        ("vcd", 2),
        pytest.param("vcd", 4, marks=SLOW),
        pytest.param("kl", 2, marks=SLOW),
        pytest.param("global", 4, marks=SLOW),
        pytest.param("hoffman", 2, marks=SLOW),
    ],
)
def test_updates_are_those_of_one_device(way, replicas):
    wanted, (job, program) = alone(way), make_program(way, replicas)
    compare = partial(assert_same_training, wanted=wanted)
    compare(run(job, program))
    assert_seen(compare, run(job, program, one_pixel_other()), run(job, program, change=one_weight_moved))
    assert len(program.executables) == 1
    if (
        way == "vcd"
    ):  # there is something to see: chains that stayed, and variates of their own for most images
        assert wanted[0]["acceptance"].min() < 1 and np.ptp(wanted[0]["step_size"]) > 1e-3
        assert len(np.unique(wanted[1]["variate"]["own"])) > IMAGES // 2


def one_weight_moved(params):
    moved = params["mean"][0]["b"].at[2].add(1e-2)
    return {**params, "mean": ({**params["mean"][0], "b": moved}, *params["mean"][1:])}


def one_pixel_other():
    other = BITS.copy()
    other[5, 300] ^= 1
    return other


def sum_rows_only(shares, axis):
    """A step size that follows the replica's own chains: single numbers are not added up."""
    one = getattr(shares, "ndim", 1) == 0 and axis is not None
    return shares * model.count_replicas(axis) if one else sum_replicas(shares, axis)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sum_replicas", sum_rows_only),
        pytest.param("gather_replicas", lambda rows, axis: rows, marks=SLOW),
        pytest.param("first_row", lambda rows, axis: 0, marks=SLOW),
    ],
)
def test_the_comparison_sees_what_is_a_replicas_own(monkeypatch, name, wrong):
    """Acceptance, the rows of the control variate, and random numbers belong to the whole batch."""
    wanted = alone("vcd")
    monkeypatch.setattr(model, name, wrong)
    assert_seen(partial(assert_same_training, wanted=wanted), trained("vcd", 2))


@pytest.mark.slow
def test_the_fused_sampler_works_on_shares(monkeypatch):
    """Its kernel, interpreted: each replica's chains are tiles of their own."""
    monkeypatch.setattr(model, "choose_sampler", lambda *_: "fused")
    monkeypatch.setattr(fused, "FusedSampler", partial(fused.FusedSampler, interpret=True))
    short = {"hmc_steps": 1, "leapfrog_steps": 1}
    one, two = (trained("vcd", replicas, **short) for replicas in (1, 2))
    assert_same_training(two, one)
    monkeypatch.undo()
    plain = trained("vcd", 1, **short)
    assert_same_numbers(one[0]["loss"], plain[0]["loss"], 1e-2)
    assert not np.array_equal(one[0]["loss"], plain[0]["loss"])  # the kernel rounds to float16: it was used


def test_the_fused_sampler_is_chosen_by_the_images_of_one_device(monkeypatch):
    monkeypatch.setattr(model, "platform", lambda: "gpu")
    assert model.choose_sampler(VcdModel(), 2 * fused.LARGEST_BATCH, 2) == "plain"
    assert model.choose_sampler(VcdModel(), 2 * fused.LARGEST_BATCH // 2, 2) == "fused"


@pytest.mark.slow
def test_sixteen_bits_are_within_their_rounding():
    one, two = (trained("vcd", replicas, precision="16.16") for replicas in (1, 2))
    assert_same_numbers(two[0]["loss"], one[0]["loss"], 2e-2)
    assert_same_numbers(two[1]["params"], one[1]["params"], 2e-2)


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_elbo_counts_every_image_once(replicas):
    """A batch that the replicas do not divide is filled up."""
    found, data = [], {"image": BITS[:13], "index": np.arange(13, dtype=np.int32)}
    for count in (1, replicas):
        job = model.Job(SMALL, IMAGES, count)
        state = model.init(job, jax.random.key(3))
        evaluation = Evaluation(model.evaluate(job), data, 6, sharding=job.sharding)
        found.append(evaluation(place_everywhere(state, job.mesh)))
    assert found[0]["samples"] == found[1]["samples"] == 13
    moved = {**state, "params": one_weight_moved(state["params"])}
    controls = (
        evaluation.over({**data, "image": one_pixel_other()[:13]})(place_everywhere(state, job.mesh)),
        evaluation(place_everywhere(moved, job.mesh)),
    )
    compare = partial(assert_same_numbers, wanted=found[0], within=1e-6)
    compare(found[1])
    assert_seen(compare, *controls)


@cache
def weighed(replicas, batch_size, changed=None):
    """The ensemble and the estimates of 11 images, in groups of four chains a device."""
    params, x = small_model()
    if changed == "pixel":
        x = x.copy()
        x[10, 0] ^= 1
    if changed == "weight":
        params = with_moved_weight(params, "decoder", 0, "w")
    mesh = mesh_of_replicas(replicas)
    estimate = LikelihoodEstimator(
        place_everywhere(params, mesh), x, jax.random.key(3), batch_size=batch_size, samples=120, mesh=mesh
    )
    ensemble = estimate.sample(0.3, 3, 20, 20, nothing)
    chosen = make_proposals(estimate.encoder, ensemble.mean, ensemble.squares, 20)
    parts = {name: estimate.weigh(name, proposal, 120, nothing) for name, proposal in chosen.items()}
    figures = ensemble.step_size, ensemble.acceptance, ensemble.mean, ensemble.squares, parts
    return jax.tree.map(np.asarray, figures)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "size"), [(3, 5), (2, 11), (4, 2)])
def test_likelihoods_are_those_of_one_device(monkeypatch, replicas, size):
    monkeypatch.setitem(likelihood.CHAINS, "cpu", 4)
    found, wanted = weighed(replicas, size), weighed(1, size)
    assert 0.5 < wanted[1] < 1
    assert_same_numbers(found, wanted, 1e-6)
    changes = ("pixel", "weight") if replicas == 3 else ("pixel",)
    controls = (weighed(replicas, size, changed) for changed in changes)
    assert_seen(partial(assert_same_numbers, wanted=wanted, within=1e-6), *controls)


def test_rows_are_cut_alike_whatever_the_shares():
    """Estimates are laid out as the images were: a second cut by the size of the first is the same."""
    for count in range(1, 30):
        for size in range(1, 12):
            for shares in (1, 2, 3, 4):
                rows = np.arange(count)
                cut = likelihood.split_rows(rows, size, shares)
                assert cut.shape[1] % shares == 0 and cut.shape[1] < size + shares
                np.testing.assert_array_equal(cut.reshape(-1)[:count], rows)
                np.testing.assert_array_equal(likelihood.split_rows(rows, cut.shape[1], shares), cut)


def test_what_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"^--replicas 3: 100 images an update .* --micro-batch-size"):
        VcdTrain(replicas=3)
    with pytest.raises(DeviceError, match="replicas=20: only 4 cpu devices"):
        train.run(VcdTrain(replicas=20, results_dir=tmp_path), None, "test")
    assert not list(tmp_path.iterdir())
