import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench import metrics
from hotloop.bench.benchmark import Benchmark, Metric
from hotloop.bench.metrics import ReductionError, extract, reduce_values

VALUES = [4.0, 1.0, 3.0, 2.0, 10.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", 4.0),
        ("median", 3.0),
        ("min", 1.0),
        ("max", 10.0),
        ("final", 10.0),
        ("first", 4.0),
        ("value", 4.0),
        ("stdev", math.sqrt(50 / 4)),
        ("p0", 1.0),
        ("p50", 3.0),
        ("p90", 7.6),
        ("p99.9", 9.976),
        ("p100", 10.0),
    ],
)
def test_each_reduction_has_its_known_value(kind: str, expected: float) -> None:
    assert reduce_values(kind, VALUES) == pytest.approx(expected, rel=1e-15)
    assert VALUES == [4.0, 1.0, 3.0, 2.0, 10.0]


@pytest.mark.parametrize("kind", [*metrics.REDUCTIONS, "p50"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_named(kind: str, bad: float) -> None:
    with pytest.raises(ReductionError, match=f"value 2 of 3 is {bad}"):
        reduce_values(kind, [1.0, bad, 2.0])


@pytest.mark.parametrize("kind", [*metrics.REDUCTIONS, "p50"])
def test_no_values_have_no_reduction(kind: str) -> None:
    with pytest.raises(ReductionError, match="no values"):
        reduce_values(kind, [])


def test_one_value_has_no_standard_deviation() -> None:
    with pytest.raises(ReductionError, match="two values"):
        reduce_values("stdev", [1.0])


@pytest.mark.parametrize("kind", ["mean", "stdev"])
def test_a_result_too_large_for_a_float_is_refused(kind: str) -> None:
    with pytest.raises(ReductionError, match="too large"):
        reduce_values(kind, [1.7e308, -1.7e308, 1.7e308, 1.7e308])


@pytest.mark.parametrize("kind", ["p101", "p", "mode", "", "p1000", "P50"])
def test_unknown_reductions_are_known_as_such(kind: str) -> None:
    assert not metrics.is_reduction(kind)
    with pytest.raises(ReductionError, match="no reduction"):
        reduce_values(kind, [1.0])


@pytest.mark.parametrize("sorted_skip", [False, True])
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_more_values_than_are_skipped_must_be_there(skip: int, sorted_skip: bool) -> None:
    metric = Metric("x", r"x=(\d)", skip, sorted_skip=sorted_skip)
    found = extract(Benchmark("b", Path("b.yml"), 1, "x", metrics=(metric,)), ["x=2", "x=1"], [])
    if skip == 1:
        assert found.results == {"x": 2.0 if sorted_skip else 1.0}
    else:
        assert found.problems == {"x": f"2 values were found and the first {skip} are skipped"}


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30), st.integers(0, 100))
def test_percentiles_grow_with_the_percentage_and_stay_inside(values: list[float], percent: int) -> None:
    low, high = reduce_values(f"p{max(percent - 1, 0)}", values), reduce_values(f"p{percent}", values)
    slack = 1e-12 * max(map(abs, values))
    assert min(values) - slack <= low <= high + slack <= max(values) + 2 * slack
