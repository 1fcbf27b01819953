"""The words of the speed tables: figures, durations and memory as people write them, and where a row comes from."""

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import mean

from speed_sources import Source

LINK = "../benchmarks/results"


def figure(value: float) -> str:
    """Three digits at least, and thousands apart."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """In the unit that a person would take."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s" if seconds >= 0.1 else f"{figure(1_000 * seconds)} ms"


def gibibytes(count: int | None) -> str:
    """Empty where it was not counted."""
    if count is None:
        return ""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return (
        f"{count / 2**20:.{0 if count >= 10 * 2**20 else 1}f} MiB"
        if count >= 2**20
        else f"{count / 2**10:.0f} KiB"
    )


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """To sort by, with the numbers in a text in their order: of 20,000 before 311,315, of 8 before 64."""
    parts = re.split(r"(\d[\d,]*)", text.lower())
    return tuple((int(part.replace(",", "")), "") if part[:1].isdigit() else (-1, part) for part in parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown, line by line, without columns that are empty."""
    lines = list(rows)
    used = [place for place in range(len(columns)) if any(line[place] for line in lines)]
    yield "| " + " | ".join(columns[place] for place in used) + " |"
    yield "|" + "---|" * len(used)
    for line in lines:
        yield "| " + " | ".join(line[place] for place in used) + " |"
    yield ""


def made(source: Source) -> str:
    """Date and commit, with the way to the file."""
    return f"[{source.date}]({LINK}/{source.file}), {source.commit}"


def spread(values: Sequence[float], form: str, unit: str, error: float | None = None) -> str:
    """The mean, with a standard error of its own, and of several values the lowest, the highest and their number."""
    own = "" if error is None else f" ± {error:{form}}"
    said = f"{mean(values):{form}}{own} {unit}".strip()
    if len(values) == 1:
        return said
    return f"{said} ({min(values):{form}} to {max(values):{form}}, {len(values)} runs)"
