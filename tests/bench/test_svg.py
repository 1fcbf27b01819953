import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench.svg import Axis, Chart, number, ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_linear_ticks_are_few_evenly_spaced_and_inside(low, width):
    marks = ticks(low, low + width, log=False)
    assert 1 <= len(marks) <= 8
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)
    gaps = [b - a for a, b in pairwise(marks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps)


def test_logarithmic_ticks_are_powers_of_ten():
    assert ticks(0.5, 2000, log=True) == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1234.0, "1,234"), (71_000.0, "71k"), (2.5e6, "2.5M"), (4e9, "4G")],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_a_chart_is_well_formed_and_holds_every_mark():
    chart = Chart("a <title>", Axis("x & y", log=True), Axis("y"))
    chart.line([(1, 1), (10, 2), (100, 3)], "line")
    chart.dots([(5, 1.5), (50, 2.5)], "dots")
    chart.steps([(1, 1), (2, 2), (3, 0)], "steps")
    chart.note((5, 1.5), "five")
    root = ElementTree.fromstring(chart.render())
    tags = [element.tag for element in root.iter()]
    assert tags.count("polyline") == 1
    assert tags.count("circle") == 2
    assert tags.count("polygon") == 1
    assert "five" in [element.text for element in root.iter("text")]


def test_marks_lie_inside_the_frame():
    chart = Chart("t", Axis("x", log=True), Axis("y", log=True))
    chart.dots([(0.001, 3), (1e5, 2e-4)])
    for circle in ElementTree.fromstring(chart.render()).iter("circle"):
        assert 80 <= float(circle.get("cx")) <= 624
        assert 16 <= float(circle.get("cy")) <= 324


def test_points_that_cannot_be_drawn_are_left_out():
    chart = Chart("t", Axis("x", log=True), Axis("y"))
    chart.dots([(0, 1), (1, float("nan")), (1, 1), (2, 2)])
    assert chart.render().count("<circle") == 2
