"""benchmarks/growth.py: exponents, points that are shared by axes, and the picture."""

import math
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def growth(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder / "peers"))
    monkeypatch.syspath_prepend(str(folder))
    for name in ("cnn", "recommender"):  # folders of tests have these names, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    import growth

    return growth


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_the_power_that_times_grow_by(growth, power):
    values = [8, 32, 128, 512]
    assert growth.exponent(values, [3e-4 * value**power for value in values]) == pytest.approx(power)


def test_a_straight_line_is_laid_through_times_that_scatter(growth):
    assert growth.exponent([1, 2, 4], [1.0, 2 * math.e, 4.0]) == pytest.approx(1.0)


def test_every_axis_goes_through_the_usual_shape(growth):
    assert len(growth.BODIES) == 4
    for body in growth.BODIES:
        assert set(body.grid) == set(body.usual)
        for axis, values in body.grid.items():
            assert body.usual[axis] in values
            assert sorted(values) == list(values)


def fake_body(growth, seen):
    """Ours takes the product of its sizes in 20 us each, torch three times that."""

    def sides(shape):
        seen.append(dict(shape))
        product = math.prod(shape.values())
        return growth.Sides(
            lambda count: time.sleep(2e-5 * product * count),
            2,
            lambda count: time.sleep(6e-5 * product * count),
        )

    return growth.Body("fake", {"batch": 10, "width": 5}, {"batch": (10, 40), "width": (5, 10)}, sides)


def test_both_sides_are_measured_at_every_point_and_a_shared_one_once(growth, capsys):
    seen = []
    rows = growth.measure(fake_body(growth, seen), 3, 0.001)
    assert [(row["axis"], row["value"]) for row in rows] == [
        ("batch", 10), ("batch", 40), ("width", 5), ("width", 10)
    ]  # fmt: skip
    assert len(seen) == 3
    assert rows[0]["ours_us"] == rows[2]["ours_us"] == pytest.approx(1000, rel=0.5)
    for row in rows:
        assert row["ours_low_us"] <= row["ours_us"] <= row["ours_high_us"]
        assert row["ratio"] == pytest.approx(3, rel=0.5)
    assert capsys.readouterr().out.count("fake") == 4


def row(axis, value, ours, theirs, family="a < b"):
    times = {f"ours{end}_us": 1e3 * ours for end in ("", "_low", "_high")}
    times |= {f"torch{end}_us": 1e3 * theirs for end in ("", "_low", "_high")}
    return {"family": family, "axis": axis, "value": value, **times}


def test_exponents_are_of_each_axis_and_side(growth):
    rows = [row("batch", 1, 1, 3), row("batch", 10, 10, 3), row("width", 1, 1, 1), row("width", 10, 100, 10)]
    found = {each["axis"]: (each["ours"], each["torch"]) for each in growth.exponents(rows)}
    assert found["batch"] == pytest.approx((1, 0))
    assert found["width"] == pytest.approx((2, 1))


def test_the_picture_stands_by_itself_and_has_a_chart_for_each_axis(growth):
    rows = [row("batch", 1, 1, 3), row("batch", 10, 10, 30), row("width", 1, 2, 1), row("width", 8, 9, 4)]
    rows += [row("length", 5, 1, 2, "other"), row("length", 50, 10, 20, "other")]
    root = ElementTree.fromstring(growth.draw(rows))
    charts = root.findall(f"{SVG}svg")
    assert [chart.find(f"{SVG}title").text for chart in charts] == [
        "a < b: ms an update against batch",
        "a < b: ms an update against width",
        "other: ms an update against length",
    ]
    assert charts[0].get("y") == charts[1].get("y") < charts[2].get("y")
    assert "class" in charts[0].attrib and "style" not in charts[0].attrib
    ours, theirs = (
        charts[0].findall(f"{SVG}polyline")[0],
        charts[0].findall(f"{SVG}polyline[@class='line c1']")[0],
    )
    heights = [float(line.get("points").split()[0].split(",")[1]) for line in (ours, theirs)]
    assert heights[0] > heights[1]  # the slower one lies higher, and y counts downwards
    assert root.find(f"{SVG}style").text.count("c1") >= 3


def test_unknown_bodies_are_refused(growth, capsys):
    with pytest.raises(SystemExit):
        growth.parsed(["--bodies", "transformer"])
    assert "transformer" in capsys.readouterr().err
