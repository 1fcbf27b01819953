"""What a benchmark file says, as frozen values: benchmarks, metrics, variants; which of them run, and in which order.
Parameters are filled in by plain replacement, never by `str.format`, whose fields can reach into objects.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from hotloop.errors import OptionError, did_you_mean

Kind = Literal["throughput", "convergence"]
Parameters = Mapping[str, str]
LONGEST_NAME = 200  # bytes: it names a folder, and file systems stop at 255 of them
TABLES = {f"benchmark_results.{ending}" for ending in ("json", "csv", "xml")}
TAKEN = {*TABLES, "results.jsonl", "provenance.json", "environments"}  # by a run itself in its log folder
BRACES = re.compile(r"\{\{|\}\}|\{([\w-]+)\}")
CONVERGENCE = "trains to convergence; name it, or give --include-convergence"


@dataclass(frozen=True)
class Metric:
    """A number that a program prints: where to find it and how its values become one."""

    name: str
    regexp: str | None
    skip: int = 0  # values left out from the front, in the order of printing: the warm-up
    reduction: str = "mean"
    field: str | None = None  # in JSON lines; the metric's own name when not given
    unit: str = ""
    sorted_skip: bool = False  # sort before `skip`, which then drops the worst; of a latency the highest

    @property
    def key(self) -> str:
        return self.field or self.name


@dataclass(frozen=True)
class Derived:
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
    folder: Path = Path()  # where it runs
    derived: tuple[Derived, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    name: str
    file: Path
    line: int
    cmd: str  # as the file has it, parameters not yet filled in
    description: str = ""
    metrics: tuple[Metric, ...] = ()
    derived: tuple[Derived, ...] = ()
    output: tuple[tuple[str, str], ...] = ()  # label and metric; a unit where the metric gives none
    variants: tuple[Variant, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()  # where it runs: the file's folder, or `location` in it
    timeout: float | None = None
    requirements_file: Path | None = None
    pre_run: tuple[str, ...] = ()
    kind: Kind = "throughput"
    needs_dataset: bool = True
    devices: int | None = None
    tags: tuple[str, ...] = ()
    skip: str | None = None  # why this entry cannot be run, such as a notebook
    allow_wandb: bool = False
    notices: tuple[str, ...] = ()  # what its author should know: keys without effect


def fill(text: str, params: Parameters) -> str:
    """The text with `{name}` replaced for each parameter, and doubled braces by single ones, as the old runner had it:
    not where there are other single braces, as in JSON, which cannot have been written for that rule.
    """
    doubled = not re.search(r"[{}]", BRACES.sub("", text))

    def put(found: re.Match[str]) -> str:
        if found[1] is not None:
            return params.get(found[1], found[0])
        return found[0][0] if doubled else found[0]

    return BRACES.sub(put, text)


def folder_name(text: str) -> str:
    """The text as the name of a folder that is inside the log folder and takes no other file's place."""
    plain = re.sub(r"[^\w.+=,-]+", "-", text).encode()[:LONGEST_NAME].decode(errors="ignore")
    return f"{plain}_" if not plain.strip(".") or plain.casefold() in TAKEN else plain


def name_variants(benchmark: str, rows: Sequence[Parameters]) -> dict[str, Parameters]:
    """Variant names and their parameters: the names sorted, and _2, _3 where two would be equal."""
    variants: dict[str, Parameters] = {}
    for row in rows:
        parts = "".join(f"_{key}_{row[key]}" for key in sorted(row))
        plain = folder_name(benchmark + parts)
        name, count = plain, 1
        while name in variants:
            count += 1
            name = f"{plain}_{count}"
        variants[name] = row
    return variants


@dataclass(frozen=True)
class Selected:
    """One variant that was asked for; `skip` says why it is left out all the same."""

    benchmark: Benchmark
    variant: Variant
    skip: str | None = None


def select(
    benchmarks: Mapping[str, Benchmark],
    patterns: Sequence[str] = (),
    tags: Sequence[str] = (),
    include_convergence: bool = False,
) -> list[Selected]:
    """The variants that names or globs (of benchmarks or variants) and tags ask for, in the order of the patterns."""
    chosen: dict[str, Selected] = {}
    everything = [Selected(one, variant) for one in benchmarks.values() for variant in one.variants]
    if not everything:
        raise OptionError("--spec: the files hold no benchmark; give one whose entries have a cmd")
    if "" in patterns:
        raise OptionError("--benchmark '': an empty name; leave the option out to run everything")
    for pattern in patterns or ("*",):
        # Variants of the benchmarks whose names match, else those whose own names match.
        found = [one for one in everything if fnmatchcase(one.benchmark.name, pattern)]
        found = found or [one for one in everything if fnmatchcase(one.variant.name, pattern)]
        if not found:
            raise OptionError(f"--benchmark {pattern}: matches nothing{did_you_mean(pattern, benchmarks)}")
        for one in found:
            if not tags or set(tags) & set(one.benchmark.tags):
                named = pattern in (one.benchmark.name, one.variant.name)
                before = chosen.get(one.variant.name)
                if before is None or (named and before.skip == CONVERGENCE):
                    unwanted = one.benchmark.kind == "convergence" and not (named or include_convergence)
                    skip = one.benchmark.skip or (CONVERGENCE if unwanted else None)
                    chosen[one.variant.name] = replace(one, skip=skip)
    if not chosen:
        known = {tag for one in benchmarks.values() for tag in one.tags}
        raise OptionError(f"--tag {' '.join(tags)}: no benchmark has it{did_you_mean(tags[0], known)}")
    return list(chosen.values())


def count_of(number: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
