"""A progress bar on standard error, where that is a terminal; elsewhere a line after a long compilation.

A bar that is opened while another is shown stands below it. While the compiler is at work the innermost bar says so,
wherever in the engine that happens; where none is open nothing is shown. It imports no jax.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hotloop.engine import processes
from hotloop.engine.interrupt import print_to_stderr

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task, TaskID

Thing = TypeVar("Thing")
SLOW = 3.0
"""Seconds of compiling after which a line tells of it where there is no bar."""
QUICK = 0.2
"""Seconds below which a program was there already, so that estimates need not begin anew."""


class Progress:
    """A piece of work that is under way; this one shows nothing."""

    def advance(self, amount: float = 1) -> None:
        """So much more of the total is done, which a launcher's watch should hear of, too."""
        processes.note()

    def update(self, description: str) -> None:
        """Say something else beside the bar."""

    @contextmanager
    def compiling(self, recorded: bool) -> Iterator[None]:
        """Say that the compiler is at work; `recorded`: how long it took is in a record or a line."""
        yield


Show = Callable[[str, float | None], AbstractContextManager[Progress]]
"""Opens a bar from a description and a total."""


class _Plain(Progress):
    """No terminal, so no bar: a line tells of a long compilation that no record tells of."""

    def __init__(self, description: str, say: Callable[[str], None]):
        self._description, self._say = description, say

    @contextmanager
    def compiling(self, recorded: bool) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            if seconds >= SLOW and not recorded:
                self._say(f"{self._description}: compiled in {seconds:.0f} s")


class _Bar(Progress):
    def __init__(self, shown: "RichProgress", description: str, total: float | None):
        self._shown = shown
        self.task: TaskID = shown.add_task(description, total=total, compiling_since=None)
        self._done = 0.0

    def advance(self, amount: float = 1) -> None:
        super().advance(amount)
        self._done += amount
        self._shown.advance(self.task, amount)

    def update(self, description: str) -> None:
        self._shown.update(self.task, description=description)

    @contextmanager
    def compiling(self, recorded: bool) -> Iterator[None]:
        began = time.monotonic()
        self._shown.update(self.task, compiling_since=began)
        try:
            yield
        finally:
            if time.monotonic() - began < QUICK:  # nothing was compiled
                self._shown.update(self.task, compiling_since=None)
            else:  # estimates begin anew
                self._shown.reset(self.task, completed=int(self._done), compiling_since=None)


_shown: "list[RichProgress]" = []
"""What is on the terminal now: none or one, because rich refuses a second."""
_open: list[Progress] = []
"""What is under way, the innermost last."""


@contextmanager
def show(
    description: str, total: float | None = None, say: Callable[[str], None] | None = None
) -> Iterator[Progress]:
    """A bar while the block runs (`total` None: a moving one); where there is no terminal, lines by `say`."""
    nested = bool(_shown)  # then standard error is rich's, which before rich 15 says that it is no terminal
    if not (nested or sys.stderr.isatty()):
        with attach_bar(_Plain(description, say or print_to_stderr)) as plain:
            yield plain
        return
    with nullcontext(_shown[0]) if nested else _display() as bars:
        bar = _Bar(bars, description, total)
        try:
            with attach_bar(bar):
                yield bar
        finally:
            if nested:  # the outermost goes with all that is shown, in its last state
                bars.remove_task(bar.task)


def hide(description: str, total: float | None = None) -> AbstractContextManager[Progress]:
    return attach_bar(Progress())


@contextmanager
def attach_bar(bar: Progress) -> Iterator[Progress]:
    """While the block runs, this shows compilations."""
    _open.append(bar)
    try:
        yield bar
    finally:
        _open.remove(bar)


def compiling(recorded: bool = False) -> AbstractContextManager[None]:
    """The block compiles: the innermost bar says so. `recorded`: how long it took is in a record or a line."""
    return _open[-1].compiling(recorded) if _open else nullcontext()


def advance_through(things: Iterable[Thing], bar: Progress) -> Iterator[Thing]:
    """The things; the bar moves on once the next one is asked for."""
    for thing in things:
        yield thing
        bar.advance()


@contextmanager
def _display() -> "Iterator[RichProgress]":
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Clock(ProgressColumn):
        """`compiling (12 s so far)`, or the time that is left."""

        def __init__(self) -> None:
            super().__init__()
            self._left = TimeRemainingColumn()

        def render(self, task: "Task") -> Text:
            since = task.fields["compiling_since"]
            if since is None:
                return self._left(task)  # type: ignore[return-value]
            return Text(f"compiling ({time.monotonic() - since:.0f} s so far)")

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Clock()
    # Standard output is left alone where it is no terminal: rich would send its text to the terminal.
    console, redirected = Console(stderr=True), sys.stdout.isatty()
    with RichProgress(*columns, console=console, transient=True, redirect_stdout=redirected) as bars:
        _shown.append(bars)
        try:
            yield bars
        finally:
            _shown.remove(bars)


class Console(Protocol):
    """Who listens to a run or a benchmark: a terminal, a test, another command."""

    def say(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names."""

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Any]:
        """A bar while the block runs (`total` None: a moving one), silent where there is no terminal."""
        return show(description, total, self.say)
