"""Muon for a stack of matrices: against float64 matrix by matrix, against optax's, and whole updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hotloop.engine.muon import muon, orthogonalise

SHAPES = {"a": (3, 3, 4, 8), "b": (3, 3, 8, 8), "c": (5, 12), "d": (40, 6)}
"""Kernels, a wide matrix and a tall one: nearly all of the stack is padding for some."""
A, B, C = COEFFICIENTS = (3.4576, -4.7391, 2.0843)
"""A step multiplies small singular values, and errors with them, by A."""


def draw(seed, shapes=SHAPES):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def newton_schulz(array, steps):
    """In float64, as the public programs write it: rows are outputs, and A = X X'."""
    x = array.astype(np.float64).reshape(-1, array.shape[-1]).T
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = A * x + (B * square + C * square @ square) @ x
    return x.T.reshape(array.shape)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_each_matrix_of_the_stack_goes_through_its_own_steps(steps):
    arrays = draw(0)
    found = orthogonalise(list(arrays.values()), steps, COEFFICIENTS)
    for got, array in zip(found, arrays.values(), strict=True):
        np.testing.assert_allclose(got, newton_schulz(array, steps), rtol=0, atol=2e-7 * A**steps)


def test_five_steps_bring_singular_values_near_one():
    (found,) = orthogonalise([draw(1)["d"]], 5)
    assert np.all(np.abs(np.linalg.svd(found)[1] - 1) < 0.35)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_products_of_16_bits_are_as_near_as_their_rounding(dtype):
    arrays = draw(2)
    found = orthogonalise(list(arrays.values()), 3, COEFFICIENTS, dtype)
    for got, array in zip(found, arrays.values(), strict=True):
        assert got.dtype == jnp.float32
        error = np.linalg.norm(got - newton_schulz(array, 3)) / np.linalg.norm(newton_schulz(array, 3))
        assert 1e-6 < error < A**3 * float(jnp.finfo(dtype).eps)


def test_zeros_stay_zeros():
    (found,) = orthogonalise([jnp.zeros((4, 3))], 3)
    np.testing.assert_array_equal(found, 0)


def test_the_first_directions_are_those_of_optax():
    shapes = {"d": SHAPES["d"], "e": (7, 7)}
    params = draw(0, shapes)
    axes = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(0, 1), params)
    theirs = optax.contrib.scale_by_muon(
        COEFFICIENTS, ns_steps=3, beta=0.6, nesterov=True, weight_dimension_numbers=axes
    )
    ours = muon(lambda number: jnp.float32(1), momentum=0.6, steps=3, coefficients=COEFFICIENTS)
    gradients = jax.tree.map(jnp.asarray, draw(1, shapes))
    # Of the first update: later ones differ in how they weigh the newest gradient.
    expected, _ = theirs.update(gradients, theirs.init(params), params)
    found, _ = ours.update(gradients, ours.init(params), params)
    for name in shapes:
        np.testing.assert_allclose(-found[name], expected[name], rtol=0, atol=1e-5)


def test_updates_follow_momentum_rate_rescaling_and_decay():
    rates, rescaled = [0.3, 0.2, 0.1], [False, True, False]
    transformation = muon(
        lambda number: jnp.asarray(rates)[number],
        momentum=0.7,
        steps=3,
        coefficients=COEFFICIENTS,
        decay=0.05,
        is_rescaled=lambda number: jnp.asarray(rescaled)[number],
    )
    params = draw(10)
    state = transformation.init(params)
    expected = {name: value.astype(np.float64) for name, value in params.items()}
    velocity = {name: np.zeros(value.shape) for name, value in params.items()}
    for number, rate in enumerate(rates):
        gradients = draw(number)
        changes, state = transformation.update(jax.tree.map(jnp.asarray, gradients), state, params)
        params = optax.apply_updates(params, changes)
        for name, weight in expected.items():
            velocity[name] = 0.7 * velocity[name] + gradients[name]
            if rescaled[number]:
                weight = weight * weight.shape[-1] ** 0.5 / np.linalg.norm(weight)
            step = newton_schulz(gradients[name] + 0.7 * velocity[name], 3)
            expected[name] = (weight - rate * step) * (1 - rate * 0.05)
    for name, weight in expected.items():
        np.testing.assert_allclose(params[name], weight, rtol=0, atol=1e-5)
