"""Steps of the recommender: their order, scaled losses, rates that drop inside a call, and 16-bit weights."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from recommender_small import Small, quick, ratings, with_params

from hotloop.engine.feed import Resident
from hotloop.engine.loop import Program
from hotloop.engine.optim_keys import OPTIMISERS as ENGINE_OPTIMISERS
from hotloop.engine.optim_keys import SCHEDULES as ENGINE_SCHEDULES
from hotloop.families.recommender import model
from hotloop.families.recommender.config import OPTIMISERS, TrainOptions, UpdateOptions, make_schedule
from hotloop.options import Params

KEY = jax.random.key(3)
NET = UpdateOptions(
    size=128,
    batch_size=4,
    base_learning_rate=-7,
    precision="32.32",
    no_dropout=True,
    refeed="none",
    gradient_clipping=True,
    weight_decay=0.1,
)
RATE = 2.0**-7 * 4
ITEMS = 9
X = ratings(4, ITEMS)


def job(**options):
    return Small(replace(NET, **options), ITEMS)


def params(scale=0.8):
    generator = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: model.init(job(), KEY)["params"])
    return jax.tree.map(lambda leaf: np.float32(scale * generator.standard_normal(leaf.shape)), shapes)


def steps(job, weights, count=3, batch=X):
    """The weights after so many updates, and the last update's metrics."""
    update, state = quick(model.update(job)), with_params(job, weights)
    for _ in range(count):
        state, metrics = update(state, {"ratings": batch}, KEY)
    return jax.tree.leaves(state["params"]), metrics


def by_numpy(weights, gradient, clip, decay, momentum, count=3):
    """v <- momentum v + clip(g + decay w); w <- w - rate v."""
    leaves, tree = jax.tree.flatten(jax.tree.map(np.float64, weights))
    velocity = [np.zeros_like(leaf) for leaf in leaves]
    largest = 0.0
    for _ in range(count):
        gradients = [
            np.float64(g) for g in jax.tree.leaves(gradient(tree.unflatten(map(np.float32, leaves))))
        ]
        largest = max(largest, *(np.abs(g).max() for g in gradients))
        for n, g in enumerate(gradients):
            g = g + decay * leaves[n]
            velocity[n] = momentum * velocity[n] + (np.clip(g, -1, 1) if clip else g)
            leaves[n] = leaves[n] - RATE * velocity[n]
    return leaves, largest


@pytest.fixture(scope="module")
def gradient():
    return quick(jax.grad(lambda weights: model.masked_error(model.forward(weights, X), X)))


# The order of things.


