"""The losses of classifiers: by hand, against the clipped softmax that they replace, and labels that do not exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.layers.losses import correct, cross_entropy

LOSS = jax.jit(cross_entropy, static_argnums=2)
CORRECT = jax.jit(correct, static_argnums=2)
LOGITS = np.random.default_rng(0).normal(0, 3, (64, 10)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, 64)


def clipped(logits: np.ndarray, labels: np.ndarray, e: float, clip: float = 1e-7) -> np.ndarray:
    """Softmax, clip, logarithm, in doubles."""
    exp = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    p = np.clip(exp / exp.sum(-1, keepdims=True), clip, 1 - clip)
    y = np.eye(logits.shape[1])[labels] * (1 - e) + e / logits.shape[1]
    return -(y * np.log(p)).sum(-1)


def test_the_hand_example():
    # p = 1/2, 1/4, 1/4; with e = 0.3 the targets are 0.8, 0.1, 0.1.
    logits = np.log(np.array([[2.0, 1.0, 1.0]], np.float32))
    ln2 = np.log(2)
    np.testing.assert_allclose(LOSS(logits, np.array([0]), None), [ln2], rtol=1e-6)
    np.testing.assert_allclose(LOSS(logits, np.array([0]), 0.3), [0.8 * ln2 + 0.2 * 2 * ln2], rtol=1e-6)


@pytest.mark.parametrize("e", [0.0, 0.1, 1.0])
def test_logits_give_what_the_clipped_softmax_gives_and_more_where_it_clips(e):
    tame = LOGITS / 2  # no probability under the clip
    np.testing.assert_allclose(LOSS(tame, LABELS, e), clipped(tame, LABELS, e), rtol=1e-6)
    np.testing.assert_allclose(LOSS(LOGITS, LABELS, e), clipped(LOGITS, LABELS, e, clip=1e-300), rtol=1e-6)


def test_no_smoothing_and_a_smoothing_of_zero_are_the_plain_loss_bit_for_bit():
    np.testing.assert_array_equal(LOSS(LOGITS, LABELS, 0.0), LOSS(LOGITS, LABELS, None))


def test_the_gradient_is_softmax_minus_targets():
    gradient = jax.jit(jax.grad(lambda logits: cross_entropy(logits, jnp.asarray(LABELS), 0.1).sum()))(LOGITS)
    targets = np.eye(10)[LABELS] * 0.9 + 0.01
    exp = np.exp(LOGITS.astype(np.float64))
    np.testing.assert_allclose(gradient, exp / exp.sum(-1, keepdims=True) - targets, rtol=1e-5, atol=1e-6)


def test_sure_and_surely_wrong_logits_lose_no_digits():
    logits = np.array([[1000.0, 0.0], [1000.0, 0.0], [-np.inf, 1.0]], np.float32)
    np.testing.assert_allclose(LOSS(logits, np.array([0, 1, 1]), None), [0, 1000, 0])
    far = LOGITS + np.float32(2**14)
    np.testing.assert_allclose(LOSS(far, LABELS, 0.1), clipped(far, LABELS, 0.1, 1e-300), rtol=1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_logits_are_widened_before_the_exponentials(kind):
    half = jnp.asarray(LOGITS, kind)
    loss = LOSS(half, LABELS, 0.1)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, clipped(np.asarray(half, np.float32), LABELS, 0.1, 1e-300), rtol=1e-6)


@pytest.mark.parametrize("kind", [np.int32, np.uint8])
def test_labels_that_do_not_exist_are_never_correct_and_have_no_loss(kind):
    labels = np.array([10, 255, 3]).astype(kind)
    if kind == np.int32:
        labels[1] = -1
    logits = LOGITS[:3]
    for k in (1, 10, 11):
        assert not CORRECT(logits, labels, k)[:2].any()
    assert CORRECT(logits, labels, 10)[2]
    assert np.isnan(LOSS(logits, labels, 0.1)).tolist() == [True, True, False]


def test_of_equal_logits_the_smaller_class_comes_first():
    logits = np.array([[1, 3, 3, 2, 3]] * 5, np.float32)
    ranks = [4, 0, 1, 3, 2]
    for k in (1, 2, 4, 6):
        np.testing.assert_array_equal(CORRECT(logits, np.arange(5), k), [rank < k for rank in ranks])


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=4, max_size=4), st.integers(1, 6)
)
def test_the_first_k_of_a_stable_sort_are_correct(rows, k):
    logits, labels = np.array(rows, np.float32), np.array([0, 2, 3, 5])
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(CORRECT(logits, labels, k), (order == labels[:, None]).any(-1))
    np.testing.assert_array_equal(CORRECT(logits, labels, 1), logits.argmax(-1) == labels)


def test_logits_that_are_not_numbers_are_not_correct():
    logits = np.full((2, 3), np.nan, np.float32)
    logits[1, 1] = 7
    for k in (1, 5):
        assert not CORRECT(logits, np.array([0, 0]), k).any()
    assert not CORRECT(logits, np.array([1, 1]), 1).any()


def test_labels_of_another_shape_are_refused_before_they_broadcast():
    for function in (cross_entropy, correct):
        with pytest.raises(ValueError, match=r"labels \(64, 1\) do not fit logits \(64, 10\)"):
            function(jnp.asarray(LOGITS), jnp.asarray(LABELS)[:, None])
