"""hotloop-native's passes over weights that the last and the first layer of an autoencoder share, against float64."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.data.rating_matrix import RatingMatrix
from hotloop.engine.keys import seed_key
from hotloop.engine.loop import Program, copy_state
from hotloop.families.recommender import batches, model
from hotloop.families.recommender.config import TrainOptions
from hotloop.layers import native_tied, tied
from hotloop.layers.paths import NATIVE, force_path
from native_calls import child, draw

quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""For programs that run a few times: most of a test's time is the compiler's."""
SCALE = 0.125
RESULTS = ("y", "following", "z", "dz_code", "squares", "d_weights", "d_bias", "dy_code")


class Layer:
    """Weights and codes that are drawn at random, and all that the passes make of them, in float64."""

    def __init__(self, items, users, units):
        codes = [(users, units)] * 3
        weights, self.bias, *self.codes = draw(0, (items, units), (items,), *codes)
        self.weights = weights / np.float32(np.sqrt(units))

    def apply(self, code):
        return np.float64(selu(np.float64(self.weights) @ code.T + self.bias[:, None]))

    def outputs(self):
        """y, as it is given to the later passes, and z. Where rounding decides on which side of SELU's kink a number
        lies, the two are the same, so that no gradient comes of it."""
        y, z = (self.apply(np.float64(code)) for code in self.codes[:2])
        near = np.minimum(abs(y), abs(z)) < 1e-5
        return np.where(near, np.float32(z), np.float32(y)), np.float32(z)

    def reference(self):
        y_code, z_code, d_following = map(np.float64, self.codes)
        y, z = map(np.float64, self.outputs())
        weights, apart = np.float64(self.weights), z - y
        dz = SCALE * apart * slope(z)
        dy = (weights @ d_following.T - SCALE * apart) * slope(y)
        d_weights = dz @ z_code + y @ d_following + dy @ y_code
        first = self.apply(y_code)
        return (
            *(first, first.T @ weights),
            *(z, dz.T @ weights, np.square(apart).sum()),
            *(d_weights, (dz + dy).sum(1), dy.T @ weights),
        )

    def run(self):
        weights, bias, y_code, z_code, d_following = map(jnp.asarray, (self.weights, self.bias, *self.codes))
        y, z = map(jnp.asarray, self.outputs())
        return (
            *native_tied.forward(weights, bias, y_code),
            *native_tied.refeed(weights, bias, z_code, y, scale=SCALE),
            *native_tied.gradient(weights, y, z, y_code, z_code, d_following, scale=SCALE),
        )


def selu(x):
    scale, alpha = tied.SELU_SCALE, tied.SELU_ALPHA
    return scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def slope(y):
    return np.where(y > 0, tied.SELU_SCALE, y + tied.SELU_SCALE * tied.SELU_ALPHA)


def check(*sizes):
    layer = Layer(*sizes)
    for name, ours, right in zip(RESULTS, quick(layer.run)(), layer.reference(), strict=True):
        assert ours.shape == right.shape
        off = np.max(abs(ours - right)) / max(1, np.max(abs(right)))
        assert off < 1e-5, f"{name} is off by {off:.1e} of the largest value"


LARGEST = (400, 40, 140)


@settings(max_examples=2)
@given(st.tuples(*(st.integers(1, most) for most in LARGEST)))
def test_every_pass_is_the_mathematics_of_it(sizes):
    check(*sizes)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.tuples(*(st.integers(1, 2 * most) for most in LARGEST)))
def test_every_pass_is_the_mathematics_of_it_over_many_shapes(sizes):
    check(*sizes)


SHAPES = {
    "one of each": (1, 1, 1),
    "fewer than a vector has": (3, 5, 7),
    "whole vectors and blocks": (224, 32, 64),
    "a rest of every kind": (293, 33, 65),
    "parts that threads cannot share evenly": (1777, 19, 131),
    "blocks of few items": (40, 300, 700),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_end_within_a_vector_a_block_or_a_threads_part(name):
    check(*SHAPES[name])


def test_the_reference_is_what_jax_derives():
    layer = Layer(9, 4, 5)

    def loss(weights, bias, y_code, z_code, d_following):
        y, z = (jax.nn.selu(weights @ code.T + bias[:, None]) for code in (y_code, z_code))
        return SCALE / 2 * jnp.square(z - y).sum() + (y.T @ weights * d_following).sum()

    with jax.enable_x64(True):
        arguments = map(np.float64, (layer.weights, layer.bias, *layer.codes))
        d_weights, d_bias, dy_code, dz_code, following = quick(jax.grad(loss, range(5)))(*arguments)
    derived = {
        "following": following,
        "dz_code": dz_code,
        "d_weights": d_weights,
        "d_bias": d_bias,
        "dy_code": dy_code,
    }
    found = dict(zip(RESULTS, layer.reference(), strict=True))
    for name, theirs in derived.items():
        np.testing.assert_allclose(
            found[name], theirs, rtol=1e-5, atol=1e-6
        )  # y and z are rounded to float32 in it


def test_what_is_no_number_stays_none():
    layer = Layer(50, 19, 33)
    layer.bias[7] = np.nan
    y, following, z, dz_code, squares, _, d_bias, _ = quick(layer.run)()
    at_the_item = np.broadcast_to((np.arange(50) == 7)[:, None], y.shape)
    np.testing.assert_array_equal(np.isnan(y), at_the_item)
    np.testing.assert_array_equal(np.isnan(z), at_the_item)
    np.testing.assert_array_equal(np.isnan(d_bias), at_the_item[:, 0])
    for total in (following, dz_code, squares):
        assert np.isnan(total).all()


def test_the_same_arrays_have_the_same_bits_every_time():
    run = quick(Layer(1777, 40, 128).run)
    first = run()
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(), first)


