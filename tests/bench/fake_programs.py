"""Small programs for the tests of the runner, and a listener that keeps what it is told."""

import json
import time
from pathlib import Path

import yaml

from hotloop.bench.benchmark import select
from hotloop.bench.launch import RunnerOptions
from hotloop.bench.runner import run
from hotloop.bench.spec import load_benchmarks

RATE = {"throughput": {"regexp": r"rate (\S+)"}}


def code(text):
    """The cmd of a Python program; -S because starting quickly is all that matters here."""
    return f'python3 -S -c "{text}"'


class Listener:
    def __init__(self):
        self.said, self.warned, self.rows = [], [], []

    def say(self, text):
        self.said.append(text)

    def warn(self, text):
        self.warned.append(text)

    def table(self, columns, rows):
        self.rows = [dict(zip(columns, row, strict=True)) for row in rows]


def write_spec(folder, entries):
    """A benchmark file; a bare text is the cmd of an entry that prints a rate."""
    file = folder / "benchmarks.yml"
    made = {
        name: {"cmd": one, "data": RATE} if isinstance(one, str) else one for name, one in entries.items()
    }
    file.write_text(yaml.safe_dump(made, sort_keys=False))
    return file


def run_spec(folder, entries, *, patterns=(), include_convergence=False, **options):
    """Write the file, run it, and give back the status, the records by (variant, repeat) and the listener."""
    file = write_spec(folder, entries)
    listener, log = Listener(), folder / "log"
    selected = select(load_benchmarks([file]), patterns, (), include_convergence)
    status = run(selected, RunnerOptions(log_dir=log, **options), listener)
    records = [json.loads(line) for line in (log / "results.jsonl").read_text().splitlines()]
    return status, {(one["variant"], one["repeat"]): one for one in records}, listener


def is_running(pid):
    """Whether a process is there and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
