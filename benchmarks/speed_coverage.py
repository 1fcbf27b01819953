"""What the speed tables lack: for each family on each machine how many of its rows have which kind of figure.

Counted from the rows that the page shows, so that a new file fills a gap by itself.
"""

from collections.abc import Callable, Iterator, Sequence

from speed_rows import FAMILIES, Row
from speed_whole import Whole

COLUMNS = ("family", "machine", "rate", "time for an epoch", "time to a result", "memory", "a peer beside it")
MACHINES = ("CPU", "H200")
NONE = "**none**"
ENDLESS = ("kernels", "hmc", "serving")
"""Families that have no epoch and no result by their nature."""
FIGURES: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("time for an epoch", lambda row: row.samples is not None),
    ("memory", lambda row: row.memory is not None),
    ("a peer beside it", lambda row: row.peer is not None),
)


def coverage(rows: Sequence[Row], whole: Sequence[Whole]) -> Iterator[Sequence[str]]:
    """Lines of a table, in the order of COLUMNS."""
    for family in FAMILIES:
        for machine in MACHINES:
            own = [row for row in rows if (row.family, row.source.machine) == (family, machine)]
            results = sum((run.family, run.source.machine) == (family, machine) for run in whole)
            said = {name: share(sum(map(has, own)), len(own)) for name, has in FIGURES}
            said |= {"rate": count(len(own), "row"), "time to a result": count(results, "training")}
            if family in ENDLESS:
                said |= dict.fromkeys(("time for an epoch", "time to a result"), "does not apply")
            yield (family, machine, *(said[name] for name in COLUMNS[2:]))


def share(some: int, of: int) -> str:
    """Of the rows of a table."""
    if not some:
        return NONE
    return "all" if some == of else f"{some} of {of} rows"


def count(some: int, name: str) -> str:
    return f"{some} {name}{'s' * (some > 1)}" if some else NONE
