"""The whole update of every method against a float64 oracle; precision; what a batch and an update are made of."""

import dataclasses
from fractions import Fraction
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vcd_oracle as oracle

from hotloop.engine.precision import parse
from hotloop.families.vcd import model, networks
from hotloop.families.vcd.config import VcdModel

IMAGES, BATCH, UPDATES = 14, 6, 4
SMALL = VcdModel(
    sampler="plain",
    z_dim=3,
    hidden=(8, 5),
    hmc_steps=3,
    leapfrog_steps=3,
    step_size=0.7,
    adaptation_rate=0.05,
    shared_updates=2,
    decay_epochs=Fraction(1),
    micro_batch_size=BATCH,
    encoder_mean_rate=5e-3,
    encoder_spread_rate=2e-3,
    decoder_rate=3e-3,
)
"""The rates fall every second update, and the control variate becomes local with the third."""
BITS = np.random.default_rng(0).integers(0, 2, (IMAGES, 784), dtype=np.uint8)
QUICK = {"xla_backend_optimization_level": 0}
"""Half the time to compile, for programs that run once."""


def job(**options):
    return model.Job(dataclasses.replace(SMALL, **options), IMAGES)


def network(generator, *sizes):
    """Weights that say little, so that float32 and float64 stay together for a few updates."""
    return tuple({"w": draw(generator, 0.2, m, n), "b": draw(generator, 0.2, n)} for m, n in pairwise(sizes))


def draw(generator, scale, *shape):
    return jnp.asarray(scale * generator.standard_normal(shape), jnp.float32)


def calm(task, seed=1):
    """A state before its first update."""
    generator, latent, hidden = np.random.default_rng(seed), task.model.z_dim, task.model.hidden
    params = {
        "mean": network(generator, 784, *hidden, latent),
        "spread": network(generator, 784, *hidden, latent),
        "decoder": network(generator, latent, *reversed(hidden), 784),
    }
    zeros = jax.tree.map(lambda leaf: jnp.asarray(np.zeros_like(leaf)), params)
    shared, own = jnp.float32(-300), jnp.asarray(np.zeros(IMAGES, np.float32))
    variates = {"local": {"shared": shared, "own": own}, "global": {"shared": shared}, "none": {}}
    return {
        "params": params,
        "slots": task.optimiser.init(zeros),
        "variate": variates[task.variate],
        "step_size": jnp.float32(task.model.step_size),
        "update": jnp.int32(0),
    }


def numbers(rows=BATCH, seed=5):
    """Random numbers for updates 0, 1, 2, 3: [update, ...] as in `model.Noise`."""
    generator, steps, latent = np.random.default_rng(seed), SMALL.hmc_steps, SMALL.z_dim
    return model.Noise(
        generator.standard_normal((UPDATES, rows, latent)).astype(np.float32),
        generator.standard_normal((UPDATES, steps, rows, latent)).astype(np.float32),
        generator.uniform(size=(UPDATES, steps, rows)).astype(np.float32),
    )


def batch_of(index):
    return {"image": BITS[index], "index": jnp.int32(index)}


def updating(monkeypatch, task, noise):
    """The compiled update, with the numbers of key n looked up in `noise[n]`: half as long to compile."""

    def draws(options, key, rows, first):
        assert options is task.model and rows == noise.start.shape[1] and first == 0
        return jax.tree.map(lambda each: jnp.asarray(each)[jax.random.key_data(key)[1]], noise)

    monkeypatch.setattr(model, "draw_noise", draws)
    return jax.jit(model.update(task), compiler_options=QUICK)


def as_oracle(state):
    """The state as the oracle keeps it: the control variate an entry for each image, whatever its kind."""
    variate = {name: np.asarray(value, np.float64) for name, value in state["variate"].items()}
    return {
        "params": oracle.wide(state["params"]),
        "slots": oracle.wide(state["slots"]["rmsprop_outside"].nu),
        "control": np.zeros(IMAGES) + variate.get("shared", 0.0) + variate.get("own", 0.0),
        "step_size": float(state["step_size"]),
        "updates": int(state["update"]),
    }


