import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.mcmc import hmc


def banana(x):
    """A density without symmetry whose gradient is not linear."""
    return -0.5 * (x[:, 0] ** 2 + (x[:, 1] - 0.5 * x[:, 0] ** 2) ** 2) - 0.1 * jnp.sin(x[:, 0])


def toy(x):
    return (-x - x * x).sum(-1)


BANANA = hmc.gradient_of(banana)
TOY = hmc.gradient_of(toy)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def draws(seed, chains, size):
    generator = np.random.default_rng(seed)
    return (
        jnp.asarray(generator.normal(size=(chains, size))),
        jnp.asarray(generator.normal(size=(chains, size))),
        jnp.asarray(generator.uniform(size=chains)),
    )


def jit_leapfrog(gradient, steps):
    return jax.jit(lambda state, momentum, size: hmc.leapfrog(gradient, state, momentum, size, steps))


jit_init = jax.jit(hmc.init, static_argnums=1)
banana_step = jax.jit(hmc.transition(BANANA, 5))


def textbook_step(gradient, value, q, p, u, size, steps):
    """HMC as the books have it: two gradients a leapfrog, nothing kept."""
    start_q, start_p = q, p
    for _ in range(steps):
        p = p + size / 2 * gradient(q)
        q = q + size * p
        p = p + size / 2 * gradient(q)
    change = (p**2).sum(-1) / 2 - value(q) - (start_p**2).sum(-1) / 2 + value(start_q)
    accepted = u < np.exp(-change)
    return np.where(accepted[:, None], q, start_q), change, accepted


@pytest.mark.parametrize("steps", [5, hmc.UNROLLED_LEAPFROGS + 3])
def test_a_trajectory_run_back_ends_where_it_began(float64, steps):
    position, momentum, _ = draws(0, 50, 2)
    move = jit_leapfrog(BANANA, steps)
    end, turned = move(jit_init(position, BANANA), momentum, 0.2)
    back, back_momentum = move(end, -turned, 0.2)
    np.testing.assert_allclose(back.position, position, rtol=0, atol=1e-10)
    np.testing.assert_allclose(back_momentum, -momentum, rtol=0, atol=1e-10)


