"""Benchmark files: YAML in, `Benchmark` values out, or every problem at once with file and line.

Files of the older runner load unchanged; docs/benchmarks.md has the format. Reading starts nothing and needs
neither the programs nor their data to be there.
"""

from collections.abc import Sequence
from pathlib import Path

from hotloop.bench.model import Benchmark
from hotloop.bench.spec_entry import entry
from hotloop.bench.spec_fields import Fields
from hotloop.bench.spec_yaml import Pairs, read
from hotloop.errors import OptionError, one_line
from hotloop.options.document import LONGEST


class SpecError(OptionError):
    """What is wrong in benchmark files: one `FILE:LINE: problem` a line."""

    def __init__(self, text: str):
        Exception.__init__(self, "\n".join(map(one_line, text.split("\n"))))


class Problems:
    """The problems of one file, each kept once: an anchor's mistake is met wherever it is used."""

    def __init__(self, file: Path):
        self.file = file
        self.lines: dict[str, None] = {}

    def __call__(self, line: int, text: str) -> None:
        """Add one; line 0 stands for the whole file."""
        self.lines[one_line(f"{self.file}:{line}: {text}" if line else f"{self.file}: {text}")] = None


def load(files: Sequence[str | Path]) -> dict[str, Benchmark]:
    """The benchmarks of all files by name, in the order of the files; a SpecError if anything is wrong."""
    reports = [Problems(file) for file in {Path(file).resolve(): Path(file) for file in files}.values()]
    benchmarks: dict[str, Benchmark] = {}
    owners: dict[str, Benchmark] = {}
    for report in reports:
        for name, benchmark in _entries(report.file, report).items():
            other = benchmarks.setdefault(name, benchmark)
            if other is not benchmark:
                report(
                    benchmark.line, f"the name '{name}' is taken by {_place(other)}; rename one of the two"
                )
            else:
                _refuse_equal_variants(benchmark, owners, report)
    if lines := [line for report in reports for line in report.lines]:
        raise SpecError("\n".join(lines))
    return benchmarks


def _place(benchmark: Benchmark) -> str:
    return f"{benchmark.file}:{benchmark.line}"


def _refuse_equal_variants(benchmark: Benchmark, owners: dict[str, Benchmark], report: Problems) -> None:
    """Variants name folders and results, so no two of a run may be called alike."""
    for variant in benchmark.variants:
        other = owners.setdefault(variant.name, benchmark)
        if other is not benchmark:
            where = f"{other.name} ({_place(other)})"
            report(benchmark.line, f"'{variant.name}' is also a variant of {where}; rename one benchmark")


def _entries(file: Path, report: Problems) -> dict[str, Benchmark]:
    document = read(_text(file, report), report)
    if document is None or not isinstance(document, Pairs):
        if not report.lines:
            report(1, "there are no benchmarks here; a file maps names to entries, each with a cmd")
        return {}
    found = {}
    for name, (line, value) in document.pairs.items():
        if "options" in name:  # defaults for the others, which name them with `<<`
            continue
        if isinstance(value, Pairs):
            found[name] = entry(name, line, Fields(value, "", report), file)
        else:
            report(line, f"'{name}' must be a mapping with a cmd")
    return found


def _text(file: Path, report: Problems) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(LONGEST + 1)  # the reader of YAML refuses more
    except UnicodeDecodeError:
        report(0, "is not UTF-8 text; a benchmark file is YAML")
    except OSError as error:
        report(0, f"cannot be read: {error.strerror}; give a benchmark file such as benchmarks.yml")
    return ""
