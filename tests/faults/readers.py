"""Every reader and parser of the package, one line each: its name, seeds that it reads, and how it is called.

A reader is handed a folder of its own and bytes; whatever it raises must be an error for the user. A new reader is a
line in one of the modules `readers_of_...`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[Path, bytes], object]


@dataclass(frozen=True)
class Reader:
    """Seeds, and the function that reads what becomes of them; `also` are errors that it may raise for its callers."""

    name: str
    seeds: list[bytes]
    read: Read
    also: tuple[type[Exception], ...] = ()
    lines: bool = False
    """Whether its message may have several lines: a problem each."""


def in_file(name: str, read: Callable[[Path], object]) -> Read:
    """A reader of a file of this name."""

    def reading(folder: Path, data: bytes) -> object:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        return read(folder / name)

    return reading


def of_text(read: Callable[[str], object]) -> Read:
    """A reader of text, as a command line or a variable has it."""
    return lambda _, data: read(os.fsdecode(data.replace(b"\0", b"")))


def in_folder(name: str, read: Callable[[Path], object]) -> Read:
    """A reader of a folder with a file of this name."""
    return in_file(name, lambda file: read(file.parent))


def table() -> list[Reader]:
    """All of them."""
    from readers_of_benchmarks import of_benchmarks
    from readers_of_data import of_data
    from readers_of_options import of_options
    from readers_of_runs import of_runs

    return [*of_options(), *of_benchmarks(), *of_data(), *of_runs()]