@pytest.mark.parametrize("block", [1, 4, 8])
def test_leapfrogs_known_at_run_time_are_those_that_were_written_out(float64, block):
    position, momentum, _ = draws(3, chains=4, size=2)
    state = jit_init(position, BANANA)
    follow = jax.jit(lambda steps: hmc.leapfrog(BANANA, state, momentum, 0.1, steps, block))
    for steps in (1, 2, block, block + 1, 2 * block, 2 * block + 3):
        expected = jit_leapfrog(BANANA, steps)(state, momentum, 0.1)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(follow(steps)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_trajectory_map_keeps_volume(float64):
    def move(both):
        state = hmc.init(both[None, :2], BANANA)
        end, momentum = hmc.leapfrog(BANANA, state, both[None, 2:], 0.3, 2)
        return jnp.concatenate([end.position[0], momentum[0]])

    jacobian = jax.jit(jax.jacobian(move))(jnp.array([0.3, -0.7, 0.5, 1.1]))
    assert float(jnp.abs(jacobian - jnp.eye(4)).max()) > 0.1
    assert float(jnp.linalg.det(jacobian)) == pytest.approx(1, abs=1e-12)


def test_the_energy_error_falls_fourfold_when_the_step_is_halved(float64):
    position, momentum, uniform = draws(1, 200, 2)

    def error(size, steps):
        _, info = jax.jit(hmc.transition(BANANA, steps))(jit_init(position, BANANA), momentum, uniform, size)
        return float(np.abs(info.energy_change).mean())

    assert error(0.2, 3) / error(0.1, 6) == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_cached_gradients_give_the_textbook_trajectory_and_decision(float64, steps):
    position, momentum, uniform = draws(2, 200, 2)

    both = jax.jit(BANANA)

    def gradient(q):
        return np.asarray(both(jnp.asarray(q))[1])

    def value(q):
        return np.asarray(both(jnp.asarray(q))[0])

    step = jax.jit(hmc.transition(BANANA, steps))
    state, info = step(jit_init(position, BANANA), momentum, uniform, 0.4)
    expected, change, accepted = textbook_step(
        gradient, value, np.asarray(position), np.asarray(momentum), np.asarray(uniform), 0.4, steps
    )
    np.testing.assert_allclose(state.position, expected, atol=1e-11)
    np.testing.assert_allclose(info.energy_change, change, atol=1e-11)
    np.testing.assert_array_equal(info.accepted, accepted)
    assert steps < 5 or 0 < accepted.sum() < 200
    np.testing.assert_allclose(state.gradient, gradient(state.position), atol=1e-11)
    np.testing.assert_allclose(state.log_density, value(state.position), atol=1e-11)


@pytest.mark.parametrize("leapfrogs", [1, 5, 20])
def test_a_step_evaluates_as_many_gradients_as_it_has_leapfrogs(leapfrogs):
    counted = []

    def counting(position):
        jax.debug.callback(lambda: counted.append(1))
        return TOY(position)

    kernel = jax.jit(hmc.kernel(counting, leapfrogs))
    state = jit_init(jnp.ones((3, 1)), TOY)
    for key in jax.random.split(jax.random.key(0), 4):
        state, _ = kernel(key, state, 0.3)
    jax.effects_barrier()
    assert len(counted) == 4 * leapfrogs


def test_a_rejected_chain_stays_bit_for_bit():
    position, momentum, _ = draws(3, 100, 2)
    old = jit_init(jnp.float32(position), BANANA)
    new, info = jax.jit(hmc.transition(BANANA, 5))(old, jnp.float32(momentum), jnp.full(100, 0.999), 0.9)
    rejected = ~np.asarray(info.accepted)
    assert 10 < rejected.sum() < 100
    for before, after in zip(old, new, strict=True):
        np.testing.assert_array_equal(np.asarray(before)[rejected], np.asarray(after)[rejected])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_chain_that_breaks_is_rejected_and_touches_no_other(bad):
    def broken(x):
        return jnp.where(x[:, 0] > 5, bad, banana(x)) + jnp.where(x[:, 0] > 5, bad, 0) * x[:, 0]

    position, momentum, uniform = (jnp.float32(each) for each in draws(4, 20, 2))
    momentum = np.where(np.arange(20)[:, None] == 7, np.float32([200, 0]), momentum)
    step = jax.jit(hmc.transition(hmc.gradient_of(broken), 5))
    start = jit_init(position, BANANA)
    state, info = step(start, momentum, uniform, 0.2)
    others, _ = jax.jit(hmc.transition(BANANA, 5))(start, momentum, uniform, 0.2)
    assert not info.accepted[7] and info.acceptance[7] == 0
    np.testing.assert_array_equal(state.position[7], position[7])
    keep = np.arange(20) != 7
    np.testing.assert_allclose(state.position[keep], others.position[keep], atol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in state)


def test_a_diverging_step_size_is_always_rejected():
    kernel = jax.jit(hmc.kernel(TOY, 40))
    state = jit_init(jnp.ones((50, 1)), TOY)
    new, info = kernel(jax.random.key(0), state, 50.0)
    assert not np.any(info.accepted) and np.all(np.asarray(info.acceptance) == 0)
    np.testing.assert_array_equal(new.position, state.position)


def test_changing_one_chain_never_alters_another():
    position, momentum, uniform = (jnp.float32(each) for each in draws(5, 30, 2))
    step = jax.jit(hmc.transition(BANANA, 5))
    changed = np.where(np.arange(30)[:, None] == 3, np.float32(9.0), position)
    plain, _ = step(jit_init(position, BANANA), momentum, uniform, 0.3)
    other, _ = step(jit_init(changed, BANANA), momentum, uniform, 0.3)
    keep = np.arange(30) != 3
    np.testing.assert_array_equal(plain.position[keep], other.position[keep])


def sample(log_density, position, leapfrogs, size, steps, key):
    gradient = hmc.gradient_of(log_density)
    kernel = hmc.kernel(gradient, leapfrogs)

    def body(state, key):
        return kernel(key, state, size)

    def run(position, key):
        return jax.lax.scan(body, hmc.init(position, gradient), jax.random.split(key, steps))

    return jax.jit(run)(position, key)


def test_exact_gaussian_samples_stay_exact():
    covariance = np.array([[1.0, 0.7], [0.7, 0.8]])
    mean, precision = np.array([1.0, -2.0]), jnp.float32(np.linalg.inv(covariance))
    chains = 20000
    generator = np.random.default_rng(6)
    start = generator.multivariate_normal(mean, covariance, chains)

    def log_density(x):
        d = x - jnp.float32(mean)
        return -0.5 * jnp.einsum("ni,ij,nj->n", d, precision, d)

    state, info = sample(log_density, jnp.float32(start), 4, 0.45, 20, jax.random.key(1))
    x = np.asarray(state.position, np.float64)
    assert 0.5 < float(info.acceptance.mean()) < 0.97
    np.testing.assert_array_less(np.abs(x.mean(0) - mean), 4 * np.sqrt(np.diag(covariance) / chains))
    products = np.stack([(x[:, i] - mean[i]) * (x[:, j] - mean[j]) for i, j in ((0, 0), (0, 1), (1, 1))], 1)
    expected = covariance[[0, 0, 1], [0, 1, 1]]
    errors = products.std(0) / math.sqrt(chains)
    np.testing.assert_array_less(np.abs(products.mean(0) - expected), 4 * errors)


def test_a_stationary_chain_is_reversible():
    """Detailed balance: E[f(x0) g(x1)] = E[g(x0) f(x1)] for any f and g, here on a skew pair."""
    chains = 100000
    start = np.random.default_rng(7).normal(-0.5, math.sqrt(0.5), (chains, 1))
    state, info = sample(toy, jnp.float32(start), 3, 0.8, 1, jax.random.key(2))
    before, after = start[:, 0], np.asarray(state.position[:, 0], np.float64)
    assert 0.3 < float(info.accepted.mean()) < 0.95

    def skew(a, b):
        return np.maximum(a, 0) * (b**3 - b) - np.maximum(b, 0) * (a**3 - a)

    difference = skew(before, after)
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(chains)


def test_two_leapfrogs_of_length_one_swap_one_and_minus_two():
    state = jit_init(jnp.ones((4, 1)), TOY)
    for expected, leapfrogs in ((-2.0, 2), (1.0, 2), (-2.0, 10)):
        state, info = jax.jit(hmc.kernel(TOY, leapfrogs))(jax.random.key(leapfrogs), state, 1.0)
        np.testing.assert_allclose(state.position, expected, atol=2e-5)
        np.testing.assert_allclose(info.acceptance, 1, atol=1e-4)


@pytest.mark.parametrize("leapfrogs", [4, 8])
def test_multiples_of_four_leapfrogs_of_length_one_never_move(leapfrogs):
    state = jit_init(jnp.ones((4, 1)), TOY)
    state, info = jax.jit(hmc.kernel(TOY, leapfrogs))(jax.random.key(0), state, 1.0)
    np.testing.assert_allclose(state.position, 1, atol=2e-5)
    np.testing.assert_allclose(info.acceptance, 1, atol=1e-4)


def test_five_leapfrogs_of_length_one_propose_from_the_momentum_alone(float64):
    position, momentum, _ = draws(8, 100, 1)
    end, _ = jit_leapfrog(TOY, 5)(jit_init(position, TOY), momentum, 1.0)
    np.testing.assert_allclose(end.position, momentum - 0.5, atol=1e-12)


def test_adaptation_multiplies_toward_its_target():
    size = jnp.float32(0.05)
    assert float(hmc.adaptation(size, jnp.ones(10, bool))) == pytest.approx(0.05 * (1 + 0.01 / 9))
    assert float(hmc.adaptation(size, jnp.zeros(10, bool))) == pytest.approx(0.05 * 0.99)
    assert float(hmc.adaptation(size, jnp.arange(10) > 0)) == pytest.approx(0.05)
    assert float(hmc.adaptation(size, jnp.full(4, 0.6), target=0.8, rate=0.1)) == pytest.approx(0.05 * 0.975)


@pytest.mark.slow
def test_adaptation_settles_at_the_target_acceptance():
    kernel = hmc.kernel(BANANA, 5)

    def body(carry, key):
        state, size = carry
        state, info = kernel(key, state, size)
        return (state, hmc.adaptation(size, info.accepted, rate=0.05)), (size, info.accepted.mean())

    start = jit_init(jnp.zeros((200, 2)), BANANA), jnp.float32(0.1)
    _, (sizes, accepted) = jax.jit(lambda s, k: jax.lax.scan(body, s, k))(
        start, jax.random.split(jax.random.key(3), 800)
    )
    assert float(sizes[-1]) > 0.2
    assert float(accepted[-300:].mean()) == pytest.approx(0.9, abs=0.01)


def test_in_float32_a_trajectory_run_back_ends_close_to_where_it_began():
    position, momentum, _ = (jnp.float32(each) for each in draws(9, 50, 2))
    move = jit_leapfrog(BANANA, 5)
    end, turned = move(jit_init(position, BANANA), momentum, 0.2)
    back, back_momentum = move(end, -turned, 0.2)
    np.testing.assert_allclose(back.position, position, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back_momentum, -momentum, rtol=1e-4, atol=1e-5)
    assert np.abs(end.position - position).max() > 1


def test_every_proposal_is_taken_as_the_step_goes_to_zero(float64):
    position, momentum, uniform = draws(10, 500, 2)
    start = jit_init(position, BANANA)
    infos = [banana_step(start, momentum, uniform, size)[1] for size in (0.8, 0.1, 1e-3)]
    errors = [float(np.abs(info.energy_change).max()) for info in infos]
    assert errors[0] > 1 > errors[1] > 1e-3 > 1e-5 > errors[2]
    lowest = [float(info.acceptance.min()) for info in infos]
    assert lowest[0] < 0.5 < 0.9 < lowest[1] and lowest[2] > 1 - 1e-5


def test_a_chain_of_cached_steps_is_the_textbook_chain(float64):
    """What a step keeps for the next, after acceptance and after rejection, is what would be computed anew."""
    generator = np.random.default_rng(11)
    q = generator.normal(size=(40, 1)) - 0.5
    momenta, uniforms = generator.normal(size=(12, 40, 1)), generator.uniform(size=(12, 40))
    step, state, rejected = jax.jit(hmc.transition(TOY, 3)), jit_init(jnp.asarray(q), TOY), 0
    for momentum, uniform in zip(momenta, uniforms, strict=True):
        state, info = step(state, momentum, uniform, 0.95)
        q, _, accepted = textbook_step(
            lambda x: -1 - 2 * x, lambda x: (-x - x * x).sum(-1), q, momentum, uniform, 0.95, 3
        )
        np.testing.assert_array_equal(info.accepted, accepted)
        np.testing.assert_allclose(state.position, q, atol=1e-12)
        rejected += int((~accepted).sum())
    assert 50 < rejected < 400


def skewed(x):
    """A posterior of one number: a normal prior and three logistic observations, none of it symmetric."""
    return -0.5 * x[:, 0] ** 2 + jnp.log(jax.nn.sigmoid(jnp.outer(x[:, 0], jnp.array([1.5, 1.0, 4.0])))).sum(
        1
    )


def skewed_grid():
    grid = np.linspace(-8, 8, 20001)
    values = -0.5 * grid**2 - np.log1p(np.exp(-np.outer([1.5, 1.0, 4.0], grid))).sum(0)
    weights = np.exp(values - values.max())
    return grid, weights / weights.sum()


@pytest.mark.slow
def test_fifty_steps_keep_the_target_and_find_it_from_elsewhere():
    """Mean, spread and tail against a grid, each within four standard errors of independent chains."""
    chains, (grid, weights) = 20000, skewed_grid()
    generator = np.random.default_rng(12)
    starts = generator.choice(grid, chains, p=weights), generator.normal(-2.0, 0.1, chains)
    state, info = sample(skewed, jnp.float32(np.concatenate(starts)[:, None]), 3, 0.5, 50, jax.random.key(4))
    assert 0.6 < float(info.accepted.mean()) < 0.999
    for x in np.split(np.asarray(state.position[:, 0], np.float64), 2):
        for statistic in (lambda v: v, lambda v: v * v, np.cos, lambda v: (v < 0.2).astype(float)):
            values, expected = statistic(x), (weights * statistic(grid)).sum()
            assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(chains)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_chain_that_starts_broken_stays_so_and_leaves_the_others_their_bits(bad):
    position, momentum, uniform = (np.float32(each) for each in draws(13, 16, 2))
    broken = position.copy()
    broken[6] = bad
    with np.errstate(all="ignore"):
        sane, sane_info = banana_step(jit_init(position, BANANA), momentum, uniform, 0.3)
        state, info = banana_step(jit_init(broken, BANANA), momentum, uniform, 0.3)
    others = np.arange(16) != 6
    for one, other in zip((*sane, *sane_info), (*state, *info), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[others], np.asarray(other)[others])
    assert not info.accepted[6] and info.acceptance[6] == 0
    np.testing.assert_array_equal(state.position[6], broken[6])


def test_only_a_finite_change_of_energy_is_ever_accepted():
    """Also -inf, a proposal of infinite density, which a comparison alone would take."""
    changes = jnp.array([-jnp.inf, jnp.inf, jnp.nan, -1e30, 0.0, 1e30])
    old, new = (hmc.State(jnp.full((6, 2), n), jnp.full(6, n), jnp.full((6, 2), n)) for n in (1.0, 2.0))
    kept, info = hmc.metropolis(old, new, changes, jnp.zeros(6))
    np.testing.assert_array_equal(info.accepted, [False, False, False, True, True, False])
    np.testing.assert_array_equal(info.acceptance, [0, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(kept.log_density, [1, 1, 1, 2, 2, 1])
