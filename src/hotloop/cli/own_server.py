"""A model that is exported and served for one command alone, by children that end with it however it ends."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hotloop.engine.interrupt import before_leaving
from hotloop.engine.launched_process import OrphanGuard, read_last_lines
from hotloop.errors import HotloopError
from hotloop.sweeps.children import ChildProcesses

END_SECONDS = 40.0  # a little longer than the server's own grace
LOOK = 0.02  # seconds between two looks at whether it is ready
HOTLOOP = (sys.executable, "-m", "hotloop")


@dataclass(frozen=True)
class OwnModels:
    """A folder for models, and the processes that write it and answer from it."""

    place: Path
    children: ChildProcesses

    def export(self, words: Sequence[str]) -> dict[str, Any]:
        """What `hotloop export` says of the model that these words name; HotloopError where it cannot be."""
        out, errors = self.place / ".export.out", self.place / ".export.err"
        command = [*HOTLOOP, "export", "--json", "-o", str(self.place / "models"), *words]
        with out.open("wb") as for_result, errors.open("wb") as for_lines:
            child = self.children.start(command, os.environ, for_result, for_lines)
            status = child.wait()
            self.children.forget(child)
        lines = out.read_text(errors="replace").splitlines()
        result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if status:
            said = result.get("error") or " ".join(read_last_lines([errors], 1)) or f"status {status}"
            raise HotloopError(f"hotloop export: {said}")
        return result

    def serve(self, words: Sequence[str]) -> str:
        """The address of a server of these models, of its gRPC where it has that, once it is ready.

        HotloopError where it ends before, with the last line that it said.
        """
        out, errors = self.place / ".serve.out", self.place / ".serve.err"
        command = [*HOTLOOP, "serve", str(self.place / "models"), *words]
        # Files: a pipe that nobody reads would hold up a server with much to say.
        with out.open("wb") as for_address, errors.open("wb") as for_lines:
            served = self.children.start(command, os.environ, for_address, for_lines)
        is_alive = True
        while is_alive:
            is_alive = served.poll() is None  # before what it said is read: its last words count
            if address := find_address(out.read_text(errors="replace")):
                return address
            time.sleep(LOOK)
        last = " ".join(read_last_lines([errors], 1)) or "without a word"
        raise HotloopError(f"hotloop serve ended before it was ready: {last}")


def find_address(said: str) -> str | None:
    """Where a server is, by the lines that it prints; None as long as it is not ready."""
    grpc = ready = None
    for words in map(str.split, said.splitlines()):
        if words[:3] == ["listening", "for", "gRPC"]:
            grpc = words[-1]
        if words[:1] == ["ready:"]:
            ready = words[1]
    return ready and (grpc or ready)


@contextmanager
def own_models() -> Iterator[OwnModels]:
    """An empty folder and no process yet; both are gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="hotloop-request-") as place,
        OrphanGuard(place) as guard,
    ):
        children = ChildProcesses(guard)
        with before_leaving(partial(children.stop, grace=0)):
            try:
                yield OwnModels(Path(place), children)
            finally:
                children.stop(END_SECONDS)
