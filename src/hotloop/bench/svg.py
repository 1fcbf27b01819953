"""Small charts as SVG text: lines, dots, ranges and areas on linear, logarithmic or named axes.

Drawn here, without a plotting library, so that a page of results is one file that opens offline, follows the
reader's light or dark theme (colours are CSS classes set by the page) and costs no import. It does not know
what the numbers mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from hotloop.bench.svg_axes import Axis, marks_of, number, scale, text, tick, ticks

__all__ = ["COLOURS", "RIGHT", "WIDTH", "Axis", "Chart", "Point"]

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 88, 16, 16, 56
COLOURS = 6
LINE = 22  # height of a line of text

Point = tuple[float, float]


@dataclass
class Chart:
    """A chart under construction: add marks, then `render()`.

    Points whose coordinates are not finite (or not positive on a logarithmic axis) are left out.
    """

    title: str
    x: Axis
    y: Axis
    _marks: list[tuple[str, str, tuple[Point, ...], int]] = field(default_factory=list)
    _notes: list[tuple[Point, str]] = field(default_factory=list)

    def _add(self, kind: str, points: Sequence[Point], label: str, colour: int | None) -> None:
        if colour is None:
            colour = len({m[3] for m in self._marks})
        shown = tuple(
            (float(a), float(b)) for a, b in points if self._drawable(a, self.x) and self._drawable(b, self.y)
        )
        self._marks.append((kind, label, shown, colour % COLOURS))

    @staticmethod
    def _drawable(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.log)

    def line(self, points: Sequence[Point], label: str = "", colour: int | None = None) -> None:
        """A line through the points."""
        self._add("line", points, label, colour)

    def dots(self, points: Sequence[Point], label: str = "", colour: int | None = None) -> None:
        """A dot at each point."""
        self._add("dots", points, label, colour)

    def steps(self, points: Sequence[Point], label: str = "", colour: int | None = None) -> None:
        """A filled histogram: each point is the left edge of a bin and its height; the last closes it."""
        self._add("steps", points, label, colour)

    def range(self, x: float, low: float, high: float, colour: int = 0) -> None:
        """An upright line between two values."""
        if all(map(math.isfinite, (low, high))):
            self._add("range", [(x, low), (x, high)], "", colour)

    def note(self, point: Point, said: str) -> None:
        """A short text beside a point."""
        if self._drawable(point[0], self.x) and self._drawable(point[1], self.y):
            self._notes.append((point, said))

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Every point in words and numbers, for readers who do not see the chart."""
        series: dict[tuple[Point, ...], str] = {}
        for kind, label, points, _ in self._marks:
            if kind != "range":
                series[points] = label or series.get(points, "")  # a line and its dots are told once
        shown = [(label, point) for points, label in series.items() for point in points]
        named = any(label for label, _ in shown)
        rows = [[*([label] if named else []), self._name(x), y] for label, (x, y) in shown]
        return [*(["series"] if named else []), self.x.label, self.y.label], rows

    def _name(self, x: float) -> str | float:
        return self.x.names[round(x) - 1] if self.x.names else x

    def _range(self, axis: Axis, index: int) -> tuple[float, float]:
        values = [p[index] for _, _, points, _ in self._marks for p in points] or [1.0, 10.0]
        low = axis.low if axis.low is not None else min(values)
        high = axis.high if axis.high is not None else max(values)
        if axis.log:
            return low / 1.5, high * 1.5
        room = 0.06 * (high - low) or abs(high) or 1.0
        return (low if axis.low is not None else low - room), (high if axis.high is not None else high + room)

    def render(self) -> str:
        """The chart as an `<svg>` element."""
        x_range, y_range = self._range(self.x, 0), self._range(self.y, 1)

        def spot(point: Point) -> Point:
            return (
                scale(self.x, point[0], x_range, LEFT, WIDTH - RIGHT),
                scale(self.y, point[1], y_range, HEIGHT - BOTTOM, TOP),
            )

        legend = _legend([(label, colour) for _, label, _, colour in self._marks if label])
        parts = [
            f'<svg class="chart" viewBox="0 {-len(legend) * LINE} {WIDTH} {HEIGHT + len(legend) * LINE}" role="img">',
            f"<title>{escape(self.title)}</title>",
            *legend,
            *_grid(self.x, self.y, x_range, y_range),
        ]
        for kind, label, points, colour in self._marks:
            parts += _draw(
                kind, label, [spot(p) for p in points], points, colour, spot((x_range[0], y_range[0]))[1]
            )
        parts += _notes([(*spot(point), said) for point, said in self._notes])
        return "\n".join([*parts, "</svg>"])


def _grid(x: Axis, y: Axis, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>']
    for value, name in marks_of(x, x_range):
        px = scale(x, value, x_range, LEFT, WIDTH - RIGHT)
        parts.append(tick(px, base + 20, name, WIDTH))
    for value in ticks(*y_range, y.log):
        py = scale(y, value, y_range, base, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{py:.1f}" x2="{WIDTH - RIGHT}" y2="{py:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    turn = f' transform="translate(16 {(TOP + base) / 2}) rotate(-90)"'
    return [
        *parts,
        text("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "middle"),
        text("label", 0, 0, y.label, "middle", turn),
    ]


def _draw(
    kind: str, label: str, spots: list[Point], points: Sequence[Point], colour: int, base: float
) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    if kind == "line":
        return [f'<polyline class="line c{colour}" points="{path}"/>']
    if kind == "range":
        return [f'<polyline class="whisker c{colour}" points="{path}"/>'] if len(spots) == 2 else []
    if kind == "steps":
        corners = [f"{spots[0][0]:.1f},{base:.1f}"] if spots else []
        for (x, y), (following, _) in pairwise(spots):
            corners += [f"{x:.1f},{y:.1f}", f"{following:.1f},{y:.1f}"]
        corners += [f"{spots[-1][0]:.1f},{base:.1f}"] if spots else []
        return [f'<polygon class="area c{colour}" points="{" ".join(corners)}"/>']
    return [
        f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{escape(label)} {number(a)}, {number(b)}</title></circle>"
        for (x, y), (a, b) in zip(spots, points, strict=True)
    ]


def _notes(notes: list[tuple[float, float, str]]) -> list[str]:
    """Notes beside their points; one that would cover another moves down, or up where the axis is near."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []  # left and right end, height
    for x, y, said in sorted(notes, key=lambda note: note[1]):
        at_left, width = x > WIDTH * 0.7, 9.0 * len(said)
        start = x - 7 - width if at_left else x + 7
        step = -4 if y > HEIGHT - BOTTOM - 2 * LINE else 4
        while any(start < b and a < start + width and abs(y - h) < LINE - 5 for a, b, h in taken):
            y += step
        taken.append((start, start + width, y))
        parts.append(text("note", x + (-7 if at_left else 7), y - 6, said, "end" if at_left else "start"))
    return parts


def _legend(entries: list[tuple[str, int]]) -> list[str]:
    """A line each, above the chart's own frame: there they cover nothing."""
    parts = []
    for row, (label, colour) in enumerate(reversed(dict.fromkeys(entries)), 1):
        y = 14 - LINE * row
        key = f'<rect class="key c{colour}" x="{LEFT + 12}" y="{y - 8}" width="10" height="10" rx="2"/>'
        parts.append(key + text("note", LEFT + 28, y + 1, label))
    return parts
