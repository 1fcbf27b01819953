import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.bench.svg import Axis, Chart, Strip, Strips, choose_ticks, draw_tick, format_number


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


def test_the_numbers_of_a_chart_can_be_read_without_it():
    chart = Chart("t", Axis("commit", names=("abc", "def")), Axis("ms"))
    chart.range(1, 2.0, 4.0)
    chart.line([(1, 3.0), (2, 5.0)])
    chart.dots([(1, 3.0), (2, 5.0)], "lstm")
    assert chart.table() == (["series", "commit", "ms"], [["lstm", "abc", 3.0], ["lstm", "def", 5.0]])
    assert ">abc</text>" in chart.render()
    assert chart.render().count('class="whisker') == 1


def test_notes_at_one_place_do_not_cover_each_other():
    chart = Chart("t", Axis("x"), Axis("y"))
    chart.dots([(0, 0), (1, 1)])
    for name in ("one", "two", "three"):
        chart.note((0, 0), name)
    notes = [e for e in ElementTree.fromstring(chart.render()).iter("text") if e.get("class") == "note"]
    heights = sorted(float(note.get("y")) for note in notes)
    assert all(b - a >= 15 for a, b in pairwise(heights))


def test_strips_show_every_row_its_values_and_the_line_at_one():
    rows = [Strip("a & b", 0.9, 1.0, 1.2, [0.9, 1.0, 1.2]), Strip("x" * 99, 1.0, 2.0, math.inf)]
    chart = Strips("t", Axis("ratio", log=True), rows, at=1.0)
    root = ElementTree.fromstring(chart.render())
    tags = [(element.tag, element.get("class", "").split(" ")[0]) for element in root.iter()]
    assert tags.count(("circle", "dot")) == 3
    assert tags.count(("rect", "box")) == 1  # the other has no end
    assert tags.count(("line", "middle")) == 2
    assert max(len(element.text or "") for element in root.iter("text")) <= 56
    assert chart.table()[1][1] == ["x" * 99, 1.0, 2.0, math.inf, ""]


@pytest.mark.parametrize(("x", "anchor"), [(320, "middle"), (615, "end"), (16, "start")])
def test_a_tick_near_an_edge_is_moved_inwards(x, anchor):
    assert f'text-anchor="{anchor}"' in draw_tick(x, 0, "1,000", 640)
