import math
from dataclasses import replace

import pytest

from hotloop.bench.compare import better_direction, judge
from hotloop.bench.record import MetricSample

STEADY = (1.0, 1.01, 0.99, 1.005, 0.995)
BEFORE = MetricSample("b", "v", "throughput", "samples/s", {}, tuple(100 * x for x in STEADY), paces=STEADY)


def after(speed, pace=1.0, before=BEFORE, **more):
    values = tuple(speed * value for value in before.values)
    return replace(before, values=values, paces=tuple(pace * each for each in STEADY), **more)


def judge_values(a, b, better="higher", **more):
    """The verdict on values alone: nothing is known of the machine."""
    sides = [replace(BEFORE, values=tuple(values), paces=()) for values in (a, b)]
    return judge(*sides, better, **more)


@pytest.mark.parametrize(("a", "b"), [([1, 1], [1, 1, 1]), ([1, 1, 1], [2]), ([], [1, 1, 1])])
def test_there_is_no_verdict_from_fewer_than_three_repeats(a, b):
    found = judge_values(a, b)
    assert found.word == "AMBIGUOUS"
    assert "fewest" in found.reason


def test_values_that_are_not_numbers_do_not_count_as_repeats():
    assert judge_values([1, 1, math.nan], [2, 2, 2]).word == "AMBIGUOUS"


@pytest.mark.parametrize(("better", "word"), [("higher", "FAST"), ("lower", "SLOW")])
def test_what_more_means_depends_on_the_metric(better, word):
    found = judge_values([10, 10.01, 9.99], [12, 12.01, 11.99], better)
    assert found.word == word
    assert found.ratio == pytest.approx(1.2)
    assert 1.19 < found.low < 1.2 < found.high < 1.21


def test_numbers_below_zero_are_compared_by_their_size():
    found = judge_values([-100, -100.1, -99.9], [-90, -90.1, -89.9])
    assert found.word == "FAST"
    assert found.ratio == pytest.approx(1.1)


def test_exact_repeats_have_an_exact_interval_and_a_median_of_zero_has_no_ratio():
    assert judge_values([3, 3, 3], [3, 3, 3]).word == "SAME"
    assert judge_values([0, 0, 0], [0, 0, 0]).word == "SAME"
    assert judge_values([0, 0, 0], [1, 1, 1]).word == "AMBIGUOUS"


def test_the_threshold_widens_what_counts_as_the_same():
    a, b = [100, 100.1, 99.9], [104, 104.1, 103.9]
    assert judge_values(a, b).word == "FAST"
    assert judge_values(a, b, threshold=0.1).word == "SAME"


@pytest.mark.parametrize(
    ("b", "reason"),
    [
        ([97, 99, 101, 103, 106, 109], "the interval holds 1"),
        ([101.2, 101.4, 101.6, 101.8, 102.3, 103.4], "the ratio is within 1 ± 0.02, its interval is not"),
    ],
)
def test_an_unclear_verdict_says_what_is_unclear(b, reason):
    found = judge_values([99.8, 99.9, 100, 100, 100.1, 100.2], b)
    assert (found.word, found.reason) == ("AMBIGUOUS", reason)


@pytest.mark.parametrize("slow_run", [0, 3])
def test_one_run_that_went_wrong_changes_no_verdict_of_seven(slow_run):
    a, b = ([base + 0.1 * place for place in range(7)] for base in (10.0, 11.0))
    b[slow_run] *= 3
    assert judge_values(a, b, "lower").word == "SLOW"
    a[slow_run] *= 3
    assert judge_values(a, b, "lower").word == "SLOW"


