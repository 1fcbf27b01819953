"""Whose steps are whose, where several runs save in one folder: told by the family and config in their manifests.

What another run saved is neither found nor ever replaced: where it has the number of a step that is to be saved, ours
bears the run's mark in its name. It reads manifests and holds a lock, and changes nothing.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hotloop.engine import manifest as manifests
from hotloop.engine import shelf
from hotloop.engine.manifest import Damaged, Manifest


@dataclass(frozen=True)
class Steps:
    """The steps in a folder that are ours: all of them, unless it is `shared`."""

    folder: Path
    family: str
    config: str
    shared: bool

    def complete(self) -> dict[int, Manifest]:
        """Our steps that are whole, by a quick look."""
        found = {}
        for step, folder in self.numbered().items():
            with suppress(Damaged):
                found[step] = shelf.whole(folder, step)
        return found

    def numbered(self) -> dict[int, Path]:
        """What is named like a step, except whatever says that another run made it."""
        found = shelf.numbered(self.folder, self.config if self.shared else "")
        return {step: path for step, path in found.items() if not self._is_anothers(path)}

    def put_in_place(self, written: Path, step: int) -> None:
        """Make a written step visible, beside one of that number that another run may have."""
        with _in_turn(self.folder):
            taken = shelf.numbered(self.folder).get(step)
            mark = f"-{self.config}" if taken and self._is_anothers(taken) else ""
            shelf.put_in_place(written, self.folder / f"{step:08d}{mark}")

    def _is_ours(self, found: Manifest) -> bool:
        return not self.shared or (found.family, found.config) == (self.family, self.config)

    def _is_anothers(self, folder: Path) -> bool:
        try:
            return self.shared and not self._is_ours(manifests.read(folder))
        except Damaged:  # nobody knows whose it was: a reader names it, a writer sets it aside
            return False


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is about to put a step into the folder; the lock of a dead one is gone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
