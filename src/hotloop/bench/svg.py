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

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 88, 16, 16, 56
COLOURS = 6
LINE = 22  # height of a line of text

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis: its label, whether it is logarithmic, names for 1, 2, ...; the range is the data's unless given."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """The value on the axis's own (possibly logarithmic) scale."""
        return math.log10(value) if self.log else value


def ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round numbers between two ends: powers of ten, or steps of 1, 2 or 5 on a linear axis."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / most))
        return [10.0**e for e in range(first, last + 1, every)]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people: three significant digits, k / M / G for large ones."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / ({'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]):.3g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
        shown = [
            (label, point) for kind, label, points, _ in self._marks if kind != "range" for point in points
        ]
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
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT + len(legend) * LINE}" role="img">',
            f"<title>{escape(self.title)}</title>",
            *legend,
            f'<g transform="translate(0 {len(legend) * LINE})">',
            *_grid(self.x, self.y, x_range, y_range),
        ]
        for kind, label, points, colour in self._marks:
            parts += _draw(
                kind, label, [spot(p) for p in points], points, colour, spot((x_range[0], y_range[0]))[1]
            )
        parts += _notes([(*spot(point), said) for point, said in self._notes])
        return "\n".join([*parts, "</g></svg>"])


def scale(axis: Axis, value: float, ends: tuple[float, float], start: float, stop: float) -> float:
    """Where a value lies between two places of the drawing."""
    low, high = axis.place(ends[0]), axis.place(ends[1])
    return start + (axis.place(value) - low) / (high - low) * (stop - start)


def _grid(x: Axis, y: Axis, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[str]:
    base = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>']
    for value, name in marks_of(x, x_range):
        px = scale(x, value, x_range, LEFT, WIDTH - RIGHT)
        anchor = "end" if px > WIDTH - 60 and len(name) > 5 else "middle"
        parts.append(text("tick", px, base + 20, name, anchor))
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


def marks_of(axis: Axis, ends: tuple[float, float]) -> list[tuple[float, str]]:
    """Where an axis has its ticks and what they say; of many names every second, third, ... one."""
    if not axis.names:
        return [(value, number(value)) for value in ticks(*ends, axis.log)]
    every = math.ceil(len(axis.names) / 6)
    return [(place, name) for place, name in enumerate(axis.names, 1) if (place - 1) % every == 0]


def text(css: str, x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
    """A piece of text in the drawing."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'


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
    """Notes beside their points; one that would cover another moves down."""
    parts: list[str] = []
    taken: list[Point] = []
    for x, y, said in sorted(notes, key=lambda note: note[1]):
        while any(abs(x - a) < 9 * len(said) and abs(y - b) < LINE - 4 for a, b in taken):
            y += 4
        taken.append((x, y))
        left = x > WIDTH * 0.7
        parts.append(text("note", x + (-7 if left else 7), y - 6, said, "end" if left else "start"))
    return parts


def _legend(entries: list[tuple[str, int]]) -> list[str]:
    parts = []
    for row, (label, colour) in enumerate(dict.fromkeys(entries)):
        y = 14 + LINE * row
        key = f'<rect class="key c{colour}" x="{LEFT + 12}" y="{y - 8}" width="10" height="10" rx="2"/>'
        parts.append(key + text("note", LEFT + 28, y + 1, label))
    return parts
