"""One self-contained HTML page of results: headings, text, sortable tables and charts.

Everything is inline: the page opens offline, in light and dark, on a phone.
It knows nothing of what is measured.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path

from hotloop.errors import RunError

Cell = str | float | int | None


def show(value: Cell) -> str:
    """A table cell for people: four significant digits, thousands separated, a dash for nothing."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass
class Page:
    """A page under construction: add parts in reading order, then `write`."""

    title: str
    lead: str = ""
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A section heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        """A block of preformatted text."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table that sorts by a click on a column's head."""
        head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
        body = "".join("<tr>" + "".join(_cell(v) for v in row) + "</tr>" for row in rows)
        self._parts.append(
            f'<div class="wrap"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def charts(self, charts: Sequence[tuple[str, str]]) -> None:
        """Charts side by side where there is room: pairs of SVG text and caption."""
        figures = "".join(f"<figure>{svg}<figcaption>{escape(c)}</figcaption></figure>" for svg, c in charts)
        self._parts.append(f'<div class="charts">{figures}</div>')

    def render(self) -> str:
        """The whole page as text."""
        style, script = (
            files("hotloop.bench").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js")
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(self.title)}</title><link rel="icon" href="data:,">'
            f"<style>{style}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="lead">{escape(self.lead)}</p>{"".join(self._parts)}'
            f"</main><script>{script}</script></body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page atomically and return its absolute path."""
        write_text(path, self.render())
        return path.resolve()


def _cell(value: Cell) -> str:
    raw = "" if isinstance(value, str) or value is None or value != value else f' data-value="{value}"'
    return f"<td{raw}>{escape(show(value))}</td>"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
