"""The loop is honest: its products run in its body, as often as it says, on numbers that are right."""

import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from family_protocol import check_family
from hotloop.families.kernels import config as configs
from hotloop.families.kernels import model
from hotloop.families.kernels.bench import make_job, prepare
from hotloop.families.kernels.model import Job, exact_products

SMALL = {
    "dense": configs.Dense(size=64, batch_size=32, batches_per_step=6),
    "grouped-conv": configs.GroupedConv(
        batch_size=2,
        filter_in=8,
        filter_out=8,
        group_dim=4,
        input_size=8,
        block_repeats=2,
        batches_per_step=6,
    ),
    "rnn": configs.Rnn(batch_size=2, timesteps=3, hidden_size=32, batches_per_step=6),
    "gru": configs.Gru(batch_size=2, timesteps=3, hidden_size=32, input_size=16, batches_per_step=6),
    "lstm": configs.Lstm(batch_size=2, timesteps=3, hidden_size=32, batches_per_step=6, fused=True),
    "lstm-multi": configs.LstmMulti(
        batch_size=2, timesteps=4, hidden_size=32, input_size=8, batches_per_step=6
    ),
}
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=(%[\w.\-]+)|branch_computations=\{([^}]+)\}")
PRODUCT = re.compile(r" (dot|convolution|custom-call)\(")
SIX_TURNS = '"known_trip_count":{"n":"6"'


def made(config, **changes):
    return prepare(Job(replace(config, **changes), "float32"))


def computations(text):
    """Every computation of an HLO text: name -> its lines."""
    found, name = {}, ""
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[1]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def reached(parts, start):
    """The lines of a computation and of all that it calls."""
    seen, todo, lines = set(), [start], []
    while todo:
        name = todo.pop()
        if name in seen or name not in parts:
            continue
        seen.add(name)
        for line in parts[name]:
            lines.append(line)
            for one, several in CALLED.findall(line):
                todo += [each.strip().lstrip("%") for each in (one or several).split(",")]
    return lines


def loop_body(text):
    """The lines that the program's outer loop, the one of six turns, runs at each of them."""
    parts = computations(text)
    loops = [line for lines in parts.values() for line in lines if " while(" in line and SIX_TURNS in line]
    bodies = {line: reached(parts, re.search(r"body=%?([\w.\-]+)", line)[1]) for line in loops}
    # The compiler may write a scatter as a loop, of as many turns by chance: it lies in the body of the outer one.
    (outer,) = [line for line in loops if not any(line in body for body in bodies.values())]
    return bodies[outer]


def products_in_loop(text):
    """How many products the program does at every turn of its loop, as far as its text tells."""
    return sum(bool(PRODUCT.search(line)) for line in loop_body(text))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("rnn", "gru") else [])
        for name in SMALL
        if name != "grouped-conv"
    ],
)
def test_the_compiled_loop_holds_the_products(name):
    assert products_in_loop(made(SMALL[name]).program.compiled.as_text()) >= 1


@pytest.mark.slow
def test_the_compiled_loop_holds_the_convolutions():
    """As convolutions, or written out as one multiply-add a tap of each block's kernel."""
    text = made(SMALL["grouped-conv"]).program.compiled.as_text()
    multiplied = sum(" multiply(" in line for line in loop_body(text))
    assert products_in_loop(text) >= 2 or multiplied >= 2 * 9


@pytest.mark.parametrize("name", ["dense", "rnn"])
def test_the_compiled_training_loop_holds_the_products_of_both_passes(name):
    assert products_in_loop(made(SMALL[name], train=True).program.compiled.as_text()) >= 2


def test_a_product_before_the_loop_is_not_counted_in_it():
    bench = made(SMALL["dense"])

    def hoisted(params, pool):
        y = bench.job.kernel.apply(params, pool["x"][0])
        last, _ = jax.lax.scan(lambda last, _: (last * 0.5 + y, None), jnp.zeros((32, 64)), None, length=6)
        return last

    text = jax.jit(hoisted).lower(bench.state["params"], bench.feed.pool).compile().as_text()
    assert products_in_loop(text) == 0
    assert sum(bool(PRODUCT.search(line)) for line in text.splitlines()) >= 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's compiler leaves it in the loop")
