"""Axes of a drawing: their ranges, round ticks, numbers as people read them, and pieces of text as SVG.

Shared by the charts; it knows no chart.
"""

import math
from dataclasses import dataclass
from html import escape


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


def number(value: float) -> str:
    """A number for people: three significant digits, k / M / G for large ones."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / ({'G': 1e9, 'M': 1e6, 'k': 1e3}[suffix]):.3g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def scale(axis: Axis, value: float, ends: tuple[float, float], start: float, stop: float) -> float:
    """Where a value lies between two places of the drawing."""
    low, high = axis.place(ends[0]), axis.place(ends[1])
    return start + (axis.place(value) - low) / (high - low) * (stop - start)


def marks_of(axis: Axis, ends: tuple[float, float]) -> list[tuple[float, str]]:
    """Where an axis has its ticks and what they say; of many names every second, third, ... one."""
    if not axis.names:
        return [(value, number(value)) for value in ticks(*ends, axis.log)]
    every = math.ceil(len(axis.names) / 6)
    return [(place, name) for place, name in enumerate(axis.names, 1) if (place - 1) % every == 0]


def tick(x: float, y: float, name: str, width: float) -> str:
    """A tick's text under its place, moved inwards where it would be cut off (on a phone letters are larger)."""
    half = 6 * len(name)
    anchor = "end" if x + half > width else "start" if x < half else "middle"
    return text("tick", x, y, name, anchor)


def text(css: str, x: float, y: float, said: str, anchor: str = "start", more: str = "") -> str:
    """A piece of text in the drawing."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(said)}</text>'
