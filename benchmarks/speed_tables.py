"""Speed tables: `python benchmarks/speed_tables.py` writes docs/speed.md and docs/history.md from benchmarks/results.

Nothing is measured here, and nothing stands on these pages that is in no file: a test compares them with what this
program makes. The newest row of a case on a machine beside a peer is shown (speed_rows.py); all files stay listed.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from speed_cells import LINK, duration, figure, gibibytes, made, table, whole_runs
from speed_rows import FAMILIES, Row, newest, read_source, rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Speed tables

Every family's speed, time for an epoch, time to a result and memory, on a CPU and on one H200, with other programs
beside it. **Made by one command** from the raw files in [benchmarks/results](../benchmarks/results), of which the
newest of each case counts:

```
python benchmarks/speed_tables.py
```

A ratio is ours over the peer's in the same round, so more than 1 is better for us; behind it the lowest and the
highest round. Compilation and warm-up are in none of it. An epoch is computed: its samples over our rate (CIFAR-10
50,000, ImageNet 1,281,167, binarised MNIST 50,000; of ratings the users). ESS is the smallest effective number of
draws of all numbers of a position. Memory is what the timed program needs on the device, ours, then the peer's, where
it was counted. A commit with + had changes that were not yet committed. What was done, what was thrown away and what
was missed is told in [results](results.md), which also has figures without a raw file; every file is in the
[history](history.md).

Machines: **CPU**, two cores of an AMD EPYC (Zen 5 where the file's name says so, else Zen 3 or 4), a virtual machine
whose neighbours are noisy: read ratios, not microseconds; **H200**, one NVIDIA H200 with 16 cores of a Xeon.
"""
WHOLE = """Whole trainings on real data. Of several runs the mean, and the lowest and the highest. The time is that of
compiled calls alone, but for those by `hotloop cnn train`, which have compilation and validation in it."""
TITLES = {
    "cnn": "cnn: ResNets",
    "estimator": "estimator",
    "vcd": "vcd",
    "recommender": "recommender",
    "kernels": "Kernels: single layers",
    "hmc": "hmc: draws from a density",
    "serving": "Serving",
}
GUIDES = {family: f"{family}.md" for family in FAMILIES}
COLUMNS = ("what", "machine", "ours", "an epoch", "peer", "its", "ratio (range)", "memory", "made")
HISTORY = """# History of results

Every raw file, newest first: what [results](results.md) tells and the [speed tables](speed.md) show comes from these,
and older files stay. `python benchmarks/speed_tables.py` writes this list.

| date | file | machine | commit | made by |
|---|---|---|---|---|
"""


def cells(row: Row) -> Sequence[str]:
    """The cells of a row, in the order of COLUMNS."""
    if row.ratio is None or row.theirs is None or row.peer is None:
        beside = ("none", "", "")
    else:
        ratio, low, high = row.ratio
        said = f"**{ratio:.2f}**" if ratio >= 1 else f"{ratio:.2f}"
        beside = (row.peer, f"{figure(row.theirs)} {row.unit}", f"{said} ({low:.2f} to {high:.2f})")
    epoch = "" if row.epoch_seconds is None else duration(row.epoch_seconds)
    memory = ", ".join(filter(None, (gibibytes(row.memory), gibibytes(row.their_memory))))
    ours = f"{figure(row.ours)} {row.unit}"
    return (row.case, row.source.machine, ours, epoch, *beside, memory, made(row.source))


def family_section(family: str, rows: Sequence[Row]) -> Iterator[str]:
    """Its table, without columns that are empty, and the commands of its files."""
    yield from (f"## {TITLES[family]}", "", f"What it is: [{GUIDES[family]}]({GUIDES[family]}).", "")
    lines = [cells(row) for row in sorted(rows, key=lambda row: row.source.machine)]
    used = [place for place in range(len(COLUMNS)) if any(line[place] for line in lines)]
    yield from table([COLUMNS[place] for place in used], [[line[place] for place in used] for line in lines])
    yield from ("Commands, in the order of the files:", "")
    for source in sorted({row.source for row in rows}, key=lambda source: source.file):
        native = f"; with hotloop-native {source.native}" if source.native else ""
        yield f"- [{source.file}]({LINK}/{source.file}), commit {source.commit}: `{source.command}`{native}"
    yield ""


def speed_page(folder: Path) -> str:
    """docs/speed.md."""
    rows = newest(row for path in sorted(folder.glob("*.json")) for row in rows_of(path))
    lines = [HEAD, "## Time to a result", "", WHOLE, ""]
    lines += table(("what", "machine", "result", "time", "rate", "made"), whole_runs(folder))
    for family in FAMILIES:
        if own := [row for row in rows if row.family == family]:
            lines += family_section(family, own)
    return "\n".join(lines).rstrip() + "\n"


def history_page(folder: Path) -> str:
    """docs/history.md."""
    lines = []
    for path in sorted(folder.glob("*.json*"), key=lambda path: (path.name[:10], path.name), reverse=True):
        link = f"[{path.name[11:]}]({LINK}/{path.name})"
        if path.suffix == ".jsonl":
            lines.append(f"| {path.name[:10]} | {link} | | | in [results](results.md) |")
            continue
        source = read_source(path, json.loads(path.read_text()))
        lines.append(f"| {source.date} | {link} | {source.machine} | {source.commit} | `{source.command}` |")
    return HISTORY + "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, make in (("speed.md", speed_page), ("history.md", history_page)):
        (ROOT / "docs" / name).write_text(make(RESULTS))
        print(f"docs/{name}")
