"""Who listens to a benchmark: a terminal, a test, another command. Printing itself is elsewhere."""

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Console(Protocol):
    """What a benchmark says while it runs."""

    def say(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    def progress(self, description: str, total: float | None = None) -> AbstractContextManager[Any]:
        """A bar with `advance` while the block runs."""
