"""Charts of lines, dots, ranges and histograms as SVG.

A chart is drawn for a width in pixels, at which its letters have their natural size: a page draws it once for a phone
and once for a wide window, so that text is as large in every chart. Notes move to where they cover nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from hotloop.bench.axes import (
    AXIS_LABEL,
    DOT,
    HALF,
    LETTER,
    LINE,
    RIGHT,
    TICKS,
    Axis,
    Point,
    draw_dot,
    draw_line,
    draw_text,
    draw_tick,
    fit_text,
    format_number,
    open_svg,
)

COLOURS = 6
Rectangle = tuple[float, float, float, float]
"""Left, top, right, bottom."""
MarkKind = Literal["line", "dots", "dotted line", "range", "steps"]
"""Of these, a range is an upright line between two points with a bar at each end, and steps are a filled histogram:
each point is the left edge of a bin and its height, the last closes it."""


class ChartMark(NamedTuple):
    kind: MarkKind
    points: tuple[Point, ...]
    label: str
    colour: int


@dataclass
class Chart:
    """A chart under construction: add marks and notes, then `render()`. What an axis cannot show is left out."""

    title: str
    x: Axis
    y: Axis
    _marks: list[ChartMark] = field(default_factory=list)
    _notes: list[tuple[Point, str]] = field(default_factory=list)

    def add(
        self, kind: MarkKind, points: Sequence[Point], label: str = "", colour: int | None = None
    ) -> None:
        if colour is None:  # the next one
            colour = len({mark.colour for mark in self._marks})
        shown = tuple((float(x), float(y)) for x, y in points if self._can_show((x, y)))
        self._marks.append(ChartMark(kind, shown, label, colour % COLOURS))

    def _can_show(self, point: Point) -> bool:
        return self.x.can_show(point[0]) and self.y.can_show(point[1])

    def note(self, point: Point, said: str) -> None:
        if self._can_show(point):
            self._notes.append((point, said))

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Every point in words and numbers, with the ends of its range, for readers who do not see the chart."""
        shown = [(mark, point) for mark in self._marks if mark.kind != "range" for point in mark.points]
        ranges = {
            (mark.colour, mark.points[0][0]): sorted(y for _, y in mark.points)
            for mark in self._marks
            if mark.kind == "range" and mark.points
        }
        named, names = any(mark.label for mark, _ in shown), self.x.names
        rows: list[list[str | float]] = []
        for mark, (x, y) in shown:
            low, *_, high = ranges.get((mark.colour, x), (math.nan, math.nan))
            ends = (low, high) if ranges else ()
            rows.append([*([mark.label] if named else []), names[round(x) - 1] if names else x, y, *ends])
        heads = [*(["series"] if named else []), self.x.label, self.y.label]
        return [*heads, *(["low", "high"] if ranges else [])], rows

    def render(self, width: float = HALF) -> str:
        points = [point for mark in self._marks for point in mark.points] or [(1.0, 1.0), (10.0, 10.0)]
        x_ends, y_ends = self.x.ends([x for x, _ in points]), self.y.ends([y for _, y in points])
        y_ticks = self.y.label_ticks(y_ends, math.inf)
        left = 10 + LETTER * max((len(text) for _, text in y_ticks), default=0)
        legend, top = self._draw_legend(width)
        height = top + (0.62 if width <= HALF else 0.34) * width
        base = height - TICKS - AXIS_LABEL

        def spot(point: Point) -> Point:
            x = self.x.place(point[0], x_ends, left, width - RIGHT)
            return x, self.y.place(point[1], y_ends, base, top)

        parts = [*open_svg(self.title, width, height), *legend]
        for value, text in y_ticks:
            y = spot((x_ends[0], value))[1]
            parts.append(draw_line("grid", (left, y), (width - RIGHT, y)))
            parts.append(draw_text("tick", left - 6, y + 4, text, "end"))
        parts.append(draw_line("axis", (left, base), (width - RIGHT, base)))
        for value, text in self.x.label_ticks(x_ends, width - RIGHT - left):
            x = spot((value, y_ends[0]))[0]
            parts += [draw_line("axis", (x, base), (x, base + 4)), draw_tick(x, base + 19, text, width)]
        parts.append(draw_text("label", width / 2, height - 6, self.x.label, "middle", width))
        taken: list[Rectangle] = []
        for mark in self._marks:
            spots = [spot(point) for point in mark.points]
            parts += _draw_mark(mark, spots, base)
            taken += _boxes_of(mark.kind, spots)
        notes = [(*spot(point), said) for point, said in self._notes]
        return "\n".join([*parts, *_draw_notes(notes, taken, (left, top - LINE / 2, width, base)), "</svg>"])

    def _draw_legend(self, width: float) -> tuple[list[str], float]:
        """The label of the upright axis and the keys of the series in lines above the chart, and where it begins."""
        parts = [draw_text("label", 0, 14, self.y.label, room=width)]
        x, y = 0.0, 14.0
        if labels := dict.fromkeys((mark.label, mark.colour) for mark in self._marks if mark.label):
            x = LETTER * len(self.y.label) + 24
        for label, colour in labels:
            size = 18 + LETTER * min(len(label), (width - 18) / LETTER)
            if x and x + size > width:
                x, y = 0.0, y + LINE
            parts.append(
                f'<rect class="key c{colour}" x="{x:.1f}" y="{y - 10:.1f}" width="10" height="10" rx="2"/>'
            )
            parts.append(draw_text("note", x + 15, y, label, room=width - x - 15))
            x += size + 14
        return parts, y + 18


