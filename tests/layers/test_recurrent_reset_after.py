"""The GRU with the reset gate after the product, against its formula in float64, torch's and Keras's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hotloop.layers.recurrent import gru_reset_after, init_gru, init_gru_reset_after

T, B, INPUTS, H = 11, 3, 5, 7


def plain(params, x_TBI):
    """One step after the other, differentiated by JAX."""

    def step(h, x):
        (zr, zu, zc) = jnp.split(x @ params["input"] + params["bias"], 3, 1)
        (r, u, c) = jnp.split(h @ params["recurrent"] + params["recurrent_bias"], 3, 1)
        reset, update = 1 / (1 + jnp.exp(-(zr + r))), 1 / (1 + jnp.exp(-(zu + u)))
        h = update * h + (1 - update) * jnp.tanh(zc + reset * c)
        return h, h

    return jax.lax.scan(step, jnp.zeros((x_TBI.shape[1], H), x_TBI.dtype), x_TBI)[1]


def case(timesteps):
    rng = np.random.default_rng(0)
    shapes = {"input": (INPUTS, 3 * H), "recurrent": (H, 3 * H), "bias": (3 * H,), "recurrent_bias": (3 * H,)}
    params = {name: jnp.array(rng.normal(size=shape)) for name, shape in shapes.items()}
    return params, jnp.array(rng.normal(size=(timesteps, B, INPUTS))), rng.normal(size=(timesteps, B, H))


@pytest.mark.parametrize("timesteps", [1, pytest.param(5, marks=pytest.mark.slow), T])
def test_outputs_and_gradients_equal_the_plain_formula(timesteps):
    with jax.enable_x64(True):
        params, x, weights = case(timesteps)

        def loss(layer):
            return lambda params, x: (layer(params, x) * weights).sum()

        def fused(params, x):
            return gru_reset_after(params, x)[0]

        @partial(jax.jit, static_argnums=0)
        def run(layer, params, x):
            return layer(params, x), jax.grad(loss(layer), (0, 1))(params, x)

        (y, ours), (expected, theirs) = run(fused, params, x), run(plain, params, x)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), ours, theirs)


def test_a_given_state_continues_the_sequence():
    with jax.enable_x64(True):
        params, x, _ = case(T)
        layer = jax.jit(gru_reset_after)
        whole, last = layer(params, x)
        first, state = layer(params, x[:4])
        second, end = layer(params, x[4:], state)
        np.testing.assert_allclose(jnp.concatenate([first, second]), whole, rtol=1e-12)
        np.testing.assert_allclose(end, last, rtol=1e-12)


def from_torch(weights):
    """Our parameters from those of torch.nn.GRU: the gates are in the same order."""
    return {
        "input": weights["weight_ih"].T,
        "recurrent": weights["weight_hh"].T,
        "bias": weights["bias_ih"],
        "recurrent_bias": weights["bias_hh"],
    }


def torch_gru(weights, x_TBI):
    """The formula of torch.nn.GRU's documentation, for one layer."""
    of_x, of_h = (dict(zip("rzn", jnp.split(weights[f"weight_{k}"], 3), strict=True)) for k in ("ih", "hh"))
    b_x, b_h = (dict(zip("rzn", jnp.split(weights[f"bias_{k}"], 3), strict=True)) for k in ("ih", "hh"))

    def sigmoid(a):
        return 1 / (1 + jnp.exp(-a))

    def step(h, x):
        r = sigmoid(x @ of_x["r"].T + b_x["r"] + h @ of_h["r"].T + b_h["r"])
        z = sigmoid(x @ of_x["z"].T + b_x["z"] + h @ of_h["z"].T + b_h["z"])
        n = jnp.tanh(x @ of_x["n"].T + b_x["n"] + r * (h @ of_h["n"].T + b_h["n"]))
        h = (1 - z) * n + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((x_TBI.shape[1], H)), x_TBI)[1]


def from_keras(weights):
    """Our parameters from those of keras.layers.GRU(reset_after=True), whose update gate comes first."""

    def reset_first(array):
        update, reset, candidate = jnp.split(array, 3, -1)
        return jnp.concatenate([reset, update, candidate], -1)

    kernel, recurrent, bias = map(reset_first, weights)
    return {"input": kernel, "recurrent": recurrent, "bias": bias[0], "recurrent_bias": bias[1]}


