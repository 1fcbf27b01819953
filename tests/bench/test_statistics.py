import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.statistics import bootstrap, spread, student, verdict

NOISE = {
    "normal 1 %": lambda g, n: 100 * (1 + 0.01 * g.standard_normal(n)),
    "normal 8 %": lambda g, n: 100 * (1 + 0.08 * g.standard_normal(n)),
    "Student's t, 2 degrees": lambda g, n: 100 * np.exp(0.03 * g.standard_t(2, n)),
    "rare long delays": lambda g, n: 100 / (1 + 0.1 * g.pareto(1.5, n)),
    "two clock speeds": lambda g, n: (
        100 * (1 + 0.002 * g.standard_normal(n)) * np.where(g.random(n) < 0.3, 0.9, 1)
    ),
}


def words(noise, repeats, factor=1.0, tries=100):
    generator = np.random.default_rng(7)
    pairs = [(noise(generator, repeats), factor * noise(generator, repeats)) for _ in range(tries)]
    return [verdict(a, b).word for a, b in pairs]


@pytest.mark.parametrize("repeats", [5, 10])
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_the_same_program_twice_is_neither_fast_nor_slow_in_95_of_100_tries(noise, repeats):
    found = words(noise, repeats)
    assert sum(word in ("FAST", "SLOW") for word in found) <= 5


@pytest.mark.parametrize(("repeats", "at_least"), [(5, 70), (7, 85), (10, 97)])
def test_five_per_cent_is_found_under_one_per_cent_of_noise_and_never_turned_round(repeats, at_least):
    faster, slower = (words(NOISE["normal 1 %"], repeats, factor) for factor in (1.05, 0.95))
    assert faster.count("FAST") >= at_least
    assert slower.count("SLOW") >= at_least
    assert "SLOW" not in faster
    assert "FAST" not in slower


def test_little_noise_and_no_difference_is_the_same():
    def still(generator, n):
        return 100 * (1 + 0.002 * generator.standard_normal(n))

    assert words(still, 5).count("SAME") >= 95


def test_a_plain_percentile_interval_of_five_repeats_would_cover_too_rarely_and_ours_does_not():
    generator = np.random.default_rng(3)
    samples = generator.standard_normal((400, 5))
    picks = generator.integers(0, 5, (1000, 5))
    ends = np.quantile(samples[:, picks].mean(2), [0.025, 0.975], axis=1)
    plain = np.mean((ends[0] < 0) & (ends[1] > 0))
    found = [bootstrap(each, "mean") for each in samples]
    ours = np.mean([each.low < 0 < each.high for each in found])
    assert plain < 0.87
    assert ours > 0.91


@pytest.mark.parametrize("repeats", [4, 6, 10])
def test_the_interval_of_a_median_covers_it(repeats):
    samples = np.random.default_rng(4).standard_normal((300, repeats))
    found = [bootstrap(each) for each in samples]
    assert np.mean([each.low < 0 < each.high for each in found]) > 0.92


@pytest.mark.parametrize(("a", "b"), [([1, 1], [1, 1, 1]), ([1, 1, 1], [2]), ([], [1, 1, 1])])
def test_there_is_no_verdict_from_fewer_than_three_repeats(a, b):
    found = verdict(a, b)
    assert found.word == "AMBIGUOUS"
    assert "fewest" in found.reason


def test_values_that_are_not_numbers_do_not_count_as_repeats():
    assert verdict([1, 1, math.nan], [2, 2, 2]).word == "AMBIGUOUS"


@pytest.mark.parametrize(("better", "word"), [("higher", "FAST"), ("lower", "SLOW")])
def test_what_more_means_depends_on_the_metric(better, word):
    found = verdict([10, 10.01, 9.99], [12, 12.01, 11.99], better)
    assert found.word == word
    assert found.ratio == pytest.approx(1.2)
    assert 1.19 < found.low < 1.2 < found.high < 1.21


def test_numbers_below_zero_are_compared_by_their_size():
    found = verdict([-100, -100.1, -99.9], [-90, -90.1, -89.9])
    assert found.word == "FAST"
    assert found.ratio == pytest.approx(1.1)


def test_exact_repeats_have_an_exact_interval_and_a_median_of_zero_has_no_ratio():
    assert verdict([3, 3, 3], [3, 3, 3]).word == "SAME"
    assert verdict([0, 0, 0], [0, 0, 0]).word == "SAME"
    assert verdict([0, 0, 0], [1, 1, 1]).word == "AMBIGUOUS"


def test_the_threshold_widens_what_counts_as_the_same():
    a, b = [100, 100.1, 99.9], [104, 104.1, 103.9]
    assert verdict(a, b).word == "FAST"
    assert verdict(a, b, threshold=0.1).word == "SAME"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=12))
def test_an_interval_holds_its_value_and_is_the_same_every_time(values):
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize(
    ("share", "freedom", "quantile"),
    [(0.975, 4, 2.77645), (0.995, 8, 3.35539), (0.975, 1, 12.7062), (0.975, 200, 1.97190)],
)
def test_quantiles_of_students_t(share, freedom, quantile):
    assert student(share, freedom) == pytest.approx(quantile, rel=1e-4)


def test_spread_is_relative_and_needs_two():
    assert spread([9, 10, 11]) == pytest.approx(0.1)
    assert math.isnan(spread([1]))


def test_an_interval_of_positive_values_does_not_reach_below_zero():
    assert bootstrap([1, 1, 30]).low == 0
    assert bootstrap([-1, 1, 30]).low < 0
