import numpy as np
import pytest
from scipy.stats import wilcoxon

from hotloop.bench.statistics import (
    estimate_drift,
    is_steady,
    paired_interval,
    ratio_in_turns,
    signed_rank_outside,
)

ROUNDS = np.arange(8)
ORDER = np.array([0, 1, 1, 0, 1, 0, 0, 1])  # whether B is the first of a pair


def starts(seconds=3.0):
    places = 2 * ROUNDS + ORDER, 2 * ROUNDS + 1 - ORDER
    return tuple(seconds * place for place in places)


@pytest.mark.parametrize("pairs", [7, 8, 10, 13])
def test_the_interval_of_pairs_misses_0_exactly_where_the_signed_rank_test_says_so(pairs):
    generator = np.random.default_rng(pairs)
    agreed = []
    for shift in np.linspace(-1.5, 1.5, 61):
        found = generator.standard_normal(pairs) + shift
        low, high = paired_interval(found, 0.98)
        agreed.append((not low <= 0 <= high) == (wilcoxon(found, method="exact").pvalue <= 0.02 * (1 + 1e-9)))
    assert all(agreed)


@pytest.mark.parametrize(("pairs", "cut"), [(5, 0), (6, 0), (7, 1), (8, 2), (10, 6), (20, 44)])
def test_so_many_averages_of_pairs_are_cut_off_on_each_side(pairs, cut):
    assert signed_rank_outside(pairs, 0.98) == cut


def test_means_in_no_order_are_steady_and_a_drift_or_a_step_is_not():
    assert is_steady(np.array([1.0, 3.0, 2.0, 1.5, 2.8, 1.2]))
    assert is_steady(np.ones(5))
    assert not is_steady(np.arange(5.0))
    assert not is_steady(np.array([0.0, 0.1, 0.0, 5.0, 5.1, 5.0]))


def test_the_drift_at_a_pair_is_that_of_its_neighbours_and_one_odd_pair_does_not_change_it():
    times = 6.0 * np.arange(9)
    means = 0.01 * times
    assert estimate_drift(means, times) == pytest.approx(0.01 * np.ones(9))
    means[4] += 7
    assert estimate_drift(means, times)[[0, 1, 7, 8]] == pytest.approx(0.01 * np.ones(4))


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.05])
def test_a_machine_that_gets_twice_as_slow_within_the_session_changes_no_ratio(ratio):
    a_starts, b_starts = starts()
    slow = np.log(2) / 48
    a, b = np.exp(slow * a_starts), ratio * np.exp(slow * b_starts)
    found = ratio_in_turns(a, b, a_starts, b_starts, 0.98)
    assert (found.low, found.value, found.high) == pytest.approx((ratio, ratio, ratio), rel=1e-9)


def test_without_a_drift_all_runs_of_one_side_stand_against_all_of_the_other():
    a = np.array([10, 12, 11, 10.5, 11.9, 10.2, 11.5, 10.8])
    b = 1.3 * np.array([10.2, 11.9, 11.2, 10.1, 12.3, 10.0, 11.7, 10.3])
    found = ratio_in_turns(a, b, *starts(), 0.98)
    assert found.value == pytest.approx(np.median(b) / np.median(a))
    assert found.low > 1.1
