"""A network of five items whose every figure is known: outputs, losses, gradients and three steps of both re-feedings.

The figures are those of the two earlier programs' formulas in float64: joint re-feeding by one of them, alternate by
the other.
"""

from dataclasses import replace
from math import log2

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recommender_small import Small, float64, quick, with_params  # noqa: F401

from hotloop.families.recommender import model
from hotloop.families.recommender.config import UpdateOptions

X = np.array([[5.0, 0, 3, 0, 1], [0, 4, 0, 0, 2]])
OUTPUT = [
    [0.62261437, -0.26790214, 0.29946454, 0.47721480, -0.34339049],
    [-0.12616590, 0.67515282, -0.17381911, 0.16283388, 0.59150458],
]
MASKED, DENSE = 8.259512581188204, 0.03686336656302658
JOINT = 8.296375947751232
RATE = 0.01
NET = UpdateOptions(
    size=128,
    no_dropout=True,
    batch_size=2,
    base_learning_rate=log2(RATE / 2),
    precision="32.32",
    weight_decay=1e-4,
)
JOB = Small(NET, 5, widths=(4, 3))
STEPS_JOINT = [JOINT, 7.161053675204825, 4.847729515242423]
STEPS_ALTERNATE = [(8.259512581, 0.005080588), (6.053796004, 0.075942959), (2.395352807, 0.476599139)]


@pytest.fixture(params=["float64", "float32"])
def numbers(request, monkeypatch):
    """The type to compute in, and the relative error that it may have."""
    if request.param == "float32":
        return np.float32, 1e-5
    request.getfixturevalue("float64")
    constant = lambda update: jnp.float64(JOB.rates[0])  # noqa: E731
    monkeypatch.setattr(model.optim, "learning_rate", lambda *_, **__: constant)
    return np.float64, 1e-9


def params(dtype):
    def weights(layer, rows, columns):
        places = np.arange(rows * columns).reshape(rows, columns)
        return 0.5 * np.sin(1 + layer + places)

    encoder = [
        {"w": weights(n, *size), "b": np.full(size[1], 0.1)} for n, size in enumerate([(5, 4), (4, 3)])
    ]
    decoder = [{"b": np.full(4, 0.2)}, {"b": np.full(5, 0.2)}]
    tree = {"encoder": tuple(encoder), "decoder": tuple(decoder)}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def parts(weights, x):
    """L_mask, L_ref with the gradient through everything, and L_ref with the first output detached."""
    y = model.forward(weights, x)
    again, fixed = model.forward(weights, y), jax.lax.stop_gradient(y)
    detached = jnp.square(model.forward(weights, fixed) - fixed).mean()
    return jnp.stack([model.masked_error(y, x), jnp.square(again - y).mean(), detached])


def by_numpy(weights, x):
    """The network once more, written out."""

    def selu(v):
        return 1.0507009873554805 * np.where(v > 0, v, 1.6732632423543772 * (np.exp(np.minimum(v, 0)) - 1))

    (first, second), (third, last) = weights["encoder"], weights["decoder"]
    code = selu(selu(x @ first["w"] + first["b"]) @ second["w"] + second["b"])
    return selu(selu(code @ second["w"].T + third["b"]) @ first["w"].T + last["b"])


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_outputs_errors_and_their_means(numbers):
    dtype, tolerance = numbers
    state, x = with_params(JOB, params(dtype)), X.astype(dtype)
    errors = model.evaluate(JOB)

    @quick
    def outcome(state):
        return model.predict(JOB, state, x), errors(state, {"ratings": x, "truth": x})

    y, sums = outcome(state)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, OUTPUT, rtol=0, atol=max(5e-9, 0.1 * tolerance))  # eight digits are known
    close(y, by_numpy(params(np.float64), X), min(tolerance, 1e-6))
    squared, count = np.asarray(sums["squared_error"], np.float64), np.asarray(sums["ratings"])
    assert list(count) == [3, 2]
    close(squared.sum() / 5, MASKED, tolerance)
    close(np.sqrt(squared.sum() / 5), 2.8739367740415243, tolerance)
    each = np.sqrt(squared / count)
    np.testing.assert_allclose(each, [3.06915269, 2.55327908], rtol=0, atol=max(5e-9, tolerance))
    np.testing.assert_allclose(each.mean(), 2.81121589, rtol=0, atol=max(5e-9, tolerance))


def test_losses_and_gradients(numbers):
    dtype, tolerance = numbers

    @quick
    def both(weights):
        return parts(weights, X.astype(dtype)), jax.jacrev(parts)(weights, X.astype(dtype))

    values, gradients = jax.tree.map(np.asarray, both(params(dtype)))
    close(values, [MASKED, DENSE, DENSE], tolerance)
    close(values[0] + values[1], JOINT, tolerance)
    mask, through, detached = (jax.tree.map(lambda g, n=n: np.float64(g[n]), gradients) for n in range(3))
    joint = jax.tree.map(np.add, mask, through)
    close(joint["encoder"][0]["w"][0, 0], -2.993414842969891, tolerance)
    close(joint["encoder"][0]["w"][1, 2], 2.3849583972266695, tolerance)
    close(joint["encoder"][1]["w"][3, 2], -2.4185184029346036, tolerance)
    close(joint["encoder"][0]["b"][0], -0.22288452298491823, tolerance)
    close(joint["decoder"][1]["b"][3], -0.011640948011557628, tolerance)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(joint)))
    close(norm, 10.444780100699697, tolerance)
    close(mask["encoder"][0]["w"][0, 0], -3.068596727405324, tolerance)
    assert not mask["encoder"][0]["w"][3].any() and mask["decoder"][1]["b"][3] == 0  # rated by nobody
    close(through["encoder"][0]["w"][0, 0], 0.07518188443543228, tolerance)
    close(detached["encoder"][0]["w"][0, 0], -0.06409862446609428, tolerance)


def three_steps(net, dtype):
    job = replace(JOB, net=net)
    update, state = quick(model.update(job)), with_params(job, params(dtype))
    found = []
    for _ in range(3):
        state, metrics = update(state, {"ratings": X.astype(dtype)}, jax.random.key(0))
        found.append({name: np.float64(value) for name, value in metrics.items()})
    weights = np.asarray(state["params"]["encoder"][0]["w"])
    assert weights.dtype == dtype and int(state["update"]) == 3
    return found, weights[0, 0]


def test_three_steps_of_joint_refeeding(numbers):
    dtype, tolerance = numbers
    found, weight = three_steps(NET, dtype)
    close([each["loss"] for each in found], STEPS_JOINT, tolerance)
    close(found[0]["rmse"], 2.8739367740415243, tolerance)
    close(found[0]["gradient_norm"], 10.444780100699697, tolerance)
    close(weight, 0.6168308514417415, tolerance)


def test_three_steps_of_alternate_refeeding(numbers):
    dtype, tolerance = numbers
    found, weight = three_steps(replace(NET, refeed="alternate", weight_decay=0.0), dtype)
    close([(each["loss"], each["refeed_loss"]) for each in found], STEPS_ALTERNATE, tolerance)
    close(weight, 0.7356468311649731, tolerance)
