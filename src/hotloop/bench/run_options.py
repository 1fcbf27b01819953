"""What the runner is told: how often, where to, within which limits; and who listens. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hotloop.bench.launch import Settings
from hotloop.bench.measure import Limits


class Console(Protocol):
    """Who listens to the runner."""

    def say(self, text: str) -> None:
        """A line for people."""

    def warn(self, text: str) -> None:
        """A line that should not be missed."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows under their column names."""


@dataclass(frozen=True)
class Options:
    """How to run; what is chosen comes beside it."""

    log_dir: Path
    repeats: int = 1
    warm_up: int = 0
    interleave: bool = False
    resume: bool = False
    fail_fast: bool = False
    install: bool = False
    additional_metrics: bool = False
    csv_metrics: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    settings: Settings = field(default_factory=Settings)
