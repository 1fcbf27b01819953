"""RMSProp with an epsilon of one outside the root, and the rates' decay inside a device loop."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.optim import FirstSquareState, scale_by_first_square_rms
from hotloop.families.vcd import model
from hotloop.families.vcd.config import VcdModel

RMSPROP = scale_by_first_square_rms(0.9, 1.0)
STEP = jax.jit(lambda g, state: RMSPROP.update(g, state))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def gradients(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return {"w": scale * generator.standard_normal((4, 3)), "b": scale * generator.standard_normal(3)}


def test_the_first_step_is_the_gradient_over_one_plus_its_size(float64):
    g = gradients(0, 5.0)
    steps, slots = STEP(g, RMSPROP.init(g))
    for name, each in g.items():
        np.testing.assert_allclose(slots.nu[name], each**2, rtol=1e-14)
        np.testing.assert_allclose(steps[name], each / (1 + np.abs(each)), rtol=1e-14)
    assert int(slots.updates) == 1


def test_the_first_step_for_a_gradient_of_five_is_that_of_the_authors():
    steps, _ = STEP(jnp.float32(5.0), RMSPROP.init(jnp.float32(0)))
    assert 5e-4 * float(steps) == pytest.approx(4.2e-4, abs=5e-6)  # 9.7e-4 where v starts at 0.01


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_hundred_steps_follow_the_recurrence(float64, scale):
    weights = gradients(1)
    slots, moved = RMSPROP.init(weights), dict(weights)
    v = {name: np.zeros_like(each) for name, each in weights.items()}
    for number in range(100):
        g = gradients(10 + number, scale)
        steps, slots = STEP(g, slots)
        for name in weights:
            kept = 0.0 if number == 0 else 0.9
            v[name] = kept * v[name] + (1 - kept) * g[name] ** 2
            moved[name] = moved[name] - 0.01 * g[name] / (1 + np.sqrt(v[name]))
            weights[name] = weights[name] - 0.01 * np.asarray(steps[name])
    for name in weights:
        np.testing.assert_allclose(weights[name], moved[name], rtol=1e-12)
        np.testing.assert_allclose(slots.nu[name], v[name], rtol=1e-12)
    assert int(slots.updates) == 100


def test_each_group_moves_by_its_rate_which_falls_at_the_very_update_inside_a_loop():
    """One batch at updates k of a run over 50,000 images, the slots empty: v = g^2 / 10, so v tells the step."""
    options = VcdModel(method="kl", hidden=(16,), z_dim=2, decay_epochs=Fraction(30), learning_rate=0.5)
    job = model.Job(options, 50_000)
    update, batch = model.update(job), {"image": np.ones((4, 784), np.uint8), "index": np.arange(4)}

    def at(k, state):
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        slots = {**state["slots"], "rmsprop_outside": FirstSquareState(zeros, k)}
        new, metrics = update({**state, "slots": slots, "update": k}, batch, jax.random.key(0))
        moves = jax.tree.map(jnp.subtract, state["params"], new["params"])
        return metrics["learning_rate"], moves, new["slots"]["rmsprop_outside"].nu

    ks = [1, 14_999, 15_000, 29_999, 30_000, 389_999, 390_000, 399_999]
    quick = {"xla_backend_optimization_level": 0}
    state = jax.jit(model.init, static_argnums=0, compiler_options=quick)(job, jax.random.key(1))
    run = jax.jit(lambda ks: jax.lax.map(lambda k: at(k, state), ks), compiler_options=quick)
    rates, moves, squares = run(jnp.int32(ks))
    expected = np.array([0.9 ** (k // 15_000) for k in ks])
    assert expected[-1] == pytest.approx(0.0646, abs=5e-5)
    np.testing.assert_allclose(rates, 0.5 * expected, rtol=2e-6)
    for group, base in {"mean": 0.5, "spread": 0.25, "decoder": 0.5}.items():
        for move, v in zip(jax.tree.leaves(moves[group]), jax.tree.leaves(squares[group]), strict=True):
            move, v = (np.asarray(each, np.float64).reshape(len(ks), -1) for each in (move, v))
            place = v[0].argmax()
            step = np.sqrt(10 * v[:, place]) / (1 + np.sqrt(v[:, place]))
            assert step[0] > 0.5
            np.testing.assert_allclose(np.abs(move[:, place]), base * expected * step, rtol=3e-5)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_with_another_optimiser_each_group_still_has_its_rate(optimizer):
    """The first step of Adam is the rate: all of adam's and adamw's, the biases' of muon's."""
    options = VcdModel(method="kl", hidden=(8,), z_dim=2, learning_rate=0.5, optimizer=optimizer)
    job = model.Job(options, 100)
    batch = {"image": np.ones((4, 784), np.uint8), "index": np.arange(4)}
    quick = {"xla_backend_optimization_level": 0}
    state = jax.jit(model.init, static_argnums=0, compiler_options=quick)(job, jax.random.key(1))
    new, _ = jax.jit(model.update(job), compiler_options=quick)(state, batch, jax.random.key(0))
    for group, rate in {"mean": 0.5, "spread": 0.25, "decoder": 0.5}.items():
        layers = zip(new["params"][group], state["params"][group], strict=True)
        sizes = [float(jnp.abs(after["b"] - before["b"]).max()) for after, before in layers]
        # Muon's Adam is Nesterov's, whose first step is 28/19 of the rate.
        assert sizes == pytest.approx([rate * (28 / 19 if optimizer == "muon" else 1)] * len(sizes), rel=2e-3)
    assert int(new["update"]) == 1


@pytest.mark.parametrize(("optimizer", "share"), [("lars", True), ("sgd", False), ("momentum", False)])
def test_rules_without_a_mean_of_squares_have_the_rate_of_each_group(optimizer, share):
    """The first step of LARS is the rate times a layer's norm; that of the others grows with the rate."""

    def moved(rate):
        options = VcdModel(method="kl", hidden=(8,), z_dim=2, learning_rate=rate, optimizer=optimizer)
        job = model.Job(options, 100)
        batch = {"image": np.ones((4, 784), np.uint8), "index": np.arange(4)}
        state = model.init(job, jax.random.key(1))
        quick = {"xla_backend_optimization_level": 0}
        new, _ = jax.jit(model.update(job), compiler_options=quick)(state, batch, jax.random.key(0))
        norms = jax.tree.map(
            lambda w, old: float(jnp.linalg.norm(w - old) / jnp.linalg.norm(old)),
            new["params"],
            state["params"],
        )
        return {group: norms[group][0]["w"] for group in ("mean", "spread", "decoder")}

    first = moved(1e-2)
    if share:
        assert first == pytest.approx({"mean": 1e-2, "spread": 5e-3, "decoder": 1e-2}, rel=1e-3)
    else:
        assert moved(2e-2) == pytest.approx({name: 2 * size for name, size in first.items()}, rel=1e-3)


def test_the_spread_has_exactly_half_the_rate():
    table = {"decoder_rate": None, "encoder_mean_rate": None, "encoder_spread_rate": None}
    for options in (
        VcdModel(),
        VcdModel(learning_rate=7e-3),
        VcdModel(**table),
        VcdModel(micro_batch_size=128, **table),
    ):
        rates = options.rates()
        assert rates["mean"] == rates["decoder"] == 2 * rates["spread"]
        factor = jnp.float32(0.9) ** 7
        assert float(rates["spread"] * factor) * 2 == float(rates["mean"] * factor)
