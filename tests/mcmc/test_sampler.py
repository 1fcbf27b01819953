"""Sampling as a user meets it: known moments, pytrees, pieces, divergences, and one line for what cannot work."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop import hmc
from hotloop.errors import MissingExtra, OptionError
from hotloop.mcmc import adaptation, sampler, target
from hotloop.mcmc.result import _check_names

KEY = jax.random.key(0)
COVARIANCE = np.array([[4.0, 1.2, 0.0], [1.2, 0.5, 0.1], [0.0, 0.1, 0.01 + 0.1]])
MEAN = np.array([3.0, -1.0, 100.0])
START = {"a": jnp.zeros(()), "b": [jnp.zeros(2)]}


def tilted(position: Any) -> Any:
    """A Gaussian of three correlated numbers of very different scales, as a pytree."""
    away = jnp.concatenate([position["a"][None], position["b"][0]]) - jnp.float32(MEAN)
    return -0.5 * away @ jnp.asarray(np.linalg.inv(COVARIANCE), away.dtype) @ away


def flat(result: hmc.Result) -> np.ndarray:
    a, b = np.asarray(result.samples["a"], float), np.asarray(result.samples["b"][0], float)
    return np.concatenate([a[..., None], b], -1)


def assert_moments(draws: np.ndarray, expected: float, errors: float = 4.5) -> None:
    """The mean of [chains, draws] is the expected one within so many of its own standard errors."""
    error = draws.std() / np.sqrt(hmc.ess_bulk(draws))
    assert abs(draws.mean() - expected) < errors * error
    assert error < 0.3 * draws.std()


@pytest.fixture(scope="module")
def many() -> hmc.Result:
    return hmc.sample(tilted, START, key=KEY, chains=64, warmup=300, samples=200, quiet=True)


@pytest.fixture(scope="module")
def one() -> hmc.Result:
    return hmc.sample(tilted, START, key=KEY, chains=1, warmup=1000, samples=3000, quiet=True)


@pytest.mark.parametrize("chains", ["one", "many"])
def test_moments_of_a_gaussian_over_a_pytree(chains, request) -> None:
    result = request.getfixturevalue(chains)
    draws = flat(result)
    assert result.samples["b"][0].shape == (*result.log_density.shape, 2)
    for i in range(3):
        assert_moments(draws[..., i], MEAN[i])
        for j in range(i + 1):
            products = (draws[..., i] - MEAN[i]) * (draws[..., j] - MEAN[j])
            assert_moments(products, COVARIANCE[i, j])
    assert all(np.all(np.asarray(leaf) < 1.02) for leaf in jax.tree.leaves(result.diagnose().r_hat))
    assert result.divergences == 0
    # Dual averaging ends a little above its target where draws differ in length: 0.84 here, and 0.89 with one chain.
    assert 0.75 < float(result.acceptance.mean()) < 0.95


def test_warm_up_learns_the_mass_and_the_slowest_direction(many) -> None:
    mass = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(many.mass)])
    np.testing.assert_allclose(1 / mass, np.diag(COVARIANCE), rtol=0.1)
    scale = np.sqrt(np.diag(COVARIANCE))
    largest = np.linalg.eigvalsh(COVARIANCE / np.outer(scale, scale))[-1]
    assert many.trajectory == pytest.approx(adaptation.TURN * np.sqrt(largest), rel=0.1)
    mean = float(many.leapfrogs.mean())
    assert mean == pytest.approx(many.trajectory / many.step_size, rel=0.05)
    assert many.leapfrogs.min() < mean < many.leapfrogs.max()


def test_the_log_densities_are_those_of_the_draws(many) -> None:
    found = jax.jit(jax.vmap(jax.vmap(tilted)))(many.samples)
    np.testing.assert_allclose(many.log_density, found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("first", [1, 7, 1000])
def test_pieces_of_any_length_give_the_same_bits(first, monkeypatch) -> None:
    run = small_sampler().run
    expected = run(KEY)
    monkeypatch.setattr(small_sampler(), "_first_piece", None)
    monkeypatch.setattr(sampler, "FIRST_PIECE", first)
    monkeypatch.setattr(sampler, "PIECE_SECONDS", 1e-6 if first < 1000 else 10.0)
    found = run(KEY)
    for a, b in zip(jax.tree.leaves(expected.samples), jax.tree.leaves(found.samples), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (found.step_size, found.trajectory) == (expected.step_size, expected.trajectory)


@pytest.mark.parametrize(
    ("seconds", "first_run", "second_run"), [(100.0, (2, 1), (1, 1)), (1e-9, (1 + 24, 30), (1 + 24, 30))]
)
def test_what_is_short_is_one_call_and_what_is_long_is_many(
    seconds, first_run, second_run, monkeypatch
) -> None:
    """Calls of warm-up and of draws: the pace that warm-up had is the draws', and the next run's own."""
    monkeypatch.setattr(sampler, "PIECE_SECONDS", seconds)
    monkeypatch.setattr(small_sampler(), "_first_piece", None)
    counts = {"_warm": 0, "_draw": 0}

    def count(name: str, call: Any) -> Any:
        def counted(*given: Any) -> Any:
            counts[name] += 1
            return call(*given)

        return counted

    for name in counts:
        monkeypatch.setattr(small_sampler(), name, count(name, getattr(small_sampler(), name)))
    for expected in (first_run, second_run):
        counts.update(_warm=0, _draw=0)
        small_sampler().run(KEY)
        assert (counts["_warm"], counts["_draw"]) == expected


def test_blocks_of_leapfrogs_as_a_card_takes_them_draw_the_same(monkeypatch) -> None:
    expected = small_sampler().run(KEY)
    monkeypatch.setattr(sampler, "platform", lambda: "gpu")
    monkeypatch.setattr(
        sampler, "keep_loops_on_the_card", lambda platform: {}
    )  # no option of a CPU's compiler
    found = hmc.Sampler(tilted, START, chains=3, **SMALL).run(KEY)
    assert set(np.asarray(found.leapfrogs)) - set(range(8)), "some are longer than a block"
    np.testing.assert_array_equal(found.leapfrogs, expected.leapfrogs)
    for a, b in zip(jax.tree.leaves(expected.samples), jax.tree.leaves(found.samples), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


SMALL: dict[str, Any] = {"warmup": 40, "samples": 30, "quiet": True}
held: list[hmc.Sampler] = []


def small_sampler() -> hmc.Sampler:
    if not held:
        held.append(hmc.Sampler(tilted, START, chains=3, **SMALL))
    return held[0]


def test_a_sampler_gives_each_key_its_own_draws_without_compiling_again() -> None:
    sampled = small_sampler()
    with jax.log_compiles(False):
        first, again, other = sampled.run(KEY), sampled.run(KEY), sampled.run(jax.random.key(1))
    np.testing.assert_array_equal(first.samples["a"], again.samples["a"])
    assert not np.array_equal(first.samples["a"], other.samples["a"])
    assert first.seconds.compile == other.seconds.compile > 0
    assert first.seconds.warmup > 0 and first.seconds.sampling > 0


def funnel(x: Any) -> Any:
    """Neal's: a neck that no one step size fits."""
    return -0.5 * (x[0] / 3) ** 2 - 0.5 * (x[1:] ** 2).sum() * jnp.exp(-x[0]) - 0.5 * 4 * x[0]


