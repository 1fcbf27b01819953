"""Speed and memory of the recommender's data path: lines a second of the parser, and the matrix built from them.

Run `python benchmarks/ratings.py`; `taskset -c 0` in front of it keeps it to one core. A file of ratings is written
to a temporary folder, then a process of its own reads it and builds the matrix, and prints a line of JSON for each
turn, with wall and CPU time and its peak memory so far. `--lines 98000000 --users 477412 --items 17768 --repeat 1`
is the shape of the whole Netflix Prize (1.6 GB of text).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hotloop.engine.device import peak_bytes

BLOCK = 1 << 22


def write(path: Path, lines: int, users: int, items: int, shuffled: bool) -> None:
    """Lines grouped by user, or in no order; a user has about as many ratings as any other."""
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(0)
    schema = pa.schema({"user": pa.int32(), "item": pa.int32(), "rating": pa.string()})
    plain = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    texts = pa.array([f"{star}.0" for star in range(1, 6)])
    with csv.CSVWriter(str(path), schema, write_options=plain) as writer:
        for begin in range(0, lines, BLOCK):
            place = np.arange(begin, min(begin + BLOCK, lines))
            user = rng.integers(0, users, len(place)) if shuffled else place * users // lines
            item = rng.integers(1, items + 1, len(place), dtype=np.int32)
            rating = texts.take(pa.array(rng.integers(0, 5, len(place))))
            # Ids of customers are seven digits with gaps, as in the real set.
            columns = {"user": (5 * user + 7).astype(np.int32), "item": item, "rating": rating}
            writer.write_table(pa.table(columns, schema=schema))


def peak_mib() -> int:
    return peak_bytes() >> 20


def measure(path: Path, repeat: int) -> None:
    from hotloop.data.rating_matrix import build_matrix
    from hotloop.data.ratings import read_rating_text

    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        table = read_rating_text(path)
        parsed = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        after_parsing, lines = peak_mib(), len(table)
        wall, cpu = time.perf_counter(), time.process_time()
        matrix = build_matrix(table.users, table.items, table.values, warn=lambda text: None)
        built = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        figures = {
            "lines": lines,
            "users": matrix.users,
            "items": matrix.n_items,
            "ratings": matrix.ratings,
            "parse": {name: round(value, 3) for name, value in parsed.items()},
            "parse_million_lines_per_wall_s": round(lines / parsed["wall_s"] / 1e6, 2),
            "parse_million_lines_per_cpu_s": round(lines / parsed["cpu_s"] / 1e6, 2),
            "build": {name: round(value, 3) for name, value in built.items()},
            "peak_mib_parsed": after_parsing,
            "peak_mib": peak_mib(),
            "matrix_mib": round((matrix.items.nbytes + matrix.codes.nbytes + matrix.starts.nbytes) / 2**20),
        }
        print(json.dumps(figures), flush=True)
        del table, matrix


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--users", type=int, default=25_000)
    parser.add_argument("--items", type=int, default=17_768)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--shuffled", action="store_true", help="lines in no order instead of grouped by user"
    )
    parser.add_argument("--read", type=Path, help="measure this file instead of one that is made up")
    options = parser.parse_args()
    if options.read:
        measure(options.read, options.repeat)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratings.txt"
        write(path, options.lines, options.users, options.items, options.shuffled)
        again = [sys.executable, __file__, "--read", str(path), "--repeat", str(options.repeat)]
        subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
