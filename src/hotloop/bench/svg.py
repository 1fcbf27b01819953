"""Axes of a drawing: their ranges, round ticks, numbers as people read them, and pieces of text as SVG.

Shared by the charts; it knows no chart.

Small charts as SVG text: lines, dots, ranges and areas on linear, logarithmic or named axes.
A chart of rows as SVG text: a name, dots for single values, a box from low to high with its middle marked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise


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


def choose_ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round numbers between two ends: powers of ten (of few, 2 and 5 times them too), or even steps of 1, 2 or 5."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last - first < 1:
            between = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
            return [value for value in between if low <= value <= high]
        every = max(1, math.ceil((last - first + 1) / most))
        return [10.0**e for e in range(first, last + 1, every)]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def format_number(value: float) -> str:
    """A number for people: three significant digits, k / M / G for large ones."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / ({'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]):.3g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def scale_value(axis: Axis, value: float, ends: tuple[float, float], start: float, stop: float) -> float:
    """Where a value lies between two places of the drawing."""
    low, high = axis.place(ends[0]), axis.place(ends[1])
    return start + (axis.place(value) - low) / (high - low) * (stop - start)


def label_ticks(axis: Axis, ends: tuple[float, float]) -> list[tuple[float, str]]:
    """Where an axis has its ticks and what they say; of many names every second, third, ... one."""
    if not axis.names:
        return [(value, format_number(value)) for value in choose_ticks(*ends, axis.log)]
    every = math.ceil(len(axis.names) / 6)
    return [(place, name) for place, name in enumerate(axis.names, 1) if (place - 1) % every == 0]


def draw_tick(x: float, y: float, name: str, width: float) -> str:
    """A tick's text under its place, moved inwards where it would be cut off (on a phone letters are larger)."""
    half = 6 * len(name)
    anchor = "end" if x + half > width else "start" if x < half else "middle"
    return draw_text("tick", x, y, name, anchor)


def draw_text(css: str, x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
    """A piece of text in the drawing."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'


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
                scale_value(self.x, point[0], x_range, LEFT, WIDTH - RIGHT),
                scale_value(self.y, point[1], y_range, HEIGHT - BOTTOM, TOP),
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
    for value, name in label_ticks(x, x_range):
        px = scale_value(x, value, x_range, LEFT, WIDTH - RIGHT)
        parts.append(draw_tick(px, base + 20, name, WIDTH))
    for value in choose_ticks(*y_range, y.log):
        py = scale_value(y, value, y_range, base, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{py:.1f}" x2="{WIDTH - RIGHT}" y2="{py:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{format_number(value)}</text>'
        )
    turn = f' transform="translate(16 {(TOP + base) / 2}) rotate(-90)"'
    return [
        *parts,
        draw_text("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "middle"),
        draw_text("label", 0, 0, y.label, "middle", turn),
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
        f"<title>{escape(label)} {format_number(a)}, {format_number(b)}</title></circle>"
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
        parts.append(
            draw_text("note", x + (-7 if at_left else 7), y - 6, said, "end" if at_left else "start")
        )
    return parts


def _legend(entries: list[tuple[str, int]]) -> list[str]:
    """A line each, above the chart's own frame: there they cover nothing."""
    parts = []
    for row, (label, colour) in enumerate(reversed(dict.fromkeys(entries)), 1):
        y = 14 - LINE * row
        key = f'<rect class="key c{colour}" x="{LEFT + 12}" y="{y - 8}" width="10" height="10" rx="2"/>'
        parts.append(key + draw_text("note", LEFT + 28, y + 1, label))
    return parts


STRIP_LEFT, STRIP_TOP, ROW, STRIP_BOTTOM = 16, 8, 52, 56
LONGEST_NAME = 56  # characters of a name that fit; the tooltip and the table have all of it


@dataclass(frozen=True)
class Strip:
    """One row: the middle with its low and high ends, and single values where there are any."""

    name: str
    low: float
    value: float
    high: float
    values: Sequence[float] = ()
    colour: int = 0

    def shown(self) -> list[float]:
        """All its numbers that can be drawn."""
        return [each for each in (self.low, self.value, self.high, *self.values) if math.isfinite(each)]


@dataclass(frozen=True)
class Strips:
    """The chart; `at` is a value that gets a line from top to bottom."""

    title: str
    axis: Axis
    rows: Sequence[Strip]
    at: float | None = None

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Every row in words and numbers, for readers who do not see the chart."""
        rows: list[list[str | float]] = [
            [row.name, row.low, row.value, row.high, " ".join(map(format_number, row.values))]
            for row in self.rows
        ]
        names = ["name", "low", self.axis.label, "high", "values"]
        if any(row.values for row in self.rows):
            return names, rows
        return names[:-1], [row[:-1] for row in rows]

    def render(self) -> str:
        """The chart as an `<svg>` element."""
        base = STRIP_TOP + ROW * len(self.rows)
        ends = self._ends()
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {base + STRIP_BOTTOM}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<line class="axis" x1="{STRIP_LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>',
        ]
        for value, name in label_ticks(self.axis, ends):
            x = self._x(value, ends)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{STRIP_TOP}" x2="{x:.1f}" y2="{base}"/>')
            parts.append(draw_tick(x, base + 20, name, WIDTH))
        if self.at is not None:
            x = self._x(self.at, ends)
            parts.append(f'<line class="axis" x1="{x:.1f}" y1="{STRIP_TOP}" x2="{x:.1f}" y2="{base}"/>')
        for place, row in enumerate(self.rows):
            parts += self._row(row, STRIP_TOP + ROW * place + 36, ends)
        parts.append(draw_text("label", WIDTH / 2, base + STRIP_BOTTOM - 8, self.axis.label, "middle"))
        return "\n".join([*parts, "</svg>"])

    def _ends(self) -> tuple[float, float]:
        values = [each for row in self.rows for each in row.shown()] or [1.0]
        values += [] if self.at is None else [self.at]
        low, high = min(values), max(values)
        if self.axis.log:
            return low / 1.3, high * 1.3
        room = 0.06 * (high - low) or 0.01 * abs(high) or 1.0
        return low - room, high + room

    def _x(self, value: float, ends: tuple[float, float]) -> float:
        return scale_value(self.axis, value, ends, STRIP_LEFT, WIDTH - RIGHT)

    def _row(self, row: Strip, y: float, ends: tuple[float, float]) -> list[str]:
        span = f"{format_number(row.low)} … {format_number(row.high)}"
        said = f"<title>{escape(row.name)}: {format_number(row.value)} ({span})</title>"
        name = row.name if len(row.name) <= LONGEST_NAME else f"{row.name[: LONGEST_NAME - 1]}…"
        parts = [draw_text("note", STRIP_LEFT + 2, y - 14, name)]
        if math.isfinite(row.low) and math.isfinite(row.high):
            left, right = self._x(row.low, ends), self._x(row.high, ends)
            parts.append(
                f'<rect class="box c{row.colour}" x="{left:.1f}" y="{y - 7}" width="{max(right - left, 1):.1f}" '
                f'height="14" rx="2">{said}</rect>'
            )
        for value in row.values:
            if math.isfinite(value):
                parts.append(
                    f'<circle class="dot c{row.colour}" cx="{self._x(value, ends):.1f}" cy="{y}" r="4"/>'
                )
        if math.isfinite(row.value):
            x = self._x(row.value, ends)
            line = f'x1="{x:.1f}" y1="{y - 10}" x2="{x:.1f}" y2="{y + 10}"'
            parts.append(f'<line class="middle c{row.colour}" {line}/>')
        return parts
