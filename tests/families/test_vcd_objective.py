"""The divergence and its gradients: closed forms, autograd, inequalities and toy optima."""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.families.vcd import networks
from hotloop.families.vcd.model import Draw, encoder_pull
from hotloop.layers.paths import force_path
from hotloop.mcmc import hmc

LOG_TWO_PI = math.log(2 * math.pi)
QUICK = {"xla_backend_optimization_level": 0}
"""Half the time to compile, for programs that run once."""


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


# A target N(0, 1), q0 = N(m, s^2), and in place of HMC the kernel z -> r z + sqrt(1 - r^2) noise.


def standard(z):
    """The state of chains on N(0, 1), the density normalised."""
    return hmc.State(z, (-0.5 * (z**2 + LOG_TWO_PI)).sum(-1), -z)


def autoregressive(m, s, r, count=1_000_000, seed=0):
    eta, noise = np.random.default_rng(seed).standard_normal((2, count, 1))
    z0 = m + s * eta
    zt = r * z0 + math.sqrt(1 - r * r) * noise
    return Draw(np.full_like(eta, m), np.full_like(eta, s), eta, standard(z0), standard(zt))


@jax.jit
def estimates(draw, control):
    """Each draw's divergence and pulls on mean and spread: [draws, 3]."""
    by_mean, by_spread = encoder_pull("vcd", draw, control)
    return jnp.stack([draw.vcd, by_mean[:, 0], by_spread[:, 0]], 1)


def closed_form(m, s, r):
    far = m * m * (1 - r) ** 2
    value = 0.5 * (1 - r * r) * (m * m + s * s - 1 + (1 - s * s) / s**2) + far / (2 * s * s)
    by_mean = (1 - r * r) * m + m * (1 - r) ** 2 / s**2
    return value, by_mean, (1 - r * r) * (s - 1 / s**3) - far / s**3


def within(values, expected, errors=4.0):
    """Every column's mean is the expected one, as far as sampling can tell."""
    values = np.asarray(values)
    error = values.std(0) / math.sqrt(len(values))
    np.testing.assert_array_less(np.abs(values.mean(0) - expected), errors * error + 1e-12)
    return error


def gaussian_kl(m, v, to_m, to_v):
    return 0.5 * (v / to_v + (m - to_m) ** 2 / to_v - 1 - math.log(v / to_v))


def test_the_closed_form_has_the_published_numbers():
    assert closed_form(1, 0.5, 0.6) == pytest.approx((1.36, 1.28, -6.08))
    assert closed_form(1, 0.5, 0)[0] == pytest.approx(3.625)
    assert closed_form(1, 0.5, 1)[0] == 0


@pytest.mark.parametrize("m, s, r", [(1, 0.5, 0.6), (1, 0.5, 0), (1, 0.5, 1), (-0.7, 1.6, 0.3), (0, 1, 0.5)])
def test_value_and_gradients_are_the_closed_form_in_the_mean(float64, m, s, r):
    """r = 0 is the symmetrised divergence, r = 1 no sampler at all, (0, 1) the posterior itself."""
    draw = autoregressive(m, s, r)
    error = within(estimates(draw, np.zeros(len(draw.eta))), closed_form(m, s, r))
    assert (error < 0.03).all()


@pytest.mark.parametrize("m, s, r", [(1, 0.5, 0.6), (-0.7, 1.6, 0.3), (0.3, 0.2, 0.9)])
def test_the_divergence_is_made_of_three_others_and_the_sampler_only_improves(float64, m, s, r):
    """KL(q0 | p) - KL(qT | p) + KL(qT | q0), where qT is normal; KL(qT | p) <= KL(q0 | p)."""
    mt, vt = r * m, r * r * s * s + 1 - r * r
    first, last = gaussian_kl(m, s * s, 0, 1), gaussian_kl(mt, vt, 0, 1)
    assert last < first
    draw = autoregressive(m, s, r, seed=1)
    within(np.asarray(draw.vcd)[:, None], first - last + gaussian_kl(mt, vt, m, s * s))
    assert closed_form(m, s, r)[0] == pytest.approx(first - last + gaussian_kl(mt, vt, m, s * s))


def test_a_control_variate_changes_the_variance_and_not_the_mean(float64):
    draw = autoregressive(1, 0.5, 0.6, seed=2)
    mean_f = -0.5 * (1.09 + LOG_TWO_PI) + 0.5 * 3.56
    within(np.asarray(draw.f)[:, None], mean_f)
    variances = []
    for control, variance in {mean_f: 31.0, 0.0: 31.2, -5.0: 140.7}.items():
        values = np.asarray(estimates(draw, np.full(len(draw.eta), control)))
        within(values, closed_form(1, 0.5, 0.6))
        squares = (values[:, 1] - values[:, 1].mean()) ** 2
        error = squares.std() / math.sqrt(len(squares))
        assert abs(squares.mean() - variance) < 4 * error + 0.05  # published with one decimal
        variances.append(squares.mean())
    assert variances[0] < variances[2] / 4 and variances[1] < variances[2] / 4