def assert_close(ours, theirs, start, tolerance):
    """Leaf by leaf, relative to the largest change since the start."""
    leaves = zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), jax.tree.leaves(start), strict=True
    )
    for (path, leaf), expected, first in leaves:
        scale = np.abs(expected - first).max()
        assert scale > 0, path
        assert np.abs(leaf - expected).max() < tolerance * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "vcd"},
        {"method": "vcd", "control_variate": "global", "adaptation": "constant"},
        pytest.param({"method": "vcd-no-cv"}, marks=pytest.mark.slow),
        {"method": "kl"},
        {"method": "hoffman"},
    ],
    ids=["local", "global", "no-cv", "kl", "hoffman"],
)
def test_updates_are_those_of_a_float64_oracle(options, monkeypatch):
    """Image 3 comes twice in each batch; the switch to local variates and a decay fall in between."""
    task = job(**options)
    noise, state = numbers(), calm(task)
    update = updating(monkeypatch, task, noise)
    expected = start = as_oracle(state)
    moves = 0
    for number in range(UPDATES):
        index = np.random.default_rng(number).permutation(IMAGES)[:BATCH]
        index[[1, 4]] = 3
        drawn = model.Noise(*(np.float64(each[number]) for each in noise))
        expected, seen, margin = oracle.update(task.model, 2, expected, np.float64(BITS[index]), index, drawn)
        assert margin > 1e-3  # no decision so close that float32 may decide otherwise
        state, metrics = update(state, batch_of(index), jax.random.key(number))
        assert ("vcd" in metrics) != options["method"].startswith("vcd")  # there it is the loss
        for name, value in seen.items():
            assert float(metrics["loss" if name not in metrics else name]) == pytest.approx(
                value, rel=2e-5, abs=1e-4
            ), (number, name)
        moves += seen["acceptance"] / UPDATES
        assert float(state["step_size"]) == float(metrics["step_size"])
    assert options["method"] == "kl" or 0.3 < moves < 0.97
    ours = as_oracle(state)
    assert_close(ours["params"], expected["params"], start["params"], 3e-4)
    assert_close(ours["slots"], expected["slots"], start["slots"], 3e-4)
    np.testing.assert_allclose(ours["control"], expected["control"], rtol=2e-5)
    assert ours["updates"] == UPDATES


def test_a_batch_that_comes_twice_doubles_every_gradient(monkeypatch):
    """Losses are summed. In the first update v = g^2, so v is four times that of the single batch."""
    task, index, once = job(hidden=(8,), leapfrog_steps=1), np.arange(BATCH), numbers()
    axes = model.Noise(1, 2, 2)
    twice = model.Noise(*(np.concatenate([each, each], axis) for each, axis in zip(once, axes, strict=True)))
    state = calm(task)
    new, metrics = updating(monkeypatch, task, twice)(state, batch_of(np.tile(index, 2)), jax.random.key(1))
    drawn = model.Noise(*(np.float64(each[1]) for each in once))
    single, seen, _ = oracle.update(task.model, 2, as_oracle(state), np.float64(BITS[index]), index, drawn)
    squares = jax.tree.map(lambda v: 4 * v, single["slots"])
    assert_close(as_oracle(new)["slots"], squares, as_oracle(state)["slots"], 3e-4)
    for name in ("loss", "elbo", "step_size"):
        assert float(metrics[name]) == pytest.approx({**seen, "loss": seen["vcd"]}[name], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "kept"), [("16.32", "float32"), ("16.16", "bfloat16")])
def test_half_precision_keeps_its_types_and_stays_near_the_exact_update(monkeypatch, precision, kept):
    task = job(precision=precision, hidden=(8,), leapfrog_steps=1)
    noise, index, state = numbers(), np.arange(BATCH), calm(task)
    state = {**state, **parse(precision).to_update({name: state[name] for name in ("params", "slots")})}
    drawn = model.Noise(*(np.float64(each[0]) for each in noise))
    _, seen, _ = oracle.update(task.model, 2, as_oracle(state), np.float64(BITS[index]), index, drawn)
    update = updating(monkeypatch, task, noise)
    for number in range(UPDATES):
        state, metrics = update(state, batch_of(index), jax.random.key(number))
        assert all(np.isfinite(value) for value in metrics.values())
        for name in ("elbo", "log_joint_z0", "log_joint_zt") if number == 0 else ():
            assert float(metrics[name]) == pytest.approx(seen[name], rel=0.02)
    types = jax.tree.map(lambda leaf: str(leaf.dtype), state)
    assert set(jax.tree.leaves((types["params"], types["slots"]["rmsprop_outside"].nu))) == {kept}
    assert types["slots"]["rmsprop_outside"].updates == types["update"] == "int32"
    assert set(jax.tree.leaves((types["variate"], types["step_size"]))) == {"float32"}
    assert all(np.isfinite(np.float64(leaf)).all() for leaf in jax.tree.leaves(state))


def test_an_update_evaluates_forty_one_gradients(monkeypatch):
    """Eight iterations of five leapfrogs and the one at the start: a gradient is carried over, not made again."""
    counted, exact = [], networks.value_and_gradient

    def counting(decoder, images):
        at = exact(decoder, images)

        def count(z):
            jax.debug.callback(lambda: counted.append(1))
            return at(z)

        return count

    monkeypatch.setattr(networks, "value_and_gradient", counting)
    task = model.Job(VcdModel(z_dim=2, hidden=(3,), micro_batch_size=BATCH), IMAGES)
    assert (task.model.hmc_steps, task.model.leapfrog_steps) == (8, 5)
    ones = model.Noise(jnp.ones((BATCH, 2)), jnp.ones((8, BATCH, 2)), jnp.ones((8, BATCH)))
    monkeypatch.setattr(model, "draw_noise", lambda *_: ones)
    update = jax.jit(model.update(task), compiler_options=QUICK)
    jax.block_until_ready(update(calm(task), batch_of(np.arange(BATCH)), jax.random.key(0)))
    jax.effects_barrier()
    assert len(counted) == 41