def keras_gru(weights, x_TBI):
    """Keras's GRUCell.call with reset_after: kernel [I, 3H], recurrent_kernel [H, 3H], bias [2, 3H]."""
    kernel, recurrent, (input_bias, recurrent_bias) = weights

    def step(h, x):
        x_z, x_r, x_h = jnp.split(x @ kernel + input_bias, 3, 1)
        inner_z, inner_r, inner_h = jnp.split(h @ recurrent + recurrent_bias, 3, 1)
        z, r = (1 / (1 + jnp.exp(-(a + b))) for a, b in ((x_z, inner_z), (x_r, inner_r)))
        hh = jnp.tanh(x_h + r * inner_h)
        h = z * h + (1 - z) * hh
        return h, h

    return jax.lax.scan(step, jnp.zeros((x_TBI.shape[1], H)), x_TBI)[1]


def drawn(shapes):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda shape: jnp.array(rng.normal(size=shape)), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


TORCH = {"weight_ih": (3 * H, INPUTS), "weight_hh": (3 * H, H), "bias_ih": (3 * H,), "bias_hh": (3 * H,)}
KERAS = [(INPUTS, 3 * H), (H, 3 * H), (2, 3 * H)]


OTHERS = pytest.mark.parametrize(
    ("theirs", "ours", "shapes"),
    [(torch_gru, from_torch, TORCH), (keras_gru, from_keras, KERAS)],
    ids=["torch", "keras"],
)


@OTHERS
def test_weights_of_torch_and_keras_map_to_the_same_outputs(theirs, ours, shapes):
    with jax.enable_x64(True):
        weights, (_, x, _) = drawn(shapes), case(T)
        found, _ = jax.jit(gru_reset_after)(ours(weights), x)
        np.testing.assert_allclose(found, theirs(weights, x), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@OTHERS
@pytest.mark.parametrize("timesteps", [1, 5, T])
def test_weights_of_torch_and_keras_get_the_same_gradients(theirs, ours, shapes, timesteps):
    with jax.enable_x64(True):
        weights, (_, x, weigh) = drawn(shapes), case(timesteps)

        def gradients(layer):
            return jax.jit(jax.grad(lambda w, x: (layer(w, x) * weigh).sum(), (0, 1)))(weights, x)

        found = gradients(lambda weights, x: gru_reset_after(ours(weights), x)[0])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, gradients(theirs)
        )


def test_torch_itself_gives_the_same():
    torch = pytest.importorskip("torch")
    with jax.enable_x64(True):
        _, x, _ = case(T)
        weights = drawn(TORCH)
        layer = torch.nn.GRU(INPUTS, H, dtype=torch.float64)
        layer.load_state_dict({f"{k}_l0": torch.tensor(np.asarray(v)) for k, v in weights.items()})
        expected = layer(torch.tensor(np.asarray(x)))[0].detach().numpy()
        np.testing.assert_allclose(gru_reset_after(from_torch(weights), x)[0], expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "unit"), [(jnp.bfloat16, 2**-8), pytest.param(jnp.float16, 2**-11, marks=pytest.mark.slow)]
)
def test_sixteen_bits_stay_within_a_few_roundings(dtype, unit):
    with jax.enable_x64(True):
        params, x, _ = case(T)
        params, x = jax.tree.map(lambda leaf: (leaf / 2).astype(dtype), (params, x))
        exact = plain(*jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, x)))
        outputs, last = jax.jit(gru_reset_after)(params, x)
        assert outputs.dtype == last.dtype == dtype
        assert np.abs(np.asarray(outputs, np.float64) - np.asarray(exact)).max() < 8 * unit


def test_the_second_bias_starts_at_zero_in_the_parameters_type():
    params = init_gru_reset_after(jax.random.key(0), INPUTS, H, jnp.bfloat16)
    second = params.pop("recurrent_bias")
    assert second.shape == (3 * H,) and second.dtype == jnp.bfloat16 and not second.any()
    jax.tree.map(np.testing.assert_array_equal, params, init_gru(jax.random.key(0), INPUTS, H, jnp.bfloat16))
