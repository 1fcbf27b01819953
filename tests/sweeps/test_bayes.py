"""Choosing by what earlier trials gave: from the journal alone, and better than by chance."""

import math

import pytest

from hotloop.sweeps import bayes
from hotloop.sweeps.space import Choices, Range, draw_values

SPACE = {"x": Range(-1.0, 1.0), "n": Range(1, 9, whole=True), "kind": Choices(("bad", "good"))}


def figure(values):
    penalty = 0.0 if values["kind"] == "good" else 1.0
    return (values["x"] - 0.3) ** 2 + 0.01 * (values["n"] - 5) ** 2 + penalty


@pytest.fixture(autouse=True)
def optuna():
    return pytest.importorskip("optuna")


def suggest(known, number, seed=3, maximise=False):
    return bayes.suggest_values(SPACE, known, maximise=maximise, seed=seed, number=number)


@pytest.mark.parametrize("sign", [1, -1])
def test_it_finds_better_values_than_chance(sign):
    def search(choose):
        known = []
        for number in range(1, 41):
            values = choose(known, number)
            known.append(bayes.Known(values, sign * figure(values)))
        return sum(abs(each.result) for each in known[20:]) / 20

    guided = search(lambda known, number: suggest(known, number, maximise=sign < 0))
    assert guided < 0.5 * search(lambda known, number: draw_values(SPACE, 3, number))


def test_a_draw_follows_from_number_seed_and_journal():
    known = [bayes.Known(draw_values(SPACE, 0, n), figure(draw_values(SPACE, 0, n))) for n in range(1, 16)]
    assert suggest(known, 16) == suggest(list(known), 16)
    assert suggest(known, 16) != suggest(known, 17) != suggest(known, 17, seed=4)
    turned = [bayes.Known(each.values, -each.result) for each in known]
    assert suggest(turned, 16) != suggest(known, 16)


def test_trials_that_run_or_diverged_are_known_too():
    known = [bayes.Known(draw_values(SPACE, 0, n), figure(draw_values(SPACE, 0, n))) for n in range(1, 13)]
    known.append(bayes.Known(draw_values(SPACE, 0, 13), None))
    known.append(bayes.Known(draw_values(SPACE, 0, 14), bayes.worst(False)))
    found = suggest(known, 15)
    assert -1 <= found["x"] <= 1 and 1 <= found["n"] <= 9 and found["kind"] in ("bad", "good")
    assert bayes.worst(True) == -math.inf
