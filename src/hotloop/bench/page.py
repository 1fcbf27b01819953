"""One self-contained HTML page of results that opens offline, in light and dark, on a phone: headings, text, sortable
tables, and charts with their numbers. Opened with #selfcheck it examines itself and writes what it found at its end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from hotloop.bench.record import is_number
from hotloop.errors import RunError
from hotloop.options.files import whole_file

Cell = str | float | int | None
CLASS = ' class="words"'
MOST_ROWS = 200  # of the table behind a chart; of more, every second, third, ... is shown


class Figure(Protocol):
    """A chart that can also be told as a table."""

    def render(self) -> str:
        """The chart as an `<svg>` element."""

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
        """Its columns and rows."""


def format_cell(value: Cell) -> str:
    """A table cell for people: four significant digits, thousands separated, a dash for nothing."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if not is_number(value):  # out of a document that anybody may have written
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

    def heading(self, text: str) -> None:
        """A section heading; from four on, the page begins with links to them."""
        mark = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        self._headings.append((mark, text))
        self._parts.append(f'<h2 id="{mark}">{escape(text)}</h2>')

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table that sorts by its column heads, by click or key."""
        self._parts.append(_table(columns, rows))

    def charts(self, charts: Sequence[tuple[str | Figure, str]]) -> None:
        """Charts (or HTML text) with captions, side by side where there is room; charts with their numbers below."""
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
        style, script = (
            files("hotloop.bench").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js")
        )
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
    body = "".join("<tr>" + "".join(_cell(v) for v in row) + "</tr>" for row in rows)
    return (
        '<div class="wrap" tabindex="0" role="region" aria-label="Table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td{CLASS}>{escape(value)}</td>"
    raw = "" if value is None or value != value else f' data-value="{value}"'
    return f"<td{raw}>{escape(format_cell(value))}</td>"


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(text, "utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
