"""Inputs that end: pass after pass, resumed anywhere, and the run that stops with them."""

from collections.abc import Iterator

import pytest

from hotloop.engine.batch_sources import InputEnded, IterableBatches
from hotloop.errors import DataError


def five() -> Iterator[int]:
    return iter(range(5))


@pytest.mark.parametrize(
    ("first", "expected"), [(0, [0, 1, 2]), (2, [2, 3, 4]), (5, [0, 1, 2]), (12, [2, 3, 4])]
)
def test_update_n_takes_batch_n_of_the_endless_row_of_passes(first: int, expected: list[int]) -> None:
    turns = IterableBatches(five, 1, first)
    assert turns.example() == expected[0]
    assert list(turns.batches(first, 3)) == expected


def test_the_end_of_a_pass_says_how_many_are_left_and_keeps_them() -> None:
    turns = IterableBatches(five, 1)
    assert list(turns.batches(0, 3)) == [0, 1, 2]
    with pytest.raises(InputEnded) as ended:
        list(turns.batches(3, 3))
    assert ended.value.left == 2
    assert list(turns.batches(3, 2)) == [3, 4]
    with pytest.raises(InputEnded) as ended:
        list(turns.batches(5, 1))
    assert ended.value.left == 0


def test_it_cannot_go_back_and_an_empty_input_is_named() -> None:
    turns = IterableBatches(five, 1)
    list(turns.batches(0, 2))
    list(turns.batches(2, 2))
    with pytest.raises(DataError, match="cannot go back to batch 0"):
        list(turns.batches(0, 1))
    for first in (0, 3):
        with pytest.raises(DataError, match="has no batches"):
            IterableBatches(lambda: iter(()), 1, first).example()
