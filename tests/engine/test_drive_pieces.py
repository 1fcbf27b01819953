"""Pieces tile every call, tend to half a second, and where each size costs a compilation there are few sizes."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.engine.drive import TARGET_SECONDS, Landing, Pieces


def dispatch(pieces: Pieces, calls: list[int], seconds_per_update: float) -> list[int]:
    """The pieces of several calls on a device of a steady pace."""
    made = []
    for call in calls:
        while call:
            made.append(pieces.next(call))
            pieces.learn(made[-1], made[-1] * seconds_per_update)
            call -= made[-1]
    return made


calls = st.lists(st.integers(1, 300), min_size=1, max_size=5)
pace = st.floats(1e-5, 10)


@given(calls=calls, pace=pace, longest=st.integers(1, 500), free=st.booleans())
def test_pieces_tile_every_call_and_respect_the_longest(
    calls: list[int], pace: float, longest: int, free: bool
) -> None:
    usual = min(max(calls), longest)
    made = dispatch(Pieces(longest, None if free else usual), calls, pace)
    assert sum(made) == sum(calls) and min(made) >= 1 and max(made) <= longest
    ends = {sum(calls[:n]) for n in range(1, len(calls) + 1)}
    assert ends <= {sum(made[:n]) for n in range(1, len(made) + 1)}


@given(calls=calls, pace=pace, block=st.integers(1, 200))
def test_pieces_of_blocks_are_whole_blocks_but_for_one_rest_of_each_call(
    calls: list[int], pace: float, block: int
) -> None:
    made = dispatch(Pieces(300, None, block), calls, min(pace, 2 / block))
    rests = [piece for piece in made if piece % block]
    assert sum(made) == sum(calls) and max(rests, default=0) < block
    assert rests == [call % block for call in calls if call % block]


def test_blocks_that_take_far_too_long_are_left_for_single_updates() -> None:
    made = dispatch(Pieces(1000, None, 100), [300, 300], 0.5)
    assert made[:2] == [100, 2] and set(made[1:]) == {2}
    made = dispatch(Pieces(1000, None, 100), [300, 300], 0.03)  # a block is three seconds: it stays
    assert set(made) == {100}


@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 0.04, 0.2])
def test_free_pieces_take_half_a_second_once_the_pace_is_known(seconds: float) -> None:
    made = dispatch(Pieces(10**6), [100_000], seconds)
    assert made[0] == 1
    assert all(abs(piece * seconds / TARGET_SECONDS - 1) < 0.3 for piece in made[1:-1])


@pytest.mark.parametrize("seconds", [1e-4, 1e-3, 0.036, 3.0])
@pytest.mark.parametrize("call", [781, 787, 4_686, 400_000 // 8])
def test_compiled_pieces_use_few_sizes(seconds: float, call: int) -> None:
    made = dispatch(Pieces(10**6, call), [call] * 3, seconds)
    assert len(set(made)) <= 4
    assert max(made[100:], default=0) * seconds < 4 * max(TARGET_SECONDS, seconds)


def test_a_call_with_a_fitting_divisor_needs_one_size() -> None:
    assert set(dispatch(Pieces(781, 781), [781] * 6, 0.036)) == {11}


def test_what_a_longer_size_leaves_is_made_of_sizes_that_exist() -> None:
    made = dispatch(Pieces(4_686, 4_686), [4_686] * 4, 0.001)
    first = made[0]
    assert all(size % first == 0 for size in made)
    assert max(made) >= 250


def test_a_piece_lands_when_it_is_done_not_when_it_is_asked_for() -> None:
    """Whoever sends the next piece may be kept until most of that has run."""

    class Piece(dict[str, object]):
        def wait(self) -> None:
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as watcher:
        sent = time.perf_counter()
        landing = Landing(Piece(), watcher)  # type: ignore[arg-type]
        time.sleep(0.4)
        assert 0.05 <= landing.wait() - sent < 0.3


def test_what_goes_wrong_on_the_device_is_raised_where_a_piece_is_waited_for() -> None:
    class Piece(dict[str, object]):
        def wait(self) -> None:
            raise RuntimeError("out of memory")

    with ThreadPoolExecutor(1) as watcher:
        landing = Landing(Piece(), watcher)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="out of memory"):
            landing.wait()
