"""The control variate's bookkeeping: order, the switch from shared to local, indices, calls of any length."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vcd_oracle as oracle

from hotloop.engine.feed import Order, Resident
from hotloop.engine.loop import Program, copy_state
from hotloop.families.vcd import model
from hotloop.families.vcd.config import VcdModel

MOVED = jax.jit(model.move_variate, static_argnums=3)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def vector(state, images):
    """An entry for every image, as the books have it."""
    return np.broadcast_to(np.asarray(state["shared"]) + np.asarray(state.get("own", 0.0)), images)


def batches(images, rows, count, seed=3):
    """The images of the updates 0 .. count - 1 of a feed."""
    order = Order(images, rows, seed)
    return order.indices(order.start(0), np.arange(count, dtype=np.uint32))


@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize(("images", "rows"), [(12, 4), (11, 4), (5, 4)])
def test_shared_and_own_are_the_textbook_vector(float64, kind, images, rows):
    """Batches in the order of a feed, 15 shared updates and 25 local ones, some images twice in a batch."""
    generator, state, control = (
        np.random.default_rng(0),
        model.init_variate(kind, images),
        np.zeros(images),
    )
    for number, index in enumerate(batches(images, rows, 40)):
        f = generator.normal(-100, 30, rows)
        like = np.zeros(rows)
        np.testing.assert_allclose(model.read_variate(state, index, like), control[index], rtol=1e-11)
        state = MOVED(state, index, f, 0.9, number < 15)
        control = oracle.moved(control, index, f, kind, 0.9, number < 15)
        np.testing.assert_allclose(vector(state, images), control, rtol=1e-11)
    np.testing.assert_allclose(model.mean_variate(state), control.mean(), rtol=1e-11)
    assert (np.ptp(control) > 1) == (kind == "local")


def test_without_a_variate_nothing_is_kept_and_nothing_taken_off():
    state = model.init_variate("none", 10)
    assert state == {} and MOVED(state, np.arange(3), jnp.ones(3), 0.9, True) == {}
    np.testing.assert_array_equal(model.read_variate(state, np.arange(3), jnp.ones(3)), np.zeros(3))
    assert float(model.mean_variate(state)) == 0


@pytest.mark.parametrize("images", [7, 9])
def test_of_an_image_that_comes_twice_the_later_row_counts(images):
    """Both start from the same old value; where the batch's size divides the images none comes twice."""
    state = {"shared": jnp.float32(2), "own": jnp.arange(images, dtype=jnp.float32)}
    index, f = np.array([5, 1, 5, 1]), np.float32([10, 20, 30, 40])
    after = MOVED(state, index, f, 0.5, False)
    expected = 2.0 + np.arange(images)
    expected[[5, 1]] = 0.5 * expected[[5, 1]] + 0.5 * np.array([30, 40])
    np.testing.assert_allclose(vector(after, images), expected, rtol=1e-6)


@pytest.mark.parametrize("images", [7, 8])
def test_a_local_update_leaves_all_other_images_their_bits(images):
    own_values = np.random.default_rng(1).standard_normal(images).astype(np.float32)
    state = {"shared": jnp.float32(-3.7), "own": jnp.asarray(own_values)}
    after = MOVED(state, np.array([6, 0, 2, 3]), np.float32([1, 2, 3, 4]), 0.9, False)
    others = np.setdiff1d(np.arange(images), [6, 0, 2, 3])
    np.testing.assert_array_equal(np.asarray(after["own"])[others], own_values[others])
    assert after["shared"] == state["shared"]
    assert (np.asarray(after["own"]) != own_values).sum() == 4


def test_batches_that_fill_a_pass_exactly_never_hold_an_image_twice():
    """What writing without regard for duplicates rests on."""
    assert all(len(set(index)) == 6 for index in batches(24, 6, 40).tolist())
    assert any(len(set(index)) < 6 for index in batches(25, 6, 40).tolist())


# The variate inside the update.