WEIGHTS, BIAS, CODES, OUTPUTS = (6, 4), (6,), (3, 4), (6, 3)
OPERANDS = {
    "forward": ((OUTPUTS, CODES), (WEIGHTS, BIAS, CODES)),
    "refeed": ((OUTPUTS, CODES, ()), (WEIGHTS, BIAS, CODES, OUTPUTS)),
    "gradient": ((WEIGHTS, BIAS, CODES), (WEIGHTS, OUTPUTS, OUTPUTS, CODES, CODES, CODES)),
}


def call(target, results, operands):
    found = jax.ffi.ffi_call(
        f"hotloop_tied_{target}", [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    )
    attributes = {} if target == "forward" else {"scale": np.float32(1)}
    return jax.block_until_ready(found(*map(jnp.zeros, operands), **attributes))


def refused(match, target, results, operands):
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as caught:
        call(target, results, operands)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("target", OPERANDS)
def test_sizes_that_do_not_agree_are_refused(target):
    results, operands = OPERANDS[target]
    call(target, results, operands)
    other = {WEIGHTS: (7, 4), BIAS: (7,), CODES: (3, 5), OUTPUTS: (6, 2)}
    for i, shape in enumerate(results):
        if shape:
            refused("do not agree", target, (*results[:i], other[shape], *results[i + 1 :]), operands)
    for i, shape in enumerate(operands):
        refused("do not agree", target, results, (*operands[:i], other[shape], *operands[i + 1 :]))


@pytest.mark.parametrize("target", OPERANDS)
@pytest.mark.parametrize("size", [6, 3, 4])
def test_an_empty_layer_is_refused(target, size):
    def without(shapes):
        return [tuple(0 if each == size else each for each in shape) for shape in shapes]

    results, operands = map(without, OPERANDS[target])
    if any(0 not in shape for shape in results):  # else XLA has nothing to compute and calls nobody
        refused("empty", target, results, operands)


OLDER = """
import test_native_tied as t
for sizes in t.SHAPES.values():
    t.check(*sizes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_older_processors_have_the_same_mathematics(isa):
    child(OLDER, HOTLOOP_NATIVE_ISA=isa)


@dataclass(frozen=True)
class Narrow(model.Job):
    """A recommender of a few units."""

    @property
    def layers(self):
        return (19,)


ITEMS, BATCH = 300, 8
SIZES = np.array([30, 1, 2, 28, 0, 3, 25, 1])
CONFIG = TrainOptions(
    size=128, batch_size=BATCH, data="procedural", base_learning_rate=-9, precision="32.32", no_dropout=True
)


def make_ratings():
    rng = np.random.default_rng(0)
    items = np.concatenate([np.sort(rng.permutation(ITEMS)[:size]) for size in SIZES]).astype(np.uint16)
    codes = rng.integers(0, 5, SIZES.sum(), dtype=np.uint8)
    levels = np.arange(1, 6, dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(SIZES)])
    return RatingMatrix(starts, items, codes, levels, np.arange(len(SIZES)), np.arange(ITEMS))


def make_job(replicas=1):
    return Narrow(CONFIG.resolve(), ITEMS, replicas=replicas)


def test_the_gradient_of_an_update_is_that_of_the_plain_path():
    job = make_job()
    forms = jax.eval_shape(lambda key: model.init(job, key)["params"], jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda form: rng.normal(0.02, 0.3, form.shape).astype(np.float32), forms)
    x = batches.SparseBatch(jax.device_put(batches.make_rows(make_ratings())), jnp.arange(BATCH))
    make = partial(model.sparse_joint, job, x=x, key=jax.random.key(1))
    with force_path("default"):
        expected = quick(lambda params: make(params))(params)
    with force_path(NATIVE):
        lowered = quick(lambda params: make(params)).lower(params)
    assert all(name in lowered.as_text() for name in ("tied_forward", "tied_refeed", "tied_gradient"))
    found = lowered.compile()(params)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


def train(path, replicas):
    job = make_job(replicas)
    feed = batches.make_feed(make_ratings(), BATCH, 0, job.policy.compute, sparse=True, mesh=job.mesh)
    with force_path(path):
        program = Program(model.update(job), feed, 3, seed_key(1))
        state, metrics = program(copy_state(model.init(job, jax.random.key(3))), 0, 3)
    return jax.tree.map(np.asarray, (state["params"], dict(metrics)))


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_updates_of_replicas_are_those_of_one_device_by_the_plain_path():
    found, expected = train(NATIVE, 2), train("default", 1)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=2e-5)
