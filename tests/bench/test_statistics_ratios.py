import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from hotloop.bench.statistics import rank_sum_outside, ratio_interval

POSITIVE = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 9), st.integers(3, 9), st.integers(0, 2**32 - 1), st.floats(-3, 3))
def test_the_interval_misses_1_exactly_where_the_rank_test_says_so(a_count, b_count, seed, shift):
    generator = np.random.default_rng(seed)
    a = np.exp(generator.standard_normal(a_count))
    b = np.exp(generator.standard_normal(b_count) + shift)
    if not rank_sum_outside(a_count, b_count, 0.98):
        return
    found = ratio_interval(a, b, 0.98)
    p = mannwhitneyu(a, b, method="exact").pvalue
    by_ranks = p <= 0.02 * (1 + 1e-9)
    medians_agree = (np.median(b) > np.median(a)) == ((b[:, None] > a).mean() > 0.5)
    assert (not found.low <= 1 <= found.high) == (by_ranks and medians_agree)


@pytest.mark.parametrize(
    ("a", "b", "cut"), [(3, 3, 0), (4, 4, 0), (3, 7, 1), (5, 5, 2), (7, 7, 7), (10, 10, 20), (20, 20, 115)]
)
def test_so_many_differences_are_cut_off_on_each_side(a, b, cut):
    assert rank_sum_outside(a, b, 0.98) == cut == rank_sum_outside(b, a, 0.98)


def test_many_runs_are_counted_by_the_normal_distribution_and_nearly_as_exactly():
    assert rank_sum_outside(50, 50, 0.98) == pytest.approx(rank_sum_outside(50, 51, 0.98), rel=0.03)


@settings(deadline=None, max_examples=60)
@given(POSITIVE, POSITIVE)
def test_an_interval_holds_the_ratio_of_medians_and_turns_round_with_its_sides(a, b):
    found, turned = ratio_interval(a, b, 0.98), ratio_interval(b, a, 0.98)
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(np.median(b) / np.median(a))
    assert turned.value == pytest.approx(1 / found.value)
    if np.isfinite(found.high):
        assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_the_unit_does_not_matter():
    a, b = [1.0, 1.1, 0.9, 1.2, 1.05], [1.4, 1.3, 1.5, 1.35, 1.45]
    found, scaled = (
        ratio_interval(a, b, 0.98),
        ratio_interval([1e6 * x for x in a], [1e6 * x for x in b], 0.98),
    )
    assert (scaled.low, scaled.value, scaled.high) == pytest.approx((found.low, found.value, found.high))
