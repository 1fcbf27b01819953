"""Who listens to a run or a benchmark: a terminal, a test, another command. Printing itself is elsewhere."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Console(Protocol):
    """What a family's work says while it goes on."""

    def say(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names."""

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Any]:
        """A bar with `advance` while the block runs."""
