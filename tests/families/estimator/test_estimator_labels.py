"""Labels that are no class of the model are named, with batch, sample and value, whatever they come from."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import X, Y, apply, init, small, weights

from hotloop import Arrays, Mode, ModelSpec
from hotloop.engine.batch_sources import Streamed
from hotloop.engine.feed import Resident
from hotloop.errors import HotloopError
from hotloop.families.estimator.model import Classes, find_classes

WRONG = np.where(np.arange(200) == 5, 7, Y).astype(np.int32)
RANGE = "is out of range: the model has classes 0 to 1"


def wrong() -> dict[str, Any]:
    return {"features": X, "labels": WRONG}


def doubled(batch: Any, key: Any) -> Any:
    return {**batch, "features": 2 * batch["features"]}


def one_more(batch: Any, key: Any) -> Any:
    return {**batch, "labels": batch["labels"] + 1}


def nines(at: Any) -> Any:
    return {"features": X[at], "labels": 0 * Y[at] + 9}


def mislabelled(number: int) -> Any:
    """Batches of which one has a wrong label."""
    for place in range(12):
        part = slice(16 * place, 16 * place + 16)
        yield {"features": X[part], "labels": np.where(np.arange(16) == 3, 7 * (place == number), Y[part])}


INPUTS = {
    "a resident feed": (lambda: Resident(wrong(), 16), f"labels: 7 at sample 5 {RANGE}"),
    "one that augments": (lambda: Resident(wrong(), 16, transform=doubled), f"labels: 7 at sample 5 {RANGE}"),
    "one that makes its labels": (lambda: Resident({"features": X, "labels": 0 * Y + 1}, 16, transform=one_more),
                                  f"labels: 2 at sample 0 of batch 0 {RANGE}"),
    "a streamed feed": (lambda: Streamed(mislabelled(2), 16), f"labels: 7 at sample 3 of batch 2 {RANGE}"),
    "a function of indices": (lambda: Streamed(nines, 16, samples=200),
                              f"labels: 9 at sample 0 of batch 0 {RANGE}"),
    "an iterator": (lambda: mislabelled(2), f"labels: 7 at sample 3 of batch 2 {RANGE}"),
    "arrays that are augmented": (lambda: Arrays(X, WRONG, transform=doubled), f"labels: 7 at sample 5 {RANGE}"),
    "arrays whose transform makes the labels": (lambda: Arrays(X, 0 * Y + 1, transform=one_more),
                                                f"labels: 2 at sample 0 of the first batch, transformed, {RANGE}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INPUTS)
def test_a_label_out_of_range_is_named(kind: str, tmp_path: Path) -> None:
    make, words = INPUTS[kind]
    with pytest.raises(HotloopError) as caught:
        small(tmp_path, iterations_per_call=1).train(make(), steps=3)
    assert str(caught.value) == words


def shifted(batch: Any, key: Any) -> Any:
    """Labels that are wrong only where those of the set are: in no first batch."""
    return {**batch, "labels": batch["labels"] + 0}


MADE_LATER = {
    "arrays": lambda labels: Arrays(X, labels, shuffle=False, transform=shifted),
    "a resident feed": lambda labels: Resident(
        {"features": X, "labels": labels}, 16, shuffled=False, transform=shifted
    ),
}


@pytest.mark.parametrize("kind", MADE_LATER)
def test_a_label_that_a_transform_makes_later_is_named_in_place_of_the_nan(kind: str, tmp_path: Path) -> None:
    labels = np.where(np.arange(200) == 37, 7, Y).astype(np.int32)
    with pytest.raises(HotloopError) as caught:
        small(tmp_path).train(MADE_LATER[kind](labels), steps=5)
    assert str(caught.value) == f"labels: 7 at sample 5 of batch 2 {RANGE}"


def test_labels_that_a_transform_brings_into_range_are_taken(tmp_path: Path) -> None:
    small(tmp_path).train(Resident({"features": X, "labels": Y - 1}, 16, transform=one_more, seed=1), steps=1)
    arrays = small(tmp_path)._read_input(Arrays(X, Y - 1, transform=one_more), Mode.TRAIN)
    assert arrays.check_labels(Classes(2)) is arrays


def test_a_feed_whose_batches_have_no_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match="the feed gives batches without names"):
        small(tmp_path).train(Resident((X, Y), 16), steps=1)


def own(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def left_out(logits: Any, labels: Any) -> Any:
    return jnp.where(labels == -1, 0, own(logits, jnp.maximum(labels, 0)))


def clipped(logits: Any, labels: Any) -> Any:
    return own(logits, labels.clip(0, logits.shape[-1] - 1))


def one_hot(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def counts(outputs: Any, labels: Any) -> Any:
    """Poisson, with a second output for something else."""
    return jnp.exp(outputs[:, 0]) - labels * outputs[:, 0] + outputs[:, 1] ** 2


def blind(outputs: Any, labels: Any) -> Any:
    return outputs[:, 0] ** 2


@pytest.mark.parametrize(
    ("loss", "value", "words"),
    [
        (own, 7, "its loss is then nan"),
        (own, -1, "the loss takes it for 2"),
        (clipped, 7, "the loss takes it for 2"),
        (clipped, -1, "the loss takes it for 0"),
        (left_out, 7, "its loss is then nan"),
        (left_out, 2**40, "the model has"),
        (left_out, -1, ""),
        (one_hot, -1, ""),
        (one_hot, 255, ""),
        (counts, 100, ""),
        (blind, 7, ""),
    ],
)
def test_a_loss_of_ones_own_is_asked_what_it_makes_of_a_label(loss: Any, value: int, words: str) -> None:
    form = jax.ShapeDtypeStruct((4, 3), np.float32), jax.ShapeDtypeStruct((4,), np.int64)
    classes = find_classes(loss, *form)
    assert classes is not None
    labels = np.array([0, 2, value, 1])
    if words:
        with pytest.raises(HotloopError, match=f"labels: {value} at sample 2 is out of range: {words}"):
            classes.check(labels)
    else:
        classes.check(labels)


def test_labels_of_places_are_checked_by_sample() -> None:
    """As those of a segmentation, where one label in a sample is left out."""

    def loss(logits: Any, labels: Any) -> Any:
        valid = labels != 255
        each = jnp.where(valid, own(logits, jnp.where(valid, labels, 0)), 0)
        return each.sum((1, 2)) / valid.sum((1, 2))

    form = jax.ShapeDtypeStruct((2, 3, 4, 5), np.float32), jax.ShapeDtypeStruct((2, 3, 4), np.int32)
    classes = find_classes(loss, *form)
    assert classes is not None
    labels = np.zeros((2, 3, 4), np.int32)
    labels[0, 1, 1] = 255
    classes.check(labels)
    labels[1, 2, 3] = 9
    with pytest.raises(HotloopError, match="labels: 9 at sample 1 is out of range"):
        classes.check(labels)


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [((4, 3), np.zeros((4, 1), np.int32)), ((4, 3), np.zeros(4, np.float32)), ((4,), np.zeros(4, np.int32))],
)
def test_outputs_that_are_no_logits_of_the_labels_say_nothing(outputs: Any, labels: Any) -> None:
    assert find_classes(own, jax.ShapeDtypeStruct(outputs, np.float32), labels) is None


def with_loss(loss: Any, **more: Any) -> Any:
    return lambda: ModelSpec(init, apply, loss=loss, optimizer=optax.sgd(0.1), **more)


def test_training_and_evaluation_name_labels_that_ones_own_loss_makes_nothing_of(tmp_path: Path) -> None:
    estimator = small(tmp_path, with_loss(own))
    for act in (lambda: estimator.train(wrong(), steps=1), lambda: estimator.evaluate((X, WRONG))):
        with pytest.raises(HotloopError, match="labels: 7 at sample 5 is out of range: its loss is then nan"):
            act()


@pytest.mark.slow
def test_a_label_that_is_left_out_trains_unless_the_classes_are_declared(tmp_path: Path) -> None:
    some = np.where(np.arange(200) % 2, Y, -1).astype(np.int32)
    estimator = small(tmp_path, with_loss(left_out)).train((X, some), steps=10)
    assert all(np.isfinite(value).all() for value in weights(estimator).values())
    with pytest.raises(HotloopError, match=f"labels: -1 at sample 0 {RANGE}"):
        small(tmp_path, with_loss(left_out, classes=2)).train((X, some), steps=1)
