"""Many named values on one axis, a row each, as SVG: their range as a box, single values as dots, a verdict as a colour
and a word. Names stand beside their rows, or above them where a page is narrow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import NamedTuple

from hotloop.bench.axes import (
    AXIS_LABEL,
    HALF,
    LETTER,
    LINE,
    PHONE,
    RIGHT,
    TICKS,
    Axis,
    draw_dot,
    draw_line,
    draw_text,
    draw_tick,
    fit_text,
    format_number,
    format_value,
    open_svg,
)

ROW, TALL_ROW = 28, 46  # of strips: texts beside a row, or a line above it
NAMES = 0.48  # of the width may be for names


class Strip(NamedTuple):
    """One row of `Strips`: the middle with its low and high ends, single values, and what is said beside it."""

    name: str
    low: float
    value: float
    high: float
    values: Sequence[float] = ()
    colour: int = 0
    detail: str = ""
    word: str = ""
    """A verdict, which gives the row its colour."""


@dataclass(frozen=True)
class Strips:
    """Many named things on one axis, a row each: dots for single values, a box from low to high, its middle marked."""

    title: str
    axis: Axis
    rows: Sequence[Strip]
    at: float | None = None  # a value that gets a line from top to bottom

    @property
    def is_wide(self) -> bool:
        """Whether the names would be cut in half of a page."""
        return LETTER * max(map(len, self._names()), default=0) + 12 > NAMES * HALF

    def _names(self) -> list[str]:
        return [f"{row.name}  {row.detail}".rstrip() for row in self.rows]

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        rows: list[list[str | float]] = [
            [
                row.name,
                row.detail,
                row.low,
                row.value,
                row.high,
                " ".join(map(format_number, row.values)),
                row.word,
            ]
            for row in self.rows
        ]
        names = ["name", "of", "low", self.axis.label, "high", "values", "verdict"]
        used = [place not in (1, 5, 6) or any(row[place] for row in rows) for place in range(len(names))]
        return [name for name, use in zip(names, used, strict=True) if use], [
            [cell for cell, use in zip(row, used, strict=True) if use] for row in rows
        ]

    def render(self, width: float = HALF) -> str:
        beside = width > PHONE
        ends_text = [f"{format_value(row.value)} {row.word}".strip() for row in self.rows]
        if len(set(ends_text)) == 1 and len(self.rows) > 1:  # of no use: medians over themselves, say
            ends_text = [""] * len(ends_text)
        right = LETTER * max(map(len, ends_text), default=0) + 12
        left = 4.0
        if beside:
            left = min(LETTER * max(map(len, self._names()), default=0) + 12, NAMES * width)
        stop = width - (right if beside else RIGHT)
        second = LINE if any(ends_text) or any(row.detail for row in self.rows) else 0
        lines = [_lines_of(row.name, width) for row in self.rows]
        more = LINE * (max(map(len, lines), default=1) - 1)  # for names that need several lines
        height = ROW if beside else TALL_ROW + second + more
        base = 6.0 + height * len(self.rows)
        numbers = [each for row in self.rows for each in (row.low, row.value, row.high, *row.values)]
        at = [] if self.at is None else [self.at]
        ends = self.axis.ends([*filter(self.axis.can_show, numbers), *at] or [1.0])

        def place(value: float) -> float:
            return self.axis.place(value, ends, left, stop)

        parts = open_svg(self.title, width, base + TICKS + AXIS_LABEL)
        for value, text in self.axis.label_ticks(ends, stop - left):
            x = place(value)
            parts += [draw_line("grid", (x, 2), (x, base)), draw_tick(x, base + 18, text, width)]
        parts.append(draw_line("axis", (left, base), (stop, base)))
        parts += [draw_line("at", (place(value), 2), (place(value), base)) for value in at]
        for number, row in enumerate(self.rows):
            y = 6 + height * number + (height / 2 if beside else height - 14)
            if beside:
                parts.append(_draw_name(row, y + 4, left - 12))
            else:
                first = y - 15 - second - LINE * (len(lines[number]) - 1)
                for below, text in enumerate(lines[number]):
                    parts.append(draw_text("note", 0, first + LINE * below, text, room=width))
                parts.append(draw_text("detail", 0, y - 15, row.detail, room=width - right))
            css = f"word {row.word.lower()}" if row.word else "number"
            parts.append(draw_text(css, width - 2, y + 4 if beside else y - 15, ends_text[number], "end"))
            parts += self._draw_row(row, y, place)
        parts.append(draw_text("label", (left + stop) / 2, base + TICKS + 18, self.axis.label, "middle"))
        return "\n".join([*parts, "</svg>"])

    def _draw_row(self, row: Strip, y: float, place: Callable[[float], float]) -> list[str]:
        css = f"of-{row.word.lower()}" if row.word else f"c{row.colour}"
        parts = []
        if self.axis.can_show(row.low) and self.axis.can_show(row.high):
            left, right = place(row.low), place(row.high)
            low, middle, high = map(format_number, (row.low, row.value, row.high))
            parts.append(
                f'<rect class="box {css}" x="{left:.1f}" y="{y - 6:.1f}" width="{max(right - left, 1):.1f}" '
                f'height="12" rx="3"><title>{escape(row.name)}: {middle} ({low} … {high})</title></rect>'
            )
        parts += [draw_dot(css, (place(each), y)) for each in row.values if self.axis.can_show(each)]
        if self.axis.can_show(row.value):
            x = place(row.value)
            parts.append(draw_line(f"middle {css}", (x, y - 9), (x, y + 9)))
        return parts


def _lines_of(name: str, width: float) -> list[str]:
    """A name in lines that fit, broken between words: cut, those of two rows could be the same."""
    return wrap(name, max(1, int(width / LETTER)), break_long_words=False) or [name]


def _draw_name(row: Strip, y: float, room: float) -> str:
    """The name, and in another colour what tells it from others of that name; the name is cut first."""
    detail = f"  {row.detail}" if row.detail else ""
    name = fit_text(row.name, max(room - LETTER * len(detail), 8 * LETTER))
    tooltip = f"<title>{escape(row.name + detail)}</title>" if name != row.name else ""
    more = f'<tspan class="detail" dx="6">{escape(row.detail)}</tspan>' if detail else ""
    return f'<text class="note" x="0" y="{y:.1f}">{escape(name)}{more}{tooltip}</text>'
