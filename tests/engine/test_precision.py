"""Precision modes: what is cast, how parameters move, and which modes learn at a small learning rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from hotloop.engine import precision
from hotloop.engine.precision import Policy, cast, optimise, parse, partials_note
from hotloop.errors import OptionError

KEY = jax.random.key(7)
HALVES = ("bfloat16", "float16")
halves = pytest.mark.parametrize("half", HALVES)


@halves
@pytest.mark.parametrize(
    ("mode", "half_compute", "half_update"),
    [("32.32", False, False), ("16.32", True, False), ("16.16", True, True)],
)
def test_a_mode_names_the_compute_and_the_update_type(mode, half, half_compute, half_update):
    policy = parse(mode, half, half_partials=True)
    assert policy.compute == jnp.dtype(half if half_compute else "float32")
    assert policy.update == jnp.dtype(half if half_update else "float32")
    assert policy.stochastic_rounding == half_update
    assert policy.half_partials == half_compute


def test_bfloat16_is_the_default_half_type():
    assert parse("16.16") == parse("16.16", "bfloat16")


@pytest.mark.parametrize("mode", ["32.16", "16", "16.16.16", "8.32", "", "16,16", "fp16"])
def test_an_unknown_mode_is_an_error_that_names_the_legal_ones(mode):
    with pytest.raises(OptionError, match=r"precision=.*: must be one of 32\.32, 16\.32, 16\.16"):
        parse(mode)


def test_an_unknown_half_type_is_an_error_that_names_the_legal_ones():
    with pytest.raises(OptionError, match="half=float8: must be one of bfloat16, float16"):
        parse("16.16", "float8")


def test_a_policy_can_be_a_dictionary_key_and_a_static_argument():
    policy = parse("16.16", "float16")
    assert {policy: 1}[parse("16.16", "float16")] == 1
    assert (
        jax.jit(lambda policy, x: policy.to_compute(x), static_argnums=0)(policy, jnp.ones(2)).dtype
        == "float16"
    )


def test_only_floating_leaves_are_cast():
    tree = {"w": jnp.ones(3), "count": jnp.int32(4), "mask": jnp.array([True]), "key": KEY}
    half = cast(tree, jnp.dtype("bfloat16"))
    assert half["w"].dtype == jnp.bfloat16
    for name in ("count", "mask", "key"):
        assert half[name] is tree[name]
    policy = parse("16.32")
    assert policy.to_compute(tree)["w"].dtype == jnp.bfloat16
    assert policy.to_update(tree)["w"].dtype == jnp.float32


def add(policy: Policy, params, updates, key):
    """An optimiser whose step is the gradient."""
    return optimise(policy, optax.identity(), updates, optax.EmptyState(), params, key)[0]


def test_in_float32_an_update_is_the_plain_sum():
    params, updates = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([1e-7, 0.25])}
    for mode in ("32.32", "16.32"):
        moved = add(parse(mode), params, updates, KEY)
        np.testing.assert_array_equal(moved["w"], optax.apply_updates(params, updates)["w"])


def walk(policy: Policy, step: float, updates: int) -> np.ndarray:
    """Add `step` so many times to 10,000 half-precision ones."""

    def body(params, n):
        return add(policy, params, jnp.full((10_000,), step), jax.random.fold_in(KEY, n)), None

    start = jnp.ones((10_000,), policy.update)
    return np.asarray(jax.jit(lambda: lax.scan(body, start, jnp.arange(updates))[0])()).astype(np.float64)


@halves
def test_small_steps_add_up_only_under_stochastic_rounding(half):
    step, updates = 1e-4, 500
    assert (walk(parse("16.16", half, stochastic_rounding=False), step, updates) == 1.0).all()
    end = walk(parse("16.16", half), step, updates)
    assert end.std() > 0
    assert abs(end.mean() - (1 + step * updates)) < 4 * end.std() / np.sqrt(end.size)


def test_sums_are_made_in_float32_before_they_are_rounded():
    params = jnp.full((4000,), 1.0, jnp.bfloat16)
    updates = jnp.full((4000,), 2.0**-10, jnp.bfloat16)
    moved = add(parse("16.16"), params, updates, KEY).astype(jnp.float32)
    assert {float(value) for value in np.unique(moved)} == {1.0, 1.0078125}
    assert abs(float((moved > 1).mean()) - 1 / 8) < 4 * np.sqrt(7 / 64 / 4000)


OPTIMISERS = {
    "sgd": lambda rate: optax.sgd(rate),
    "momentum": lambda rate: optax.sgd(rate / 10, momentum=0.9),
    "adam": lambda rate: optax.adam(rate),
}
FEATURES, SAMPLES, UPDATES = 16, 64, 3000


def least_squares() -> tuple[jax.Array, jax.Array, jax.Array]:
    inputs = jnp.linalg.qr(jax.random.normal(KEY, (SAMPLES, FEATURES)))[0] * np.sqrt(SAMPLES)
    solution = 1.6 + 0.2 * jax.random.uniform(jax.random.key(1), (FEATURES,))
    return inputs, inputs @ solution, solution


def distance_left(policy: Policy, optimiser: optax.GradientTransformation) -> float:
    """Train from ones by whole-batch descent in one compiled call; the share of the way that is left."""
    inputs, targets, solution = least_squares()

    def loss(params):
        predicted = policy.to_compute(inputs) @ policy.to_compute(params)
        return 0.5 * jnp.mean((predicted.astype(jnp.float32) - targets) ** 2)

    def body(carry, n):
        params, state = carry
        gradient = jax.grad(loss)(params)
        return optimise(policy, optimiser, gradient, state, params, jax.random.fold_in(KEY, n)), None

    start = policy.to_update(jnp.ones(FEATURES))
    carry = (start, optimiser.init(start))
    (params, state), _ = jax.jit(lambda carry: lax.scan(body, carry, jnp.arange(UPDATES)))(carry)
    assert params.dtype == policy.update
    assert all(leaf.dtype in (policy.update, jnp.int32) for leaf in jax.tree.leaves(state))
    return float(jnp.linalg.norm(params - solution) / jnp.linalg.norm(solution - 1))


@pytest.mark.parametrize("name", OPTIMISERS)
@halves
@pytest.mark.slow
def test_every_mode_learns_and_rounding_to_nearest_stalls(half, name):
    # Steps below half a unit in the last place of 1: 2^-8 for bfloat16, 2^-11 for float16.
    rate = {"bfloat16": 3e-3, "float16": 4e-4}[half] * (0.5 if name == "adam" else 1)
    left = {
        mode: distance_left(parse(mode, half), OPTIMISERS[name](rate)) for mode in ("32.32", "16.32", "16.16")
    }
    nearest = distance_left(parse("16.16", half, stochastic_rounding=False), OPTIMISERS[name](rate))
    assert left["32.32"] < 0.35
    assert abs(left["16.32"] - left["32.32"]) < 0.01
    assert abs(left["16.16"] - left["32.32"]) < 0.01
    assert nearest > 0.9


def test_training_is_the_same_for_the_same_key():
    policy, optimiser = parse("16.16"), optax.sgd(1e-3)
    assert distance_left(policy, optimiser) == distance_left(policy, optimiser)


@halves
def test_it_is_said_where_the_backend_adds_in_float32_all_the_same(half):
    assert partials_note(parse("16.16", half)) is None
    assert partials_note(parse("32.32", half, half_partials=True)) is None
    note = partials_note(parse("16.16", half, half_partials=True))
    if jax.default_backend() == "cpu":
        assert note == "half partials: cpu adds matrix products and convolutions in float32 all the same"


def test_float16_products_are_ordered_to_add_in_half_where_the_backend_takes_the_order(monkeypatch):
    asked, multiply = [], jnp.matmul

    def refuse(*factors, precision=None, **how):
        asked.append(precision)
        if precision is not None:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: Unsupported algorithm: ALG_DOT_F16_F16_F16")
        return multiply(*factors, **how)

    monkeypatch.setattr(jnp, "matmul", refuse)
    note = partials_note(parse("16.16", "float16", half_partials=True))
    assert asked == [None, lax.DotAlgorithmPreset.F16_F16_F16]
    if jax.default_backend() == "cpu":  # how another backend adds when left to itself is not ours to know
        assert "matrix products" in note
    partials_note(parse("16.16", "bfloat16", half_partials=True))
    assert asked[2:] == [None]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_rates_and_decays_in_an_optimisers_state_are_not_rounded(half):
    policy = precision.parse("16.16", half)
    params = policy.to_update({"w": jnp.ones(4)})
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    state = precision.start_state(policy, adam, params)
    for _ in range(2):
        params, state = precision.optimise(policy, adam, {"w": jnp.ones(4)}, state, params, jax.random.key(0))
    assert state.hyperparams["b2"] == np.float32(0.999)
    assert state.hyperparams["learning_rate"] == np.float32(1e-3)
    assert jnp.isfinite(params["w"]).all() and params["w"].dtype == half
    moments = state.inner_state[0].nu["w"]
    assert moments.dtype == ("bfloat16" if half == "bfloat16" else "float32")
