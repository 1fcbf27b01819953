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

    steady = [outliers.Timed(took, 0.0) for took in (1.0, 1.1, 0.9, 1.99, 1.0)]
    assert not outliers.judge(steady)["missed"]
    found = outliers.judge([*steady, outliers.Timed(2.2, 0.0), outliers.Timed(3.0, 0.0)])
    assert found["missed"]
    assert found["calls"] == 7
    assert found["calls_above"] == 1
    assert found["median_ms"] == pytest.approx(1100)
    assert found["largest_over_median"] == pytest.approx(3.0 / 1.1)


def test_what_the_host_gave_away_excuses_as_much_and_no_more():
    import outliers

    steady = [outliers.Timed(1.0, 0.0)] * 5
    excused = outliers.judge([*steady, outliers.Timed(2.5, 0.6)])
    assert not excused["missed"]
    assert (excused["stolen_calls"], excused["stolen_ms"]) == (1, 600)
    assert excused["largest_with_stolen_ms"] == 2500
    assert outliers.judge([*steady, outliers.Timed(30.0, 0.6)])["calls_above"] == 1


def test_a_call_is_timed_with_what_the_system_counts_as_stolen(monkeypatch):
    import outliers

    counts = iter([60, 67])
    monkeypatch.setattr(
        Path, "read_text", lambda self: f"cpu  59692 0 4940 57967 375 0 43 {next(counts)} 0 0\ncpu0 2 0 1\n"
    )
    monkeypatch.setattr(outliers, "seconds", lambda call: 0.5)
    timed = outliers.time_call(lambda: None)
    assert timed.took == 0.5
    assert timed.stolen == pytest.approx(7 / outliers.os.sysconf("SC_CLK_TCK"))


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


@pytest.mark.parametrize("share", [0, 0.02], ids=["steady", "a leak"])
def test_memory_that_grows_with_the_calls_is_found(share):
    """What may leak is a share of what is held, which is gigabytes where many tests ran before."""
    import outliers

    leak = int(share * outliers.held_bytes()["resident"]) // 90 // mmap.PAGESIZE * mmap.PAGESIZE
    held = []
    row = outliers.watch_memory(
        lambda: held.extend(touched(leak) for _ in range(bool(leak))), 100 * outliers.LOOP
    )
    assert row["calls"] == 100 * outliers.LOOP
    assert row["missed"] == bool(leak)
    assert abs(row["resident_bytes_growth"] - 90 * leak) < 2**21


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
