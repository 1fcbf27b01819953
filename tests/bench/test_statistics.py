import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.statistics import median_interval, spread, student


@pytest.mark.parametrize(("repeats", "most_of_plain", "least_of_ours"), [(3, 0.78, 0.84), (4, 0.88, 0.9)])
def test_of_few_repeats_a_plain_percentile_interval_would_cover_more_rarely_than_ours(
    repeats, most_of_plain, least_of_ours
):
    generator = np.random.default_rng(3)
    samples = generator.standard_normal((400, repeats))
    picks = generator.integers(0, repeats, (1000, repeats))
    ends = np.quantile(np.median(samples[:, picks], axis=2), [0.025, 0.975], axis=1)
    found = [median_interval(each) for each in samples]
    assert np.mean((ends[0] < 0) & (ends[1] > 0)) < most_of_plain
    assert np.mean([each.low < 0 < each.high for each in found]) > least_of_ours


@pytest.mark.parametrize("repeats", [4, 6, 10])
def test_the_interval_of_a_median_covers_it(repeats):
    samples = np.random.default_rng(4).standard_normal((300, repeats))
    found = [median_interval(each) for each in samples]
    assert np.mean([each.low < 0 < each.high for each in found]) > 0.92


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=12))
def test_an_interval_holds_its_value_and_is_the_same_every_time(values):
    found = median_interval(values)
    assert found == median_interval(values)
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
    assert median_interval([1, 1, 30]).low == 0
    assert median_interval([-1, 1, 30]).low < 0
