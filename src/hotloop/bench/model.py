"""What a benchmark file says, as plain frozen values: benchmarks, their variants and their metrics.

It knows neither YAML (`spec.py` reads that) nor processes (`runner.py` starts those).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["throughput", "convergence"]


@dataclass(frozen=True)
class Metric:
    """A number that a program prints: where to find it and how its values become one."""

    name: str
    regexp: str | None
    skip: int = 0
    """Values left out from the front, in the order of printing: the warm-up."""
    reduction: str = "mean"
    field: str | None = None
    """Name in JSON lines; the metric's own name when not given."""
    unit: str = ""
    sorted_skip: bool = False
    """Sort before `skip`, so that it drops the worst values; highest first for a metric called latency."""

    @property
    def key(self) -> str:
        """The name looked up in JSON lines."""
        return self.field or self.name


@dataclass(frozen=True)
class Derived:
    """A number computed from other metrics and from parameters."""

    name: str
    expr: str
    reduction: str = "mean"
    unit: str = ""


@dataclass(frozen=True)
class Variant:
    """One choice of a benchmark's parameters, filled into everything that may name them."""

    name: str
    params: Mapping[str, str]
    cmd: str
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Where it runs; the benchmark's folder when not given."""
    derived: tuple[Derived, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """One entry of a benchmark file."""

    name: str
    file: Path
    line: int
    cmd: str
    """The command as the file has it, parameters not yet filled in."""
    description: str = ""
    metrics: tuple[Metric, ...] = ()
    derived: tuple[Derived, ...] = ()
    output: tuple[tuple[str, str], ...] = ()
    """(label, metric) pairs; the label is the metric's unit when the metric gives none."""
    variants: tuple[Variant, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    """Where it runs: the file's folder, or `location` in it."""
    timeout: float | None = None
    requirements_file: Path | None = None
    pre_run: tuple[str, ...] = ()
    kind: Kind = "throughput"
    needs_dataset: bool = True
    devices: int | None = None
    tags: tuple[str, ...] = ()
    skip: str | None = None
    """Why this entry cannot be run, such as a notebook; None for one that can."""
    allow_wandb: bool = False
    notices: tuple[str, ...] = ()
    """What the reader of the file should know: keys that are accepted and have no effect."""
