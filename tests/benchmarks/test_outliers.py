"""benchmarks/outliers.py: a call that stands out and memory that grows are found, steady ones pass."""

import json
import mmap
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


def test_one_call_above_twice_the_median_is_found():
    import outliers

    steady = [1.0, 1.1, 0.9, 1.99, 1.0]
    assert not outliers.judge(steady)["missed"]
    found = outliers.judge([*steady, 2.2, 3.0])
    assert found["missed"]
    assert found["calls"] == 7
    assert found["calls_above"] == 1
    assert found["median_ms"] == pytest.approx(1100)
    assert found["largest_over_median"] == pytest.approx(3.0 / 1.1)


def test_calls_during_which_a_processor_was_taken_away_are_made_again():
    import outliers

    made = []
    ticks = iter(
        [0, 0, 0, 3, 3, 3, 3, 4, 4, 4]
    )  # before and after each of five calls: the 2nd and 4th are disturbed
    times, disturbed = outliers.time_undisturbed(lambda: made.append(1), 3, lambda: next(ticks))
    assert (len(times), len(disturbed), len(made)) == (3, 2, 5)


def test_a_machine_that_is_always_disturbed_is_judged_by_what_it_has():
    import outliers

    ticks = iter(range(100))
    times, disturbed = outliers.time_undisturbed(lambda: None, 3, lambda: next(ticks))
    assert (len(times), len(disturbed)) == (3, 3)


def test_stolen_ticks_are_those_of_the_system(monkeypatch):
    import outliers

    text = "cpu  59692 0 4940 57967 375 0 43 60 0 0\ncpu0 24550 0 1554 35322 51 0 6 29 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert outliers.stolen_ticks() == 60


def touched(size):
    """Memory from the system itself: malloc may have some left from before."""
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    return block


def test_what_a_process_holds_is_counted_in_bytes():
    import outliers

    before, size = outliers.held_bytes(), 2**26
    with touched(size):
        after = outliers.held_bytes()
    grown = after["resident"] - before["resident"]
    assert size * 0.9 < grown < size * 1.5
    assert after["peak"] >= after["resident"] > 2**24


@pytest.mark.parametrize("leak", [0, 2**16], ids=["steady", "a leak"])
def test_memory_that_grows_with_the_calls_is_found(leak):
    import outliers

    held = []
    row = outliers.watch_memory(
        lambda: held.extend(touched(8 * leak) for _ in range(bool(leak))), 100 * outliers.LOOP
    )
    assert row["calls"] == 100 * outliers.LOOP
    assert row["missed"] == bool(leak)
    assert abs(row["resident_bytes_growth"] - 90 * 8 * leak) < 2**21


def test_programs_are_chosen_by_words_and_a_missed_bound_gives_status_1(monkeypatch, tmp_path, capsys):
    import outliers

    class Clock:
        """Fake seconds of calls: the seventh stands out."""

        def __init__(self):
            self.calls = 0

        def __call__(self, function):
            function()
            self.calls += 1
            return 3.0 if self.calls == 7 else 1.0

    text = 'custom_call_target="hotloop_conv_forward" custom_call_target="other"'
    called = []
    program = outliers.Called(lambda: called.append(1), text)
    monkeypatch.setattr(outliers, "PROGRAMS", {"first": lambda: program, "second": lambda: 1 / 0})
    monkeypatch.setattr(outliers, "load_before", lambda: 0.0)
    monkeypatch.setattr(outliers, "seconds", Clock())
    monkeypatch.setattr(outliers, "native_version", lambda: None)
    monkeypatch.setattr(outliers.native, "is_loaded", lambda: False)
    file = tmp_path / "found.json"
    assert outliers.main(["--cases", "fir", "--calls", "20", "--json", str(file)]) == 1
    (row,) = json.loads(file.read_text())["results"]
    assert (row["case"], row["calls"], row["calls_above"], row["native_calls"]) == ("first", 20, 1, 1)
    assert len(called) == 20 + outliers.WARM_UP
    assert "MISSED" in capsys.readouterr().out
    assert outliers.main(["--cases", "fir", "--calls", "20"]) == 0  # the clock's seventh call is over