def test_divergences_are_counted_on_a_funnel(many) -> None:
    result = hmc.sample(
        funnel, jnp.zeros(5), key=KEY, chains=50, warmup=150, samples=100, target_acceptance=0.6, quiet=True
    )
    assert result.divergences == int(np.asarray(result.diverging).sum()) > 0
    assert not np.asarray(result.acceptance)[np.asarray(result.diverging)].any()
    assert np.isfinite(result.samples).all() and many.divergences == 0
    assert f"{result.divergences} divergences" in result.summary()


def test_fixed_leapfrogs_and_step_without_warm_up_are_plain_hmc() -> None:
    plain = {"leapfrogs": 4, "jitter": 0.0, "step_size": 0.4, "warmup": 0}
    result = hmc.sample(lambda x: -0.5 * x**2, 0.5, key=KEY, chains=300, samples=60, quiet=True, **plain)
    assert result.step_size == pytest.approx(0.4) and np.all(np.asarray(result.leapfrogs) == 4)
    assert float(result.mass) == 1 and result.trajectory == pytest.approx(1.6)
    draws = np.asarray(result.samples, float)[:, 10:]
    assert_moments(draws, 0)
    assert_moments(draws**2, 1)


def test_the_trajectory_is_the_mean_of_those_that_were_made() -> None:
    """Where the longest are cut, too."""
    cut = {"leapfrogs": 40, "max_leapfrogs": 40, "step_size": 0.1, "warmup": 0}
    found = hmc.sample(lambda x: -0.5 * x**2, 0.5, key=KEY, chains=2, samples=200, quiet=True, **cut)
    mean = np.asarray(found.leapfrogs, float).mean()
    assert found.leapfrogs.max() == 40 and mean == pytest.approx(35, abs=0.5)
    assert found.trajectory == pytest.approx(found.step_size * mean)