@pytest.mark.parametrize(
    ("speed", "pace", "word"),
    [
        (0.8, 1.0, "SLOW"),
        (0.8, 1.002, "SLOW"),
        (0.8, 1.2, "SLOW"),  # slower on a faster machine
        (0.8, 0.82, "AMBIGUOUS"),
        (0.8, 0.9, "AMBIGUOUS"),  # other work can cost a program more than it costs the small loop
        (0.5, 0.8, "SLOW"),  # beyond anything that the machine explains
        (0.5, 0.5, "AMBIGUOUS"),
        (1.25, 1.0, "FAST"),
        (1.25, 0.8, "FAST"),  # faster on a slower machine
        (1.25, 1.2, "AMBIGUOUS"),
        (
            1.35,
            1.2,
            "AMBIGUOUS",
        ),  # 1.2 squared, as other work may have cost A more than it cost the small loop
        (1.47, 1.2, "AMBIGUOUS"),  # what the readings allow for the machine counts, not their middle
        (1.6, 1.2, "FAST"),  # beyond anything that the machine explains
        (2.0, 1.2, "FAST"),
        (1.0, 1.0, "SAME"),
        (1.0, 1.1, "AMBIGUOUS"),  # as fast on a faster machine
        (1.0, 0.9, "AMBIGUOUS"),
        (1.0, 1.015, "SAME"),
    ],
)
def test_only_a_machine_that_was_off_takes_a_verdict_away_and_only_one_that_it_explains(speed, pace, word):
    steady = replace(BEFORE, values=(100, 100.1, 99.9, 100, 100))
    found = judge(steady, after(speed, pace, steady), "higher")
    assert found.word == word
    if word == "AMBIGUOUS":
        assert f"the machine itself was at {pace:.2f} of its pace" in found.reason
    times = [
        replace(side, values=tuple(1 / value for value in side.values))
        for side in (steady, after(speed, pace, steady))
    ]
    assert judge(*times, "lower").word == word


@pytest.mark.parametrize(
    ("speeds", "pace", "word"),
    [
        ((1.4, 1.5, 1.6, 1.7, 1.75), 1.2, "FAST"),
        ((0.5, 0.55, 0.6, 0.63, 0.68), 0.8, "SLOW"),
    ],
)
def test_the_whole_interval_must_be_beyond_what_the_machine_explains(speeds, pace, word):
    steady = replace(BEFORE, values=(100, 100.1, 99.9, 100, 100))
    noisy = replace(after(1.0, pace, steady), values=tuple(100 * speed for speed in speeds))
    assert judge(steady, noisy, "higher").word == "AMBIGUOUS"
    assert judge(steady, replace(noisy, paces=STEADY), "higher").word == word


def test_noise_of_the_pace_takes_no_verdict_away():
    noisy = replace(BEFORE, paces=(1.0, 1.3, 0.7, 1.1, 0.9))
    other = replace(after(0.95), paces=(0.8, 1.2, 1.0, 0.75, 1.05))
    assert judge(noisy, other, "higher").word == "SLOW"


def test_an_accelerators_metrics_are_never_excused_by_the_processor():
    there = replace(BEFORE, accelerated=True)
    assert judge(there, after(0.9, 0.9, there), "higher").word == "SLOW"
    still = replace(there, values=(100, 100.1, 99.9, 100, 100))
    assert judge(still, after(1.0, 0.5, still), "higher").word == "SAME"


@pytest.mark.parametrize(
    ("metric", "unit", "moves"),
    [
        ("throughput", "", True),
        ("compile_seconds", "s", True),
        ("score", "", True),
        ("loss", "", False),
        ("test_accuracy", "%", False),
        ("memory_bytes", "", False),
        ("peak", "GiB", False),
    ],
)
def test_the_machines_pace_explains_times_and_rates_and_not_what_is_learnt(metric, unit, moves):
    before = replace(BEFORE, metric=metric, unit=unit)
    worse = 1.25 if better_direction(metric, unit) == "lower" else 0.8
    found = judge(before, after(worse, 0.8, before), better_direction(metric, unit))
    assert found.word == ("AMBIGUOUS" if moves else "SLOW")
