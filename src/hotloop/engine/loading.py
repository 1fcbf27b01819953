"""Data that several processes need alike: loaded first by one process of each machine, while the others wait, and then
compared.

What the first has fetched the others find in its place. What it had to draw, since nothing could be fetched, goes to
them by a file, so that nobody tries once more and gets something else. It knows no data set: one is a dataclass of
arrays, texts and numbers, or of others like it.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, get_type_hints

import numpy as np

from hotloop.engine import processes
from hotloop.errors import DataError


class Loaded(Protocol):
    """A set that says whether it was drawn because the real one is not to be had."""

    @property
    def name(self) -> str: ...
    @property
    def stand_in(self) -> bool: ...


Set = TypeVar("Set", bound=Loaded)


def load_once(loading: Callable[[], Set], kind: type[Set]) -> Set:
    """The set of this kind that `loading` gives, in every process; DataError in all of them where one has another set
    than process 0."""
    if processes.count() == 1:
        return loading()
    with TemporaryDirectory(prefix="hotloop-") as folder:

        def tell(data: Set) -> str | None:
            if not data.stand_in:
                return None
            path = Path(folder) / "stand-in.npz"
            write_arrays(data, path)
            return str(path)

        def take(path: str | None) -> Set | None:
            return read_arrays(kind, Path(path)) if path else None

        data = processes.once_a_host(loading, tell, take)
        # Where all have come before the folder goes. Paths may be each machine's own.
        sizes = {name: list(array.shape) for name, array in _arrays(data) if array.ndim}
        check_same_data(set=data.name, source="a stand-in" if data.stand_in else "its files", **sizes)
    return data


def check_same_data(**facts: Any) -> None:
    """DataError in every process where one has other facts (texts, sizes) about its data than process 0."""
    if processes.count() == 1:
        return
    found = processes.gathered([platform.node(), facts])
    for number, (host, theirs) in enumerate(found):
        differing = [name for name, value in found[0][1].items() if theirs.get(name) != value]
        if differing:
            name = differing[0]
            raise DataError(
                f"process {number} on {host} has other data than process 0: {name} {theirs.get(name)} in place of "
                f"{found[0][1][name]}; give all machines the same files"
            )


def write_arrays(data: Any, path: Path) -> None:
    """Keep a dataclass in one file (.npz), from which `read_arrays` makes it again."""
    np.savez(path, allow_pickle=False, **dict(_arrays(data)))


def read_arrays(kind: type[Set], path: Path) -> Set:
    """What `write_arrays` wrote of a dataclass of this kind."""
    with np.load(path, allow_pickle=False) as kept:
        made: Set = _make(kind, kept)
    return made


def _arrays(data: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every value by its name (`train.images`); a text or a number is an array without dimensions, None is left out."""
    for each in fields(data):
        value = getattr(data, each.name)
        if is_dataclass(value):
            yield from _arrays(value, f"{prefix}{each.name}.")
        elif value is not None:
            yield f"{prefix}{each.name}", np.asarray(value)


def _make(kind: type[Any], kept: Mapping[str, np.ndarray[Any, Any]], prefix: str = "") -> Any:
    hints, values = get_type_hints(kind), dict[str, Any]()
    for each in fields(kind):
        name, hint = f"{prefix}{each.name}", hints[each.name]
        if is_dataclass(hint) and isinstance(hint, type):
            values[each.name] = _make(hint, kept, f"{name}.")
        elif name in kept:
            array = kept[name]
            values[each.name] = array if array.ndim else array.item()
    return kind(**values)
