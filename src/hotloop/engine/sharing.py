"""Whose steps are whose, where several runs save in one folder: told by the family and config in their manifests.

What another run saved is neither found nor ever replaced. It reads manifests and holds a lock, and changes nothing.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hotloop.engine import manifest as manifests
from hotloop.engine import shelf
from hotloop.engine.manifest import Damaged, Manifest
from hotloop.errors import CheckpointError


@dataclass(frozen=True)
class Steps:
    """The steps in a folder that are ours: all of them, unless it is `shared`."""

    folder: Path
    family: str
    config: str
    shared: bool

    def complete(self) -> dict[int, Manifest]:
        """Our steps that are whole, by a quick look."""
        return {n: found for n, found in shelf.complete(self.folder).items() if self._is_ours(found)}

    def numbered(self) -> dict[int, Path]:
        """What is named like a step, except whatever says that another run made it."""
        return {n: path for n, path in shelf.numbered(self.folder).items() if not self._is_anothers(path)}

    def put_in_place(self, written: Path, step: int) -> None:
        """Make a written step visible; CheckpointError where another run has one of that number."""
        with _in_turn(self.folder):
            taken = shelf.numbered(self.folder).get(step)
            if taken and self._is_anothers(taken):
                raise CheckpointError("another run saved a step of that number there, and it stays")
            shelf.put_in_place(written, self.folder, step)

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
