"""A progress bar on standard error, where that is a terminal; elsewhere nothing is shown.

Commands and the Estimator show the same one. A bar that is opened while another is shown stands below it. It must not
know what is under way, and imports no jax.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Thing = TypeVar("Thing")


class Progress(Protocol):
    """A piece of work that is under way."""

    def advance(self, amount: float = 1) -> None:
        """So much more of the total is done."""

    def update(self, description: str) -> None:
        """Say something else beside the bar."""


Show = Callable[[str, float | None], AbstractContextManager[Progress]]
"""Opens a bar from a description and a total."""


class Silent:
    """Progress that nobody sees."""

    def advance(self, amount: float = 1) -> None:
        """Nothing to show."""

    def update(self, description: str) -> None:
        """Nothing to show."""


class _Bar:
    """One line of what is shown."""

    def __init__(self, shown: "RichProgress", task: "TaskID"):
        self._shown, self._task = shown, task

    def advance(self, amount: float = 1) -> None:
        """Move on."""
        self._shown.advance(self._task, amount)

    def update(self, description: str) -> None:
        """Other words."""
        self._shown.update(self._task, description=description)


_shown: "list[RichProgress]" = []
"""What is on the terminal now: none or one, because rich refuses a second."""


@contextmanager
def show(description: str, total: float | None = None) -> Iterator[Progress]:
    """A bar while the block runs (`total` None: a moving one), silent where there is no terminal."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    if _shown:
        bars = _shown[0]
        task = bars.add_task(description, total=total)
        try:
            yield _Bar(bars, task)
        finally:
            bars.remove_task(task)
        return
    with _display() as bars:
        yield _Bar(bars, bars.add_task(description, total=total))


@contextmanager
def hide(description: str, total: float | None = None) -> Iterator[Progress]:
    """No bar, wherever standard error leads."""
    yield Silent()


def counted(things: Iterable[Thing], bar: Progress) -> Iterator[Thing]:
    """The things; the bar moves on once the next one is asked for."""
    for thing in things:
        yield thing
        bar.advance()


@contextmanager
def _display() -> "Iterator[RichProgress]":
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    # Standard output is left alone where it is no terminal: rich would send its text to the terminal.
    console = Console(stderr=True)
    with RichProgress(console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bars:
        _shown.append(bars)
        try:
            yield bars
        finally:
            _shown.remove(bars)
