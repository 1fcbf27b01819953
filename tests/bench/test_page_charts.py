import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.bench.axes import (
    FULL,
    HALF,
    LETTER,
    PHONE,
    Axis,
    choose_ticks,
    fit_text,
    format_number,
    format_ticks,
)
from hotloop.bench.charts import Chart
from hotloop.bench.strips import Strip, Strips

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


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.9985, 0.999, 0.9995, 1.0], ["0.9985", "0.9990", "0.9995", "1.0000"]),
        ([10_000.0, 10_100.0, 10_200.0], ["10.0k", "10.1k", "10.2k"]),
        ([0.0, 500.0, 1000.0], ["0", "500", "1,000"]),
        ([0.0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        ([-200.0, -100.0, 0.0], ["-200", "-100", "0"]),
        ([0.0, 2e6, 4e6], ["0", "2M", "4M"]),
    ],
)
def test_ticks_have_the_digits_that_they_need_and_no_more(values, texts):
    assert format_ticks(values) == texts


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e6), st.integers(1, 6))
def test_no_two_ticks_say_the_same(low, width, most):
    texts = format_ticks(choose_ticks(low, low + width, False, most))
    assert len(set(texts)) == len(texts)


@settings(deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([PHONE, HALF, FULL]))
def test_ticks_beside_each_other_have_room(values, log, width):
    root = ElementTree.fromstring(
        Strips("t", Axis("x", log=log), [Strip("a", *sorted(values[:1] * 3), values)]).render(width)
    )
    ticks = sorted(
        float(t.get("x"))
        for t in root.iter("text")
        if t.get("class") == "tick" and t.get("text-anchor") == "middle"
    )
    longest = max((len(t.text) for t in root.iter("text") if t.get("class") == "tick"), default=0)
    assert all(b - a >= 0.5 * LETTER * longest for a, b in pairwise(ticks))


def test_values_that_differ_in_their_last_bit_have_ticks_that_can_be_told_apart():
    low, high = 0.001, 0.0010000000000000002
    axis = Axis("x")
    texts = [text for _, text in axis.label_ticks(axis.ends([low, high]), 340)]
    assert len(texts) >= 2 and len(set(texts)) == len(texts)


@pytest.mark.parametrize("letters", range(1, 120))
def test_a_name_that_fits_is_not_cut(letters):
    assert fit_text("x" * letters, LETTER * letters) == "x" * letters
    assert fit_text("x" * (letters + 1), LETTER * letters).endswith("…")


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
    chart.add("range", [(1, 2.0), (1, 4.0)], colour=0)
    chart.add("dotted line", [(1, 3.0), (2, 5.0)], "lstm", 0)
    columns, (first, second) = chart.table()
    assert columns == ["series", "commit", "ms", "low", "high"]
    assert first == ["lstm", "abc", 3.0, 2.0, 4.0]
    assert second[:3] == ["lstm", "def", 5.0] and all(map(math.isnan, second[3:]))
    assert "abc" in [element.text for element in drawn(chart)[0].iter("text")]


def test_notes_cover_neither_each_other_nor_a_dot_nor_a_line():
    chart = Chart("t", Axis("x"), Axis("y"))
    chart.add("dots", [(0, 0), (1, 1)])
    chart.add("line", [(0, 0), (1, 1)])
    for name in ("one", "two", "three"):
        chart.note((0, 0), name)
    root, *_ = drawn(chart)
    boxes = [
        (x := float(note.get("x")), y := float(note.get("y")) - 13, x + LETTER * len(note.text), y + 18)
        for note in root.iter("text")
        if note.get("class") == "note"
    ]
    dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots(root)]
    (line,) = root.iter("polyline")
    (x1, y1), (x2, y2) = (map(float, corner.split(",")) for corner in line.get("points").split())
    along = [(x1 + (x2 - x1) * i / 200, y1 + (y2 - y1) * i / 200) for i in range(201)]
    assert len(boxes) == 3
    for a, b in combinations([*boxes, *dots], 2):
        assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3] or {a, b} <= set(dots)
    assert not any(a < x < c and b < y < d for a, b, c, d in boxes for x, y in along)


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


def test_long_names_above_their_rows_take_several_lines_and_can_be_told_apart():
    names = [
        f"grouped-conv 1x56x56x64, 64 groups, 10 blocks {kind}, float32 · torch"
        for kind in ("inference", "training")
    ]
    image = Strips("t", Axis("x"), [Strip(name, 1.0, 2.0, 3.0) for name in [*names, "short"]]).render(PHONE)
    texts = re.findall(r'<text class="note" x="0.0" y="([\d.]+)" text-anchor="start">(.*?)</text>', image)
    assert " ".join(text for _, text in texts) == " ".join([*names, "short"])
    heights = [float(y) for y, _ in texts]
    assert heights[0] > 12 and all(below - above >= 18 for above, below in pairwise(heights))