@pytest.mark.slow
def test_float64_where_x64_is_on() -> None:
    with jax.enable_x64(True):
        result = hmc.sample(lambda x: -0.5 * (x**2).sum(), np.zeros(2), key=KEY, chains=2, **SMALL)
        kept = result.samples, result.log_density, result.acceptance
        assert {leaf.dtype.name for leaf in kept} == {"float64"}
        np.testing.assert_allclose(result.log_density, -0.5 * (result.samples**2).sum(-1), rtol=1e-14)
    result = hmc.sample(lambda x: -0.5 * (x**2).sum(), np.zeros(2), key=KEY, chains=2, **SMALL)
    assert result.samples.dtype == jnp.float32


def test_chains_start_together_apart_or_drawn() -> None:
    """With steps too small to move, draws show where chains began."""
    still: dict[str, Any] = {
        "warmup": 0,
        "samples": 1,
        "leapfrogs": 1,
        "step_size": 1e-6,
        "quiet": True,
        "key": KEY,
    }

    def density(x: Any) -> Any:
        return -0.5 * (x["u"] ** 2).sum()

    apart = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = hmc.sample(density, {"u": apart}, **still).samples["u"][:, 0]
    np.testing.assert_allclose(found, apart, atol=1e-4)
    together = hmc.sample(density, {"u": apart[1]}, chains=4, **still).samples["u"][:, 0]
    np.testing.assert_allclose(together, np.tile(apart[1], (4, 1)), atol=1e-4)
    drawn = hmc.sample(density, lambda key: {"u": jax.random.normal(key, (2,))}, chains=4, **still)
    assert len(np.unique(np.round(drawn.samples["u"], 3))) == 8


def normal(x: Any) -> Any:
    return -0.5 * (x**2).sum()


def without_gradient(x: Any) -> Any:
    return jax.lax.while_loop(lambda total: total > 1, lambda total: total / 2, normal(x))


