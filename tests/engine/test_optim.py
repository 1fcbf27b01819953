"""Optimisers: every one's equations by hand in float64, decay against L2, exclusions, a table of optimisers by number
formats, refusals by name."""

import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from hotloop.engine import optim
from hotloop.engine.optim import exclude_norms_and_biases, make
from hotloop.engine.optim_keys import OPTIMISERS
from hotloop.engine.precision import optimise, parse, start_state
from hotloop.errors import OptionError

SGD = {"momentum": 0.9}
LARS = {"momentum": 0.9, "weight_decay": 0.05, "eeta": 0.01, "epsilon": 0}
RMSPROP = {"momentum": 0.9, "base_decay_exponent": -9, "epsilon": 1e-3}
OUTSIDE = {"decay": 0.9, "epsilon": 0.5}
ADAM = {"b1": 0.8, "b2": 0.99, "eps": 1e-3}
RULES = {
    "sgd": SGD,
    "momentum": SGD,
    "lars": LARS,
    "rmsprop": RMSPROP,
    "rmsprop_outside": OUTSIDE,
    "adam": ADAM,
    "adamw": {**ADAM, "weight_decay": 0.05},
    "muon": {},
}
BY_HAND = [name for name in RULES if name != "muon"]
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


def test_every_optimiser_by_name_is_in_these_tables():
    assert list(RULES) == list(OPTIMISERS)


def trained(subject, params=PARAMS, gradients=GRADIENTS, rates=RATES) -> dict:
    """Parameters after an update with each gradient, in doubles; not compiled, as there are many rules."""
    with jax.enable_x64(True):
        state, params = subject.init(params), jax.tree.map(jnp.asarray, params)
        for gradient, rate in zip(gradients, rates, strict=True):
            steps, state = subject.update(gradient, state, params, rate=jax.tree.map(jnp.asarray, rate))
            params = jax.tree.map(jnp.add, params, steps)
        return jax.tree.map(np.asarray, params)


def by_hand(name: str, path: tuple[str, str], *, decay=0.0, l2=0.0, nesterov=False) -> np.ndarray:
    """One leaf after the same updates, the equations written out once more."""
    w, a, s, first = PARAMS[path[0]][path[1]], 0.0, 0.0, 0.0
    for n, (gradient, rate) in enumerate(zip(GRADIENTS, RATES, strict=True), 1):
        g, m = gradient[path[0]][path[1]] + l2 * w, 0.9
        if name == "lars" and path[1] == "kernel":
            w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
            g = 0.01 * w_norm / (g_norm + 0.05 * w_norm + 1e-7) * (g + 0.05 * w)
        if name == "rmsprop":
            rho = 1 - 2**-9 * BATCH
            s = rho * s + (1 - rho) * g**2
            g = g / np.sqrt(s + 1e-3)
        if name == "rmsprop_outside":
            s = 0.9 * s + 0.1 * g**2
            g, m = g / (0.5 + np.sqrt(s)), 0.0
        if name in ("adam", "adamw"):
            first, s = 0.8 * first + 0.2 * g, 0.99 * s + 0.01 * g**2
            g, m = first / (1 - 0.8**n) / (1e-3 + np.sqrt(s / (1 - 0.99**n))), 0.0
            g = g + 0.05 * w if name == "adamw" else g
        if name == "momentum":  # the rate acts on all of the momentum
            a = m * a + g
            step = rate * (m * a + g if nesterov else a)
        else:  # the rate acts on new gradients alone
            a = m * a + rate * g
            step = m * a + rate * g if nesterov else a
        w = w - step - rate * decay * w
    return w


VARIANTS = [{}, {"l2": 0.3}, {"decay": 0.2}, {"l2": 0.3, "decay": 0.2}, {"nesterov": True, "decay": 0.2}]


CASES = [
    (name, variant)
    for name in BY_HAND
    for variant in VARIANTS
    if "nesterov" not in variant or name in ("sgd", "momentum", "lars")
]


@pytest.mark.parametrize(("name", "variant"), CASES, ids=str)
def test_every_optimiser_follows_its_equations_with_and_without_decay(name, variant):
    params = {**RULES[name], **{key: True for key in variant if key == "nesterov"}}
    regular = {"weight_decay": variant.get("decay", 0), "l2": variant.get("l2", 0)}
    result = trained(make(name, params, global_batch_size=BATCH, **regular))
    for layer, leaf in PATHS:
        np.testing.assert_allclose(result[layer][leaf], by_hand(name, (layer, leaf), **variant), rtol=1e-12)