def test_a_loop_over_a_constant_input_would_be_found_out():
    bench = made(SMALL["dense"])
    kernel = bench.job.kernel

    def constant(params, pool):
        def body(last, _):
            return kernel.apply(params, pool["x"][0]), None

        return jax.lax.scan(body, jnp.zeros((32, 64)), None, length=6)[0]

    compiled = jax.jit(constant).lower(bench.state["params"], bench.feed.pool).compile()
    assert products_in_loop(compiled.as_text()) == 0


def seconds(bench):
    start = time.perf_counter()
    bench.step()
    return time.perf_counter() - start


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.alone
def test_twice_the_iterations_take_twice_the_time(train):
    once = made(SMALL["dense"], size=256, batch_size=32, batches_per_step=400, train=train)
    twice = made(SMALL["dense"], size=256, batch_size=32, batches_per_step=800, train=train)
    once.step(), twice.step()
    fastest, fastest_of_twice = seconds(once), seconds(twice)
    for pairs in range(400):  # the fastest of many: another process can make a time longer, never shorter
        if pairs >= 40 and 1.6 < fastest_of_twice / fastest < 2.5:
            break
        fastest, fastest_of_twice = min(fastest, seconds(once)), min(fastest_of_twice, seconds(twice))
    assert 1.6 < fastest_of_twice / fastest < 2.5


def test_the_count_says_how_many_iterations_ran():
    bench = made(SMALL["rnn"])
    bench.step()
    bench.step()
    assert int(bench.state["count"]) == bench.iterations == 12


def test_an_iteration_waits_for_the_output_before_it():
    """An output beyond reach moves the counter on: the dependence is real, not only in the text."""
    bench = made(SMALL["dense"])
    bench.state["params"] = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e9), bench.state["params"])
    bench.feed.pool = jax.tree.map(jnp.ones_like, bench.feed.pool)
    bench.step()
    assert int(bench.state["count"]) == 12


def test_the_last_output_belongs_to_the_last_batch():
    bench = made(SMALL["dense"])
    bench.step()
    apply, params, last = bench.job.kernel.apply, bench.state["params"], bench.state["y"]
    with exact_products(jax.default_backend()):
        expected = apply(params, jnp.asarray(bench.feed.at(5)["x"]))
    other = apply(params, jnp.asarray(bench.feed.at(4)["x"]))
    np.testing.assert_allclose(last, expected, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(last - other).max()) > 0.1


def test_the_device_that_was_named_does_the_work():
    device = jax.devices()[-1]
    config = configs.Dense(size=16, batch_size=2, batches_per_step=2, device_id=len(jax.devices()) - 1)
    bench = prepare(make_job(config, jax.devices()[0]))
    bench.step()
    assert bench.state["y"].devices() == {device}


@pytest.mark.parametrize(("terms", "scale"), [(1, 1), (5, 4), (160, 128), (32768, 8192), (10**6, 8192)])
def test_the_loss_scale_is_a_power_of_two_for_float16_alone(terms, scale):
    assert model.loss_scale(terms, jnp.float16) == scale
    assert model.loss_scale(terms, jnp.bfloat16) == model.loss_scale(terms, jnp.float32) == 1


@pytest.mark.slow
def test_the_protocol_holds_for_rows_on_another_axis_and_sixteen_bits():
    job = Job(configs.Rnn(batch_size=4, timesteps=2, hidden_size=4), "bfloat16")
    rows = job.kernel.rows_first(job.kernel.data(np.random.default_rng(0), 10, job.dtype))
    check_family(model.init, model.update, model.evaluate, job, jax.tree.map(np.asarray, rows), 4)


def test_the_rows_losses_have_the_batchs_loss_for_their_mean():
    job = Job(configs.Rnn(batch_size=4, timesteps=2, hidden_size=4), "float32")
    batch = job.kernel.data(np.random.default_rng(0), 4, job.dtype)
    state = model.init(job, jax.random.key(0))
    found = jax.jit(model.evaluate(job))(state, job.kernel.rows_first(batch))["loss"]
    assert found.shape == (4,)
    expected = jax.jit(job.kernel.loss)(state["params"], batch)
    np.testing.assert_allclose(found.mean(), expected, rtol=1e-5)
