"""RMSProp with an epsilon of one outside the root, and the rates' decay inside a device loop."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.engine.optim import FirstSquareState, scale_by_first_square_rms
from hotloop.engine.optim_keys import OPTIMISERS, SCHEDULES
from hotloop.families.vcd import model
from hotloop.families.vcd.config import VcdModel
from hotloop.options import Params, options_of

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
@pytest.mark.slow
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


def test_every_optimiser_and_schedule_of_the_engine_can_be_asked_for():
    """One RMSProp has its epsilon outside the root, the other inside; `rmsprop` is the authors'."""
    choices = {each.name: each.kind.choices for each in options_of(VcdModel)}
    asked = [VcdModel(optimizer=name).optimiser()[0] for name in choices["optimizer"]]
    assert sorted(asked) == sorted(OPTIMISERS)
    assert {*choices["lr_schedule"]} == {*SCHEDULES}


def stepped_once(**options):
    """A job, and its state before and after an update on one batch."""
    job = model.Job(VcdModel(method="kl", hidden=(8,), z_dim=2, **options), 100)
    batch = {"image": np.ones((4, 784), np.uint8), "index": np.arange(4)}
    quick = {"xla_backend_optimization_level": 0}
    state = jax.jit(model.init, static_argnums=0, compiler_options=quick)(job, jax.random.key(1))
    new, metrics = jax.jit(model.update(job), compiler_options=quick)(state, batch, jax.random.key(0))
    return state, new, metrics


def test_rmsprop_with_its_epsilon_inside_the_root_steps_by_the_rate_over_the_root_of_a_tenth():
    state, new, _ = stepped_once(learning_rate=0.1, optimizer="rmsprop_inside")
    for group, rate in {"mean": 0.1, "spread": 0.05, "decoder": 0.1}.items():
        layers = zip(new["params"][group], state["params"][group], strict=True)
        for after, before in layers:
            assert float(jnp.abs(after["b"] - before["b"]).max()) == pytest.approx(rate * 10**0.5, rel=1e-3)


def test_parameters_of_an_optimiser_replace_its_own():
    params = Params(decay=0.5, epsilon=1e-6, first_square=False)
    state, new, _ = stepped_once(learning_rate=0.1, optimizer_params=params)
    step = jnp.abs(new["params"]["mean"][0]["b"] - state["params"]["mean"][0]["b"]).max()
    assert float(step) == pytest.approx(0.1 * 2**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "params", "factors"),
    [
        ("const", None, [1, 1, 1, 1]),
        ("cosine", {"epochs_to_total_decay": 4}, [1, 0.5, 0, 0]),
        ("stepped", {"boundaries": [1], "values": [1, 0.25]}, [1, 0.25, 0.25, 0.25]),
        (
            "polynomial",
            {"epochs_to_total_decay": 4, "end_learning_rate_ratio": 0.5, "power": 1},
            [1, 0.75, 0.5, 0.5],
        ),
        ("exponential", {"decay_rate": 0.5, "decay_epochs": 2}, [1, 0.5, 0.25, 0.125]),
        ("exponential", None, [1, 1, 0.5, 0.5]),
        ("one_cycle", {"total_epochs": 4, "peak_epoch": 0}, [1, 0.5, 0, 0]),
    ],
)
def test_a_schedule_by_name_is_a_factor_on_every_rate(schedule, params, factors):
    """Epochs are of 2.5 updates: 5, 10 and 15 are the second, fourth and sixth epoch's end."""
    options = VcdModel(
        method="kl", hidden=(2,), z_dim=2, micro_batch_size=4, learning_rate=0.5, optimizer="sgd",
        lr_schedule=schedule, lr_schedule_params=params and Params(params), rate_decay=0.5,
        decay_epochs=Fraction(4),
    )  # fmt: skip
    update = model.update(model.Job(options, 10))
    batch = {"image": np.ones((4, 784), np.uint8), "index": np.arange(4)}
    state = model.init(model.Job(options, 10), jax.random.key(1))

    def at(k):
        return update({**state, "update": k}, batch, jax.random.key(0))[1]["learning_rate"]

    rates = jax.jit(lambda ks: jax.lax.map(at, ks), compiler_options={"xla_backend_optimization_level": 0})
    np.testing.assert_allclose(
        rates(jnp.int32([0, 5, 10, 15])), 0.5 * np.array(factors), rtol=1e-5, atol=1e-9
    )


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
