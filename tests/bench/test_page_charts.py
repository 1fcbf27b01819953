import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.page import Axis, Chart, Strip, Strips, choose_ticks, format_number

VALUES = st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=8)


def drawn(chart):
    """The drawing as XML, and the ends of what of it can be seen."""
    root = ElementTree.fromstring(chart.render())
    left, top, width, height = map(float, root.get("viewBox").split())
    return root, (left, left + width), (top, top + height)


def spots(root):
    return [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("circle")]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_linear_ticks_are_few_evenly_spaced_and_inside(low, width):
    marks = choose_ticks(low, low + width, log=False)
    assert 1 <= len(marks) <= 8
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)
    gaps = [b - a for a, b in pairwise(marks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-6) for gap in gaps)


def test_logarithmic_ticks_are_powers_of_ten_and_more_where_there_are_few():
    assert choose_ticks(0.5, 2000, log=True) == [1, 10, 100, 1000]
    assert choose_ticks(0.7, 3, log=True) == [1, 2]
    assert choose_ticks(1.5, 6, log=True) == [2, 5]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (1234.0, "1,234"), (71_000.0, "71k"), (2.5e6, "2.5M"), (4e9, "4G")],
)
def test_numbers_read_well(value, text):
    assert format_number(value) == text


@settings(deadline=None)
@given(VALUES, st.booleans(), st.booleans())
def test_marks_are_inside_the_drawing_and_more_is_further_right_and_further_up(values, x_log, y_log):
    chart = Chart("t", Axis("x", log=x_log), Axis("y", log=y_log))
    chart.add("dots", [(value, value) for value in values])
    root, width, height = drawn(chart)
    places = spots(root)
    assert all(width[0] <= x <= width[1] and height[0] <= y <= height[1] for x, y in places)
    for (a, b), ((ax, ay), (bx, by)) in zip(pairwise(values), pairwise(places), strict=True):
        assert (bx - ax) * (b - a) >= 0
        assert (by - ay) * (b - a) <= 0


@settings(deadline=None)
@given(VALUES, st.booleans())
def test_strips_are_inside_the_drawing_and_more_is_further_right(values, log):
    chart = Strips("t", Axis("x", log=log), [Strip("a", min(values), values[0], max(values), values)], at=1.0)
    root, width, _ = drawn(chart)
    places = [x for x, _ in spots(root)]
    assert len(places) == len(values)
    assert all(width[0] <= x <= width[1] for x in places)
    for (a, b), (ax, bx) in zip(pairwise(values), pairwise(places), strict=True):
        assert (bx - ax) * (b - a) >= 0


def test_texts_are_escaped_and_shown():
    chart = Chart("a <title>", Axis("x & y", log=True), Axis("y"))
    chart.add("line", [(1, 1), (10, 2), (100, 3)], "<line>")
    chart.add("steps", [(1, 1), (2, 2), (3, 0)], "steps")
    chart.note((10, 2), "ten & two")
    texts = [element.text for element in drawn(chart)[0].iter() if element.text]
    assert {"a <title>", "x & y", "y", "<line>", "steps", "ten & two"} <= set(texts)


def test_points_that_cannot_be_drawn_are_left_out():
    chart = Chart("t", Axis("x", log=True), Axis("y"))
    chart.add("dots", [(0, 1), (1, float("nan")), (1, 1), (2, 2)])
    assert len(spots(drawn(chart)[0])) == 2


def test_the_numbers_of_a_chart_can_be_read_without_it():
    chart = Chart("t", Axis("commit", names=("abc", "def")), Axis("ms"))
    chart.add("range", [(1, 2.0), (1, 4.0)])
    chart.add("dotted line", [(1, 3.0), (2, 5.0)], "lstm")
    assert chart.table() == (["series", "commit", "ms"], [["lstm", "abc", 3.0], ["lstm", "def", 5.0]])
    assert "abc" in [element.text for element in drawn(chart)[0].iter("text")]


def test_notes_at_one_place_do_not_cover_each_other():
    chart = Chart("t", Axis("x"), Axis("y"))
    chart.add("dots", [(0, 0), (1, 1)])
    for name in ("one", "two", "three"):
        chart.note((0, 0), name)
    notes = [e for e in drawn(chart)[0].iter("text") if e.get("class") == "note"]
    heights = sorted(float(note.get("y")) for note in notes)
    assert len(heights) == 3 and all(b - a >= 15 for a, b in pairwise(heights))  # the height of a letter


def test_a_strip_without_an_end_has_no_box_and_a_long_name_is_whole_in_the_table():
    rows = [Strip("a & b", 0.9, 1.0, 1.2, [0.9, 1.0, 1.2]), Strip("x" * 99, 1.0, 2.0, math.inf)]
    chart = Strips("t", Axis("ratio", log=True), rows, at=1.0)
    root, *_ = drawn(chart)
    assert len(list(root.iter("rect"))) == 1
    assert max(len(element.text or "") for element in root.iter("text")) < 99
    assert chart.table()[1][1] == ["x" * 99, 1.0, 2.0, math.inf, ""]


@pytest.mark.parametrize("names", [("a rather long name",) * 2, ("a", "b")])
def test_the_texts_of_ticks_stay_inside_the_drawing(names):
    chart = Chart("t", Axis("x", names=names), Axis("y"))
    chart.add("dots", [(1, 1), (2, 2)])
    root, (left, right), _ = drawn(chart)
    for tick in (element for element in root.iter("text") if element.text in names):
        x, length = float(tick.get("x")), 6 * len(tick.text)
        start = {"start": x, "middle": x - length / 2, "end": x - length}[tick.get("text-anchor")]
        assert left <= start and start + length <= right
