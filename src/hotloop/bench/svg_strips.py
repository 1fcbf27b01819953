"""A chart of rows as SVG text: a name, dots for single values, a box from low to high with its middle marked.

For many named things on one axis: repeats of variants, ratios to peers. The names stand above their rows, where
they have the whole width. It does not know what the numbers mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hotloop.bench.svg import RIGHT, WIDTH
from hotloop.bench.svg_axes import Axis, marks_of, number, scale, text, tick

LEFT, TOP, ROW, BOTTOM = 16, 8, 52, 56
LONGEST = 56  # characters of a name that fit; the tooltip and the table have all of it


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
            [row.name, row.low, row.value, row.high, " ".join(map(number, row.values))] for row in self.rows
        ]
        names = ["name", "low", self.axis.label, "high", "values"]
        if any(row.values for row in self.rows):
            return names, rows
        return names[:-1], [row[:-1] for row in rows]

    def render(self) -> str:
        """The chart as an `<svg>` element."""
        base = TOP + ROW * len(self.rows)
        ends = self._ends()
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {base + BOTTOM}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>',
        ]
        for value, name in marks_of(self.axis, ends):
            x = self._x(value, ends)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{base}"/>')
            parts.append(tick(x, base + 20, name, WIDTH))
        if self.at is not None:
            x = self._x(self.at, ends)
            parts.append(f'<line class="axis" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{base}"/>')
        for place, row in enumerate(self.rows):
            parts += self._row(row, TOP + ROW * place + 36, ends)
        parts.append(text("label", WIDTH / 2, base + BOTTOM - 8, self.axis.label, "middle"))
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
        return scale(self.axis, value, ends, LEFT, WIDTH - RIGHT)

    def _row(self, row: Strip, y: float, ends: tuple[float, float]) -> list[str]:
        said = (
            f"<title>{escape(row.name)}: {number(row.value)} ({number(row.low)} … {number(row.high)})</title>"
        )
        name = row.name if len(row.name) <= LONGEST else f"{row.name[: LONGEST - 1]}…"
        parts = [text("note", LEFT + 2, y - 14, name)]
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
