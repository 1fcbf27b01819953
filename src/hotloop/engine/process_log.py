"""Where the lines of a process go that is not the one to speak: a file of its own, shown when it fails.

Until the run's folder is known that is `<HOTLOOP_NOTES>/<i>.log`, or nowhere but in memory; from then on
`<run folder>/processes/<i>.log`. Descriptors are replaced, not streams, so that it takes what C++ prints as well.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "processes"
_log: int | None = None
"""The file that standard output and error go to; None: they are as they were."""


def divert(index: int) -> None:
    """From now on nothing that this process prints reaches the terminal."""
    global _log
    notes = os.environ.get("HOTLOOP_NOTES")
    if notes:
        _log = os.open(Path(notes) / f"{index}.log", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    else:
        _log, path = tempfile.mkstemp(prefix="hotloop-")
        Path(path).unlink()
    _print_to(_log)


def move_to(folder: Path, index: int) -> None:
    """What was printed so far, and all that comes, in the run's folder, if it can be written."""
    global _log
    if _log is None:
        return
    with suppress(OSError):  # a run that its process cannot log is still a run
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        target = os.open(folder / FOLDER / f"{index}.log", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        _flush()
        before = os.pread(_log, os.fstat(_log).st_size, 0)
        _print_to(target)
        os.write(target, before)
        os.close(_log)
        _log = target


def keep_for_python() -> None:
    """Leave standard output to Python: gloo prints a line about each of its connections there."""
    _flush()
    kept = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(kept, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _print_to(descriptor: int) -> None:
    _flush()
    for standard in (1, 2):
        os.dup2(descriptor, standard)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