@pytest.mark.parametrize(
    ("density", "start", "options", "message"),
    [
        (normal, np.zeros(2), {"samples": 0}, "samples is 0: an integer of at least 1 is needed"),
        (normal, np.zeros(2), {"chains": 0}, "chains is 0: an integer of at least 1"),
        (normal, np.zeros(2), {"warmup": -1}, "warmup is -1: an integer of at least 0"),
        (normal, np.zeros(2), {"samples": True}, "samples is True: an integer"),
        (normal, np.zeros(2), {"leapfrogs": 0}, "leapfrogs is 0"),
        (normal, np.zeros(2), {"leapfrogs": 2000}, "leapfrogs is 2000 and max_leapfrogs is 1000: no draw takes more"),
        (normal, np.zeros(2), {"warmup": 0}, "warmup is 0: then step_size and leapfrogs must be given"),
        (normal, np.zeros(2), {"jitter": 1.0}, "jitter is 1.0: from 0"),
        (normal, np.zeros(2), {"target_acceptance": 1.0}, "target_acceptance is 1.0: more than 0"),
        (normal, np.zeros(2), {"step_size": float("nan")}, "step_size is nan: a positive number"),
        (normal, np.zeros(2, np.int32), {}, "initial: x is int32: HMC moves float32"),
        (lambda p: normal(p["u"]), {"u": np.zeros(2), "n": 3}, {}, "initial: n is int32"),
        (normal, {}, {}, "initial has no arrays"),
        (normal, np.zeros((2, 0)), {}, r"initial: x has shape [2, 0]: there is nothing to sample"),
        (normal, "x", {}, "initial: x is a str: HMC moves floats and arrays of them"),
        (normal, {"u": np.array(["x"])}, {}, "initial: u is a ndarray: HMC moves floats"),
        (normal, {"u": np.array(["x"])}, {"chains": None}, "initial: u is a ndarray: HMC moves floats"),
        (normal, lambda key: {}["x"], {}, "initial failed on what jax traces it with: KeyError: 'x'"),
        (normal, lambda key: "x", {}, "initial failed on what jax traces it with: TypeError: "),
        (lambda p: normal(p["v"]), {"u": np.zeros(2)}, {}, "log_density failed on what jax traces it with: KeyError"),
        (lambda x: normal(x) if x[0] > 0 else 0.0, np.zeros(2), {}, "traces it with: TracerBoolConversionError: "),
        (lambda x: -float(x[0]), np.zeros(2), {}, "traces it with: ConcretizationTypeError: "),
        (without_gradient, np.zeros(2), {}, "the gradient of log_density failed on what jax traces"),
        (normal, {"u": np.zeros(2), "v": np.zeros(3)}, {"chains": None}, "u 2, v 3"),
        (normal, {"u": np.zeros(2), "v": 0.0}, {"chains": None}, "u 2, v none"),
        (normal, lambda key: jnp.zeros(2), {"chains": None}, "chains must be given where initial is a function"),
        (lambda x: x, np.zeros(2), {}, "one float for one position; it returned float32[2]"),
        (lambda x: (x.sum(), 0), np.zeros(2), {}, "it returned a tuple"),
        (lambda x: 3, np.zeros(2), {}, "log_density must return one float"),
        (lambda x: jnp.log(x).sum(), np.array([1.0, -1.0]), {}, "of 2 of 2 chains (nan for chain 0)"),
        (
            lambda x: jnp.log(x).sum(),
            np.array([[1.0], [0.0], [2.0]]),
            {"chains": None},
            "of 1 of 3 chains (-inf for chain 1)",
        ),
        (lambda x: jnp.sqrt(x).sum(), np.zeros(2), {}, "the gradient of log_density is not finite at the start"),
        (normal, np.zeros(2), {"target_acceptance": "0.8"}, "target_acceptance is '0.8': a number is needed"),
        (normal, np.zeros(2), {"samples": "9"}, "samples is '9': an integer of at least 1"),
        (normal, np.zeros(2), {"num_chains": 4}, "hmc: there is no option num_chains; did you mean chains?"),
        (normal, np.zeros(2), {"target_acceptence": 0.9}, "did you mean target_acceptance?"),
        (normal, np.zeros(2), {"key": jax.random.split(KEY)}, "key has shape [2]: one key is needed"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(density, start, options, message) -> None:
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        hmc.sample(density, start, **{"key": KEY, "chains": 2, **SMALL, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [0, None, np.zeros(2), "key", np.zeros(3, np.uint32), np.zeros(4, np.uint32)])
def test_what_is_no_key_and_no_function_is_one_line(key) -> None:
    with pytest.raises(OptionError, match=rf"^key is {re.escape(str(key))}: a key of jax.random is needed"):
        target.check_key(key)
    with pytest.raises(OptionError, match=r"^log_density must be a function of one position, not a"):
        target.check_callable(key)


def test_numbers_of_numpy_and_keys_of_either_kind_are_numbers_and_keys() -> None:
    kinds = {"chains": np.int64(2), "warmup": np.int32(20), "samples": np.uint8(5), "jitter": np.float32(0.5)}
    drawn = [hmc.sample(normal, np.zeros(2), key=jax.random.PRNGKey(3), quiet=True, **kinds)]
    plain = {name: value.item() for name, value in kinds.items()}
    drawn.append(hmc.sample(normal, np.zeros(2), key=jax.random.key(3), quiet=True, **plain))
    np.testing.assert_array_equal(*(each.samples for each in drawn))


def test_a_bar_shows_both_phases_and_quiet_shows_none(monkeypatch) -> None:
    shown: list[tuple[str, Any]] = []

    class Bar(sampler.progress.Progress):
        def advance(self, amount: float = 1) -> None:
            shown.append(("advance", amount))

    def show(description: str, total: float | None = None) -> Any:
        shown.append((description, total))
        return sampler.progress.attach_bar(Bar())

    monkeypatch.setattr(sampler.progress, "show", show)
    hmc.sample(normal, np.zeros(1), key=KEY, chains=2, warmup=40, samples=30)
    assert [each for each in shown if each[0] != "advance"] == [
        ("hmc", None), ("warm-up of 2 chains", 40), ("draws of 2 chains", 30)
    ]  # fmt: skip
    assert sum(amount for what, amount in shown if what == "advance") == 70
    shown.clear()
    small_sampler().run(KEY)  # is quiet
    assert not shown


def test_a_summary_names_every_number(many) -> None:
    lines = many.summary().splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["a", "b.0[0]", "b.0[1]"]
    figures = [float(word) for word in lines[3].split()[1:]]
    draws = flat(many)[..., 2]
    expected = [draws.mean(), draws.std(), draws.std() / np.sqrt(hmc.ess_bulk(draws))]
    np.testing.assert_allclose(figures[:3], expected, rtol=0.05)
    assert figures[3:5] == [round(hmc.ess_bulk(draws)), round(hmc.ess_tail(draws))]
    assert lines[-1].startswith("64 chains of 200 draws, acceptance 0.")


def test_a_result_is_arviz_tree_where_that_is_installed(many) -> None:
    try:
        import arviz_base  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtra, match=re.escape("pip install 'hotloop[arviz]'")):
            many.to_arviz()
        return
    tree = many.to_arviz()
    assert tree["posterior"]["b.0"].shape == (64, 200, 2)
    np.testing.assert_array_equal(tree["posterior"]["a"], many.samples["a"])
    assert set(tree["sample_stats"]) == {"lp", "acceptance_rate", "diverging", "n_steps", "step_size"}


@pytest.mark.parametrize(
    ("names", "axes", "wrong"),
    [
        (("a.b", "a.b"), (0, 0), "a.b"),
        (("mu", "draw"), (0, 0), "draw"),
        (("x", "x_dim_0"), (1, 0), "x_dim_0"),
        (("a/b",), (0,), "a/b"),
    ],
)
def test_names_of_which_arviz_would_keep_none_are_one_line(names, axes, wrong) -> None:
    _check_names(("mu", "x_dim_1"), (1, 0))
    with pytest.raises(OptionError, match=rf"^to_arviz: {wrong} is the name of another"):
        _check_names(names, axes)


@pytest.mark.parametrize(
    ("told", "expected"), [(None, "HIGHEST"), ("tensorfloat32", "HIGH"), ("default", "")]
)
def test_products_of_the_density_are_in_full_unless_jax_was_told_otherwise(told, expected) -> None:
    """By the program: only a card would show another density."""
    with jax.default_matmul_precision(told):
        layout = target.layout_of(START)
        gradient = jax.jit(target.over_columns(tilted, layout)).lower(target.abstract((3, 5), jnp.float32))
    found = set(re.findall(r"precision = \[(\w+), \w+\]", gradient.as_text()))
    assert "dot_general" in gradient.as_text()
    assert found <= {expected, "DEFAULT"} and (expected in found or not expected)