@pytest.mark.parametrize(
    ("subject", "peer"),
    [
        (make("sgd", SGD), optax.sgd(0.1, 0.9)),
        (make("sgd", {**SGD, "nesterov": True}), optax.sgd(0.1, 0.9, nesterov=True)),
        (make("sgd", {"momentum": 0}), optax.sgd(0.1)),
        (
            make("rmsprop", {**RMSPROP, "momentum": 0}, global_batch_size=BATCH),
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


def test_rmsprop_and_lars_round_as_their_equations_do_when_written_out():
    # Every bit counts: a hundred updates of a network make a thousandth of two steps that differ in their last.
    draws = np.random.default_rng(3)
    w, g, v, square = (0.1 * draws.normal(size=(4, 200, 30))).astype(np.float32)
    rate, rho = np.float32(0.004), 1 - 2.0**-9 * BATCH

    @jax.jit
    def rmsprop(w, g, v, s, rate):
        s = rho * s + (1 - rho) * jnp.square(g)
        v = 0.9 * v - rate * g / jnp.sqrt(s + 1e-3)
        return w + v, v

    @jax.jit
    def lars(w, g, v, s, rate):
        w_norm, g_norm = jnp.sqrt(jnp.sum(jnp.square(w))), jnp.sqrt(jnp.sum(jnp.square(g)))
        ratio = jnp.where((w_norm > 0) & (g_norm > 0), 0.01 * w_norm / (g_norm + 0.05 * w_norm + 1e-7), 1)
        v = 0.9 * v - rate * ratio * (g + 0.05 * w)
        return w + v, v

    for written, subject in (
        (rmsprop, optim.make("rmsprop", RMSPROP, global_batch_size=BATCH)),
        (lars, optim.make("lars", LARS)),
    ):
        state = {**subject.init({"kernel": w}), "velocity": optax.TraceState({"kernel": v})}
        if "rmsprop" in state:
            state["rmsprop"] = optax.ScaleByRmsState({"kernel": square**2})

        def step(w, g, state, rate, subject=subject):
            steps, new = subject.update({"kernel": g}, state, {"kernel": w}, rate=rate)
            return w + steps["kernel"], new["velocity"].trace["kernel"]

        for ours, other in zip(
            jax.jit(step)(w, g, state, rate), written(w, g, v, square**2, rate), strict=True
        ):
            np.testing.assert_allclose(ours, other, rtol=0 if jax.default_backend() == "cpu" else 1e-6)


def difference(a: dict, b: dict) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return np.max([np.abs(x - y).max() for x, y in pairs])  # NaN where there is one, unlike max


def test_decay_equals_l2_for_plain_sgd_and_differs_with_momentum():
    for params, same in (({"momentum": 0}, True), (SGD, False)):
        decayed, regularised = (trained(make("sgd", params, **{key: 0.1})) for key in ("weight_decay", "l2"))
        assert (difference(decayed, regularised) < 1e-12) == same


@pytest.mark.parametrize("way", ["weight_decay", "l2"])
def test_one_update_without_a_gradient_shrinks_a_weight_of_1_to_nine_tenths(way):
    one, zero = {"w": np.ones(1)}, {"w": np.zeros(1)}
    result = trained(make("sgd", {"momentum": 0}, **{way: 0.1}), one, [zero], (1.0,))
    np.testing.assert_allclose(result["w"], 0.9, rtol=1e-12)


@pytest.mark.parametrize("way", ["weight_decay", "l2"])
@pytest.mark.parametrize("name", BY_HAND)
def test_excluded_leaves_are_not_decayed_and_all_others_are(name, way):
    settings, params = {"global_batch_size": BATCH}, RULES[name]
    params = {**params, "weight_decay": 0} if name == "adamw" else params
    bare = trained(make(name, params, **settings))
    everywhere = trained(make(name, params, **settings, **{way: 0.1}))
    kernels = trained(make(name, params, **settings, **{way: 0.1}, exclude=exclude_norms_and_biases))
    for layer, leaf in PATHS:
        expected = everywhere if leaf == "kernel" else bare
        np.testing.assert_allclose(kernels[layer][leaf], expected[layer][leaf], rtol=1e-12)
        assert np.abs(everywhere[layer][leaf] - bare[layer][leaf]).max() > 1e-6


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_an_optimisers_own_decay_spares_excluded_leaves_too(name):
    def conv(path: tuple[str, ...]) -> bool:
        return path == ("conv", "kernel")

    params = {**RULES[name], "weight_decay": 0.05}
    spared, decayed = trained(make(name, params, exclude=conv)), trained(make(name, params))
    undecayed = trained(make(name, {**params, "weight_decay": 0}))
    np.testing.assert_allclose(spared["conv"]["kernel"], undecayed["conv"]["kernel"], rtol=1e-12)
    np.testing.assert_allclose(spared["fc"]["kernel"], decayed["fc"]["kernel"], rtol=1e-12)
    assert np.abs(decayed["fc"]["kernel"] - undecayed["fc"]["kernel"]).max() > 1e-6


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_lars_takes_the_plain_rate_where_a_norm_is_zero(weight, gradient):
    subject = make("lars", {**LARS, "epsilon": 0})
    result = trained(subject, {"w": np.full(3, weight)}, [{"w": np.full(3, gradient)}], (0.1,))
    np.testing.assert_allclose(result["w"], weight - 0.1 * (gradient + 0.05 * weight), rtol=1e-12)


def test_an_epsilon_of_zero_is_1e_7_and_any_other_is_kept():
    one, tiny = {"w": np.full(1, 1e-6)}, [{"w": np.full(1, 1e-8)}]
    for epsilon, used in ((0, 1e-7), (1e-9, 1e-9)):
        params = {"momentum": 0, "weight_decay": 0, "eeta": 1.0, "epsilon": epsilon}
        result = trained(make("lars", params), one, tiny, (1.0,))
        np.testing.assert_allclose(result["w"], 1e-6 - 1e-6 / (1e-8 + used) * 1e-8, rtol=1e-12)


def test_lars_norms_of_half_numbers_do_not_overflow():
    subject = make("lars", {**LARS, "momentum": 0, "weight_decay": 0})
    w, g = {"w": jnp.full(64, 300, jnp.float16)}, {"w": jnp.full(64, 500, jnp.float16)}
    steps, _ = jax.jit(lambda g, w: subject.update(g, subject.init(w), w, rate=jnp.float32(1)))(g, w)
    np.testing.assert_allclose(steps["w"], -0.01 * 300, rtol=1e-3)


@pytest.mark.parametrize("name", RULES)
def test_state_is_kept_only_where_it_is_needed(name):
    held = {"sgd": 0, "lars": 0, "rmsprop": 1, "rmsprop_outside": 1, "adam": 2, "adamw": 2}.get(name)
    for momentum in (0, 0.9):
        params = {**RULES[name], **({"momentum": momentum} if "momentum" in RULES[name] else {})}
        state = make(name, params).init(PARAMS)
        arrays = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
        size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
        if held is not None:
            moving = bool(params.get("momentum"))
            assert arrays == size * (held + moving) and ("velocity" in state) == moving


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_every_optimiser_trains_in_a_compiled_loop_with_weights_of_every_type(name, kept):
    """To a matrix, a vector and a convolution's kernel; types stay, squares are never float16."""
    policy = parse("16.32") if kept == "float32" else parse("16.16", kept)
    draw = np.random.default_rng(0).normal
    goal = {"kernel": draw(size=(4, 3)), "bias": draw(size=3), "conv": {"kernel": draw(size=(2, 2, 2, 3))}}
    goal = jax.tree.map(jnp.float32, goal)
    more = {"momentum": 0.5} if "momentum" in RULES[name] else {}
    more |= {"eeta": 0.5} if name == "lars" else {}
    subject = make(name, {**RULES[name], **more}, global_batch_size=BATCH)
    # The first steps of Adam and Muon are as large as the rate, however small the gradient.
    first = 0.05 if name in ("adam", "adamw", "muon") else 0.2

    def update(carry, n):
        params, state = carry
        gradients = jax.tree.map(lambda w, to: w.astype(jnp.float32) - to, params, goal)
        rate = first * 0.1 ** (n // 200)
        key = jax.random.fold_in(jax.random.key(0), n)
        return optimise(policy, subject, gradients, state, params, key, rate=rate), None

    start = policy.to_update(jax.tree.map(jnp.ones_like, goal))
    state = start_state(policy, subject, start)
    quick = {"xla_backend_optimization_level": 0}
    loop = jax.jit(lambda carry: lax.scan(update, carry, jnp.arange(600)), compiler_options=quick)
    (params, after), _ = loop((start, state))
    errors = jax.tree.map(lambda w, to: jnp.abs(w.astype(jnp.float32) - to).max(), params, goal)
    # The own decay of lars and adamw pulls the optimum towards zero.
    assert max(map(float, jax.tree.leaves(errors))) < {"lars": 0.3, "adamw": 0.2}.get(name, 0.04)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(policy.update)}
    for (path, old), new in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype
        names = jax.tree_util.keystr(path)
        if old.ndim and "ns_coeffs" not in names:  # of muon: constants
            wide = kept == "float16" and "velocity" not in names
            assert old.dtype == ("float32" if wide else kept), names
        elif jnp.issubdtype(old.dtype, jnp.floating):
            assert old.dtype == "float32"


SMALL = {"rmsprop": {"momentum": 0.5, "base_decay_exponent": -3, "epsilon": 1e-14}, "adam": {"eps": 1e-9}}


@pytest.mark.parametrize("name", SMALL)
def test_with_float16_weights_small_gradients_move_them_as_in_float32(name):
    subject = make(name, SMALL[name])
    gradients = {"kernel": jnp.array([3e-5, -2e-4, 5e-3, 800.0])}  # whose squares float16 has not
    moved = {}
    for mode in ("32.32", "16.16"):
        policy = parse(mode, "float16")
        params = policy.to_update({"kernel": jnp.ones(4)})
        state = start_state(policy, subject, params)
        for n in range(30):
            key = jax.random.fold_in(jax.random.key(0), n)
            params, state = optimise(policy, subject, gradients, state, params, key, rate=jnp.float32(0.01))
        moved[mode] = np.asarray(params["kernel"], np.float32) - 1
    np.testing.assert_allclose(moved["16.16"], moved["32.32"], rtol=0.02)


def test_rmsprop_outside_may_begin_with_the_first_square():
    g = {"w": np.array([5.0, -0.2])}
    subject = make("rmsprop_outside", {"decay": 0.9, "epsilon": 1.0, "first_square": True})
    result = trained(subject, {"w": np.zeros(2)}, [g], (0.5,))
    np.testing.assert_allclose(result["w"], -0.5 * g["w"] / (1 + np.abs(g["w"])), rtol=1e-12)


def test_a_rate_may_be_given_for_each_group_of_parameters():
    one, two = {"w": np.ones(2)}, {"w": np.ones(3), "b": np.ones(1)}
    subject = make("sgd", {"momentum": 0}, weight_decay=0.5)
    groups = {"first": one, "second": two}
    moved = trained(subject, groups, [groups], [{"first": 0.1, "second": 0.2}])
    np.testing.assert_allclose(moved["first"]["w"], 1 - 0.1 * 1.5, rtol=1e-12)
    for leaf in moved["second"].values():
        np.testing.assert_allclose(leaf, 1 - 0.2 * 1.5, rtol=1e-12)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_a_momentum_of_0_is_none_and_goes_with_every_optimiser(name):
    assert make(name, {"momentum": 0}).init(PARAMS).keys() == make(name, {}).init(PARAMS).keys()


def test_clipping_comes_after_l2_and_before_the_momentum():
    weights, gradients = {"w": np.array([10.0, 1.0])}, [{"w": np.array([0.5, 0.25])}] * 2
    moved = trained(make("momentum", SGD, l2=0.1, clip=1.0), weights, gradients, (0.1, 0.1))
    second = 0.9 * np.array([1.0, 0.35]) + np.clip([0.5 + 0.1 * 9.9, 0.25 + 0.1 * (1 - 0.035)], -1, 1)
    np.testing.assert_allclose(
        moved["w"], [10 - 0.1 - 0.1 * second[0], 1 - 0.035 - 0.1 * second[1]], rtol=1e-12
    )


def test_a_decay_beside_adamw_takes_the_place_of_its_own():
    weights, gradients = {"kernel": np.ones((2, 2), np.float32)}, {"kernel": np.zeros((2, 2), np.float32)}
    found = trained(make("adamw", {}, weight_decay=0.1), weights, [gradients], (0.5,))
    np.testing.assert_allclose(found["kernel"], 1 - 0.5 * 0.1, rtol=1e-6)


def test_muon_makes_the_steps_of_matrices_orthogonal_and_a_convolution_is_a_matrix_too():
    """Every singular value of the step is about the same; what is no matrix moves as by Adam."""
    draw, sizes = np.random.default_rng(1).normal, np.array([1.0, 4.0, 16.0])
    gradients = {
        "kernel": draw(size=(6, 3)) * sizes,
        "conv": draw(size=(2, 2, 2, 3)) * sizes,
        "bias": draw(size=3),
    }
    steps = trained(make("muon", {}), jax.tree.map(np.zeros_like, gradients), [gradients], (1.0,))

    def spread(kernel):
        values = np.linalg.svd(kernel.reshape(-1, 3), compute_uv=False)
        return values.max() / values.min()

    for name in ("kernel", "conv"):
        assert spread(gradients[name]) > 5 and spread(steps[name]) < 2
        assert (steps[name] * gradients[name]).sum() < 0
    np.testing.assert_allclose(np.abs(steps["bias"]), np.abs(steps["bias"][0]), rtol=1e-6)


def test_muons_own_decay_spares_excluded_leaves():
    weights = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones((2, 2))}  # a scale that is a matrix
    zeros = jax.tree.map(jnp.zeros_like, weights)
    subject = make("muon", {"weight_decay": 0.1}, exclude=exclude_norms_and_biases)
    steps, _ = jax.jit(lambda w: subject.update(zeros, subject.init(w), w, rate=1.0))(weights)
    np.testing.assert_allclose(steps["kernel"], -0.1, rtol=1e-6)
    np.testing.assert_allclose(steps["scale"], 0, atol=1e-6)


def test_at_rate_counts_updates_for_a_schedule_and_keeps_nothing_for_a_number():
    chain = make("sgd", {"momentum": 0})
    seen = []
    for rate in (0.5, lambda count: 0.5 * (count + 1)):
        subject, w = optim.at_rate(chain, rate), {"w": jnp.ones(1)}
        state = subject.init(w)
        for _ in range(3):
            steps, state = subject.update({"w": jnp.ones(1)}, state, w)
            seen.append(float(steps["w"][0]))
        assert len(jax.tree.leaves(state)) == callable(rate)
    assert seen == [-0.5, -0.5, -0.5, -0.5, -1.0, -1.5]


REFUSED = [
    (
        "ftrl",
        SGD,
        {},
        r"optimizer: name=ftrl: must be one of sgd, momentum, lars, rmsprop, .*adam, adamw, muon",
    ),
    ("adam", SGD, {}, r"optimizer: params: momentum unknown: found momentum; adam takes .*b1, b2, eps"),
    ("adamw", {"weight_decay": -1}, {}, r"optimizer: params: adamw's weight_decay -1: must be at least 0"),
    ("muon", {"beta": 1}, {}, r"optimizer: params: muon's beta 1: must be at least 0 and below 1"),
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
        make(name, params, **more)
    assert "\n" not in str(refused.value)


def test_a_batch_as_large_as_rmsprops_memory_is_the_last_that_works():
    """Its memory is then that of one update: each divides by its own gradient."""
    gradients = [{"w": np.full(1, size)} for size in (3.0, 0.5)]
    subject = make("rmsprop", {**RMSPROP, "momentum": 0, "epsilon": 1e-12}, global_batch_size=512)
    np.testing.assert_allclose(
        trained(subject, {"w": np.zeros(1)}, gradients, (1.0, 1.0))["w"], -2, rtol=1e-9
    )


@pytest.mark.parametrize(
    "command", ["cnn train", "vcd train", "recommender train", "kernel dense", "kernel lstm"]
)
def test_an_optimiser_of_one_line_is_offered_by_every_family(command: str) -> None:
    program = (
        "import sys; from hotloop.engine import optim_keys as keys; from hotloop.cli.main import main; "
        "keys.OPTIMISERS['lion'] = keys.Keys({}, optax='scale_by_lion'); sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, *command.split(), "--optimizer", "lionn"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and re.search("did you mean lion", done.stderr, re.IGNORECASE), done.stderr