@pytest.mark.parametrize(
    ("clip", "decay", "optimizer"), [(True, 0.1, "Momentum"), (False, 0.1, "SGD"), (True, 0.0, "SGD")]
)
def test_unscaled_then_decayed_then_clipped_then_momentum(gradient, clip, decay, optimizer):
    own = job(gradient_clipping=clip, weight_decay=decay, optimizer=optimizer)
    momentum = 0.9 if optimizer == "Momentum" else 0.0
    expected, largest = by_numpy(params(), gradient, clip, decay, momentum)
    assert largest > 2, "clipping must matter"
    found, _ = steps(own, params())
    for leaf, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(leaf, value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Muon"])
def test_other_optimisers_step_by_the_rate_and_have_their_decay_where_it_belongs(optimizer):
    """The first step of Adam is the rate, whatever the gradient: L2 changes nothing of it, decay beside does."""
    (bare, _), (decayed, _) = (
        steps(job(optimizer=optimizer, weight_decay=decay, gradient_clipping=False), params(), count=1)
        for decay in (0.0, 0.1)
    )
    for start, plain, shrunk in zip(jax.tree.leaves(params()), bare, decayed, strict=True):
        move, beside = np.asarray(plain) - start, -RATE * 0.1 * start
        if optimizer != "Muon":
            assert np.abs(move).max() == pytest.approx(RATE, rel=1e-3)
        if optimizer != "Adam":
            np.testing.assert_allclose(np.asarray(shrunk) - plain, beside, atol=2e-6)


def test_lars_moves_a_layer_by_a_share_of_its_norm_and_rmsprop_by_the_rate():
    plain = {"weight_decay": 0.0, "gradient_clipping": False}
    layer_by_layer, _ = steps(job(optimizer="LARS", **plain), params(), count=1)
    for start, leaf in zip(jax.tree.leaves(params()), layer_by_layer, strict=True):
        if leaf.ndim > 1:
            assert np.linalg.norm(leaf - start) / np.linalg.norm(start) == pytest.approx(RATE, rel=1e-4)
    by_squares, _ = steps(job(optimizer="RMSprop", **plain), params(), count=1)
    for start, leaf in zip(jax.tree.leaves(params()), by_squares, strict=True):
        # The mean of squares starts with a tenth of the first.
        assert np.abs(leaf - start).max() == pytest.approx(RATE * 10**0.5, rel=1e-3)
    inside, _ = steps(job(optimizer="RMSpropInside", **plain), params(), count=1)
    for start, leaf in zip(jax.tree.leaves(params()), inside, strict=True):
        assert np.abs(leaf - start).max() == pytest.approx(RATE / (2.0**-10 * 4) ** 0.5, rel=1e-3)


def test_every_optimiser_of_the_engine_has_a_name_here_and_takes_its_parameters():
    known = {name for name, _ in OPTIMISERS.values()}
    assert known == set(ENGINE_OPTIMISERS) - {"adamw"}  # AdamW is adam, with --weight-decay beside it
    (usual, _), (slower, _) = (
        steps(job(optimizer="RMSprop", optimizer_params=Params(decay=decay), weight_decay=0.0), params(), 1)
        for decay in (0.9, 0.99)
    )
    for start, one, two in zip(jax.tree.leaves(params()), usual, slower, strict=True):
        assert np.abs(two - start).max() == pytest.approx(np.abs(one - start).max() * 10**0.5, rel=1e-3)


def test_the_scale_of_the_loss_makes_no_difference_in_float32():
    plain, said = steps(job(loss_scaling=1.0, gradient_clipping=False), params())
    scaled, figures = steps(job(loss_scaling=1000.0, gradient_clipping=False), params())
    for leaf, value in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(leaf, value, rtol=2e-5, atol=2e-6)
    for name in ("loss", "rmse", "gradient_norm", "learning_rate"):
        assert float(said[name]) == pytest.approx(float(figures[name]), rel=2e-5)


# Rates.


@pytest.mark.parametrize("batch", [64, 32, 8])
@pytest.mark.parametrize("exponent", [-16, -12.5, -20])
def test_the_rate_is_a_power_of_two_times_the_batch(batch, exponent):
    own = Small(UpdateOptions(size=128, batch_size=batch, base_learning_rate=exponent), ITEMS, (5, 7))
    np.testing.assert_allclose(own.rates, 2.0**exponent * batch * np.array([1, 0.1, 0.01]), rtol=1e-14)
    if exponent == -16:
        assert own.rates[0] == {64: 9.765625e-4, 32: 4.8828125e-4, 8: 1.220703125e-4}[batch]


def train(name, **options):
    chosen = (
        {} if name == "random" else {"training_data_file": Path(f"{name}_train.txt"), "no_validation": True}
    )
    return TrainOptions(**chosen, **options).resolve()


@pytest.mark.parametrize(
    ("name", "users", "calls", "updates", "drops", "every"),
    [
        ("3m", 311_315, 3_113, 778_250, (1556, 2334), 19),
        ("6m", 390_795, 3_907, 976_750, (1953, 2930), 24),
        ("1y", 345_855, 6_917, 1_729_250, (3458, 5187), 43),
        ("full", 477_412, 38_192, 9_548_000, (19_096, 28_644), 238),
        ("random", 480_000, 60, 15_000, (30, 45), 30),
    ],
)
def test_calls_drops_and_validations_are_the_old_programs(name, users, calls, updates, drops, every):
    """A drop takes effect with the first call after the one that it names."""
    found = make_schedule(train(name), users)
    assert (found.calls, found.updates, found.updates_per_call) == (calls, updates, 250)
    assert found.drops == tuple(250 * (drop + 1) for drop in drops)
    assert found.validate_every == 250 * every


def test_validations_an_epoch_and_the_length_of_a_call_are_taken_into_account():
    found = make_schedule(train("3m", valid_per_epoch=2.5, device_iterations=100, epochs=3), 311_315)
    per_epoch = 311_315 / (64 * 100)
    calls = int(3 * per_epoch)
    assert (found.calls, found.updates_per_call) == (calls, 100)
    assert found.drops == (100 * (calls // 2 + 1), 100 * (3 * calls // 4 + 1))
    assert found.validate_every == 100 * int(per_epoch / 2.5)


@pytest.mark.parametrize(("users", "batch"), [(943, 64), (64, 64), (1, 1), (7, 64)])
def test_a_small_set_trains_about_as_long_as_its_epochs_say(users, batch):
    found = make_schedule(TrainOptions(size=128, batch_size=batch, epochs=20).resolve(), users)
    assert found.calls >= 1 and found.validate_every >= 1
    assert abs(found.updates - max(1, 20 * users / batch)) <= found.updates_per_call


def test_the_rate_drops_at_its_very_update_inside_one_call():
    own = replace(job(), drops=(2, 5))
    program = Program(model.update(own), Resident({"ratings": X}, 4), 7, KEY)
    _, metrics = program(with_params(own, params()), 0, 7)
    expected = RATE * np.array([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])
    np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-6)


SCHEDULES = {
    "const": ({}, lambda t: 1 + 0 * t),
    "cosine": ({"epochs_to_total_decay": 8}, lambda t: (1 + np.cos(np.pi * np.minimum(t / 20, 1))) / 2),
    "stepped": ({"boundaries": [2], "values": [3 * RATE, RATE]}, lambda t: np.where(t > 5, 1, 3)),
    "polynomial": (
        {"epochs_to_total_decay": 8, "end_learning_rate_ratio": 0.1, "power": 2},
        lambda t: 0.9 * (1 - np.minimum(t / 20, 1)) ** 2 + 0.1,
    ),
    "exponential": ({"decay_rate": 0.5, "decay_epochs": 2}, lambda t: 0.5 ** (t // 5)),
    "one_cycle": (
        {"total_epochs": 8, "peak_epoch": 2},
        lambda t: np.minimum((t + 1) / 6, 1) * np.minimum((20 - np.minimum(t, 20)) / 15, 1),
    ),
}


def test_every_schedule_of_the_engine_is_known_here():
    assert set(SCHEDULES) == set(ENGINE_SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_name_counts_epochs_of_all_users_from_the_base_rate(name):
    """Two and a half updates an epoch."""
    given, shape = SCHEDULES[name]
    own = replace(job(lr_schedule=name, lr_schedule_params=Params(given)), updates_per_epoch=Fraction(5, 2))
    found = [float(model.make_rate(own)(t)) for t in range(24)]
    np.testing.assert_allclose(found, RATE * shape(np.arange(24.0)), rtol=1e-5, atol=1e-12)


def test_weights_move_by_the_rate_of_the_update(gradient):
    own = replace(job(optimizer="SGD", gradient_clipping=False, weight_decay=0.0), drops=(1_000, 2_000))
    update, state = quick(model.update(own)), with_params(own, params())
    slopes = jax.tree.leaves(gradient(params()))
    for number, factor in ((0, 1), (999, 1), (1_000, 0.1), (1_999, 0.1), (2_000, 0.01), (10**9, 0.01)):
        new, _ = update({**state, "update": np.int32(number)}, {"ratings": X}, KEY)
        assert int(new["update"]) == number + 1
        for old, moved, g in zip(
            *map(jax.tree.leaves, (state["params"], new["params"])), slopes, strict=True
        ):
            np.testing.assert_allclose(moved - old, -RATE * factor * g, rtol=1e-4, atol=3e-7)


# 16 bits.


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(("mode", "kept"), [("16.32", "float32"), ("16.16", None), ("32.32", "float32")])
def test_weights_and_momentum_are_kept_as_the_mode_says(mode, kept, half):
    own = job(precision=mode, half=half, gradient_clipping=False)
    key, batch = KEY, {"ratings": X}
    state = jax.eval_shape(lambda: model.init(own, key))
    new, metrics = jax.eval_shape(model.update(own), state, batch, key)
    for tree in (state["params"], new["params"], state["optimiser"], new["optimiser"]):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype(kept or half)}
    assert {metrics[name].dtype for name in metrics} == {jnp.dtype("float32")}
    assert jax.eval_shape(lambda: model.predict(own, model.init(own, key), X)).dtype == jnp.float32


def test_the_default_is_float16_with_a_loss_times_a_thousand_and_stochastic_rounding():
    assert (UpdateOptions().half, UpdateOptions().loss_scaling, UpdateOptions().no_prng) == (
        "float16",
        1000.0,
        False,
    )
    policy = Small(replace(UpdateOptions(), size=128, precision="16.16"), ITEMS).policy
    assert policy.stochastic_rounding and policy.update == policy.compute == np.float16
    assert not Small(
        replace(UpdateOptions(), size=128, precision="16.16", no_prng=True), ITEMS
    ).policy.stochastic_rounding


@pytest.fixture(scope="module", params=[False, True], ids=["stochastic", "nearest"])
def tiny(request):
    """Whether float16 weights are rounded to nearest, the weights, and 800 tiny updates of them from a key."""
    own = job(
        precision="16.16",
        no_prng=request.param,
        base_learning_rate=-20,
        optimizer="SGD",
        gradient_clipping=False,
        weight_decay=0.0,
    )
    update, start = model.update(own), jax.tree.map(np.float16, params(0.3))

    @quick
    def updates(key):
        def one(n, state):
            return update(state, {"ratings": jnp.asarray(X)}, jax.random.fold_in(key, n))[0]

        return lax.fori_loop(0, 800, one, jax.tree.map(jnp.asarray, with_params(own, start)))["params"]

    return request.param, start, updates


def test_tiny_steps_are_lost_when_rounded_to_nearest_and_kept_in_the_mean_at_random(tiny, gradient):
    """Only weights whose spacing is 50 steps or more are looked at."""
    nearest, start, updates = tiny
    slopes = gradient(jax.tree.map(np.float32, start))
    moved, wanted, noise = 0.0, 0.0, 0.0
    for old, new, slope in zip(*map(jax.tree.leaves, (start, updates(KEY), slopes)), strict=True):
        step = -(2.0**-20) * 4 * np.float64(slope)
        spacing = np.float64(np.spacing(np.abs(old)))
        slow = np.abs(step) < spacing / 50
        moved += (np.sign(step) * (np.float64(new) - old))[slow].sum()
        wanted += 800 * np.abs(step)[slow].sum()
        noise += 800 * (np.abs(step) * spacing)[slow].sum()
        assert not nearest or np.array_equal(new[slow], old[slow])
    assert wanted > 8 * np.sqrt(noise), "a move must be seen above the noise"
    assert nearest or moved == pytest.approx(wanted, abs=4 * np.sqrt(noise))


def test_rounding_follows_the_key_unless_it_is_to_nearest(tiny):
    nearest, _, updates = tiny
    one, same, other = (jax.tree.leaves(updates(jax.random.key(n))) for n in (3, 3, 4))
    assert all(np.array_equal(*pair) for pair in zip(one, same, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True)) == nearest


def run(mode):
    """The metrics of 100 updates with dropout and joint re-feeding."""
    net = UpdateOptions(size=128, batch_size=32, base_learning_rate=-12, precision=mode)
    own, data = Small(net, 40, widths=(24,)), ratings(64, 40)
    update = model.update(own)

    @quick
    def updates(state):
        def one(state, n):
            batch = lax.dynamic_slice_in_dim(jnp.asarray(data), 32 * (n % 2), 32)
            return update(state, {"ratings": batch}, jax.random.fold_in(KEY, n))

        return lax.scan(one, state, jnp.arange(100))

    state, metrics = updates(model.init(own, jax.random.key(1)))
    return state, {name: np.asarray(value) for name, value in metrics.items()}


@pytest.mark.slow
def test_half_precision_stays_finite_and_tracks_float32():
    _, exact = run("32.32")
    for mode in ("16.32", "16.16"):
        state, metrics = run(mode)
        assert all(np.isfinite(value).all() for value in metrics.values())
        assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves(state["params"]))
        assert exact["rmse"][:5].mean() > 1.3 * exact["rmse"][-20:].mean()
        assert metrics["rmse"][-20:].mean() == pytest.approx(exact["rmse"][-20:].mean(), abs=0.02)


def test_a_gradient_that_overflows_is_seen_in_its_norm():
    _, metrics = steps(job(precision="16.32", loss_scaling=1e7, gradient_clipping=False), params(), count=1)
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["gradient_norm"])


@pytest.mark.parametrize("mode", ["16.32", "16.16"])
def test_every_product_of_an_update_takes_16_bit_factors(mode):
    own = job(precision=mode, refeed="joint")
    state = with_params(own, own.policy.to_update(jax.tree.map(jnp.asarray, params())))
    text = jax.jit(model.update(own)).lower(state, {"ratings": X}, KEY).as_text()
    sums = "tensor<4xf32>, tensor<4x"  # a bias's gradient on a CPU: ones times rows
    products = [line.rsplit(" : ", 1)[1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    products = [types for types in products if sums not in types]
    assert len(products) >= 7
    assert all("f32>" not in types.split("->")[0] for types in products)
