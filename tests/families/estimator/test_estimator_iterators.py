"""A bare iterator given to several calls: every batch once, in order, whatever ended the call before."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from small import X, Y, data, same, weights
from small import small as small_of_long_calls

from hotloop import EvalSpec, Hook, TrainSpec, train_and_evaluate
from hotloop.engine.batch_sources import _known, find_iterator
from hotloop.errors import HotloopError

small = partial(small_of_long_calls, iterations_per_call=1)
"""One program for every number of updates: streamed calls of other lengths are compiled anew."""


def numbered() -> Iterator[Any]:
    """Twelve batches."""
    return ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 192, 16))


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: Any) -> Any:
    return weights(small(tmp_path_factory.mktemp("twelve")).train(numbered()))


class Enough(Hook):
    """Ends the training while the batches of the next call are being drawn."""

    def after_call(self, run: Any, first: int, metrics: Any) -> None:
        run.stop()


def test_several_calls_take_every_batch_once(twelve: Any, tmp_path: Path) -> None:
    iterator = map(list, numbered())  # as most, it takes no weak reference
    estimator = small(tmp_path)
    estimator.train(iterator, steps=3)
    estimator.train(iterator, steps=6, hooks=[Enough()])
    assert 3 < (estimator.latest_checkpoint() or 0) < 9  # stopped early, with batches drawn ahead
    small(tmp_path).train(lambda: iterator)
    assert estimator.latest_checkpoint() == 12
    assert same(weights(estimator), twelve)


def test_looking_at_an_iterator_and_a_refused_call_cost_no_batch(twelve: Any, tmp_path: Path) -> None:
    iterator = numbered()
    with pytest.raises(HotloopError, match="does not fall into"):
        small(tmp_path / "refused", accumulation=3).train(iterator, steps=1)
    estimator = small(tmp_path / "trained").train(iterator, steps=5)
    estimator.weights(iterator)
    assert same(weights(estimator.train(iterator)), twelve)


@pytest.mark.slow
def test_an_iterator_goes_on_after_other_data(tmp_path: Path) -> None:
    given: list[int] = []

    def noted() -> Iterator[Any]:
        for number, batch in enumerate(numbered()):
            given.append(number)
            yield batch

    iterator = noted()
    estimator = small(tmp_path).train(iterator, steps=3).train(data, steps=4)
    estimator.train(iterator, steps=2)
    assert given == [0, 1, 2, 3, 4]


def test_a_new_iterator_is_passed_over_up_to_where_the_training_stands_and_that_is_said(
    twelve: Any, tmp_path: Path
) -> None:
    """As the same program does when it is started again."""
    lines: list[str] = []
    estimator = small(tmp_path, voice={"say": lines.append}).train(numbered(), steps=5)
    said = "the first 5 batches of the input are passed over: they were trained on before"
    assert said not in lines
    assert same(weights(estimator.train(numbered())), twelve) and lines.count(said) == 1


def test_an_iterator_that_has_ended_or_is_too_short_is_named(tmp_path: Path) -> None:
    iterator = numbered()
    estimator = small(tmp_path).train(iterator)
    with pytest.raises(HotloopError, match="an iterator that has ended already"):
        estimator.train(iterator)
    estimator.train(numbered)
    with pytest.raises(HotloopError, match="ended 12 batches before the one to go on with"):
        estimator.train(numbered(), steps=1)


def test_a_piece_of_an_iterator_that_ends_where_it_should_begin_is_named(tmp_path: Path) -> None:
    iterator = numbered()
    estimator = small(tmp_path).train(islice(iterator, 2))
    with pytest.raises(
        HotloopError, match="ended 0 batches before the one to go on with: give what can be begun"
    ):
        estimator.train(islice(iterator, 2))


def test_an_iterator_cannot_be_evaluated_at_every_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match="EvalSpec: input_fn is an iterator, which can be gone through"):
        train_and_evaluate(small(tmp_path), TrainSpec(data, 10), EvalSpec(numbered()))


def test_an_iterator_is_known_again_as_long_as_anybody_has_it_and_no_longer() -> None:
    first = iter([1, 2])
    known = find_iterator(first)
    assert next(known) == 1
    known.give_back([1])
    others = [iter([n]) for n in range(50)]
    assert all(find_iterator(other) for other in others)
    assert find_iterator(first) is known and list(known) == [1, 2]
    count = len(_known)
    del others[1:]
    assert find_iterator(first) is known
    assert len(_known) == count - 49
