"""Where figures come from: what a file of benchmarks/results says of itself, or what is known of it where it does not.

Files of several programs and months differ in where they say it; speed_rows.py and speed_whole.py read what they hold.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speed_commands import COMMANDS, NOTES

LATER = frozenset(
    f"2026-11-15_cnn_h200_{name}.json" for name in ("b256_ordered", "b512_ordered", "infer_folded")
)
"""Files that were made after others of the same day; else the later name of a day is taken for the later file."""
QUIET = 0.3
"""Cores that other work kept busy before a measurement, above which its program called it none."""
COMMITS = {
    "2026-11-15_kernels_h200": "94b9710",
    "2026-11-15_lstm_h200": "cda95c3",
    "2026-11-15_ml100k_cpu": "7bd74f6",
    "2026-11-18_bulk_lists_h200": "dd03bc6",
    "2026-11-18_photographs_h200": "341175e",
}
"""Of files that do not say it; docs/results.md has them too."""
ONE_KERNEL = (
    "results.md#h200-recurrences-as-one-kernel--python-benchmarkspeerskernelspy---device-gpu---dtype-float16---rounds-5"
    "---seconds-002---cases-b1024-b256-b128-b64"
)
"""Where docs/results.md has figures of one kernel for all steps that are in no file."""
BEFORE = "before one kernel for all steps"
OUTDATED = (
    (
        r"2026-11-15_(kernels|lstm)",
        r"(lstm|gru) B(64|128|256) |rnn B(64|256) ",
        f"{BEFORE}: [newer]({ONE_KERNEL})",
    ),
    (r"2026-11-15_(kernels|lstm)", r"(lstm|gru|rnn) B1024 |rnn B128 ", BEFORE),
    (
        r"2026-11-17_persistent",
        r" B(128|256) ",
        f"the first form of one kernel for all steps: [newer]({ONE_KERNEL})",
    ),
)
"""Files of the H200, their cases, and what a reader of an old row should know: a recurrence's loop became one kernel
after the first of them, for the shapes of layers/persistent_tiles.py (no single rows)."""
GENERATIONS = {25: "Zen 3 or 4", 26: "Zen 5"}
"""Of AMD's EPYC, by the processor's family."""
ZEN5 = frozenset({"2026-11-18_hmc_cpu_1", "2026-11-18_hmc_cpu_64"})
"""Files of a Zen 5 that neither say it nor have it in their names."""


@dataclass(frozen=True)
class Source:
    """A file of results: when, where and by what it was made."""

    file: str
    date: str
    commit: str
    machine: str
    commands: tuple[str, ...]
    native: str | None
    processor: str = ""
    """Its generation, of a CPU."""
    is_quiet: bool = True
    """Whether nothing else ran before, as far as the file says."""
    note: str = ""
    """What is no command."""

    @property
    def made_by(self) -> str:
        """In Markdown."""
        return "; ".join(filter(None, (", ".join(f"`{each}`" for each in self.commands), self.note)))


@contextmanager
def fault_of(path: Path) -> Iterator[None]:
    """One line with the file's name for what is not in it, or is not what its program writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise SystemExit(f"{path}: not a file of results: {type(error).__name__}: {error}") from error


def read_document(path: Path) -> dict[str, Any]:
    """What a file holds; a file of lines says nothing of itself. ValueError for what is none of results."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\d_\w+", path.stem):
        raise ValueError("its name is not DATE_WORDS")
    document = json.loads(path.read_text(), parse_constant=_refuse) if path.suffix == ".json" else {}
    if not isinstance(document, dict):
        raise ValueError("not an object of JSON")
    return document


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no figure")


def read_source(path: Path, document: Mapping[str, Any]) -> Source:
    """What the file says of itself; files differ in where they say it."""
    environment, name = document.get("environment", {}), path.stem
    told = json.dumps([environment, *(document.get(name) for name in ("device", "machine", "source"))])
    machine = "H200" if "H200" in told or "_h200" in name else "CPU"
    commit = str(environment.get("commit") or document.get("commit") or COMMITS.get(name, "not recorded"))
    commit = commit[:7] if len(commit) == 40 else commit
    dirty, load = "+" if environment.get("dirty") else "", document.get("load_before") or 0.0
    return Source(
        path.name,
        path.name[:10],
        commit + dirty,
        machine,
        COMMANDS[name] if name in COMMANDS else (command_in(document) or program_of(path, machine),),
        document.get("hotloop_native"),
        "" if machine == "H200" else generation_of(name, document.get("cpu_family")),
        max(map(float, load.values() if isinstance(load, dict) else [load])) <= QUIET,
        NOTES.get(name, ""),
    )


def command_in(document: Mapping[str, Any]) -> str:
    """As a file tells it: in words, or, of `hotloop bench peers`, word by word with the options apart."""
    said = document.get("command", "")
    return said if isinstance(said, str) else shlex.join([*said, *document.get("options", [])])


def generation_of(name: str, family: int | None) -> str:
    if family is not None:
        return GENERATIONS.get(family, f"family {family}")
    return GENERATIONS[26 if "zen5" in name or name in ZEN5 else 25]


def program_of(path: Path, machine: str) -> str:
    """The program that a file's name begins with, or the one that compares its family with peers."""
    here, words = Path(__file__).parent, path.stem[11:].split("_")
    for name in (*("_".join(words[:count]) for count in range(len(words), 0, -1)), family_of(path)):
        for place in (f"peers/{name}.py", f"{name}_peers.py", f"{name}.py"):
            if (here / place).is_file():
                chosen = machine == "H200" and '"--device"' in (here / place).read_text()
                return f"python benchmarks/{place}" + (" --device gpu" if chosen else "")
    return "not recorded"


def what_is_newer(file: str, case: str) -> str:
    """Of a row that the program has overtaken since; empty for any other."""
    return next(
        (note for name, cases, note in OUTDATED if re.match(name, file) and re.search(cases, case)), ""
    )


def age(source: Source) -> tuple[str, bool, bool, str]:
    """To sort by: of files of one day, those of a quiet machine count as newer than others."""
    return source.date, source.is_quiet, source.file in LATER, source.file


def family_of(path: Path) -> str:
    """By the file's name; LSTMs and the persistent recurrences are kernels."""
    word = path.stem.split("_")[1]
    return {"lstm": "kernels", "persistent": "kernels", "speedrun": "cnn"}.get(word, word)
