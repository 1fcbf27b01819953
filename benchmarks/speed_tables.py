"""Speed tables: `python benchmarks/speed_tables.py` writes docs/speed.md and docs/history.md from benchmarks/results.

Nothing is measured here, and nothing stands on these pages that is in no file: a test compares them with what this
program makes. The newest row of a case on a machine beside a peer is shown (speed_rows.py); all files stay listed.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import speed_coverage
import speed_whole
from speed_cells import LINK, duration, figure, gibibytes, made, natural, table
from speed_rows import FAMILIES, Row, newest, rows_of
from speed_sources import Source, fault_of, read_document, read_source

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Speed tables

Every family's speed, time for an epoch, time to a result and memory, on a CPU and on one H200, with other programs
beside it. **Made by one command** from the raw files in [benchmarks/results](../benchmarks/results). The newest file of
a case counts; among one day's files, one measured on a quiet machine. Where only an older file has a peer, that row
stays and says so.

```
python benchmarks/speed_tables.py
```

A ratio says how many times as fast as the peer we are: the median of the rounds, each of which times both, and behind
it the lowest and the highest round. More than 1 is better for us, of rates and of times (us) alike. Rates, times of a
kernel, and ratios are without compilation and warm-up, except where a row names them: *in all*, under [time to a
result](#time-to-a-result), is the whole command with its compilation, and hmc's *draws and adaptation* have the
sampler's own adaptation, compiled before. An epoch is computed: its samples over our rate (CIFAR-10 50,000, ImageNet
1,281,167, binarised MNIST 50,000; of ratings the users). ESS is the smallest effective sample size over all parameters.
A commit with + had changes that were not yet committed. The [results](results.md) name the commit that they became, say
what was done, what was thrown away and what was missed, and have figures without a raw file, some of them newer; every
file is in the [history](history.md).

Memory is what the timed program needs, with its data where these lie on the device. Ours is the compiler's count for
one compiled program (arguments, temporaries and outputs), and so is that of peers that jax compiles. Torch's is its
allocator's peak allocation during the run, workspaces of its libraries included. **The two are not to be compared**
with each other. Torch's is not counted on a CPU, nor where torch.compile makes CUDA graphs. Files until 2026-11-18 have
it of cnn alone; for the recommender on the H200, the device's peak allocation, as its row of a whole training has in
any file.

Machines: **CPU**, two cores of an AMD EPYC, a virtual machine whose neighbours are noisy: read ratios, not
microseconds; its generation stands beside a file's command. **H200**, one NVIDIA H200 with 16 cores of a Xeon.

## What is not here

Counted from the tables below. A row is a case beside one peer; a rate of inference has no epoch.
"""
WHOLE = """Whole trainings on real data by the command as it is typed, but for paths and seeds. Of several runs the
mean, and the lowest and the highest; ± is the standard error that a run itself gives. *Updates* is the time of compiled
calls alone. Where a run stops when it gets no better, it is the time until then, and *the best after* is the time until
the weights that were tested. *In all* is the whole command, with loading, compilation, validation and test: the first
run with an empty cache, then the mean of the rest (of `cnn train` and `estimator` in files until 2026-11-18 without
loading). Memory is the most that was in use, on a CPU by the whole process.

A target is reached at the first test that shows it, and targets differ: on the H200 75 % of CIFAR-10, tested every five
epochs; on the CPU 65 % of CIFAR-10 and 99 % of MNIST, tested every epoch. hiverge's program is the one peer whose whole
training was measured; elsewhere a peer that computes the same update takes as many updates, at its rate below."""
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
COLUMNS = ("what", "machine", "ours", "an epoch", "peer", "the peer's", "ratio (range)", "memory", "made")
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
    memory = ", ".join(
        filter(
            None, (gibibytes(row.memory), row.their_memory and f"the peer's {gibibytes(row.their_memory)}")
        )
    )
    ours = f"{figure(row.ours)} {row.unit}"
    note = f" ({row.note})" if row.note else ""
    return (row.case, row.source.machine, ours, epoch, *beside, memory, made(row.source) + note)


def commands(sources: Iterable[Source]) -> Iterator[str]:
    """What each file was made by, and on what."""
    yield from ("Commands, in the order of the files:", "")
    for source in sorted(set(sources), key=lambda source: source.file):
        native = f"; with hotloop-native {source.native}" if source.native else ""
        about = ", ".join(filter(None, (f"commit {source.commit}", source.processor)))
        yield f"- [{source.file}]({LINK}/{source.file}), {about}: {source.made_by}{native}"
    yield ""


def family_section(family: str, rows: Sequence[Row]) -> Iterator[str]:
    """Its table and the commands of its files."""
    yield from (f"## {TITLES[family]}", "", f"What it is: [{GUIDES[family]}]({GUIDES[family]}).", "")
    ordered = sorted(rows, key=lambda row: (row.source.machine, natural(row.case)))
    yield from table(COLUMNS, map(cells, ordered))
    yield from commands(row.source for row in rows)


def speed_page(folder: Path) -> str:
    """docs/speed.md."""
    rows = newest(row for path in sorted(folder.glob("*.json")) for row in rows_of(path))
    lines, whole = [HEAD], speed_whole.whole_runs(folder)
    lines += table(speed_coverage.COLUMNS, speed_coverage.coverage(rows, whole))
    lines += ["## Time to a result", "", WHOLE, ""]
    lines += table((*speed_whole.COLUMNS, "made"), ((*run.cells, made(run.source)) for run in whole))
    lines += commands(run.source for run in whole)
    for family in FAMILIES:
        if own := [row for row in rows if row.family == family]:
            lines += family_section(family, own)
    return "\n".join(lines).rstrip() + "\n"


def history_page(folder: Path) -> str:
    """docs/history.md."""
    lines = []
    for path in sorted(folder.glob("*.json*"), key=lambda path: (path.name[:10], path.name), reverse=True):
        with fault_of(path):
            source = read_source(path, read_document(path))
        link = f"[{path.name[11:]}]({LINK}/{path.name})"
        machine = ", ".join(filter(None, (source.machine, source.processor)))
        lines.append(f"| {source.date} | {link} | {machine} | {source.commit} | {source.made_by} |")
    return HISTORY + "\n".join(lines) + "\n"


if __name__ == "__main__":
    pages = {"speed.md": speed_page(RESULTS), "history.md": history_page(RESULTS)}
    for name, text in pages.items():
        (ROOT / "docs" / name).write_text(text)
        print(f"docs/{name}")
