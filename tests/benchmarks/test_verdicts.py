"""How often the words of `bench compare` are right, as docs/comparing.md says; benchmarks/verdicts.py draws them."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


FEW = 250  # tries; each bound has three standard errors of room at so many
APART = [{"pace": 0.01}, {"pace": 0.03}, {"pace": 0.03, "readings": 1}]
TURNS = [{"turns": True, "machine": machine} for machine in ("still", "ramp", "wave")]


@pytest.mark.parametrize("how", [*APART, *TURNS, {"turns": True, "machine": "steps"}], ids=str)
@pytest.mark.parametrize("repeats", [5, 10])
def test_a_program_against_itself_is_neither_fast_nor_slow(how, repeats):
    from verdicts import Case, alarms

    for noise, kind in ((0.01, "normal"), (0.08, "normal"), (0.03, "t3"), (0.03, "spikes")):
        assert alarms(Case(repeats, 1.0, noise, kind, **how), FEW) <= 0.02 + 3 * (0.02 * 0.98 / FEW) ** 0.5


@pytest.mark.parametrize("how", [*APART, *TURNS], ids=str)
@pytest.mark.parametrize(
    ("ratio", "noise", "kind", "repeats", "share"),
    [(1.05, 0.01, "normal", 5, 0.8), (1.05, 0.01, "normal", 10, 0.95), (1.1, 0.03, "t3", 10, 0.8)],
)
def test_a_slower_program_is_found_and_never_called_fast(how, ratio, noise, kind, repeats, share):
    from verdicts import Case, count

    found = count(Case(repeats, ratio, noise, kind, **how), FEW)
    assert found["SLOW"] >= share * FEW
    assert found["FAST"] == 0


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("off", [0.5, 0.8, 0.9, 0.95, 1.1])
def test_a_program_against_itself_on_a_machine_that_was_off_is_ambiguous(off, gain):
    from verdicts import Case, count

    found = count(Case(5, off=off, gain=gain), 100)
    assert found["AMBIGUOUS"] >= 99


def test_a_program_twice_as_slow_is_found_on_a_machine_that_changes_from_run_to_run():
    from verdicts import Case, count

    assert count(Case(5, 2.0, busy=0.2), FEW)["SLOW"] >= 0.9 * FEW
    assert count(Case(5, 2.0, off=0.8), FEW)["SLOW"] >= 0.98 * FEW
    assert count(Case(5, 2.0, off=0.5), FEW)["SLOW"] <= 0.02 * FEW


@pytest.mark.parametrize("pace", [0.01, 0.03])
def test_a_tenth_slower_on_a_machine_a_tenth_faster_is_never_the_same(pace):
    from verdicts import Case, count

    assert count(Case(5, 1.1, off=1.1, pace=pace), FEW)["SAME"] == 0


@pytest.mark.parametrize("off", [0.9, 1.0, 1.1])
def test_what_an_accelerator_computes_is_never_excused(off):
    from verdicts import Case, count

    assert count(Case(5, 1.1, off=off, gain=0.0, accelerated=True), FEW)["SLOW"] == FEW


@pytest.mark.slow
@pytest.mark.parametrize("part", ["Runs apart", "In turns"])
def test_the_documented_rates_hold_over_thousands_of_tries(part):
    from verdicts import PARTS, count

    tries = 2500
    wrong = {}
    for name, case in PARTS[part].items():
        found = count(case, tries)
        alarms, right = (found["FAST"] + found["SLOW"]) / tries, found["SLOW"] / tries
        if case.ratio == 1:
            bad = alarms > 0.02 + 3 * (0.02 * 0.98 / tries) ** 0.5
        else:
            least = 0.95 if (case.noise, case.repeats) == (0.01, 10) else 0.8
            bad = right < least - 3 * (least * (1 - least) / tries) ** 0.5
        if bad:
            wrong[name] = dict(found)
    assert wrong == {}
