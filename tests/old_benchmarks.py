"""What an old benchmark file makes of a hotloop run: its own patterns, reductions and formulas, nothing started."""

import json
import shlex
from pathlib import Path

from hotloop.bench.compat import translate
from hotloop.bench.metrics import extract, use_record_fields
from hotloop.bench.spec import load_benchmarks

FOLDER = Path(__file__).parent / "bench" / "fixtures"
FILES = sorted(FOLDER.rglob("*.yml"))


def read(file, name, lines, result):
    """The results of an entry for what the command in its place said, and for the result that it gave."""
    benchmark = load_benchmarks([FOLDER / file])[name]
    figures = translate(shlex.split(benchmark.cmd)).figures
    return extract(use_record_fields(benchmark, figures), [json.dumps(result, default=str)], lines).results