def line_chart(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]]) -> Chart:
    chart = Chart(title, x, y)
    for label, points in series.items():
        chart.add("line", points, label)
    return chart


def _draw_mark(mark: ChartMark, spots: Sequence[Point], base: float) -> list[str]:
    css = f"c{mark.colour}"
    if mark.kind == "range":
        if len(spots) < 2:
            return []
        (x, y1), (_, y2) = spots[0], spots[-1]
        ends = [draw_line(f"whisker {css}", (x - 5, y), (x + 5, y)) for y in (y1, y2)]
        return [draw_line(f"whisker {css}", (x, y1), (x, y2)), *ends]
    shape, corners, kind = "polyline", spots, "line"
    if mark.kind == "steps":
        tops = [corner for (x, y), (end, _) in pairwise(spots) for corner in ((x, y), (end, y))]
        shape, corners = "polygon", [(spots[0][0], base), *tops, (spots[-1][0], base)] if spots else []
        kind = "area"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    drawn = [] if mark.kind == "dots" else [f'<{shape} class="{kind} {css}" points="{path}"/>']
    if mark.kind in ("dots", "dotted line"):
        titles = [f"{mark.label} {format_number(x)}, {format_number(y)}" for x, y in mark.points]
        drawn += [draw_dot(css, spot, title) for spot, title in zip(spots, titles, strict=True)]
    return drawn


def _boxes_of(kind: MarkKind, spots: Sequence[Point]) -> list[Rectangle]:
    """What notes must not cover: dots, and lines in short pieces."""
    boxes = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in spots] if kind != "steps" else []
    for (x1, y1), (x2, y2) in pairwise(spots) if kind in ("line", "dotted line", "range") else ():
        pieces = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 8))
        for i in range(pieces):
            x, y = x1 + (x2 - x1) * (i + 0.5) / pieces, y1 + (y2 - y1) * (i + 0.5) / pieces
            boxes.append((x - 4, y - 4, x + 4, y + 4))
    return boxes


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _draw_notes(
    notes: Sequence[tuple[float, float, str]], taken: list[Rectangle], frame: Rectangle
) -> list[str]:
    """Notes as near to their points as nothing is covered, with a thin line where that is far."""
    parts: list[str] = []
    left, top, right, bottom = frame
    for x, y, said in sorted(notes, key=lambda note: note[1]):
        text = fit_text(said, right - left)
        size = LETTER * len(text)
        around = [(step, side) for step in range(12) for side in (1, -1)]
        places = [
            (start, y + side * step * 9)
            for step, side in around
            for start in (x + 8, x - 8 - size, min(max(x - size / 2, left), right - size))
        ]
        for start, middle in places:
            box = (start, middle - 9, start + size, middle + 9)
            inside = box[0] >= left and box[2] <= right and box[1] >= top and box[3] <= bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                if abs(middle - y) > 20:
                    end = min(max(x, box[0]), box[2]), middle + (7 if middle < y else -7)
                    parts.append(draw_line("leader", (x, y), end))
                parts.append(draw_text("note", start, middle + 4, text))
                break  # one that finds no place is in the tooltip of its point and in the table
    return parts
