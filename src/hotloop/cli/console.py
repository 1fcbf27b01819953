"""What a command says: text for people, warnings, a progress bar, and the one JSON object of `--json`.

Text goes to standard output, or to standard error under `--json`, whose last line on standard output is the
result. A bar appears only where standard error is a terminal. Nothing here knows what is computed.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotloop.options import plain

if TYPE_CHECKING:
    import jax


class Progress(Protocol):
    """A piece of work that is under way."""

    def advance(self, amount: float = 1) -> None:
        """So much more of the total is done."""

    def update(self, description: str) -> None:
        """Say something else beside the bar."""


class Silent:
    """Progress that nobody sees: standard error is no terminal."""

    def advance(self, amount: float = 1) -> None:
        """Nothing to show."""

    def update(self, description: str) -> None:
        """Nothing to show."""


@dataclass(frozen=True)
class Context:
    """Handed to every command: how it was called, and how it may speak."""

    json: bool = False
    debug: bool = False
    device: str = "auto"
    only_accelerator: bool = False
    argv: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    """Names of the options that stand on the command line itself."""

    def say(self, text: str) -> None:
        """A line for people."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def warn(self, text: str) -> None:
        """A line that people should not miss, on standard error."""
        print(f"{coloured('warning:', '33')} {text}", file=sys.stderr, flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names; columns of numbers are aligned to the right."""
        for line in table_lines(columns, rows):
            self.say(line)

    def open_device(self) -> "jax.Device":
        """The device that the options ask for, ready for work; the first thing a computing command does."""
        from hotloop.engine.device import setup

        return setup(self.device, only_accelerator=self.only_accelerator, warn=self.warn)

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Progress]:
        """A bar while the block runs (`total` None: a moving one), silent where there is no terminal."""
        if not sys.stderr.isatty():
            yield Silent()
            return
        with _bar(description, total) as bar:
            yield bar


@contextmanager
def _bar(description: str, total: float | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    class Bar:
        def advance(self, amount: float = 1) -> None:
            bars.advance(task, amount)

        def update(self, description: str) -> None:
            bars.update(task, description=description)

    # Standard output is left alone where it is no terminal: rich would send its text to the terminal.
    console = Console(stderr=True)
    with RichProgress(console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bars:
        task = bars.add_task(description, total=total)
        yield Bar()


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a plain text table."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))
    ]

    def line(row: Sequence[str]) -> str:
        fitted = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(fitted).rstrip()

    return [line(columns), *map(line, cells)]


def coloured(text: str, code: str) -> str:
    """The text in colour where standard error is a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def print_json(result: Mapping[str, Any]) -> None:
    """The result as one line of strict JSON on standard output."""
    print(json.dumps(plain(result), allow_nan=False), flush=True)


def print_error(text: str) -> None:
    """One line on standard error."""
    print(f"hotloop: {coloured('error:', '31')} {' '.join(text.split())}", file=sys.stderr, flush=True)
