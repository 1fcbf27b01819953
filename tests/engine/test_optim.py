"""Optimisers: every rule's equations by hand in float64, decay against L2, exclusions, halves, refusals by name."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from hotloop.engine.optim import Rule, norms_and_biases, rule
from hotloop.engine.precision import optimise, parse
from hotloop.errors import OptionError

SGD = {"momentum": 0.9}
LARS = {"momentum": 0.9, "weight_decay": 0.05, "eeta": 0.01, "epsilon": 0}
RMSPROP = {"momentum": 0.9, "base_decay_exponent": -9, "epsilon": 1e-3}
RULES = {"sgd": SGD, "lars": LARS, "rmsprop": RMSPROP}
RATES = (0.5, 0.5, 0.1, 0.2)
BATCH = 32


def leaves(seed: int) -> dict:
    """A convolution without bias, a norm layer, and a dense layer; few shapes, as each is compiled."""
    draw = np.random.default_rng(seed).normal
    return {
        "conv": {"kernel": draw(size=(2, 3))},
        "norm": {"scale": draw(size=3), "offset": draw(size=3)},
        "fc": {"kernel": draw(size=(2, 3)), "bias": draw(size=3)},
    }


PARAMS, GRADIENTS = leaves(0), [leaves(n) for n in range(1, 1 + len(RATES))]
PATHS = [("conv", "kernel"), ("norm", "scale"), ("norm", "offset"), ("fc", "kernel"), ("fc", "bias")]


def trained(subject: Rule, params=PARAMS, gradients=GRADIENTS, rates=RATES) -> dict:
    """Parameters after an update with each gradient, in doubles; not compiled, as there are many rules."""
    with jax.enable_x64(True):
        state, params = subject.init(params), jax.tree.map(jnp.asarray, params)
        for gradient, rate in zip(gradients, rates, strict=True):
            steps, state = subject.at(jnp.asarray(rate)).update(gradient, state, params)
            params = jax.tree.map(jnp.add, params, steps)
        return jax.tree.map(np.asarray, params)


def by_hand(name: str, path: tuple[str, str], *, decay=0.0, l2=0.0, nesterov=False) -> np.ndarray:
    """One leaf after the same updates, the equations written out once more."""
    w, a, s = PARAMS[path[0]][path[1]], 0.0, 0.0
    for gradient, rate in zip(GRADIENTS, RATES, strict=True):
        g, m = gradient[path[0]][path[1]] + l2 * w, 0.9
        if name == "lars" and path[1] == "kernel":
            w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
            g = 0.01 * w_norm / (g_norm + 0.05 * w_norm + 1e-7) * (g + 0.05 * w)
        if name == "rmsprop":
            rho = 1 - 2**-9 * BATCH
            s = rho * s + (1 - rho) * g**2
            g = g / np.sqrt(s + 1e-3)
        a = m * a + rate * g
        w = w - (m * a + rate * g if nesterov else a) - rate * decay * w
    return w


VARIANTS = [{}, {"l2": 0.3}, {"decay": 0.2}, {"l2": 0.3, "decay": 0.2}, {"nesterov": True, "decay": 0.2}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_follows_its_equations_with_and_without_decay(name, variant):
    if name == "rmsprop" and "nesterov" in variant:
        variant = {"decay": 0.2}
    params = {**RULES[name], **{key: True for key in variant if key == "nesterov"}}
    regular = {"weight_decay": variant.get("decay", 0), "l2": variant.get("l2", 0)}
    result = trained(rule(name, params, global_batch_size=BATCH, **regular))
    for layer, leaf in PATHS:
        np.testing.assert_allclose(result[layer][leaf], by_hand(name, (layer, leaf), **variant), rtol=1e-12)


@pytest.mark.parametrize(
    ("subject", "peer"),
    [
        (rule("sgd", SGD), optax.sgd(0.1, 0.9)),
        (rule("sgd", {**SGD, "nesterov": True}), optax.sgd(0.1, 0.9, nesterov=True)),
        (rule("sgd", {"momentum": 0}), optax.sgd(0.1)),
        (
            rule("rmsprop", {**RMSPROP, "momentum": 0}, global_batch_size=BATCH),
            optax.rmsprop(0.1, decay=1 - 2**-9 * BATCH, eps=1e-3, eps_in_sqrt=True),
        ),
    ],
    ids=["momentum", "nesterov", "plain", "rmsprop"],
)
def test_at_a_constant_rate_the_rules_are_those_of_optax(subject, peer):
    with jax.enable_x64(True):
        expected = PARAMS
        state = peer.init(expected)
        for gradient in GRADIENTS:
            steps, state = peer.update(gradient, state, expected)
            expected = jax.tree.map(np.add, expected, steps)
    result = trained(subject, rates=(0.1,) * len(GRADIENTS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), result, expected)


def difference(a: dict, b: dict) -> float:
    return max(np.abs(x - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_decay_equals_l2_for_plain_sgd_and_differs_with_momentum():
    for params, same in (({"momentum": 0}, True), (SGD, False)):
        decayed, regularised = (trained(rule("sgd", params, **{key: 0.1})) for key in ("weight_decay", "l2"))
        assert (difference(decayed, regularised) < 1e-12) == same


@pytest.mark.parametrize("way", ["weight_decay", "l2"])
def test_one_update_without_a_gradient_shrinks_a_weight_of_1_to_nine_tenths(way):
    one, zero = {"w": np.ones(1)}, {"w": np.zeros(1)}
    result = trained(rule("sgd", {"momentum": 0}, **{way: 0.1}), one, [zero], (1.0,))
    np.testing.assert_allclose(result["w"], 0.9, rtol=1e-12)


@pytest.mark.parametrize("way", ["weight_decay", "l2"])
@pytest.mark.parametrize("name", RULES)
def test_excluded_leaves_are_not_decayed_and_all_others_are(name, way):
    settings = {"global_batch_size": BATCH}
    bare = trained(rule(name, RULES[name], **settings))
    everywhere = trained(rule(name, RULES[name], **settings, **{way: 0.1}))
    kernels = trained(rule(name, RULES[name], **settings, **{way: 0.1}, exclude=norms_and_biases))
    for layer, leaf in PATHS:
        expected = everywhere if leaf == "kernel" else bare
        np.testing.assert_allclose(kernels[layer][leaf], expected[layer][leaf], rtol=1e-12)
        assert np.abs(everywhere[layer][leaf] - bare[layer][leaf]).max() > 1e-6


def test_lars_own_decay_spares_excluded_leaves_too():
    def conv(path: tuple[str, ...]) -> bool:
        return path == ("conv", "kernel")

    spared = trained(rule("lars", LARS, exclude=conv))
    undecayed, decayed = trained(rule("lars", {**LARS, "weight_decay": 0})), trained(rule("lars", LARS))
    np.testing.assert_allclose(spared["conv"]["kernel"], undecayed["conv"]["kernel"], rtol=1e-12)
    np.testing.assert_allclose(spared["fc"]["kernel"], decayed["fc"]["kernel"], rtol=1e-12)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_lars_takes_the_plain_rate_where_a_norm_is_zero(weight, gradient):
    subject = rule("lars", {**LARS, "epsilon": 0})
    result = trained(subject, {"w": np.full(3, weight)}, [{"w": np.full(3, gradient)}], (0.1,))
    np.testing.assert_allclose(result["w"], weight - 0.1 * (gradient + 0.05 * weight), rtol=1e-12)


def test_an_epsilon_of_zero_is_1e_7_and_any_other_is_kept():
    one, tiny = {"w": np.full(1, 1e-6)}, [{"w": np.full(1, 1e-8)}]
    for epsilon, used in ((0, 1e-7), (1e-9, 1e-9)):
        params = {"momentum": 0, "weight_decay": 0, "eeta": 1.0, "epsilon": epsilon}
        result = trained(rule("lars", params), one, tiny, (1.0,))
        np.testing.assert_allclose(result["w"], 1e-6 - 1e-6 / (1e-8 + used) * 1e-8, rtol=1e-12)


def test_lars_norms_of_half_numbers_do_not_overflow():
    subject = rule("lars", {**LARS, "momentum": 0, "weight_decay": 0})
    w, g = {"w": jnp.full(64, 300, jnp.float16)}, {"w": jnp.full(64, 500, jnp.float16)}
    steps, _ = jax.jit(lambda g, w: subject.at(jnp.float32(1)).update(g, {}, w))(g, w)
    np.testing.assert_allclose(steps["w"], -0.01 * 300, rtol=1e-3)


@pytest.mark.parametrize("name", RULES)
def test_state_is_kept_only_where_it_is_needed(name):
    slots = {"sgd": [], "lars": [], "rmsprop": ["mean_square"]}[name]
    for momentum in (0, 0.9):
        state = rule(name, {**RULES[name], "momentum": momentum}).init(PARAMS)
        assert list(state) == slots + ["velocity"] * bool(momentum)
        for tree in state.values():
            assert jax.tree.structure(tree) == jax.tree.structure(PARAMS)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("mode", ["32.32", "16.16"])
def test_every_rule_trains_in_a_compiled_loop_in_every_precision(mode, name):
    policy, goal = parse(mode), jnp.array([1.0, -2.0, 0.5, 3.0])
    subject = rule(name, {**RULES[name], "momentum": 0.5}, global_batch_size=BATCH)

    def update(carry, n):
        params, state = carry
        gradients = {"kernel": params["kernel"].astype(jnp.float32) - goal}
        rate = jnp.where(n < 200, 0.1, 0.01) * (10.0 if name == "lars" else 1.0)
        key = jax.random.fold_in(jax.random.key(0), n)
        return optimise(policy, subject.at(rate), gradients, state, params, key), None

    start = policy.to_update({"kernel": jnp.ones(4)})
    carry, _ = jax.jit(lambda carry: lax.scan(update, carry, jnp.arange(400)))((start, subject.init(start)))
    error = float(jnp.abs(carry[0]["kernel"].astype(jnp.float32) - goal).max())
    # LARS' own decay, 0.05, pulls the optimum from w = goal to about goal / 1.05.
    assert error < {"sgd": 0.02, "rmsprop": 0.02, "lars": 0.2}[name]
    assert all(leaf.dtype == policy.update for leaf in jax.tree.leaves(carry))


def test_float16_weights_have_squares_of_float32_and_small_gradients_move_them_as_in_float32():
    subject = rule("rmsprop", {"momentum": 0.5, "base_decay_exponent": -3, "epsilon": 1e-14})
    gradients = {"kernel": jnp.array([3e-5, -2e-4, 5e-3, 800.0])}  # whose squares float16 has not
    moved = {}
    for mode in ("32.32", "16.16"):
        policy = parse(mode, "float16")
        params = policy.to_update({"kernel": jnp.ones(4)})
        state = subject.init(params)
        assert state["mean_square"]["kernel"].dtype == jnp.float32
        assert state["velocity"]["kernel"].dtype == policy.update
        for n in range(30):
            key = jax.random.fold_in(jax.random.key(0), n)
            params, state = optimise(policy, subject.at(jnp.float32(0.01)), gradients, state, params, key)
        moved[mode] = np.asarray(params["kernel"], np.float32) - 1
    np.testing.assert_allclose(moved["16.16"], moved["32.32"], rtol=0.02)


REFUSED = [
    ("adam", SGD, {}, r"optimizer: name=adam: must be one of sgd, lars, rmsprop"),
    (
        "sgd",
        {},
        {},
        r"optimizer: params: momentum missing: found none; sgd takes momentum \(and may take nesterov",
    ),
    ("sgd", {**SGD, "eeta": 1}, {}, r"optimizer: params: eeta unknown: found momentum, eeta; sgd takes"),
    ("lars", SGD, {}, r"optimizer: params: weight_decay, eeta, epsilon missing: found momentum; lars takes"),
    ("rmsprop", LARS, {}, r"optimizer: params: base_decay_exponent missing and weight_decay, eeta unknown"),
    ("sgd", {"momentum": 1.5}, {}, r"optimizer: params: sgd's momentum 1.5: must be at least 0 and below 1"),
    ("sgd", {"momentum": True}, {}, r"optimizer: params: .*must be a finite number"),
    ("sgd", {**SGD, "nesterov": 1}, {}, r"optimizer: params: .*nesterov 1: must be true or false"),
    ("lars", {**LARS, "eeta": 0}, {}, r"optimizer: params: lars's eeta 0: must be greater than 0"),
    ("lars", {**LARS, "epsilon": -1}, {}, r"optimizer: params: .*epsilon -1: must be at least 0"),
    (
        "rmsprop",
        RMSPROP,
        {"global_batch_size": 513},
        r"optimizer: params: .*-9: gives rho -0.0019.* 513.*; -14 gives 0.9687$",
    ),
    ("rmsprop", {**RMSPROP, "base_decay_exponent": -200}, {}, r"-200: gives rho 1 with .*; -4 gives 0.9375$"),
    ("rmsprop", {**RMSPROP, "base_decay_exponent": 1e9}, {}, r"optimizer: params: .*gives rho"),
    ("sgd", SGD, {"weight_decay": -1}, r"weight_decay=-1: must be at least 0"),
    ("sgd", SGD, {"l2": math.inf}, r"l2=inf: must be a finite number"),
]


@pytest.mark.parametrize(("name", "params", "more", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_the_options_name(name, params, more, message):
    with pytest.raises(OptionError, match=message) as refused:
        rule(name, params, **more)
    assert "\n" not in str(refused.value)


def test_a_batch_as_large_as_rmsprops_memory_is_the_last_that_works():
    assert rule("rmsprop", RMSPROP, global_batch_size=512).base.rho == 0