def test_no_sampler_means_no_divergence_and_standard_gradients(float64):
    """With zT = z0 each value is |eta|^2 / 2 - d / 2, whatever the model."""
    generator = np.random.default_rng(3)
    eta, mean, spread = generator.standard_normal((3, 1000, 4))
    start = standard(mean + np.exp(spread) * eta)
    draw = Draw(mean, np.exp(spread), eta, start, start)
    np.testing.assert_allclose(draw.vcd, ((eta**2).sum(1) - 4) / 2, atol=1e-9)


# The networks, small, in float64.


def small_networks(seed, latent=2, hidden=(7, 5)):
    generator = np.random.default_rng(seed)

    def network(*sizes):
        return tuple(
            {"w": 0.2 * generator.standard_normal(pair), "b": 0.2 * generator.standard_normal(pair[1])}
            for pair in pairwise(sizes)
        )

    encoder = (784, *hidden, latent)
    nets = {"mean": network(*encoder), "spread": network(*encoder)}
    return nets, network(*encoder[::-1])


def test_the_formulas_are_autograd_of_the_surrogate(float64):
    """-log p(x, z0) + f(zT) + (f - C) log q0(z0), with zT, the weight and the last z0 held still."""
    encoder, decoder = small_networks(4)
    generator = np.random.default_rng(5)
    images, eta = generator.integers(0, 2, (6, 784)).astype(float), generator.standard_normal((6, 2))
    control, momentum = generator.normal(-500, 20, 6), jnp.asarray(generator.standard_normal((6, 2)))
    target = networks.value_and_gradient(decoder, images)
    step = hmc.transition(target, 2)
    still = jax.lax.stop_gradient

    def drawn(nets):
        mean, spread = networks.encode(nets, images)
        start = hmc.init(mean + spread * eta, target)
        return Draw(mean, spread, eta, start, step(start, momentum, jnp.zeros(6), 0.1)[0])

    def surrogate(nets, hold=still):
        mean, spread, _, start, end = drawn(nets)
        zt, z0 = hold(end.position), start.position
        f = networks.log_joint(decoder, images, zt) + 0.5 * (((zt - mean) / spread) ** 2).sum(1)
        score = networks.log_normal(still(z0), mean, spread)
        return (-networks.log_joint(decoder, images, z0) + f + still(f - control) * score).sum()

    def by_hand(nets):
        draw, back = drawn(nets), jax.vjp(lambda nets: networks.encode(nets, images), nets)[1]
        return back(encoder_pull("vcd", draw, control))[0]

    def gap(one, other):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return np.max([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs])  # NaN where there is one

    ours, wanted, through = jax.jit(
        lambda nets: (by_hand(nets), jax.grad(surrogate)(nets), jax.grad(surrogate)(nets, lambda z: z)),
        compiler_options=QUICK,
    )(encoder)
    assert gap(ours, wanted) < 1e-10
    assert gap(ours, through) > 1e-2  # a gradient through the sampler would be another one


def test_the_usual_methods_are_autograd_of_the_elbo_with_its_exact_entropy(float64):
    encoder, decoder = small_networks(6)
    generator = np.random.default_rng(7)
    images, eta = generator.integers(0, 2, (6, 784)).astype(float), generator.standard_normal((6, 2))

    def loss(nets):
        mean, spread = networks.encode(nets, images)
        joint = networks.log_joint(decoder, images, mean + spread * eta)
        return -(joint + jnp.log(spread).sum(-1)).sum()

    def by_hand(nets):
        (mean, spread), back = jax.vjp(lambda nets: networks.encode(nets, images), nets)
        start = hmc.init(mean + spread * eta, networks.value_and_gradient(decoder, images))
        return [
            back(encoder_pull(method, Draw(mean, spread, eta, start, start), 0.0))[0]
            for method in ("kl", "hoffman")
        ]

    wanted = jax.jit(jax.grad(loss), compiler_options=QUICK)(encoder)
    for got in jax.jit(by_hand, compiler_options=QUICK)(encoder):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_gradient_of_the_density_is_autograds(float64):
    _, decoder = small_networks(8)
    generator = np.random.default_rng(9)
    images, z = generator.integers(0, 2, (5, 784)).astype(float), 2 * generator.standard_normal((5, 2))
    value, gradient = jax.jit(networks.value_and_gradient(decoder, images))(z)
    want = jax.jit(hmc.gradient_of(lambda z: networks.log_joint(decoder, images, z)))(z)
    np.testing.assert_allclose(value, want[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-10)


@pytest.mark.parametrize("path", networks.softplus.paths)
def test_softplus_and_its_slope_are_right_on_every_path_from_far_below_to_far_above_zero(path):
    x = np.concatenate([np.linspace(-110, 110, 441), [-3e38, 3e38]]).astype(np.float32)
    with force_path(path):
        values, slopes = networks.softplus(x), jax.vmap(jax.grad(networks.softplus))(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(values, np.logaddexp(wide, 0), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(slopes, np.exp(-np.logaddexp(-wide, 0)), rtol=1e-6, atol=1e-37)
