"""One self-contained HTML page of results that opens offline, in light and dark, on a phone: a headline with a
verdict, headings, text, sortable tables, and charts with their numbers. Charts are SVG inside it (`charts.py`,
`strips.py`): a plotting library would cost an import and a page that needs files beside it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path

from hotloop.bench.axes import FULL, HALF, PHONE
from hotloop.bench.charts import Chart
from hotloop.bench.record import is_number
from hotloop.bench.strips import Strips
from hotloop.errors import RunError
from hotloop.options.files import whole_file

CLASS = ' class="words"'
LONG = 30  # letters from which on a cell may be broken into lines
MOST_ROWS = 200  # of the table behind a chart; of more, every second, third, ... is shown
VERDICTS = ("FAST", "SLOW", "SAME", "AMBIGUOUS")
Cell = str | float | int | None
CaptionedChart = tuple[str | Chart | Strips, str]
"""A chart or HTML text, and its caption."""


class Word(str):
    """A cell that is a verdict: it gets a colour besides."""


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
    headline: str = ""
    """What was measured, on what, and what came out, in a sentence or two."""
    tally: Mapping[str, int] = field(default_factory=dict)
    """How many there are of each verdict."""
    _parts: list[str] = field(default_factory=list)
    _headings: list[tuple[str, str]] = field(default_factory=list)

    def section(self, title: str, text: str = "", charts: Sequence[CaptionedChart] = ()) -> None:
        """A heading, and what begins its section; from four on, the page begins with links to them."""
        mark = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self._headings.append((mark, title))
        self._parts.append(f'<h2 id="{mark}">{escape(title)}</h2>')
        if text:
            self.text(text)
        if charts:
            self.charts(charts)

    def heading(self, text: str) -> None:
        """Of a part of a section."""
        self._parts.append(f"<h3>{escape(text)}</h3>")

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], name: str = "Table") -> None:
        """A table that sorts by its column heads, by click or key."""
        self._parts.append(_table(columns, rows, name))

    def charts(self, charts: Sequence[CaptionedChart]) -> None:
        """Two beside each other where there is room; as wide as both what needs it, and what is left over."""
        figures = []
        waiting: CaptionedChart | None = None
        for chart, caption in charts:
            if isinstance(chart, Strips) and chart.is_wide:
                figures += [_figure(*waiting, FULL)] if waiting else []
                figures.append(_figure(chart, caption, FULL))
                waiting = None
            elif waiting:
                figures += [_figure(*waiting, HALF), _figure(chart, caption, HALF)]
                waiting = None
            else:
                waiting = (chart, caption)
        figures += [_figure(*waiting, FULL)] if waiting else []
        self._parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def render(self) -> str:
        links = " ".join(f'<a href="#{mark}">{escape(text)}</a>' for mark, text in self._headings)
        sections = f'<nav aria-label="Sections">{links}</nav>' if len(self._headings) > 3 else ""
        words = [f"{_badge(word)} {self.tally[word]}" for word in VERDICTS if self.tally.get(word)]
        tally = f'<p class="tally">{" ".join(f"<span>{each}</span>" for each in words)}</p>' if words else ""
        headline = f'<p class="headline">{escape(self.headline)}</p>' if self.headline else ""
        folder = files("hotloop.bench")
        style, script = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(self.title)}</title><link rel="icon" href="data:,">'
            f"<style>{style}</style></head><body><main><header>"
            f'<h1>{escape(self.title)}</h1>{headline}{tally}<p class="lead">{escape(self.lead)}</p></header>'
            f"{sections}{''.join(self._parts)}</main><script>{script}</script></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        write_text(path, self.render())
        return Path(path).resolve()


def _figure(chart: str | Chart | Strips, caption: str, width: int) -> str:
    """A card; a chart is in it twice, for a wide window and for a phone, and CSS shows one of them."""
    wide = ' class="wide"' if width == FULL else ""
    drawing, numbers = chart, ""
    if not isinstance(chart, str):
        columns, rows = chart.table()
        shown = _table(columns, rows[:: -(-len(rows) // MOST_ROWS) or 1], f"Numbers of {chart.title}")
        drawing = (
            f'<figcaption class="title">{escape(chart.title)}</figcaption>'
            f'<div class="for-wide">{chart.render(width)}</div><div class="for-phone">{chart.render(PHONE)}</div>'
        )
        numbers = f"<details><summary>The numbers</summary>{shown}</details>"
    return f"<figure{wide}>{drawing}<p>{escape(caption)}</p>{numbers}</figure>"


def _badge(word: str) -> str:
    return f'<span class="word {word.lower()}">{escape(word)}</span>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], name: str) -> str:
    known = [[row[place] for row in rows if row[place] is not None] for place in range(len(columns))]
    words = [all(isinstance(value, str) for value in values) for values in known]
    head = "".join(
        f'<th scope="col"{CLASS if word else ""}>{escape(name)}</th>'
        for name, word in zip(columns, words, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, words))}</tr>" for row in rows)
    return (
        '<p class="hint">Scroll the table sideways for more columns →</p>'
        f'<div class="wrap" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Cell, is_words: bool) -> str:
    """A cell; `is_words` where its whole column is text."""
    if isinstance(value, Word):
        return f"<td{CLASS}>{_badge(value)}</td>"
    if isinstance(value, str):
        kinds = [kind for kind, fits in (("words", is_words), ("long", len(value) > LONG)) if fits]
        return f'<td class="{" ".join(kinds)}">{escape(value)}</td>'
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