IMAGES, BATCH = 10, 4
TINY = VcdModel(
    z_dim=2,
    hidden=(4,),
    hmc_steps=2,
    leapfrog_steps=1,
    micro_batch_size=BATCH,
    decay_epochs=Fraction(2),
    adaptation_rate=0.3,
)
BITS = np.random.default_rng(2).integers(0, 2, (IMAGES, 784), dtype=np.uint8)


SWITCH, UPDATES = 4, 14
TRACED = ("control_variate", "learning_rate", "step_size", "f", "loss")


def traced(program, state, calls):
    """Every update's figures, and the state at the end."""
    state, first, parts = copy_state(state), 0, []
    for count in calls:
        state, metrics = program(state, first, count)
        parts.append({name: metrics[name] for name in TRACED})
        first += count
    return {name: np.concatenate([part[name] for part in parts]) for name in TRACED}, state


@pytest.fixture(scope="module")
def program():
    """The switch to local variates and the decays of the rates (every 5 updates) fall inside calls."""
    job = model.Job(dataclasses.replace(TINY, shared_updates=SWITCH), IMAGES)
    feed = Resident({"image": BITS, "index": np.arange(IMAGES)}, BATCH, seed=1)
    return Program(model.update(job), feed, 7, jax.random.key(5), loop="while")


@pytest.fixture(scope="module")
def state():
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(model.init, static_argnums=0, compiler_options=quick)(
        model.Job(TINY, IMAGES), jax.random.key(0)
    )


def test_variate_rate_and_step_size_have_one_trace_for_any_number_of_updates_a_call(program, state):
    sevens, end = traced(program, state, (7, 7))
    for calls in ((3, 3, 3, 3, 2), (1,) * UPDATES):
        trace, other = traced(program, state, calls)
        for name in TRACED:
            np.testing.assert_array_equal(trace[name], sevens[name], err_msg=name)
        assert all(map(np.array_equal, jax.tree.leaves(end), jax.tree.leaves(other)))
    np.testing.assert_allclose(sevens["learning_rate"], 5e-4 * 0.9 ** (np.arange(UPDATES) // 5), rtol=1e-6)
    assert len(set(sevens["step_size"])) > 2


def test_the_trace_inside_a_call_is_that_of_the_textbook_rule(program, state):
    """What an update reports as its variate is made of the f of the updates before it, shared to the switch."""
    trace, end = traced(program, state, (7, 7))
    control = 0.0
    for number in range(SWITCH + 1):
        assert trace["control_variate"][number] == pytest.approx(control, rel=1e-5)
        control = 0.9 * control + 0.1 * trace["f"][number]
    assert float(end["variate"]["shared"]) == pytest.approx(trace["control_variate"][SWITCH], rel=1e-5)
    seen = batches(IMAGES, BATCH, UPDATES, seed=1)[SWITCH:]
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(end["variate"]["own"])), np.unique(seen))


def test_updates_1_to_3000_are_shared_and_from_3001_on_local(state):
    """Updates count from 0 in the state: with 2999 behind it the next is the last shared one."""
    job = model.Job(TINY, IMAGES)
    assert job.model.shared_updates == 3000
    update = jax.jit(model.update(job), compiler_options={"xla_backend_optimization_level": 0})
    state = {**state, "variate": {"shared": jnp.float32(-40), "own": jnp.zeros(IMAGES)}}
    index = np.array([7, 1, 4, 9])
    batch = {"image": BITS[index], "index": index}
    for done, shared in ((0, True), (2998, True), (2999, True), (3000, False), (3001, False)):
        state["update"] = jnp.int32(done)
        new, metrics = update(state, batch, jax.random.key(3))
        moved = 0.9 * -40 + 0.1 * float(metrics["f"])
        after = vector(new["variate"], IMAGES)
        assert float(metrics["control_variate"]) == -40  # what this update used is the old one
        if shared:
            np.testing.assert_allclose(after, moved, rtol=1e-5)
        else:
            np.testing.assert_array_equal(np.delete(after, index), -40)
            assert after[index].mean() == pytest.approx(moved, rel=1e-5) and np.ptp(after[index]) > 0
