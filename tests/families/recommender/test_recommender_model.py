"""The autoencoder and one update of it: shapes, weights, tying, dropout, both re-feedings, and the masked error."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recommender_small import Small, float64, quick, ratings, with_params  # noqa: F401

from family_protocol import same_tree
from hotloop.families.recommender import model
from hotloop.families.recommender.config import UpdateOptions

KEY = jax.random.key(7)
PLAIN = UpdateOptions(
    size=128, batch_size=4, base_learning_rate=-7, precision="32.32", weight_decay=0.0, no_dropout=True
)
MASKED_ONLY = replace(PLAIN, refeed="none")
ITEMS = 9
LOWEST = -1.7580993408473766  # of SELU


def job(net=PLAIN):
    return Small(net, ITEMS)


def random_params(dtype=np.float32, widths=(6,)):
    """Weights and biases of every layer, none of them zero."""
    own = Small(PLAIN, ITEMS, widths=widths)
    shapes = jax.eval_shape(lambda: model.init(own, jax.random.key(0))["params"])
    generator = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: (0.4 * generator.standard_normal(leaf.shape)).astype(dtype), shapes)


@pytest.fixture(scope="module")
def masked_step():
    return quick(model.update(job(MASKED_ONLY)))


@pytest.fixture(scope="module")
def masked_gradient():
    return quick(jax.value_and_grad(lambda params, x: model.masked_error(model.forward(params, x), x)))


def size_of(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


# Shapes and first weights.


@pytest.mark.parametrize(
    ("size", "items", "weights", "up", "down", "tied", "untied"),
    [
        (128, 17_736, 2_368_512, 640, 18_120, 2_387_272, 4_755_784),
        (256, 17_757, 4_742_400, 1_024, 18_269, 4_761_693, 9_504_093),
        (256, 16_907, 4_524_800, 1_024, 17_419, 4_543_243, 9_068_043),
        (512, 17_768, 9_883_648, 2_048, 18_792, 9_904_488, 19_788_136),
        (128, 18_000, 2_402_304, 640, 18_384, 2_421_328, 4_823_632),
    ],
)
def test_numbers_of_parameters(size, items, weights, up, down, tied, untied):
    for is_tied, total in ((True, tied), (False, untied)):
        net = UpdateOptions(size=size, batch_size=8, untied=not is_tied)
        params = jax.eval_shape(partial(model.init, model.Job(net, items)), KEY)["params"]
        assert size_of([layer["w"] for layer in params["encoder"]]) == weights
        assert size_of([layer["b"] for layer in params["encoder"]]) == up
        assert size_of([layer["b"] for layer in params["decoder"]]) == down
        assert size_of(params) == total


def test_the_decoder_mirrors_the_encoder():
    net = UpdateOptions(size=512, batch_size=8, tied=False)
    params = jax.eval_shape(partial(model.init, model.Job(net, 100)), KEY)["params"]
    assert [layer["w"].shape for layer in params["encoder"]] == [(100, 512), (512, 512), (512, 1024)]
    assert [layer["b"].shape for layer in params["encoder"]] == [(512,), (512,), (1024,)]
    assert [layer["w"].shape for layer in params["decoder"]] == [(1024, 512), (512, 512), (512, 100)]
    assert [layer["b"].shape for layer in params["decoder"]] == [(512,), (512,), (100,)]


@pytest.mark.parametrize(("size", "items", "first"), [(128, 17_736, 0.01833), (256, 16_907, 0.01870)])
def test_weights_are_glorot_uniform_and_biases_zero(size, items, first):
    params = model.init(model.Job(UpdateOptions(size=size, batch_size=8, precision="32.32"), items), KEY)[
        "params"
    ]
    for n, layer in enumerate(params["encoder"]):
        w = np.asarray(layer["w"], np.float64)
        limit = np.sqrt(6 / sum(w.shape))
        assert n or limit == pytest.approx(first, abs=5e-6)
        assert 0.999 * limit < np.abs(w).max() <= limit * (1 + 1e-6)
        assert np.abs(w.mean()) < 4 * limit / np.sqrt(3 * w.size)
        assert w.var() == pytest.approx(
            limit**2 / 3, rel=4 * np.sqrt(0.8 / w.size)
        )  # a uniform's kurtosis is 1.8
    assert not any(np.asarray(layer["b"]).any() for half in params.values() for layer in half)


def test_weights_follow_the_key_and_untied_ones_are_drawn_apart():
    own = Small(replace(PLAIN, untied=True), ITEMS, widths=(8, 8, 8))
    one, same, other = (model.init(own, jax.random.key(seed)) for seed in (1, 1, 2))
    same_tree(one, same, "the same key")
    weights = [np.asarray(layer["w"]).ravel() for half in one["params"].values() for layer in half]
    assert len(np.unique(np.concatenate(weights))) > 0.99 * sum(map(len, weights))
    assert not np.array_equal(weights[0], np.asarray(other["params"]["decoder"][0]["w"]).ravel())
    assert not np.array_equal(one["params"]["encoder"][0]["w"], other["params"]["encoder"][0]["w"])


# The network.


def test_selu_stands_after_every_layer_the_last_included():
    params = random_params()
    deep = jax.tree.map(np.copy, params)
    deep["decoder"][-1]["b"][:] = -1e3
    y = quick(model.forward)(deep, ratings(4, ITEMS))
    np.testing.assert_allclose(y, LOWEST, rtol=1e-6)


def test_without_selu_the_network_is_linear():
    linear = job(replace(PLAIN, no_selu=True))
    state, x = with_params(linear, random_params()), ratings(4, ITEMS)
    predict = quick(partial(model.predict, linear))
    nothing = predict(state, 0 * x)
    np.testing.assert_allclose(predict(state, 3 * x) - nothing, 3 * (predict(state, x) - nothing), atol=1e-4)


def test_gradients_are_those_of_finite_differences(float64):  # noqa: F811
    """Of the joint loss with dropout on, in a random direction for each array."""
    dropped = Small(replace(PLAIN, no_dropout=False), ITEMS, widths=(6, 5))
    x = ratings(4, ITEMS).astype(np.float64)
    params = random_params(np.float64, (6, 5))
    loss = quick(lambda params: model.joint_loss(dropped, params, x, KEY)[0])
    gradient = quick(jax.grad(lambda params: model.joint_loss(dropped, params, x, KEY)[0]))(params)
    leaves, tree = jax.tree.flatten(params)
    generator = np.random.default_rng(0)
    for n, leaf in enumerate(leaves):
        way = generator.standard_normal(leaf.shape)
        shifted = [tree.unflatten([*leaves[:n], leaf + h * way, *leaves[n + 1 :]]) for h in (1e-5, -1e-5)]
        slope = (loss(shifted[0]) - loss(shifted[1])) / 2e-5
        assert float((jax.tree.leaves(gradient)[n] * way).sum()) == pytest.approx(
            float(slope), rel=1e-6, abs=1e-7
        )


def test_a_tied_gradient_is_the_encoders_plus_the_decoders_transposed(float64):  # noqa: F811
    tied, x = random_params(np.float64, (6, 5)), ratings(4, ITEMS).astype(np.float64)
    mirrored = [layer["w"].T for layer in reversed(tied["encoder"])]
    own = [{"w": w, **layer} for w, layer in zip(mirrored, tied["decoder"], strict=True)]
    untied = {"encoder": tied["encoder"], "decoder": tuple(own)}
    value, one = quick(jax.value_and_grad(lambda p: model.joint_loss(job(), p, x, KEY)[0]))(tied)
    same, two = quick(jax.value_and_grad(lambda p: model.joint_loss(job(), p, x, KEY)[0]))(untied)
    assert float(value) == pytest.approx(float(same), rel=1e-14)
    pairs = zip(one["encoder"], two["encoder"], reversed(two["decoder"]), strict=True)
    for layer, down, up in pairs:
        np.testing.assert_allclose(layer["w"], down["w"] + up["w"].T, rtol=1e-12, atol=1e-13)
    assert float(np.abs(two["decoder"][0]["w"]).max()) > 1e-3


# Dropout: in a linear network of unit matrices, ones come out as the factors of the code.

WIDE = 96


def unit_state(job):
    layer = {"w": np.eye(WIDE, dtype=np.float32), "b": np.zeros(WIDE, np.float32)}
    bias = {"b": np.zeros(WIDE, np.float32)}
    return with_params(job, {"encoder": (layer,) * 3, "decoder": (bias,) * 3})


def unit_job(size, **options):
    net = replace(PLAIN, size=size, no_selu=True, no_dropout=False, base_learning_rate=-100, **options)
    return Small(net, WIDE, widths=(WIDE,) * 3)


@pytest.mark.parametrize(("size", "kept"), [(128, 0.35), (512, 0.2)])
def test_dropout_is_on_the_code_alone_and_keeps_its_share_and_the_mean(size, kept):
    own = unit_job(size)
    x = np.ones((200, WIDE), np.float32)
    factors = np.asarray(quick(partial(model.apply_network, own))(unit_state(own)["params"], x, KEY))
    values = np.unique(factors)
    np.testing.assert_allclose(values, [0, 1 / kept], rtol=1e-6)  # a second place would bring a third value
    spread = np.sqrt(kept * (1 - kept) / x.size)
    assert np.mean(factors > 0) == pytest.approx(kept, abs=4 * spread)
    assert factors.mean() == pytest.approx(1, abs=4 * spread / kept)
    for axis in (0, 1):  # neither users nor units share their draws
        assert 0.3 < np.mean(factors > 0, axis).std() / np.sqrt(kept * (1 - kept) / x.shape[axis]) < 2


def test_dropout_of_a_row_belongs_to_its_place_and_to_the_key():
    own = unit_job(128)
    network, params = quick(partial(model.apply_network, own)), unit_state(own)["params"]
    x = np.ones((12, WIDE), np.float32)
    whole = network(params, x, KEY)
    np.testing.assert_array_equal(network(params, x[:5], KEY), whole[:5])
    assert not np.array_equal(whole, network(params, x, jax.random.key(8)))


@pytest.mark.parametrize("mode", ["joint", "alternate"])
def test_the_second_pass_has_a_mask_of_its_own(mode):
    """With one mask k for both passes the re-feeding error would be E (k^2 - k)^2 = 9.8; with two, 5.3."""
    own = unit_job(128, refeed=mode)
    x = np.ones((200, WIDE), np.float32)
    _, metrics = quick(model.update(own))(unit_state(own), {"ratings": x}, KEY)
    mask = float(metrics["rmse"]) ** 2
    refed = float(metrics["refeed_loss"]) if mode == "alternate" else float(metrics["loss"]) - mask
    k, p = 1 / 0.35, 0.35
    assert mask == pytest.approx(p * (k - 1) ** 2 + 1 - p, rel=0.05)
    assert refed == pytest.approx(p * (p * (k * k - k) ** 2 + (1 - p) * k * k), rel=0.05)


def test_predictions_have_no_dropout_and_are_the_same_twice():
    dropped, plain = job(replace(PLAIN, no_dropout=False, dropout=0.9)), job()
    state, x = with_params(plain, random_params()), ratings(4, ITEMS)
    one, two = (np.asarray(quick(partial(model.predict, own))(state, x)) for own in (dropped, plain))
    assert one.tobytes() == two.tobytes()
    assert one.tobytes() == np.asarray(quick(model.forward)(state["params"], x)).tobytes()


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"size": 128}, 0.65),
        ({"size": 256}, 0.8),
        ({"size": 512}, 0.8),
        ({"size": 512, "dropout": 0.3}, 0.3),
        ({"size": 128, "dropout": 0.0}, 0.0),
        ({"size": 128, "dropout": 0.3, "no_dropout": True}, 0.0),
    ],
)
def test_the_rate_of_dropout_follows_the_size(options, rate):
    assert model.Job(UpdateOptions(**options), ITEMS).dropout == rate


# Re-feeding.


def test_a_fixed_point_has_no_refeeding_error_and_no_gradient_of_it(float64):  # noqa: F811
    generator = np.random.default_rng(5)
    linear = Small(replace(PLAIN, no_selu=True), 6, widths=(6, 6, 6))
    turns = [np.linalg.qr(generator.standard_normal((6, 6)))[0] for _ in range(3)]
    params = {
        "encoder": tuple({"w": w, "b": np.zeros(6)} for w in turns),
        "decoder": tuple({"b": np.zeros(6)} for _ in turns),
    }
    x = ratings(4, 6).astype(np.float64)
    loss = quick(jax.value_and_grad(lambda params: model.joint_loss(linear, params, x, KEY)[0]))
    mask = quick(jax.value_and_grad(lambda p: model.masked_error(model.forward(p, x, linear=True), x)))
    value, gradient = loss(params)
    assert float(value) == pytest.approx(0, abs=1e-25) and float(mask(params)[0]) == pytest.approx(
        0, abs=1e-25
    )
    assert all(np.abs(leaf).max() < 1e-12 for leaf in jax.tree.leaves(gradient))


def test_without_refeeding_an_update_is_a_step_on_the_masked_error(masked_step, masked_gradient):
    params, x = random_params(), ratings(4, ITEMS)
    loss, gradient = masked_gradient(params, x)
    state, metrics = masked_step(with_params(job(MASKED_ONLY), params), {"ratings": x}, KEY)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert "refeed_loss" not in metrics
    expected = jax.tree.map(lambda w, g: w - 2.0**-7 * 4 * np.asarray(g, np.float64), params, gradient)
    for new, value in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, value, rtol=1e-6, atol=1e-6)


def test_every_way_to_leave_refeeding_out_is_the_same_program():
    def program(**way):
        own = job(replace(PLAIN, no_dropout=False, **way))
        state, batch = with_params(own, random_params()), {"ratings": ratings(4, ITEMS)}
        return jax.jit(model.update(own)).lower(state, batch, KEY).as_text()

    masked = program(refeed="none")
    assert masked == program(no_dense_refeeding=True) == program(refeed="alternate", aug_steps=0)
    assert masked != program()
    assert job(replace(PLAIN, refeed="alternate", no_dense_refeeding=True)).refeeding == "none"


def test_alternate_refeeding_goes_on_with_new_weights_and_outputs_towards_fixed_targets(masked_step):
    """Two steps after the masked one: each takes the output before it, of the weights before it, as a constant."""
    own, params = job(replace(PLAIN, refeed="alternate", aug_steps=2)), random_params()
    x = ratings(4, ITEMS)
    first, _ = masked_step(with_params(own, params), {"ratings": x}, KEY)

    @quick
    def reference(now, target):
        def loss(weights):
            return jnp.square(model.forward(weights, target) - target).mean()

        return jax.value_and_grad(loss)(now), model.forward(now, target)

    now, momenta = first["params"], first["optimiser"]["velocity"].trace
    target = quick(model.forward)(params, x)
    for _ in range(2):
        (loss, gradient), target = reference(now, target)
        momenta = jax.tree.map(lambda v, g: 0.9 * np.asarray(v) + np.asarray(g), momenta, gradient)
        now = jax.tree.map(lambda w, v: np.asarray(w) - np.float32(2.0**-7 * 4) * v, now, momenta)
    state, metrics = quick(model.update(own))(with_params(own, params), {"ratings": x}, KEY)
    assert float(metrics["refeed_loss"]) == pytest.approx(float(loss), rel=1e-5)
    for new, value in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(now), strict=True):
        np.testing.assert_allclose(new, value, rtol=1e-5, atol=1e-6)


def test_so_many_refeeding_steps_make_one_step_more(steps=2):
    """Without gradients (all weights zero, a rate of nothing) each step leaves 0.9 of the momentum."""
    own = job(replace(PLAIN, refeed="alternate", aug_steps=steps, base_learning_rate=-100))
    zeros = jax.tree.map(np.zeros_like, random_params())
    state = with_params(own, zeros)
    state["optimiser"] = jax.tree.map(jnp.ones_like, state["optimiser"])
    state, _ = quick(model.update(own))(state, {"ratings": np.zeros((4, ITEMS), np.float32)}, KEY)
    for leaf in jax.tree.leaves(state["optimiser"]):
        np.testing.assert_allclose(leaf, 0.9 ** (steps + 1), rtol=1e-6)


# The masked error.


def test_predictions_at_unrated_places_matter_to_neither_error_nor_gradient():
    x, generator = ratings(4, ITEMS), np.random.default_rng(1)
    y = generator.standard_normal(x.shape).astype(np.float32)
    changed = np.where(x > 0, y, 1e3 * generator.standard_normal(x.shape)).astype(np.float32)
    masked = quick(jax.value_and_grad(model.masked_error))
    (one, slope), (two, other) = masked(y, x), masked(changed, x)
    assert float(one) == float(two)
    np.testing.assert_array_equal(slope, other)
    assert not np.asarray(slope)[x == 0].any()


def test_an_item_that_nobody_rated_has_no_gradient(masked_gradient):
    x = ratings(4, ITEMS)
    x[:, 5] = 0
    _, gradient = masked_gradient(random_params(), x)
    assert not np.asarray(gradient["encoder"][0]["w"])[5].any() and gradient["decoder"][-1]["b"][5] == 0
    assert np.asarray(gradient["encoder"][0]["w"])[np.arange(ITEMS) != 5].all()


def test_the_error_is_a_mean_over_ratings():
    x, y = ratings(4, ITEMS), np.random.default_rng(1).standard_normal((4, ITEMS)).astype(np.float32)
    squares = np.float64([(y[u, i] - x[u, i]) ** 2 for u in range(4) for i in range(ITEMS) if x[u, i]])
    assert len(squares) != x.size
    assert float(quick(model.masked_error)(y, x)) == pytest.approx(squares.mean(), rel=1e-6)


def test_the_order_of_users_and_users_without_ratings_change_nothing(masked_step):
    own, x = job(MASKED_ONLY), ratings(4, ITEMS)
    state = with_params(own, random_params())
    one, metrics = masked_step(state, {"ratings": x}, KEY)
    for other in (x[[2, 0, 3, 1]], np.concatenate([x, np.zeros((3, ITEMS), np.float32)])):
        two, figures = masked_step(state, {"ratings": other}, KEY)
        assert float(figures["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
        for left, right in zip(jax.tree.leaves(one["params"]), jax.tree.leaves(two["params"]), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


def test_a_batch_without_ratings_has_the_error_zero_and_no_gradient(masked_step):
    """Re-feeding may move what stays the same for every user; the masked error may not."""
    state = with_params(job(MASKED_ONLY), random_params())
    new, metrics = masked_step(state, {"ratings": np.zeros((4, ITEMS), np.float32)}, KEY)
    assert float(metrics["loss"]) == float(metrics["rmse"]) == float(metrics["gradient_norm"]) == 0
    same_tree(new["params"], state["params"], "there is nothing to learn")


def test_a_first_joint_update_without_ratings_is_finite_and_changes_nothing():
    own = replace(job(replace(PLAIN, no_dropout=False)), low=1, high=5)
    state = model.init(own, KEY)
    new, metrics = quick(model.update(own))(state, {"ratings": np.zeros((4, ITEMS), np.float32)}, KEY)
    assert float(metrics["loss"]) == float(metrics["gradient_norm"]) == 0
    same_tree(new["params"], state["params"], "f(0) = 0 is a fixed point")


# Together.


def test_errors_are_summed_for_each_user_over_its_ratings_and_clipped():
    own, x = job(), ratings(5, ITEMS)
    truth = ratings(5, ITEMS, seed=9, share=0.2)
    state = with_params(own, random_params())
    y = np.clip(np.float64(quick(partial(model.predict, own))(state, x)), 0.5, 2.0)
    assert (y == 0.5).any() and (y == 2.0).any()
    found = quick(model.evaluate(replace(own, low=0.5, high=2.0)))(state, {"ratings": x, "truth": truth})
    errors = np.where(truth > 0, y - truth, 0)
    np.testing.assert_allclose(found["squared_error"], (errors**2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(found["absolute_error"], np.abs(errors).sum(1), rtol=1e-5)
    np.testing.assert_array_equal(found["ratings"], (truth > 0).sum(1))
