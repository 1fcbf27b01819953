"""What every chart is made of: axes with round ticks, numbers as people write them, and lines, dots and texts as SVG.

Colours and letters are the page's CSS. Widths of texts are estimated from their letters; what would not fit is cut with
an ellipsis, and a tooltip has all of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

PHONE, HALF, FULL = 340, 616, 1280
"""Widths that charts are drawn for: a phone, half of a wide page, and all of it."""
LETTER = 7.8  # pixels: a wide estimate of a letter of the CSS's 13
LINE = 20  # height of a line of text
RIGHT, TICKS, AXIS_LABEL = 14, 24, 24  # room at the right, and for ticks and label below
DOT = 4
ALIKE = 1e-9  # of a value: digits that nobody reads
LARGEST = 1e100  # a number beyond it is none that was measured, and would overflow
Point = tuple[float, float]
Ends = tuple[float, float]
SCALES = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which size on a number is written in which unit."""


@dataclass(frozen=True)
class Axis:
    """One axis: its label, whether it is logarithmic, names for 1, 2, ...; the range is the data's unless given."""

    label: str
    log: bool = False
    low: float | None = None
    names: tuple[str, ...] = ()

    def can_show(self, value: float) -> bool:
        return abs(value) < LARGEST and (value > 1 / LARGEST or not self.log)

    def ends(self, values: Sequence[float]) -> Ends:
        low, high = min(values) if self.low is None else self.low, max(values)
        if self.log:
            room = max((high / low) ** 0.06, 1.05)
            return low / room, high * room
        # What differs in its last digits alone is one value: no ticks could tell it apart.
        spread = high - low if high - low > ALIKE * abs(high) else 0.0
        room = 0.06 * spread or 0.01 * abs(high) or 1.0
        return (low - room if self.low is None else low), high + room

    def place(self, value: float, ends: Ends, start: float, stop: float) -> float:
        """Where a value lies between two places of the drawing, which stand for the ends."""
        low, high, value = (math.log10(each) if self.log else each for each in (*ends, value))
        return start + (value - low) / (high - low) * (stop - start)

    def label_ticks(self, ends: Ends, room: float) -> list[tuple[float, str]]:
        """Where the ticks are and what they say; as many as there is room for beside each other."""
        if self.names:
            most = max(1, int(room / (LETTER * max(map(len, self.names)) + 12)))
            every = math.ceil(len(self.names) / most)
            return [(place, name) for place, name in enumerate(self.names, 1) if (place - 1) % every == 0]
        for most in range(6, 0, -1):
            values = choose_ticks(*ends, self.log, most)
            texts = [format_number(value) for value in values]
            if not self.log or len(set(texts)) < len(texts):
                texts = format_ticks(values)
            if sum(LETTER * len(text) + 14 for text in texts) <= room:
                break
        return list(zip(values, texts, strict=True))


def choose_ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round numbers between two ends: powers of ten (of few, 2 and 5 times them too), or even steps of 1, 2 or 5."""
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        powers = [10.0**e for e in range(first, last + 1)]
        if len(powers) >= 3:
            return powers[:: math.ceil(len(powers) / max(most, 2))]
        between = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
        found = [value for value in between if low <= value <= high]
        if len(found) >= 2:
            return found[:: math.ceil(len(found) / max(most, 2))]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10, 20) if (high - low) / (step * m) <= most)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def format_ticks(values: Sequence[float]) -> list[str]:
    """Evenly spaced ticks with the digits that tell them apart and no more, all in one unit."""
    if len(values) < 2:
        return [format_number(value) for value in values]
    gap, largest = min(b - a for a, b in pairwise(values)), max(map(abs, values))
    if largest < 1e-3:
        return [f"{value:.3g}" for value in values]
    unit, suffix = next(((unit, suffix) for limit, unit, suffix in SCALES if largest >= limit), (1.0, ""))
    places = max(0, -math.floor(math.log10(gap / unit) + 1e-9))
    return [f"{value / unit + 0.0:,.{places}f}{suffix if value else ''}" for value in values]


def format_number(value: float) -> str:
    """A number for people: three significant digits, k / M / G for large ones."""
    for limit, unit, suffix in SCALES:
        if abs(value) >= limit:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_value(value: float) -> str:
    """The same with all three digits, for numbers that stand below each other."""
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= abs(value) < 1000 else format_number(value)


def fit_text(text: str, room: float) -> str:
    """A text that is cut, where it would be longer than there is room for."""
    most = max(1, int(room / LETTER + 1e-9))  # a room for 32 letters takes 32, whatever rounding says
    return text if len(text) <= most else f"{text[: most - 1]}…"


def draw_text(
    css: str, x: float, y: float, said: str, anchor: str = "start", room: float | None = None
) -> str:
    """A text; where it has to be cut, a tooltip has all of it."""
    shown = said if room is None else fit_text(said, room)
    tooltip = f"<title>{escape(said)}</title>" if shown != said else ""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}{tooltip}</text>'
    )


def draw_tick(x: float, y: float, name: str, width: float) -> str:
    """A tick's text under its place, moved inwards where it would be cut off."""
    half = LETTER * len(name) / 2 + 4
    if x + half > width:
        return draw_text("tick", width, y, name, "end")
    return draw_text("tick", 0 if x < half else x, y, name, "start" if x < half else "middle")


def draw_line(css: str, start: Point, end: Point) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def draw_dot(css: str, spot: Point, title: str = "") -> str:
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="dot {css}" cx="{spot[0]:.1f}" cy="{spot[1]:.1f}" r="{DOT}">{tooltip}</circle>'


def open_svg(title: str, width: float, height: float) -> list[str]:
    head = f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    return [head, f"<title>{escape(title)}</title>"]
