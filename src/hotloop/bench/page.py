"""One self-contained HTML page of results that opens offline, in light and dark, on a phone: headings, text, sortable
tables, and charts with their numbers. Charts are drawn here as SVG, whose colours are the page's CSS classes: a
plotting library would cost an import and a page that needs files beside it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from hotloop.bench.record import is_number
from hotloop.errors import RunError
from hotloop.options.files import whole_file

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 88, 16, 16, 56
STRIP_LEFT, STRIP_TOP, STRIP_HEIGHT = 16, 8, 52
COLOURS = 6
CLASS = ' class="words"'
MOST_ROWS = 200  # of the table behind a chart; of more, every second, third, ... is shown
LINE = 22  # height of a line of text
LONGEST_NAME = 56  # characters of a strip's name that fit; the tooltip and the table have all of it
Point = tuple[float, float]
Ends = tuple[float, float]
Cell = str | float | int | None
MarkKind = Literal["line", "dots", "dotted line", "range", "steps"]
"""Of these, a range is an upright line between two points, and steps are a filled histogram: each point is the left
edge of a bin and its height, the last closes it."""


@dataclass(frozen=True)
class Axis:
    """One axis: its label, whether it is logarithmic, names for 1, 2, ...; the range is the data's unless given."""

    label: str
    log: bool = False
    low: float | None = None
    names: tuple[str, ...] = ()

    def can_show(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def ends(self, values: Sequence[float]) -> Ends:
        low, high = min(values) if self.low is None else self.low, max(values)
        if self.log:
            return low / 1.5, high * 1.5
        room = 0.06 * (high - low) or 0.01 * abs(high) or 1.0
        return (low - room if self.low is None else low), high + room

    def place(self, value: float, ends: Ends, start: float, stop: float) -> float:
        """Where a value lies between two places of the drawing, which stand for the ends."""
        low, high, value = (math.log10(each) if self.log else each for each in (*ends, value))
        return start + (value - low) / (high - low) * (stop - start)

    def label_ticks(self, ends: Ends) -> list[tuple[float, str]]:
        """Where the ticks are and what they say; of many names every second, third, ... one."""
        if not self.names:
            return [(value, format_number(value)) for value in choose_ticks(*ends, self.log)]
        every = math.ceil(len(self.names) / 6)
        return [(place, name) for place, name in enumerate(self.names, 1) if (place - 1) % every == 0]


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
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(css: str, x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'


def _tick(x: float, y: float, name: str) -> str:
    """A tick's text under its place, moved inwards where it would be cut off (on a phone letters are larger)."""
    half = 6 * len(name)
    anchor = "end" if x + half > WIDTH else "start" if x < half else "middle"
    return _text("tick", x, y, name, anchor)


def _line(css: str, start: Point, end: Point) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(colour: int, spot: Point, title: str = "") -> str:
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="dot c{colour}" cx="{spot[0]:.1f}" cy="{spot[1]:.1f}" r="4">{tooltip}</circle>'


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
        """Every point in words and numbers, for readers who do not see the chart."""
        shown = [(mark.label, point) for mark in self._marks if mark.kind != "range" for point in mark.points]
        named = any(label for label, _ in shown)
        names = self.x.names
        rows: list[list[str | float]] = [
            [*([label] if named else []), names[round(x) - 1] if names else x, y] for label, (x, y) in shown
        ]
        return [*(["series"] if named else []), self.x.label, self.y.label], rows

    def render(self) -> str:
        points = [point for mark in self._marks for point in mark.points] or [(1.0, 1.0), (10.0, 10.0)]
        x_ends, y_ends = self.x.ends([x for x, _ in points]), self.y.ends([y for _, y in points])
        base = HEIGHT - BOTTOM

        def spot(point: Point) -> Point:
            x = self.x.place(point[0], x_ends, LEFT, WIDTH - RIGHT)
            return x, self.y.place(point[1], y_ends, base, TOP)

        legend = []  # a line each, above the chart's own frame: there they cover nothing
        labels = dict.fromkeys((mark.label, mark.colour) for mark in self._marks if mark.label)
        for row, (label, colour) in enumerate(reversed(labels), 1):
            base_line = 14 - LINE * row
            key = f'<rect class="key c{colour}" x="{LEFT + 12}" y="{base_line - 8}" width="10" height="10" rx="2"/>'
            legend.append(key + _text("note", LEFT + 28, base_line + 1, label))
        above = len(legend) * LINE
        parts = [
            f'<svg class="chart" viewBox="0 {-above} {WIDTH} {HEIGHT + above}" role="img">',
            f"<title>{escape(self.title)}</title>",
            *legend,
            _line("axis", (LEFT, base), (WIDTH - RIGHT, base)),
        ]
        parts += [_tick(spot((x, y_ends[0]))[0], base + 20, name) for x, name in self.x.label_ticks(x_ends)]
        for value in choose_ticks(*y_ends, self.y.log):
            y = spot((x_ends[0], value))[1]
            parts.append(_line("grid", (LEFT, y), (WIDTH - RIGHT, y)))
            parts.append(_text("tick", LEFT - 8, y + 4, format_number(value), "end"))
        turn = f' transform="translate(16 {(TOP + base) / 2}) rotate(-90)"'
        parts.append(_text("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x.label, "middle"))
        parts.append(_text("label", 0, 0, self.y.label, "middle", turn))
        for mark in self._marks:
            parts += _draw(mark, [spot(point) for point in mark.points], base)
        parts += _draw_notes([(*spot(point), said) for point, said in self._notes])
        return "\n".join([*parts, "</svg>"])


def line_chart(title: str, x: Axis, y: Axis, series: Mapping[str, Sequence[Point]]) -> Chart:
    chart = Chart(title, x, y)
    for label, points in series.items():
        chart.add("line", points, label)
    return chart


def _draw(mark: ChartMark, spots: Sequence[Point], base: float) -> list[str]:
    shape, corners = "polyline", spots
    if mark.kind == "steps":
        tops = [corner for (x, y), (end, _) in pairwise(spots) for corner in ((x, y), (end, y))]
        shape, corners = "polygon", [(spots[0][0], base), *tops, (spots[-1][0], base)] if spots else []
    css = {"range": "whisker", "steps": "area"}.get(mark.kind, "line")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    drawn = [f'<{shape} class="{css} c{mark.colour}" points="{path}"/>']
    if mark.kind == "dots" or (mark.kind == "range" and len(spots) < 2):
        drawn = []
    if mark.kind in ("dots", "dotted line"):
        titles = [f"{mark.label} {format_number(x)}, {format_number(y)}" for x, y in mark.points]
        drawn += [_dot(mark.colour, spot, title) for spot, title in zip(spots, titles, strict=True)]
    return drawn


def _draw_notes(notes: list[tuple[float, float, str]]) -> list[str]:
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
        parts.append(_text("note", x + (-7 if at_left else 7), y - 6, said, "end" if at_left else "start"))
    return parts


class Strip(NamedTuple):
    """One row of `Strips`: the middle with its low and high ends, and single values where there are any."""

    name: str
    low: float
    value: float
    high: float
    values: Sequence[float] = ()
    colour: int = 0


@dataclass(frozen=True)
class Strips:
    """Many named things on one axis, a row each: dots for single values, a box from low to high, its middle marked."""

    title: str
    axis: Axis
    rows: Sequence[Strip]
    at: float | None = None  # a value that gets a line from top to bottom

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        rows: list[list[str | float]] = [
            [row.name, row.low, row.value, row.high, " ".join(map(format_number, row.values))]
            for row in self.rows
        ]
        names = ["name", "low", self.axis.label, "high", "values"]
        if any(row.values for row in self.rows):
            return names, rows
        return names[:-1], [row[:-1] for row in rows]

    def render(self) -> str:
        base = STRIP_TOP + STRIP_HEIGHT * len(self.rows)
        numbers = [each for row in self.rows for each in (row.low, row.value, row.high, *row.values)]
        at = [] if self.at is None else [self.at]
        ends = self.axis.ends([*filter(math.isfinite, numbers), *at] or [1.0])

        def place(value: float) -> float:
            return self.axis.place(value, ends, STRIP_LEFT, WIDTH - RIGHT)

        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {base + BOTTOM}" role="img">',
            f"<title>{escape(self.title)}</title>",
            _line("axis", (STRIP_LEFT, base), (WIDTH - RIGHT, base)),
        ]
        for value, said in self.axis.label_ticks(ends):
            x = place(value)
            parts += [_line("grid", (x, STRIP_TOP), (x, base)), _tick(x, base + 20, said)]
        parts += [_line("axis", (place(value), STRIP_TOP), (place(value), base)) for value in at]
        for number, row in enumerate(self.rows):
            y = STRIP_TOP + STRIP_HEIGHT * number + 36
            name = row.name if len(row.name) <= LONGEST_NAME else f"{row.name[: LONGEST_NAME - 1]}…"
            parts.append(_text("note", STRIP_LEFT + 2, y - 14, name))  # above its row, with the whole width
            if math.isfinite(row.low) and math.isfinite(row.high):
                left, right = place(row.low), place(row.high)
                low, middle, high = map(format_number, (row.low, row.value, row.high))
                parts.append(
                    f'<rect class="box c{row.colour}" x="{left:.1f}" y="{y - 7}" width="{max(right - left, 1):.1f}" '
                    f'height="14" rx="2"><title>{escape(row.name)}: {middle} ({low} … {high})</title></rect>'
                )
            parts += [_dot(row.colour, (place(each), y)) for each in row.values if math.isfinite(each)]
            if math.isfinite(row.value):
                x = place(row.value)
                parts.append(_line(f"middle c{row.colour}", (x, y - 10), (x, y + 10)))
        parts.append(_text("label", WIDTH / 2, base + BOTTOM - 8, self.axis.label, "middle"))
        return "\n".join([*parts, "</svg>"])


CaptionedChart = tuple[str | Chart | Strips, str]
"""A chart or HTML text, and its caption."""


def format_cell(value: Cell) -> str:
    """A table cell for people: four significant digits, thousands separated, a dash for nothing."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if not is_number(value):  # out of a document that is not trusted
        return str(value)[:60]
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass
class Page:
    """A page under construction: add parts in reading order, then `write`."""

    title: str
    lead: str = ""
    _parts: list[str] = field(default_factory=list)
    _headings: list[tuple[str, str]] = field(default_factory=list)

    def section(self, title: str, text: str = "", charts: Sequence[CaptionedChart] = ()) -> None:
        """A heading, and what begins its section; from four on, the page begins with links to them."""
        mark = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self._headings.append((mark, title))
        self._parts.append(f'<h2 id="{mark}">{escape(title)}</h2>')
        if text:
            self._parts.append(f"<p>{escape(text)}</p>")
        if charts:
            self.charts(charts)

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table that sorts by its column heads, by click or key."""
        self._parts.append(_table(columns, rows))

    def charts(self, charts: Sequence[CaptionedChart]) -> None:
        """Side by side where there is room, charts with their numbers below."""
        figures = []
        for chart, caption in charts:
            drawing, numbers = chart, ""
            if not isinstance(chart, str):
                columns, rows = chart.table()
                shown = _table(columns, rows[:: -(-len(rows) // MOST_ROWS) or 1])
                drawing = chart.render()
                numbers = f"<details><summary>The numbers</summary>{shown}</details>"
            figures.append(f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption>{numbers}</figure>")
        self._parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def render(self) -> str:
        links = " ".join(f'<a href="#{mark}">{escape(text)}</a>' for mark, text in self._headings)
        sections = f'<nav aria-label="Sections">{links}</nav>' if len(self._headings) > 3 else ""
        folder = files("hotloop.bench")
        style, script = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(self.title)}</title><link rel="icon" href="data:,">'
            f"<style>{style}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="lead">{escape(self.lead)}</p>{sections}{"".join(self._parts)}'
            f"</main><script>{script}</script></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        write_text(path, self.render())
        return Path(path).resolve()


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    words = [all(isinstance(row[place], str) for row in rows) for place in range(len(columns))]
    head = "".join(
        f'<th scope="col"{CLASS if word else ""}>{escape(name)}</th>'
        for name, word in zip(columns, words, strict=True)
    )
    body = []
    for row in rows:
        body.append("<tr>")
        for value in row:
            raw = "" if value is None or value != value else f' data-value="{value}"'
            body.append(f"<td{CLASS if isinstance(value, str) else raw}>{escape(format_cell(value))}</td>")
        body.append("</tr>")
    return (
        '<div class="wrap" tabindex="0" role="region" aria-label="Table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(text, "utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
